"""A page of results: a Python file in crt_exp/papers/, or one of your own, over a table of rows.

The file holds `page = Page(...)` and functions of its rows (`crt_exp.report.rows.Rows`):

    claims(rows) -> list[Claim]                 the paper's claims
    tables(rows) -> {title: DataFrame}          the first is shown, the others are folded
    figure(rows) -> matplotlib Figure           optional
"""

import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

from crt_exp import papers
from crt_exp.config import ConfigError, unknown
from crt_exp.report import rows, sweeps
from crt_exp.report.sweeps import HOME, Run

RUNS = Path("outputs/runs")
SIZES = ("small", "full")


@dataclass(frozen=True)
class Page:
    """What a page compares, and how its rows are made.

    name: of its files. title: with paper and table or figure. finding: one or two sentences.
    small, full: sweep -> runs; a sweep has the name of its make target, "fig2", or is a part of it, "fig2/mnist".
    full: the papers' size, the recipes of conf/experiment. models: sweep -> runs that train what other runs start from,
    as task.init={runs}/<sweep>/<run>.
    columns: of the rows, taken from runs and records. metrics: keys of records that become rows.
    measured: bullets on data, sizes, seeds and limits. data: what the runs need.
    reduced: whether the small size is smaller than the paper's; verdicts say so.
    """

    name: str
    title: str
    finding: str
    small: Mapping[str, Sequence[Run]]
    columns: Sequence[str]
    metrics: Sequence[str]
    measured: Sequence[str]
    full: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    models: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    data: str = ""
    reduced: bool = True

    @property
    def targets(self) -> list[str]:
        """The names of its sweeps, of parts that of the whole."""
        return [*dict.fromkeys(name.partition("/")[0] for name in [*self.small, *self.full])]

    def sweeps(self, size: str, wanted: str = "") -> dict[str, Sequence[Run]]:
        """Those of a size, or the one that is wanted. Raises ConfigError where there is none."""
        made = getattr(self, size)
        if not made:
            raise ConfigError(f"SIZE={size}: the page {self.name} has only {'small' if size == 'full' else 'full'}")
        found = {name: runs for name, runs in made.items() if _is_part(name, wanted)}
        if not found:
            raise unknown(f"sweep of the page {self.name}", wanted, [*made])
        return found

    def run(self, size: str = "small", wanted: str = "", methods: Sequence[str] = (), seeds: int = 0,
            launcher: str = "basic", out: Path | None = None) -> Path:
        """Runs what is missing and writes the rows; those of sweeps that are not wanted stay. methods, seeds: only
        these methods and the first seeds, whose rows go to outputs/report/part. Returns the folder of the rows."""
        home = RUNS / self.name if size == "small" else RUNS / size / self.name
        folder = out or folder_of(size, bool(methods or seeds))
        chosen = {name: [run for run in runs if _is_chosen(run, methods, seeds)]
                  for name, runs in self.sweeps(size, wanted).items()}
        needed, models = [run for runs in chosen.values() for run in runs], {}
        if methods and not needed:
            raise unknown("method", " ".join(methods), sorted({
                str(run.columns.get("method")) for runs in self.sweeps(size, wanted).values() for run in runs}))
        for name, runs in reversed(self.models.items()):  # a model may start from one before it
            if any(f"{HOME}/{name}/" in override for run in needed for override in run.overrides):
                needed += runs
                models = {name: runs, **models}
        for name, runs in {**models, **chosen}.items():
            sweeps.run_missing(runs, home / name, home, launcher)
        frames = [sweeps.rows_of_runs(runs, home / name, name, self.columns, self.metrics)
                  for name, runs in chosen.items()]
        if wanted and not (methods or seeds) and has_rows(self.name, folder):
            kept = rows.read_rows(self.name, folder).frame
            frames.insert(0, kept[[not _is_part(name, wanted) for name in kept["sweep"]]])
        rows.write_rows(self.name, rows.concatenated(frames), folder)
        return folder


def _is_part(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}/")


def _is_chosen(run: Run, methods: Sequence[str], seeds: int) -> bool:
    name = str(run.columns.get("method", ""))
    return (not methods or not name or name in methods or name.split(" ")[0] in methods) and (
        not seeds or int(run.columns.get("seed", 0)) < seeds)


def folder_of(size: str, part: bool = False) -> Path:
    """Where a page of a size is written; a part of it apart."""
    folder = rows.FOLDER if size == "small" else rows.FOLDER / size
    return folder / "part" if part else folder


def has_rows(name: str, folder: Path = rows.FOLDER) -> bool:
    return any((folder / f"{name}{ending}").is_file() for ending in (".csv", ".csv.gz"))


def names() -> list[str]:
    """All pages of crt_exp/papers."""
    return sorted(module.name for module in pkgutil.iter_modules(papers.__path__) if module.name != "results")


@cache
def load(name: str) -> ModuleType:
    """The module of a page, of the page that has a sweep of this name, or of a file of your own, "mine/page.py".
    Raises ConfigError."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: there is no such file")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if name in names():
        return importlib.import_module(f"crt_exp.papers.{name}")
    targets = {target: each for each in names() for target in load(each).page.targets}
    if name not in targets:
        raise unknown("page", name, [*names(), *targets])
    return load(targets[name])


def check(page: Page) -> None:
    """Raises ConfigError where two runs of a sweep would share a folder."""
    for name, runs in (*page.small.items(), *page.full.items(), *page.models.items()):
        seen: dict[str, tuple[str, ...]] = {}
        for run in runs:
            if seen.setdefault(run.name, run.overrides) != run.overrides:
                raise ConfigError(f"{page.name}, {name}: two runs are called {run.name}")

