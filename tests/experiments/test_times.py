"""The timer: methods in turns, what does not count, memory."""

from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from crt_exp.experiments.measure import times
from crt_exp.samplers.threads import threads


@pytest.mark.parametrize(
    "warm, turn, order",
    [
        (1, 0, "abc"),
        (0, 5, "cab"),
        (3, 1, "bca"),
    ],
)
def test_methods_take_turns_and_rounds_that_warm_up_do_not_count(warm, turn, order):
    calls = []
    numbers = count()

    def measure(name):
        calls.append(name)
        return next(numbers)

    methods = {name: name for name in "abc"}
    spent = times.in_turns(methods, 2, measure=measure, warm=warm, turn=turn)
    assert calls == [*order * (warm + 2)]
    assert list(spent) == [*"abc"]  # results in the order that was given
    first = 3 * warm
    for name in "abc":
        number = first + order.index(name)
        assert spent[name] == [number, number + 3]
    assert times.in_turns({}, 3) == {}
    actual = times.in_turns({"a": list}, 0)
    assert actual == {"a": []}


def test_a_ratio_is_taken_within_rounds():
    actual = times.ratio([2.0, 30.0, 2.2], [1.0, 10.0, 1.1])
    assert actual == 2.0


@pytest.mark.parametrize(
    "ms, calls",
    [
        (2000.0, 1),
        (1.0, 2),
    ],
)
def test_a_short_call_is_repeated(ms, calls, monkeypatch):
    made = []

    def milliseconds(call, *arguments, device):
        call(*arguments)
        return ms

    monkeypatch.setattr(times, "milliseconds", milliseconds)
    actual = times.time_after_warmup(made.append, "call")
    assert actual == ms
    assert made == ["call"] * calls


def test_a_gpu_is_waited_for(monkeypatch):
    """Before and after each call; the current device where CUDA is in use and none is named."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    for device in ("cuda:1", "cpu", None, "in use"):
        in_use = device == "in use"
        if in_use:
            device = None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        times.milliseconds(waited.append, "call", device=device)
    assert waited == ["cuda:1", "call", "cuda:1", "call", "call", None, "call", None]


def test_peaks_count_what_is_added():
    held = torch.ones(2**20)  # 4 MiB
    times.trim_memory()
    increase = times.peak_increase(lambda: torch.ones(2**24).sum())
    assert 60 < increase < 100
    assert held.sum() == 2**20  # 64 MiB


def test_peaks_on_a_gpu_are_of_its_tensors(monkeypatch):
    held = iter([2**20, 3 * 2**20])
    done = []
    for name, step in (("synchronize", "wait"), ("reset_peak_memory_stats", "reset")):
        monkeypatch.setattr(torch.cuda, name, lambda device, step=step: done.append(step))
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: next(held))
    actual = times.peak_increase(partial(done.append, "call"), torch.device("cuda"))
    assert actual == 2.0
    assert done == ["wait", "reset", "call", "wait"]


def test_threads_come_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_training_step_moves_weights_and_leaves_no_gradient():
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()

    def loss(model):
        return model(torch.ones(3)).sum()

    step = times.Update(model.eval(), loss)
    step()
    assert model.training
    assert not torch.equal(model.weight, before)
    assert not model.weight.grad.any()
    assert step.peak_increase() >= 0
