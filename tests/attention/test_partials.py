"""Partial sums of attention: their log-sums, and how the parts of keys merge."""

import pytest
import torch
from helpers import native_cases
from helpers.attention_cases import FEW, OTHER, SHAPES, Case, assert_same, in_float64
from helpers.covering import in_turn
from helpers.kernel_estimates import estimate_kernel
from helpers.seeds import seeded

from crt_exp.attention import (
    Partial,
    attention_reference,
    exact_attention,
    finish,
    merge,
    partial_attention,
    softmax_partial,
)
from crt_exp.attention.engines import chunks
from crt_exp.features import GERF, OPRF, GeomRF, Hedgehog, Mixture, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators <= 0:RuntimeWarning")
both_ways = pytest.mark.parametrize("is_causal", [False, True])


def logsum_reference(x, y, v, phi, noise, params, causal=False, key_mask=None):
    """Logs of the row sums of the kernel matrix, 0 for rows without keys."""
    kernel = estimate_kernel(phi, x.double(), y.double(), noise, params)
    if key_mask is not None:
        kernel = kernel * key_mask[:, None, None]
    if causal:
        kernel = kernel.tril(y.shape[2] - x.shape[2])
    total = kernel.sum(-1, keepdim=True)
    return torch.where(total == 0, 1.0, total).abs().log()


def with_gradients(case, out, logs):
    """Outputs, log-sums (0 in rows without keys), and the gradients of a loss of both."""
    logs = torch.where(logs == -torch.inf, 0.0, logs)
    weight = torch.randn(logs.shape, generator=seeded(), dtype=torch.float64)
    loss = (out.double() * case.grad.double()).sum() + (logs.double() * weight).sum()
    return [out, logs, *torch.autograd.grad(loss, case.inputs)]


def by_partials(case, is_causal):
    rows = case(partial_attention, causal=is_causal)
    return with_gradients(case, rows.output, rows.logsum)


def by_definition(case, is_causal):
    out = case(attention_reference, causal=is_causal)
    y = case.y.repeat_interleave(case.heads // case.y.shape[1], 1)
    return with_gradients(case, out, case(logsum_reference, y=y, causal=is_causal))


@pytest.mark.parametrize(
    "phi, is_causal, shape",
    in_turn([*FEW, OTHER[0]], [False, True], ["self", "masked", "grouped", "shared"]),
    ids=repr,
)
def test_log_sums_and_their_gradients(phi, shape, is_causal, small_chunks):
    case = Case(phi, **SHAPES[shape])
    assert_same(by_partials(case, is_causal), by_definition(case, is_causal))


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), Mixture()], ids=repr)
def test_log_sums_in_single_precision(phi, is_causal, engine):
    case = Case(phi, B=1, L=150, S=150, d=8, m=16, masked=True, dtype=torch.float32)
    assert_same(by_partials(case, is_causal), by_definition(in_float64(case), is_causal), 2e-5)


@both_ways
def test_log_sums_alone_have_gradients(is_causal, engine):
    case = Case(OPRF(), dtype=torch.float32)

    def gradients(case, logs):
        return torch.autograd.grad(logs.sum(), (case.x, case.y))

    exact = in_float64(case)
    actual = gradients(case, case(partial_attention, causal=is_causal).logsum)
    expected = gradients(exact, exact(logsum_reference, causal=is_causal))
    assert_same(actual, expected, 2e-5)


@both_ways
def test_log_sums_compile_without_graph_breaks(is_causal):
    torch._dynamo.reset()
    case = Case(OPRF(), masked=True, dtype=torch.float32)

    def function(x, y, v):
        rows = case(partial_attention, x=x, y=y, v=v, causal=is_causal)
        return rows.output, rows.logsum

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    actual = with_gradients(case, *compiled(*case.inputs))
    assert_same(actual, by_partials(case, is_causal), 2e-6)


@both_ways
def test_the_scale_is_a_factor_of_queries_and_keys(is_causal, engine):
    case = Case(OPRF(), dtype=torch.float32)
    rows = case(partial_attention, causal=is_causal, scale=0.5)
    expected = case(partial_attention, x=case.x / 2, y=case.y / 2, causal=is_causal)
    assert_same([rows.output, rows.logsum], [expected.output, expected.logsum], 2e-6)


def outputs_and_log_sums(x, y, v, *arguments, **options):
    rows = partial_attention(x, y, v, *arguments, **options)
    return torch.cat([rows.output, rows.logsum], -1)


def from_kernel(x, y, v, phi, noise, params, causal, key_mask):
    kernel = estimate_kernel(phi, x, y, noise, params)
    if causal:
        kernel = kernel.tril()
    sums = kernel.sum(-1, keepdim=True)
    return torch.cat([kernel @ v / sums, sums.log()], -1)


@pytest.mark.parametrize("most", [2**30, 0])
@pytest.mark.parametrize(
    "phi, causal", in_turn([OPRF(), Hedgehog(), GERF(s=1, A=-0.05)], [True, False]), ids=repr
)
def test_gradients_of_log_sums_to_rows_and_parameters(phi, causal, most, monkeypatch):
    """By stored and by recomputed features."""
    monkeypatch.setattr(chunks, "MAX_SAVED", most)
    case = native_cases.Case(phi, L=150, S=150, learned=True)
    grad = torch.randn(2, 2, 150, 5)
    actual = case.run(torch.float64, causal, grad=grad, function=outputs_and_log_sums)
    assert_same(actual, case.run(torch.float64, causal, grad=grad, function=from_kernel))


