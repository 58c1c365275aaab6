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
from itertools import chain, groupby
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
        finding: One or two sentences, or a function that formats them from the rows.
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
    finding: str | Callable[[Rows], str]
    small: Mapping[str, Sequence[Run]]
    columns: Sequence[str]
    metrics: Sequence[str]
    measured: Sequence[str]
    full: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    models: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    data: str = ""
    reduced: bool = True
    stand_in: str = ""

    def finding_text(self, rows: Rows) -> str:
        """Return the finding, with the numbers of the rows."""
        return self.finding if isinstance(self.finding, str) else self.finding(rows)

    @property
    def targets(self) -> list[str]:
        """Names of the page's sweeps; a part such as "fig2/mnist" counts as "fig2"."""
        return [*dict.fromkeys(name.partition("/")[0] for name in [*self.small, *self.full])]

    def sweeps(self, size: str, wanted: str = "") -> dict[str, Sequence[Run]]:
        """Return the sweeps of a size, or only the wanted one. Raises ConfigError."""
        sweeps = {"small": self.small, "full": self.full}[size]
        if not sweeps:
            other = "small" if size == "full" else "full"
            raise ConfigError(f"SIZE={size}: page {self.name} has only {other}")
        selected = {name: runs for name, runs in sweeps.items() if _is_part(name, wanted)}
        if not selected:
            raise unknown(f"sweep of the page {self.name}", wanted, [*sweeps])
        return selected

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
        selected = self.sweeps(size, wanted)
        chosen = {}
        for name, runs in selected.items():
            chosen[name] = [run for run in runs if _is_chosen(run, methods, seeds)]
        needed = [*chain.from_iterable(chosen.values())]
        if methods and not needed:
            runs = chain.from_iterable(selected.values())
            known = {str(run.columns.get("method")) for run in runs}
            raise unknown("method", " ".join(methods), sorted(known))
        models = {}
        for name, runs in reversed(self.models.items()):  # a model may start from an earlier one
            if any(_starts_from(run, name) for run in needed):
                needed += runs
                models = {name: runs, **models}
        for name, runs in {**models, **chosen}.items():
            sweeps.run_missing(runs, home / name, home, launcher)
        frames = []
        if wanted and not (methods or seeds) and has_rows(self.name, folder):
            previous = files.read_rows(self.name, folder).frame
            others = [not _is_part(name, wanted) for name in previous["sweep"]]
            frames.append(previous[others])
        for name, runs in chosen.items():
            frame = sweeps.rows_of_runs(runs, home / name, name, self.columns, self.metrics)
            frames.append(frame)
        files.write_rows(self.name, files.concatenate(frames), folder)
        return folder


