"""Runs that a measurement starts: command lines of `python -m crt_exp`, in this process, kept in a folder or not."""

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crt_exp.runner.ending import DIVERGED_CODE
from crt_exp.runner.run import read_records
from crt_exp.studies.sources import fingerprint

# Where what decides a run with exact attention begins, beside its task: no map and no other attention.
EXACT = ("train.py", "attention/baselines.py", "conf/attention/exact.yaml", "!attention", "!nearfar", "!conf/attention",
         "!swap", "!mechanism.py", "!features", "!samplers", "!sampled_softmax")


class Failed(ValueError):
    """A run ended with an error."""


class Diverged(Failed):
    """A run whose loss was not finite."""

    @property
    def reason(self) -> str:
        """Its last line, without the arguments."""
        return str(self).strip().splitlines()[-1].rpartition("crt_exp: ")[2]


@dataclass(frozen=True)
class Home:
    """The folder of runs. sources: where what decides them begins, as for `Cells`."""

    path: Path
    sources: tuple[str, ...]

    def place(self, overrides: Sequence[str]) -> Path:
        """The directory of a kept run, named by its attention and a digest of its arguments and its code."""
        name = next((o.removeprefix("attention=") for o in overrides if o.startswith("attention=")), "run")
        decided = " ".join([*overrides, fingerprint(self.sources)])
        return self.path / f"{name}-{hashlib.sha256(decided.encode()).hexdigest()[:10]}"

    def kept(self, overrides: Sequence[str]) -> list[dict[str, Any]]:
        """The records of a run that stays at `place(overrides)` and is continued where it was interrupted."""
        records = read_records(self.place(overrides) / "metrics.jsonl")
        if records and records[-1].get("final"):
            return records
        return run([*overrides, "resume=auto", "trainer.keep=1"], self.place(overrides))

    def passing(self, overrides: Sequence[str]) -> list[dict[str, Any]]:
        """The records of a run whose directory is deleted afterwards."""
        self.path.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self.path, prefix="run-"))
        try:
            return run(overrides, directory / "run")
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def staged(path: Path, sources: Sequence[str], lines: Sequence[Sequence[str]],
           begin: Sequence[str] = ("task.init=scratch",)) -> Path:
    """The run of the last of some command lines, each of which goes on from the weights of the one before, the first
    from what `begin` says. What is done is not done again: a run is named by all lines up to its own, and its code."""
    place = path
    for count, line in enumerate(lines, 1):
        start = begin if count == 1 else [f"task.init={place}"]
        place = stage(path, sources, lines[:count])
        run([*line, *start, "resume=auto", "trainer.keep=1"], place)
    return place


def stage(path: Path, sources: Sequence[str], lines: Sequence[Sequence[str]]) -> Path:
    """Where the last of these lines is run."""
    decided = " ".join([*(option for line in lines for option in line), fingerprint(tuple(sources))])
    return path / f"exact-{hashlib.sha256(decided.encode()).hexdigest()[:10]}"


def run(overrides: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """`python -m crt_exp` with these arguments and the logger LOGGER, or none: all its records, the last of them final.

    Raises Failed, or Diverged, with the arguments and the output of the run where it ends with an error.
    """
    from crt_exp.train import main

    output, argv = io.StringIO(), sys.argv
    sys.argv = ["crt_exp", *overrides, f"logger={os.environ.get('LOGGER', 'none')}", f"hydra.run.dir={directory}"]
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main()
    except SystemExit as stop:
        if stop.code:
            failure = Diverged if stop.code == DIVERGED_CODE else Failed
            raise failure(f"{' '.join(sys.argv)}: {output.getvalue().strip()}") from None
    finally:
        sys.argv = argv
    return read_records(directory / "metrics.jsonl")
