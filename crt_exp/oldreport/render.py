"""From draws to outputs/report/<name>.md and .png; the csv next to them holds the draws, <name>-tables.csv what is
too long for a page."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from crt_exp.config import own_folders
from crt_exp.drawing import save_figure
from crt_exp.oldreport import figures, tables, verdicts
from crt_exp.oldreport.evidence import LEVEL, LOOKS
from crt_exp.oldreport.page import Page, home
from crt_exp.runner.run import write_atomic
from crt_exp.measure.runs import flat
from crt_exp.measure.training import Grid

TABLES = "-tables.csv"  # of the tables that are too long for a page
CODE = "Code:"  # begins the line that depends on the history of the checkout, and on nothing else of a page


def write(page: Page) -> Path:
    """The page, its picture and the csv of its long tables, each written atomically."""
    picture = page.own("figure")(page) if page.own("figure") else figures.figure(page)
    path = page.folder / f"{page.name}.md"
    sections = sections_of(page)
    write_atomic(path, text(page, picture is not None, sections))
    write_tables(page.folder / f"{page.name}{TABLES}", tables.fitting(sections)[1])
    if picture is not None:
        save_figure(picture, page.folder / f"{page.name}.png")
        import matplotlib.pyplot as plt

        plt.close(picture)
    return path


def sections_of(page: Page) -> list[tables.Table | str]:
    return (page.own("sections") or tables.sections)(page)


def write_tables(path: Path, apart: Sequence[tables.Table]) -> None:
    """One row a value; none of an earlier page is left where all tables fit."""
    if apart:
        frame = pd.DataFrame([cell for table in apart for cell in table.cells()])
        write_atomic(path, frame.to_csv(index=False, lineterminator="\n"))
    else:
        path.unlink(missing_ok=True)


def text(page: Page, picture: bool, sections: Sequence[tables.Table | str] | None = None) -> str:
    """A sentence, a picture, at most five lines of claims, then tables; what these rest on is folded. A part of a page
    judges nothing: its claims and their correction are those of the whole."""
    spec, (shown, apart) = page.spec, tables.fitting(sections_of(page) if sections is None else sections)
    at_home = page.size == home(spec) and not page.part
    parts = [f"# {spec['title']}", " ".join(spec["finding"].split()) if at_home and "finding" in spec else "",
             *([] if page.part else page.first_lines()), f"![{spec['title']}]({page.name}.png)" if picture else "",
             *([] if page.part else verdicts.sections(page)), *(str(section).rstrip() for section in shown),
             linked(page, apart),
             verdicts.details("How it was measured", how(page)), verdicts.details("Choices", choices(page)),
             origin(page)]
    return "\n\n".join(part for part in parts if part) + "\n"


def linked(page: Page, apart: Sequence[tables.Table]) -> str:
    """The tables that are too long for the page, by name."""
    if not apart:
        return ""
    kinds: dict[str, list[tables.Table]] = {}
    for table in apart:
        kinds.setdefault(table.kind, []).append(table)
    named = "; ".join(f"{each[0].title} ({len(each[0].rows)} rows{f'; {len(each)} such tables' * (len(each) > 1)})"
                      for each in kinds.values())
    return f"More tables, as [csv]({page.name}{TABLES}): {named}."


def how(page: Page) -> str:
    """Facts, gates, the unit of independence, and the commands of the runs."""
    unit = f"Unit of independence: {page.spec['independence']}." if "independence" in page.spec else ""
    gates = [] if page.part else [str(gate) for gate in dict.fromkeys(gate for _, gate in page.gates)]
    told = "\n".join(["What the settings can tell:", "", *gates]) if gates else ""
    return "\n\n".join(part for part in (facts(page), unit, told, commands(page)) if part)


def choices(page: Page) -> str:
    """Settings tuned, seeds added, criteria changed: of the committed page, to which another size refers."""
    sentences = [*page.spec.get("choices", [])]
    if sentences and page.size != home(page.spec):
        sentences = [f"What is asked was chosen for the committed page, outputs/report/{page.name}.md, and with its "
                     "draws."]
    if page.spec.get("looks", 1) > 1:
        sentences.append(f"Judged at {LOOKS[page.spec['looks']]}, the level that {page.spec['looks']} looks leave "
                         f"instead of {LEVEL}.")
    return "\n".join(f"- {sentence}" for sentence in sentences)


def commands(page: Page) -> str:
    """Of pages whose file says `commands`: the command of each run or, at its home size, the text that stands there;
    empty for others."""
    said = page.spec.get("commands", "")
    if not said or isinstance(said, str) and page.size == home(page.spec):
        return said.strip() if said else ""
    order = {arm: place for place, arm in enumerate(page.spec["arms"])}
    alike: dict[str, list[Grid]] = {}
    for grid in (Grid.read(each) for each in page.spec["sizes"][page.size]["runs"]):
        alike.setdefault(str((grid.common, grid.settings)), []).append(grid)
    return "\n\n".join(["### Commands", *(commands_of(page, grids, order) for grids in alike.values())])


def commands_of(page: Page, grids: Sequence[Grid], order: Mapping[str, int]) -> str:
    """Of grids that share options and settings."""
    first, arms = grids[0], {arm: each for each in grids for arm in each.arms}
    return "\n\n".join([
        f"A run is `python -m crt_exp {' '.join(flat(first.common))} seed=0` with the options of a setting and of an "
        "arm.",
        "\n".join(f"- {name}: `{' '.join(flat(options))}`" for name, options in first.settings.items()),
        "\n".join(f"- {page.label(arm)}: {words_of(arms[arm], arm)}"
                  for arm in sorted(arms, key=lambda arm: order.get(arm, len(order))))])


def words_of(grid: Grid, arm: str) -> str:
    """The options of an arm, and the models that its runs begin with."""
    if isinstance(given := grid.arms[arm], Mapping):
        return f"the run {given['start']} of `starts`"
    begun = [f", `{option}=` the run {name} of `starts`" for option, name in grid.before.items()]
    return "".join([f"`{' '.join(grid.words(arm))}`", *begun])


def origin(page: Page) -> str:
    """When it was measured, with which versions, how long it took, and the command."""
    frame = page.draws
    days = sorted({*frame["date"]} - {""})
    when = "" if not days else f" of {days[0]}" + (f" to {days[-1]}" if days[-1] > days[0] else "")
    made = "; ".join(dict.fromkeys(frame["versions"][frame["versions"] != ""]))
    packed = ".gz" * (page.folder / f"{page.name}.csv.gz").is_file()
    drawn = (f"Draws: [{page.name}.csv]({page.name}.csv{packed}), {len(frame)} rows{when}, "
             f"{frame['seconds'].sum():.0f} s of computing.")
    some = f"A part of the page: {page.part} of all that it compares." if page.part else ""
    commits = ", ".join(f"commit {each}" for each in sorted({each.rstrip("+") for each in frame["commit"]} - {""}))
    return "\n\n".join(part for part in (some, f"{drawn} {made}. Command: `{command(page)}`.",
                                         f"{CODE} {commits or 'no commit'}.") if part)


def command(page: Page) -> str:
    part = page.part if "=" in page.part else ""
    if page.is_own:
        return own_command(page, part)
    size = "" if page.size == home(page.spec) else f" SIZE={page.size}"
    return f"make {page.name}{size}{part and f' {part}'}"


def own_command(page: Page, part: str) -> str:
    """Of a file that `make` does not know: with the folder of the names in it."""
    size = [f"--size {page.size}"] * (page.size != home(page.spec))
    chosen = re.sub(r"\b(ARMS|SEEDS)=", lambda word: f"--{word[1].lower()} ", part)
    here = Path.cwd()
    named = [folder.relative_to(here) if folder.is_relative_to(here) else folder for folder in own_folders()]
    folders = [f"--config-dir {shlex.quote(str(folder))}" for folder in named]
    return " ".join(filter(None, ["python -m crt_exp.oldreport", shlex.quote(page.path), *folders, *size, chosen]))


def facts(page: Page) -> str:
    """Those of the file, which are of its home size; of another one its own, and where its settings stand."""
    if page.size == home(page.spec):
        return " ".join(page.spec.get("facts", "").split()).replace("{size}", page.size)
    own = " ".join(page.spec["sizes"][page.size].get("facts", "").split())
    return f"SIZE={page.size}: its settings are `sizes: {page.size}` of {page.declared}. {own}".rstrip()
