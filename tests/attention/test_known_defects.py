"""Defects of known code do not occur, and denominators that are not positive are counted and guarded."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import OUTLIER, Case, assert_same
from helpers.kernel_estimates import estimate_kernel

from crt_exp.attention import (
    DenominatorCount,
    attention,
    attention_reference,
    exact_attention,
    partials,
    softmax_attention,
)
from crt_exp.attention.partials import Partial, finish
from crt_exp.features import OPRF, GeomRF, PosRF, Statistics, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


both_ways = pytest.mark.parametrize("is_causal", [False, True])


def test_defect_mask_zeroes_only_values():
    case = Case(OPRF(), masked=True)
    v = case.v * case.mask[:, None, :, None]
    wrong = attention(case.x, case.y, v, case.phi, case.noise, case.params)
    right = case(attention_reference)
    assert_same([case()], [right])
    assert (wrong - right).norm() > 0.2 * right.norm()  # the test has power


@pytest.mark.parametrize(
    "phi, early, late",
    [
        (OPRF(A=-0.1), 20.0, 0.1),
        (TrigRF(), 1.0, OUTLIER),
        (GeomRF(p=0.5), 1e-9, 1.0),
    ],
)
def test_defect_stabiliser_or_epsilon_sees_the_future(phi, early, late):
    """An outlier at the end would underflow every earlier row,
    and with an epsilon replace them by the mean of the values."""
    case = Case(phi, L=20, S=20)
    with torch.no_grad():
        case.y[:, :, :-1] *= early
        case.y[:, :, -1] *= late
    whole = case(causal=True)[:, :, :-1]
    x, y, v = case.tokens(0, -1)
    assert_same([whole], [case(x=x, y=y, v=v, causal=True)], 1e-9)


@both_ways
def test_defect_epsilon_in_features(is_causal):
    """Kernel values of e^-300 weigh as they should: long keys in the direction away from the query."""
    case = Case(PosRF(), B=1, H=1, L=3, S=3, scale=0.2)
    shift = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64)
    far = case(y=case.y + shift, x=case.x - shift, causal=is_causal)
    expected = [case(attention_reference, y=case.y + shift, x=case.x - shift, causal=is_causal)]
    assert_same([far], expected)
    difference = (far - case.v.mean(2, keepdim=True)).abs().max()
    assert difference > 1e-2


def test_defect_keys_reweighted_by_their_own_maxima():
    """A constant added to every key's logs, or to those of one query, changes nothing; one added to one key's does."""

    class Shifted(PosRF):
        by_key = 0.0
        by_query = 0.0

        def bind(self, noise, params=()):
            plain = super().bind(noise, params)

            def add(f, c):
                return f._replace(log_scale=f.log_scale + c)

            return plain._replace(
                phi_q=lambda x: add(plain.phi_q(x), self.by_query),
                phi_k=lambda y: add(plain.phi_k(y), self.by_key),
            )

    case = Case(Shifted())

    def run():
        return [case(causal=is_causal) for is_causal in (False, True)]

    before = run()
    Shifted.by_key = 300.0
    Shifted.by_query = torch.linspace(-500, 500, 11)[:, None]
    assert_same(run(), before)
    Shifted.by_key = torch.linspace(0, 1, 11)[:, None]
    difference = (run()[0] - before[0]).abs().max()
    assert difference > 1e-2


def test_defect_scaled_twice():
    """x = d^(-1/4) q gives softmax(q k^T / sqrt d): the usual scale of torch."""
    case = Case(OPRF(), d=16, dv=8)
    x = case.x * 16**-0.25
    y = case.y * 16**-0.25
    usual = F.scaled_dot_product_attention(*case.inputs)
    actual = [exact_attention(x, y, case.v), softmax_attention(x, y, case.v)]
    assert_same(actual, [usual, usual])


def test_defect_statistics_over_padding():
    case = Case(OPRF(), masked=True)
    padded = case.y.detach().masked_fill(~case.mask[:, None, :, None], 1e4)
    mask = case.mask[:, None].expand(-1, 4, -1)
    A = []
    for y in (case.y, padded):
        A.append(OPRF().fit(Statistics.of(case.x, y, y_mask=mask)).A)
    assert torch.equal(*A)


def test_denominators_are_counted_and_guarded():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    kernel = estimate_kernel(TrigRF(), case.x, case.y, case.noise, ())
    for is_causal, weights in ((False, kernel), (True, kernel.tril())):
        sums = weights.sum(-1, keepdim=True)
        numerator = weights @ case.v
        count = DenominatorCount()
        out = case(causal=is_causal, counter=count)
        assert count.nonpositive == (sums <= 0).sum() > 0
        assert count.total == sums.numel()
        assert_same(
            [out, case(causal=is_causal, denominator="abs")],
            [numerator / sums, numerator / sums.abs()],
            1e-5,
        )
    count.reset()
    assert count.fraction == 0


def test_clamp_bounds_the_output():
    """A denominator that cancels to nothing is kept at CLAMP of its terms' absolute values."""
    p = Partial(
        torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, -1e-9]]),
        torch.zeros(3, 1),
        modulus=torch.ones(3, 1),
    )
    actual = finish(p, "clamp").tolist()
    most = pytest.approx(1 / partials.CLAMP)
    least = pytest.approx(-1 / partials.CLAMP)
    assert actual == [[1.0], [most], [least]]


@pytest.mark.filterwarnings("default:.*denominators are not positive:RuntimeWarning")
def test_nonpositive_denominators_are_not_silent():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    with pytest.warns(RuntimeWarning, match="of 1024 denominators <= 0"):
        case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case(counter=DenominatorCount()), Case(OPRF())()
