"""Training as a user meets it: the command line on a small real task (toy.py), and what goes wrong on the way."""

import errno
import importlib.util
import json
import os
import re
import threading

import numpy as np
import pytest
import torch
import transformers
from helpers import toy
from helpers.stopping import stop_signal
from helpers.swap_models import bert, gpt2, inputs, made
from helpers.toy import FILES, OVERSHOT, PLAIN, assert_close, assert_same, checkpoints, records
from omegaconf import OmegaConf
from torch import nn

from crt_exp import from_pretrained, swap_attention
from crt_exp.experiments.data.plan import Limit, by_length
from crt_exp.experiments.models.language import LanguageDescription, LanguageModel
from crt_exp.experiments.runner import checkpoint, fit
from crt_exp.experiments.runner.trainer import Trainer, read_ahead
from crt_exp.experiments.runner.trainer_config import (
    Adapters,
    TrainerConfig,
    freeze,
    linear_layers,
    make_optimizer,
    schedule,
)
from crt_exp.experiments.tasks.base import Plan, Reader
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import CONF, ConfigError

CONFIG = {
    key: value
    for key, value in OmegaConf.to_container(OmegaConf.load(CONF / "trainer/default.yaml")).items()
    if key != "_target_"
}


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_the_best_weights_are_tested_with_the_state_of_their_step(typed, tmp_path, monkeypatch):
    """A finished run has nothing left to do; a missing final record with damaged weights is an error."""
    monkeypatch.setattr("crt_exp.experiments.runner.loggers.EVERY", 0.0)
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
    assert "step 4 of 20, evaluating validation: " in err
    for line in err.splitlines():
        assert re.match(
            r"step \d+ of 20, (loss \S+, (accuracy \S+, )?\S+ samples/s, 0\S+ left|evaluating \w+: \d+ "
            r"batches)$",
            line,
        ), err
    lines = records(run)
    validation = [r for r in lines if r["split"] == "validation"]
    best = max(validation, key=lambda r: r["accuracy"])["step"]  # the first of equals
    actual = [r["step"] for r in lines if r["split"] == "train"]
    expected = list(range(3, 20, 3))
    assert actual == expected
    assert counts == [r["step"] for r in validation] + [best] == [4, 8, 12, 16, 20, best]
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
        found = real(task, model, "test", Reader(task, batch=8))
    expected = {key: pytest.approx(lines[-1][key], abs=1e-6) for key in found}
    assert found == expected
    assert typed(*args, "resume=auto")[0] == 0
    assert records(run) == lines
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    (path / "model.safetensors").write_bytes(b"")
    code, _, err = typed(*args, "resume=auto")
    assert code == 2
    assert f"step-{best}: best checkpoint is damaged (model.safetensors differs" in err


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
    validations = [r["accuracy"] for r in lines if r["split"] == "validation" and "final" not in r]
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
            Trainer, "fit", lambda self: (whole(self), patch.setattr(fit, "draw_curves", refuse))
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
    code, _, err = typed(f"task.poison={row}", "trainer.save_every=3", "trainer.epochs=1")
    assert code == 3
    assert len(err.splitlines()) == 1
    assert "step 8: loss nan" in err
    assert "first not finite: output of inner.0 (Linear)" in err
    assert "the checkpoint of step 6 is the last good one" in err
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
    code, _, err = typed(*args)
    assert code == 3, err
    assert told in err, err
    assert len(err.splitlines()) == 1, err


def broken_bias(model):
    nn.init.constant_(model.outer.bias, float("nan"))
    return model


def test_weights_that_are_not_finite_are_never_scored(typed, monkeypatch):
    """An accuracy of them would look like a number."""
    monkeypatch.setattr(
        toy.Toy, "updated", lambda self, model, step: step == 12 and broken_bias(model)
    )
    code, _, err = typed("trainer.save_every=6")
    assert code == 3
    assert "step 12: checkpoint; first not finite: parameter outer.bias" in err
    assert "the checkpoint of step 6 is the last good one" in err


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
    code, _, err = typed("trainer.epochs=1", directory="other")
    assert code == 3
    assert "step 1: loss nan" in err
    assert "parameter outer.bias" in err


