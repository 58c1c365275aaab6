"""Sweeps: override lists, runs that survive a kill, and rows of their records."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crt_exp.config import ConfigError
from crt_exp.report import pages, sweeps
from crt_exp.report.pages import Page, check
from crt_exp.report.sweeps import RunsFailed, is_finished, rows_of_runs, run_missing, sweep
from crt_exp.runner.run import read_records

FAST = "task=variance_by_length task.most=3"
RUNS = sweep(FAST, features=["pos", "oprf sampler=iid"], **{"task.d": [4, 8]})


def test_a_sweep_is_the_product_of_its_axes():
    assert [run.name for run in RUNS] == ["pos_4", "pos_8", "oprf-sampler=iid_4", "oprf-sampler=iid_8"]
    assert RUNS[2].overrides == ("task=variance_by_length", "task.most=3", "features=oprf", "sampler=iid", "task.d=4")
    assert RUNS[2].columns == {"method": "oprf sampler=iid", "d": 4}
    (run,) = sweep("task=glue trainer.lr=1", attention=["favorpp m=64 redraw_every=10"], seed=[3],
                   data={"SST-2": "task.dataset=sst2 trainer.lr=2"})
    assert run.overrides == ("task=glue", "trainer.lr=2", "attention=favorpp", "features.m=64",
                             "attention.redraw_every=10", "seed=3", "task.dataset=sst2")
    assert run.columns == {"method": "favorpp m=64 redraw_every=10", "seed": 3, "data": "SST-2"}


def test_runs_of_one_name_are_refused():
    page = Page("mine", "", "", small={"a": sweep("seed=0", task={"x": "task=uci"}) + sweep(
        "seed=1", task={"x": "task=uci"})}, columns=[], metrics=[], measured=[])
    with pytest.raises(ConfigError, match="two different runs have the name x"):
        check(page)


def test_missing_runs_are_made_and_finished_ones_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_missing(RUNS[:2], tmp_path / "runs", tmp_path)
    kept = (tmp_path / "runs/pos_4/metrics.jsonl").stat().st_mtime_ns
    run_missing(RUNS, tmp_path / "runs", tmp_path)
    assert (tmp_path / "runs/pos_4/metrics.jsonl").stat().st_mtime_ns == kept
    frame = rows_of_runs(RUNS, tmp_path / "runs", "fig1", ["method", "d", "sum"], ["gain"])
    assert [*frame.columns[:7]] == ["sweep", "method", "d", "sum", "sample", "metric", "value"]
    assert len(frame) == 4 * 3 and {*frame["d"]} == {4, 8}
    gain = frame[(frame.method == "pos") & (frame.metric == "gain")]
    assert (gain.value.abs() < 1e-9).all() and [*gain["sum"]] == [1, 2, 3, 1, 2, 3]
    assert (frame["seconds"] != "").sum() == 4 and frame["versions"].str.startswith("torch ").all()


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = sweep(FAST, **{"task.d": [0, 4]}, features=["pos"])
    with pytest.raises(RunsFailed, match="1 of 2 runs failed.*0_pos"):
        run_missing(runs, tmp_path / "runs", tmp_path)
    assert is_finished(tmp_path / "runs/4_pos") and "task.d" in capsys.readouterr().err


def test_a_run_that_diverged_is_a_result(tmp_path, monkeypatch):
    """It is not started again, and its row states it."""
    monkeypatch.chdir(tmp_path)
    runs = sweep("task=recall trainer.steps=4 task.evaluated=8 trainer.lr=1e30 trainer.warmup=0 trainer.clip=null "
                 "trainer.schedule=constant", attention=["exact"], seed=[0])
    run_missing(runs, tmp_path / "runs", tmp_path)
    assert (tmp_path / "runs/exact_0" / sweeps.DIVERGED).is_file() and is_finished(tmp_path / "runs/exact_0")
    (row,) = rows_of_runs(runs, tmp_path / "runs", "a", ["method"], ["diverged", "loss"]).to_dict("records")
    assert (row["metric"], row["value"], row["method"], row["sample"]) == ("diverged", 1, "exact", 0)


def test_training_runs_give_curves_parts_and_speed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = sweep("task=recall trainer.steps=4 task.evaluated=8 trainer.eval_every=2 trainer.log_every=1",
                 attention=["exact"], seed=[0])
    run_missing(runs, tmp_path / "runs", tmp_path)
    with_steps = rows_of_runs(runs, tmp_path / "runs", "a", ["method", "step"], ["loss", "steps_per_s"])
    end = rows_of_runs(runs, tmp_path / "runs", "a", ["method"], ["loss", "steps_per_s"])
    assert [*end.metric] == ["loss", "steps_per_s"] and (end.value > 0).all()
    assert len(with_steps[with_steps.metric == "loss"]) > 1


SCRIPT = """
from pathlib import Path
from crt_exp.report.sweeps import run_missing, sweep
run_missing(sweep("task=variance task.pairs=400 task.fit=pair", features=["pos", "geom", "gerf", "oprf"],
                  **{"task.regime": ["normal", "sphere"]}), Path("runs"), Path())
"""
KILLED = sweep("task=variance task.pairs=400 task.fit=pair", features=["pos", "geom", "gerf", "oprf"],
               **{"task.regime": ["normal", "sphere"]})


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    """Three times kill -9: finished runs are not repeated, and the rows are those of a sweep that was left alone."""
    def times(folder):
        return {run.name: (folder / "runs" / run.name / "metrics.jsonl").stat().st_mtime_ns for run in KILLED
                if is_finished(folder / "runs" / run.name)}

    folder, alone = tmp_path / "killed", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(sweeps.__file__).parents[2])}
    for wanted in (1, 3, 5):
        before = times(folder)
        process = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=folder, env=environment)
        while len(times(folder)) < wanted and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = times(folder)
        assert before.items() <= after.items()
    for each in (folder, alone):
        subprocess.run([sys.executable, "-c", SCRIPT], cwd=each, env=environment, check=True)
    assert after.items() <= times(folder).items() and len(times(folder)) == len(KILLED)
    plain = [[{key: value for key, value in record.items() if key != "time_s"}
              for run in KILLED for record in read_records(each / "runs" / run.name / "metrics.jsonl")]
             for each in (folder, alone)]
    assert plain[0] == plain[1]


def test_part_of_a_page(tmp_path, monkeypatch):
    """METHODS and SEEDS choose runs; their rows go to a folder of their own, and rows of other sweeps stay."""
    monkeypatch.chdir(tmp_path)
    page = Page("mine", "", "", small={"a": RUNS, "b/c": sweep(FAST, features=["hyp"]),
                                       "b": sweep(FAST, features=["trig"])},
                columns=["method", "d", "sum"], metrics=["gain"], measured=[])
    assert page.targets == ["a", "b"] and [*page.sweeps("small", "b")] == ["b/c", "b"]
    with pytest.raises(ConfigError, match="unknown sweep of the page mine 'c'"):
        page.sweeps("small", "c")
    with pytest.raises(ConfigError, match="SIZE=full: page mine has only small"):
        page.sweeps("full")
    with pytest.raises(ConfigError, match="unknown method 'nope'"):
        page.run(methods=["nope"])
    assert page.run(wanted="a", methods=["pos"]) == Path("outputs/report/part")
    assert not pages.has_rows("mine") and pages.has_rows("mine", Path("outputs/report/part"))
    page.run(wanted="a")
    page.run(wanted="b")
    from crt_exp.report.rows import read_rows

    assert [*read_rows("mine").frame["sweep"].unique()] == ["a", "b/c", "b"]
