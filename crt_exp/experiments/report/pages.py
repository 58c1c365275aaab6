"""A page of results: the sweeps of a comparison, and its claims, tables and figure as functions of the rows."""

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from crt_exp.experiments import papers
from crt_exp.experiments.report.claims import CaseResult, Claim, judge
from crt_exp.experiments.report.rows import (
    FOLDER,
    Rows,
    concatenate,
    has_rows,
    read_rows,
    write_rows,
)
from crt_exp.experiments.report.sweeps import HOME, PlannedRun, rows_of_runs, run_missing
from crt_exp.experiments.report.tables import Tables
from crt_exp.registry import ConfigError, unknown

RUNS = Path("outputs/runs")
SIZES = ("small", "full")
Sweeps = Mapping[str, Sequence[PlannedRun]]  # by name


@dataclass(frozen=True, eq=False)
class Page:
    """The comparison that a page shows, and the runs that make its rows.

    Args:
        name: Name of the page's files.
        title: Title, with the paper and its table or figure.
        finding: One or two sentences, or a function that formats them from the rows.
        small: Runs by sweep name. A sweep has the name of its make target ("fig2"), or is a part of that
            ("fig2/mnist").
        columns: Columns of the rows, from runs and records.
        metrics: Keys of records that become rows.
        measured: Bullets on data, sizes, seeds and limits.
        tables: Rows -> {title: DataFrame}. The first table is shown, the others are folded.
        claims: Rows -> the claims of the paper. Default: no claims.
        figure: Rows -> matplotlib Figure, or None if the rows have nothing to plot. Default: no figure.
        full: Runs by sweep name at the size of the paper (recipes of conf/experiment).
        models: Runs by sweep name that train the models other runs start from, as task.init={runs}/<sweep>/<run>.
        reduced: Whether the small size is smaller than the paper's; verdicts state it.
        stand_in: Prefix of claim cases whose data replace the paper's data; verdicts state it.
    """

    name: str
    title: str
    finding: str | Callable[[Rows], str]
    small: Sweeps
    columns: Sequence[str]
    metrics: Sequence[str]
    measured: Sequence[str]
    tables: Callable[[Rows], Tables]
    claims: Callable[[Rows], list[Claim]] | None = None
    figure: Callable[[Rows], Any] | None = None
    full: Sweeps = field(default_factory=dict)
    models: Sweeps = field(default_factory=dict)
    reduced: bool = True
    stand_in: str = ""

    def finding_text(self, rows: Rows) -> str:
        """Return the finding, with the numbers of the rows."""
        return self.finding if isinstance(self.finding, str) else self.finding(rows)

    def verdicts(self, rows: Rows, size: str = "small") -> list[CaseResult]:
        """Return all cases of the claims with their verdicts."""
        claims = self.claims(rows) if self.claims else []
        return judge(claims, self.reduced and size == "small", self.stand_in)

    @property
    def targets(self) -> list[str]:
        """Names of the page's sweeps; a part such as "fig2/mnist" counts as "fig2"."""
        return [*dict.fromkeys(name.partition("/")[0] for name in [*self.small, *self.full])]

    def sweeps(self, size: str, wanted: str = "") -> Sweeps:
        """Return the sweeps of a size, or only the wanted one. Raises ConfigError."""
        sweeps = {"small": self.small, "full": self.full}[size]
        if not sweeps:
            other = "small" if size == "full" else "full"
            raise ConfigError(f"SIZE={size}: page {self.name} has only {other}")
        selected = {name: runs for name, runs in sweeps.items() if _is_part(name, wanted)}
        if not selected:
            raise unknown(f"sweep of the page {self.name}", wanted, [*sweeps])
        return selected

    def check(self) -> None:
        """Raise ConfigError if two different runs of a sweep would share a folder."""
        for name, runs in (*self.small.items(), *self.full.items(), *self.models.items()):
            overrides: dict[str, tuple[str, ...]] = {}
            for run in runs:
                if overrides.setdefault(run.name, run.overrides) != run.overrides:
                    raise ConfigError(
                        f"{self.name}, {name}: two different runs have the name {run.name}; add a column"
                    )

    def run(
        self,
        size: str = "small",
        wanted: str = "",
        methods: Sequence[str] = (),
        seeds: int = 0,
        launcher: str = "basic",
        out: Path | None = None,
    ) -> Path:
        """Make missing runs and write the rows of the page.

        Args:
            size: "small" or "full".
            wanted: A sweep; rows of other sweeps stay as they are. Default: all sweeps.
            methods: Only these methods; the rows go to outputs/report/part.
            seeds: Only the first seeds; the rows go to outputs/report/part. 0: all.
            launcher: Hydra's launcher.
            out: Folder of the rows. Default: that of the size.

        Returns:
            The folder of the rows.

        Raises:
            ConfigError: For unknown sweeps and methods.
            RunsFailed: If runs failed.
        """
        home = RUNS / self.name if size == "small" else RUNS / size / self.name
        is_partial = bool(methods or seeds)
        folder = out or folder_of(size, is_partial)
        selected = self.sweeps(size, wanted)
        if methods:
            _check_methods(methods, selected)
        planned = {}
        for name, runs in selected.items():
            planned[name] = [run for run in runs if _is_selected(run, methods, seeds)]
        for name, runs in {**self._needed_models(planned), **planned}.items():
            run_missing(runs, home / name, home, launcher)
        frames = []
        if wanted and not is_partial and has_rows(self.name, folder):
            previous = read_rows(self.name, folder).frame
            others = [not _is_part(name, wanted) for name in previous["sweep"]]
            frames.append(previous[others])
        for name, runs in planned.items():
            frames.append(rows_of_runs(runs, home / name, name, self.columns, self.metrics))
        frame = concatenate(frames)
        if methods:
            frame = _rows_of_methods(frame, methods)
        write_rows(self.name, frame, folder)
        return folder

    def _needed_models(self, planned: Sweeps) -> Sweeps:
        """Return the sweeps of models that runs start from, in the order of training."""
        needed = [*chain.from_iterable(planned.values())]
        models: Sweeps = {}
        for name, runs in reversed(self.models.items()):  # a model may start from an earlier one
            if any(_starts_from(run, name) for run in needed):
                needed += runs
                models = {name: runs, **models}
        return models


