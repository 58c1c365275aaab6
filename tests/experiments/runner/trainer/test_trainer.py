"""Training as a user meets it: the command line on a small real task (toy.py), and what goes wrong on the way."""

import errno
import json
import os
import re
import threading

import pytest
import torch
from helpers import toy
from helpers.refusals import check_error
from helpers.toy import FILES, OVERSHOT, PLAIN, assert_close, checkpoints, records
from torch import nn

from crt_exp import train
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.trainer import Trainer
from crt_exp.experiments.tasks.base import PROGRESS, Plan, Reader
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism

# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_the_best_weights_are_tested_with_the_state_of_their_step(typed, tmp_path, monkeypatch):
    """A finished run has nothing left to do; a missing final record with damaged weights is an error."""
    for key in PROGRESS:
        monkeypatch.setitem(PROGRESS, key, 0)
    counts = []
    real = toy.Carrying.evaluate
    monkeypatch.setattr(
        toy.Carrying, "evaluate", lambda self, *args: counts.append(self.count) or real(self, *args)
    )
    args = ["task._target_=helpers.toy.Carrying", "trainer.keep=1", *OVERSHOT]
    run = tmp_path / "run"
    code, out, err = typed(*args)
    assert code == 0
    assert "carrying: accuracy 0." in out
    assert re.search(r"training: .* 20/20 .*, loss \S+, accuracy 0.\d+\]", err), err
    assert "evaluating validation: " in err
    lines = records(run)
    validation = [r for r in lines if r["split"] == "validation"]
    best = max(validation, key=lambda r: r["accuracy"])["step"]  # the first of equals
    actual = []
    for r in lines:
        if r["split"] == "train":
            actual.append(r["step"])
    expected = list(range(3, 20, 3))
    assert actual == expected
    assert counts == [r["step"] for r in validation] + [best]
    assert counts == [4, 8, 12, 16, 20, best]
    assert best < 20
    assert lines[-1]["final"] is True
    assert lines[-1]["split"] == "test"
    assert lines[-1]["best_step"] == best
    assert {best, 20} <= set(checkpoints(run))
    assert sorted(p.name for p in run.iterdir()) == FILES
    path = run / "checkpoints" / f"step-{best}"
    task = toy.Carrying()
    model = task.build(None).eval()
    checkpoint.load_model(model, checkpoint.load_tensors(path / "model.safetensors"), path)
    with torch.no_grad():
        found = real(task, model, "test", Reader(task, Plan(8)))
    expected = {}
    for key in found:
        expected[key] = pytest.approx(lines[-1][key], abs=1e-6)
    assert found == expected
    assert typed(*args, "resume=auto")[0] == 0
    assert records(run) == lines
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    (path / "model.safetensors").write_bytes(b"")
    check_error(
        typed(*args, "resume=auto"),
        f"step-{best}: best checkpoint is damaged (model.safetensors differs",
    )


def test_the_best_validation_ends_a_run_without_test_split(typed, tmp_path):
    args = [
        "task.test=false",
        "trainer.epochs=2",
        "trainer.eval_every=6",
        "trainer.lr=0.2",
        "trainer.precision=bf16",
    ]
    assert typed(*args)[0] == 0
    lines = records(tmp_path / "run")
    validations = []
    for r in lines:
        if r["split"] == "validation" and "final" not in r:
            validations.append(r["accuracy"])
    assert max(validations) == lines[-1]["accuracy"] > 0.6
    assert lines[-1]["split"] == "validation"
    weights = checkpoint.load_tensors(
        tmp_path / "run" / "checkpoints" / "step-24" / "model.safetensors"
    )
    actual = {t.dtype for t in weights.values()}
    assert actual == {torch.float32}


@pytest.mark.slow
def test_compiled_models_learn_and_the_last_weights_can_be_tested(typed, tmp_path):
    assert typed("trainer.epochs=3", "trainer.compile=true", "trainer.select=last")[0] == 0
    last = records(tmp_path / "run")[-1]
    assert last["accuracy"] > 0.5
    assert "best_step" not in last


def test_evaluation_alone_on_a_part_of_the_data(typed, tmp_path):
    _, out, _ = typed("trainer.steps=0", "trainer.evaluate=2")
    (only,) = records(tmp_path / "run")
    assert only["split"] == "test"
    assert only["evaluated_batches"] == 2
    assert checkpoints(tmp_path / "run") == []
    assert "; on a random sample of 2 batches only" in out


def test_micro_batches_and_read_ahead_change_nothing(plain, typed, tmp_path, monkeypatch):
    """Also where the mean of the loss runs over parts of different size; attention keeps its draw within a step."""
    build = toy.Toy.build
    loss = toy.Toy.loss
    continued = []

    def built(self, mechanism):
        model = build(self, mechanism)
        model.attention = Mechanism.parse("exact").layer(2, 8)
        return model

    def noted(self, model, batch):
        continued.append(model.attention.continues_step)
        return loss(self, model, batch)

    monkeypatch.setattr(toy.Toy, "build", built)
    monkeypatch.setattr(toy.Toy, "loss", noted)
    actual = typed(*PLAIN, "trainer.accumulate=4", "trainer.prefetch=0", "trainer.eval_batch=31")[0]
    assert actual == 0
    assert_close(records(tmp_path / "run"), records(plain))
    assert continued == 12 * [False, True, True, True]


