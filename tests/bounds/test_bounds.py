"""Exact laws and bounds against simulation, high-precision sums and the counterexamples to what was printed."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import hyp0f1
from scipy.stats import kstest, ncx2

from crt_exp import samplers
from crt_exp.bounds import (
    OPRFLaw,
    SMREGLaw,
    ensemble_log_variance,
    log_chernoff_tail,
    log_hoeffding_tail,
    log_mgf,
    log_orthogonality_gap,
    log_range,
    log_smreg_gap,
    log_smreg_orthogonal_tail,
    log_smreg_ratio,
    required_m,
    smreg_ratio_floor,
    trig_uniform_order,
    uniform_m,
)
from crt_exp.bounds.coupling import positive_covariance, trig_covariance
from crt_exp.features import GERF, OPRF, SMREG, HypRF, PoisRF, PosRF, Statistics, TrigRF
from crt_exp.kernels import log_kernel

SAMPLERS = {"iid": samplers.iid, "orthogonal": samplers.orthogonal, "simplex": samplers.simplex}
COUPLED = [PosRF(), HypRF(), OPRF("gaussian"), OPRF(antithetic=True), TrigRF("gaussian"),
           GERF("gaussian", s=-1, A=0.02 + 0.03j), GERF(s=1, A=-0.1 + 0.05j), SMREG(), SMREG(antithetic=True)]
A_VALUES = [-1.0, -0.1, -1e-3, -1e-7, 0.0, 1e-7, 0.05]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pair(d, scale=0.4, seed=0):
    """One pair of vectors (d,), float64."""
    return torch.randn(2, d, generator=seeded(seed), dtype=torch.float64) * scale


def estimates(phi, x, y, params, m, draws, ensemble, seed=0):
    """hat K of one pair, (draws,), float64."""
    noise = SAMPLERS[ensemble](m, len(x), seeded(seed), batch=(draws,), dtype=torch.float64)
    fx, fy = phi.phi_q(x[None], noise, params).exp(), phi.phi_k(y[None], noise, params).exp()
    return (fx * fy).sum((-1, -2))


def fit(phi, x, y):
    return phi.fit(Statistics.of(x[None], y[None]))


# --- coupled rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, d", [(3, 3), (5, 3), (2, 2)])
@pytest.mark.parametrize("ensemble", ["orthogonal", "simplex"])
@pytest.mark.parametrize("phi", COUPLED, ids=repr)
def test_exact_variance_of_coupled_rows(phi, ensemble, m, d):
    """Sharp enough to tell the exact variance from the independent one, where those differ by much."""
    x, y = pair(d, seed=4)
    params = fit(phi, x, y)
    square = (estimates(phi, x, y, params, m, 20_000, ensemble) - phi.log_kernel(x, y).exp()).square()
    exact = ensemble_log_variance(phi, x, y, params, m, ensemble).exp()
    assert (square.mean() - exact).abs() < 5 * square.std() / len(square) ** 0.5
    assert square.std() / len(square) ** 0.5 < 0.09 * exact


def test_coupling_shows_at_full_blocks():
    """The case of math: d = 8, |x + y|^2 = 5: pair moments 0.488 and 0.290 of K^2;
    a Taylor check where rows barely interact."""
    s = torch.tensor(5.0, dtype=torch.float64)
    assert 1 + positive_covariance(s, 8) == pytest.approx(0.488, abs=5e-4)
    assert 1 + positive_covariance(s, 8, -1 / 7) == pytest.approx(0.290, abs=5e-4)
    small = torch.tensor([1e-4, 1e-8], dtype=torch.float64)
    torch.testing.assert_close(positive_covariance(small, 6), -small**2 / (2 * 8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("d", [1, 2, 5, 64])
@pytest.mark.parametrize("s", [1e-3, 0.7, 30.0, 500.0])
def test_positive_covariance_is_1f1(d, s):
    """1F1(d; d/2; s/2) e^-s - 1, to 300 digits."""
    getcontext().prec = 300
    z, term, total = Decimal(s) / 2, Decimal(1), Decimal(1)
    for k in range(4000):
        term = term * (d + k) * z / ((Decimal(d) / 2 + k) * (k + 1))
        total += term
    exact = total * (-Decimal(s)).exp() - 1
    assert positive_covariance(torch.tensor(s, dtype=torch.float64), d).item() == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize("d", [2, 3, 8, 33])
def test_covariance_by_two_dimensional_quadrature(d):
    """Over both chi lengths: the one-dimensional average is right for both signs and any cosine."""
    node, weight = np.polynomial.legendre.leggauss(120)
    r = (node + 1) / 2 * (d**0.5 + 9)
    weight = weight * np.exp((d - 1) * np.log(r / d**0.5) - r**2 / 2 + d / 2)
    weights = np.outer(weight, weight) / weight.sum() ** 2
    for s in (0.3, 4.0):
        for cosine in (0.0, -1 / (d - 1), 0.3):
            square = {c: r[:, None] ** 2 + r**2 + 2 * c * np.outer(r, r) for c in (cosine, -cosine)}
            moment = lambda sign, c, s=s, square=square: (weights * hyp0f1(d / 2, sign * s / 4 * square[c])).sum()
            s_s = torch.tensor(s, dtype=torch.float64)
            positive = (1 + positive_covariance(s_s, d, cosine)).item() * math.exp(s)
            assert positive == pytest.approx(moment(1, cosine), rel=1e-9)
            trig = (moment(-1, cosine) + moment(-1, -cosine)) / 2
            assert trig_covariance(s_s, d, cosine).item() + math.exp(-s) == pytest.approx(trig, abs=1e-9)


def test_ensembles_are_ordered_and_stable():
    """simplex <= orthogonal <= iid for positive features; finite logs where variances overflow;
    empty and blocks cut."""
    x, y = torch.randn(2, 30, 8, generator=seeded(), dtype=torch.float64)
    for phi in (PosRF(), OPRF()):
        params = phi.fit(Statistics.of(x, y))
        iid, orthogonal, simplex = (ensemble_log_variance(phi, x, y, params, 20, e) for e in SAMPLERS)
        torch.testing.assert_close(iid, phi.log_variance(x, y, params) - math.log(20))
        assert (simplex <= orthogonal + 1e-12).all() and (orthogonal <= iid + 1e-12).all()
        assert ensemble_log_variance(phi, 20 * x, 20 * y, params, 8, "orthogonal").isfinite().all()
    assert ensemble_log_variance(TrigRF(), 10 * x, 10 * y, (), 8, "orthogonal").isfinite().all()
    assert ensemble_log_variance(PosRF(), x, -x, (), 8, "simplex").eq(-torch.inf).all()
    orthogonal, simplex = (ensemble_log_variance(HypRF(), x, y, (), 20, e) for e in ("orthogonal", "simplex"))
    assert (orthogonal <= simplex).all()  # pairs +-omega: simplex rows also meet at the opposite cosine
    matrix = ensemble_log_variance(PosRF(), x[:, None], y[None], (), 8, "orthogonal")
    torch.testing.assert_close(matrix.diagonal(), ensemble_log_variance(PosRF(), x, y, (), 8, "orthogonal"))


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_orthogonality_gap(kernel):
    """CRT Theorem 4.1: below the exact gap, for every A; near it for small |x + y|, so the constant is the best."""
    for d, m in [(1, 1), (2, 2), (4, 3), (16, 16)]:
        x, y = torch.randn(2, 50, d, generator=seeded(d), dtype=torch.float64) * 0.5
        for phi in (PosRF(kernel), OPRF(kernel, A=-0.2)):
            params = phi.fit(None)
            iid, orthogonal = (ensemble_log_variance(phi, x, y, params, m, e).exp() for e in ("iid", "orthogonal"))
            gap = log_orthogonality_gap(kernel, x, y, m).exp()
            assert (iid - orthogonal >= gap * (1 - 1e-9) - 1e-12).all()
    x, y = 0.02 * x, 0.02 * y
    exact = -positive_covariance((x + y).square().sum(-1), 16) * (2 * log_kernel(kernel, x, y)).exp() * 15 / 16
    torch.testing.assert_close(log_orthogonality_gap(kernel, x, y, 16).exp(), exact, rtol=1e-2, atol=0)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("A", A_VALUES)
def test_oprf_law_is_the_law(A, kernel):
    """Kolmogorov-Smirnov on draws; the quantile inverts the distribution function; moments; the maximum."""
    x, y = pair(3, 0.6)
    law = OPRFLaw.of(x, y, A, kernel)
    phi = OPRF(kernel, A=A)
    z = estimates(phi, x, y, phi.fit(None), 1, 10_000, "iid", seed=1)
    assert kstest(z.numpy(), lambda v: law.cdf(torch.from_numpy(v)).numpy()).pvalue > 1e-3
    p = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.9, 0.999], dtype=torch.float64)
    torch.testing.assert_close(law.cdf(law.quantile(p)), p, rtol=1e-6, atol=0)
    assert (z.log() <= law.log_max + 1e-9).all()
    assert law.log_moment(1).item() == pytest.approx(log_kernel(kernel, x, y).item(), abs=1e-12)
    second = phi.log_relative_second_moment(x, y, phi.fit(None)) + 2 * law.log_moment(1)
    assert law.log_moment(2).item() == pytest.approx(second.item(), abs=1e-9)
    for k in (-0.1, 0.5):
        power = z**k
        assert (power.mean() - law.log_moment(k).exp()).abs() < 5 * power.std() / len(z) ** 0.5


def test_oprf_law_is_continuous_in_a():
    """At A = 0 (log-normal), and where the noncentral chi-square hands over to the normal form."""
    x, y = pair(8, 0.5)
    s_plus = (x + y).square().sum()
    z = OPRFLaw.of(x, y, 0.0).quantile(torch.tensor([1e-4, 0.1, 0.5, 0.99], dtype=torch.float64))
    for sign in (-1, 1):
        edge = sign * float((s_plus / 16e8).sqrt())
        inside, outside = (OPRFLaw.of(x, y, edge * f).cdf(z) for f in (1.0001, 0.9999))
        torch.testing.assert_close(inside, outside, rtol=2e-7, atol=1e-8)
        near, at = (OPRFLaw.of(x, y, A).cdf(z) for A in (sign * 1e-12, 0.0))
        torch.testing.assert_close(near, at, rtol=1e-8, atol=0)


def test_oprf_law_edges():
    x = torch.ones(3, dtype=torch.float64)
    constant = OPRFLaw.of(x, -x, 0.0)  # x = -y, A = 0: no variance
    assert constant.cdf(0.99 * math.exp(-3)) == 0 and constant.cdf(1.01 * math.exp(-3)) == 1
    assert constant.quantile(0.3).log().item() == pytest.approx(-3) and constant.log_max == pytest.approx(-3)
    central = OPRFLaw.of(x, -x, -0.3)  # noncentrality 0
    assert central.cdf(central.quantile(0.2)) == pytest.approx(0.2)
    law = OPRFLaw.of(x, x, torch.tensor([-0.3, 0.0, 0.1]).double())
    for end, value in ((0.0, 0.0), (math.inf, 1.0)):
        torch.testing.assert_close(law.cdf(end), torch.full((3,), value).double())
    assert law.log_moment(3)[2] == torch.inf and law.log_max[1] == torch.inf
    with pytest.raises(ValueError, match="must be positive"):
        OPRFLaw.of(x, x, 0.2)


@pytest.mark.parametrize("d", [1, 3, 8])
def test_mgf_is_the_integral(d):
    x, y = pair(d, 0.7)
    law = OPRFLaw.of(x, y, -0.2)
    nc, top = float((1.8 * law.s_plus) / (16 * 0.04)), float(law.log_max)
    for tilt in (0.3, 20.0):
        integrand = lambda q, tilt=tilt: math.exp(tilt * math.exp(-0.4 * q)) * ncx2.pdf(q, d, nc)
        ends = (0, 1e-3, 1, nc + d, 41 * (nc + d))
        whole = sum(quad(integrand, a, b, limit=200)[0] for a, b in zip(ends, ends[1:]))
        assert log_mgf(law, tilt) == pytest.approx(math.log(whole), rel=1e-5)
    assert top == pytest.approx(float(log_range(OPRF(A=-0.2), x, y, OPRF(A=-0.2).fit(None))))


def test_smreg_law():
    x, y = pair(4, 0.6)
    law, phi = SMREGLaw.of(x, y), SMREG()
    z = estimates(phi, x, y, (), 1, 20_000, "iid")
    assert (z.log() <= law.log_max + 1e-9).all()
    for k in (1, 2, 3):
        tolerance = 5 * float((z**k).std()) / 20_000**0.5
        assert (z**k).mean().item() == pytest.approx(law.log_moment(k).exp().item(), abs=tolerance)
    tilt = 3.0
    w = (tilt * (z.log() - law.log_max).exp()).exp()
    assert w.mean().item() == pytest.approx(math.exp(log_mgf(law, tilt)), abs=5 * float(w.std()) / 20_000**0.5)


def test_smreg_ratio():
    """At most 1; for bounded scores above the floor of Performers Theorem 1 already at d = 64."""
    s_plus = torch.tensor([0.0, 1e-6, 0.5, 4.0, 100.0], dtype=torch.float64)
    for d in (1, 2, 64):
        ratio = log_smreg_ratio(s_plus, d)
        assert ratio[0] == 0 and (ratio <= 0).all() and (ratio[1:].diff() < 0).all()
    x, y = torch.randn(2, 1, 64, dtype=torch.float64) * 0.3
    ratio = SMREG().log_kernel(x, y) - log_kernel("softmax", x, y)
    torch.testing.assert_close(log_smreg_ratio((x + y).square().sum(-1), 64), ratio)
    for d in (64, 512, 4096):
        assert log_smreg_ratio(torch.tensor(4.0), d).exp() >= smreg_ratio_floor(d)


# --- tails ------------------------------------------------------------------------------------------------------------


def test_printed_tail_bound_is_false_and_ours_is_not():
    """CRT Theorem 4.2 prints (1 - 4A)^(-d/2): d = 8, A = -1, x = y = 0, m = 1, epsilon = 311.5 refutes it."""
    d, A, epsilon = 8, -1.0, 311.5
    zero = torch.zeros(d, dtype=torch.float64)
    law = OPRFLaw.of(zero, zero, A, "gaussian")
    true = 1 - law.cdf(1 + epsilon)
    printed = 2 * math.exp(-(epsilon**2) / 2 * (1 - 4 * A) ** (-d / 2))
    corrected = 2 * math.exp(-2 * epsilon**2 * (1 - 4 * A) ** -d)
    ours = log_hoeffding_tail(epsilon, 1, law.log_max).exp()
    assert true == pytest.approx(3.3e-5, rel=0.02) and printed < 1e-33
    assert true <= ours and ours == pytest.approx(min(1, corrected))


@pytest.mark.parametrize("A", [-0.05, -0.3, -1.0])
def test_tails_hold_for_one_projection(A):
    """Against the exact law: two-sided Hoeffding, one-sided Chernoff,
    which is never weaker than one side of Hoeffding."""
    for seed, d in enumerate((1, 2, 4)):
        x, y = pair(d, 0.5, seed)
        law = OPRFLaw.of(x, y, A)
        mean, top = float(law.log_moment(1).exp()), float(law.log_max.exp())
        for share in (0.05, 0.3, 0.7, 0.97):
            epsilon = share * (top - mean)
            above = float(1 - law.cdf(mean + epsilon))
            both = above + float(law.cdf(mean - epsilon))
            hoeffding, chernoff = float(log_hoeffding_tail(epsilon, 1, law.log_max)), log_chernoff_tail(law, epsilon, 1)
            assert both <= math.exp(hoeffding) and above <= math.exp(chernoff)
            assert chernoff <= min(0.0, -2 * (epsilon / top) ** 2) + 1e-6
        assert log_chernoff_tail(law, 1.01 * (top - mean), 1) == -math.inf
    corrected = (1 - 4 * A) ** d * math.exp(-float(x.square().sum() + y.square().sum()) / (2 * A))
    assert OPRFLaw.of(x, y, A, "gaussian").log_max <= math.log(corrected) / 2 + 1e-12  # CRT's simpler range holds too


@pytest.mark.parametrize("ensemble", ["iid", "orthogonal"])
def test_tails_hold_for_blocks(ensemble):
    x, y = pair(4, 0.5, seed=2)
    for law, phi in ((OPRFLaw.of(x, y, -0.3), OPRF(A=-0.3)), (SMREGLaw.of(x, y), SMREG())):
        error = estimates(phi, x, y, phi.fit(None), 4, 50_000, ensemble) - law.log_moment(1).exp()
        for quantile in (0.9, 0.99, 0.999):
            epsilon = float(error.quantile(quantile))
            assert (1 - quantile) <= math.exp(log_chernoff_tail(law, epsilon, 4)) * 1.05
            if phi == SMREG():
                corrected = log_smreg_orthogonal_tail(law, epsilon, 4)
                assert corrected <= log_chernoff_tail(law, epsilon, 4)
                assert ensemble == "iid" or (1 - quantile) <= math.exp(corrected) * 1.05


def test_printed_smreg_gap_is_false_and_ours_is_not():
    """Performers Theorem 3 prints Lambda^m: d = m = 2, x = (4.5, 0), y = (-4, 0), theta = 1 / Lambda,
    by exact integrals."""
    x, y = torch.tensor([4.5, 0.0], dtype=torch.float64), torch.tensor([-4.0, 0.0], dtype=torch.float64)
    law = SMREGLaw.of(x, y)
    r = math.sqrt(2 * float(law.s_plus))  # theta Z = e^(r cos t)
    mean = lambda f: quad(f, 0, math.pi, epsabs=1e-12)[0] / math.pi
    one = mean(lambda t: math.exp(math.exp(r * math.cos(t))))
    both = mean(lambda t: (math.exp(math.exp(r * math.cos(t)) + math.exp(r * math.sin(t)))
                           + math.exp(math.exp(r * math.cos(t)) + math.exp(-r * math.sin(t)))) / 2)
    gap, tilt = one**2 - both, math.exp(r)
    assert log_mgf(law, tilt) == pytest.approx(math.log(one), abs=1e-9)
    ours = log_smreg_gap(law, tilt, 2)
    printed = ours - 2 * float(law.offset)  # Lambda^2 in place of Lambda^4
    assert math.exp(ours) <= gap < one**2 < math.exp(printed)
    assert log_smreg_gap(law, tilt, 1) == -math.inf


# --- projections needed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ensemble", list(SAMPLERS))
@pytest.mark.parametrize("phi", [OPRF(), HypRF(), TrigRF(), SMREG()], ids=repr)
def test_required_m_by_variance(phi, ensemble):
    """The variance at m is small enough, and not so at the next smaller number allowed."""
    d, epsilon, delta = 6, 0.3, 0.1
    x, y = torch.randn(2, 5, d, generator=seeded(), dtype=torch.float64) * 0.5
    params = phi.fit(Statistics.of(x, y))
    needed = required_m(phi, x, y, params, epsilon=epsilon, delta=delta, ensemble=ensemble)
    target = math.log(delta * epsilon**2) + 2 * phi.log_kernel(x, y)
    for i, m in enumerate(needed.long().tolist()):
        smaller = m - 1 if ensemble == "iid" or m <= d else m - d
        assert ensemble_log_variance(phi, x, y, params, m, ensemble)[i] <= target[i] + 1e-9
        assert smaller == 0 or ensemble_log_variance(phi, x, y, params, smaller, ensemble)[i] > target[i]


def test_required_m_holds():
    x, y = pair(3, 0.2)
    for phi, method in ((OPRF(), "chebyshev"), (TrigRF(), "hoeffding"), (OPRF(A=-0.1), "hoeffding"),
                        (SMREG(), "hoeffding")):
        params = fit(phi, x, y)
        m = int(required_m(phi, x, y, params, epsilon=0.4, delta=0.1, method=method))
        assert m < 1000
        error = (estimates(phi, x, y, params, m, 500, "iid") / phi.log_kernel(x, y).exp() - 1).abs()
        assert (error > 0.4).double().mean() <= 0.1
        tail = log_hoeffding_tail(0.4 * phi.log_kernel(x, y).exp(), m, log_range(phi, x, y, params))
        assert method != "hoeffding" or tail <= math.log(0.1)
    kernel = log_kernel("softmax", x, y).exp().item()
    relative, absolute = (required_m(OPRF(), x, y, fit(OPRF(), x, y), epsilon=e, delta=0.1, relative=r)
                          for e, r in ((0.02, True), (0.02 * kernel, False)))
    assert (relative - absolute).abs() <= 1


def test_required_m_where_nothing_helps():
    x, y = pair(4, 20.0)
    assert required_m(PosRF(), x, y, epsilon=0.1, delta=0.1, method="hoeffding") == torch.inf
    assert required_m(PosRF(), 3 * x, 3 * x, epsilon=0.1, delta=0.1, ensemble="orthogonal") == torch.inf
    assert required_m(PosRF(), x, -x, epsilon=0.1, delta=0.1) == 1
    for bad in ({"epsilon": 0, "delta": 0.1}, {"epsilon": 0.1, "delta": 1}):
        with pytest.raises(ValueError, match="epsilon > 0"):
            required_m(PosRF(), x, y, **bad)
    with pytest.raises(ValueError, match="chebyshev"):
        required_m(OPRF(A=-1), x, y, OPRF(A=-1).fit(None), epsilon=0.1, delta=0.1, method="hoeffding",
                   ensemble="orthogonal")
    with pytest.raises(ValueError, match="unknown ensemble"):
        required_m(PosRF(), x, y, epsilon=0.1, delta=0.1, ensemble="sobol")
    with pytest.raises(ValueError, match="PoisRF"):
        ensemble_log_variance(PoisRF(rate=1), x, y, PoisRF(rate=1).fit(None), 4, "orthogonal")
    with pytest.raises(ValueError, match="unbounded"):
        log_chernoff_tail(OPRFLaw.of(x, y, 0.0), 1.0, 4)
    for beyond in (lambda: log_orthogonality_gap("softmax", x, y, 5),
                   lambda: log_smreg_orthogonal_tail(SMREGLaw.of(x, y), 1, 5)):
        with pytest.raises(ValueError, match="one block"):
            beyond()


def test_uniform_m():
    """All of n pairs within epsilon at once, in every one of the draws; the order of Theorem 4 grows as it says."""
    d, radius, epsilon, A = 2, 0.8, 0.5, -0.1
    q, k = torch.nn.functional.normalize(torch.randn(2, 5, d, generator=seeded(), dtype=torch.float64), dim=-1) * radius
    x, y = q * d**-0.25, k * d**-0.25
    m = int(uniform_m(epsilon, 0.1, 25, radius, d, A))
    params, phi = OPRF(A=A).fit(None), OPRF(A=A)
    noise = samplers.iid(m, d, seeded(), batch=(300,), dtype=torch.float64)
    error = phi.phi_q(x, noise, params).exp() @ phi.phi_k(y, noise, params).exp().mT - (x @ y.mT).exp()
    assert (error.abs().amax((-1, -2)) > epsilon).double().mean() <= 0.1
    assert uniform_m(1e-3, 0.1, 25, 9.0, 64, -1e-3) == math.inf
    with pytest.raises(ValueError, match="A < 0"):
        uniform_m(epsilon, 0.1, 25, radius, d, 0.0)
    assert trig_uniform_order(0.1, 1.0, 64) < trig_uniform_order(0.05, 1.0, 64) / 4
