"""Training as a user meets it: the command line on a small real task (toy.py), and what goes wrong on the way."""

import errno
import os
import threading

import pytest
import torch
import toy
from torch import nn
from toy_runs import ARGS, FILES, OVERSHOT, PLAIN, assert_close, assert_same, at_call, checkpoints, records

from crt_exp.features.base import NotFinite
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Plan, Reader


def test_trains_and_records(typed, tmp_path):
    code, out, err = typed("trainer.epochs=4", "trainer.keep=1")
    assert code == 0 and "toy: accuracy 0." in out
    assert all(line.startswith("step ") for line in err.splitlines())  # of a run of more than ten seconds
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


def test_without_test_split(typed, tmp_path):
    assert typed("task.test=false", "trainer.epochs=2", "trainer.eval_every=6", "trainer.lr=0.2")[0] == 0
    lines = records(tmp_path / "run")
    validations = [r["accuracy"] for r in lines if r["split"] == "validation" and "final" not in r]
    assert max(validations) == lines[-1]["accuracy"] and lines[-1]["split"] == "validation"


def test_evaluations_are_not_silent(typed, monkeypatch):
    monkeypatch.setattr("crt_exp.runner.loggers.EVERY", 0.0)
    code, _, err = typed("trainer.epochs=1")
    assert code == 0 and "evaluating validation: 0 of " in err and "evaluating test: 0 of " in err


def test_a_partial_evaluation_is_called_one(typed, tmp_path):
    """In each record and in the last line; a limit that nothing is beyond changes nothing."""
    _, out, _ = typed("trainer.steps=2", "trainer.evaluate=2")
    evaluated = [r for r in records(tmp_path / "run") if r["split"] != "train"]
    assert [r["evaluated_batches"] for r in evaluated] == [2, 2] and "; on the first 2 batches only" in out
    assert typed("trainer.steps=2", "trainer.evaluate=4", directory="all")[0] == 0
    assert not any("evaluated_batches" in r for r in records(tmp_path / "all"))


def test_evaluation_only(typed, tmp_path):
    assert typed("trainer.steps=0")[0] == 0
    assert [r["split"] for r in records(tmp_path / "run")] == ["test"] and checkpoints(tmp_path / "run") == []


def test_micro_batches_and_read_ahead_change_nothing(plain, typed, tmp_path):
    """Also where the mean of the loss runs over parts of different size, which it does here."""
    assert typed(*PLAIN, "trainer.accumulate=4", "trainer.prefetch=0", "trainer.eval_batch=31")[0] == 0
    assert_close(records(tmp_path / "run"), records(plain))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("no", marks=pytest.mark.slow)])
def test_precision_and_compile(precision, typed, tmp_path):
    extra = ["trainer.compile=true"] if precision == "no" else ["trainer.schedule=cosine", "trainer.optimizer=adam"]
    code, _, err = typed("trainer.epochs=3", f"trainer.precision={precision}", *extra)
    assert code == 0, err
    assert records(tmp_path / "run")[-1]["accuracy"] > 0.5
    path = tmp_path / "run" / "checkpoints" / "step-36" / "model.safetensors"
    assert {t.dtype for t in checkpoint.load_tensors(path).values()} == {torch.float32}


def test_an_epoch_by_cost_has_its_own_number_of_steps(typed, tmp_path):
    assert typed("task=uneven", "trainer.epochs=2")[0] == 0
    steps = toy.Uneven().epoch_steps(Plan(8))
    assert steps != 96 // 8 and records(tmp_path / "run")[-1]["step"] == 2 * steps


def test_nothing_reads_on_after_a_run_that_ends_within_an_epoch(typed):
    before = set(threading.enumerate())
    assert typed("trainer.steps=3")[0] == 0
    assert set(threading.enumerate()) <= before


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
    def broken(self, model, step):
        if step == 12:
            nn.init.constant_(model.outer.bias, float("nan"))
    monkeypatch.setattr(toy.Toy, "updated", broken)
    code, _, err = typed("trainer.save_every=6")
    assert code == 3 and "step 12: checkpoint; first not finite: parameter outer.bias" in err
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
        assert code == 2 and "No space left on device" in err and len(err.splitlines()) == 1
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert typed(*ARGS, "resume=auto")[0] == 0
    assert_same(tmp_path / "run", whole)


BAD = [
    ("trainer.batch=0", "trainer.batch=0: expected an integer >= 1"),
    ("trainer.batch=2.5", "trainer.batch=2.5: expected an integer"),
    ("trainer.batch=97", "trainer.batch=97, trainer.epochs=2: no step with 96 training rows"),
    ("trainer.batch=6 trainer.accumulate=4", "trainer.batch=6: expected a multiple of 4 (1 processes"),
    ("trainer.epochs=0.05", "trainer.epochs=0.05: no step with 96 training rows"),
    ("trainer.lr=-1", "trainer.lr=-1: expected a number > 0"),
    ("trainer.schedule=step", "trainer.schedule=step: expected linear, cosine, constant or inverse_sqrt"),
    ("trainer.optimizer=sgd", "expected adamw or adam"),
    ("trainer.precision=fp8", "expected no, bf16 or fp16"),
    ("trainer.precision=fp16 trainer.cpu=true", "trainer.precision=fp16: expected a GPU"),
    ("trainer=fsdp trainer.precision=fp16", "use bf16"),
    ("trainer.betas=[0.9,1.5]", "trainer.betas=[0.9,1.5]: expected a list"),
    ("trainer.warmup=-1", "trainer.warmup=-1: expected a number >= 0"),
    ("trainer.save_minutes=0", "trainer.save_minutes=0: expected a number > 0"),
    ("trainer.momentum=0.9", "unknown key 'trainer.momentum'"),
    ("trainer=slow", "unknown trainer 'slow'"),
    ("task.streamed=true", "trainer.steps=null: expected a number"),
    ("attention=generalized attention.phi.kernel_epsilon=-1", "kernel_epsilon=-1: expected a number >= 0"),
    ("+trainer.momentum=0.9", "unknown key 'trainer.momentum'"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[a for a, _ in BAD])
def test_bad_input(args, message, typed, tmp_path):
    code, _, err = typed(*args.split())
    assert code == 2 and message in err, err
    assert "Traceback" not in err and len(err.splitlines()) <= 3 and not (tmp_path / "run").exists()
