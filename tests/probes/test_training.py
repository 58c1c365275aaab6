"""Grids of runs: every run is a command line, arms of a seed differ in their attention alone, and draws are records."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from crt_exp.config import ConfigError
from crt_exp.report import __main__ as command_line
from crt_exp.report import page
from crt_exp.report.draws import read as read_draws
from crt_exp.runner.command_line import check_command_line
from crt_exp.probes import grid, runs, sources, training
from crt_exp.probes.cells import Draw
from crt_exp.probes.training import Grid

HOME = runs.Home(training.HOME, ("tasks/lra.py",))
SIZES = {(name, size): given for name in page.names() for size, given in page.load(name).get("sizes", {}).items()
         if "runs" in given}


def grids(given):
    """The grids of a size, and the models of its starts."""
    models = {name: [line[-1] for line in training.stages(name, start, HOME.sources)]
              for name, start in given.get("starts", {}).items()}
    return [Grid.read(each, models) for each in given["runs"]]


def lines(given):
    """Of each arm in one setting, and of each setting with one arm; all stages of starts."""
    for name, start in given.get("starts", {}).items():
        yield from (key["overrides"] for key in training.stages(name, start, HOME.sources)[-1])
    for each in grids(given):
        first, start = next(iter(each.settings)), next(iter(each.arms))
        places = {*((first, arm) for arm in each.arms), *((setting, start) for setting in each.settings)}
        yield from (each.options(setting, arm, 0) for setting, arm in places)


@pytest.mark.slow
@pytest.mark.parametrize("name, size", SIZES)
def test_every_run_is_a_command_line(name, size, monkeypatch, tmp_path):
    """One of each set of options that are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    seen = set()
    for options in lines(SIZES[name, size]):
        names = tuple(option if option.startswith("attention=") else option.split("=")[0] for option in options)
        assert len({option.split("=")[0] for option in options}) == len(options)
        if names not in seen:
            seen.add(names)
            check_command_line([*options, "logger=none", "hydra.run.dir=run"])


@pytest.mark.parametrize("name", ["books", "fig3", "hrf-speech", "lra", "redraw", "table2", "encoders"])
def test_arms_of_a_seed_differ_in_their_attention_alone(name):
    """Those that begin with models of their own excepted."""
    for each in grids(page.load(name)["sizes"]["small"]):
        own = [arm for arm, given in each.arms.items() if not isinstance(given, dict)]
        for setting in each.settings if not any("{arm}" in start for start in each.before.values()) else ():
            shared = {tuple(option for option in each.options(setting, arm, 1)
                            if not option.startswith(("attention", "features.", "sampler"))) for arm in own}
            assert len(shared) <= 1


def test_other_arms_are_trained_where_the_condition_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    controls = {"metrics": ["loss"], "seeds": 2, "cost": False, "arms": ["exact", "uniform"], "workers": 1,
                "settings": {"passes": ["gap=1"], "fails": ["gap=0"]}, "baselines": {"unigram_": "unigram"}}
    others = controls | {"arms": ["favorp m=4", "relu"], "where": {
        "metric": "loss", "arm": "uniform", "than": "exact", "table": "test", "least": 0.5}}
    draws = [*grid.measure("grid", ["tasks/lra.py"], {"runs": [controls, others]})]
    ends = [draw for draw in draws if draw.table == "test" and draw.metric == "loss"]
    assert {draw.arm for draw in ends if draw.setting == "fails"} == {"exact", "uniform", "unigram"}
    assert {draw.arm for draw in ends if draw.setting == "passes"} == {"exact", "uniform", "favorp m=4", "unigram"}
    assert [draw.arm for draw in draws if draw.metric == "diverged"] == ["relu", "relu"]
    assert [draw.x for draw in draws if draw.table == "validation"][:2] == [5, 10]
    assert sum(draw.seconds != "" for draw in draws) == 12 and all(draw.versions for draw in draws)


