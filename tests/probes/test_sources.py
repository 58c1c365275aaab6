"""Which files decide a page: found by imports, so that no list by hand can leave one out."""

import ast
import shutil
from pathlib import Path

import pytest

from crt_exp.config import CONF
from crt_exp.report import page
from crt_exp.probes import runs, sources

TRAINING = {"lra": "tasks/lra.py", "kernels": "tasks/trembl.py", "books": "tasks/books.py", "pixels": "tasks/pixels.py",
            "recall": "tasks/recall.py", "hrf-lm": "tasks/ptb.py", "fig3": "tasks/librispeech.py",
            "table2": "tasks/glue.py", "encoders": "tasks/mlm.py", "fig4-left": "tasks/mae.py",
            "fidelity": "tasks/mlm.py", "hrf-robotics": "probes/robotics.py"}
MAPS = ("fig2", "hrf-clusters", "hrf-pointwise", "hrf-qmc", "performers-fig2", "table1")
TRAINER = {"train.py", "runner/trainer.py", "runner/fit.py", "runner/optim.py", "mechanism.py", "attention/layer.py",
           "attention/engines/native.c", "conf/trainer/default.yaml", "conf/attention/favorp.yaml",
           "conf/features/pos.yaml"}


def files(begin):
    return {sources.name_of(file) for file in sources.closure(tuple(begin))}


def of_page(name):
    return files(sources.of_page(page.load(name)))


@pytest.mark.parametrize("name", page.names())
def test_every_page_has_its_files_and_none_of_reports(name):
    found = of_page(name)
    assert {"probes/grid.py", "kernels.py", "features/exponential.py"} <= found
    assert not [file for file in found if file.startswith(("report/", "conf/report", "probes/cells.py"))]


@pytest.mark.parametrize("name, task", TRAINING.items())
def test_pages_of_runs_depend_on_the_trainer_and_on_their_task_alone(name, task):
    """Runs are started as command lines, whose task stands in the page's file or in the code."""
    found = of_page(name)
    assert TRAINER | {task} <= found
    assert not {"tasks/lra.py", "tasks/books.py", "tasks/glue.py"} - {task} & found


@pytest.mark.parametrize("name", MAPS)
def test_pages_of_maps_depend_on_no_runs_and_no_layers(name):
    found = of_page(name)
    assert {"mechanism.py", "conf/features/pos.yaml", "samplers/blocks.py"} <= found
    assert not [file for file in found if file.startswith(("runner/", "tasks/", "attention/", "swap/", "models/"))]


EXACT = [(name, start) for name in page.names() for start, given in
         page.load(name).get("sizes", {}).get("small", {}).get("starts", {}).items() if given.get("sources") == "exact"]


@pytest.mark.parametrize("name, start", EXACT)
def test_exact_models_depend_on_the_trainer_and_on_no_other_attention(name, start):
    given = runs.Start.read(start, page.load(name)["sizes"]["small"]["starts"][start])
    found = files(given.home(Path("runs"), []).sources)
    assert {"runner/trainer.py", "attention/baselines.py", "conf/attention/exact.yaml"} <= found
    assert not [file for file in found if "nearfar" in file or file.startswith(("features/", "samplers/", "swap/"))]


CHANGES = [
    ("crt_exp/runner/optim.py", "\n\n\n", "\n\n\nextra = 1\n\n\n", {"lra"}),
    ("crt_exp/runner/optim.py", '"""', '"""Again: ', set()),
    ("crt_exp/runner/trainer.py", "\n\n\n", "\n\n\n# a comment\n", set()),
    ("crt_exp/attention/engines/native.c", "static", "static ", {"lra"}),
    ("crt_exp/features/exponential.py", "\n\n\n", "\n\n\nextra = 1\n\n\n", {"lra", "hrf-pointwise"}),
    ("conf/trainer/default.yaml", "lr: 1.0e-4", "lr: 2.0e-4", {"lra"}),
    ("conf/trainer/default.yaml", "# the highest learning rate", "# of Adam", set()),
    ("conf/task/lra.yaml", "trainer:", "extra: 1\ntrainer:", {"lra"}),
    ("conf/task/books.yaml", "trainer:", "extra: 1\ntrainer:", set()),
    ("conf/config.yaml", "m: 256", "m: 128", {"lra", "hrf-pointwise"}),
    ("conf/config.yaml", "usage:", "use:", set())]


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the package and its configuration, whose files may be changed."""
    for what, folder in ((sources.PACKAGE, "crt_exp"), (CONF, "conf")):
        shutil.copytree(what, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "crt_exp")
    monkeypatch.setattr(sources, "CONF", tmp_path / "conf")
    yield tmp_path
    forget()


def forget():
    for cached in (sources.fingerprint, sources.closure):
        cached.cache_clear()


def fingerprints():
    forget()
    return {name: sources.fingerprint(sources.of_page(page.load(name))) for name in ("lra", "hrf-pointwise")}


def test_cells_are_stale_where_a_statement_of_their_files_changed(copied):
    """Those of runs where the trainer did, those of maps not; and no others for comments, docstrings and help."""
    known = fingerprints()
    for name, before, after, stale in CHANGES:
        file, text = copied / name, (copied / name).read_text(encoding="utf-8")
        assert before in text
        file.write_text(text.replace(before, after, 1), encoding="utf-8")
        now = fingerprints()
        assert {each for each in now if now[each] != known[each]} == stale, (name, after)
        known = now


def test_a_measurement_of_ones_own(tmp_path, monkeypatch):
    """Its file and those of its folder that it imports, also within functions; of the package what these import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/gain.py").write_text("def measure():\n    from mine import more\n    return more\n")
    (tmp_path / "mine/more.py").write_text("import torch\nfrom crt_exp import calibrate_attention\n")
    begin = sources.of_page({"sizes": {"small": {"parts": [{"probe": {"_target_": "mine.gain.measure"}}]}}})
    assert "mine/gain.py" in begin
    assert {"mine/gain.py", "mine/more.py", "swap/calibration.py", "attention/layer.py"} <= files(begin)


def test_the_order_of_paragraphs_of_a_page_measures_nothing_anew():
    spec = page.load("table2")
    turned = {**spec, "sizes": {name: dict(reversed(size.items())) for name, size in reversed(spec["sizes"].items())}}
    assert sources.of_page(turned) == sources.of_page(spec) == tuple(sorted(sources.of_page(spec)))


def test_files_that_do_not_exist_are_refused():
    with pytest.raises(FileNotFoundError, match="tasks/none.py: not a file or folder of crt_exp"):
        sources.fingerprint(("tasks/none.py",))


def test_code_is_what_it_does_and_not_how_it_is_written():
    def said(text):
        return ast.dump(sources.statements(text))

    plain = 'def f(x):\n    """Doubles."""\n    return 2 * x\n'
    assert said(plain) == said('def f(x):\n    """Twice x."""\n    return (2\n            * x)  # why\n')
    assert said(plain) != said(plain.replace("2 * x", "3 * x"))
