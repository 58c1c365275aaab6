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

from crt_exp.config import ConfigError
from crt_exp.measure import grid, runs, training
from crt_exp.measure.training import Grid
from crt_exp.oldreport import page
from crt_exp.oldreport.draws import read as read_draws
from crt_exp.runner.command_line import check_command_line

HOME = runs.Home(training.HOME, ("tasks/lra.py",))
SIZES = {(name, size): page.load(name)["sizes"][size] for name in page.names() for size in ("small", "full")
         if {"runs", "starts"} & {*(page.load(name).get("sizes", {}).get(size) or {})}}


def grids(given):
    """The grids of a size, and the models of its starts."""
    models = {name: [line[-1] for line in training.stages(name, start, HOME.sources)]
              for name, start in given.get("starts", {}).items()}
    return [Grid.read(each, models) for each in given.get("runs", [])]


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


def trained(overrides, sources):
    if "attention=relu" in overrides:
        return {"diverged": "the loss is not finite"}
    loss = 1.0 + ("attention=uniform" in overrides) * ("gap=1" in overrides)
    curve = [{"step": step, "split": "validation", "loss": loss} for step in (5, 10)]
    return {"curve": curve, "last": {"step": 10, "split": "test", "loss": loss, "unigram_loss": 3.0, "final": True}}


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
    made = [*grid.measure("mine", ["measure/training.py"], size)]
    assert [draw.value for draw in made if draw.metric == "steps"] == [2, 2, 2]
    first, second, third = [draw.value for draw in made if draw.metric == "folder"]
    assert first == third != second and Path(first).parent == training.HOME
    assert len([*training.HOME.iterdir()]) == 4
    begun, real = [], runs.run
    monkeypatch.setattr(runs, "run", lambda overrides, place: begun.append(place) or real(overrides, place))
    assert [draw.value for draw in grid.measure("mine", ["measure/training.py"], size)] == [draw.value for draw in made]
    assert not begun
    shutil.rmtree(first)
    [*grid.measure("mine", ["measure/training.py"], size)]
    assert begun == [Path(first)] and Path(first).is_dir()


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
    return [sys.executable, "-m", "crt_exp.oldreport", "killed.yaml", "--out", "out"]


def steps_of(place, split="train", name="metrics.jsonl"):
    return [record["step"] for record in runs.read_records(place / name) if record["split"] == split]


def values_of(folder):
    return [(draw.arm, str(draw.x), draw.unit, draw.value) for draw in read_draws("killed", folder).itertuples()]


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


def test_a_partial_evaluation_is_no_result_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "HOME", tmp_path)
    place = runs.Home(tmp_path, ("tasks/lra.py",)).place(["task=lra"])
    place.mkdir()
    (place / "metrics.jsonl").write_text('{"step": 1, "split": "test", "evaluated_batches": 20.0, "final": true}\n')
    with pytest.raises(ConfigError, match="trainer.evaluate limited its evaluations"):
        training.train(["task=lra"], ["tasks/lra.py"])
