"""Partials, the one currency of engines: log-sums, their gradients, and how parts of the keys merge."""

import copy

import pytest
import torch
from attention_cases import CLOSED, FEW, OTHER, SHAPES, Case, assert_same
from covering import in_turn

from crt_exp.attention import (
    Generalized,
    Partial,
    attention_reference,
    finish,
    merge,
    partial_attention,
    softmax_partial,
)
from crt_exp.features import OPRF, GeomRF, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


def test_a_row_of_nothing_has_no_log_sum():
    case = Case(OPRF())
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1], case.mask[0, :3] = False, False
    exact = softmax_partial(case.x, case.y, case.v, causal=True, key_mask=case.mask)
    for rows in (case(partial_attention, causal=True), exact):
        assert (rows.logsum[1] == -torch.inf).all() and (rows.logsum[0, :, :3] == -torch.inf).all()
        assert rows.logsum[0, :, 3:].isfinite().all() and (rows.output[1] == 0).all()
        grads = torch.autograd.grad(rows.logsum.exp().sum() + rows.output.sum(), (case.x, case.y, case.v))
        assert all(g.isfinite().all() and (g[1] == 0).all() for g in grads)


def logsum_reference(x, y, v, phi, noise, params, causal=False, key_mask=None):
    """log of the row sums of the kernel matrix written out, a row without keys left at 0."""
    kernel = phi.phi_q(x.double(), noise, params).exp() @ phi.phi_k(y.double(), noise, params).exp().mT
    kernel = kernel if key_mask is None else kernel * key_mask[:, None, None]
    total = (kernel.tril(y.shape[2] - x.shape[2]) if causal else kernel).sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total).abs().log()


def with_logsum(case, partial, is_causal, weight):
    """Outputs, log-sums (0 where there are none), and the gradients of a loss of both."""
    if partial is logsum_reference:
        out, logs = case(attention_reference, causal=is_causal), case(logsum_reference, causal=is_causal)
    else:
        rows = case(partial, causal=is_causal)
        out, logs = rows.output, rows.logsum
    logs = torch.where(logs == -torch.inf, 0.0, logs)
    loss = (out.double() * case.grad.double()).sum() + (logs.double() * weight).sum()
    return [out, logs, *torch.autograd.grad(loss, (case.x, case.y, case.v))]


@pytest.mark.parametrize("phi, is_causal, shape", in_turn([*FEW, OTHER[0]], [False, True],
                                                          ["self", "masked", "grouped", "shared"], each=3), ids=repr)
def test_log_sums_and_their_gradients(phi, shape, is_causal, small_chunks):
    case = Case(phi, **SHAPES[shape])
    weight = torch.randn(case.x.shape[:3], dtype=torch.float64).unsqueeze(-1)
    expand = lambda f: lambda x, y, v, *rest, **options: f(
        x, *(t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, v)), *rest, **options)
    expected = with_logsum(case, logsum_reference, is_causal, weight) if shape in ("self", "masked") else None
    if expected is None:
        out, logs = case(attention_reference, causal=is_causal), case(expand(logsum_reference), causal=is_causal)
        loss = (out * case.grad).sum() + (logs * weight).sum()
        expected = [out, logs, *torch.autograd.grad(loss, (case.x, case.y, case.v))]
    assert_same(with_logsum(case, partial_attention, is_causal, weight), expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [m for m in CLOSED if m.kernel == "softmax"], ids=repr)
def test_log_sums_in_single_precision(phi, is_causal, engine):
    """By the engine in C, and without it."""
    case, exact = (Case(phi, L=150, S=150, d=8, m=16, masked=True, dtype=t) for t in (torch.float32, torch.float64))
    weight = torch.randn(2, 4, 150, 1, dtype=torch.float64)
    assert_same(with_logsum(case, partial_attention, is_causal, weight),
                with_logsum(exact, logsum_reference, is_causal, weight), 2e-5)


