"""A page of results: a Python file, and the Markdown rendered from its rows.

The file, in crt_exp/experiments/papers/ or your own, defines `page = Page(...)` and functions of its rows
(`crt_exp.experiments.report.rows.Rows`):

    claims(rows) -> list[Claim]                 the paper's claims (optional)
    tables(rows) -> {title: DataFrame}          the first table is shown, the others are folded
    figure(rows) -> matplotlib Figure           optional

The Markdown shows claims, figure and first table; further tables and the description of the measurement are folded.
"""

import importlib.util
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.experiments import papers
from crt_exp.experiments.drawing import LABELS, markdown, save_figure
from crt_exp.experiments.report import rows as files
from crt_exp.experiments.report import sweeps
from crt_exp.experiments.report.rows import NOT_MEASURED, WORDS, Rows, TestedClaim, judge, mean_ci
from crt_exp.experiments.report.sweeps import HOME, Run
from crt_exp.experiments.runner.run import write_atomic
from crt_exp.experiments.runner.sweep import aligned
from crt_exp.registry import ConfigError, unknown

RUNS = Path("outputs/runs")
SIZES = ("small", "full")
LONG = 40  # maximum rows of a folded table; longer tables are left out
NO_TABLE = "No table: the values need rows of other sweeps, methods or seeds."
INTERVAL = (
    "Intervals of claims are those of the test after Holm's correction over the page: they exclude the "
    "threshold exactly where a claim is supported or contradicted."
)


@dataclass(frozen=True)
class Page:
    """The comparison that a page shows, and the runs that make its rows.

    Args:
        name: Name of the page's files.
        title: Title, with the paper and its table or figure.
        finding: One or two sentences.
        small: Runs by sweep name. A sweep has the name of its make target ("fig2"), or is a part of that
            ("fig2/mnist").
        columns: Columns of the rows, from runs and records.
        metrics: Keys of records that become rows.
        measured: Bullets on data, sizes, seeds and limits.
        full: Runs by sweep name at the size of the paper (recipes of conf/experiment).
        models: Runs by sweep name that train the models other runs start from, as task.init={runs}/<sweep>/<run>.
        data: The data that the runs need.
        reduced: Whether the small size is smaller than the paper's; verdicts state it.
        stand_in: Prefix of claim cases whose data replace the paper's data; verdicts state it.
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
    stand_in: str = ""

    @property
    def targets(self) -> list[str]:
        """Names of the page's sweeps; a part such as "fig2/mnist" counts as "fig2"."""
        return [*dict.fromkeys(name.partition("/")[0] for name in [*self.small, *self.full])]

    def sweeps(self, size: str, wanted: str = "") -> dict[str, Sequence[Run]]:
        """Return the sweeps of a size, or only the wanted one. Raises ConfigError."""
        made = getattr(self, size)
        if not made:
            raise ConfigError(
                f"SIZE={size}: page {self.name} has only {'small' if size == 'full' else 'full'}"
            )
        found = {name: runs for name, runs in made.items() if _is_part(name, wanted)}
        if not found:
            raise unknown(f"sweep of the page {self.name}", wanted, [*made])
        return found

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
        folder = out or folder_of(size, bool(methods or seeds))
        chosen = {
            name: [run for run in runs if _is_chosen(run, methods, seeds)]
            for name, runs in self.sweeps(size, wanted).items()
        }
        needed, models = [run for runs in chosen.values() for run in runs], {}
        if methods and not needed:
            raise unknown(
                "method",
                " ".join(methods),
                sorted(
                    {
                        str(run.columns.get("method"))
                        for runs in self.sweeps(size, wanted).values()
                        for run in runs
                    }
                ),
            )
        for name, runs in reversed(self.models.items()):  # a model may start from an earlier one
            if any(f"{HOME}/{name}/" in override for run in needed for override in run.overrides):
                needed += runs
                models = {name: runs, **models}
        for name, runs in {**models, **chosen}.items():
            sweeps.run_missing(runs, home / name, home, launcher)
        frames = [
            sweeps.rows_of_runs(runs, home / name, name, self.columns, self.metrics)
            for name, runs in chosen.items()
        ]
        if wanted and not (methods or seeds) and has_rows(self.name, folder):
            kept = files.read_rows(self.name, folder).frame
            frames.insert(0, kept[[not _is_part(name, wanted) for name in kept["sweep"]]])
        files.write_rows(self.name, files.concatenate(frames), folder)
        return folder


