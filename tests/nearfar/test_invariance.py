"""What near-far attention may not depend on: the scale of keys against queries, how many keys follow, copies of a key,
sizes beyond the keys; and that queries which are not numbers are refused."""

import pytest
import torch
from native_cases import needs_library
from nearfar_cases import read_in_c

from crt_exp.attention import exact_attention
from crt_exp.nearfar import causal as recall, native, near_far_attention, retrieval
from crt_exp.nearfar.choice import Sizes, centres_of, largest
from crt_exp.nearfar.layer import PRESETS
from crt_exp.nearfar.decoding import RecallState
from crt_exp.features.base import NotFinite

S, D = 220, 16
SMALL = {"block": 8, "heavy": 4, "cells": 12}
ENGINES = [pytest.param(True, marks=needs_library, id="C"), pytest.param(False, id="PyTorch")]


def drawn(seed=0, S=S):
    g = torch.Generator().manual_seed(seed)
    x, y, v = (torch.randn(1, 2, S, D, generator=g) for _ in range(3))
    return 1.5 * x, y + 0.5, v


@pytest.fixture
def engine(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(native, "applies", lambda *_: False)
    return request.param


def attend(x, y, v, sizes, causal=True):
    return near_far_attention(x, y, v, sizes, causal=causal)


def gradients(x, y, v, sizes, scale, causal):
    """Output and gradients where keys are times `scale` and queries over it, as those of scale 1."""
    x, y, v = ((t * s).requires_grad_() for t, s in ((x, 1 / scale), (y, scale), (v, 1)))
    out = attend(x, y, v, sizes, causal)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    dx, dy, dv = torch.autograd.grad((out * weight).sum(), (x, y, v))
    return out.detach(), dx / scale, dy * scale, dv


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_times_a_number_and_queries_over_it(engine, preset, causal):
    """Powers of 2 change no rounding, so that nothing may change at all but for what squares lose."""
    sizes = PRESETS[preset]._replace(**SMALL, exact_until=32, first_order=False)
    sizes = sizes._replace(open=min(sizes.open, 16))
    expected = gradients(*drawn(), sizes, 1, causal)
    for scale in (2.0**-10, 2.0**5, 2.0**10):
        for ours, own in zip(gradients(*drawn(), sizes, scale, causal), expected):
            assert (ours - own).norm() < 1e-4 * own.norm(), scale


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_with_all_keys_read_it_is_exact_at_any_scale(engine):
    sizes = Sizes(**SMALL, open=S, exact_until=32)
    inputs = [t.requires_grad_() for t in drawn()]
    exact = exact_attention(*inputs, causal=True)
    weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    expected = exact.detach(), *torch.autograd.grad((exact * weight).sum(), inputs)
    for scale in (1e-3, 1.0, 30.0, 1e3):
        for ours, own in zip(gradients(*drawn(), sizes, scale, True), expected):
            assert (ours - own).norm() < 1e-4 * own.norm(), scale


# ---- ties


@torch.no_grad()
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_with_few_different_keys_the_past_alone_decides(engine):
    """20 different keys, each many times: 8-bit scores tie, and so do scores and distances."""
    g, sizes = torch.Generator().manual_seed(0), Sizes(**SMALL, open=16, exact_until=32)
    x, y, v = drawn()
    y = torch.randn(1, 2, 20, D, generator=g)[:, :, torch.randint(20, (S,), generator=g)]
    run = lambda n: attend(x[:, :, :n], y[:, :, :n], v[:, :, :n], sizes)
    whole = run(S)
    for n in (S // 2, S - 1, S - 37):
        assert (run(n) - whole[:, :, :n]).norm() < 1e-5 * whole.norm(), n
    state = RecallState(sizes, 2)
    spans = [slice(0, 150), *(slice(i, i + 1) for i in range(150, S))]
    parts = [state.step(x[:, :, at], y[:, :, at], v[:, :, at]) for at in spans]
    assert (torch.cat(parts, 2) - whole).norm() < 1e-4 * whole.norm()


def test_of_equal_numbers_the_first_are_largest():
    t = torch.tensor([[3.0, 1, 3, 5, 3, 3, 0], [2, 2, 2, 2, 2, 2, 2]])
    values, places = largest(t, 3)
    assert values.tolist() == [[5, 3, 3], [2, 2, 2]] and places.tolist() == [[3, 0, 2], [0, 1, 2]]
    assert largest(t, 0)[1].shape == (2, 0)


@torch.no_grad()
def test_the_engines_choose_the_same_of_copies():
    """The keys that each query reads, in C and in PyTorch."""
    if native.native.library() is None:
        pytest.skip("there is no C compiler")
    g, sizes = torch.Generator().manual_seed(3), Sizes(**SMALL, open=16, exact_until=32)
    x = torch.randint(-3, 4, (2, 1, S, D), generator=g).float()          # exact in bfloat16, so that scores are equal
    y = torch.randint(-2, 3, (2, 30, D), generator=g).float()[:, torch.randint(30, (S,), generator=g)]
    metric = recall.metric_of(y, None, sizes)
    given = native.Given(None, metric.shift, metric.root, recall.options_of(sizes, S))
    places = read_in_c(x[:, :, 32:], y, y, given)
    keep = torch.ones(2, S, dtype=torch.bool)
    epoch = recall.Epoch.of(y, keep, sizes, 32, 160, metric)
    start = 100                                                          # of block 12: keys of blocks 0 to 10 are far
    member = torch.zeros(2, 1, S, dtype=torch.bool)
    member[:, :, :88] = True
    member.scatter_(2, epoch.heavy.unsqueeze(1), False)
    read = retrieval.retrieved_positions(y, member, x[:, 0, start:start + 1], sizes.open)
    assert native.applies(x, y)
    assert places[:, 0, start - 32].sort().values.tolist() == read[:, 0].sort().values.tolist()


# ---- copies


@pytest.mark.parametrize("copies", [1, 8, 50])
def test_there_are_as_many_centres_as_different_vectors(copies):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 100, D, generator=g)
    z = z.repeat_interleave(copies, 1)[:, torch.randperm(100 * copies, generator=g)]
    for cells, there in ((64, 64), (100, 100), (min(128, 100 * copies), 100)):
        centres = centres_of(z, z.new_zeros(z.shape[:2]), cells)
        for head in centres:
            assert len(head[head.abs().amax(-1) < 1e6].unique(dim=0)) == there


@needs_library
@torch.no_grad()
def test_c_takes_no_copies_for_centres():
    x, y, v = drawn(S=60)
    y = y.repeat_interleave(8, 2)
    _, choice = native.choose(y.transpose(0, 1), y[0], Sizes(8, 4, 40), None)
    for head in choice.centres:
        assert len(head[head.abs().amax(-1) < 1e6].unique(dim=0)) == 40


# ---- sizes and numbers


@needs_library
@torch.no_grad()
@pytest.mark.parametrize("name", ["cells", "heavy", "open"])
@pytest.mark.parametrize("size", [10**7, 2**32, 2**60])
def test_sizes_beyond_the_keys_are_those_of_all_keys(name, size):
    x, y, v = drawn()
    many, all_keys = (Sizes(**SMALL, open=16, exact_until=32)._replace(**{name: n}) for n in (size, S))
    whole, state = attend(x, y, v, many), RecallState(many, 2)
    assert (whole - attend(x, y, v, all_keys)).abs().max() < 1e-5
    parts = [state.step(*(t[:, :, at] for t in (x, y, v))) for at in (slice(0, 200), slice(200, 201), slice(201, S))]
    assert (torch.cat(parts, 2) - whole).norm() < 1e-4 * whole.norm()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("length", [3, 20, S])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["x", "y"])
def test_queries_and_keys_that_are_not_finite_are_named(engine, length, wrong, part):
    x, y, v = drawn(S=length)
    (x if part == "x" else y)[0, 0, length // 2, 0] = wrong
    for until in (32, 0):
        for causal in (True, False):
            with pytest.raises(NotFinite, match="NaN, infinity"):
                attend(x, y, v, Sizes(**SMALL, open=16, exact_until=until), causal)