def in_parts(case, at, is_causal, policy="none", near=False):
    """Attention to keys [0, at) and to the rest, merged. near: the first part exactly, by softmax.

    Causal: queries of the first part see their own keys alone, the others all of them and, causally, those of their
    own part.
    """
    clamp = policy == "clamp"
    keep = lambda span: None if case.mask is None else case.mask[:, span]

    def gather(queries, keys, exact, causal):
        x, y, v = case.x[:, :, queries], case.y[:, :, keys], case.v[:, :, keys]
        if exact:
            return softmax_partial(x, y, v, causal=causal, key_mask=keep(keys))
        return partial_attention(x, y, v, case.phi, case.noise, case.params, causal=causal, key_mask=keep(keys),
                                 modulus=clamp)

    L, S = case.x.shape[2], case.y.shape[2]
    first, rest = slice(0, at), slice(at, S)
    if not is_causal:
        return finish(merge(gather(slice(0, L), first, near, False), gather(slice(0, L), rest, False, False)), policy)
    cut = max(0, at - (S - L))  # queries of the first part
    late = slice(cut, L)
    out = finish(merge(gather(late, first, near, False), gather(late, rest, False, True)), policy)
    return out if not cut else torch.cat([finish(gather(slice(0, cut), first, near, True), policy), out], 2)


@pytest.mark.parametrize("phi, is_causal, shape", in_turn([*FEW, OTHER[0]], [False, True],
                                                          ["self", "masked", "grouped"], each=2), ids=repr)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_of_keys_merge_to_the_whole(step, phi, shape, is_causal, small_chunks):
    """Cut at any place: outputs and gradients."""
    case = Case(phi, **SHAPES[shape])
    for policy in ("none", "clamp") if phi in (TrigRF(), GeomRF()) else ("none",):
        whole = case.with_grads(causal=is_causal, denominator=policy)
        for at in range(1, case.y.shape[2], step):
            out = in_parts(case, at, is_causal, policy)
            assert_same([out, *torch.autograd.grad(out, (case.x, case.y, case.v), case.grad)], whole, 1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF()], ids=repr)
def test_features_join_an_exact_block(phi, is_causal, small_chunks):
    """The near keys exactly, the far ones by features: the dense formula, and its gradients."""
    case, at = Case(phi, masked=True), 4
    out = in_parts(case, at, is_causal, near=True)
    kernel = phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    weights = torch.cat([(case.x @ case.y.mT).exp()[..., :at], kernel[..., at:]], -1) * case.mask[:, None, None]
    weights = weights.tril() if is_causal else weights
    total = weights.sum(-1, keepdim=True)
    expected = weights @ case.v / torch.where(total == 0, 1.0, total)
    of = lambda t: [t, *torch.autograd.grad(t, (case.x, case.y, case.v), case.grad, retain_graph=True)]
    assert_same(of(out), of(expected))
    if not is_causal:
        assert_same([in_parts(case, at, False, near=True)], [expected])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("phi", [OPRF(), TrigRF(), GeomRF(), Generalized(f="relu")], ids=repr)
def test_gradcheck_of_merged_parts(phi, is_causal, small_chunks):
    case = Case(phi, B=1, H=1, L=5, S=5, d=2, dv=1, m=3)

    def merged(x, y, v):
        twin = copy.copy(case)
        twin.x, twin.y, twin.v = x, y, v
        rows = twin(partial_attention, causal=is_causal)
        return in_parts(twin, 2, is_causal, near=True), rows.logsum

    assert torch.autograd.gradcheck(merged, (case.x, case.y, case.v), fast_mode=True)


def test_merge_is_the_sum():
    g = torch.Generator().manual_seed(0)
    lowest = torch.full((5, 1), -torch.inf)
    a, b, c = (Partial(torch.randn(5, 3, generator=g), torch.rand(5, 1, generator=g), s) for s in
               (lowest, 500 * torch.randn(5, 1, generator=g), 500 * torch.randn(5, 1, generator=g)))
    a = Partial(torch.zeros(5, 3), torch.zeros(5, 1), a.log_scale)  # nothing gathered
    for left, right in ((merge(a, b), b), (merge(b, a), b), (merge(a, a), a), (merge(b, c), merge(c, b)),
                        (merge(merge(a, b), c), merge(a, merge(b, c))), (merge(None, b), b)):
        for p, q in zip(left[:3], right[:3]):
            torch.testing.assert_close(p, q)
