"""Defects of well-known code, each by name; and denominators that are not positive."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from attention_cases import FEW, OTHER, OUTLIER, Case, assert_same
from torch.utils._python_dispatch import TorchDispatchMode

from crt_exp.attention import (
    DenominatorCount,
    Generalized,
    Partial,
    attention,
    attention_reference,
    exact_attention,
    softmax_attention,
)
from crt_exp.attention.call import positive_form
from crt_exp.attention.engines import closed_form
from crt_exp.attention.engines.chunks import chunked_partial
from crt_exp.features import OPRF, GeomRF, PosRF, Statistics, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


def test_defect_mask_zeroes_only_values():
    case = Case(OPRF(), masked=True)
    wrong = attention(case.x, case.y, case.v * case.mask[:, None, :, None], case.phi, case.noise, case.params)
    right = case(attention_reference)
    assert_same([case()], [right])
    assert (wrong - right).norm() > 0.2 * right.norm()  # the test has power


@pytest.mark.parametrize("phi, early, late", [(OPRF(A=-0.1), 20.0, 0.1), (TrigRF(), 1.0, OUTLIER),
                                              (GeomRF(p=0.5), 1e-9, 1.0)])
def test_defect_stabiliser_or_epsilon_sees_the_future(phi, early, late):
    """An outlier at the end would underflow every earlier row,
    and with an epsilon replace them by the mean of the values."""
    case = Case(phi, L=20, S=20)
    with torch.no_grad():
        case.y[:, :, :-1] *= early
        case.y[:, :, -1] *= late
    whole = case(causal=True)[:, :, :-1]
    cut = case(x=case.x[:, :, :-1], y=case.y[:, :, :-1], v=case.v[:, :, :-1], causal=True)
    assert_same([whole], [cut], 1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_defect_epsilon_in_features(is_causal):
    """Kernel values of e^-300 weigh as they should: long keys in the direction away from the query."""
    case = Case(PosRF(), B=1, H=1, L=3, S=3, scale=0.2)
    shift = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64)
    far = case(y=case.y + shift, x=case.x - shift, causal=is_causal)
    assert_same([far], [case(attention_reference, y=case.y + shift, x=case.x - shift, causal=is_causal)])
    assert (far - case.v.mean(2, keepdim=True)).abs().max() > 1e-2


def test_defect_keys_reweighted_by_their_own_maxima():
    """A constant added to every key's logs, or to those of one query, changes nothing; one added to one key's does."""
    class Shifted(PosRF):
        by_key, by_query = 0.0, 0.0

        def bind(self, noise, params=()):
            plain = super().bind(noise, params)
            add = lambda f, c: f._replace(log_scale=f.log_scale + c)
            return plain._replace(phi_q=lambda x: add(plain.phi_q(x), self.by_query),
                                  phi_k=lambda y: add(plain.phi_k(y), self.by_key))

    case = Case(Shifted())
    run = lambda: attention_and_chunked(case)
    before = run()
    Shifted.by_key, Shifted.by_query = 300.0, torch.linspace(-500, 500, 11)[:, None]
    assert_same(run(), before)
    Shifted.by_key = torch.linspace(0, 1, 11)[:, None]
    assert (run()[0] - before[0]).abs().max() > 1e-2


def attention_and_chunked(case):
    """By features, whatever the class of the map."""
    return [chunked_partial(case.x, case.y, case.v, case.phi, case.noise, case.params, is_causal, None, False).output
            for is_causal in (False, True)]


def test_defect_scaled_twice():
    """x = d^(-1/4) q gives softmax(q k^T / sqrt d): the usual scale of torch."""
    case = Case(OPRF(), d=16, m=2**14, dv=8, scale=0.7)
    q, k, v = (t.detach() for t in (case.x, case.y, case.x[..., :8]))
    usual = F.scaled_dot_product_attention(q, k, v)
    x, y = q * 16**-0.25, k * 16**-0.25
    assert_same([exact_attention(x, y, v), softmax_attention(x, y, v)], [usual, usual])
    params = case.phi.fit(Statistics.of(x, y))
    estimate = attention(x, y, v, case.phi, case.noise, params)
    assert (estimate - usual).norm() < 0.1 * usual.norm()
    assert (estimate - exact_attention(x * 16**-0.25, y * 16**-0.25, v)).norm() > 0.2 * usual.norm()


def test_defect_statistics_over_padding():
    case = Case(OPRF(), masked=True)
    padded = case.y.detach().masked_fill(~case.mask[:, None, :, None], 1e4)
    mask = case.mask[:, None].expand(-1, 4, -1)
    A = [OPRF().fit(Statistics.of(case.x, y, y_mask=mask)).A for y in (case.y, padded)]
    assert torch.equal(*A)


@pytest.mark.parametrize("is_causal", [False, True])
def test_defect_number_of_chunks_taken_for_their_size(is_causal):
    """No tensor of features grows with the length of the sequence, and no chunk is as small as a part of it."""
    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for t in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(t, torch.Tensor) and t.shape[-1:] == (128,):
                    largest.append(t.numel())
            return found

    sizes = []
    for length in (2048, 8192):
        largest = []
        case = Case(PosRF(), B=1, H=2, L=length, S=length, m=128, dtype=torch.float32)
        form = positive_form(case.x, case.y, case.phi, case.noise, case.params, None, 1.0, torch.float32)[2]
        with Watched(), torch.no_grad():
            (closed_form.causal if is_causal else closed_form.bidirectional).forward(case.x, case.y, case.v, form)
        sizes.append(max(largest))
    assert sizes[0] == sizes[1] < 2**21


# ---- signed denominators ---------------------------------------------------------------------------------------------


def test_denominators_are_counted_and_guarded():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    kernel = TrigRF().phi_q(case.x, case.noise).exp() @ TrigRF().phi_k(case.y, case.noise).exp().mT
    for is_causal in (False, True):
        sums = (kernel.tril() if is_causal else kernel).sum(-1, keepdim=True)
        numerator = (kernel.tril() if is_causal else kernel) @ case.v
        count = DenominatorCount()
        out = case(causal=is_causal, counter=count)
        assert count.nonpositive == (sums <= 0).sum() > 0 and count.total == sums.numel()
        assert_same([out, case(causal=is_causal, denominator="abs")], [numerator / sums, numerator / sums.abs()], 1e-5)
    count.reset()
    assert count.fraction == 0


def test_clamp_bounds_the_output(monkeypatch):
    """A denominator that cancels to nothing is kept at CLAMP of its terms' absolute values."""
    v, ones = torch.ones(1, 1, 2, 1), torch.tensor([[1.0], [1e-9]])
    p = Partial(v[0, 0], ones, torch.zeros(2, 1), modulus=torch.ones(2, 1))
    from crt_exp.attention import partials
    assert partials.finish(p, "clamp").tolist() == [[1.0], [pytest.approx(1 / partials.CLAMP)]]
    negative = p._replace(denominator=-ones)
    assert partials.finish(negative, "clamp").tolist() == [[-1.0], [pytest.approx(-1 / partials.CLAMP)]]
    assert partials.finish(p._replace(denominator=0 * ones), "clamp")[0] == pytest.approx(1 / partials.CLAMP)