def _is_part(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}/")


def _is_chosen(run: Run, methods: Sequence[str], seeds: int) -> bool:
    name = str(run.columns.get("method", ""))
    return (not methods or not name or name in methods or name.split(" ")[0] in methods) and (
        not seeds or int(run.columns.get("seed", 0)) < seeds
    )


def folder_of(size: str, part: bool = False) -> Path:
    """Return the folder of pages of a size, or its subfolder for partial pages."""
    folder = files.FOLDER if size == "small" else files.FOLDER / size
    return folder / "part" if part else folder


def has_rows(name: str, folder: Path = files.FOLDER) -> bool:
    try:
        files.rows_path(name, folder)
    except FileNotFoundError:
        return False
    return True


def names() -> list[str]:
    """Names of all pages of crt_exp/papers."""
    return sorted(
        module.name for module in pkgutil.iter_modules(papers.__path__) if module.name != "results"
    )


@cache
def load(name: str) -> ModuleType:
    """Import the module of a page.

    Args:
        name: A page, one of its sweeps ("table1"), or a file of your own ("mine/page.py").

    Raises:
        ConfigError: If there is no such page or file.
    """
    if name.endswith(".py"):
        file = Path(os.path.expanduser(name))
        if not file.is_file():
            raise ConfigError(f"{name}: no such file")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if name in names():
        return importlib.import_module(f"crt_exp.experiments.papers.{name}")
    targets = {target: each for each in names() for target in load(each).page.targets}
    if name not in targets:
        raise unknown("page", name, [*names(), *targets])
    return load(targets[name])


def check(page: Page) -> None:
    """Raise ConfigError if two different runs of a sweep would share a folder."""
    for name, runs in (*page.small.items(), *page.full.items(), *page.models.items()):
        seen: dict[str, tuple[str, ...]] = {}
        for run in runs:
            if seen.setdefault(run.name, run.overrides) != run.overrides:
                raise ConfigError(
                    f"{page.name}, {name}: two different runs have the name {run.name}; add a column"
                )


# ---- Markdown


def render(
    module: ModuleType, folder: Path = files.FOLDER, size: str = "small", part: str = ""
) -> list[TestedClaim]:
    """Write <page>.md and <page>.png from the rows in `folder`; return the verdicts.

    part: command-line options of a partial page (some methods or seeds), which has no verdicts.
    """
    page, rows = module.page, files.read_rows(module.page.name, folder)
    tested = [] if part else verdicts(module, rows, size)
    picture = module.figure(rows) if hasattr(module, "figure") else None
    drawn = picture is not None and leave_out_empty_axes(picture)
    if drawn:
        save_figure(picture, folder / f"{page.name}.png")
    if picture is not None:
        import matplotlib.pyplot as plt

        plt.close(picture)
    write_atomic(
        folder / f"{page.name}.md",
        page_text(page, rows, tested, module.tables(rows), drawn, folder, size, part),
    )
    return tested


def leave_out_empty_axes(figure: Any) -> bool:
    """Remove axes that show no value of a row; return whether others are left."""
    for ax in figure.axes:
        lines = [line for line in ax.lines if line.get_transform() == ax.transData]
        if not (lines or ax.images or ax.collections):
            ax.remove()
    return bool(figure.axes)


def verdicts(module: ModuleType, rows: Rows, size: str = "small") -> list[TestedClaim]:
    """Return the page's claims with their verdicts."""
    claims = module.claims(rows) if hasattr(module, "claims") else []
    return judge(claims, module.page.reduced and size == "small", module.page.stand_in)


def first_table(module: ModuleType, folder: Path = files.FOLDER, part: str = "") -> str:
    """Format the first table of a page for the terminal."""
    tables = measured_tables(module.tables(files.read_rows(module.page.name, folder)), part)
    if not tables:
        return NO_TABLE
    title, table = next(iter(tables.items()))
    return "\n".join([title, *aligned([list(map(str, row)) for row in _cells(table)])])


