"""Partial sums of attention: their log-sums, and how the parts of keys merge."""

import pytest
import torch
from helpers.attention_cases import FEW, OTHER, SHAPES, Case, assert_same, in_float64
from helpers.covering import in_turn
from helpers.kernel_estimates import estimate_kernel
from helpers.seeds import seeded

from crt_exp.attention import (
    Partial,
    attention_reference,
    finish,
    merge,
    partial_attention,
    softmax_partial,
)
from crt_exp.features import OPRF, GeomRF, Mixture, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


both_ways = pytest.mark.parametrize("is_causal", [False, True])


def logsum_reference(x, y, v, phi, noise, params, causal=False, key_mask=None):
    """log of the row sums of the kernel matrix written out, a row without keys left at 0."""
    kernel = estimate_kernel(phi, x.double(), y.double(), noise, params)
    if key_mask is not None:
        kernel = kernel * key_mask[:, None, None]
    if causal:
        kernel = kernel.tril(y.shape[2] - x.shape[2])
    total = kernel.sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total).abs().log()


def with_logsum(case, function, is_causal, weight):
    """Outputs, log-sums (0 where there are none), and the gradients of a loss of both."""
    if function is logsum_reference:
        groups = case.heads // case.y.shape[1]
        out = case(attention_reference, causal=is_causal)
        y = case.y.repeat_interleave(groups, 1)
        logs = case(logsum_reference, y=y, causal=is_causal)
    else:
        rows = case(function, causal=is_causal)
        out = rows.output
        logs = rows.logsum
    logs = torch.where(logs == -torch.inf, 0.0, logs)
    loss = (out.double() * case.grad.double()).sum()
    loss = loss + (logs.double() * weight).sum()
    return [out, logs, *torch.autograd.grad(loss, case.inputs)]


@pytest.mark.parametrize(
    "phi, is_causal, shape",
    in_turn([*FEW, OTHER[0]], [False, True], ["self", "masked", "grouped", "shared"]),
    ids=repr,
)
def test_log_sums_and_their_gradients(phi, shape, is_causal, small_chunks):
    case = Case(phi, **SHAPES[shape])
    weight = torch.randn(case.x.shape[:3], dtype=torch.float64).unsqueeze(-1)
    found = with_logsum(case, partial_attention, is_causal, weight)
    expected = with_logsum(case, logsum_reference, is_causal, weight)
    assert_same(found, expected)


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), Mixture()], ids=repr)
def test_log_sums_in_single_precision(phi, is_causal, engine):
    case = Case(phi, B=1, L=150, S=150, d=8, m=16, masked=True, dtype=torch.float32)
    weight = torch.randn(1, 4, 150, 1, dtype=torch.float64)
    assert_same(
        with_logsum(case, partial_attention, is_causal, weight),
        with_logsum(in_float64(case), logsum_reference, is_causal, weight),
        2e-5,
    )


def in_parts(case, at, is_causal, policy="none", near=False):
    """Attention to keys [0, at) and to the rest, merged. near: the first part exactly, by softmax.

    Causal: queries of the first part see their own keys alone, the others all of them and, causally, those of their
    own part.
    """
    clamp = policy == "clamp"

    def keep(span):
        return None if case.mask is None else case.mask[:, span]

    def gather(queries, keys, exact, causal):
        x = case.x[:, :, queries]
        y = case.y[:, :, keys]
        v = case.v[:, :, keys]
        if exact:
            return softmax_partial(x, y, v, causal=causal, key_mask=keep(keys))
        return partial_attention(
            x,
            y,
            v,
            case.phi,
            case.noise,
            case.params,
            causal=causal,
            key_mask=keep(keys),
            modulus=clamp,
        )

    L = case.x.shape[2]
    S = case.y.shape[2]
    first = slice(0, at)
    rest = slice(at, S)
    cut = 0
    if is_causal:  # queries of the first part
        cut = max(0, at - (S - L))
    late = slice(cut, L)
    parts = merge(gather(late, first, near, False), gather(late, rest, False, is_causal))
    out = finish(parts, policy)
    if not cut:
        return out
    early = gather(slice(0, cut), first, near, True)
    return torch.cat([finish(early, policy), out], 2)


@pytest.mark.parametrize(
    "phi, is_causal, shape",
    in_turn(
        [Mixture(), OPRF(antithetic=True), TrigRF(), GeomRF(), FEW[-1], OTHER[0]],
        [False, True],
        ["self", "masked", "grouped"],
    ),
    ids=repr,
)
def test_parts_of_keys_merge_to_the_whole(phi, shape, is_causal, small_chunks):
    """Cut at any place: outputs and gradients."""
    case = Case(phi, **SHAPES[shape])
    for policy in ("none", "clamp") if phi in (TrigRF(), GeomRF()) else ("none",):
        whole = case.with_grads(causal=is_causal, denominator=policy)
        for at in range(1, case.y.shape[2], 3):
            out = in_parts(case, at, is_causal, policy)
            actual = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
            assert_same(actual, whole, 1e-8)


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_features_join_an_exact_block(phi, is_causal, small_chunks):
    """The near keys exactly, the far ones by features: the dense formula, and its gradients."""
    case = Case(phi, masked=True)
    at = 4
    out = in_parts(case, at, is_causal, near=True)
    kernel = estimate_kernel(phi, case.x, case.y, case.noise, case.params)
    near = (case.x @ case.y.mT).exp()
    weights = torch.cat([near[..., :at], kernel[..., at:]], -1) * case.mask[:, None, None]
    if is_causal:
        weights = weights.tril()
    total = weights.sum(-1, keepdim=True)
    expected = weights @ case.v / torch.where(total == 0, 1.0, total)

    def with_gradients(t):
        return [t, *torch.autograd.grad(t, case.inputs, case.grad, retain_graph=True)]

    assert_same(with_gradients(out), with_gradients(expected))


def test_merge_is_the_sum():
    g = seeded()
    lowest = torch.full((5, 1), -torch.inf)

    def draw():
        numerator = torch.randn(5, 3, generator=g)
        denominator = torch.rand(5, 1, generator=g)
        return Partial(numerator, denominator, 500 * torch.randn(5, 1, generator=g))

    a = Partial(torch.zeros(5, 3), torch.zeros(5, 1), lowest)  # nothing gathered
    b = draw()
    c = draw()
    cases = [
        (merge(a, b), b),
        (merge(b, a), b),
        (merge(a, a), a),
        (merge(b, c), merge(c, b)),
        (merge(merge(a, b), c), merge(a, merge(b, c))),
        (merge(None, b), b),
    ]
    for left, right in cases:
        for p, q in zip(left[:3], right[:3]):
            torch.testing.assert_close(p, q)