def _is_part(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.startswith(f"{wanted}/")


def _is_chosen(run: Run, methods: Sequence[str], seeds: int) -> bool:
    """Whether a run has one of the methods and one of the first seeds, where these are limited."""
    method = str(run.columns.get("method", ""))
    if methods and method and not {method, method.split(" ")[0]} & {*methods}:
        return False
    return not seeds or int(run.columns.get("seed", 0)) < seeds


def _starts_from(run: Run, sweep_name: str) -> bool:
    return any(f"{HOME}/{sweep_name}/" in override for override in run.overrides)


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
    targets = {}
    for page_name in names():
        targets.update(dict.fromkeys(load(page_name).page.targets, page_name))
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
    page = module.page
    rows = files.read_rows(page.name, folder)
    tested = [] if part else verdicts(module, rows, size)
    picture = module.figure(rows) if hasattr(module, "figure") else None
    drawn = picture is not None and leave_out_empty_axes(picture)
    if drawn:
        save_figure(picture, folder / f"{page.name}.png")
    if picture is not None:
        import matplotlib.pyplot as plt

        plt.close(picture)
    tables = module.tables(rows)
    text = page_text(page, rows, tested, tables, drawn, folder, size, part)
    write_atomic(folder / f"{page.name}.md", text)
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
    header, *rows = _cells(table)
    return f"{title}\n{pd.DataFrame(rows, columns=header).to_string(index=False)}"


def page_text(
    page: Page,
    rows: Rows,
    tested: Sequence[TestedClaim],
    tables: Mapping[str, pd.DataFrame],
    picture: bool,
    folder: Path,
    size: str,
    part: str,
) -> str:
    sections = [f"# {page.title}", _summary(page, rows, size, part)]
    bullets = [_line([*cases]) for _, cases in groupby(tested, lambda case: id(case.claim))]
    sections.append("\n".join(bullets))
    if picture:
        sections.append(f"![{page.title}]({page.name}.png)")
    shown, *folded = measured_tables(tables, part).items() or [None]
    if shown is None:
        sections.append(NO_TABLE)
    else:
        title, table = shown
        sections.append(f"## {title}\n\n{to_markdown(table)}")
    sections.append(details("All claims", claims_table(tested)))
    for title, table in folded:
        if len(table) <= LONG:
            sections.append(details(title, to_markdown(table)))
    measurement = measurement_details(page, rows, folder, size, part)
    sections.append(details("How it was measured", measurement))
    return "\n\n".join(section.rstrip() for section in sections if section) + "\n"


def _summary(page: Page, rows: Rows, size: str, part: str) -> str:
    """Return the finding, or the part or size that the rows have."""
    if part:
        return f"Part: {part}."
    if size != "small":
        return f"SIZE={size}."
    return page.finding_text(rows)


def measurement_details(page: Page, rows: Rows, folder: Path, size: str, part: str) -> str:
    frame = rows.frame
    days = sorted({*frame["date"]} - {""})
    period = f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days)
    commits = sorted({str(commit).rstrip("+") for commit in frame["commit"]} - {""})
    seconds = pd.to_numeric(frame["seconds"], errors="coerce").sum()
    command = f"python -m crt_exp report {page.name} --run"
    if size != "small":
        command += f" --size {size}"
    if part:
        command += f" {part}"
    path = files.rows_path(page.name, folder).name
    bullets = [
        *page.measured,
        f"Rows: [{path}]({path}), {len(frame)} values, {period}, {seconds:.0f} s of computing.",
        "; ".join(frame["versions"].unique()) + ".",
        f"Command: `{command}`. Commits: {', '.join(commits) or 'none'}.",
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets)


# ---- claims


def _line(cases: Sequence[TestedClaim]) -> str:
    """Format a claim, with all its cases, as one Markdown bullet."""
    first = cases[0]
    claim = first.claim
    papers = {case.paper for case in cases if case.paper}
    paper = f" (paper: {papers.pop()})" if len(papers) == 1 else ""
    if claim.not_measured:
        return f"- **{NOT_MEASURED}**: {claim.text}{paper}: {claim.not_measured}."
    if len(cases) == 1:
        name = f"{first.case}: " if first.case else ""
        fails = claim.fails.get(first.case)
        check = f"; sanity check: {fails}" if fails else ""
        return f"- **{first.verdict}**: {name}{claim.text}: {first.to_text()}{paper}{check}"
    ordered = sorted(cases, key=lambda case: WORDS.index(case.base_verdict))
    count = Counter(case.verdict for case in ordered)
    words = ", ".join(f"{word} in {number}" for word, number in count.items())
    numbers = [case.number for case in cases]
    base = "e^" if claim.power else ""
    ends = f"{base}{min(numbers):.3g} to {base}{max(numbers):.3g} {claim.unit}".rstrip()
    return f"- **{words}** of {len(cases)}: {claim.text}: {ends}{paper}"


def claims_table(tested: Sequence[TestedClaim]) -> str:
    """Format all cases as a Markdown table; above LONG cases, link claims.csv; none as ""."""
    measured = [case for case in tested if not case.claim.not_measured]
    if not measured:
        return ""
    if len(measured) > LONG:
        cases = f"{len(measured)} cases: the rows of this page in [claims.csv](claims.csv)."
        return f"{cases}\n\n{INTERVAL}"
    header = ["claim", "case", "ours", "threshold", "paper", "n", "p", "verdict", "note"]
    table = markdown(header, [_claims_row(case) for case in measured])
    return f"{table}\n{INTERVAL}"