def page_text(
    page: Any,
    rows: Rows,
    tested: Sequence[TestedClaim],
    tables: Mapping[str, pd.DataFrame],
    picture: bool,
    folder: Path,
    size: str,
    part: str,
) -> str:
    (title, first), *others = measured_tables(tables, part).items() or [("", None)]
    whole = size == "small" and not part
    sections = [
        f"# {page.title}",
        page.finding if whole else f"Part: {part}." if part else f"SIZE={size}.",
        "\n".join(_line([*cases]) for _, cases in groupby(tested, lambda each: id(each.claim))),
        f"![{page.title}]({page.name}.png)" if picture else "",
        NO_TABLE if first is None else f"## {title}\n\n{to_markdown(first)}",
        details("All claims", claims_table(tested)),
        *(
            details(name, to_markdown(table)) if len(table) <= LONG else ""
            for name, table in others
        ),
        details("How it was measured", measurement_details(page, rows, folder, size, part)),
    ]
    return "\n\n".join(section.rstrip() for section in sections if section) + "\n"


def measurement_details(page: Any, rows: Rows, folder: Path, size: str, part: str) -> str:
    frame = rows.frame
    days = sorted({*frame["date"]} - {""})
    commits = sorted({str(each).rstrip("+") for each in frame["commit"]} - {""})
    seconds = pd.to_numeric(frame["seconds"], errors="coerce").sum()
    command = (
        f"python -m crt_exp report {page.name} --run"
        + f" --size {size}" * (size != "small")
        + f" {part}" * bool(part)
    )
    path = files.rows_path(page.name, folder).name
    return "\n".join(
        f"- {line}"
        for line in [
            *page.measured,
            f"Rows: [{path}]({path}), {len(frame)} values, {' to '.join(days[:1] + days[1:][-1:])}, "
            f"{seconds:.0f} s of computing.",
            "; ".join(frame["versions"].unique()) + ".",
            f"Command: `{command}`. Commits: {', '.join(commits) or 'none'}.",
        ]
    )


# ---- claims


def _line(cases: Sequence[TestedClaim]) -> str:
    """Format a claim, with all its cases, as one Markdown bullet."""
    claim, first = cases[0].claim, cases[0]
    papers = dict.fromkeys(each.paper for each in cases if each.paper)
    paper = f" (paper: {next(iter(papers))})" if len(papers) == 1 else ""
    if claim.not_measured:
        return f"- **{NOT_MEASURED}**: {claim.text}{paper}: {claim.not_measured}."
    if len(cases) == 1:
        case = f"{first.case}: " if first.case else ""
        check = f"; sanity check: {claim.fails[first.case]}" if claim.fails.get(first.case) else ""
        return f"- **{first.verdict}**: {case}{claim.text}: {first.to_text()}{paper}{check}"
    count = Counter(
        each.verdict for each in sorted(cases, key=lambda each: WORDS.index(each.base_verdict))
    )
    words = ", ".join(f"{word} in {number}" for word, number in count.items())
    ends = " to ".join(
        "e^" * claim.power + f"{end(each.number for each in cases):.3g}" for end in (min, max)
    )
    return f"- **{words}** of {len(cases)}: {claim.text}: {f'{ends} {claim.unit}'.rstrip()}{paper}"


def claims_table(tested: Sequence[TestedClaim]) -> str:
    """Format all cases as a Markdown table; above LONG cases, link claims.csv; none as ""."""
    measured = [each for each in tested if not each.claim.not_measured]
    if not measured:
        return ""
    if len(measured) > LONG:
        cases = f"{len(measured)} cases: the rows of this page in [claims.csv](claims.csv)."
        return f"{cases}\n\n{INTERVAL}"
    table = markdown(
        ["claim", "case", "ours", "threshold", "paper", "n", "p", "verdict", "note"],
        [
            [
                each.claim.text,
                each.case,
                each.to_text(),
                threshold(each),
                each.paper,
                each.estimate.n or "exact",
                f"{each.p:.2g}" if each.estimate.n > 1 and each.p == each.p else "",
                each.verdict,
                "; ".join(
                    filter(
                        None, [each.claim.fails.get(each.case, ""), theory(each), each.claim.reason]
                    )
                ),
            ]
            for each in measured
        ],
    )
    return f"{table}\n{INTERVAL}"


def threshold(each: TestedClaim) -> str:
    return (
        f"{each.side} {'e^' if each.claim.power else ''}{each.threshold or float(each.claim.log):g}"
    )


