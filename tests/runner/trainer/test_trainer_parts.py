"""What a run is made of: the rows of its steps, rates, reading ahead, the line of progress, the stopwatch."""

import io
import re
import sys

import numpy as np
import pytest
import toy
from omegaconf import OmegaConf

from crt_exp.config import CONF
from crt_exp.runner.loggers import ProgressLine
from crt_exp.runner.trainer import read_ahead
from crt_exp.runner.trainer_config import TrainerConfig, make_optimizer, schedule
from crt_exp.tasks.base import Plan, Reader


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
    ([1, 31, 2], "a row costs 31; expected at most the budget of 30"), ([1], "1 rows for 2 micro-batches")])
def test_costs_that_make_no_plan_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        list(Plan(1, micro=2).by_cost(costs, 30, "train"))


def test_schedules():
    rates = lambda kind, **k: [schedule(kind, step, 10, **k) for step in range(10)]
    assert rates("linear", warmup=0)[0] == 1 and rates("linear", warmup=0)[-1] == pytest.approx(0.1)
    assert rates("linear", warmup=0.3)[:4] == pytest.approx([0.25, 0.5, 0.75, 1]) == rates("cosine", warmup=3)[:4]
    assert rates("cosine", warmup=0)[5] == pytest.approx(0.5) and rates("constant", warmup=2)[2:] == [1] * 8
    roots = [(4 / (step + 1)) ** 0.5 for step in range(3, 10)]
    assert rates("inverse_sqrt", warmup=3)[2:] == pytest.approx([0.75, *roots])
    assert all(b < a for kind in ("linear", "cosine") for a, b in zip(rates(kind, warmup=0), rates(kind, warmup=0)[1:]))


def test_decay_and_layer_wise_rates():
    model, task = toy.Network(6, 16, 0.0), toy.Toy()
    values = OmegaConf.to_container(OmegaConf.load(CONF / "trainer" / "default.yaml"))
    del values["_target_"]
    config = TrainerConfig(**values | {"lr": 0.1})
    scale = lambda name: {"inner.0.weight": 0.0, "outer.weight": 0.5}.get(name, 1.0)
    optimizer = make_optimizer(model, config, scale, task.decays)
    names = {p: name for name, p in model.named_parameters()}
    found = {names[p]: (g["lr"], g["peak"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found == {"inner.0.bias": (0.1, 0.1, 0), "inner.1.weight": (0.1, 0.1, 0), "inner.1.bias": (0.1, 0.1, 0),
                     "outer.bias": (0.1, 0.1, 0), "outer.weight": (0.05, 0.05, 0.01)}
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
            for item in read_ahead(items(), depth):
                found.append(item)
    assert list(read_ahead(iter(range(100)), 2)) == list(range(100))
    early = read_ahead(iter(range(10**9)), 2)
    assert next(early) == 0
    early.close()  # ends the thread too


@pytest.mark.parametrize("rank, world", [(0, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("kind", [toy.Toy, toy.Carrying, toy.Uneven])
def test_an_evaluation_reads_as_many_batches_as_it_says(kind, rank, world):
    """Where micro-batches are no fixed number of rows it says none; never more than the limit."""
    for limit in (None, 1, 2, 100):
        told = []
        task = kind()
        reader = Reader(task, 4, 0, "cpu", rank, world, lambda *each, told=told: told.append(each), limit)
        count, every = len([*reader.batches("test")]), len([*task.batches("test", Plan(4, rank=rank, world=world))])
        assert count == min(every, limit or every) and reader.partial == (count < every)
        assert {whole for *_, whole in told} == {limit if kind is toy.Uneven else count}


@pytest.mark.parametrize("shown", [True, False])
def test_lines_of_progress(shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("crt_exp.runner.loggers.EVERY", 0.0)
    line = ProgressLine(10, 4, 8, shown)
    line.metric = ", accuracy 0.5000"
    line.step(1.25)
    line.evaluating("test", 1, None)
    lines = sys.stderr.getvalue().splitlines()
    assert len(lines) == 2 * shown
    assert not shown or re.fullmatch(r"step 5 of 10, loss 1.25, accuracy 0.5000, \S+ samples/s, 0\S+ left", lines[0])
    assert not shown or lines[1] == "step 5 of 10, evaluating test: 1 batches"