def test_parts_of_the_test_split_are_units_of_a_table_of_their_own():
    """What a task says of parts of it, as <metric>_part<i>, of the metrics that are asked for alone."""
    each = Grid.read({"settings": {"A": []}, "arms": ["elu"], "metrics": ["accuracy"], "tested": ["accuracy"]})
    last = {"accuracy": 0.5, "accuracy_part0": 0.25, "accuracy_part1": 0.75, "loss": 1.0, "loss_part0": 2.0}

    class Kept(dict):
        def draw(self, key, *place, table=""):
            return (*place, table)

    made = [*training.of_run(each, Kept({"key": {"curve": [], "last": last}}), "key", "A", "elu", seed=7)]
    assert made == [("A", "elu", "accuracy", 0.5, 7, "test"), ("A", "elu", "accuracy", 0.25, 0, "parts"),
                    ("A", "elu", "accuracy", 0.75, 1, "parts")]


@pytest.mark.parametrize("condition, held", [
    ({"arm": "a", "least": 3.0}, True), ({"arm": "a", "least": 3.1}, False),
    ({"arm": "a", "than": "b", "least": 2.0}, True),
    ({"arm": "a", "over": "b", "least": 2.8}, True), ({"arm": "a", "over": "b", "least": 2.9}, False),
    ({"arm": "a", "x": 2, "least": 4.0}, True), ({"arm": "c", "least": -9.0}, False),
    ({"arm": "a", "setting": "T", "least": 0.0}, False), ({"arm": "a", "table": "test", "least": 0.0}, False)], ids=str)
def test_conditions_are_of_means_of_draws(condition, held):
    """Geometric ones where it is a ratio; what is not drawn does not hold."""
    made = [Draw("S", arm, "loss", value, x=x) for arm, x, value in (("a", 1, 2.0), ("a", 2, 4.0), ("b", 1, 1.0))]
    assert training.holds({"metric": "loss", **condition}, "S", made) == held


def test_a_condition_has_the_metric_of_its_setting():
    made = [Draw("S", "a", "f1", 0.5), Draw("T", "a", "mcc", 0.1), Draw("T", "a", "f1", 0.9)]
    condition = {"metric": {"S": "f1", "T": "mcc"}, "arm": "a", "least": 0.4}
    assert training.holds(condition, "S", made) and not training.holds(condition, "T", made)
    with pytest.raises(ConfigError, match="unknown setting of a condition 'U'"):
        training.holds(condition, "U", made)


def test_a_condition_that_is_none():
    with pytest.raises(ConfigError, match="did you mean least"):
        training.holds({"metric": "loss", "arm": "a", "at_least": 0.5}, "S", [])


@pytest.mark.parametrize("given, message", [({"gated": ["uniform"]}, "unknown key of a grid of runs 'gated'"),
                                            ({"metrics": []}, "a grid of runs lacks metrics"),
                                            ({"before": {"task.init": "the mode"}}, "did you mean the model")], ids=str)
def test_a_grid_that_is_none(given, message):
    with pytest.raises(ConfigError, match=message):
        Grid.read({"settings": {"A": []}, "arms": ["exact"], "metrics": ["loss"]} | given,
                  {"the model": []}).options("A", "exact", 0)


def test_an_arm_in_text_is_options_of_the_command_line():
    assert training.words("nearfar preset=cheap exact_until=0") == [
        "attention=nearfar", "attention.preset=cheap", "attention.exact_until=0"]
    assert training.words("hrf_angular m=8 sampler=iid features.base=pos") == [
        "attention=hrf_angular", "features.m=8", "sampler=iid", "features.base=pos"]


def trained(overrides, sources):
    if "attention=relu" in overrides:
        return {"diverged": "the loss is not finite"}
    loss = 1.0 + ("attention=uniform" in overrides) * ("gap=1" in overrides)
    curve = [{"step": step, "split": "validation", "loss": loss} for step in (5, 10)]
    return {"curve": curve, "last": {"step": 10, "split": "test", "loss": loss, "unigram_loss": 3.0, "final": True}}