LORA = "trainer.adapt=lora trainer.lora.targets="
BAD = [
    ("trainer.batch=97", "trainer.batch=97, trainer.epochs=2: no step with 96 training rows"),
    (
        "trainer.batch=6 trainer.accumulate=4",
        "trainer.batch=6: expected a multiple of 4 (1 processes",
    ),
    ("trainer.precision=fp16 trainer.cpu=true", "trainer.precision=fp16: expected a GPU"),
    ("trainer=fsdp trainer.precision=fp16", "use bf16"),
    ("task.streamed=true", "trainer.steps=null: expected a number"),
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
    code, _, err = typed(*args.split())
    assert code == 2, err
    assert message in err, err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


# ---- the rows of steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, micro", [(2, 2), (4, 1)])
def test_plan_divides_the_steps_of_one_process(world, micro):
    """A plan that starts later gives the rest of them."""
    plans = [Plan(8, micro, seed=3, epoch=1, rank=r, world=world) for r in range(world)]
    shares = []
    for plan in plans:
        shares.append([list(rows) for rows in plan.rows(30, "train")])
    single = [list(rows) for rows in Plan(8, seed=3, epoch=1).rows(30, "train")]
    for step, rows in enumerate(single):
        actual = sum(
            (part for share in shares for part in share[step * micro : (step + 1) * micro]), []
        )
        assert actual == rows
    assert len(set(sum(single, []))) == 24
    assert single != [list(rows) for rows in Plan(8, seed=3, epoch=2).rows(30, "train")]
    later = [
        list(rows)
        for rows in Plan(8, micro, seed=3, epoch=1, start=2, world=world).rows(30, "train")
    ]
    assert later == shares[0][2 * micro :]


def test_plan_reads_every_row_once_for_evaluation():
    parts = [list(Plan(4, rank=r, world=3).rows(10, "test")) for r in range(3)]
    actual = []
    for part in parts:
        for rows in part:
            for i in rows:
                actual.append(int(i))
    expected = list(range(10))
    assert actual == expected
    plans = Plan(8, seed=1), Plan(4, seed=1, rank=1, world=2), Plan(8, seed=1, epoch=1)
    draws = [plan.rng(3).random() for plan in plans]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("n, world, micro", [(12, 1, 1), (100, 2, 2), (13, 3, 2)])
def test_by_cost_reads_every_row_once_within_the_budget(n, world, micro):
    """Step by step the same rows whatever the processes, from any step on, in an order that is new each epoch."""
    costs = np.random.default_rng(n).uniform(0.5, 10, n).round(1)
    shares = [
        [*Plan(1, micro, 3, 1, rank=r, world=world).by_cost(costs, 25, "train")]
        for r in range(world)
    ]
    steps = Plan(1, micro, world=world).steps(costs, 25)
    assert {len(share) for share in shares} == {steps * micro}
    actual = sorted(np.concatenate(sum(shares, [])))
    expected = list(range(n))
    assert actual == expected
    for share in shares:
        for rows in share:
            assert len(rows) * costs[rows].max() <= 25
            assert len(rows)
    single = [*Plan(1, micro * world, 3, 1).by_cost(costs, 25, "train")]
    for i, rows in enumerate(single):
        step, place = divmod(i, micro * world)
        expected = shares[place // micro][step * micro + place % micro]
        assert np.array_equal(rows, expected)
    for start in range(steps + 1):
        later = [*Plan(1, micro, 3, 1, start, world=world).by_cost(costs, 25, "train")]
        assert len(later) == (steps - start) * micro
        assert all(map(np.array_equal, later, shares[0][start * micro :]))
    actual = {Plan(1, micro, 3, epoch, world=world).steps(costs, 25) for epoch in range(5)}
    assert actual == {steps}
    following = Plan(1, micro, 3, 2, world=world).by_cost(costs, 25, "train")
    assert steps < 3 or any(
        not np.array_equal(a, b) for a, b in zip(shares[0], following, strict=True)
    )
    for processes in (world, 40):  # for evaluation in order
        parts = []
        for r in range(processes):
            for rows in Plan(4, rank=r, world=processes).by_cost(costs, 25, "test"):
                parts.append(rows)
        actual = np.concatenate(parts)
        expected = np.arange(n)
        assert np.array_equal(actual, expected)
        for rows in parts:
            assert len(rows) * costs[rows].max() <= 25


def test_by_cost_mixes_rows_of_equal_cost_and_fills_batches():
    costs = np.full(60, 5.0)
    first, second = ([*Plan(1, epoch=e).by_cost(costs, 30, "train")] for e in (0, 1))
    assert [len(rows) for rows in first] == [6] * 10
    assert {frozenset(r) for r in first} != {frozenset(r) for r in second}
    for costs, message in [
        ([1, 31, 2], "a row costs 31; expected at most the budget of 30"),
        ([1], "1 rows for 2 micro-batches"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(Plan(1, micro=2).by_cost(costs, 30, "train"))


@pytest.mark.parametrize(
    "kind, rank, world", [(toy.Toy, 0, 1), (toy.Toy, 2, 3), (toy.Uneven, 1, 3)]
)
def test_an_evaluation_reads_as_many_batches_as_it_says(kind, rank, world):
    """Where micro-batches are no fixed number of rows it says none; never more than the limit."""
    for limit in (None, 1, 2, 100):
        told = []
        task = kind()
        reader = Reader(
            task, 4, 0, "cpu", rank, world, lambda *each, told=told: told.append(each), limit
        )
        count = len([*reader.batches("test")])
        every = len([*task.batches("test", Plan(4, rank=rank, world=world))])
        assert count == min(every, limit or every)
        assert reader.partial == (count < every)
        assert {whole for *_, whole in told} == {limit if kind is toy.Uneven else count}


def joined(orders):
    return np.concatenate([rows for order in orders for rows in order])


@pytest.mark.parametrize("batches, batch", [(1, 12), (3, 12), (2, 6)])
def test_a_limited_evaluation_reads_a_fixed_random_sample(batches, batch):
    """Of rows that are sorted by class: the same for each seed, each repetition and any number of processes."""
    plans = [Plan(batch, seed=seed, limit=Limit(batches)) for seed in (0, 0, 5)]
    first, *others = [joined([plan.rows(1000, "validation")]) for plan in plans]
    assert len({*first}) == len(first) == batches * batch
    assert plans[0].limit.partial
    for other in others:
        assert np.array_equal(first, other)
    assert first.min() < 300
    assert first.max() > 700
    for world in (2, 3):
        shares = [
            Plan(batch // world, rank=r, world=world, limit=Limit(batches)) for r in range(world)
        ]
        orders = [[*plan.rows(1000, "validation")] for plan in shares]
        assert np.array_equal(joined(orders), first)
        assert {*map(len, orders)} == {batches}
    whole = Plan(batch, limit=Limit(1000))
    actual = joined([whole.rows(1000, "test")])
    expected = np.arange(1000)
    assert np.array_equal(actual, expected)
    assert not whole.limit.partial


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_a_limited_evaluation_of_rows_of_unequal_cost_reads_a_sample_too(batches, world):
    """Of rows that are sorted by cost: not the shortest, and as many as the limit allows."""
    costs = np.sort(np.random.default_rng(1).integers(1, 40, 500))
    plans = [Plan(4, seed=r, rank=r, world=world, limit=Limit(batches)) for r in range(world)]
    orders = [[*plan.by_cost(costs, 80, "validation")] for plan in plans]
    rows = joined(orders)
    assert max(map(len, orders)) == batches
    for plan in plans:
        assert plan.limit.partial
    assert len({*rows}) == len(rows)
    assert (np.diff(rows) > 0).all()
    assert abs(costs[rows].mean() - costs.mean()) < 40 / len(rows) ** 0.5
    by_size = by_length(costs, "validation", Plan(8, limit=Limit(batches)), False)
    assert costs[joined([by_size])].max() > 20
    whole = Plan(4, limit=Limit(500))
    actual = len(joined([whole.by_cost(costs, 80, "test")]))
    assert actual == 500
    assert not whole.limit.partial


# ---- rates, reading ahead, progress ----------------------------------------------------------------------------------


def test_schedules():
    def rates(kind, **k):
        return [schedule(kind, step, 10, **k) for step in range(10)]

    assert rates("linear", warmup=0)[0] == 1
    actual = rates("linear", warmup=0)[-1]
    assert actual == pytest.approx(0.1)
    assert (
        rates("linear", warmup=0.3)[:4]
        == pytest.approx([0.25, 0.5, 0.75, 1])
        == rates("cosine", warmup=3)[:4]
    )
    actual = rates("cosine", warmup=0)[5]
    assert actual == pytest.approx(0.5)
    actual = rates("constant", warmup=2)[2:]
    assert actual == [1] * 8
    roots = [(4 / (step + 1)) ** 0.5 for step in range(3, 10)]
    actual = rates("inverse_sqrt", warmup=3)[2:]
    assert actual == pytest.approx([0.75, *roots])


def test_decay_and_layer_wise_rates():
    model = toy.Network(6, 16, 0.0)
    task = toy.Toy()
    config = TrainerConfig(**CONFIG | {"lr": 0.1})

    def scale(name):
        return {"inner.0.weight": 0.0, "outer.weight": 0.5}.get(name, 1.0)

    optimizer = make_optimizer(model, config, scale, task.decays)
    names = {p: name for name, p in model.named_parameters()}
    found = {}
    for g in optimizer.param_groups:
        for p in g["params"]:
            found[names[p]] = (g["lr"], g["peak"], g["weight_decay"])
    assert found == {
        "inner.0.bias": (0.1, 0.1, 0),
        "inner.1.weight": (0.1, 0.1, 0),
        "inner.1.bias": (0.1, 0.1, 0),
        "outer.bias": (0.1, 0.1, 0),
        "outer.weight": (0.05, 0.05, 0.01),
    }
    assert not model.inner[0].weight.requires_grad
    with pytest.raises(ValueError, match="no trainable parameters"):
        make_optimizer(model, config, lambda name: 0, task.decays)


def test_read_ahead_keeps_order_and_errors():
    def items():
        yield from range(5)
        raise KeyError("the data")

    for depth in (0, 1, 3):
        found = []
        with pytest.raises(KeyError, match="the data"):
            found.extend(read_ahead(items(), depth))
        assert found == [*range(5)]


# ---- low-rank adapters and frozen weights ----------------------------------------------------------------------------

LOW_RANK = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": None, "also": [], "merge": False}
ADAPTED = [
    "trainer.adapt=lora",
    "trainer.lora.rank=2",
    "trainer.lora.targets=[inner.0]",
    "trainer.lora.also=[outer]",
]
SHORT = [
    "trainer.epochs=1",
    "trainer.save_every=5",
    "trainer.log_every=4",
    "trainer.keep=5",
    "trainer.lr=1e-2",
]
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


def model_of(run, step):
    return checkpoint.load_tensors(run / "checkpoints" / f"step-{step}" / "model.safetensors")


@needs_peft
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_adapters_begin_as_nothing_and_merge_into_what_they_were(make):
    """On the projections of swapped attention; only they are trained, and every other weight stays."""
    model = swap_attention(made(make), "favorp", m=8)
    batch = inputs(make)
    names = list(model.state_dict())
    with torch.no_grad():
        before = model(**batch)[0]
        adapters = Adapters(model, LOW_RANK)
        actual = model(**batch)[0]
        torch.testing.assert_close(actual, before)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        for name in trained:
            assert ".lora_" in name
        expected = {name for name, _ in model.named_parameters() if name not in trained} | (
            {"lm_head.weight"} if make is gpt2 else set()
        )
        assert adapters.stay == expected
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p)) if name in trained else None
        moved = model(**batch)[0]
        adapters.merge()
        actual = model(**batch)[0]
        torch.testing.assert_close(actual, moved, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved, before, atol=1e-3)
    assert list(model.state_dict()) == names


def masked_bert():
    return transformers.BertForMaskedLM(bert().config).eval()


@needs_peft
@pytest.mark.parametrize("make, target", [(gpt2, "c_attn"), (masked_bert, "query")])
@torch.no_grad()
def test_merged_adapters_are_what_was_evaluated(make, target, tmp_path):
    """In the model and in its folder."""
    model = swap_attention(make(), "favorp", m=8)
    batch = {"input_ids": torch.arange(3, 9)[None]}
    adapters = Adapters(model, LOW_RANK | {"targets": [target], "merge": True})
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    evaluated = model(**batch)[0]
    words = model.get_input_embeddings().weight.clone()
    adapters.merge()
    actual = model(**batch)[0]
    torch.testing.assert_close(actual, evaluated, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight, words)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    again = from_pretrained(type(model), tmp_path).eval()
    actual = again(**batch)[0]
    torch.testing.assert_close(actual, evaluated, rtol=1e-4, atol=1e-5)


@needs_peft
def test_merging_into_a_tied_head_is_refused():
    sizes = {"d": 8, "heads": 2, "layers": 1, "d_ff": 8}
    model = LanguageModel(LanguageDescription(9, 8, sizes, True), Mechanism.of("exact").layer)
    with pytest.raises(ConfigError, match="trainer.lora.merge=true: head is tied.*trainer.lora"):
        Adapters(model, LOW_RANK | {"targets": ["head"], "merge": True})
    Adapters(model, LOW_RANK | {"targets": ["head"]})


def test_targets_are_the_projections_of_attention_unless_they_are_named():
    model = swap_attention(made(bert), "hedgehog", m=4)
    actual = {name.rpartition(".")[2] for name in linear_layers(model, None)}
    assert actual == {
        "query",
        "key",
        "value",
    }
    assert len(linear_layers(model, ["attention.output.dense"])) == 2
    assert len(linear_layers(model, ["dense"])) == 6
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 1, enable_nested_tensor=False
    )
    assert linear_layers(encoder, ["linear1"]) == ["layers.0.linear1"]
    with pytest.raises(
        ConfigError, match="unknown name in trainer.lora.targets 'out_proj'"
    ):  # whose weights are read
        linear_layers(encoder, ["out_proj"])


@needs_peft
def test_adapted_runs_keep_what_is_trained_and_continue_on_the_same_base_alone(
    typed, tmp_path, monkeypatch
):
    actual = typed(*ADAPTED, *SHORT, directory="whole")[0]
    assert actual == 0
    first = model_of(tmp_path / "whole", 5)
    then = model_of(tmp_path / "whole", 10)
    assert sorted(first) == [
        "inner.0.lora_A.default.weight",
        "inner.0.lora_B.default.weight",
        "outer.bias",
        "outer.weight",
    ]
    assert not any(torch.equal(first[name], then[name]) for name in first)
    adapter = tmp_path / "whole" / "adapter"
    actual = json.loads((adapter / "adapter_config.json").read_text())["r"]
    assert actual == 2
    kept = checkpoint.load_tensors(adapter / "adapter_model.safetensors")
    assert sorted(kept) == [f"base_model.model.inner.0.lora_{side}.weight" for side in "AB"]
    actual = sorted(checkpoint.load_tensors(adapter / "trained.safetensors"))
    assert actual == [
        "outer.bias",
        "outer.weight",
    ]
    with stop_signal(toy.Toy, 7):
        assert typed(*ADAPTED, *SHORT)[0] == 143
    build = toy.Toy.build
    with monkeypatch.context() as patch:
        patch.setattr(
            toy.Toy,
            "build",
            lambda self, mechanism: torch.manual_seed(5) and build(self, mechanism),
        )
        code, _, err = typed(*ADAPTED, *SHORT, "resume=auto")
    assert code == 2, err
    assert "adapters of a different base model" in err, err
    assert typed(*ADAPTED, *SHORT, "resume=auto")[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_adapters_without_their_library_are_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "peft" else find(name, *rest),
    )
    with pytest.raises(ConfigError, match=r"pip install 'crt_exp\[adapt\]'"):
        TrainerConfig(**CONFIG | {"adapt": "lora"})


def test_frozen_weights_stay():
    model = toy.Network(6, 16, 0.0)
    freeze(model, ["inner"])
    actual = {name for name, p in model.named_parameters() if p.requires_grad}
    assert actual == {
        "outer.weight",
        "outer.bias",
    }
