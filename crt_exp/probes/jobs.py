"""Cells as jobs of a queue: each is submitted through submitit, with the settings of a launcher of Hydra.

What is known of a job lies in the folder that submitit has for it, outputs/<name>/jobs/<digest of the cell's key and
code>: a command that was killed, and is repeated, looks there for what waits, runs or has ended.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from crt_exp.config import ConfigError, choices, unknown
from crt_exp.probes.sources import fingerprint
from crt_exp.runner import sweep
from crt_exp.runner.command_line import composed, parse_overrides
from crt_exp.times import Watch

Key = dict[str, Any]
CLUSTERS = {"SlurmLauncher": "slurm", "LocalLauncher": "local"}   # of a launcher's class -> as submitit calls them
OF_HYDRA = ("_target_", "submitit_folder", "max_num_timeout", "array_parallelism")  # no parameters of a job
SUBMITTED = "_submitted.pkl"   # behind the number of a job, by submitit
PAUSE = 2.0      # seconds between two looks at the jobs
LOST = 600.0     # seconds after which the queue knows of every job that was submitted


class JobsFailed(ValueError):
    """Some jobs ended without a result, or cannot be submitted."""


class QueuedAgain(BaseException):
    """The job was asked to stop, left what it goes on from, and waits in the queue again. No error: nothing on the way
    out takes it for the end of a run. code: with which its process has to exit."""

    def __init__(self, code: Any):
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Cell:
    """What a job computes: compute(**key), as long as the code that decides it is that of its submission."""

    compute: Callable[..., Any]
    key: Key
    sources: tuple[str, ...]
    code: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{json.dumps(self.key)} {self.code}".encode()).hexdigest()[:16]

    def __call__(self) -> tuple[Any, float]:
        """The value, and seconds. Raises JobsFailed for other code."""
        if fingerprint(self.sources) != self.code:
            raise JobsFailed("the code that decides this cell has changed since its job was submitted; repeat the "
                             "command of the report")
        with stopping(), Watch() as watch:
            value = self.compute(**self.key)
        return value, watch.seconds

    def checkpoint(self) -> Any:
        """What submitit puts into the queue again: the same, for runs go on from their checkpoints."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@contextmanager
def stopping() -> Iterator[None]:
    """Within it submitit's handler of SIGUSR2, which queues the job again and exits, raises QueuedAgain."""
    before = signal.getsignal(signal.SIGUSR2)

    def handle(signum: int, frame: Any) -> None:
        try:
            before(signum, frame)
        except SystemExit as stop:
            raise QueuedAgain(stop.code) from None

    if callable(before):
        signal.signal(signal.SIGUSR2, handle)
    try:
        yield
    except QueuedAgain as again:
        sys.exit(again.code)
    finally:
        signal.signal(signal.SIGUSR2, before)


