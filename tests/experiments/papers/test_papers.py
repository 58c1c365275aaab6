"""The pages of crt_exp/papers: committed pages are those of their rows, and every run of a sweep is a command."""

import re
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import yaml

from crt_exp.experiments.papers import results
from crt_exp.experiments.report import pages, plots
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


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_that_of_its_rows(name):
    module, rows = pages.load(name), read_rows(name)
    page, frame = module.page, rows.frame
    made = pages.page_text(
        page,
        rows,
        pages.verdicts(module, rows),
        module.tables(rows),
        hasattr(module, "figure"),
        FOLDER,
        "small",
        "",
    )
    assert made == (FOLDER / f"{name}.md").read_text()
    assert (FOLDER / f"{name}.png").is_file() == hasattr(module, "figure")
    pages.check(page)
    assert {*page.columns} <= {*frame.columns} and {*frame["metric"].unique()} <= {*page.metrics}
    assert {*frame["sweep"].unique()} <= {*page.small}


def parts_of(frame):
    """Rows of one sweep; of one method of each sweep; of two methods and one sample."""
    for sweep in frame["sweep"].unique():
        rows = frame[frame["sweep"] == sweep]
        yield rows, ""
        yield rows[rows["method"] == rows["method"].iloc[0]], "--methods first"
    rows = frame[frame["method"].isin(frame["method"].unique()[-2:])]
    yield rows[rows["sample"] == rows["sample"].iloc[-1]], "--methods last --seeds 1"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_renders_from_a_part_of_its_rows(name, tmp_path, monkeypatch):
    """Without error, and without tables that have no value; a part of a page has no empty columns."""
    saved = []
    monkeypatch.setattr(pages, "save_figure", lambda figure, path: saved.append(figure))
    monkeypatch.setattr(plots, "label_ends", lambda *_: None)  # the slowest part of a figure
    module, frame = pages.load(name), read_rows(name).frame
    frame = frame[frame["sample"].isin(["", *frame["sample"].unique()[:24]])]
    for rows, part in parts_of(frame):
        write_rows(name, rows, tmp_path)
        saved.clear()
        pages.render(module, tmp_path, "small", part)
        text = (tmp_path / f"{name}.md").read_text()
        assert (f"{name}.png)" in text) == bool(saved)
        assert all(ax.has_data() for figure in saved for ax in figure.axes)
        assert pages.NO_TABLE in text or "| ---" in text
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            lines = [re.split(r" \| ", line.strip("| \n")) for line in table.splitlines()]
            assert len(lines) > 2 and all(any(cells[1:]) for cells in lines), (part, table)
            assert "nan" not in table
        assert pages.first_table(module, tmp_path, part)


def test_a_part_without_a_table_keeps_its_figure(tmp_path):
    frame = read_rows("crt_variance").frame
    write_rows("crt_variance", frame[frame["sweep"] == "fig1"], tmp_path)
    module = pages.load("crt_variance")
    pages.render(module, tmp_path, part="--methods oprf --seeds 1")
    text = (tmp_path / "crt_variance.md").read_text()
    assert "crt_variance.png)" in text and "| ---" not in text and pages.NO_TABLE in text
    assert (tmp_path / "crt_variance.png").is_file()
    assert pages.first_table(module, tmp_path) == pages.NO_TABLE


def test_the_committed_results_are_those_of_the_pages(monkeypatch):
    written = {}
    monkeypatch.setattr(results, "write_atomic", lambda path, text: written.update({path: text}))
    monkeypatch.setattr(results, "save_figure", lambda figure, path: None)
    results.write(
        FOLDER, {name: pages.verdicts(pages.load(name), read_rows(name)) for name in NAMES}
    )
    claims = FOLDER / "claims.csv"
    pd.testing.assert_frame_equal(pd.read_csv(StringIO(written.pop(claims))), pd.read_csv(claims))
    assert written == {
        path: path.read_text() for path in (FOLDER / "results.md", FOLDER / "index.md")
    }


def sweeps_of(name):
    page = pages.load(name).page
    return [sweep for made in (page.models, page.small, page.full) for sweep in made.values()]


@pytest.mark.parametrize("name", NAMES)
def test_measurements_accept_every_method_of_their_page(name):
    runs = [
        dict(each.partition("=")[::2] for each in run.overrides)
        for sweep in sweeps_of(name)
        for run in sweep
    ]
    for task_name, attention in {
        (run["task"], run["attention"]) for run in runs if {"task", "attention"} <= {*run}
    }:
        conf = yaml.safe_load((ROOT / f"conf/task/{task_name}.yaml").read_text())
        task = import_object((conf if "_target_" in conf else conf["task"])["_target_"])
        mechanism = Mechanism.parse(attention)
        if hasattr(task, "records") and not (mechanism.estimates or mechanism.is_exact):
            assert task.measures_whole(mechanism), (task_name, attention)


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_run_is_a_command(every, tmp_path):
    """Runs that together have every key of each task, and every other key; or one of each method in each sweep."""
    runs, checked = (
        [
            (page, i, run)
            for page in NAMES
            for i, each in enumerate(sweeps_of(page))
            for run in each
        ],
        set(),
    )
    for page, i, run in sorted(runs, key=lambda each: -len(each[-1].overrides)):
        task = next((each for each in run.overrides if each.startswith("task=")), "of a recipe")
        keys = [each.partition("=")[0] for each in run.overrides]
        parts = (
            {(page, i, run.columns.get("method", ""))}
            if every
            else {(key, task if key.startswith("task") else "") for key in keys}
        )
        if not parts <= checked:
            checked |= parts
            check_command_line(
                [
                    *(override.replace("{runs}", str(tmp_path)) for override in run.overrides),
                    f"hydra.run.dir={tmp_path}/run",
                ]
            )


def test_make_targets_are_sweeps():
    makefile = (ROOT / "Makefile").read_text()
    for name in NAMES:
        targets = re.search(rf"^{name} +:= (.+)$", makefile, re.M)[1].split()
        assert {*targets} | {"demo"} >= {*pages.load(name).page.targets} >= {*targets}, name
        assert all(pages.load(target) is pages.load(name) for target in targets)
    listed = re.search(r"^PAGES +:= ((?:.+\\\n)*.+)$", makefile, re.M)[1].replace("\\", "").split()
    assert sorted(listed) == NAMES


def test_a_misspelt_page_names_the_nearest(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["crt_exp.experiments.report", "tabel1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "did you mean table1?" in capsys.readouterr().err
