"""Training as a user meets it: the command line on a small real task (toy.py),
stopped, killed, damaged, and on two processes."""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.nonfinite import NotFinite
from crt_exp.runner import checkpoint, task_state
from crt_exp.runner.invocation import override
from crt_exp.runner.lock import Lock
from crt_exp.runner.optim import make_optimizer, schedule, set_rate
from crt_exp.runner.processes import StopSignals
from crt_exp.runner.progress import ProgressLine, Stopwatch, read_ahead
from crt_exp.runner.trainer import Trainer
from crt_exp.runner.trainer_config import TrainerConfig, start_world
from crt_exp.tasks.base import Plan, Reader, Task
from crt_exp.train import main

HERE = Path(__file__).parent
FILES = ["checkpoints", "config.yaml", "metrics.jsonl", "versions.json"]
BASE = ("--config-dir", str(HERE / "toy_conf"), "task=toy", "logger=none")


@pytest.fixture
def typed(typed, tmp_path):
    """The same for a run of the small task in a folder of this test."""
    return lambda *args, directory="run": typed(*BASE, f"hydra.run.dir={tmp_path / directory}", *args)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def checkpoints(directory):
    return checkpoint.steps(directory / "checkpoints")


def assert_same(a, b):
    """Bit for bit: records, and weights, optimiser and generators of every checkpoint."""
    assert records(a) == records(b)
    assert checkpoints(a) == checkpoints(b) != []
    for step in checkpoints(a):
        one, two = (d / "checkpoints" / f"step-{step}" for d in (a, b))
        for name in ("model", "optimizer"):
            x, y = (checkpoint.load_tensors(p / f"{name}.safetensors") for p in (one, two))
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        assert checkpoint.load_state(one) == checkpoint.load_state(two)


def at_call(monkeypatch, count, action):
    """Does something in the loss of training step `count`, counted from the start of the process."""
    real, calls = toy.Toy.loss, []

    def loss(self, model, batch):
        calls.append(1)
        if len(calls) == count:
            action()
        return real(self, model, batch)
    monkeypatch.setattr(toy.Toy, "loss", loss)


def send(signum):
    return lambda: os.kill(os.getpid(), signum)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of ARGS."""
    return shared_run(tmp_path_factory.mktemp("whole") / "run", ARGS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of PLAIN on one process."""
    return shared_run(tmp_path_factory.mktemp("plain") / "run", PLAIN)


def shared_run(directory, args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["crt_exp", *BASE, *args, f"hydra.run.dir={directory}"])
        main()
    return directory


PLAIN = ["trainer.epochs=1", "task.dropout=0", "task.weighted=true"]

# ---- a run -----------------------------------------------------------------------------------------------------------


def test_trains_and_records(typed, tmp_path):
    code, out, err = typed("trainer.epochs=4", "trainer.keep=1", "trainer.profile=true")
    assert code == 0 and err == "" and "toy: accuracy 0." in out and "profile: 47 steps of" in out
    lines = records(tmp_path / "run")
    evaluated = [(r["step"], r["epoch"]) for r in lines if r["split"] == "validation"]
    assert evaluated == [(12, 1), (24, 2), (36, 3), (48, 4)]
    assert [r["step"] for r in lines if r["split"] == "train"] == list(range(3, 49, 3))
    assert lines[-1]["final"] is True and lines[-1]["split"] == "test" and lines[-1]["accuracy"] > 0.6
    best = max((r for r in lines if r["split"] == "validation"), key=lambda r: r["accuracy"])  # the first of equals
    assert lines[-1]["best_step"] == best["step"] and set(checkpoints(tmp_path / "run")) >= {best["step"], 48}
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == FILES
    assert typed("trainer.epochs=4", "trainer.keep=1", "resume=auto")[0] == 0  # nothing left to do
    assert records(tmp_path / "run") == lines


# ends below its best
OVERSHOT = ["trainer.steps=20", "trainer.eval_every=4", "trainer.lr=0.5", "trainer.schedule=constant", "seed=1"]


def test_best_weights_are_tested(typed, tmp_path):
    args = [*OVERSHOT, "trainer.keep=1"]
    assert typed(*args)[0] == 0
    assert typed(*args, "trainer.select=last", directory="last")[0] == 0
    best, last = records(tmp_path / "run")[-1], records(tmp_path / "last")[-1]
    assert best["best_step"] < 20 and "best_step" not in last and best["loss"] != last["loss"]
    path = tmp_path / "run" / "checkpoints" / f"step-{best['best_step']}"
    task = toy.Toy()
    model = task.build(None).eval()
    checkpoint.load_model(model, checkpoint.load_tensors(path / "model.safetensors"), path)
    with torch.no_grad():
        found = task.evaluate(model, "test", Reader(task, batch=8))
    assert found["accuracy"] == best["accuracy"] and found["loss"] == pytest.approx(best["loss"], abs=1e-6)


def test_without_test_split_and_with_patience(typed, tmp_path):
    code, *_ = typed("task.test=false", "trainer.epochs=30", "trainer.eval_every=6", "trainer.patience=2",
                     "trainer.lr=0.2")
    lines = records(tmp_path / "run")
    validations = [r["accuracy"] for r in lines if r["split"] == "validation" and "final" not in r]
    assert code == 0 and lines[-1]["step"] < 360  # two evaluations in a row were no better than the best
    assert max(validations[-2:]) <= max(validations[:-2]) == lines[-1]["accuracy"]
    assert lines[-1]["split"] == "validation"


def test_evaluation_only(typed, tmp_path):
    assert typed("trainer.steps=0")[0] == 0
    assert [r["split"] for r in records(tmp_path / "run")] == ["test"] and checkpoints(tmp_path / "run") == []


