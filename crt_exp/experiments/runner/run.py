"""The run directory: config.yaml, versions.json, inputs.json and metrics.jsonl.

metrics.jsonl is the record of the run: one JSON object per line, flushed to disk. Loggers only copy it.
"""

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

import crt_exp
from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.runner.configuration import overrides
from crt_exp.experiments.runner.loggers import Logger
from crt_exp.registry import (
    ConfigError,
    construct,
    differences,
    import_object,
    json_object,
    leaves,
    present_path,
    read_json,
    read_yaml,
)
from crt_exp.validation import files_named, parameters

# prefixes of keys (with a trailing dot) that may differ between a run and its continuation
FREE_KEYS = (
    "resume.",
    "logger.",
    "trainer.prefetch.",
    "trainer.keep.",
    "trainer.cpu.",
    "trainer.save_minutes.",
    "task.cache_dir.",
    "task.workers.",
    # keys that only runs of earlier versions have
    "sweep.",
    "task.predictions.",
)
PARTIAL = "evaluated_batches"  # key in records of evaluations limited by trainer.evaluate
# files of the run directory
LOCK = ".lock"
CONFIG = "config.yaml"
INPUTS = "inputs.json"
METRICS = "metrics.jsonl"
VERSIONS = "versions.json"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}  # of file systems without locks
STARTED = "CRT_EXP_STARTED"  # environment variable: start time in the name of the run directory, for all processes


