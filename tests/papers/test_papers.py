"""The pages of crt_exp/papers: committed pages are those of their rows, and every run of a sweep is a command."""

import re
from pathlib import Path

import pytest
import yaml

from crt_exp.config import import_object
from crt_exp.mechanism import Mechanism
from crt_exp.report import pages
from crt_exp.report.__main__ import main
from crt_exp.report.rows import FOLDER, read_rows
from crt_exp.runner.command_line import check_command_line

ROOT = Path(__file__).parents[2]
NAMES = pages.names()
VISIBLE = 400  # words of a page that are not folded


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_that_of_its_rows(name):
    module, rows = pages.load(name), read_rows(name)
    page = module.page
    tested = pages.verdicts(module, rows)
    made = pages.page_text(page, rows, tested, module.tables(rows), hasattr(module, "figure"), FOLDER, "small", "")
    assert made == (FOLDER / f"{name}.md").read_text()
    visible = re.sub(r"<details.*?</details>", "", made, flags=re.S)
    assert len(re.findall(r"\w[^\s|]*", visible)) <= VISIBLE
    assert (FOLDER / f"{name}.png").is_file() == hasattr(module, "figure")


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_runs_of_a_page_have_the_same_columns(name):
    page, frame = pages.load(name).page, read_rows(name).frame
    pages.check(page)
    assert {*page.columns} <= {*frame.columns} and {*frame["metric"]} <= {*page.metrics}
    assert {*frame["sweep"]} <= {*page.small}
    assert page.targets == [*dict.fromkeys(each.partition("/")[0] for each in page.small)]


@pytest.mark.parametrize("name", NAMES)
def test_measurements_accept_every_method_of_their_page(name):
    page = pages.load(name).page
    for run in [run for made in (page.small, page.full) for sweep in made.values() for run in sweep]:
        chosen = dict(each.partition("=")[::2] for each in run.overrides)
        if "task" in chosen and "attention" in chosen:
            conf = yaml.safe_load((ROOT / f"conf/task/{chosen['task']}.yaml").read_text())
            task = import_object((conf if "_target_" in conf else conf["task"])["_target_"])
            mechanism = Mechanism.parse(chosen["attention"])
            if hasattr(task, "records") and not (mechanism.estimates or mechanism.is_exact):
                assert task.measures_whole(mechanism), run.name


def runs(every):
    """(page, overrides) of the first run of each sweep, or of the first run of each method in it."""
    for name in NAMES:
        page = pages.load(name).page
        for made in (page.models, page.small, page.full):
            for sweep in made.values():
                seen = set()
                for run in sweep:
                    key = str(run.columns.get("method", "")) if every else ""
                    if key not in seen:
                        seen.add(key)
                        yield pytest.param(name, run, id=f"{name} {run.name}")


def check_run(name, run, tmp_path):
    check_command_line([override.replace("{runs}", str(tmp_path)) for override in run.overrides]
                       + [f"hydra.run.dir={tmp_path}/run"])


@pytest.mark.parametrize("name, run", [*runs(every=False)])
def test_a_run_is_a_command(name, run, tmp_path):
    check_run(name, run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, run", [*runs(every=True)])
def test_a_run_of_each_method_is_a_command(name, run, tmp_path):
    check_run(name, run, tmp_path)


def test_make_targets_are_sweeps():
    makefile = (ROOT / "Makefile").read_text()
    for name in NAMES:
        targets = re.search(rf"^{name} +:= (.+)$", makefile, re.M)[1].split()
        assert {*targets} | {"demo"} >= {*pages.load(name).page.targets} >= {*targets}, name
        assert all(pages.load(target) is pages.load(name) for target in targets)
    listed = re.search(r"^PAGES +:= ((?:.+\\\n)*.+)$", makefile, re.M)[1].replace("\\", "").split()
    assert sorted(listed) == NAMES


def test_a_misspelt_page_names_the_nearest(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["crt_exp.report", "tabel1"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "did you mean table1?" in capsys.readouterr().err
