"""How every report is written: cells that survive an interruption, a Markdown table, a CSV and a picture."""

import ast
import csv
import hashlib
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import joblib
from tqdm import tqdm

from crt_exp.runner.run import commit, machine, read_records, write_atomic

REPORT = Path("outputs/report")


class Cells:
    """Results by key in outputs/<name>/cells.jsonl: a repeated command computes only what is missing.

    `sources` are the files whose code decides the values: when one changes, all cells are computed anew. Comments,
    docstrings and line breaks decide nothing. Each cell says when and by which commit it was computed.
    """

    def __init__(self, name: str, sources: Sequence[str]):
        self.path = Path("outputs") / name / "cells.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.code = fingerprint(sources)
        self.known = {json.dumps(r["key"]): r for r in read_records(self.path) if r["code"] == self.code}

    def __getitem__(self, key: dict[str, Any]) -> Any:
        return self.known[json.dumps(key)]["value"]

    def fill(self, keys: Sequence[dict[str, Any]], compute: Callable[..., Any], label: str,
             workers: int | None = None) -> "Cells":
        """compute(**key) for every key that is not known, one process for each core; kept as soon as each is there."""
        name = getattr(compute, "__qualname__", repr(compute))
        self._check(keys, name)
        missing = [key for key in keys if json.dumps(key) not in self.known]
        cores = min(workers or os.cpu_count(), max(len(missing), 1))
        jobs = joblib.Parallel(n_jobs=cores, return_as="generator_unordered")(
            joblib.delayed(_timed)(compute, key) for key in missing)
        for key, value, seconds in tqdm(jobs, total=len(missing), desc=label, disable=None, leave=False):
            self._keep({"key": key, "value": value, "by": name, "seconds": round(seconds, 3), "code": self.code,
                        "commit": commit(), "date": str(date.today())})
        return self

    def _check(self, keys: Sequence[dict[str, Any]], name: str) -> None:
        """Raises ValueError where another function than `name` filled a cell: its key does not say all."""
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
        self.known[json.dumps(record["key"])] = record

    def seconds(self, keys: Sequence[dict[str, Any]] | None = None) -> float:
        """The time that all known cells, or those of these keys, took, also in earlier calls."""
        chosen = self.known if keys is None else dict.fromkeys(map(json.dumps, keys))
        return sum(self.known[key]["seconds"] for key in chosen)


def _timed(compute: Callable[..., Any], key: dict[str, Any]) -> tuple[dict[str, Any], Any, float]:
    start = time.perf_counter()
    return key, compute(**key), time.perf_counter() - start


def fingerprint(sources: Sequence[str]) -> str:
    """A digest of what the source files or folders of the package do: their statements, without docstrings."""
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    for source in sources:
        path = package / source
        for file in sorted([*path.rglob("*.py"), *path.rglob("*.c")]) if path.is_dir() else [path]:
            text = file.read_text(encoding="utf-8")
            digest.update((statements(text) if file.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def statements(source: str) -> str:
    """Python code as a syntax tree in text, docstrings taken out."""
    tree, documented = ast.parse(source), (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body[0].value.value = ""
    return ast.dump(tree)


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
    """Below every report: what was done, with which code, where, when, and by which command."""
    found = ", ".join(f"{p} {metadata.version(p)}" for p in ("crt_exp", "torch", "scikit-learn", "numpy"))
    return (f"{facts} Versions: {found}; {source()}. Machine: {machine()}. {date.today()}, {seconds:.0f} s of "
            f"computing. Command: `{command()}`.")


def source() -> str:
    """The commit of the code that wrote the report, and whether its tree was changed."""
    found = commit()
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


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def save_figure(figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    os.replace(temporary, path)


def new_figure(*args, **kwargs):
    """matplotlib subplots without a display, in the reports' style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25, "legend.frameon": False})
    return plt.subplots(*args, **kwargs)


def label_ends(ax, ends: Sequence[tuple[str, float, float, str]], size: float = 8) -> None:
    """Writes (name, x, y, colour) of each line beside its last point, no nearer to another name than it is high.

    The scales and limits of the axes must be set.
    """
    from matplotlib.transforms import offset_copy

    ax.figure.canvas.draw()  # fixes the scales
    height, last = 1.25 * size * ax.figure.dpi / 72, -float("inf")
    places = [(*ax.transData.transform((x, y)), name, colour) for name, x, y, colour in ends]
    for right, up, name, colour in sorted(places, key=lambda place: place[1]):
        last = max(up, last + height)
        ax.text(*ax.transData.inverted().transform((right, last)), name, color=colour, fontsize=size, va="center",
                clip_on=False, transform=offset_copy(ax.transData, ax.figure, x=5, y=0, units="points"))
