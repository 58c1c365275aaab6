"""One run directory: what was asked for (config.yaml), with what (versions.json), and what came out (metrics.jsonl).

metrics.jsonl is the record: one JSON object a line, appended and flushed to disk; W&B only mirrors it.
"""

import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from crt_exp.config import ConfigError

FREE_KEYS = ("resume", "logger")  # may differ between a run and its continuation


class Run:
    """A run in `directory`. Use as a context manager: a run that fails before its first record leaves nothing behind.

    Attributes: `records`, the lines already there when an earlier run is continued (else empty).
    """

    def __init__(self, cfg: DictConfig, directory: str | Path):
        self.directory = Path(directory)
        self.metrics = self.directory / "metrics.jsonl"
        self.existed = self._refuse_used(cfg)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.records = read_records(self.metrics)
        self.started = time.monotonic() - (self.records[-1].get("time_s", 0.0) if self.records else 0.0)
        write_atomic(self.directory / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_atomic(self.directory / "versions.json", json.dumps(versions(cfg.seed), indent=1) + "\n")
        seed_everything(cfg.seed)
        self.mirror = None
        self.cfg = cfg

    def _refuse_used(self, cfg: DictConfig) -> bool:
        """True if an earlier run lies there and may be continued."""
        if not self.directory.is_dir() or not any(self.directory.iterdir()):
            return False
        if cfg.resume != "auto":
            raise ConfigError(f"{self.directory} is not empty: add resume=auto to continue what lies there, or choose another "
                              "hydra.run.dir")
        old = self.directory / "config.yaml"
        if not old.is_file():
            raise ConfigError(f"{self.directory} holds files but no config.yaml: it is no run of crt_exp; choose another "
                              "hydra.run.dir")
        changed = [key for key in differences(OmegaConf.load(old), cfg) if key.split(".")[0] not in FREE_KEYS]
        if changed:
            raise ConfigError(f"{self.directory} was run with another configuration; these keys differ: {', '.join(changed)}")
        return True

    def __enter__(self) -> "Run":
        from hydra.utils import instantiate

        self.mirror = instantiate(self.cfg.logger)
        self.mirror.start(self.directory, OmegaConf.to_container(self.cfg, resolve=True))
        return self

    def log(self, **record: Any) -> None:
        """Appends a line: step, epoch, split and metrics as fractions; time_s is added."""
        record["time_s"] = round(time.monotonic() - self.started, 3)
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.mirror.log(record)

    def __exit__(self, kind, error, trace) -> None:
        if self.mirror is not None:
            self.mirror.finish(failed=kind is not None)
        if kind is not None and not self.existed and not self.metrics.exists():
            shutil.rmtree(self.directory, ignore_errors=True)


def read_records(path: Path) -> list[dict]:
    """The complete lines of a metrics.jsonl; a last line cut off by a crash is removed from the file."""
    if not path.is_file():
        return []
    whole = path.read_bytes()
    kept = whole[:whole.rfind(b"\n") + 1]
    if kept != whole:
        write_atomic(path, kept.decode())
    return [json.loads(line) for line in kept.decode().splitlines()]


def write_atomic(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def differences(old: DictConfig, new: DictConfig) -> list[str]:
    """Dotted names of the leaves that differ."""
    a, b = ({k: v for k, v in _leaves(OmegaConf.to_container(c, resolve=True))} for c in (old, new))
    return sorted(k for k in a.keys() | b.keys() if a.get(k, ...) != b.get(k, ...))


def _leaves(node: Any, prefix: str = ""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def versions(seed: int) -> dict[str, Any]:
    names = ("crt_exp", "torch", "numpy", "scipy", "scikit-learn", "hydra-core", "transformers", "datasets", "timm")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {"command": command(), "seed": seed, "commit": commit(), "python": platform.python_version(),
            "machine": machine(), "packages": found}


def command() -> str:
    """What was typed, with `python -m` in place of the path of a module's __main__."""
    name = "python -m crt_exp" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return " ".join([name, *sys.argv[1:]])


def machine() -> str:
    """Processor, cores and system, such as '2 cores of x86_64, Linux'."""
    return f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}"


def commit() -> str | None:
    """The checked-out commit, with '+changes' where the tree differs from it; None outside a checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    git = lambda *args: subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True).stdout.strip()
    return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class NoMirror:
    """logger=none: metrics.jsonl alone."""

    def start(self, directory: Path, config: dict) -> None: ...

    def log(self, record: dict) -> None: ...

    def finish(self, failed: bool) -> None: ...


class WandbMirror:
    """logger=wandb: mirrors every record to Weights & Biases; offline where no key is set. A continued run keeps its id."""

    def __init__(self, project: str, mode: str | None = None):
        self.project, self.mode = project, mode

    def start(self, directory: Path, config: dict) -> None:
        import wandb

        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        known = directory / "wandb_id"
        self.run = wandb.init(project=self.project, mode=mode, dir=str(directory), config=config, resume="allow",
                              id=known.read_text().strip() if known.is_file() else None,
                              settings=wandb.Settings(silent=True, console="off", x_disable_stats=True))
        write_atomic(known, self.run.id + "\n")

    def log(self, record: dict) -> None:
        split = record.get("split", "")
        self.run.log({f"{split}/{key}" if key not in ("step", "epoch") else key: value
                      for key, value in record.items() if isinstance(value, (int, float)) and key != "final"})

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
