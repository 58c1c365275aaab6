"""Grids of runs: every run is a command line, arms of a seed differ in their attention alone, and draws are records."""

from dataclasses import fields

import pytest

from crt_exp.report import draws, page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import cells, runs, training
from crt_exp.studies.training import Grid

GRIDS = {(name, size): spec for name in page.names() for size, spec in page.load(name).get("sizes", {}).items()
         if {"common", "settings", "arms"} <= {*spec}}
OPTIONS = {field.name for field in fields(Grid)}
HOME = runs.Home(training.HOME, ("tasks/lra.py",))


@pytest.mark.slow
@pytest.mark.parametrize("name, size", GRIDS)
def test_every_run_is_a_command_line(name, size):
    """Each arm in one setting, and each setting with one arm."""
    grid = Grid(**{key: value for key, value in GRIDS[name, size].items() if key in OPTIONS})
    first, start = next(iter(grid.settings)), next(iter(grid.arms))
    places = {*((first, arm) for arm in (*grid.arms, *grid.moved)), *((setting, start) for setting in grid.settings)}
    for setting, arm in places:
        options = grid.options(setting, arm, 0, HOME)
        assert len({option.split("=")[0] for option in options}) == len(options)
        check_command_line([*options, "logger=none", "hydra.run.dir=run"])


def test_arms_of_a_seed_differ_in_their_attention_alone():
    grid = Grid(**page.load("books")["sizes"]["small"])
    arms = [{*grid.options("WikiText-2", arm, 1, HOME)} - {*grid.arms[arm]} for arm in grid.arms]
    assert all(each == arms[0] for each in arms)
    moved, redrawn = ({*grid.options("WikiText-2", arm, 2, HOME)} for arm in ("favorp, moved", "favorp, redrawn"))
    assert moved ^ redrawn == {"attention.redraw_every=20"}
    assert any(option.startswith("task.init=") for option in moved)


def test_other_arms_are_trained_where_the_gate_is_passed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    size = {"metrics": ["loss"], "higher": False, "gated": ["uniform"], "least": 0.5, "seeds": 2, "cost": False,
            "settings": {"passes": ["gap=1"], "fails": ["gap=0"]}, "baselines": {"unigram_": "unigram"},
            "arms": {arm: [f"attention={arm}"] for arm in ("exact", "uniform", "favorp", "relu")}, "workers": 1}
    draws = [*training.measure("grid", ["tasks/lra.py"], size)]
    ends = [draw for draw in draws if draw.table == "test" and draw.metric == "loss"]
    assert {draw.arm for draw in ends if draw.setting == "fails"} == {"exact", "uniform", "unigram"}
    assert {draw.arm for draw in ends if draw.setting == "passes"} == {"exact", "uniform", "favorp", "unigram"}
    assert [draw.arm for draw in draws if draw.metric == "diverged"] == ["relu", "relu"]
    assert [draw.x for draw in draws if draw.table == "validation"][:2] == [5, 10]
    assert sum(draw.seconds != "" for draw in draws) == 12 and all(draw.versions for draw in draws)


def test_committed_draws_stand_for_runs_where_seeds_are_added(tmp_path, monkeypatch):
    """With `keep` the draws stay as they are committed, and only new seeds are trained, and what has other options."""
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(training, "train", lambda overrides, sources, kept=False: (
        started.append(overrides[-1]) or trained(overrides, sources)))
    size = {"metrics": ["loss"], "tested": ["loss"], "higher": False, "gated": ["uniform"], "least": 0.5, "seeds": 2,
            "settings": {"passes": ["gap=1"], "fails": ["gap=0"]}, "baselines": {"unigram_": "unigram"}, "workers": 1,
            "arms": {arm: [f"attention={arm}"] for arm in ("exact", "uniform", "favorp", "relu")}, "cost": False}
    path = draws.write("grid", training.measure("grid", ["tasks/lra.py"], size), draws.FOLDER)
    before, started[:] = path.read_bytes(), []
    monkeypatch.setattr(training, "grids_before", lambda name: [Grid(**size)])
    cells.forget("grid")
    draws.write("grid", training.measure("grid", ["tasks/lra.py"], size, keep=True), draws.FOLDER)
    assert path.read_bytes() == before and not started
    draws.write("grid", training.measure("grid", ["tasks/lra.py"], size | {"seeds": 3}, keep=True), draws.FOLDER)
    assert set(started) == {"seed=2"} and set(before.splitlines()) < set(path.read_bytes().splitlines())
    cells.forget("grid")
    started.clear()
    [*training.measure("grid", ["tasks/lra.py"], size | {"settings": {"passes": ["gap=1", "steps=9"]}}, keep=True)]
    assert len(started) == 8
    path.write_text(path.read_text().replace(",unigram,loss,3.0,,,test,,", ",unigram,loss,3.0,,,test,,another"))
    cells.forget("grid")
    started.clear()
    [*training.measure("grid", ["tasks/lra.py"], size, keep=True)]
    assert len(started) == 2, "a baseline of another commit than its run"