@dataclass
class RunDirectory:
    """A run in `directory`; a context manager.

    A run that fails before its first record is removed. Only the process with `main` reads and writes; `records` is
    empty on other processes. The directory is locked, so that a second run there is refused. A continued run needs
    equal configuration and input files.

    Attributes:
        records: Lines of metrics.jsonl, including those of a continued run.

    Raises:
        ConfigError: On entry, if the directory is in use or does not match the configuration.
    """

    config: dict[str, Any]
    task: Any
    directory: Path
    main: bool = True
    existed: bool = True
    records: list[dict[str, Any]] = field(default_factory=list)
    logger: Logger | None = None

    def __enter__(self) -> "RunDirectory":
        if self.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.directory / LOCK, blocking=False)
            try:
                self.lock.acquire()
            except Timeout:
                raise ConfigError(
                    f"hydra.run.dir={self.directory}: in use by another run"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:  # as some network disks
                    raise
                print(
                    f"hydra.run.dir={self.directory}: not locked ({error.strerror}); start no second run in it",
                    file=sys.stderr,
                )
            try:
                self._open()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        self.started = time.monotonic()
        if self.records:
            self.started -= self.records[-1].get("time_s", 0.0)
        return self

    def _open(self) -> None:
        """Check and read the records of an earlier run, then write the files of this run."""
        # a run killed at its start leaves a .tmp file
        names = {path.name for path in self.directory.iterdir() if path.suffix != ".tmp"}
        self.existed = not names <= {LOCK}
        if self.existed:
            self._check_continuation()
        path = self.directory / INPUTS
        inputs = input_states(self.config["task"], self.task.inputs())
        if INPUTS in names:
            changed = differences(json_object(path), inputs)
            if changed:
                raise ConfigError(
                    f"{', '.join(changed)}: files changed since {self.directory} began; restore them, or "
                    f"delete {path} if only their times differ"
                )
        self.records = read_records(self.directory / METRICS)
        write_atomic(self.directory / CONFIG, OmegaConf.to_yaml(self.config))
        write_atomic(path, inputs)
        write_atomic(self.directory / VERSIONS, versions(self.config["seed"]))
        logger = construct(self.config["logger"])
        logger.begin_run(self.directory, self.config)
        self.logger = logger  # is finished only if it began

    def _check_continuation(self) -> None:
        """Raise ConfigError if the configuration does not continue the earlier run."""
        if self.config["resume"] != "auto":
            raise ConfigError(
                f"hydra.run.dir={self.directory}: not empty; set resume=auto, or use another folder"
            )
        # interpolations in the saved file are not resolved
        old = dict(leaves(read_yaml(self.directory / CONFIG)))
        for key in old:
            if key.endswith("._target_"):
                old[key] = present_path(old[key])
        changed = []
        for key, change in differences(old, self.config).items():
            if not f"{key}.".startswith(FREE_KEYS):
                changed.append(change)
        if changed:
            raise ConfigError(
                f"hydra.run.dir={self.directory}: these keys differ: {', '.join(changed)}"
            )

    def log(self, **record: Any) -> None:
        """Append a record: step, epoch, split and metrics; adds time_s."""
        if not self.main:
            return
        record["time_s"] = round(time.monotonic() - self.started, 3)
        with (self.directory / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        self.logger.log_record(record)

    def rewind(self, count: int) -> None:
        """Keep only the first `count` records, up to the checkpoint to continue from."""
        if count < len(self.records):
            del self.records[count:]
            lines = [json.dumps(record) + "\n" for record in self.records]
            write_atomic(self.directory / METRICS, "".join(lines))

    def __exit__(self, kind, error, trace) -> None:
        if not self.main:
            return
        try:
            if self.logger is not None:
                self.logger.finish_run(failed=kind is not None)
            if kind and not self.existed:
                with suppress(OSError):  # a folder that cannot be read stays
                    if names_in(self.directory).isdisjoint((METRICS, "checkpoints")):
                        shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            (self.directory / LOCK).unlink(missing_ok=True)
            self.lock.release()


# ---- files


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder; empty if there is no such folder.

    Raises OSError if the folder cannot be read, so that this does not look like an empty folder.
    """
    try:
        return {*os.listdir(folder)}
    except FileNotFoundError:
        return set()


def read_records(path: Path) -> list[dict]:
    """Read metrics.jsonl; an incomplete last line is removed.

    Raises ConfigError for lines that are not JSON, and OSError if the file cannot be read.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = [read_json(line.decode(errors="replace"), path, i) for i, line in enumerate(lines, 1)]
    if rest:
        write_atomic(path, b"".join(line + b"\n" for line in lines))
    return records


def is_finished(records: list[dict]) -> bool:
    """Return whether nothing is left to run."""
    return bool(records and records[-1].get("final"))


def saved_overrides(directory: Path) -> dict[str, str]:
    """Return the overrides of a run by key. Raises ConfigError."""
    values = {}
    for text in json_object(directory / VERSIONS)["overrides"]:
        key, _, value = text.lstrip("+~").partition("=")
        values[key] = value
    return values


def write_atomic(path: Path, content: str | bytes | dict[str, Any]) -> None:
    """Write a file atomically, so that readers see the old or the new content; a dictionary as JSON."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=1) + "\n"
    if isinstance(content, str):
        content = content.encode()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# ---- state that a run and its continuation share


def input_states(options: dict[str, Any], inputs: Iterable[Path | None]) -> dict[str, str]:
    """Return a digest of names, sizes and times of the input files, per option.

    A folder stands for the visible files below it. Includes the files of options that the class of the task declares as
    names of files (crt_exp.validation.Files), and `inputs`, those of the task itself (key "data").
    """
    places: list[tuple[str, str | Path]] = []
    if "_target_" in options:
        task_class = import_object(options["_target_"])
        for name, parameter in parameters(task_class).items():
            places += files_named(f"task.{name}", options.get(name), parameter.hint)
    for path in inputs:
        if path is not None:
            places.append(("data", path))
    states: dict[str, list[tuple[str, int, int]]] = {}
    for key, place in places:
        path = Path(place).expanduser()
        if os.path.isfile(path / CONFIG):  # a run: its logs and figures may change, not its weights
            path = path / "model" if (path / "model").is_dir() else path / "adapter"
        for file in path.rglob("*") if os.path.isdir(path) else [path]:
            if os.path.isfile(file) and not file.name.startswith("."):
                status = file.stat()
                states.setdefault(key, []).append((file.name, status.st_size, status.st_mtime_ns))
    digests = {}
    for key, files in states.items():
        digest = hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()
        digests[key] = f"{len(files)} files, {digest[:16]}"
    return digests


# ---- versions


def agree_on_start() -> None:
    """Share the first process's start time, so that all use one run directory."""
    from torch.distributed import rendezvous

    store, own, _ = next(iter(rendezvous("env://")))
    if own == 0:
        store.set(STARTED, f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    os.environ[STARTED] = store.get(STARTED).decode()


PACKAGES = [
    "crt_exp",
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "hydra-core",
    "transformers",
    "accelerate",
    "datasets",
    "timm",
]


def versions(seed: int) -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "command": " ".join(["python -m crt_exp", *sys.argv[1:]]),
        "overrides": overrides(),
        "seed": seed,
        "commit": commit(),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}",
        "packages": packages,
    }


GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def commit() -> str | None:
    """Return the commit, with "+changes" for a dirty tree.

    None outside a checkout, and if git is missing or refuses, as for a checkout of another user.
    """
    root = Path(crt_exp.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    options = "describe --always --abbrev=40 --exclude=* --dirty=+changes"
    command = ["git", "-C", str(root), *options.split()]
    # variables of a surrounding git command, such as a hook, name another repository
    own = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    try:
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, env=own)
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.strip() or None
