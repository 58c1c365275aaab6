"""From draws to outputs/report/<name>.md and .png; the csv next to them holds the draws."""

import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from crt_exp.config import own_folders
from crt_exp.drawing import save_figure
from crt_exp.report import figures, tables
from crt_exp.report.evidence import LEVEL, LOOKS, WORDS
from crt_exp.report.page import FAMILIES, Page, home
from crt_exp.runner.run import write_atomic
from crt_exp.probes import sources
from crt_exp.probes.runs import flat
from crt_exp.probes.training import Grid

CODE = "Code:"  # begins the line that depends on the history of the checkout, and on nothing else of a page


def write(page: Page) -> Path:
    """Both files, each written atomically."""
    picture = page.own("figure")(page) if page.own("figure") else figures.figure(page)
    path = page.folder / f"{page.name}.md"
    write_atomic(path, text(page, picture is not None))
    if picture is not None:
        save_figure(picture, page.folder / f"{page.name}.png")
        import matplotlib.pyplot as plt

        plt.close(picture)
    return path


def text(page: Page, picture: bool) -> str:
    spec = page.spec
    gates = [str(gate) for gate in dict.fromkeys(gate for _, gate in page.gates)]
    own = page.own("sections")
    parts = [f"# {spec['title']}", "\n\n".join(page.first_lines()), *verdicts(page),
             "\n".join(["What the settings can tell:", "", *gates]) if gates else "",
             *(section.rstrip() for section in (own(page) if own else tables.sections(page))),
             f"![{spec['title']}]({page.name}.png)" if picture else "", commands(page), choices(page),
             caption(page)]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(page: Page) -> list[str]:
    """The paper's claims and own bars, each under its heading with their count."""
    sections = []
    for family, judged in page.families.items():
        count = Counter(verdict.word for verdict in judged)
        counted = ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])
        if judged:
            sections.append(f"## {FAMILIES[family]}: {counted}\n\n" + "\n".join(map(str, judged)))
    return sections


def choices(page: Page) -> str:
    """Settings tuned, seeds added, criteria changed: of the committed page, to which another size refers."""
    sentences = [*page.spec.get("choices", [])]
    if sentences and page.size != home(page.spec):
        sentences = [f"What is asked was chosen for the committed page, outputs/report/{page.name}.md, and with its "
                     "draws."]
    if page.spec.get("looks", 1) > 1:
        sentences.append(f"Judged at {LOOKS[page.spec['looks']]}, the level that {page.spec['looks']} looks leave "
                         f"instead of {LEVEL}.")
    return "\n".join(["## Choices", "", *(f"- {sentence}" for sentence in sentences)]) if sentences else ""


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
    return "\n\n".join(["## Commands", *(commands_of(page, grids, order) for grids in alike.values())])


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


def caption(page: Page) -> str:
    """What was measured, when, with which versions and how long it took, and the command."""
    frame = page.draws
    unit = f"Unit of independence: {page.spec['independence']}." if "independence" in page.spec else ""
    days = sorted({*frame["date"]} - {""})
    when = "" if not days else f" of {days[0]}" + (f" to {days[-1]}" if days[-1] > days[0] else "")
    made = "; ".join(dict.fromkeys(frame["versions"][frame["versions"] != ""]))
    origin = (f"Draws: [{page.name}.csv]({draws_name(page)}), {len(frame)} rows{when}, "
              f"{frame['seconds'].sum():.0f} s of computing.")
    some = f"A part of the page: {page.part} of all that it compares." if page.part else ""
    return "\n\n".join(part for part in (
        some, facts(page), unit, f"{origin} {made}. Command: `{command(page)}`.", f"{CODE} {age(page)}.") if part)


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
    return " ".join(filter(None, ["python -m crt_exp.report", shlex.quote(page.path), *folders, *size, chosen]))


def facts(page: Page) -> str:
    """Those of the file, which are of its home size; of another one its own, and where its settings stand."""
    if page.size == home(page.spec):
        return " ".join(page.spec.get("facts", "").split()).replace("{size}", page.size)
    own = " ".join(page.spec["sizes"][page.size].get("facts", "").split())
    return f"SIZE={page.size}: its settings are `sizes: {page.size}` of {page.declared}. {own}".rstrip()


def draws_name(page: Page) -> str:
    packed = page.folder / f"{page.name}.csv.gz"
    return packed.name if packed.is_file() else f"{page.name}.csv"


def age(page: Page) -> str:
    """The commits of the draws, and how many commits since then have touched the files that decide them."""
    commits = sorted({commit.rstrip("+") for commit in page.draws["commit"]} - {""})
    files = sources.closure(sources.of_page(page.spec)) if "sizes" in page.spec else ()
    since = {commit: commits_since(commit, files) for commit in commits}
    return "; ".join(f"commit {commit}" + ("" if count is None else f", {count} commits to its code since then")
                     for commit, count in since.items()) or "no commit"


def commits_since(commit: str, files: Sequence[Path]) -> int | None:
    """None where the checkout has no such commit, or is none."""
    if shutil.which("git") is None:
        return None
    root = sources.PACKAGE.parent
    command = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD", "--",
               *(str(file) for file in files if file.is_relative_to(root))]
    result = subprocess.run(command, capture_output=True, text=True)
    return int(result.stdout) if result.returncode == 0 else None


