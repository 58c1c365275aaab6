"""Where the records of a run are shown besides its metrics.jsonl: nowhere, or at Weights & Biases."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from crt_exp.config import ConfigError
from crt_exp.runner.processes import sweep_name
from crt_exp.atomic_write import whole


class NoMirror:
    """logger=none: metrics.jsonl alone."""

    def start(self, directory: Path, config: dict) -> None: ...

    def log(self, record: dict) -> None: ...

    def pictures(self, files: list[Path]) -> None: ...

    def finish(self, failed: bool) -> None: ...


class WandbMirror:
    """logger=wandb: mirrors every record to Weights & Biases. A continued run keeps its id.

    mode: null is what wandb's own settings say (WANDB_MODE, its files), else online where they or a .netrc hold a key,
    as `wandb login` leaves it, else offline. group: null is WANDB_RUN_GROUP, else the name of the run's sweep.
    """

    def __init__(self, project: str, mode: Literal["online", "offline", "disabled"] | None = None,
                 entity: str | None = None, group: str | None = None, name: str | None = None,
                 job_type: str | None = None, tags: Sequence[str] | None = None):
        self.mode, self.logged = mode, False
        self.place = {"project": project, "entity": entity, "name": name, "job_type": job_type, "tags": tags,
                      "group": group or os.environ.get("WANDB_RUN_GROUP") or sweep_name()}

    def start(self, directory: Path, config: dict) -> None:
        if os.environ.get("WANDB_MODE") == "":
            del os.environ["WANDB_MODE"]  # wandb refuses an empty mode
        import wandb

        known = directory / "wandb_id"
        try:
            self.run = wandb.init(**self.place, mode=self.mode or default_mode(), dir=str(directory), config=config,
                                  resume="allow", id=known.read_text().strip() if known.is_file() else None,
                                  settings=wandb.Settings(silent=True, console="off", x_disable_stats=True))
        except wandb.Error as error:
            raise ConfigError(f"logger=wandb: {str(error).splitlines()[0]} (logger=none runs without it)") from None
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        with whole(known) as temporary:
            temporary.write_text(self.run.id + "\n")

    def log(self, record: dict) -> None:
        split, self.logged = record.get("split", ""), True
        self.run.log({f"{split}/{key}" if key not in ("step", "epoch") else key: value
                      for key, value in record.items() if isinstance(value, (int, float)) and key != "final"})

    def pictures(self, files: list[Path]) -> None:
        """Those that the run leaves."""
        import wandb

        if files:
            self.run.log({file.stem: wandb.Image(str(file)) for file in files})

    def finish(self, failed: bool) -> None:
        """Says how an offline run gets to the server, if it has something to send."""
        folder, offline = Path(self.run.dir).parent, self.run.offline
        self.run.finish(exit_code=int(failed))
        if offline and (self.logged or not failed):
            print(f"W&B keeps this run offline: `wandb sync {folder}` sends it", file=sys.stderr)


def default_mode() -> str | None:
    """None where wandb's own settings name a mode, which it then takes; else by whether it has a key."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if "mode" in settings.model_fields_set:
        return None
    return "online" if wandb.login(prompt=False, verify=False) else "offline"
