"""Near-far attention does not depend on the scale of keys against queries, copies of a key or sizes beyond the keys."""

import pytest
import torch
from helpers.native_cases import needs_library
from helpers.nearfar_cases import (
    at_tokens,
    one_by_one,
)
from helpers.seeds import seeded

from crt_exp.attention import exact_attention
from crt_exp.features.base import NotFinite
from crt_exp.nearfar import native, near_far_attention
from crt_exp.nearfar.choice import Sizes, find_centres
from crt_exp.nearfar.decoding import RecallState

pytestmark = pytest.mark.usefixtures("one_thread")
S = 220
D = 16
SMALL = Sizes(8, 4, 12, open=16, exact_until=32)
ENGINES = [pytest.param(True, marks=needs_library, id="C"), pytest.param(False, id="PyTorch")]


@pytest.fixture
def engine(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(native, "applies", lambda *_: False)
    return request.param


def draw_inputs():
    g = seeded()
    x, y, v = torch.randn(3, 1, 2, S, D, generator=g)
    return 1.5 * x, y + 0.5, v


def attend(x, y, v, sizes, causal=True):
    return near_far_attention(x, y, v, sizes, causal=causal)


def gradients(x, y, v, scale, call):
    """Output and gradients where keys are times `scale` and queries over it, as those of scale 1."""
    x = (x / scale).requires_grad_()
    y = (y * scale).requires_grad_()
    v = v.clone().requires_grad_()
    out = call(x, y, v)
    weight = torch.randn(out.shape, generator=seeded(1))
    dx, dy, dv = torch.autograd.grad((out * weight).sum(), (x, y, v))
    return out.detach(), dx / scale, dy * scale, dv


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_times_a_number_and_queries_over_it(engine, causal):
    """Powers of 2 change no rounding, so that nothing may change at all but for what squares lose."""

    def call(*t):
        return attend(*t, SMALL, causal)

    expected = gradients(*draw_inputs(), 1, call)
    for scale in (2.0**-10, 2.0**10):
        for ours, own in zip(gradients(*draw_inputs(), scale, call), expected):
            assert (ours - own).norm() < 1e-4 * own.norm(), scale


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_with_all_keys_read_it_is_exact_at_any_scale(engine):
    all_keys = SMALL._replace(open=S)
    expected = gradients(*draw_inputs(), 1, lambda *t: exact_attention(*t, causal=True))
    for scale in (1e-3, 1.0, 1e3):
        actual = gradients(*draw_inputs(), scale, lambda *t: attend(*t, all_keys))
        for ours, own in zip(actual, expected):
            assert (ours - own).norm() < 1e-4 * own.norm(), scale


@torch.no_grad()
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_with_few_different_keys_the_past_alone_decides(engine):
    """20 different keys, each many times: 8-bit scores tie, and so do scores and distances."""
    g = seeded()
    x, y, v = draw_inputs()
    different = torch.randn(1, 2, 20, D, generator=g)
    y = different[:, :, torch.randint(20, (S,), generator=g)]

    def run(n):
        return attend(*at_tokens((x, y, v), slice(n)), SMALL)

    whole = run(S)
    for n in (S // 2, S - 1):
        assert (run(n) - whole[:, :, :n]).norm() < 1e-5 * whole.norm(), n
    state = RecallState(SMALL)
    parts = []
    for at in one_by_one(190, S):
        parts.append(state.step(*at_tokens((x, y, v), at)))
    difference = (torch.cat(parts, 2) - whole).norm()
    assert difference < 1e-4 * whole.norm()


@pytest.mark.parametrize("copies", [1, 8])
def test_there_are_as_many_centres_as_different_vectors(copies):
    g = seeded()
    z = torch.randn(2, 100, D, generator=g)
    z = z.repeat_interleave(copies, 1)[:, torch.randperm(100 * copies, generator=g)]
    cases = [
        (64, 64),
        (100, 100),
        (min(128, 100 * copies), 100),
    ]
    for cells, there in cases:
        centres = find_centres(z, z.new_zeros(z.shape[:2]), cells)
        for head in centres:
            actual = len(head[head.abs().amax(-1) < 1e6].unique(dim=0))
            assert actual == there


@needs_library
@torch.no_grad()
@pytest.mark.parametrize(
    "name, size",
    [
        ("cells", 2**60),
        ("heavy", 2**32),
        ("open", 10**7),
    ],
)
def test_sizes_beyond_the_keys_are_those_of_all_keys(name, size):
    x, y, v = draw_inputs()
    many = SMALL._replace(**{name: size})
    all_keys = SMALL._replace(**{name: S})
    whole = attend(x, y, v, many)
    state = RecallState(many)
    difference = (whole - attend(x, y, v, all_keys)).abs().max()
    assert difference < 1e-5
    parts = []
    cases = [
        slice(0, 200),
        slice(200, 201),
        slice(201, S),
    ]
    for at in cases:
        parts.append(state.step(*at_tokens((x, y, v), at)))
    difference = (torch.cat(parts, 2) - whole).norm()
    assert difference < 1e-4 * whole.norm()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("length", [3, 20, S])
@pytest.mark.parametrize("part, wrong", [(0, torch.nan), (1, -torch.inf)])
def test_queries_and_keys_that_are_not_finite_are_named(engine, length, part, wrong):
    inputs = at_tokens(draw_inputs(), slice(length))
    inputs[part][0, 0, length // 2, 0] = wrong
    for until in (32, 0):
        for causal in (True, False):
            with pytest.raises(NotFinite, match="NaN, infinity"):
                attend(*inputs, SMALL._replace(exact_until=until), causal)