def theory(each: TestedClaim) -> str:
    closed = each.claim.theory.get(each.case)
    return "" if closed is None else f"theory: {np.exp(closed) if each.claim.log else closed:.3g}"


def claims_frame(page: str, tested: Sequence[TestedClaim]) -> pd.DataFrame:
    """Return one row per case, for claims.csv."""
    return pd.DataFrame(
        [
            {
                "page": page,
                "claim": each.claim.text,
                "case": each.case,
                "verdict": each.verdict,
                "value": each.number,
                "low": each.ends[0],
                "high": each.ends[1],
                "threshold": threshold(each),
                "unit": each.claim.unit,
                "n": each.estimate.n,
                "p_holm": each.p,
                "paper": each.paper,
                "theory": theory(each),
                "sanity_check": each.claim.fails.get(each.case, ""),
                "reason": each.claim.reason or each.claim.not_measured,
                "needs": each.claim.needs,
            }
            for each in tested
        ]
    )


# ---- tables


def details(summary: str, text: str) -> str:
    """Wrap text in a folded HTML section, for GitHub and the website."""
    return (
        f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'
        if text
        else ""
    )


def measured_tables(tables: Mapping[str, pd.DataFrame], part: str) -> dict[str, pd.DataFrame]:
    """Leave out tables and rows without a measured value; in a partial page, columns too.

    Labels with the word "paper" mark values of the papers.
    """
    found = {}
    for title, table in tables.items():
        filled = (table.notna() & (table != "")).to_numpy(bool)
        quoted_rows = np.array(["paper" in str(name) for name in table.index], bool)
        quoted_columns = np.array(["paper" in str(name) for name in table.columns], bool)
        measured = filled & ~quoted_rows[:, None] & ~quoted_columns
        rows = measured.any(axis=1) | quoted_rows
        columns = measured.any(axis=0) | (quoted_columns & filled[rows].any(axis=0))
        if not part:
            columns[:] = True
        if measured.any():
            found[title] = table.loc[rows, columns]
    return found


def to_markdown(table: pd.DataFrame) -> str:
    """Format a table as Markdown, with the index as first column."""
    header, *rows = _cells(table)
    return markdown(header, rows)


def _cells(table: pd.DataFrame) -> list[list]:
    """Return the header, then the rows, as lists."""
    return [
        [table.index.name or "", *map(str, table.columns)],
        *(
            [name, *("" if value is None or value != value else value for value in values)]
            for name, values in zip(table.index, table.to_numpy(object))
        ),
    ]


def label(method: str, labels: Mapping[str, str] | None = None) -> str:
    """Format a method as in the papers: "favorpp m=256" becomes "FAVOR++, m = 256"."""
    if labels and method in labels:
        return labels[method]
    name, *options = method.split(" ")
    if not all("=" in option for option in options):
        return method
    return ", ".join([LABELS.get(name, name), *(option.replace("=", " = ") for option in options)])


def mean_table(
    rows: Rows,
    columns: Mapping[str, Mapping[str, Any]],
    methods: Sequence[str] | Mapping[str, str] = (),
    scale: float = 1.0,
    spec: str = ".3g",
    overlap: float = 0.0,
    format: Callable[[pd.Series], str] | None = None,
    less: str = "",
) -> pd.DataFrame:
    """Tabulate the mean ± 95% CI of each method (rows) in each column.

    Args:
        columns: Column name to the filter of its rows, such as {"metric": ..., "dataset": ...}.
        methods: Methods, or a mapping from methods to labels. Default: the methods of the first column.
        scale: Factor on all values, such as 100 for percent.
        overlap: See `mean_ci`.
        format: Function from samples to text, in place of the mean.
        less: Method whose values are subtracted, sample by sample.
    """
    methods = methods or rows.methods(**next(iter(columns.values())))
    made, show = {}, format or (lambda values: f"{mean_ci(values, overlap=overlap):{spec}}")
    for method in methods:
        found = [
            scale
            * (rows.paired(method, less, **where) if less else rows.values(method=method, **where))
            for where in columns.values()
        ]
        if method != less and any(map(len, found)):
            made[label(method, methods if isinstance(methods, Mapping) else None)] = [
                show(values) if len(values) else "" for values in found
            ]
    return pd.DataFrame.from_dict(made, orient="index", columns=[*columns]).rename_axis("method")
