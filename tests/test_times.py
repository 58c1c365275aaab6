"""The timer: arms in turns, what does not count, memory."""

import time
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from crt_exp import times


def arms(calls, names="abc"):
    return {name: partial(calls.append, name) for name in names}


def test_all_arms_take_their_turn_in_every_round():
    calls = []
    spent = times.in_turns(arms(calls), 2)
    assert calls == [*"abc" * 3] and list(spent) == [*"abc"]
    assert all(len(each) == 2 and min(each) >= 0 for each in spent.values())


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_rounds_that_warm_up_do_not_count(warm):
    numbers = count()
    assert times.in_turns({"a": None, "b": None}, 2, measure=lambda arm: next(numbers), warm=warm) == {
        "a": [2 * warm, 2 * warm + 2], "b": [2 * warm + 1, 2 * warm + 3]}


@pytest.mark.parametrize("turn, order", [(0, "abc"), (1, "bca"), (5, "cab")])
def test_another_arm_is_first_in_another_process(turn, order):
    calls = []
    spent = times.in_turns(arms(calls), 2, warm=0, turn=turn)
    assert calls == [*order * 2] and list(spent) == [*"abc"]        # results in the order that was given


def test_no_arms_and_no_rounds():
    assert times.in_turns({}, 3) == {} and times.in_turns({"a": lambda: None}, 0) == {"a": []}


def test_a_ratio_is_taken_within_rounds():
    assert times.ratio([2.0, 30.0, 2.2], [1.0, 10.0, 1.1]) == 2.0
    with pytest.raises(ValueError):
        times.ratio([1.0, 2.0], [1.0])


def test_clocks():
    assert times.milliseconds(time.sleep, 0.02) >= 20 > times.milliseconds(time.sleep, 0.02, clock=times.PROCESSOR)


@pytest.mark.parametrize("ms, made", [(2000.0, ["call"]), (1.0, ["call", "call"])])
def test_a_short_call_is_made_again(ms, made, monkeypatch):
    calls, now = [], count(0, ms / 1e3)
    monkeypatch.setattr(times, "milliseconds", lambda call, *given, device: call(*given) or 1e3 * next(now))
    next(now)
    times.time_after_warmup(calls.append, "call", below=times.NO_WARMUP_MS)
    assert calls == made
    times.time_after_warmup(calls.append, "call")
    assert calls[len(made):] == ["call", "call"]                    # without a limit always


def test_a_gpu_is_waited_for(monkeypatch):
    """Before and behind each call; the current device where CUDA is in use and none is named."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    times.milliseconds(waited.append, "call", device="cuda:1")
    assert waited == ["cuda:1", "call", "cuda:1"]
    times.milliseconds(waited.append, "cpu", device="cpu")
    times.milliseconds(waited.append, "no CUDA")
    assert waited[3:] == ["cpu", "no CUDA"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    times.milliseconds(waited.append, "call")
    assert waited[5:] == [None, "call", None]


def test_peaks_count_what_is_added():
    kept = torch.ones(2**20)                                        # 4 MiB, held before
    times.trim_memory()
    assert 60 < times.peak_increase(lambda: torch.ones(2**24).sum()) < 100 and kept.sum() == 2**20  # 64 MiB


def test_peaks_on_a_gpu_are_of_its_tensors(monkeypatch):
    held, done = iter([2**20, 3 * 2**20]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(held))
    assert times.peak_increase(partial(done.append, "call"), torch.device("cuda")) == 2.0
    assert done == ["wait", "reset", "call", "wait"]


def test_threads_come_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), times.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_training_step_moves_weights_and_leaves_no_gradient():
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    step = times.Update(model.eval(), lambda model: model(torch.ones(3)).sum())
    step()
    assert model.training and not torch.equal(model.weight, before) and not model.weight.grad.any()
    assert step.peak_increase() >= 0