@native_cases.needs_library
@both_ways
def test_gradients_of_log_sums_to_rows_in_single_precision(is_causal):
    case = native_cases.Case(OPRF(), L=150, S=150, learned=True)
    grad = torch.randn(2, 2, 150, 5)
    actual = case.run(torch.float32, is_causal, grad=grad, function=outputs_and_log_sums)
    expected = case.run(torch.float64, is_causal, grad=grad, function=from_kernel)
    native_cases.assert_near(actual, expected, 3e-5)


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_keys_are_zero_and_have_no_log_sum(phi, is_causal, dtype):
    case = Case(phi, dtype=dtype)
    case.mask = torch.ones(2, 11, dtype=torch.bool)
    case.mask[1] = False
    case.mask[0, :3] = False
    exact = softmax_partial(*case.inputs, causal=is_causal, key_mask=case.mask)
    for rows in (case(partial_attention, causal=is_causal), exact):
        out = rows.output
        logs = rows.logsum
        assert (out[1] == 0).all()
        assert (logs[1] == -torch.inf).all()
        assert (out[0, :, 3:] != 0).all()
        assert logs[0, :, 3:].isfinite().all()
        assert (out[0, :, :3] == 0).all() == is_causal
        assert (logs[0, :, :3] == -torch.inf).all() == is_causal
        for g in torch.autograd.grad(logs.exp().sum() + out.sum(), case.inputs):
            assert g.isfinite().all()
            assert (g[1] == 0).all()


@both_ways
@pytest.mark.parametrize("options", [{}, {"masked": True}, {"Hkv": 2, "L": 5}], ids=repr)
def test_the_partial_of_softmax_is_exact_attention(options, is_causal):
    case = Case(OPRF(), **options)
    options = {"causal": is_causal, "key_mask": case.mask}
    rows = softmax_partial(*case.inputs, **options)
    assert_same([rows.output], [exact_attention(*case.inputs, **options)])


def in_parts(case, at, is_causal, policy="none", near=False):
    """Attention to keys [0, at) and to the other keys, merged. near: the first part is exact softmax.

    Causal queries of the first part see only its keys; the others see all of them, and their own part causally.
    """

    def gather(queries, keys, causal):
        x = case.x[:, :, queries]
        y = case.y[:, :, keys]
        v = case.v[:, :, keys]
        keep = None if case.mask is None else case.mask[:, keys]
        if near and keys == first:
            return softmax_partial(x, y, v, causal=causal, key_mask=keep)
        method = (case.phi, case.noise, case.params)
        modulus = policy == "clamp"
        return partial_attention(x, y, v, *method, causal=causal, key_mask=keep, modulus=modulus)

    L = case.x.shape[2]
    S = case.y.shape[2]
    first = slice(0, at)
    rest = slice(at, S)
    cut = max(0, at - (S - L)) if is_causal else 0  # queries of the first part
    late = slice(cut, L)
    out = finish(merge(gather(late, first, False), gather(late, rest, is_causal)), policy)
    if not cut:
        return out
    return torch.cat([finish(gather(slice(0, cut), first, True), policy), out], 2)


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
    """Cut at any position: outputs and gradients."""
    case = Case(phi, **SHAPES[shape])
    policies = ["none"]
    if phi in (TrigRF(), GeomRF()):
        policies.append("clamp")
    for policy in policies:
        whole = case.with_grads(causal=is_causal, denominator=policy)
        for at in range(1, case.y.shape[2], 3):
            out = in_parts(case, at, is_causal, policy)
            actual = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
            assert_same(actual, whole, 1e-8)


@both_ways
def test_parts_of_keys_merge_in_single_precision(is_causal, engine):
    case = Case(OPRF(), L=150, S=150, masked=True, dtype=torch.float32)
    whole = case.with_grads(causal=is_causal)
    for at in (1, 64, 100):
        out = in_parts(case, at, is_causal)
        actual = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
        assert_same(actual, whole, 2e-5)


@both_ways
@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_features_join_an_exact_block(phi, is_causal, small_chunks):
    """Exact attention to near keys and features for the others equal the dense formula, with gradients."""
    case = Case(phi, masked=True)
    at = 4
    kernel = estimate_kernel(phi, case.x, case.y, case.noise, case.params)
    exact = (case.x @ case.y.mT).exp()
    weights = torch.cat([exact[..., :at], kernel[..., at:]], -1) * case.mask[:, None, None]
    if is_causal:
        weights = weights.tril()
    total = weights.sum(-1, keepdim=True)
    expected = weights @ case.v / torch.where(total == 0, 1.0, total)
    out = in_parts(case, at, is_causal, near=True)
    actual = torch.autograd.grad(out, case.inputs, case.grad)
    gradients = torch.autograd.grad(expected, case.inputs, case.grad)
    assert_same([out, *actual], [expected, *gradients])


def test_merge_is_the_sum():
    g = seeded()
    b, c = (
        Partial(torch.randn(5, 4, generator=g), 500 * torch.randn(5, 1, generator=g))
        for _ in range(2)
    )
    a = Partial(torch.zeros(5, 4), torch.full((5, 1), -torch.inf))  # nothing gathered
    cases = [
        (merge(a, b), b),
        (merge(b, a), b),
        (merge(a, a), a),
        (merge(b, c), merge(c, b)),
        (merge(merge(a, b), c), merge(a, merge(b, c))),
        (merge(None, b), b),
    ]
    for left, right in cases:
        for p, q in zip(left[:2], right[:2]):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("policy", ["none", "clamp", "abs"])
def test_the_output_is_the_ratio_at_any_scale(policy):
    sums = torch.tensor([[6.0, 2.0], [0.0, 0.0]])
    modulus = torch.tensor([[2.0], [0.0]])
    for log_scale in (-1e3, 0.0, 1e3):
        rows = Partial(sums, torch.full((2, 1), log_scale), modulus)
        assert finish(rows, policy).tolist() == [[3.0], [0.0]]
