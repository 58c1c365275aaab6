"""Loggers: Weights & Biases, progress lines and curves.png."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from crt_exp.experiments.runner.configuration import directory_override, is_sweep
from crt_exp.registry import ConfigError

EVERY = 10.0  # seconds between lines of progress
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


@dataclass
class ProgressLine:
    """Prints step, loss, metric, samples/s and time left every EVERY seconds.

    Args:
        total: Steps of the run.
        at: Step of this process.
        batch: Samples of a step.
        shown: Whether this process prints.
    """

    total: int
    at: int
    batch: float
    shown: bool
    metric: str = ""

    def __post_init__(self):
        self.first = self.at
        self.began = self.last = time.monotonic()

    def step(self, loss: float) -> None:
        self.at += 1
        elapsed = time.monotonic() - self.began  # includes evaluations and checkpoints
        seconds = elapsed / (self.at - self.first)
        left = time.strftime("%H:%M:%S", time.gmtime(seconds * (self.total - self.at)))
        self._print(
            f"loss {loss:.4g}{self.metric}, {self.batch / seconds:.3g} samples/s, {left} left"
        )

    def evaluating(self, split: str, read: int) -> None:
        """Print the number of evaluated micro-batches."""
        self._print(f"evaluating {split}: {read} batches")

    def _print(self, text: str) -> None:
        if self.shown and time.monotonic() >= self.last + EVERY:
            self.last = time.monotonic()
            print(f"step {self.at} of {self.total}, {text}", file=sys.stderr, flush=True)


def draw_curves(records: list[dict[str, Any]], metric: str, directory: Path) -> None:
    """Draw curves.png: training loss and validation metric by step.

    Draws nothing if both have fewer than two records.
    """
    from matplotlib.figure import Figure

    from crt_exp.experiments.drawing import save_figure

    loss = []
    scores = []
    for record in records:
        if record["split"] == "train":
            loss.append((record["step"], record.get("loss")))
        elif not record.get("final"):
            scores.append((record["step"], record.get(metric)))
    loss = [point for point in loss if point[1] is not None]
    scores = [point for point in scores if point[1] is not None]
    if max(len(loss), len(scores)) < 2:
        return
    figure = Figure((8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*loss), lw=1)
    left.set(title="training loss", xlabel="step")
    right.plot(*zip(*scores), marker="o", ms=3, lw=1)
    right.set(title=f"validation {metric}", xlabel="step")
    save_figure(figure, directory / CURVES)
