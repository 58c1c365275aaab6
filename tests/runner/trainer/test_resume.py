"""Runs that were stopped, killed or damaged, and continued: they end as one that never stopped."""

import os
import random
import signal
import subprocess
import time
from multiprocessing import get_context

import pytest
import torch
import toy
from toy_runs import ARGS, BASE, CARRYING, OVERSHOT, assert_same, at_call, checkpoints, records, send

from crt_exp.runner import checkpoint
from crt_exp.runner.configuration import override
from crt_exp.tasks.base import Task


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


def test_a_signal_that_was_ignored_from_the_start_stays_so(typed, whole, tmp_path, monkeypatch):
    """As nohup and a shell's & start a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            at_call(patch, 7, send(signal.SIGHUP))
            assert typed(*ARGS)[0] == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and records(tmp_path / "run") == records(whole)
    finally:
        signal.signal(signal.SIGHUP, before)


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
                                  '/a\\"b', "/~#!", "/a\\", "/ü", "/ a\t"])
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
           pytest.param(["trainer.eval_every=4", "trainer.prefetch=0"], marks=pytest.mark.slow)]


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


def test_another_configuration(typed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 3, send(signal.SIGTERM))
        assert typed()[0] == 143
    code, _, err = typed("resume=auto", "features.m=64", "trainer.lr=0.1")
    assert code == 2 and "these keys differ: features.m (it was 256, now 64), trainer.lr (it was 0.01, now 0.1)" in err
    code, _, err = typed()
    assert code == 2 and "set resume=auto" in err
    assert typed("resume=auto", "trainer.prefetch=0")[0] == 0  # these may differ


def test_code_that_changed(typed, monkeypatch, tmp_path):
    """The configuration is the same, the model is not."""
    with monkeypatch.context() as patch:
        at_call(patch, 3, send(signal.SIGTERM))
        assert typed()[0] == 143
    monkeypatch.setattr(toy.Toy, "build", lambda self, _: toy.Network(self.dim, self.width + 1, 0.0))
    code, _, err = typed("resume=auto")
    assert code == 2 and "inner.0.bias has shape (16,), expected (17,)" in err
    assert checkpoints(tmp_path / "run") == [3]


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


# ---- the state of a task ---------------------------------------------------------------------------------------------


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


def test_the_state_of_a_task_is_in_the_checkpoint_and_verified(typed, tmp_path, monkeypatch):
    assert typed(*CARRYING)[0] == 0
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept, weights = (checkpoint.load_tensors(path / f"{name}.safetensors") for name in ("task", "model"))
    assert kept.keys() == {"0.seen", "0.table"}
    assert torch.equal(kept["0.table"], weights["outer.weight"] + 6)  # after the update
    assert checkpoint.load_state(path)["task"] == [{"count": 6}] and checkpoint.damage(path) is None
    (path / "task.safetensors").unlink()
    assert "task.safetensors" in checkpoint.damage(path)


def test_the_best_weights_are_tested_with_the_state_of_their_step(typed, tmp_path, monkeypatch):
    counts = []
    real = toy.Carrying.evaluate
    monkeypatch.setattr(toy.Carrying, "evaluate", lambda self, *args: counts.append(self.count) or real(self, *args))
    assert typed("task=carrying", *OVERSHOT)[0] == 0
    assert counts == [4, 8, 12, 16, 20, records(tmp_path / "run")[-1]["best_step"]] and counts[-1] < 20


def test_a_state_that_would_be_lost_is_refused(typed, monkeypatch):
    monkeypatch.setattr(toy.Carrying, "state_dict", lambda self: {"x": 1})
    monkeypatch.setattr(toy.Carrying, "load_state_dict", Task.load_state_dict)
    with monkeypatch.context() as patch:
        at_call(patch, 4, send(signal.SIGTERM))
        assert typed(*CARRYING)[0] == 143
    code, _, err = typed(*CARRYING, "resume=auto")
    assert code == 2 and "Carrying: has state_dict but no load_state_dict" in err and len(err.splitlines()) == 1


# ---- killed ----------------------------------------------------------------------------------------------------------


LONG = ["trainer.epochs=10", "trainer.save_every=3", "trainer.log_every=2", "trainer.keep=3", "task.pause=0.01"]


def started(context, directory):
    process = context.Process(target=toy.run, args=([*BASE, *LONG, f"hydra.run.dir={directory}", "resume=auto"],))
    process.start()
    return process


def written(directory):
    """What tells that a run is alive: it wrote something."""
    metrics = directory / "metrics.jsonl"
    return checkpoints(directory), metrics.stat().st_mtime_ns if metrics.exists() else 0


@pytest.mark.slow
def test_kill_at_20_random_points(tmp_path, monkeypatch):
    """kill -9, a random time after the run wrote something, leaves no trace: not in the weights, the optimiser, the
    generators or the records."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context, rng, steps = get_context("forkserver"), random.Random(2), []
    context.set_forkserver_preload(["toy", "crt_exp.runner.trainer", "crt_exp.train", "accelerate", "hydra",
                                    "torch._dynamo"])
    undisturbed, directory = started(context, tmp_path / "whole"), tmp_path / "killed"
    while len(steps) < 20:
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
    assert len(set(steps)) > 7, steps  # it was hit at different points


# ---- damaged ---------------------------------------------------------------------------------------------------------


def test_damaged_newest_checkpoint(typed, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 13, send(signal.SIGTERM))
        assert typed(*ARGS)[0] == 143
    newest = tmp_path / "run" / "checkpoints" / "step-13"
    os.truncate(newest / "optimizer.safetensors", 100)
    code, out, _ = typed(*ARGS, "resume=auto")
    assert code == 0 and "step-13: damaged (optimizer.safetensors differs" in out and "step-12" in out
    assert records(tmp_path / "run") == records(whole)


def test_records_that_a_checkpoint_counts_must_be_there(typed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, 13, send(signal.SIGTERM))
        assert typed(*ARGS)[0] == 143
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:1]))
    code, _, err = typed(*ARGS, "resume=auto")
    assert code == 2 and len(err.splitlines()) == 1
    assert "metrics.jsonl, found 1" in err and f"step-13: expected {len(lines)}" in err
    assert "restore the file" in err and metrics.read_text() == "".join(lines[:1])
    metrics.write_text("".join(lines))
    assert typed(*ARGS, "resume=auto")[0] == 0


def test_damaged_best_checkpoint(typed, tmp_path):
    args = OVERSHOT
    assert typed(*args)[0] == 0
    best = records(tmp_path / "run")[-1]["best_step"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "run" / "checkpoints" / f"step-{best}" / "model.safetensors").write_bytes(b"")
    code, _, err = typed(*args, "resume=auto")
    assert code == 2 and f"step-{best}: best checkpoint is damaged (model.safetensors differs" in err
