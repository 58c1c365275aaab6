"""The rows of steps, rates, reading ahead and progress."""

from itertools import chain

import numpy as np
import pytest
from helpers import toy

from crt_exp.experiments.data.plan import Limit, by_length
from crt_exp.experiments.runner.trainer import read_ahead
from crt_exp.experiments.runner.trainer_config import (
    TrainerConfig,
    make_optimizer,
    schedule,
)
from crt_exp.experiments.tasks.base import Plan, Reader


@pytest.mark.parametrize("world, micro", [(2, 2), (4, 1)])
def test_plan_divides_the_steps_of_one_process(world, micro):
    """A plan that starts later gives the rest of them."""
    plans = []
    for r in range(world):
        plans.append(Plan(8, micro, seed=3, epoch=1, rank=r, world=world))
    shares = []
    for plan in plans:
        shares.append([list(rows) for rows in plan.rows(30, "train")])
    single = []
    for rows in Plan(8, seed=3, epoch=1).rows(30, "train"):
        single.append(list(rows))
    for step, rows in enumerate(single):
        actual = []
        for share in shares:
            for part in share[step * micro : (step + 1) * micro]:
                actual += part
        assert actual == rows
    assert len(set(sum(single, []))) == 24
    assert single != [list(rows) for rows in Plan(8, seed=3, epoch=2).rows(30, "train")]
    later = []
    for rows in Plan(8, micro, seed=3, epoch=1, start=2, world=world).rows(30, "train"):
        later.append(list(rows))
    assert later == shares[0][2 * micro :]


def test_plan_reads_every_row_once_for_evaluation():
    parts = []
    for r in range(3):
        parts.append(list(Plan(4, rank=r, world=3).rows(10, "test")))
    actual = joined(parts).tolist()
    assert actual == list(range(10))
    plans = [
        Plan(8, seed=1),
        Plan(4, seed=1, rank=1, world=2),
        Plan(8, seed=1, epoch=1),
    ]
    draws = [plan.rng(3).random() for plan in plans]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("n, world, micro", [(12, 1, 1), (100, 2, 2), (13, 3, 2)])
def test_by_cost_reads_every_row_once_within_the_budget(n, world, micro):
    """Step by step the same rows whatever the processes, from any step on, in an order that is new each epoch."""
    costs = np.random.default_rng(n).uniform(0.5, 10, n).round(1)
    shares = []
    for r in range(world):
        shares.append([*Plan(1, micro, 3, 1, rank=r, world=world).by_cost(costs, 25, "train")])
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
    first = [*Plan(1, epoch=0).by_cost(costs, 30, "train")]
    second = [*Plan(1, epoch=1).by_cost(costs, 30, "train")]
    assert [len(rows) for rows in first] == [6] * 10
    actual = {frozenset(r) for r in first}
    assert actual != {frozenset(r) for r in second}
    cases = [
        ([1, 31, 2], "a row costs 31; expected at most the budget of 30"),
        ([1], "1 rows for 2 micro-batches"),
    ]
    for costs, message in cases:
        with pytest.raises(ValueError, match=message):
            list(Plan(1, micro=2).by_cost(costs, 30, "train"))


@pytest.mark.parametrize(
    "kind, rank, world",
    [
        (toy.Toy, 0, 1),
        (toy.Toy, 2, 3),
        (toy.Uneven, 1, 3),
    ],
)
def test_an_evaluation_reads_as_many_batches_as_it_says(kind, rank, world):
    """Never more than the limit."""
    for limit in (None, 1, 2, 100):
        task = kind()
        plan = Plan(4, rank=rank, world=world, limit=limit and Limit(limit))
        reader = Reader(task, plan)
        count = len([*reader.batches("test")])
        every = len([*task.batches("test", Plan(4, rank=rank, world=world))])
        assert count == min(every, limit or every)
        assert (limit is not None and plan.limit.partial) == (count < every)


def joined(orders):
    return np.concatenate([*chain.from_iterable(orders)])


@pytest.mark.parametrize("batches, batch", [(1, 12), (3, 12), (2, 6)])
def test_a_limited_evaluation_reads_a_fixed_random_sample(batches, batch):
    """Of rows that are sorted by class: the same for each seed, each repetition and any number of processes."""
    plans = []
    for seed in (0, 0, 5):
        plans.append(Plan(batch, seed=seed, limit=Limit(batches)))
    first, *others = [joined([plan.rows(1000, "validation")]) for plan in plans]
    assert len({*first}) == len(first) == batches * batch
    assert plans[0].limit.partial
    for other in others:
        assert np.array_equal(first, other)
    assert first.min() < 300
    assert first.max() > 700
    for world in (2, 3):
        shares = []
        for r in range(world):
            shares.append(Plan(batch // world, rank=r, world=world, limit=Limit(batches)))
        orders = []
        for plan in shares:
            orders.append([*plan.rows(1000, "validation")])
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
    plans = []
    for r in range(world):
        plans.append(Plan(4, seed=r, rank=r, world=world, limit=Limit(batches)))
    orders = []
    for plan in plans:
        orders.append([*plan.by_cost(costs, 80, "validation")])
    rows = joined(orders)
    assert max(map(len, orders)) == batches
    for plan in plans:
        assert plan.limit.partial
    assert len({*rows}) == len(rows)
    assert (np.diff(rows) > 0).all()
    difference = abs(costs[rows].mean() - costs.mean())
    assert difference < 40 / len(rows) ** 0.5
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
    roots = []
    for step in range(3, 10):
        roots.append((4 / (step + 1)) ** 0.5)
    actual = rates("inverse_sqrt", warmup=3)[2:]
    assert actual == pytest.approx([0.75, *roots])


def test_decay_and_layer_wise_rates(monkeypatch):
    model = toy.Network(6, 16, 0.0)
    task = toy.Toy()
    config = TrainerConfig(**toy.TRAINER | {"lr": 0.1})

    def scale(name):
        return {"inner.0.weight": 0.0, "outer.weight": 0.5}.get(name, 1.0)

    monkeypatch.setattr(task, "lr_scale", scale)
    optimizer = make_optimizer(model, config, task)
    names = {p: name for name, p in model.named_parameters()}
    actual = {}
    for g in optimizer.param_groups:
        for p in g["params"]:
            actual[names[p]] = (g["lr"], g["peak"], g["weight_decay"])
    assert actual == {
        "inner.0.bias": (0.1, 0.1, 0),
        "inner.1.weight": (0.1, 0.1, 0),
        "inner.1.bias": (0.1, 0.1, 0),
        "outer.bias": (0.1, 0.1, 0),
        "outer.weight": (0.05, 0.05, 0.01),
    }
    assert not model.inner[0].weight.requires_grad
    with pytest.raises(ValueError, match="no trainable parameters"):
        monkeypatch.setattr(task, "lr_scale", lambda name: 0)
        make_optimizer(model, config, task)


def test_read_ahead_keeps_order_and_errors():
    def items():
        yield from range(5)
        raise KeyError("the data")

    for depth in (0, 1, 3):
        actual = []
        with pytest.raises(KeyError, match="the data"):
            actual.extend(read_ahead(items(), depth))
        assert actual == [*range(5)]