def test_a_run_is_not_done_without_its_picture(typed, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = Trainer.fit
    before = threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer, "fit", lambda self: (whole(self), patch.setattr(train, "draw_curves", refuse))
        )
        code, _, err = typed("trainer.steps=3")
    assert code == 2, err
    assert "No space left on device" in err, err
    assert typed("trainer.steps=3", "resume=auto")[0] == 0
    assert (tmp_path / "run" / "curves.png").is_file()
    for thread in threading.enumerate():
        if "ThreadPool" in thread.name and thread not in before:
            thread.join(30)
            assert not thread.is_alive(), thread  # nothing reads on


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_infinite_input_names_the_layer(typed, tmp_path):
    row = list(Plan(8).rows(96, "train"))[7][0]  # read in step 8
    check_error(
        typed(f"task.poison={row}", "trainer.save_every=3", "trainer.epochs=1"),
        "step 8: loss nan",
        "first not finite: output of inner.0 (Linear)",
        "the checkpoint of step 6 is the last good one",
        code=3,
    )
    assert checkpoints(tmp_path / "run") == [6]


@pytest.mark.parametrize(
    "args, calls, told",
    [
        (
            ["trainer.save_every=2"],
            2 * 4,
            "step 5: no loss; first not finite: inner.0 (Linear): the fitted A is not "
            "finite; the checkpoint of step 4",
        ),  # two layers
        (
            ["trainer.steps=0"],
            -1,
            "step 0: evaluation on test; first not finite: inner.0 (Linear): the fitted A",
        ),
    ],
)
def test_a_layer_that_refuses_its_numbers_is_a_divergence(args, calls, told, typed, monkeypatch):
    """Here after so many calls in training, as the fit of a feature map does."""
    seen = []
    forward = nn.Linear.forward

    def refusing(self, x):
        seen.append(self.training)
        if sum(seen) > calls:
            raise NotFinite("the fitted A is not finite")
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", refusing)
    check_error(typed(*args), told, code=3)


def broken_bias(model):
    nn.init.constant_(model.outer.bias, float("nan"))
    return model


def test_weights_that_are_not_finite_are_never_scored(typed, monkeypatch):
    """An accuracy of them would look like a number."""
    monkeypatch.setattr(
        toy.Toy, "updated", lambda self, model, step: step == 12 and broken_bias(model)
    )
    check_error(
        typed("trainer.save_every=6"),
        "step 12: checkpoint; first not finite: parameter outer.bias",
        "the checkpoint of step 6 is the last good one",
        code=3,
    )


def test_gradient_and_parameter_are_named(typed, monkeypatch):
    forward = toy.Network.forward
    build = toy.Toy.build

    def infinite_gradient(self, x):
        return (
            forward(self, x) + (self.inner[0].weight * 0).abs().sum().sqrt()
        )  # d sqrt(0) = inf, times 0

    with monkeypatch.context() as patch:
        patch.setattr(toy.Network, "forward", infinite_gradient)
        code, _, err = typed("trainer.epochs=1")
    assert code == 3
    assert "gradient of inner.0.weight" in err
    assert "there is no checkpoint before it" in err
    monkeypatch.setattr(
        toy.Toy, "build", lambda self, mechanism: broken_bias(build(self, mechanism))
    )
    check_error(
        typed("trainer.epochs=1", directory="other"),
        "step 1: loss nan",
        "parameter outer.bias",
        code=3,
    )


LORA = "trainer.adapt=lora trainer.lora.targets="
BAD = [
    ("trainer.batch=97", "trainer.batch=97, trainer.epochs=2: no step with 96 training rows"),
    (
        "trainer.batch=6 trainer.accumulate=4",
        "trainer.batch=6: expected a multiple of 4 (1 processes",
    ),
    ("trainer.precision=fp16 trainer.cpu=true", "trainer.precision=fp16: expected a GPU"),
    ("trainer=fsdp trainer.precision=fp16", "use bf16"),
    ("trainer=fsdp", "trainer.strategy=fsdp: expected several processes; start with torchrun"),
    (
        "attention=generalized attention.phi.kernel_epsilon=-1",
        "kernel_epsilon=-1: expected a number >= 0",
    ),
    (f"{LORA}[innner]", "unknown name in trainer.lora.targets 'innner'"),
    (f"{LORA}null", "trainer.lora.targets=null: no projections found"),
    (f"{LORA}[inner.0] trainer=fsdp", "trainer.adapt=lora: not supported with trainer=fsdp"),
    ("trainer.freeze=[middle]", "unknown name in trainer.freeze 'middle'"),
    ("trainer.lora.rank=4", "does not use trainer.lora.rank=4; set trainer.adapt=lora"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[a for a, _ in BAD])
def test_options_that_make_no_run_are_refused(args, message, typed, tmp_path):
    check_error(typed(*args.split()), message, lines=3)
    assert not (tmp_path / "run").exists()