def test_micro_batches_and_read_ahead_change_nothing(plain, typed, tmp_path):
    """Also where the mean of the loss runs over parts of different size, which it does here."""
    assert typed(*PLAIN, "trainer.accumulate=4", "trainer.prefetch=0", "trainer.eval_batch=31")[0] == 0
    assert_close(records(tmp_path / "run"), records(plain))


def assert_close(a, b, tolerance=2e-5):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key in x:
            expected = pytest.approx(y[key], rel=tolerance, abs=tolerance) if isinstance(y[key], float) else y[key]
            assert x[key] == expected, key


@pytest.mark.parametrize("precision", ["bf16", pytest.param("no", marks=pytest.mark.slow)])
def test_precision_and_compile(precision, typed, tmp_path):
    extra = ["trainer.compile=true"] if precision == "no" else ["trainer.schedule=cosine", "trainer.optimizer=adam"]
    code, _, err = typed("trainer.epochs=3", f"trainer.precision={precision}", *extra)
    assert code == 0, err
    assert records(tmp_path / "run")[-1]["accuracy"] > 0.5
    path = tmp_path / "run" / "checkpoints" / "step-36" / "model.safetensors"
    assert {t.dtype for t in checkpoint.load_tensors(path).values()} == {torch.float32}


# ---- stopped and continued -------------------------------------------------------------------------------------------


ARGS = ["trainer.epochs=2", "trainer.save_every=5", "trainer.log_every=4", "trainer.keep=3"]


def crt_exp(*args, start=(sys.executable, "-m", "crt_exp"), **options):
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*start, *BASE, *args], capture_output=True, text=True, env=env, timeout=280, **options)


@pytest.mark.parametrize("signum, code", [
    (signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)])
def test_a_signal_leaves_a_checkpoint_and_resume_ends_alike(signum, code, typed, whole, tmp_path, monkeypatch,
                                                            interruptible):
    """The step is finished first; the continued run gives the numbers of the one that was never stopped."""
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signum))  # in the middle of the first epoch, between two records
        found, _, err = typed(*ARGS)
    assert found == code and "resume=auto" in err and signal.Signals(signum).name in err and len(err.splitlines()) == 1
    assert checkpoints(tmp_path / "run") == [5, 7]
    found, out, err = typed(*ARGS, "resume=auto")
    assert found == 0 and "continuing from" in out and "step-7" in out
    assert records(tmp_path / "run") == records(whole)
    assert signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler)  # handlers are put back


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_from_the_start_stays_so(signum, typed, whole, tmp_path, monkeypatch):
    """As nohup and a shell's & start a run."""
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            at_call(patch, 7, send(signum))
            assert typed(*ARGS)[0] == 0
        assert signal.getsignal(signum) is signal.SIG_IGN and records(tmp_path / "run") == records(whole)
    finally:
        signal.signal(signum, before)


