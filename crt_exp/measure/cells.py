"""What measurements are kept in: cells that survive an interruption, and the draws that pages are made from.

A cell is one call of a function with one key, kept as a line of JSON in outputs/<name>/cells.jsonl. A draw is one value
of it, as a row of outputs/report/<name>.csv: what a page compares, and all that is committed.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import joblib
from tqdm import tqdm

from crt_exp.config import carried
from crt_exp.runner.run import commit, machine, read_records
from crt_exp.measure.sources import fingerprint
from crt_exp.times import Watch, in_new_process

PAGES = Path("outputs/report")  # where draws are committed
Key = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """One measured value.

    setting: data set, model or size that the comparison is within. arm: what is compared, as it is typed ("favorpp
    m=64"). unit: the unit of independence (a seed, pair, text or process); empty for a closed form. x: the place on an
    axis (step, m, length). table: which measurement of the page, where it has several. seconds: of the whole cell,
    on its first row.
    """

    setting: str
    arm: str
    metric: str
    value: float | str
    unit: str | int = ""
    x: float | int | str = ""
    table: str = ""
    seconds: float | str = ""
    commit: str = ""
    date: str = ""
    versions: str = ""


class Cells:
    """Results by key in outputs/<name>/cells.jsonl: a repeated command computes only what is missing.

    sources: where what decides the values begins (see sources.py). A cell is used again while none of these statements
    has changed, or always with `keep`.
    """

    def __init__(self, name: str, sources: Sequence[str], keep: bool = False, folder: Path = Path("outputs")):
        self.path, self.keep, self.sources = folder / name / "cells.jsonl", keep, tuple(sources)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.code = fingerprint(self.sources)
        self.kept = {json.dumps(record["key"]): record for record in read_records(self.path)
                     if keep or record["code"] == self.code}
        self.credited: set[str] = set()  # keys whose seconds stand on a draw

    def __getitem__(self, key: Key) -> Any:
        return self.kept[json.dumps(key)]["value"]

    def __contains__(self, key: Key) -> bool:
        return json.dumps(key) in self.kept

    def fill(self, keys: Sequence[Key], compute: Callable[..., Any], label: str, workers: int | None = None,
             apart: bool = False) -> "Cells":
        """compute(**key) for every key that is missing, each kept as it ends: one process for each core at hand. apart:
        one at a time, each in a process that has done nothing else."""
        missing = distinct([key for key in keys if key not in self])  # two processes must not share a run
        call = carried(compute)  # here, for joblib takes cells in threads of its own, which know no names
        results = self._computed(missing, call, workers, apart)
        for key, value, seconds in tqdm(results, total=len(missing), desc=label, disable=None, leave=False):
            self._keep({"key": key, "value": value, "seconds": round(seconds, 3), "code": self.code,
                        "commit": short_commit(), "date": str(date.today()), "versions": versions()})
        return self

    def draw(self, key: Key, setting: str, arm: str, metric: str, value: float | str, unit: str | int = "",
             x: float | int | str = "", table: str = "") -> Draw:
        """A value of the cell of this key, with its seconds (once), commit, date and versions."""
        name = json.dumps(key)
        record = self.kept[name]
        seconds = "" if name in self.credited else record["seconds"]
        self.credited.add(name)
        return Draw(setting, arm, metric, value, unit, x, table, seconds, record["commit"], record["date"],
                    record["versions"])

    def _computed(self, missing: Sequence[Key], compute: Callable[..., Any], workers: int | None, apart: bool
                  ) -> Iterator[tuple[Key, Any, float]]:
        cores = min(1 if apart else workers or joblib.cpu_count(), max(len(missing), 1))
        with without_interrupts():
            return joblib.Parallel(n_jobs=cores, return_as="generator_unordered", pre_dispatch=cores)(
                joblib.delayed(timed)(compute, key, apart) for key in missing)

    def _keep(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.kept[json.dumps(record["key"])] = record


def distinct(keys: Sequence[Key]) -> list[Key]:
    """Each key once, in order."""
    return [*{json.dumps(key): key for key in keys}.values()]


def timed(compute: Callable[..., Any], key: Key, apart: bool = False) -> tuple[Key, Any, float]:
    with Watch() as watch:
        value = in_new_process(compute, **key) if apart else compute(**key)
    return key, value, watch.seconds


def short_commit() -> str:
    """The commit of the code that runs, with "+" where its tree has changes; empty where it is no checkout."""
    digest, changed, _ = (commit() or "").partition("+changes")
    return digest[:12] + ("+" if changed else "")


@cache
def versions() -> str:
    """Of the libraries that decide numbers, and the machine."""
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy"))
    return f"{libraries}; {machine()}"


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started within it ignore ^C: the command decides what it means, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_workers() -> None:
    """Ends the processes that compute cells, and those that they started."""
    loky = sys.modules.get("joblib.externals.loky")
    if loky is not None:
        loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)