def test_arms_start_from_models_that_are_drawn_too(tmp_path, monkeypatch):
    """A model is trained once and drawn once, arms have as many seeds as the file says, and go round through models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    model = {"common": ["task=mlm", ["batch=2"]], "stages": [["attention=exact", "steps=9"]], "count": 2}
    common = {"metrics": ["loss"], "tested": ["loss"], "cost": False, "workers": 1, "common": ["task=mlm", ["batch=2"]]}
    swapped = common | {"settings": {"swapped": ["steps=0"]}, "before": {"task.init": "the model"}, "seeds": 3,
                        "arms": ["exact", "favorp m=4"], "seeds_of": {"exact": 1}, "offset": 100}
    drawn = common | {"settings": {"models": []}, "arms": {"the model": {"start": "the model"}}, "seeds": 2}
    size = {"workers": 1, "starts": {"the model": model}, "runs": [drawn, swapped]}
    monkeypatch.setattr(training, "Path", lambda place: tmp_path)
    draws = [*grid.measure("grid", ["tasks/lra.py"], size)]
    ends = [(draw.setting, draw.arm, draw.unit) for draw in draws if draw.table == "test"]
    assert ends == [("models", "the model", 0), ("models", "the model", 1), ("swapped", "exact", 0),
                    *(("swapped", "favorp m=4", seed) for seed in range(3))]
    assert sum(draw.seconds != "" for draw in draws) == len(ends)
    starts = [HOME.place(["task=mlm", "batch=2", "attention=exact", "steps=9", f"seed={seed}"]) for seed in (0, 1)]
    for seed in range(3):
        assert grids(size)[1].options("swapped", "favorp m=4", seed) == [
            "task=mlm", "batch=2", "steps=0", "attention=favorp", "features.m=4", f"task.init={starts[seed % 2]}",
            f"seed={100 + seed}"]


def test_stages_go_on_from_each_other_and_arms_may_have_models_of_their_own():
    start = {"common": ["a=1"], "stages": [["steps=3"], ["steps=5"]]}
    size = {"starts": {"of exact": start, "of elu": start},
            "runs": [{"settings": {"A": ["b=2"]}, "arms": ["exact", "elu"], "metrics": ["loss"],
                      "before": {"task.model": "of {arm}"}}]}
    first, second = (key["overrides"] for key in training.stages("of elu", start, HOME.sources)[0])
    assert first == ["a=1", "steps=3", "seed=0"] and f"task.init={HOME.place(first)}" in second
    assert grids(size)[0].options("A", "elu", 2) == [
        "b=2", "attention=elu", f"task.model={HOME.place(second)}", "seed=2"]


def test_a_run_without_steps_is_the_beginning_of_a_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = {0: {"curve": [], "last": {"step": 0, "loss": 3.0, "split": "validation", "final": True}},
               4: {"curve": [{"step": 4, "loss": 2.0}], "last": {"step": 4, "loss": 2.0, "final": True}}}
    monkeypatch.setattr(training, "train", lambda overrides, sources: records[int(overrides[0][6:])])
    each = {"metrics": ["loss"], "cost": False, "seeds": 1, "workers": 1, "arms": ["exact"]}
    made = grid.measure("g", ["tasks/mlm.py"], {"runs": [{**each, "settings": {"A": [f"steps={n}"]}} for n in (0, 4)]})
    assert [(draw.x, draw.value) for draw in made if draw.table == "validation"] == [(0, 3.0), (4, 2.0)]


def test_the_best_of_a_search_counts(tmp_path, monkeypatch):
    """By the metric of its setting; a run that diverged is the last choice, and all are runs of the page."""
    monkeypatch.chdir(tmp_path)
    ends = {"1": {"f1": 0.2, "mcc": 0.9}, "2": {"f1": 0.8, "mcc": 0.1}, "3": None}

    def searched(overrides, sources):
        last = ends[next(option for option in overrides if option.startswith("trainer.lr="))[-1]]
        return {"curve": [], "last": {"step": 5, **last}} if last else {"diverged": "the loss is not finite"}

    monkeypatch.setattr(training, "train", searched)
    size = {"metrics": ["f1"], "seeds": 1, "cost": False, "workers": 1, "settings": {"A": ["a=1"], "B": ["a=2"]},
            "arms": ["exact"], "search": {"trainer.lr": ["3", "1", "2"]}, "best": {"A": "f1", "B": "mcc"}}
    made = [*grid.measure("grid", ["tasks/lra.py"], {"runs": [size]})]
    assert {(draw.setting, draw.table, draw.metric): draw.value for draw in made} == {
        ("A", "chosen", "lr"): "2", ("A", "test", "f1"): 0.8, ("A", "test", "mcc"): 0.1,
        ("B", "chosen", "lr"): "1", ("B", "test", "f1"): 0.2, ("B", "test", "mcc"): 0.9}
    for trial in Grid.read(size).trials():
        for key in trial.keys(["A", "B"], ["tasks/lra.py"]).values():
            Path(training.folder(key)).mkdir(parents=True)
    assert len(training.folders({"runs": [size]}, ["tasks/lra.py"])) == 6


def test_a_search_looks_at_validation_and_not_at_the_split_that_is_tested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def searched(overrides, sources):
        held_out, tested = {"1": (0.3, 0.9), "2": (0.7, 0.4)}[next(o for o in overrides if "trainer.lr=" in o)[-1]]
        return {"curve": [{"step": 1, "f1": 0.0}, {"step": 5, "f1": held_out}], "last": {"step": 5, "f1": tested}}

    monkeypatch.setattr(training, "train", searched)
    size = {"metrics": ["f1"], "seeds": 1, "cost": False, "workers": 1, "settings": {"A": ["a=1"]}, "arms": ["exact"],
            "search": {"trainer.lr": ["1", "2"]}, "best": {"A": "f1"}}
    made = [*grid.measure("grid", ["tasks/lra.py"], {"runs": [size]})]
    assert [(draw.table, draw.value) for draw in made if draw.table != "validation"] == [("chosen", "2"), ("test", 0.4)]


def test_arms_of_a_setting_and_seeds_of_an_arm(tmp_path, monkeypatch):
    """`only` leaves arms out, `seeds_of` gives more seeds, `tested` and `baselines` name draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", trained)
    size = {"metrics": ["loss"], "tested": ["loss"], "seeds": 1, "cost": False, "workers": 1,
            "settings": {"U": ["gap=1", "steps=9"], "B": ["gap=1", "steps=9"]}, "arms": ["exact", "elu", "later"],
            "only": {"B": ["exact", "elu"]}, "baselines": {"unigram_": "unigram"}, "seeds_of": {"elu": {"U": 2}}}
    draws = [*grid.measure("grid", ["tasks/lra.py"], {"runs": [size]})]
    assert {(draw.setting, draw.arm, draw.metric) for draw in draws if draw.table == "test"} == {
        *(("U", arm, "loss") for arm in ("exact", "elu", "later", "unigram")),
        *(("B", arm, "loss") for arm in ("exact", "elu", "unigram"))}
    seeds = {(draw.setting, draw.unit) for draw in draws if draw.arm == "elu" and draw.table == "test"}
    assert seeds == {("U", 0), ("U", 1), ("B", 0)}


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
    made = [*grid.measure("mine", ["probes/training.py"], size)]
    assert [draw.value for draw in made if draw.metric == "steps"] == [2, 2, 2]
    first, second, third = [draw.value for draw in made if draw.metric == "folder"]
    assert first == third != second and Path(first).parent == training.HOME
    assert len([*training.HOME.iterdir()]) == 4
    begun, real = [], runs.run
    monkeypatch.setattr(runs, "run", lambda overrides, place: begun.append(place) or real(overrides, place))
    assert [draw.value for draw in grid.measure("mine", ["probes/training.py"], size)] == [draw.value for draw in made]
    assert not begun
    shutil.rmtree(first)
    [*grid.measure("mine", ["probes/training.py"], size)]
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
    found = sources.closure(start.home(HOME.path, ["probes/redraw.py"]).sources)
    names = {sources.name_of(file) for file in found}
    assert {"tasks/recall.py", "conf/task/recall.yaml", "runner/trainer.py"} < names
    assert not [name for name in names if name.startswith(("nearfar", "swap/", "probes/redraw"))]


