"""Runs that a measurement starts: command lines of `python -m crt_exp`, in this process, each kept in a folder of its
own, but for those of some steps that are only timed."""

import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from crt_exp.config import ConfigError, own_folders, unknown
from crt_exp.runner.command_line import with_folders
from crt_exp.runner.ending import DIVERGED_CODE
from crt_exp.runner.run import read_records
from crt_exp.measure import sources as code
from crt_exp.measure.sources import fingerprint

# Where what decides a run with exact attention begins, beside its task: no map and no other attention.
EXACT = ("train.py", "attention/baselines.py", "conf/attention/exact.yaml", "!attention", "!nearfar", "!conf/attention",
         "!swap", "!mechanism.py", "!features", "!samplers", "!sampled_softmax")
SIGNALLED = 128  # and more: exit codes of a run that a signal stopped


class Failed(ValueError):
    """A run ended with an error."""


class DivergedRun(Failed):
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
        return run([*overrides, "resume=auto"], self.place(overrides))

    def passing(self, overrides: Sequence[str]) -> list[dict[str, Any]]:
        """The records of a run of some steps, to be timed, whose directory is deleted afterwards."""
        self.path.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self.path, prefix="run-"))
        try:
            return run(overrides, directory / "run")
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Start:
    """Models that are trained first, as a page's file names them. stages: options of command lines, `common` before
    them; each goes on from the run of the one before. count: so many, of the seeds from 0 on. sources: "exact" where
    no attention but exact attention decides them (EXACT), so that they stay while the rest of the code changes."""

    stages: Sequence[Sequence[str | Sequence[str]]]
    common: Sequence[str | Sequence[str]] = ()
    count: int = 1
    sources: str = ""

    @classmethod
    def read(cls, name: str, given: Mapping[str, Any]) -> "Start":
        """Raises ConfigError for a key that is not one, and where there is no stage."""
        for key in given:
            if key not in (known := [each.name for each in fields(cls)]):
                raise unknown(f"key of the start {name}", key, known)
        if not given.get("stages") or given.get("sources", "") not in ("", "exact"):
            raise ConfigError(f"start {name}: it takes at least one of stages, and sources: exact or none")
        return cls(**given)

    def home(self, path: Path, sources: Sequence[str]) -> Home:
        """Of its runs; sources: of the page."""
        if not self.sources:
            return Home(path, tuple(sources))
        named = code.named([flat(self.common), *map(flat, self.stages)])
        return Home(path, (*dict.fromkeys(map(code.name_of, named)), *EXACT))

    def lines(self, seed: int, home: Home) -> list[list[str]]:
        """The command line of each stage."""
        lines: list[list[str]] = []
        for stage in self.stages:
            begun = [f"task.init={home.place(lines[-1])}"] if lines else []
            lines.append([*flat(self.common), *flat(stage), *begun, f"seed={seed}"])
        return lines


def flat(options: Sequence[str | Sequence[str]]) -> list[str]:
    """Options and lists of them, however deep, in one list."""
    return list(chain.from_iterable([each] if isinstance(each, str) else flat(each) for each in options))


def run(overrides: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """`python -m crt_exp` with these arguments and the logger LOGGER, or none: all its records, the last of them final.

    Raises Failed, or DivergedRun, with the arguments and the output of the run where it ends with an error.
    """
    from crt_exp.train import main

    output, argv = io.StringIO(), sys.argv
    own = with_folders([f"file://{folder}" for folder in own_folders()])
    sys.argv = ["crt_exp", *overrides, *own, f"logger={os.environ.get('LOGGER', 'none')}", f"hydra.run.dir={directory}"]
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main()
    except SystemExit as stop:
        if stop.code:
            failure = DivergedRun if stop.code == DIVERGED_CODE else Failed
            again = "; or repeat the command of the report, which goes on with it" if stop.code >= SIGNALLED else ""
            raise failure(f"{' '.join(sys.argv)}: {output.getvalue().strip()}{again}") from None
    finally:
        sys.argv = argv
    return read_records(directory / "metrics.jsonl")