def _claims_row(case: TestedClaim) -> list[Any]:
    n = case.estimate.n
    p = f"{case.p:.2g}" if n > 1 and not np.isnan(case.p) else ""
    notes = [case.claim.fails.get(case.case), theory(case), case.claim.reason]
    return [
        case.claim.text,
        case.case,
        case.to_text(),
        threshold(case),
        case.paper,
        n or "exact",
        p,
        case.verdict,
        "; ".join(note for note in notes if note),
    ]


def threshold(case: TestedClaim) -> str:
    base = "e^" if case.claim.power else ""
    value = case.threshold or float(case.claim.log)
    return f"{case.side} {base}{value:g}"


def theory(case: TestedClaim) -> str:
    closed_form = case.claim.theory.get(case.case)
    if closed_form is None:
        return ""
    if case.claim.log:
        closed_form = np.exp(closed_form)
    return f"theory: {closed_form:.3g}"


def claims_frame(page: str, tested: Sequence[TestedClaim]) -> pd.DataFrame:
    """Return one row per case, for claims.csv."""
    table = []
    for case in tested:
        low, high = case.ends
        table.append(
            {
                "page": page,
                "claim": case.claim.text,
                "case": case.case,
                "verdict": case.verdict,
                "value": case.number,
                "low": low,
                "high": high,
                "threshold": threshold(case),
                "unit": case.claim.unit,
                "n": case.estimate.n,
                "p_holm": case.p,
                "paper": case.paper,
                "theory": theory(case),
                "sanity_check": case.claim.fails.get(case.case, ""),
                "reason": case.claim.reason or case.claim.not_measured,
                "needs": case.claim.needs,
            }
        )
    return pd.DataFrame(table)


# ---- tables


def details(summary: str, text: str) -> str:
    """Wrap text in a folded HTML section, for GitHub and the website."""
    if not text:
        return ""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def measured_tables(tables: Mapping[str, pd.DataFrame], part: str) -> dict[str, pd.DataFrame]:
    """Leave out tables and rows without a measured value; in a partial page, columns too.

    Labels with the word "paper" mark values of the papers.
    """
    selected = {}
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
            selected[title] = table.loc[rows, columns]
    return selected


def to_markdown(table: pd.DataFrame) -> str:
    """Format a table as Markdown, with the index as first column."""
    header, *rows = _cells(table)
    return markdown(header, rows)


def _cells(table: pd.DataFrame) -> list[list[str]]:
    """Return the header, then the rows, as lists; missing values are empty."""
    cells = [[table.index.name or "", *map(str, table.columns)]]
    for name, values in zip(table.index, table.to_numpy(object)):
        row = [str(name)]
        for value in values:
            row.append("" if pd.isna(value) else str(value))
        cells.append(row)
    return cells


def label(method: str, labels: Mapping[str, str] | None = None) -> str:
    """Format a method as in the papers: "favorpp m=256" becomes "FAVOR++, m = 256"."""
    if labels and method in labels:
        return labels[method]
    name, *options = method.split(" ")
    if not all("=" in option for option in options):
        return method
    words = [LABELS.get(name, name)]
    words += [option.replace("=", " = ") for option in options]
    return ", ".join(words)


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
    labels = methods if isinstance(methods, Mapping) else None
    if format is None:

        def format(values: pd.Series) -> str:
            return f"{mean_ci(values, overlap=overlap):{spec}}"

    table = {}
    for method in methods:
        if method == less:
            continue
        cells = []
        for where in columns.values():
            if less:
                values = scale * rows.paired(method, less, **where)
            else:
                values = scale * rows.values(method=method, **where)
            cells.append(format(values) if len(values) else "")
        if any(cells):
            table[label(method, labels)] = cells
    return pd.DataFrame.from_dict(table, orient="index", columns=[*columns]).rename_axis("method")
