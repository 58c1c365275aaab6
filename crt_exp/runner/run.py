"""One run directory: what was asked for (config.yaml), with what (versions.json), and what came out (metrics.jsonl).

metrics.jsonl is the record: one JSON object a line, appended and flushed to disk; W&B only mirrors it.
"""

import errno
import fcntl
import itertools
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import crt_exp
from crt_exp.config import ConfigError, instantiate, read_yaml
from crt_exp.runner.configuration import overrides
from crt_exp.runner.inputs import NAME as INPUTS
from crt_exp.runner.inputs import check_inputs
from crt_exp.runner.mirror import NoMirror
from crt_exp.runner.processes import SWEEP
from crt_exp.stored import read_json
from crt_exp.atomic_write import whole

# may differ between a run and its continuation
FREE_KEYS = ("resume", "logger", "trainer.processes", "trainer.prefetch", "trainer.keep",
             "trainer.cpu", "trainer.save_minutes", "task.cache_dir", "task.workers")
PARTIAL = "evaluated_batches"  # in records of evaluations that trainer.evaluate has cut short
LOG = "run.log"
LOCK = ".lock"  # within the run directory
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: set[tuple[int, int]] = set()  # files by device and inode: a record lock does not keep its own process out


class Run:
    """A run in `directory`. Use as a context manager: a run that fails before its first record leaves nothing behind.

    Of several processes only the one with `main` reads and writes; the others' `records` stay empty. It locks the
    directory, so that a second run in it is refused (ConfigError) while this one lives. A run that goes on must have
    the configuration and the inputs (runner/inputs.py) that it began with: ConfigError where it has others.

    Attributes: `records`, the lines of metrics.jsonl: those of the earlier run that is continued,
    then those of this one.
    """

    def __init__(self, cfg: DictConfig, task: Any, directory: str | Path, main: bool = True):
        self.directory, self.main, self.cfg, self.mirror = Path(directory), main, cfg, None
        self.metrics = self.directory / "metrics.jsonl"
        self.existed, self.records = True, []
        self.lock = Lock(self.directory) if main else None
        try:
            if main:
                self._open(cfg, task)
        except BaseException:
            self.lock.release()
            raise
        self.started = time.monotonic() - (self.records[-1].get("time_s", 0.0) if self.records else 0.0)
        from crt_exp.runner.generators import seed_everything  # with torch, which nothing else here needs

        seed_everything(cfg.seed)

    def _open(self, cfg: DictConfig, task: Any) -> None:
        """Reads what an earlier run left, and writes what this one is."""
        self.existed = self._refuse_used(cfg)
        read = check_inputs(self.directory, OmegaConf.to_container(cfg.task, resolve=True), task, self.existed)
        self.records = read_records(self.metrics)
        write_atomic(self.directory / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_atomic(self.directory / INPUTS, read)
        write_atomic(self.directory / "versions.json", json.dumps(versions(cfg.seed), indent=1) + "\n")

    def _refuse_used(self, cfg: DictConfig) -> bool:
        """True if an earlier run lies there and may be continued."""
        if all(path.suffix == ".tmp" or path.name in (LOCK, LOG) for path in self.directory.iterdir()):
            return False  # a run killed in its first moments leaves a .tmp
        if cfg.resume != "auto":
            raise ConfigError(f"{self.directory} is not empty: add resume=auto to continue what lies there, or choose "
                              "another hydra.run.dir")
        old = self.directory / "config.yaml"
        if not old.is_file():
            raise ConfigError(f"{self.directory} holds files but no config.yaml: not a run of crt_exp; choose "
                              "another hydra.run.dir")
        kept = OmegaConf.create(read_yaml(old))
        changed = {key: pair for key, pair in differences(kept, cfg).items() if not free(key)}
        if changed:
            pairs = ", ".join(f"{key} (it was {a}, now {b})" for key, (a, b) in changed.items())
            raise ConfigError(f"{self.directory} was run with another configuration; these keys differ: {pairs}")
        return True

    def __enter__(self) -> "Run":
        mirror = instantiate(self.cfg.logger) if self.main else NoMirror()
        try:
            mirror.start(self.directory, OmegaConf.to_container(self.cfg, resolve=True))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        self.mirror = mirror
        return self

    def log(self, **record: Any) -> None:
        """Appends a line: step, epoch, split and metrics as fractions; time_s is added.
        Raises OSError where it cannot."""
        if not self.main:
            return
        record["time_s"] = round(time.monotonic() - self.started, 3)
        append_line(self.metrics, json.dumps(record))
        plain = {key: value for key, value in record.items() if not isinstance(value, (list, dict))}
        self.note(", ".join(f"{key} {shown(value)}" for key, value in plain.items()))
        self.records.append(record)
        self.mirror.log(record)

    def note(self, line: str) -> None:
        """Appends a line with the time of day to run.log, which is for reading alone."""
        if self.main:
            append_line(self.directory / LOG, f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}", sync=False)

    def rewind(self, count: int) -> None:
        """Takes back all but the first `count` records: what an interrupted run wrote after the
        checkpoint that is continued."""
        if not self.main or count >= len(self.records):
            return
        del self.records[count:]
        write_atomic(self.metrics, "".join(json.dumps(record) + "\n" for record in self.records))

    def begin_anew(self) -> Path | None:
        """Sets all records aside; returns the file that keeps them, None where there are none."""
        if not self.records:
            return None
        kept = free_name(lambda i: self.metrics.with_name(f"metrics.{i}.jsonl"))
        os.replace(self.metrics, kept)
        self.records.clear()
        return kept

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is not None and self.directory.is_dir():
                with suppress(OSError):  # the disk may be what ended it
                    self.note(f"ended by {kind.__name__}: {error}")
            if self.mirror is not None:
                self.mirror.pictures(sorted(self.directory.glob("*.png")))
                self.mirror.finish(failed=kind is not None)
            used = self.existed or self.metrics.exists() or (self.directory / "checkpoints").exists()
            if kind is not None and not used:
                shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            if self.lock is not None:
                self.lock.release()


# ---- one run in a directory ------------------------------------------------------------------------------------------


class Lock:
    """Holds `directory`, which it makes, until `release`.
    Raises ConfigError, naming the holder, where another process does.

    A record lock (POSIX): network file systems know it, the kernel frees it when its holder ends, however it ends, and
    forked workers of a killed run do not hold on to it. The file names the holder and goes away with the lock; one that
    a killed process left is no obstacle.
    """

    def __init__(self, directory: Path):
        self.path, self.handle = directory / LOCK, None
        while self.handle is None:
            directory.mkdir(parents=True, exist_ok=True)
            self.handle = self._taken()

    def _taken(self) -> int | None:
        """The locked file; None where another holder removed the file, or the directory, before it could be locked."""
        if self._identity() in _held:
            # opened a second time, and closed, it would be lost
            raise self._refused(f"this process ({os.getpid()}) itself")
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return None
        try:
            self._lock(handle)
            self._sign(handle)
        except BaseException:
            os.close(handle)
            raise
        if self._identity() == self._identity(handle):
            _held.add(self._identity(handle))
            return handle
        os.close(handle)
        return None

    def _lock(self, handle: int) -> None:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                logging.getLogger(__name__).warning(
                    "the file system of %s has no locks: mind that no two runs use it at once", self.path.parent)
            elif error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._refused(os.pread(handle, 1000, 0).decode(errors="replace")) from None
            else:
                raise

    def _refused(self, holder: str) -> ConfigError:
        return ConfigError(f"{self.path.parent} is in use by {holder.strip() or 'another process'}: wait until it "
                           "has ended, or choose another hydra.run.dir")

    def _sign(self, handle: int) -> None:
        os.ftruncate(handle, 0)
        signature = f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        os.pwrite(handle, signature.encode(), 0)

    def _identity(self, handle: int | None = None) -> tuple[int, int] | None:
        """Device and inode of an open file, or of the one that has the name now."""
        try:
            status = os.stat(self.path if handle is None else handle)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def release(self) -> None:
        """Takes the file away, and then lets go of it. Nothing where that was done before."""
        if self.handle is None:
            return
        identity = self._identity(self.handle)
        if self._identity() == identity:
            self.path.unlink(missing_ok=True)
        _held.discard(identity)
        os.close(self.handle)
        self.handle = None


def shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- files -----------------------------------------------------------------------------------------------------------


def free_name(name: Callable[[int], Path]) -> Path:
    """The first of name(1), name(2), ... that does not exist."""
    return next(path for path in map(name, itertools.count(1)) if not path.exists())


def append_line(path: Path, line: str, sync: bool = True) -> None:
    """Appends and syncs a line; where the disk refuses it, takes back the part that was written."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        content = line.encode() + b"\n"
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(file.fileno())
        except OSError as error:
            os.truncate(path, size)
            raise OSError(f"cannot write to {path}: {error.strerror}; "
                          "free space and continue with resume=auto") from None


def read_records(path: Path) -> list[dict]:
    """The complete lines of a metrics.jsonl; a last line cut off by a crash is removed from the file.

    Raises ConfigError for a line that is no JSON object.
    """
    if not path.is_file():
        return []
    whole = path.read_bytes()
    kept = whole[:whole.rfind(b"\n") + 1]
    try:
        text = kept.decode()
    except UnicodeDecodeError as error:
        line = kept[:error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text") from None
    records = [read_json(line, path, i) for i, line in enumerate(text.split("\n")[:-1], 1)]
    if kept != whole:
        write_atomic(path, kept)
    return records


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    with whole(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def differences(old: DictConfig, new: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names of the leaves that differ, with both values ("absent" where there is none)."""
    a, b = ({k: v for k, v in _leaves(OmegaConf.to_container(c, resolve=c is new))} for c in (old, new))
    pairs = {k: (a.get(k, "absent"), b.get(k, "absent")) for k in sorted(a.keys() | b.keys())}
    return {k: pair for k, pair in pairs.items() if a.get(k) != b.get(k)}  # what was absent and is null is the same


def free(key: str) -> bool:
    """Whether a continued run may have another value of it."""
    return any(key == name or key.startswith(name + ".") for name in FREE_KEYS)


def _leaves(node: Any, prefix: str = ""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def versions(seed: int) -> dict[str, Any]:
    names = ("crt_exp", "torch", "numpy", "scipy", "scikit-learn", "hydra-core", "transformers", "accelerate",
             "datasets", "timm")
    packages = {}
    for name in names:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {"command": command(), "overrides": overrides(), "seed": seed, "sweep": os.environ.get(SWEEP),
            "commit": commit(), "python": platform.python_version(), "machine": machine(), "packages": packages}


def command() -> str:
    """What was typed, with `python -m` in place of the path of a module's __main__."""
    name = "python -m crt_exp" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    return " ".join([name, *sys.argv[1:]])


def machine() -> str:
    """Processor, cores and system, such as '2 cores of x86_64, Linux'."""
    return f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}"


def commit() -> str | None:
    """The checked-out commit, with '+changes' where the tree differs from it; None outside a checkout."""
    root = Path(crt_exp.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    # reports are no code
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!outputs")
    return _git(root, "rev-parse", "HEAD") + ("+changes" if changed else "")


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True).stdout.strip()