@dataclass(frozen=True)
class Launcher:
    """cluster: "slurm", or "local" for processes of this machine. settings: of the launcher, as Hydra has them."""

    cluster: str
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, text: str) -> "Launcher":
        """Of "slurm partition=gpu": a launcher of hydra/launcher that submits through submitit, and settings in place
        of its own. Raises ConfigError, for one that needs a package too."""
        name, *words = shlex.split(text) or [""]
        known = sorted({*(each for each, plugin in sweep.PLUGINS.items() if "submitit" in plugin),
                        *choices("hydra/launcher")})
        if name not in known:
            raise unknown("launcher", name, known)
        sweep.check_plugin("hydra/launcher", name)
        sweep.adjust_plugins()
        options = [f"hydra/launcher={name}", *(f"hydra.launcher.{word}" for word in words)]
        return cls.of(name, plain(composed(parse_overrides(options), []).hydra.launcher))

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> "Launcher":
        """Raises ConfigError for jobs of several processes, which would compute a cell several times."""
        if (kind := given["_target_"].rpartition(".")[2]) not in CLUSTERS:
            raise ConfigError(f"launcher {name}: {given['_target_']} submits nothing through submitit")
        for key in ("nodes", "tasks_per_node"):
            if (given.get(key) or 1) > 1:
                raise ConfigError(f"launcher {name}: {key} = {given[key]}: one process computes a cell, and "
                                  "trainer.processes starts those of its run; expected 1")
        return cls(CLUSTERS[kind], {key: value for key, value in given.items() if value is not None})

    @property
    def most(self) -> int:
        """Jobs that wait or run at once."""
        return self.settings.get("array_parallelism") or os.cpu_count() or 1

    def executor(self, folder: Path) -> Any:
        """Raises JobsFailed where there is no such queue."""
        import submitit

        limits = {f"{self.cluster}_{key}": self.settings[key] for key in ("max_num_timeout",) if key in self.settings}
        try:
            made = submitit.AutoExecutor(folder, cluster=self.cluster, **limits)
        except RuntimeError as error:
            raise JobsFailed(f"jobs cannot be submitted to {self.cluster}: {error}") from None
        shared = {*made._valid_parameters()}
        made.update_parameters(**{key if key in shared else f"{self.cluster}_{key}": value
                                  for key, value in self.settings.items() if key not in OF_HYDRA})
        return made

    def job(self, home: Path, cell: Cell) -> "Job":
        """The one that an earlier command submitted, if it has not ended without a result, or a new one."""
        folder = (home / cell.digest).absolute()
        return self.earlier(folder, cell) or self.submit(folder, cell)

    def earlier(self, folder: Path, cell: Cell) -> "Job | None":
        submitted = sorted(folder.glob(f"*{SUBMITTED}"), key=lambda path: path.stat().st_mtime)
        if not submitted:
            return None
        import submitit

        kind = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}[self.cluster]
        of = kind(folder, submitted[-1].name.removesuffix(SUBMITTED))
        job = Job(cell, folder, self.cluster, of, submitted[-1].stat().st_mtime)
        return job if not job.ended() or job.outcome()[0] == "success" else None

    def submit(self, folder: Path, cell: Cell) -> "Job":
        """Raises JobsFailed, with what the queue says."""
        try:
            return Job(cell, folder, self.cluster, self.executor(folder).submit(cell))
        except (RuntimeError, OSError) as error:
            raise JobsFailed(f"a job of {cell.key} cannot be submitted to {self.cluster}: "
                             f"{str(error).strip().splitlines()[-1]}") from None


@dataclass(frozen=True, eq=False)
class Job:
    """of: submitit's. since: when it was submitted, in seconds of the clock."""

    cell: Cell
    folder: Path
    cluster: str
    of: Any
    since: float = field(default_factory=time.time)

    def ended(self) -> bool:
        """Raises JobsFailed for a job of which neither its result nor the queue knows."""
        if self.of.paths.result_pickle.exists():
            return True
        if self.cluster == "local":
            return self.of.done() and not goes_on(int(self.of.job_id), str(self.folder))
        if not self.of.done() and self.of.state == "UNKNOWN" and time.time() - self.since > LOST:
            raise JobsFailed(f"job {self.of.job_id} has no result and the queue does not know it (sacct): look whether "
                             f"it runs, then delete {self.folder} and repeat the command")
        return self.of.done()

    def outcome(self) -> tuple[str, Any]:
        """("success", (value, seconds)), or ("error", the last line of what it says)."""
        if self.of.paths.result_pickle.exists():
            kind, result = self.of._get_outcome_and_result()
            return kind, result if kind == "success" else result.strip().splitlines()[-1]
        return "error", f"it has no result; the queue says {self.of.state}"


def goes_on(process: int, folder: str) -> bool:
    """Whether the process that leads a local job of an earlier command is there: its arguments name the folder."""
    import psutil

    try:
        return folder in psutil.Process(process).cmdline()
    except psutil.Error:
        return False


def results(launcher: Launcher, home: Path, cells: Iterator[Cell]) -> Iterator[tuple[Key, Any, float]]:
    """(key, value, seconds) of each cell whose job ends well; as many as the launcher takes wait or run at once.

    Raises JobsFailed in the end where some ended otherwise; their folders stay, and the next command submits them
    again.
    """
    running, failed = [], []
    while running := [*running, *(launcher.job(home, cell) for cell in islice(cells, launcher.most - len(running)))]:
        ended = [job for job in running if job.ended()]
        running = [job for job in running if job not in ended]
        for job in ended:
            kind, result = job.outcome()
            if kind == "success":
                yield job.cell.key, *result
                shutil.rmtree(job.folder, ignore_errors=True)
            else:
                failed.append(f"{job.folder}: {result}")
        if not ended:
            time.sleep(PAUSE)
    if failed:
        raise JobsFailed(f"{len(failed)} jobs ended without a result, and the same command submits them again; the "
                         f"first, {failed[0]}")


def plain(node: Any) -> dict[str, Any]:
    """The settings of a launcher, without the folder, which stands for a run's."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.masked_copy(node, [key for key in node if key != "submitit_folder"]),
                                  resolve=True)