@pytest.mark.parametrize("policy", ["clamp", "abs"])
@pytest.mark.parametrize("phi", [TrigRF(), GeomRF(), Generalized(f="identity")], ids=repr)
def test_policies_equal_reference(phi, policy, small_chunks, monkeypatch):
    from crt_exp.attention import partials, reference
    for module in (partials, reference):
        monkeypatch.setattr(module, "CLAMP", 0.3)  # so that it acts
    case = Case(phi, masked=True, scale=1.5)
    for is_causal in (False, True):
        options = {"causal": is_causal, "denominator": policy}
        assert_same(case.with_grads(**options), case.with_grads(attention_reference, **options), 1e-8)


@pytest.mark.filterwarnings("default:.*denominators are not positive:RuntimeWarning")
def test_nonpositive_denominators_are_not_silent():
    case = Case(TrigRF(), B=8, L=32, S=32, scale=2.5, m=4)
    with pytest.warns(RuntimeWarning, match="of 1024 denominators <= 0"):
        case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case(counter=DenominatorCount())
        Case(OPRF())()


@pytest.mark.parametrize("phi", FEW + OTHER, ids=repr)
def test_unnormalised(phi, small_chunks):
    case = Case(phi)
    kernel = phi.phi_q(case.x, case.noise, case.params).exp() @ phi.phi_k(case.y, case.noise, case.params).exp().mT
    for is_causal in (False, True):
        expected = (kernel.tril() if is_causal else kernel) @ case.v
        grads = torch.autograd.grad(expected, (case.x, case.y, case.v), case.grad, retain_graph=True)
        assert_same(case.with_grads(causal=is_causal, normalize=False), [expected, *grads])
