"""One run directory: what was asked for (config.yaml), with what (versions.json, inputs.json), and what came out.

metrics.jsonl is the record: one JSON object a line, flushed to disk; loggers only mirror it.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

import crt_exp
from crt_exp.atomic_write import whole
from crt_exp.config import ConfigError, instantiate, read_json, read_yaml
from crt_exp.data import world_size
from crt_exp.runner.configuration import overrides

# beginnings of keys, with a dot at the end, that may differ between a run and its continuation
FREE_KEYS = ("resume.", "logger.", "trainer.prefetch.", "trainer.keep.", "trainer.cpu.", "trainer.save_minutes.",
             "task.cache_dir.", "task.workers.")
PARTIAL = "evaluated_batches"  # in records of evaluations that trainer.evaluate has cut short
LOCK, INPUTS = ".lock", "inputs.json"  # within the run directory
STARTED = "CRT_EXP_STARTED"  # the time in the name of the run directory, one for all processes


class Run:
    """A run in `directory`. Use as a context manager: a run that fails before its first record leaves nothing behind.

    Only the process with `main` reads and writes; the `records` of others stay empty. It locks the directory: a second
    run there is refused. A run that continues needs the configuration and the input files that it began with. Raises
    ConfigError.

    Attributes: `records`, the lines of metrics.jsonl: those of the continued run, then those of this one.
    """

    def __init__(self, cfg: DictConfig, task: Any, directory: str | Path, main: bool = True):
        self.cfg, self.task, self.directory, self.main = cfg, task, Path(directory), main
        self.metrics, self.lock = self.directory / "metrics.jsonl", FileLock(self.directory / LOCK, blocking=False)
        self.existed, self.records, self.logger = True, [], None

    def __enter__(self) -> "Run":
        if self.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire()
                self._open()
            except Timeout:
                raise ConfigError(f"hydra.run.dir={self.directory}: in use by another run; choose another") from None
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        self.started = time.monotonic() - (self.records[-1].get("time_s", 0.0) if self.records else 0.0)
        return self

    def _open(self) -> None:
        """Read what an earlier run left, and write what this one is."""
        self.existed = self._continues()
        config, path = OmegaConf.to_container(self.cfg, resolve=True), self.directory / INPUTS
        inputs = input_states(config["task"], self.task)
        before = read_json(path.read_text(encoding="utf-8"), path) if self.existed and path.is_file() else inputs
        if changed := [key for key in sorted({*before, *inputs}) if before.get(key) != inputs.get(key)]:
            raise ConfigError(f"{', '.join(changed)}: files have changed since {self.directory} began; expected the "
                              f"same ones; delete {path} where only their times differ")
        self.records = read_records(self.metrics)
        write_atomic(self.directory / "config.yaml", OmegaConf.to_yaml(self.cfg, resolve=True))
        write_atomic(path, json.dumps(inputs, indent=1) + "\n")
        write_atomic(self.directory / "versions.json", json.dumps(versions(self.cfg.seed), indent=1) + "\n")
        logger = instantiate(self.cfg.logger)
        logger.start(self.directory, config)
        self.logger = logger

    def _continues(self) -> bool:
        """True if an earlier run lies there and may be continued."""
        if all(path.suffix == ".tmp" or path.name == LOCK for path in self.directory.iterdir()):
            return False  # a run killed in its first moments leaves a .tmp
        if self.cfg.resume != "auto":
            raise ConfigError(f"hydra.run.dir={self.directory}: not empty; add resume=auto, or choose another")
        # what was absent and is null is the same; nothing that a file names is resolved
        old = dict(leaves(read_yaml(self.directory / "config.yaml")))
        new = dict(leaves(OmegaConf.to_container(self.cfg, resolve=True)))
        if changed := [f"{key} (it was {old.get(key, 'absent')}, now {new.get(key, 'absent')})"
                       for key in sorted(old.keys() | new.keys())
                       if old.get(key) != new.get(key) and not f"{key}.".startswith(FREE_KEYS)]:
            raise ConfigError(f"hydra.run.dir={self.directory}: these keys differ: {', '.join(changed)}")
        return True

    def log(self, **record: Any) -> None:
        """Append a line: step, epoch, split and metrics as fractions; time_s is added."""
        if not self.main:
            return
        record["time_s"] = round(time.monotonic() - self.started, 3)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        self.logger.log(record)

    def rewind(self, count: int) -> None:
        """Take back all but the first `count` records: those after the checkpoint that is continued."""
        if count < len(self.records):
            del self.records[count:]
            write_atomic(self.metrics, "".join(json.dumps(record) + "\n" for record in self.records))

    def __exit__(self, kind, error, trace) -> None:
        if not self.main:
            return
        try:
            if self.logger is not None:
                self.logger.finish(failed=kind is not None)
            if kind and not (self.existed or self.metrics.exists() or (self.directory / "checkpoints").exists()):
                shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            (self.directory / LOCK).unlink(missing_ok=True)
            self.lock.release()


# ---- files


def read_records(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl; a last line cut off by a crash is removed from the file. Raises ConfigError."""
    if not path.is_file():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    records = [read_json(line.decode(errors="replace"), path, i) for i, line in enumerate(lines, 1)]
    if rest:
        write_atomic(path, b"".join(line + b"\n" for line in lines))
    return records


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    with whole(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


# ---- what a run and its continuation must share


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def input_states(options: dict[str, Any], task: Any) -> dict[str, str]:
    """What `ls -l` shows of the files that each option of a task names, and of the task's own (`data`), as a digest."""
    places = [(f"task.{key}", text) for key, value in leaves(options) if key not in ("cache_dir", "data_dir")
              for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    places += [("data", path) for path in getattr(task, "inputs", tuple)() if path is not None]
    found: dict[str, list[tuple[str, int, int]]] = {}
    for key, place in places:
        path = Path(place).expanduser()
        if os.path.isfile(path / "config.yaml"):  # a run: its log and figures may change
            path = path / "model" if (path / "model").is_dir() else path / "adapter"
        for file in path.rglob("*") if os.path.isdir(path) else [path]:
            if os.path.isfile(file) and not file.name.startswith("."):
                status = file.stat()
                found.setdefault(key, []).append((file.name, status.st_size, status.st_mtime_ns))
    return {key: f"{len(files)} files, {hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()[:16]}"
            for key, files in found.items()}


# ---- what a run was made with


def agree_on_start() -> None:
    """Give all processes the clock of the first one, so that a time-stamped run directory has one name."""
    if world_size() > 1:
        from torch.distributed import rendezvous

        store, own, _ = next(iter(rendezvous("env://")))
        if own == 0:
            store.set(STARTED, f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
        os.environ[STARTED] = store.get(STARTED).decode()


def versions(seed: int) -> dict[str, Any]:
    packages = {}
    for name in ("crt_exp", "torch", "numpy", "scipy", "scikit-learn", "hydra-core", "transformers", "accelerate",
                 "datasets", "timm"):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {"command": " ".join(["python -m crt_exp", *sys.argv[1:]]), "overrides": overrides(), "seed": seed,
            "commit": commit(), "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}", "packages": packages}


def commit() -> str | None:
    """The checked-out commit, with '+changes' where the tree differs from it; None outside a checkout."""
    root = Path(crt_exp.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