def test_a_start_of_another_name_is_refused():
    with pytest.raises(ConfigError, match="did you mean a model"):
        grid.started({"probe": [{"start": "the model"}]}, {"a model": ["here"]}, 0)


PAGE = """
title: Killed
metrics: {loss: {better: lower}}
sizes:
  small:
    starts:
      a model: {stages: [[task=recall, attention=exact, +task.sizes.d=16, &tiny [trainer.batch=2, task.block=16,
        task.pairs=2, task.queries=2, task.evaluated=2, task.rows=16, trainer.save_every=1, trainer.log_every=1,
        trainer.steps=3]]]}
    runs:
      - {metrics: [loss], tested: [loss], seeds: 2, cost: false, workers: 1, before: {task.init: a model},
         common: [task=recall, *tiny], settings: {A: []}, arms: [exact, "favorp m=4"]}
"""


def page_of_runs(folder):
    (folder / "killed.yaml").write_text(PAGE)
    return [sys.executable, "-m", "crt_exp.report", "killed.yaml", "--out", "out"]


def steps_of(place, split="train", name="metrics.jsonl"):
    return [record["step"] for record in runs.read_records(place / name) if record["split"] == split]


def values_of(folder):
    return [(draw.arm, str(draw.x), draw.unit, draw.value) for draw in read_draws("killed", folder).itertuples()]


