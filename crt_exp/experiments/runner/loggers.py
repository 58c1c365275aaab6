"""Loggers: Weights & Biases, and curves.png."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from crt_exp.experiments.runner.configuration import directory_override, is_sweep
from crt_exp.registry import ConfigError

CURVES = "curves.png"


class Logger:
    """A copy of the records of a run; logger=none copies nothing."""

    def begin_run(self, directory: Path, config: dict) -> None:
        """Begin or continue the run in `directory`."""

    def log_record(self, record: dict) -> None:
        """Copy one record of metrics.jsonl."""

    def finish_run(self, failed: bool) -> None:
        """End the run."""


@dataclass
class WandbLogger(Logger):
    """logger=wandb: copy records to Weights & Biases; continued runs keep their id.

    Args:
        mode: Default: that of wandb, else online if a key is stored, else offline.
        group: Default: WANDB_RUN_GROUP, else the name of the sweep directory.
    """

    project: str
    mode: Literal["online", "offline", "disabled"] | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    job_type: str | None = None
    tags: Sequence[str] | None = None

    def begin_run(self, directory: Path, config: dict) -> None:
        import wandb

        options = asdict(self)
        number = None
        known = directory / "wandb_id"
        with suppress(FileNotFoundError):
            number = known.read_text().strip()
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        sweep = directory_override()[1].name if is_sweep() else None
        options["group"] = self.group or settings.run_group or sweep
        if self.mode is None and "mode" not in settings.model_fields_set:
            online = wandb.login(prompt=False, verify=False)
            options["mode"] = "online" if online else "offline"
        try:
            self.run = wandb.init(
                **options,
                dir=str(directory),
                config=config,
                resume="allow",
                id=number,
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"logger=wandb: {str(error).splitlines()[0]}; logger=none runs without it"
            ) from None
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        known.write_text(self.run.id + "\n")

    def log_record(self, record: dict) -> None:
        split = record.get("split", "")
        values = {}
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "final":
                name = key if key in ("step", "epoch") else f"{split}/{key}"
                values[name] = value
        self.run.log(values)

    def finish_run(self, failed: bool) -> None:
        """Finish the run; after a success, print how to upload an offline run."""
        self.run.finish(exit_code=int(failed))
        if self.run.offline and not failed:
            print(
                f"W&B run saved offline; upload with `wandb sync {Path(self.run.dir).parent}`",
                file=sys.stderr,
            )


def draw_curves(records: list[dict[str, Any]], metric: str, directory: Path) -> None:
    """Draw curves.png: training loss and validation metric by step.

    Draws nothing if both have fewer than two records.
    """
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from crt_exp.experiments.drawing import save_figure

    columns = dict.fromkeys(
        ["step", "split", "final", "loss", metric]
    )  # the metric may be the loss
    frame = DataFrame(records, columns=[*columns])
    train = frame["split"] == "train"
    curves = {
        "training loss": frame[train].set_index("step")["loss"],
        f"validation {metric}": frame[~train & frame["final"].isna()].set_index("step")[metric],
    }
    if max(curve.count() for curve in curves.values()) < 2:
        return
    figure = Figure((8, 3.2), layout="constrained")
    for ax, (title, curve) in zip(figure.subplots(1, 2), curves.items()):
        curve = curve.dropna().astype(float)
        ax.plot(curve.index, curve, marker="o", ms=3, lw=1)
        ax.set(title=title, xlabel="step")
    save_figure(figure, directory / CURVES)
