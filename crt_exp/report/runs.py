"""Runs that a report starts: command lines of `python -m crt_exp`, in this process, kept in its own folder or not.

What decides a run is its arguments, which are the key of its cell, and the code and configuration that they reach
(`decided`): all of it names the directory of a run that is kept.
"""

import hashlib
import io
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crt_exp.report.decided import HERE
from crt_exp.report.writing import fingerprint
from crt_exp.runner.ending import DIVERGED_CODE
from crt_exp.runner.run import read_records


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
    """The folder of a report's runs. sources: more files or folders, that no code names."""

    path: Path
    sources: tuple[str, ...] = ()

    def place(self, overrides: Sequence[str]) -> Path:
        """The directory of a kept run, named by its attention and a digest of its arguments and its code."""
        name = next((o.removeprefix("attention=") for o in overrides if o.startswith("attention=")), "run")
        decided = " ".join([*overrides, HERE.of_run(overrides), code(self.sources)])
        return self.path / f"{name}-{hashlib.sha256(decided.encode()).hexdigest()[:10]}"

    def kept(self, overrides: Sequence[str]) -> list[dict[str, Any]]:
        """The records of a run that stays at `place(overrides)` and is continued where it was interrupted."""
        return run([*overrides, "resume=auto", "trainer.keep=1"], self.place(overrides))

    def passing(self, overrides: Sequence[str]) -> list[dict[str, Any]]:
        """The records of a run whose directory is deleted afterwards."""
        self.path.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self.path, prefix="run-"))
        try:
            return run(overrides, directory / "run")
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@cache
def code(sources: tuple[str, ...]) -> str:
    return fingerprint(sources)


def run(overrides: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """`python -m crt_exp` with these arguments, without a logger: all its records, the last of them final.

    Raises Failed, or Diverged, with the arguments and what the run said where it ends with an error.
    """
    from crt_exp.train import main

    told, argv = io.StringIO(), sys.argv
    sys.argv = ["crt_exp", *overrides, "logger=none", f"hydra.run.dir={directory}"]
    try:
        with redirect_stdout(told), redirect_stderr(told):
            main()
    except SystemExit as stop:
        if stop.code:
            failure = Diverged if stop.code == DIVERGED_CODE else Failed
            raise failure(f"{' '.join(sys.argv)}: {told.getvalue().strip()}") from None
    finally:
        sys.argv = argv
    return read_records(directory / "metrics.jsonl")
