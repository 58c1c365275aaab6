"""The pages of crt_exp/papers: committed pages are those of their rows, and every run of a sweep is a command."""

import re
from functools import cache
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers.covering import cover, slow

from crt_exp.experiments.papers import results
from crt_exp.experiments.report import pages, plots, rendering
from crt_exp.experiments.report.__main__ import main
from crt_exp.experiments.report.rows import FOLDER, read_rows, write_rows
from crt_exp.experiments.runner.command_line import check_command_line
from crt_exp.mechanism import Mechanism
from crt_exp.registry import import_object

ROOT = Path(__file__).parents[3]
NAMES = pages.names()


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CRT_DATA", "data")  # no file of it is read


@cache
def committed_rows(name):
    return read_rows(name)


@cache
def committed_verdicts(name):
    return pages.load(name).verdicts(committed_rows(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_that_of_its_rows(name):
    page = pages.load(name)
    rows = committed_rows(name)
    frame = rows.frame
    is_drawn = page.figure is not None
    text = rendering.page_text(
        page, rows, committed_verdicts(name), is_drawn, FOLDER, "small", part=""
    )
    assert text == (FOLDER / f"{name}.md").read_text()
    assert (FOLDER / f"{name}.png").is_file() == is_drawn
    page.check()
    assert {*page.columns} <= {*frame.columns}
    assert {*frame["metric"].unique()} <= {*page.metrics}
    assert {*frame["sweep"].unique()} <= {*page.small}


def single_sweeps(frame):
    """Rows of one sweep; of two methods and one sample."""
    for sweep in frame["sweep"].unique():
        yield frame[frame["sweep"] == sweep], ""
    last = frame["method"].unique()[-2:]
    rows = frame[frame["method"].isin(last)]
    sample = rows["sample"].iloc[-1]
    yield rows[rows["sample"] == sample], "--methods last --seeds 1"


def single_methods(frame):
    """Rows of one method of each sweep."""
    for sweep in frame["sweep"].unique():
        rows = frame[frame["sweep"] == sweep]
        first = rows["method"].iloc[0]
        yield rows[rows["method"] == first], "--methods first"


@pytest.fixture
def figures(monkeypatch):
    """The figures that pages save."""
    figures = []
    monkeypatch.setattr(rendering, "save_figure", lambda figure, path: figures.append(figure))
    monkeypatch.setattr(plots, "label_ends", lambda *_: None)  # the slowest part of a figure
    return figures


PARTS = [
    single_sweeps,
    slow(single_methods),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts_of", PARTS)
def test_a_page_renders_from_a_part_of_its_rows(parts_of, name, tmp_path, figures):
    """Without error, and without tables that have no value; a part of a page has no empty columns."""
    page = pages.load(name)
    frame = committed_rows(name).frame
    samples = ["", *frame["sample"].unique()[:24]]
    frame = frame[frame["sample"].isin(samples)]
    for rows, part in parts_of(frame):
        write_rows(name, rows, tmp_path)
        figures.clear()
        rendering.render(page, tmp_path, "small", part)
        text = (tmp_path / f"{name}.md").read_text()
        assert (f"{name}.png)" in text) == bool(figures)
        for figure in figures:
            for ax in figure.axes:
                assert ax.has_data()
        assert rendering.NO_TABLE in text or "| ---" in text
        assert_tables_have_values(text, part)
        assert rendering.first_table(page, tmp_path, part)


def assert_tables_have_values(text, part):
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        lines = table.splitlines()
        assert len(lines) > 2, (part, table)
        assert "nan" not in table
        for line in lines:
            cells = line.strip("| \n").split(" | ")
            assert any(cells[1:]), (part, table)


def test_a_part_without_a_table_keeps_its_figure(tmp_path):
    frame = read_rows("crt_variance").frame
    write_rows("crt_variance", frame[frame["sweep"] == "fig1"], tmp_path)
    page = pages.load("crt_variance")
    rendering.render(page, tmp_path, part="--methods oprf --seeds 1")
    text = (tmp_path / "crt_variance.md").read_text()
    assert "crt_variance.png)" in text
    assert "| ---" not in text
    assert rendering.NO_TABLE in text
    assert (tmp_path / "crt_variance.png").is_file()
    assert rendering.first_table(page, tmp_path) == rendering.NO_TABLE


def test_the_committed_results_are_those_of_the_pages(monkeypatch):
    written = {}
    monkeypatch.setattr(results, "write_atomic", lambda path, text: written.update({path: text}))
    monkeypatch.setattr(results, "save_figure", lambda figure, path: None)
    results.write(FOLDER, {name: committed_verdicts(name) for name in NAMES})
    claims = FOLDER / "claims.csv"
    actual = pd.read_csv(StringIO(written.pop(claims)))
    expected = pd.read_csv(claims)
    pd.testing.assert_frame_equal(actual, expected)
    expected = {path: path.read_text() for path in (FOLDER / "results.md", FOLDER / "index.md")}
    assert written == expected


def sweeps_of(name):
    page = pages.load(name)
    return [*page.models.values(), *page.small.values(), *page.full.values()]


def attentions_of_tasks(name):
    """Pairs of a task and an attention that the runs of a page have."""
    pairs = set()
    for sweep in sweeps_of(name):
        for run in sweep:
            values = dict(override.partition("=")[::2] for override in run.overrides)
            pairs.add((values.get("task"), values.get("attention")))
    return {pair for pair in pairs if None not in pair}


def task_class(name):
    conf = yaml.safe_load((ROOT / f"conf/task/{name}.yaml").read_text())
    if "_target_" not in conf:
        conf = conf["task"]
    return import_object(conf["_target_"])


@pytest.mark.parametrize("name", NAMES)
def test_measurements_accept_every_method_of_their_page(name):
    for task_name, attention in attentions_of_tasks(name):
        task = task_class(task_name)
        mechanism = Mechanism.parse(attention)
        needs_whole = not (mechanism.estimates or mechanism.is_exact)
        if needs_whole and hasattr(task, "records"):
            assert task.measures_whole(mechanism), (task_name, attention)


def runs_of_pages():
    """Each run of each sweep, as (page, number of the sweep, run)."""
    runs = []
    for page in NAMES:
        for i, sweep in enumerate(sweeps_of(page)):
            for run in sweep:
                runs.append((page, i, run))
    return runs


def keys_by_task(entry):
    """Each key of a run, with the task where the key is one of a task."""
    _, _, run = entry
    tasks = [override for override in run.overrides if override.startswith("task=")]
    task = tasks[0] if tasks else "of a recipe"
    parts = set()
    for override in run.overrides:
        key = override.partition("=")[0]
        parts.add((key, task) if key.startswith("task") else key)
    return parts


LONG = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=LONG)])
def test_a_run_is_a_command(every, tmp_path):
    """Runs that together have every key of each task, and every other key; or one of each method in each sweep."""
    runs = runs_of_pages()
    if every:
        chosen = {(page, i, run.columns.get("method")): run for page, i, run in runs}.values()
    else:
        chosen = [run for _, _, run in cover(runs, keys_by_task)]
    for run in chosen:
        overrides = [f"hydra.run.dir={tmp_path}/run"]
        for override in run.overrides:
            overrides.append(override.replace("{runs}", str(tmp_path)))
        check_command_line(overrides)


def test_make_targets_are_sweeps():
    makefile = (ROOT / "Makefile").read_text()
    for name in NAMES:
        targets = re.search(rf"^{name} +:= (.+)$", makefile, re.M)[1].split()
        assert {*targets} | {"demo"} >= {*pages.load(name).targets} >= {*targets}, name
        for target in targets:
            assert pages.load(target) is pages.load(name)
    listed = re.search(r"^PAGES +:= ((?:.+\\\n)*.+)$", makefile, re.M)[1].replace("\\", "").split()
    assert sorted(listed) == NAMES


def test_a_misspelt_page_names_the_nearest(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["crt_exp.experiments.report", "tabel1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "did you mean table1?" in capsys.readouterr().err