def test_options_before_are_those_of_the_commit_of_the_draws():
    before = training.grids_before("lra")
    if not before:
        pytest.skip("no history, as of a downloaded archive")
    assert {"ListOps"} <= {setting for grid in before for setting in grid.settings}
    assert training.grids_before("no such page") == []


def trained(overrides, sources, kept=False):
    if "attention=relu" in overrides:
        return {"diverged": "the loss is not finite"}
    loss = 1.0 + ("attention=uniform" in overrides) * ("gap=1" in overrides)
    curve = [{"step": step, "split": "validation", "loss": loss} for step in (5, 10)]
    return {"curve": curve, "last": {"step": 10, "split": "test", "loss": loss, "unigram_loss": 3.0, "final": True}}


def test_moved_arms_may_start_from_one_run(tmp_path, monkeypatch):
    """It is trained once, drawn once, and arms have as many seeds as the file says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    grid = {"metrics": ["loss"], "tested": ["loss"], "higher": False, "cost": False,
            "common": ["task=mlm", ["batch=2"]], "begin": {"the model": ["attention=exact", "steps=9"]}, "arms": {},
            "settings": {"swapped": ["steps=0"]}, "moved": {arm: [f"attention={arm}"] for arm in ("exact", "favorp")},
            "seeds": 3, "seeds_of": {"exact": 1}}
    more = grid | {"settings": {"trained on": ["steps=5"]}, "moved": {"favorp": ["attention=favorp"]}}
    draws = [*training.measure("grid", ["tasks/lra.py"], {"grids": [grid, more]})]
    ends = [(draw.setting, draw.arm, draw.unit) for draw in draws if draw.table == "test"]
    assert ends[0] == (training.BEGIN, "the model", 0) and [end[0] for end in ends].count(training.BEGIN) == 1
    assert [end[2] for end in ends if end[:2] == ("swapped", "exact")] == [0] and len(ends) == 1 + 1 + 3 + 3
    options = Grid(**grid).options("swapped", "favorp", 2, HOME)
    start = HOME.place(["task=mlm", "batch=2", "attention=exact", "steps=9", "seed=0"])
    assert options == ["task=mlm", "batch=2", "steps=0", "attention=favorp", "seed=2", f"task.init={start}"]


def test_arms_of_a_setting_and_options_of_those_that_go_on(tmp_path, monkeypatch):
    """`only` leaves arms out, `seeds_of` gives more seeds, `then` and `offset` are of moved arms, `tested` and
    `baselines` name draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    size = {"metrics": ["loss"], "tested": ["loss"], "higher": False, "seeds": 1, "cost": False, "workers": 1,
            "settings": {"U": ["gap=1", "steps=9"], "B": ["gap=1", "steps=9"]}, "then": {"U": ["steps=2"]},
            "only": {"B": ["exact", "elu"]}, "offset": 100, "baselines": {"unigram_": "unigram"},
            "seeds_of": {"elu": {"U": 2}},
            "arms": {"exact": ["attention=exact"], "elu": ["attention=elu"]}, "moved": {"later": ["attention=favorp"]}}
    draws = [*training.measure("grid", ["tasks/lra.py"], size)]
    assert {(draw.setting, draw.arm, draw.metric) for draw in draws if draw.table == "test"} == {
        *(("U", arm, "loss") for arm in ("exact", "elu", "later", "unigram")),
        *(("B", arm, "loss") for arm in ("exact", "elu", "unigram"))}
    seeds = {(draw.setting, draw.unit) for draw in draws if draw.arm == "elu" and draw.table == "test"}
    assert seeds == {("U", 0), ("U", 1), ("B", 0)}
    moved = Grid(**size).options("U", "later", 0, HOME)
    assert moved[:4] == ["gap=1", "steps=2", "attention=favorp", "seed=100"] and moved[4].startswith("task.init=")


def test_a_run_that_has_ended_is_not_started_again(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runs, "run", lambda overrides, directory: started.append(directory) or [])
    home = runs.Home(tmp_path, ("tasks/lra.py",))
    home.kept(["task=lra"])
    place = home.place(["task=lra"])
    place.mkdir()
    (place / "metrics.jsonl").write_text('{"step": 1, "split": "test", "final": true}\n')
    assert home.kept(["task=lra"])[-1]["step"] == 1 and started == [place]
    assert home.place(["task=lra"]) != runs.Home(tmp_path, ("tasks/mlm.py",)).place(["task=lra"])