def test_runs_that_nothing_begins_with_are_kept_and_discarded_when_asked(tmp_path, monkeypatch, one_thread):
    """With their last weights alone. Deleted, they are not trained again, and the model that they began with stays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killed.yaml").write_text(PAGE.replace("seeds: 2", "seeds: 1"))
    command_line.measure("killed.yaml", "small", Path("out"), False, False)
    places = [*training.HOME.iterdir()]
    assert len(places) == 3 and all(steps_of(place) == [1, 2, 3] for place in places)
    assert all((place / "model/model.safetensors").is_file() for place in places)
    assert all(len([*(place / "checkpoints").iterdir()]) <= 2 for place in places)   # the last, and the best
    first = values_of(Path("out"))
    monkeypatch.setattr(runs, "run", None)
    command_line.measure("killed.yaml", "small", Path("out"), False, False, discard=True)
    assert len([*training.HOME.iterdir()]) == 1 and values_of(Path("out")) == first
    command_line.measure("killed.yaml", "small", Path("out"), False, False)


def test_again_trains_again(tmp_path, monkeypatch):
    """Runs that are there are set aside, the models that they begin with are not."""
    monkeypatch.chdir(tmp_path)
    size = yaml.safe_load(PAGE)["sizes"]["small"]
    for keys in training.last(size["starts"], HOME.sources).values():
        models = {"a model": keys}
        Path(training.folder(keys[0])).mkdir(parents=True)
    run = Path(training.folder(Grid.read(size["runs"][0], models).key("A", "exact", 0, HOME.sources)))
    for _ in range(2):
        run.mkdir()
        training.set_aside(size, HOME.sources)
    assert not run.exists() and run.with_name(f"{run.name}.old").is_dir() and len([*training.HOME.iterdir()]) == 2


@pytest.mark.slow
def test_a_killed_report_goes_on_where_it_was(tmp_path):
    """kill -9 at moments drawn by a seed: the same draws, every step recorded once, and no run ended twice."""
    draw, env = random.Random(0), os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    subprocess.run(page_of_runs(whole), cwd=whole, env=env, check=True)
    kills, place = 0, killed / training.HOME
    while not (killed / "out/killed.csv").is_file():
        with subprocess.Popen(page_of_runs(killed), cwd=killed, env=env, start_new_session=True) as process:
            moment, before = draw.randint(1, 6), written(place)
            while process.poll() is None and (kills == 4 or written(place) < before + moment):
                time.sleep(0.01)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
    assert kills > 1 and values_of(killed / "out") == values_of(whole / "out")
    assert sorted(path.name for path in place.iterdir()) == sorted(path.name for path in
                                                                   (whole / training.HOME).iterdir())
    for run in place.iterdir():
        assert steps_of(run) == [1, 2, 3] and steps_of(run, "test") == [3]
        assert all(steps_of(run, name=lost.name) == [1] for lost in run.glob("metrics.*.jsonl"))  # before a checkpoint


def written(place):
    """Steps that runs have recorded."""
    return sum(len(steps_of(run)) for run in place.iterdir()) if place.is_dir() else 0


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path, monkeypatch):
    """With a folder that is there."""
    home, stopped = runs.Home(tmp_path, ("tasks/lra.py",)), []

    def main():
        stopped.append(Path(sys.argv[-1].removeprefix("hydra.run.dir=")))
        stopped[0].mkdir()
        print(f"crt_exp: stopped by SIGTERM; continue with resume=auto {sys.argv[-1]}", file=sys.stderr)
        sys.exit(143)

    monkeypatch.setattr("crt_exp.train.main", main)
    with pytest.raises(runs.Failed, match="or repeat the command of the report") as failed:
        home.kept(["task=lra"])
    assert f"resume=auto hydra.run.dir={stopped[0]}" in str(failed.value) and stopped[0].is_dir()


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
