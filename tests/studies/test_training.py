"""Grids of runs: every run is a command line, arms of a seed differ in their attention alone, and draws are records."""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from crt_exp.config import ConfigError
from crt_exp.report import draws, page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import cells, grid, runs, sources, training
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


def trace(arm, start, seed):
    """A probe: what the run of a start reached, and its second stage."""
    return {"steps": runs.read_records(Path(start) / "metrics.jsonl")[-1]["step"], "folder": start}


def test_models_of_starts_are_trained_first_and_once(tmp_path, monkeypatch, one_thread):
    """Two seeds of two stages; probes get the folder of their seed, and a run whose folder is gone is trained anew."""
    monkeypatch.chdir(tmp_path)
    start = {"sources": "exact", "count": 2, "common": ["task=recall", ["attention=exact", "trainer.batch=2"]],
             "stages": [["task.block=16", "task.pairs=2", "task.queries=2", "task.evaluated=2", f"trainer.steps={n}"]
                        for n in (1, 2)]}
    size = {"workers": 1, "starts": {"a model": start}, "parts": [
        {"probe": {"_target_": f"{__name__}.trace", "start": {"start": "a model"}}, "arms": ["exact"], "seeds": 3,
         "fields": [{"metric": "steps", "field": "steps"}, {"metric": "folder", "field": "folder"}], "workers": 1}]}
    made = [*grid.measure("mine", ["studies/training.py"], size)]
    assert [draw.value for draw in made if draw.metric == "steps"] == [2, 2, 2]
    first, second, third = [draw.value for draw in made if draw.metric == "folder"]
    assert first == third != second and Path(first).parent == training.HOME
    assert len([*training.HOME.iterdir()]) == 4
    begun, real = [], runs.run
    monkeypatch.setattr(runs, "run", lambda overrides, place: begun.append(place) or real(overrides, place))
    assert [draw.value for draw in grid.measure("mine", ["studies/training.py"], size)] == [draw.value for draw in made]
    assert not begun
    shutil.rmtree(first)
    [*grid.measure("mine", ["studies/training.py"], size)]
    assert begun == [Path(first)] and Path(first).is_dir()


@pytest.mark.parametrize("start, message", [
    ({"stage": []}, "unknown key of the start a model 'stage'; did you mean stages"),
    ({"common": ["a=1"]}, "start a model: it takes at least one of stages"),
    ({"stages": [["a=1"]], "sources": "none"}, "sources: exact or none")], ids=str)
def test_a_start_that_is_none(start, message):
    with pytest.raises(ConfigError, match=message):
        runs.Start.read("a model", start)


def test_exact_starts_stay_while_other_attention_changes():
    start = runs.Start.read("a model", {"stages": [["task=recall"]], "sources": "exact"})
    found = sources.closure(start.home(HOME.path, ["studies/redraw.py"]).sources)
    names = {sources.name_of(file) for file in found}
    assert {"tasks/recall.py", "conf/task/recall.yaml", "runner/trainer.py"} < names
    assert not [name for name in names if name.startswith(("nearfar", "swap/", "studies/redraw"))]


def test_a_start_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean a model"):
        grid.started({"probe": [{"start": "the model"}]}, {"a model": ["here"]}, 0)


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
