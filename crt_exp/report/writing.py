"""How every report is written: cells that survive an interruption, a Markdown table, a CSV and a picture."""

import ast
import csv
import hashlib
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import joblib
from tqdm import tqdm

from crt_exp.drawing import apart, columns, label_ends, markdown, new_figure, plain_ticks, save_figure  # noqa: F401
from crt_exp.report.decided import HERE, without_docstrings
from crt_exp.runner.run import commit, machine, read_records, write_atomic

REPORT = Path("outputs/report")
STARTED = time.perf_counter()  # about when the command did


class Cells:
    """Results by key in outputs/<name>/cells.jsonl: a repeated command computes only what is missing.

    A cell is known where its key is and nothing has changed since that decides it: the function that computed it, the
    constants, functions and classes that this one reads, and the configuration that they name (`decided`). sources:
    more files or folders, of the package or elsewhere, that no code names. Each cell says when, by which commit and
    with which versions it was computed; every caption of this process tells it (`Cells.asked`).
    """

    asked: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {}  # of all Cells of this process, by name and key

    def __init__(self, name: str, sources: Sequence[str] = ()):
        self.name, self.path = name, Path("outputs") / name / "cells.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.sources = fingerprint(sources) if sources else ""
        self.kept = {(json.dumps(r["key"]), r["code"]): r for r in read_records(self.path)}
        self.known: dict[str, dict[str, Any]] = {}  # of the keys that were asked for

    def __getitem__(self, key: dict[str, Any]) -> Any:
        return self.known[json.dumps(key)]["value"]

    def fill(self, keys: Sequence[dict[str, Any]], compute: Callable[..., Any], label: str,
             workers: int | None = None) -> "Cells":
        """compute(**key) for every key that is not known, one process for each core at hand; kept as each is there.

        Raises ValueError where another function filled one of these keys, or none can be told what decides compute.
        """
        name = f"{compute.__module__}.{compute.__qualname__}"
        self._check(keys, name)
        codes = {json.dumps(key): HERE.of_cell(compute, key) + self.sources for key in keys}
        for key, code in codes.items():
            if (key, code) in self.kept:
                self._know(self.kept[key, code])
        missing = [key for key in keys if json.dumps(key) not in self.known]
        cores = min(workers or joblib.cpu_count(), max(len(missing), 1))
        with without_interrupts():
            jobs = joblib.Parallel(n_jobs=cores, return_as="generator_unordered")(
                joblib.delayed(_timed)(compute, key) for key in missing)
        for key, value, seconds in tqdm(jobs, total=len(missing), desc=label, disable=None, leave=False):
            self._keep({"key": key, "value": value, "by": name, "seconds": round(seconds, 3),
                        "code": codes[json.dumps(key)], "commit": commit(), "date": str(date.today()),
                        "versions": versions()})
        return self

    def _check(self, keys: Sequence[dict[str, Any]], name: str) -> None:
        for key in keys:
            other = self.known.get(json.dumps(key), {}).get("by", name)
            if other != name:
                raise ValueError(f"the cell {key} of {self.path} was filled by {other}, not by {name}: their keys must "
                                 "differ")

    def _keep(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._know(record)

    def _know(self, record: dict[str, Any]) -> None:
        key = json.dumps(record["key"])
        self.known[key] = Cells.asked[self.name, key] = record

    def seconds(self, keys: Sequence[dict[str, Any]] | None = None) -> float:
        """The time that all cells asked for, or those of these keys, took, also in earlier calls."""
        chosen = self.known if keys is None else dict.fromkeys(map(json.dumps, keys))
        return sum(self.known[key]["seconds"] for key in chosen)


def _timed(compute: Callable[..., Any], key: dict[str, Any]) -> tuple[dict[str, Any], Any, float]:
    start = time.perf_counter()
    return key, compute(**key), time.perf_counter() - start


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started within it know no ^C: the command decides what it means, and ends them."""
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


def fingerprint(sources: Sequence[str]) -> str:
    """A digest of what source files or folders of the package, or elsewhere, do: their statements, no docstrings."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for source in sources:
        path = package / source
        for file in sorted([*path.rglob("*.py"), *path.rglob("*.[ch]")]) if path.is_dir() else [path]:
            text = file.read_text(encoding="utf-8")
            digest.update((statements(text) if file.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def statements(source: str) -> str:
    """Python code as a syntax tree in text, docstrings taken out."""
    return ast.dump(without_docstrings(ast.parse(source)))


def write_report(name: str, title: str, body: str, rows: Sequence[dict[str, Any]], figure=None, facts: str = "",
                 seconds: float = 0.0) -> Path:
    """outputs/report/<name>.md, .csv and .png, each written atomically. `facts`: data, subsampling, sizes, seeds."""
    REPORT.mkdir(parents=True, exist_ok=True)
    picture = f"\n![{title}]({name}.png)\n" if figure is not None else ""
    write_atomic(REPORT / f"{name}.md", f"# {title}\n\n{body.rstrip()}\n{picture}\n{caption(facts, seconds)}\n")
    write_atomic(REPORT / f"{name}.csv", csv_text(rows))
    if figure is not None:
        save_figure(figure, REPORT / f"{name}.png")
    return REPORT / f"{name}.md"


def caption(facts: str, seconds: float) -> str:
    """Below every report: what was done, with which code, where, when, how long it took, and by which command."""
    return (f"{facts} Versions: {versions()}; {source()}. Machine: {machine()}. "
            f"{origins(list(Cells.asked.values()))}Written: {date.today()}, {seconds:.0f} s of computing, the "
            f"last call {time.perf_counter() - STARTED:.0f} s. Command: `{command()}`.")


def versions() -> str:
    return ", ".join(f"{p} {metadata.version(p)}" for p in ("crt_exp", "torch", "scikit-learn", "numpy"))


def origins(records: Sequence[dict[str, Any]]) -> str:
    """When, by which code and with which versions the cells of a report were computed; empty where it has none."""
    alike: dict[tuple[str, str], list[str]] = {}
    for record in records:
        alike.setdefault((checkout(record["commit"]), record["versions"]), []).append(record["date"])
    told = [f"{len(dates)} {'cell' if len(dates) == 1 else 'cells'} of {min(dates)}"
            f"{f' to {max(dates)}' if max(dates) > min(dates) else ''}, {code}, "
            f"{'these versions' if made_with == versions() else made_with}"
            for (code, made_with), dates in alike.items()]
    return f"Computed: {'; '.join(told)}. " if told else ""


def source() -> str:
    """The commit of the code that wrote the report, and whether its tree was changed."""
    return checkout(commit())


def checkout(found: str | None) -> str:
    """What `commit` found, in words."""
    if found is None:
        return "no commit, for the code is no checkout"
    digest, changed, _ = found.partition("+changes")
    return f"commit {digest[:12]}, tree {'changed' if changed else 'unchanged'}"


def command() -> str:
    """What was typed, to be typed again: module or program, its arguments, and SIZE where the environment sets it."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    size = f"SIZE={shlex.quote(os.environ['SIZE'])} " if "SIZE" in os.environ else ""
    return size + shlex.join([*program, *sys.argv[1:]])


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