@pytest.mark.slow
def test_the_words_that_continue_a_run_can_be_pasted(typed, whole, tmp_path, monkeypatch):
    place = override("hydra.run.dir", tmp_path / "a 'b' \"c\"=[d],$e")
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signal.SIGTERM))
        code, _, err = typed(*ARGS, place)
    assert code == 143 and (tmp_path / "a 'b' \"c\"=[d],$e" / "metrics.jsonl").exists()
    shell = ["sh", "-c", f"printf '%s\\0' {err.rstrip().partition('continue with ')[2]}"]
    words = subprocess.run(shell, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert words == ["resume=auto", place]
    code, out, _ = typed(*ARGS, *words)
    assert code == 0 and "continuing from" in out


@pytest.mark.parametrize("path", ["/a/b-c.d", "/a b", "/a'b", '/a"b', "/a=b", "/a,b", "/[a]{b: c}", "/$HOME", "/a\\'b",
                                  '/a\\"b', "/~#!", "/a\\", "/a${b}", "/a\\${b}", "/ü", "/ a\t"])
def test_overrides_hold_any_path(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    found = OverridesParser.create().parse_override(override("hydra.run.dir", path)).value()
    assert OmegaConf.create({"dir": found if isinstance(found, str) else str(found)}).dir == path


@pytest.mark.slow
def test_a_checkpoint_after_so_many_minutes_changes_no_number(typed, whole, tmp_path, monkeypatch):
    """Here after every step; and it may be another number in a run that goes on."""
    args = [*ARGS[:-1], "trainer.keep=50"]
    with monkeypatch.context() as patch:
        at_call(patch, 9, send(signal.SIGTERM))
        assert typed(*args, "trainer.save_minutes=1e-9")[0] == 143
    assert checkpoints(tmp_path / "run") == list(range(1, 10))
    assert typed(*args, "trainer.save_minutes=null", "resume=auto")[0] == 0
    assert records(tmp_path / "run") == records(whole) and checkpoints(tmp_path / "run")[8:] == [9, 10, 12, 15, 20, 24]


OPTIONS = [["trainer.accumulate=2", "task.weighted=true", "trainer.precision=bf16", "trainer.optimizer=adam"],
           pytest.param(["task.streamed=true", "trainer.steps=30"], marks=pytest.mark.slow),
           pytest.param(["trainer.patience=1", "trainer.eval_every=4", "trainer.prefetch=0"], marks=pytest.mark.slow)]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_resume_is_exact_whatever_the_options(options, typed, tmp_path, monkeypatch):
    args = [*options, "trainer.keep=20"]
    assert typed(*args)[0] == 0
    with monkeypatch.context() as patch:
        at_call(patch, 9, send(signal.SIGTERM))
        assert typed(*args, directory="other")[0] == 143
    assert typed(*args, "resume=auto", directory="other")[0] == 0
    assert records(tmp_path / "run") == records(tmp_path / "other")
    last = max(checkpoints(tmp_path / "run"))
    for d in ("run", "other"):  # signals left checkpoints of their own: compare those that both have
        for step in set(checkpoints(tmp_path / d)) - {last}:
            checkpoint.shutil.rmtree(tmp_path / d / "checkpoints" / f"step-{step}")
    assert_same(tmp_path / "run", tmp_path / "other")


@pytest.mark.parametrize("task, options", [
    ("carrying", ["trainer.accumulate=2"]), pytest.param("uneven", [], marks=pytest.mark.slow),
    ("uneven", ["trainer.accumulate=2"])])
def test_resume_is_exact_with_a_state_of_the_task_and_rows_of_unequal_cost(task, options, typed, tmp_path, monkeypatch):
    args = [f"task={task}", *options, "trainer.steps=14", "trainer.save_every=3", "trainer.keep=20"]
    assert typed(*args)[0] == 0
    with monkeypatch.context() as patch:
        at_call(patch, 9, send(signal.SIGTERM))
        assert typed(*args, directory="other")[0] == 143
    assert typed(*args, "resume=auto", directory="other")[0] == 0
    stopped = set(checkpoints(tmp_path / "other")) - set(checkpoints(tmp_path / "run"))
    for step in stopped:
        checkpoint.shutil.rmtree(tmp_path / "other" / "checkpoints" / f"step-{step}")
    assert_same(tmp_path / "run", tmp_path / "other")


# ---- what a task may keep and say ------------------------------------------------------------------------------------


CARRYING = ["task=carrying", "trainer.steps=6", "trainer.save_every=3", "trainer.keep=20"]


def test_the_state_of_a_task_is_in_the_checkpoint_and_verified(typed, tmp_path, monkeypatch):
    assert typed(*CARRYING)[0] == 0
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept, weights = (checkpoint.load_tensors(path / f"{name}.safetensors") for name in ("task", "model"))
    assert kept.keys() == {"0.seen", "0.table"}
    assert torch.equal(kept["0.table"], weights["outer.weight"] + 6)  # after the update
    assert checkpoint.load_state(path)["task"] == [{"count": 6}] and checkpoint.damage(path) is None
    (path / "task.safetensors").unlink()
    assert "task.safetensors is missing" in checkpoint.damage(path)


def test_the_best_weights_are_tested_with_the_state_of_their_step(typed, tmp_path, monkeypatch):
    counts = []
    real = toy.Carrying.evaluate
    monkeypatch.setattr(toy.Carrying, "evaluate", lambda self, *args: counts.append(self.count) or real(self, *args))
    assert typed("task=carrying", *OVERSHOT)[0] == 0
    assert counts == [4, 8, 12, 16, 20, records(tmp_path / "run")[-1]["best_step"]] and counts[-1] < 20


@pytest.mark.parametrize("state, load, message", [
    ({"x": {"y": 1}}, None, "state_dict()['x'] is a dict: a checkpoint keeps tensors, numbers and text"),
    ({"x": 1}, Task.load_state_dict, "Carrying has a state_dict and no load_state_dict")])
def test_a_state_that_would_be_lost_is_refused(state, load, message, typed, monkeypatch):
    monkeypatch.setattr(toy.Carrying, "state_dict", lambda self: state)
    if load:
        monkeypatch.setattr(toy.Carrying, "load_state_dict", load)
        with monkeypatch.context() as patch:
            at_call(patch, 4, send(signal.SIGTERM))
            assert typed(*CARRYING)[0] == 143
    code, _, err = typed(*CARRYING, "resume=auto")
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_the_state_of_other_processes_is_refused_unless_all_had_the_same():
    one, two = ({"a": torch.tensor([float(i)]), "n": 1} for i in (1, 2))
    states = task_state.joined(*task_state.split([one, two]))
    assert all(task_state.same(a, b) for a, b in zip(states, (one, two)))
    assert task_state.share(states, 1, 2)["a"] == 2 and task_state.share(states, 0, 1) is None
    assert task_state.same(task_state.share([one, dict(one)], 2, 4), one)


@pytest.mark.slow
def test_a_state_of_two_processes(tmp_path):
    """Each has its own; another number of processes cannot continue it."""
    args = [*CARRYING, f"hydra.run.dir={tmp_path / 'run'}"]
    out = crt_exp(*args, "trainer.processes=2")
    assert out.returncode == 0, out.stderr
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept = checkpoint.load_tensors(path / "task.safetensors")
    assert not torch.equal(kept["0.seen"], kept["1.seen"]) and torch.equal(kept["0.table"], kept["1.table"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # as if it had been stopped before the final record
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    out = crt_exp(*args, "resume=auto")
    assert out.returncode == 2 and "was written by 2 processes, each with its own state of this task" in out.stderr


@pytest.mark.slow
def test_two_processes_read_the_same_costs_as_one(typed, tmp_path):
    """Two processes are one with twice the micro-batches: of every step each has its half."""
    args = ["task=uneven", "trainer.epochs=1", "task.dropout=0"]
    out = crt_exp(*args, "trainer.processes=2", f"hydra.run.dir={tmp_path / 'two'}")
    assert out.returncode == 0, out.stderr
    assert typed(*args, "trainer.accumulate=2")[0] == 0
    assert_close(records(tmp_path / "two"), records(tmp_path / "run"))


def test_an_epoch_by_cost_has_its_own_number_of_steps(typed, tmp_path):
    assert typed("task=uneven", "trainer.epochs=2")[0] == 0
    steps = toy.Uneven().epoch_steps(Plan(8))
    assert steps != 96 // 8 and records(tmp_path / "run")[-1]["step"] == 2 * steps


@pytest.mark.slow
def test_a_signal_ends_a_long_evaluation_at_once(typed, whole, tmp_path, monkeypatch):
    real = toy.Toy.evaluate

    def evaluate(self, model, split, reader):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    monkeypatch.setattr(toy.Toy, "evaluate", evaluate)
    start = time.monotonic()
    assert typed(*ARGS)[0] == 143 and time.monotonic() - start < 30
    assert max(checkpoints(tmp_path / "run")) == 12  # the step that was to be evaluated
    monkeypatch.setattr(toy.Toy, "evaluate", real)
    assert typed(*ARGS, "resume=auto")[0] == 0
    assert_same(tmp_path / "run", whole)


LONG = ["trainer.epochs=10", "trainer.save_every=3", "trainer.log_every=2", "trainer.keep=3", "task.pause=0.01"]


def started(context, directory):
    process = context.Process(target=toy.run, args=([*BASE, *LONG, f"hydra.run.dir={directory}", "resume=auto"],))
    process.start()
    return process


def written(directory):
    """What tells that a run is alive: it wrote something."""
    metrics = directory / "metrics.jsonl"
    return checkpoints(directory), metrics.stat().st_mtime_ns if metrics.exists() else 0


def kill_often(kills, seed, tmp_path):
    """Runs LONG once undisturbed, and once killed `kills` times, a random time after it wrote something;
    both must be equal."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context, rng, steps = get_context("forkserver"), random.Random(seed), []
    context.set_forkserver_preload(["toy", "crt_exp.runner.trainer", "crt_exp.train", "accelerate", "hydra",
                                    "torch._dynamo"])
    undisturbed, directory = started(context, tmp_path / "whole"), tmp_path / "killed"
    while len(steps) < kills:
        before, process = written(directory), started(context, directory)
        while written(directory) == before and process.exitcode is None:
            time.sleep(0.01)
        process.join(rng.uniform(0, 0.3))
        if process.exitcode == 0:  # it ended first: from the beginning
            checkpoint.shutil.rmtree(directory)
            continue
        assert process.exitcode is None
        process.kill()
        process.join()
        steps.append(max(checkpoints(directory), default=0))
    last = started(context, directory)
    for process in (last, undisturbed):
        process.join()
        assert process.exitcode == 0
    assert_same(directory, tmp_path / "whole")
    return steps


@pytest.mark.slow
def test_kill_and_resume(tmp_path):
    kill_often(2, 1, tmp_path)


@pytest.mark.slow
def test_kill_at_20_random_points(tmp_path):
    """kill -9 leaves no trace: not in the weights, the optimiser, the generators or the records."""
    steps = kill_often(20, 2, tmp_path)
    assert len(set(steps)) > 7, steps  # it was hit at different points


def test_damaged_newest_checkpoint(typed, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 13, send(signal.SIGTERM))
        assert typed(*ARGS)[0] == 143
    newest = tmp_path / "run" / "checkpoints" / "step-13"
    os.truncate(newest / "optimizer.safetensors", 100)
    code, out, _ = typed(*ARGS, "resume=auto")
    assert code == 0 and "step-13 is damaged (optimizer.safetensors has 100 bytes" in out and "step-12" in out
    assert records(tmp_path / "run") == records(whole)


def test_all_checkpoints_damaged(typed, whole, tmp_path, monkeypatch):
    """The run begins anew and says so; what it had recorded stays under another name."""
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signal.SIGTERM))
        assert typed(*ARGS)[0] == 143
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for step in checkpoints(tmp_path / "run"):
        (tmp_path / "run" / "checkpoints" / f"step-{step}" / "manifest.json").unlink()
    code, out, _ = typed(*ARGS, "resume=auto")
    assert code == 0 and out.count("is damaged (manifest.json is missing)") == 2
    assert "the run begins anew; its earlier records are kept in metrics.1.jsonl" in out
    assert (tmp_path / "run" / "metrics.1.jsonl").read_bytes() == before
    assert_same(tmp_path / "run", whole)


def test_a_damaged_state_is_passed_over_however_many_are_kept(typed, whole, tmp_path, monkeypatch):
    args = [*ARGS[:-1], "trainer.keep=50", "resume=auto"]
    with monkeypatch.context() as patch:
        at_call(patch, 13, send(signal.SIGTERM))
        assert typed(*args)[0] == 143
    os.truncate(tmp_path / "run" / "checkpoints" / "step-13" / "state.json", 5)
    code, out, err = typed(*args)
    assert code == 0 and "step-13 is damaged (state.json has 5 bytes" in out, err
    assert records(tmp_path / "run") == records(whole)


@pytest.mark.parametrize("left", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_records_that_a_checkpoint_counts_must_be_there(left, typed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 13, send(signal.SIGTERM))
        assert typed(*ARGS)[0] == 143
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:left]))
    code, _, err = typed(*ARGS, "resume=auto")
    assert code == 2 and len(err.splitlines()) == 1
    assert f"metrics.jsonl holds {left} records, and" in err and f"step-13 was written after {len(lines)}" in err
    assert "Put the whole file back" in err and metrics.read_text() == "".join(lines[:left])
    metrics.write_text("".join(lines))
    assert typed(*ARGS, "resume=auto")[0] == 0


def test_damaged_best_checkpoint(typed, tmp_path):
    args = OVERSHOT
    assert typed(*args)[0] == 0
    best = records(tmp_path / "run")[-1]["best_step"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "run" / "checkpoints" / f"step-{best}" / "model.safetensors").write_bytes(b"")
    code, out, _ = typed(*args, "resume=auto")
    assert code == 0 and "the best checkpoint" in out and "the last weights are tested" in out


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_infinite_input_names_the_layer(typed, tmp_path):
    row = list(Plan(8).rows(96, "train"))[7][0]  # read in step 8
    code, _, err = typed(f"task.poison={row}", "trainer.save_every=3", "trainer.epochs=1")
    assert code == 3 and len(err.splitlines()) == 1
    assert "step 8: loss nan" in err and "first not finite: output of inner.0 (Linear)" in err
    assert "the checkpoint of step 6 is the last good one" in err
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").name == "step-6"
    assert all(r["split"] == "train" and r["loss"] < 10 for r in records(tmp_path / "run"))


def refuse_after(monkeypatch, calls):
    """Layers refuse their input after so many calls in training, as the fit of a feature map does."""
    seen, forward = [], nn.Linear.forward

    def refusing(self, x):
        seen.append(self.training)
        if sum(seen) > calls:
            raise NotFinite("the fitted A is not finite")
        return forward(self, x)
    monkeypatch.setattr(nn.Linear, "forward", refusing)


def test_a_layer_that_refuses_its_numbers_is_a_divergence(typed, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        refuse_after(patch, 2 * 4)  # two layers
        code, _, err = typed("trainer.save_every=2")
    assert code == 3 and len(err.splitlines()) == 1
    told = "step 5: no loss; first not finite: inner.0 (Linear): the fitted A is not finite; the checkpoint of step 4"
    assert told in err
    with monkeypatch.context() as patch:
        refuse_after(patch, -1)
        code, _, err = typed("trainer.steps=0", directory="evaluated")
    assert code == 3 and "step 0: evaluation on test; first not finite: inner.0 (Linear): the fitted A" in err


def test_weights_that_are_not_finite_are_never_scored(typed, monkeypatch, tmp_path):
    """An accuracy of them would look like a number."""
    update = Trainer._update

    def broken(self):
        update(self)
        if self.progress.step == 11:
            nn.init.constant_(self.module.outer.bias, float("nan"))
    monkeypatch.setattr(Trainer, "_update", broken)
    code, _, err = typed("trainer.save_every=6")
    assert code == 3 and "step 12: evaluation on validation; first not finite: parameter outer.bias" in err
    assert "the checkpoint of step 6 is the last good one" in err


def test_gradient_and_parameter_are_named(typed, monkeypatch, tmp_path):
    forward = toy.Network.forward

    def infinite_gradient(self, x):
        return forward(self, x) + (self.inner[0].weight * 0).abs().sum().sqrt()  # d sqrt(0) = inf, times 0
    with monkeypatch.context() as patch:
        patch.setattr(toy.Network, "forward", infinite_gradient)
        code, _, err = typed("trainer.epochs=1")
    assert code == 3 and "gradient of inner.0.weight" in err and "there is no checkpoint before it" in err
    build = toy.Toy.build

    def broken(self, mechanism):
        model = build(self, mechanism)
        nn.init.constant_(model.outer.bias, float("nan"))
        return model
    monkeypatch.setattr(toy.Toy, "build", broken)
    code, _, err = typed("trainer.epochs=1", directory="other")
    assert code == 3 and "step 1: loss nan" in err and "parameter outer.bias" in err


def test_full_disk(typed, whole, tmp_path, monkeypatch):
    """A checkpoint, then a record, that the disk refuses: one message, nothing half-written, and resume goes on."""
    def refuse(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for break_at in (7, 2):
        with monkeypatch.context() as patch:
            at_call(patch, break_at, lambda: patch.setattr(os, "fsync", refuse))
            code, _, err = typed(*ARGS, "resume=auto")
        assert code == 2 and "No space left on device" in err and "resume=auto" in err and len(err.splitlines()) == 1
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert typed(*ARGS, "resume=auto")[0] == 0
    assert_same(tmp_path / "run", whole)


BAD = [
    ("trainer.batch=0", "trainer.batch = 0: it takes a whole number of at least 1"),
    ("trainer.batch=2.5", "whole number"),
    ("trainer.batch=97", "more than the 96 rows of the training split"),
    ("trainer.batch=6 trainer.accumulate=4", "trainer.batch = 6 does not divide over 1 processes x 4 micro-batches"),
    ("trainer.lr=-1", "trainer.lr = -1: it takes a number above 0"),
    ("trainer.schedule=step", "trainer.schedule = step: it takes linear, cosine or constant"),
    ("trainer.optimizer=sgd", "it takes adamw or adam"),
    ("trainer.precision=fp8", "it takes no, bf16 or fp16"),
    ("trainer.precision=fp16 trainer.cpu=true", "needs a GPU"),
    ("trainer=fsdp trainer.precision=fp16", "use bf16"),
    ("trainer.betas=[0.9,1.5]", "trainer.betas[1] = 1.5: it takes a number of at least 0 and below 1"),
    ("trainer.warmup=-1", "at least 0"),
    ("trainer.save_minutes=0", "trainer.save_minutes = 0: it takes a number above 0"),
    ("trainer.momentum=0.9", "unknown key 'trainer.momentum'"),
    ("trainer=slow", "unknown trainer 'slow'"),
    ("task.streamed=true", "set trainer.steps"),
    ("task=toyy", "unknown task 'toyy'; did you mean toy?"),
    ("+trainer.momentum=0.9", "unknown key 'trainer.momentum'"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[a for a, _ in BAD])
def test_bad_input(args, message, typed, tmp_path):
    code, _, err = typed(*args.split())
    assert code == 2 and message in err, err
    assert "Traceback" not in err and len(err.splitlines()) <= 3 and not (tmp_path / "run").exists()


def test_another_configuration(typed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 3, send(signal.SIGTERM))
        assert typed()[0] == 143
    code, _, err = typed("resume=auto", "features.m=64", "trainer.lr=0.1")
    assert code == 2 and "these keys differ: features.m (it was 256, now 64), trainer.lr (it was 0.01, now 0.1)" in err
    code, _, err = typed()
    assert code == 2 and "add resume=auto" in err
    assert typed("resume=auto", "trainer.prefetch=0", "trainer.profile=true")[0] == 0  # these may differ


def test_code_that_changed(typed, monkeypatch, tmp_path):
    """The configuration is the same, the model is not."""
    with monkeypatch.context() as patch:
        at_call(patch, 3, send(signal.SIGTERM))
        assert typed()[0] == 143
    monkeypatch.setattr(toy.Toy, "build", lambda self, _: toy.Network(self.dim, self.width + 1, 0.0))
    code, _, err = typed("resume=auto")
    assert code == 2 and "does not fit this model: inner.0.weight has shape (16, 6), the model's has (17, 6)" in err
    assert checkpoints(tmp_path / "run") == [3]


# ---- several processes -----------------------------------------------------------------------------------------------


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "crt_exp")


def test_two_processes_are_one_with_twice_the_batch(plain, tmp_path):
    """Under torchrun, in the default directory, which must be one;
    with micro-batches and a mean over parts of different size."""
    out = crt_exp(*PLAIN, "trainer.accumulate=2", start=TORCHRUN, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("toy: accuracy") == 1
    directory, = (tmp_path / "outputs" / "toy").iterdir()
    assert sorted(p.name for p in directory.iterdir()) == FILES
    assert_close(records(directory), records(plain))
    state = checkpoint.load_state(directory / "checkpoints" / "step-12")
    assert len(state["rng"]) == 2 and state["rng"][0] != state["rng"][1]


@pytest.mark.slow
def test_sharded_over_two_processes_from_one_command(plain, tmp_path):
    """trainer.processes starts a torchrun; FSDP gives the same numbers."""
    out = crt_exp(*PLAIN, "trainer=fsdp", "trainer.precision=no", "trainer.processes=2",
                  f"hydra.run.dir={tmp_path}/a b")
    assert out.returncode == 0, out.stderr
    assert_close(records(tmp_path / "a b"), records(plain))
    one, two = (checkpoint.load_tensors(d / "checkpoints/step-12/optimizer.safetensors")
                for d in (plain, tmp_path / "a b"))
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "fsdp"])
def test_two_processes_stop_and_resume(strategy, tmp_path):
    """A SIGTERM to one command: both processes stop at the same step, 143, and go on to the same numbers."""
    args = [f"trainer={strategy}", "trainer.precision=no", "trainer.processes=2", "trainer.save_every=5",
            "trainer.keep=20", "task.pause=0.05"]
    assert crt_exp(*args, f"hydra.run.dir={tmp_path}/whole").returncode == 0
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "crt_exp", *BASE, *args, f"hydra.run.dir={tmp_path}/run"],
                               env=env, stderr=subprocess.PIPE, text=True)
    while not checkpoints(tmp_path / "run"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    err = process.communicate()[1]
    assert process.returncode == 143 and "stopped by SIGTERM" in err
    assert crt_exp(*args, f"hydra.run.dir={tmp_path}/run", "resume=auto").returncode == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_tell_an_error_once(tmp_path):
    for args, message in [(["trainer.batch=7"], "trainer.batch = 7 does not divide over 2 processes"),
                          (["trainer.lrr=1"], "unknown key 'trainer.lrr'"),
                          (["task.poison=5", "trainer.epochs=1"], "first not finite: output of inner.0 (Linear)"),
                          (["task.poison=5", "trainer=fsdp"], "first not finite: output of inner.0 (Linear)")]:
        out = crt_exp(*args, start=TORCHRUN, cwd=tmp_path)
        assert out.returncode == 1 and out.stderr.count(message) == 1, out.stderr


@pytest.mark.parametrize("args, message", [
    (["trainer.batch=7"],
     "trainer.batch = 7 does not divide over 2 processes x 1 micro-batches: choose a multiple of 2"),
    (["trainer.betas=[a,b]"], "trainer.betas[0] = a: it takes a number"),
    (["task.rows=abc"], "task.rows = abc: it takes a number"),
    (["task.rows=6"], "trainer.batch = 8 is more than the 6 rows"),
    (["trainer.epochs=0.001"], "trainer.epochs = 0.001 makes no step at all: an epoch has 12"),
    (["task.streamed=true"], "set trainer.steps"),
    (["attention=generalized", "attention.phi.kernel_epsilon=-1"], "attention=generalized: kernel_epsilon = -1"),
], ids=str)
def test_a_mistake_is_told_before_the_processes_start(args, message, typed, tmp_path, monkeypatch):
    monkeypatch.setattr("crt_exp.train.torchrun", lambda *_: pytest.fail("processes were started"))
    code, _, err = typed("trainer.processes=2", *args)
    assert code == 2 and message in err and len(err.splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_the_processes_find_is_told_once_and_with_their_exit_code(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    for args, code, message in [(["hydra.run.dir=used"], 2, "used is not empty"),
                                (["task.poison=5"], 3, "first not finite")]:
        out = crt_exp("trainer.processes=2", *args, cwd=tmp_path)
        assert out.returncode == code and message in out.stderr and len(out.stderr.splitlines()) == 1, out.stderr


@pytest.mark.slow
def test_two_processes_are_refused_together(tmp_path):
    """Where the first cannot have the directory, and with the exit code of that error."""
    lock = Lock(tmp_path / "run")
    out = crt_exp("trainer.processes=2", "resume=auto", f"hydra.run.dir={tmp_path / 'run'}")
    lock.release()
    assert out.returncode == 2 and out.stderr.count(f"in use by process {os.getpid()}") == 1, out.stderr
    assert "terminate called" not in out.stderr


@pytest.mark.slow
def test_wandb_keeps_its_id(typed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signal.SIGTERM))
        assert typed("logger=wandb")[0] == 143
    first = (tmp_path / "run" / "wandb_id").read_text()
    assert typed("logger=wandb", "resume=auto")[0] == 0
    names = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert (tmp_path / "run" / "wandb_id").read_text() == first
    assert {name.rpartition("-")[2] for name in names} == {first.strip()}


def test_batch_that_does_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="trainer.batch = 6 does not divide over 2 processes x 2 .* multiple of 4"):
        start_world(config(batch=6, accumulate=2))


def config(**changes):
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.load(HERE.parent / "conf" / "trainer" / "default.yaml"))
    del values["_target_"]
    return TrainerConfig(**values | changes)


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, micro", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_plan_shares_out_the_same_steps(world, micro):
    """Step by step the processes' rows are those of one process; a plan that starts later gives the rest of them."""
    plans = [Plan(8, micro, seed=3, epoch=1, rank=r, world=world) for r in range(world)]
    shares = [[list(rows) for rows in plan.rows(30, "train")] for plan in plans]
    single = [list(rows) for rows in Plan(8, seed=3, epoch=1).rows(30, "train")]
    for step, rows in enumerate(single):
        assert sum((part for share in shares for part in share[step * micro:(step + 1) * micro]), []) == rows
    assert len(set(sum(single, []))) == 24
    assert single != [list(rows) for rows in Plan(8, seed=3, epoch=2).rows(30, "train")]
    later = [list(rows) for rows in Plan(8, micro, seed=3, epoch=1, start=2, world=world).rows(30, "train")]
    assert later == shares[0][2 * micro:]


def test_plan_reads_every_row_once_for_evaluation():
    parts = [list(Plan(4, rank=r, world=3).rows(10, "test")) for r in range(3)]
    assert [int(i) for part in parts for rows in part for i in rows] == list(range(10))
    plans = Plan(8, seed=1), Plan(4, seed=1, rank=1, world=2), Plan(8, seed=1, epoch=1)
    draws = [plan.rng(3).random() for plan in plans]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("world, micro", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("n", [12, 13, 100])
def test_by_cost_reads_every_row_once_within_the_budget(n, world, micro):
    """Step by step the same rows whatever the processes, from any step on, in an order that is new each epoch."""
    costs = np.random.default_rng(n).uniform(0.5, 10, n).round(1)
    shares = [[*Plan(1, micro, 3, 1, rank=r, world=world).by_cost(costs, 25, "train")] for r in range(world)]
    steps = Plan(1, micro, world=world).steps(costs, 25)
    assert {len(share) for share in shares} == {steps * micro}
    assert sorted(np.concatenate(sum(shares, []))) == list(range(n))
    assert all(len(rows) * costs[rows].max() <= 25 and len(rows) for share in shares for rows in share)
    single = [*Plan(1, micro * world, 3, 1).by_cost(costs, 25, "train")]
    for i, rows in enumerate(single):
        step, place = divmod(i, micro * world)
        assert np.array_equal(rows, shares[place // micro][step * micro + place % micro])
    for start in range(steps + 1):
        later = [*Plan(1, micro, 3, 1, start, world=world).by_cost(costs, 25, "train")]
        assert len(later) == (steps - start) * micro and all(map(np.array_equal, later, shares[0][start * micro:]))
    assert {Plan(1, micro, 3, epoch, world=world).steps(costs, 25) for epoch in range(5)} == {steps}
    following = Plan(1, micro, 3, 2, world=world).by_cost(costs, 25, "train")
    assert steps < 3 or any(not np.array_equal(a, b) for a, b in zip(shares[0], following, strict=True))


@pytest.mark.parametrize("world", [1, 3, 40])
def test_by_cost_keeps_the_order_for_evaluation(world):
    costs = np.random.default_rng(0).uniform(0.5, 10, 30)
    parts = [rows for r in range(world) for rows in Plan(4, rank=r, world=world).by_cost(costs, 25, "test")]
    assert np.array_equal(np.concatenate(parts), np.arange(30))
    assert all(len(rows) * costs[rows].max() <= 25 for rows in parts)


def test_by_cost_mixes_rows_of_equal_cost_and_fills_batches():
    costs = np.full(60, 5.0)
    first, second = ([*Plan(1, epoch=e).by_cost(costs, 30, "train")] for e in (0, 1))
    assert [len(rows) for rows in first] == [6] * 10 and {frozenset(r) for r in first} != {frozenset(r) for r in second}


@pytest.mark.parametrize("costs, message", [
    ([1, 31, 2], "row 1 costs 31: .* at most the budget of 30"), ([1, 0], "row 1 costs 0"),
    ([1, float("nan")], "row 1 costs nan"), ([1], "1 rows do not fill the 2 micro-batches")])
def test_costs_that_make_no_plan_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        list(Plan(1, micro=2).by_cost(costs, 30, "train"))


def test_schedules():
    rates = lambda kind, **k: [schedule(kind, step, 10, **k) for step in range(10)]
    assert rates("linear", warmup=0)[0] == 1 and rates("linear", warmup=0)[-1] == pytest.approx(0.1)
    assert rates("linear", warmup=0.3)[:4] == pytest.approx([0.25, 0.5, 0.75, 1]) == rates("cosine", warmup=3)[:4]
    assert rates("cosine", warmup=0)[5] == pytest.approx(0.5) and rates("constant", warmup=2)[2:] == [1] * 8
    assert all(b < a for kind in ("linear", "cosine") for a, b in zip(rates(kind, warmup=0), rates(kind, warmup=0)[1:]))


def test_decay_and_layer_wise_rates():
    model = toy.Network(6, 16, 0.0)
    scale = lambda name: {"inner.0.weight": 0.0, "outer.weight": 0.5}.get(name, 1.0)
    optimizer = make_optimizer(model, "adamw", 0.1, (0.9, 0.98), 1e-6, 0.01, scale)
    set_rate(optimizer, 0.5)
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found == {"inner.0.bias": (0.05, 0), "inner.1.weight": (0.05, 0), "inner.1.bias": (0.05, 0),
                     "outer.bias": (0.05, 0), "outer.weight": (0.025, 0.01)}
    assert not model.inner[0].weight.requires_grad
    with pytest.raises(ValueError, match="no parameter to train"):
        make_optimizer(model, "adam", 0.1, (0.9, 0.98), 1e-6, 0.01, lambda name: 0)


def test_nothing_reads_on_after_a_run_that_ends_within_an_epoch(typed):
    before = set(threading.enumerate())
    assert typed("trainer.steps=3")[0] == 0
    assert set(threading.enumerate()) <= before


def test_read_ahead_keeps_order_and_errors():
    def items():
        yield from range(5)
        raise KeyError("the data")
    for depth in (0, 1, 3):
        found = []
        with pytest.raises(KeyError, match="the data"):
            found.extend(read_ahead(items(), depth))
            for item in read_ahead(items(), depth):
                found.append(item)
    assert list(read_ahead(iter(range(100)), 2)) == list(range(100))
    early = read_ahead(iter(range(10**9)), 2)
    assert next(early) == 0
    early.close()  # ends the thread too


def test_progress_line_of_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressLine(10, 4, 8, torch.device("cpu"), True) as line:
        line.metric("accuracy", 0.5)
        for _ in range(3):
            time.sleep(0.11)
            line.step(1.25)
    shown = sys.stderr.getvalue()
    assert "5/10" in shown
    for part in ("loss=1.25", "accuracy=0.5000", "samples/s=", "memory=", "GiB", "<"):  # "<": time left
        assert part in shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressLine(10, 0, 8, torch.device("cpu"), True) as line:
        line.step(1.0)
    assert sys.stderr.getvalue() == ""


def test_only_a_later_interrupt_stops_at_once(interruptible):
    with StopSignals() as signals:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # as torchrun and a terminal send them together
            os.kill(os.getpid(), signum)
        assert signals.signum == signal.SIGTERM
        signals.first -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


ORPHAN = ("import os, subprocess, sys, time; from crt_exp.runner import processes\n"
          "if sys.argv[1] == 'watched': processes.death_signal = lambda: False\n"
          "if len(sys.argv) > 2: processes.end_with_parent(int(sys.argv[2])); print(os.getpid(), flush=True); "
          "time.sleep(100)\n"
          "subprocess.Popen([sys.executable, '-c', os.environ['ORPHAN'], sys.argv[1], str(os.getpid())]); "
          "time.sleep(100)")


@pytest.mark.parametrize("how", [
    pytest.param("kernel", marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux")), "watched"])
def test_processes_end_with_a_parent_that_is_killed(how):
    env = os.environ | {"PYTHONPATH": str(HERE.parent), "ORPHAN": ORPHAN}
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, how], env=env, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    assert parent.stdout.read() == ""  # it ends when nobody can write there any more: not after 100 seconds
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # who reaps it may take a moment
            os.kill(child, 0)
            time.sleep(0.05)
    parent.wait()
    parent.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "agent"])
def test_no_process_of_a_killed_run_goes_on(victim, tmp_path):
    """They leave a checkpoint, and the run can be continued at once."""
    directory = tmp_path / "run"
    args = ["trainer.epochs=20", "task.pause=0.03", "trainer.processes=2", f"hydra.run.dir={directory}"]
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "crt_exp", *BASE, *args], env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    while not (directory / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    agent = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(process.pid if victim == "parent" else agent, signal.SIGKILL)
    start = time.monotonic()
    process.communicate()  # until nobody can write there any more
    assert time.monotonic() - start < 60 and not (directory / ".lock").exists() and len(checkpoints(directory)) == 1
    out = crt_exp(*args, "resume=auto", "trainer.processes=null")
    assert out.returncode == 0 and "continuing from" in out.stdout, out.stderr


def test_stopwatch_shares():
    clock = Stopwatch(True, torch.device("cpu"))
    for _ in range(3):
        with clock("step"):
            for part in ("data", "forward", "backward", "optimiser"):
                with clock(part):
                    time.sleep(0.01)
            time.sleep(0.01)
        clock.count()
    shares = clock.shares()
    assert clock.steps == 2 and 0.3 < shares["outside"] < 0.5 and 0.1 < shares["data"] < 0.3
    assert not Stopwatch(False, torch.device("cpu")).report().startswith("profile: 0")