def _is_part(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}/")


def _method(run: PlannedRun) -> str:
    return str(run.columns.get("method", ""))


def _is_one_of(method: str, methods: Sequence[str]) -> bool:
    return method in methods or method.split(" ")[0] in methods


def _check_methods(methods: Sequence[str], selected: Sweeps) -> None:
    known = {_method(run) for run in chain.from_iterable(selected.values())} - {""}
    if known and not any(_is_one_of(method, methods) for method in known):
        raise unknown("method", " ".join(methods), sorted(known))


def _rows_of_methods(frame: pd.DataFrame, methods: Sequence[str]) -> pd.DataFrame:
    """Return the rows of methods; a run without a method may have recorded others too."""
    names = frame["method"].astype(str)
    selected = names.map(lambda name: name == "" or _is_one_of(name, methods))
    if not selected.any():
        raise unknown("method", " ".join(methods), sorted({*names}))
    return frame[selected]


def _is_selected(run: PlannedRun, methods: Sequence[str], seeds: int) -> bool:
    """Whether a run has one of the methods and one of the first seeds, where these are limited."""
    method = _method(run)
    if methods and method and not _is_one_of(method, methods):
        return False
    return not seeds or int(run.columns.get("seed", 0)) < seeds


def _starts_from(run: PlannedRun, sweep_name: str) -> bool:
    return any(f"{HOME}/{sweep_name}/" in override for override in run.overrides)


def folder_of(size: str, is_partial: bool = False) -> Path:
    """Return the folder of pages of a size, or its subfolder for partial pages."""
    folder = FOLDER if size == "small" else FOLDER / size
    return folder / "part" if is_partial else folder


def names() -> list[str]:
    """Names of all pages of crt_exp/experiments/papers."""
    modules = [module.name for module in pkgutil.iter_modules(papers.__path__)]
    return sorted(name for name in modules if name not in ("parts", "results"))


@cache
def load(name: str) -> Page:
    """Import a page.

    Args:
        name: A page, one of its sweeps ("table1"), or a file of your own ("mine/page.py").

    Raises:
        ConfigError: If there is no such page or file.
    """
    if name.endswith(".py"):
        return _load_file(Path(os.path.expanduser(name)))
    if name in names():
        return importlib.import_module(f"crt_exp.experiments.papers.{name}").page
    targets = {}
    for page_name in names():
        targets.update(dict.fromkeys(load(page_name).targets, page_name))
    if name not in targets:
        raise unknown("page", name, [*names(), *targets])
    return load(targets[name])


def _load_file(file: Path) -> Page:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page
