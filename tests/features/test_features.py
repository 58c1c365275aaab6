"""Feature maps: unbiased, variance as in closed form, fitted no worse than unfitted, stable."""

import math

import pytest
import torch
from helpers.covering import in_turn
from helpers.kernel_estimates import estimate_kernel
from helpers.maps import (
    COMPOSITE,
    EXPONENTIAL,
    HYBRID,
    KERNELS,
    MAPS,
    ONE_KERNEL,
    OTHER_KERNELS,
    POSITIVE,
    SIMPLE,
    independent,
)
from helpers.sampled_means import check_mean
from helpers.seeds import seeded
from helpers.vector_pairs import pairs
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.features import (
    CERF,
    GERF,
    OPRF,
    SMREG,
    GaussianCoefficient,
    GeomRF,
    GeomRFPlus,
    Hybrid,
    HypRF,
    LaplaceRF,
    MaternRF,
    PoisCoordRF,
    PoisRF,
    PoisRFPlus,
    PosRF,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.features.exponential import (
    gerf_log_relative_second_moment,
    optimal_a,
    optimal_a_trig,
)
from crt_exp.samplers.noise import leaves


def estimates(phi, x, y, params, m, draws, sampler, seed=0):
    """(draws, L, S) kernel estimates, float64."""
    g = seeded(seed)
    noise = independent(
        phi, lambda: sampler(m, x.shape[-1], g, batch=(draws,), dtype=torch.float64)
    )
    return estimate_kernel(phi, x, y, noise, params)


STRUCTURES = (
    ONE_KERNEL + COMPOSITE + EXPONENTIAL + HYBRID
)  # for properties that do not depend on the kernel


def exact_matrix(phi, x, y):
    return phi.log_kernel(x[:, None], y[None]).exp()


@pytest.mark.parametrize(
    "phi, place",
    in_turn(
        MAPS + OTHER_KERNELS,
        [
            (2, samplers.orthogonal),
            (1, samplers.iid),
            (4, samplers.orthogonal),
            (2, samplers.iid),
        ],
    ),
    ids=lambda value: (
        f"{value[0]}-{value[1].__name__}" if isinstance(value, tuple) else repr(value)
    ),
)
def test_unbiased(phi, place):
    """Errors of signs and norms fade with d."""
    d, sampler = place
    x, y = pairs(d)
    params = phi.fit(Statistics.of(x, y))
    estimate = estimates(phi, x, y, params, 4, 20_000, sampler)
    exact = exact_matrix(phi, x, y)
    error = check_mean(estimate, exact)
    assert (error < 0.03 * exact.clamp(min=0.6)).all()  # the test has power


@pytest.mark.parametrize("phi, d", in_turn(MAPS + OTHER_KERNELS, [2, 1, 3]), ids=repr)
def test_variance_is_the_closed_form(phi, d):
    x, y = pairs(d, scale=0.5, seed=1)
    x = 0.6 * x
    y = 0.6 * y
    params = phi.fit(Statistics.of(x, y))
    estimate = estimates(phi, x, y, params, 1, 100_000, samplers.iid, seed=3)
    square = (estimate - exact_matrix(phi, x, y)).square()
    closed = phi.log_variance(x[:, None], y[None], params).exp()
    error = check_mean(square, closed)
    assert (error < 0.25 * closed + 1e-12).float().mean() > 0.7  # power; the rest have heavy tails


@pytest.mark.parametrize("phi", STRUCTURES + OTHER_KERNELS, ids=repr)
def test_batches_are_one_by_one(phi):
    """Any leading dimensions; log_variance of vectors, rows and all pairs."""
    x = torch.randn(2, 3, 5, 4).double() / 2
    y = torch.randn(2, 3, 6, 4).double() / 2
    g = seeded()
    params = phi.fit(Statistics.of(x, y))
    cases = [(), (3,), (2, 3)]
    for batch in cases:
        noise = independent(
            phi, lambda batch=batch: samplers.iid(7, 4, g, batch, dtype=torch.float64)
        )
        fx = phi.phi_q(x, noise, params).exp()
        fy = phi.phi_k(y, noise, params).exp()
        expected = (2, 3, 5, phi.width(7))
        assert fx.shape == expected
        expected = (2, 3, 6, phi.width(7))
        assert fy.shape == expected
        if not batch:
            own = phi.fit(Statistics.of(x[1, 2], y[1, 2]))
            assert_close(fx[1, 2], phi.phi_q(x[1, 2], noise, own).exp())
    actual = phi.log_variance(x, y[..., :5, :], params).shape
    assert actual == (2, 3, 5)
    actual = phi.log_variance(x[..., :, None, :], y[..., None, :, :], params).shape
    assert actual == (2, 3, 5, 6)
    single = phi.fit(Statistics.of(x[0, 0], y[0, 0]))
    actual = phi.log_variance(x[0, 0, 0], y[0, 0, 0], single).shape
    assert actual == ()


@pytest.mark.parametrize("phi", STRUCTURES, ids=repr)
def test_dtypes_and_gradients(phi):
    g = seeded()
    noise = independent(phi, lambda: samplers.orthogonal(8, 4, g))
    x64 = torch.randn(5, 4, dtype=torch.float64, generator=g).clamp(-1, 1) / 2
    params = phi.fit(Statistics.of(x64, x64))
    reference = phi.phi_q(x64, noise, params).exp()
    assert reference.dtype == torch.float64
    cases = [
        (torch.float32, 1e-4),
        (torch.bfloat16, 0.2),
        (torch.float16, 0.05),
    ]
    for dtype, tolerance in cases:
        out = phi.phi_q(x64.to(dtype), noise, params).exp()
        assert out.dtype == torch.float32
        assert_close(out.double(), reference, rtol=tolerance, atol=tolerance * 0.1)
    small = x64[:2].clone().requires_grad_()
    for side in (phi.phi_q, phi.phi_k):
        assert torch.autograd.gradcheck(
            lambda t, side=side: side(t, noise, params).exp(), (small,), fast_mode=phi in HYBRID
        )


def test_positive():
    x = torch.randn(50, 3)
    y = torch.randn(40, 3)
    noise = samplers.iid(64, 3, seeded())
    for phi in POSITIVE:
        params = phi.fit(Statistics.of(x, y))
        cases = [phi.phi_q(x, noise, params), phi.phi_k(y, noise, params)]
        for f in cases:
            assert (f.value == 1).all(), phi


@pytest.mark.parametrize("phi", ONE_KERNEL, ids=repr)
def test_large_inputs_stay_finite(phi):
    """log features hold where phi overflows: |x| of 1e3 (counts: 20, which is |x|^2 of thousands)."""
    scale = 1e3
    if isinstance(phi, (PoisRF, GeomRF)):
        scale = 20.0
    for dtype in (torch.float32, torch.bfloat16):
        x = scale * torch.randn(6, 4).to(dtype)
        y = scale * torch.randn(5, 4).to(dtype)
        params = phi.fit(Statistics.of(x, y))
        noise = samplers.orthogonal(8, 4, seeded())
        f = phi.phi_q(x, noise, params)
        assert f.log_scale.isfinite().all()
        assert f.value.isfinite().all()
        assert not phi.log_variance(x[:5], y, params).isnan().any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cls", [OPRF, GERF, PoisRF, GeomRF, PoisCoordRF], ids=lambda c: c.__name__)
def test_fit_is_optimal(cls, kernel):
    """Perturbing a fitted parameter never lowers the variance of the pair that it was fitted to."""
    phi = cls(kernel=kernel)
    for scale in (0.1, 0.5, 2.0):
        x, y = torch.randn(2, 20, 1, 4, generator=seeded(), dtype=torch.float64) * scale
        params = phi.fit(Statistics.of(x, y))
        fitted = phi.log_variance(x, y, params)
        for factor in (0.9, 0.99, 1.01, 1.1):
            if cls is GeomRF:
                rate = 1 - (1 - params.rate) * factor
                other = params._replace(rate=rate)
                other = other._replace(rate=other.rate.clamp(1e-6, 1 - 1e-9))
            else:
                other = params._replace(**{params._fields[0]: params[0] * factor})
            assert (phi.log_variance(x, y, other) >= fitted - 1e-9).all()


def test_fitted_order():
    """GERF <= min(OPRF, Trig), OPRF <= Pos, per-coordinate Poisson <= Poisson and geometric, antithetic <= half."""
    x, y = torch.randn(2, 200, 1, 8, generator=seeded(1), dtype=torch.float64) * 0.7
    stats = Statistics.of(x, y)
    v = {}
    cases = [
        GERF(),
        OPRF(),
        TrigRF(),
        PosRF(),
        HypRF(),
        PoisRF(),
        GeomRF(),
        PoisCoordRF(),
        OPRF(antithetic=True),
    ]
    for phi in cases:
        v[phi] = phi.log_variance(x, y, phi.fit(stats))
    assert (v[GERF()] <= torch.minimum(v[OPRF()], v[TrigRF()]) + 1e-9).all()
    assert (v[OPRF()] <= v[PosRF()] + 1e-12).all()
    assert (v[PoisCoordRF()] <= torch.minimum(v[PoisRF()], v[GeomRF()]) + 1e-12).all()
    assert (v[HypRF()] <= v[PosRF()] - math.log(2) + 1e-12).all()
    assert (v[OPRF(antithetic=True)] <= v[OPRF()] - math.log(2) + 1e-12).all()


def test_special_cases():
    x, y = pairs(4)
    noise = samplers.iid(9, 4, seeded(), dtype=torch.float64)

    def product(phi, params):
        return estimate_kernel(phi, x, y, noise, params)

    for kernel in KERNELS:
        cases = [(1, PosRF(kernel)), (-1, TrigRF(kernel))]
        for s, other in cases:
            phi = GERF(kernel, s=s, A=0)
            actual = product(phi, phi.fit(None))
            expected = product(other, ())
            assert_close(actual, expected)
        assert (TrigRF(kernel).log_variance(x, x) == -torch.inf).all()
        cases = [
            PosRF(kernel),
            HypRF(kernel),
            OPRF(kernel),
            SMREG(kernel),
        ]
        for phi in cases:
            own = phi.fit(Statistics.of(x[:1], -x[:1]))
            actual = phi.log_variance(x[:1], -x[:1], own)
            assert actual == -torch.inf


def test_oprf_check_value():
    """CRT Figure 1: the gain over PosRF at d = 64, |x+y|^2 = 100 is e^61.22."""
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 0] = 5
    params = OPRF().fit(Statistics.of(x, x))
    gain = PosRF().log_relative_second_moment(x, x) - OPRF().log_relative_second_moment(
        x, x, params
    )
    assert gain.item() == pytest.approx(61.22, abs=5e-3)


@pytest.mark.parametrize("u", [0.0, 1e-300, 1e-8, 0.499, 0.5, 1e4])
def test_optimal_a_is_exact(u):
    """Against 60 digits of the stationarity condition 2 S rho^2 + (d + 2S) rho - d = 0."""
    from decimal import Decimal, getcontext

    getcontext().prec = 400
    big = Decimal(u)
    rho = Decimal(2) / (1 + 2 * big + (1 + 12 * big + 4 * big * big).sqrt())
    exact = (1 - 1 / rho) / 8
    ours = Decimal(optimal_a(torch.tensor(u, dtype=torch.float64)).item())
    assert abs(ours - exact) <= Decimal("1e-12") * abs(exact)


def test_gerf_fit_reaches_the_real_optimum():
    cases = [(1, 0.3), (8, 2.0), (64, 10.0), (64, 50.0)]
    for d, s_minus in cases:
        target = torch.tensor(s_minus, dtype=torch.float64)
        A = optimal_a_trig(target, d)
        assert 0 <= A < 0.08
        grid = torch.linspace(-0.3, 0.12, 2001, dtype=torch.float64)
        moments = gerf_log_relative_second_moment(grid, -1, target, d)
        actual = gerf_log_relative_second_moment(A, -1, target, d)
        assert actual <= moments.min() + 1e-9


@pytest.mark.parametrize("s", [1, -1])
def test_complex_gerf_is_real_on_the_axis(s):
    A = torch.linspace(-2, 0.1, 50, dtype=torch.float64)
    sizes = torch.tensor([0.0, 1e-4, 3.0, 300.0]).double()
    real = gerf_log_relative_second_moment(A[:, None], s, sizes, 16)
    on_axis = gerf_log_relative_second_moment(A[:, None].to(torch.complex128), s, sizes, 16)
    assert_close(on_axis, real, rtol=1e-9, atol=1e-11)


def test_statistics_equal_all_pairs_and_skip_masked():
    x = torch.randn(3, 7, 4)
    y = torch.randn(3, 5, 4)
    x_mask = torch.rand(3, 7) > 0.3
    y_mask = torch.rand(3, 5) > 0.3
    x_mask[:, 0] = y_mask[:, 0] = True
    x = x.masked_fill(~x_mask[..., None], torch.nan)
    y = y.masked_fill(~y_mask[..., None], torch.nan)
    stats = Statistics.of(x, y, x_mask, y_mask)
    for b in range(3):
        a = x[b][x_mask[b]].double()
        c = y[b][y_mask[b]].double()
        cases = [(s, stats.mean_s(s)) for s in (1, -1)]
        for sign, value in cases:
            whole = (a[:, None] + sign * c[None]).square().sum(-1).mean()
            assert_close(value[b], whole, rtol=1e-5, atol=1e-6)
        for phi in SIMPLE:
            one = phi.fit(Statistics.of(a.float()[None], c.float()[None]))
            for ours, alone in zip(phi.fit(stats), one):
                if ours is not None and ours.shape[0] == 3:
                    assert_close(ours[b], alone[0], rtol=1e-3, atol=1e-6)


def test_statistics_of_scaled_vectors():
    x = torch.randn(3, 7, 4)
    y = torch.randn(3, 5, 4)
    mask = torch.rand(3, 5) > 0.3
    mask[:, 0] = True
    for phi in ONE_KERNEL:
        ours = phi.fit(Statistics.of(x, y, None, mask, scale=0.4))
        whole = phi.fit(Statistics.of(0.4 * x, 0.4 * y, None, mask))
        for a, b in zip(leaves(ours), leaves(whole), strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, phi=phi: f"{phi}: {text}")


def test_empty_set_gives_defaults():
    x = torch.randn(2, 5, 4)
    none = torch.zeros(2, 5, dtype=torch.bool)
    stats = Statistics.of(x, x, none, none)
    assert (OPRF().fit(stats).A == 0).all()
    assert (PoisRF().fit(stats).rate == 1e-8).all()
    actual = GeomRF().fit(stats).rate
    expected = torch.full((2, 1, 1), 1 - 1e-9, dtype=torch.float64)
    assert_close(actual, expected)


def test_plus_maps_sign_points_below_the_shift():
    """A point below the shift gets signed features: the estimate stays unbiased."""
    x, y = pairs(2)
    low = x - 0.4
    for phi in (PoisRFPlus("gaussian"), GeomRFPlus("gaussian")):
        params = phi.fit(Statistics.of(x, y))
        estimate = estimates(phi, low, y, params, 4, 40_000, samplers.iid)
        check_mean(estimate, exact_matrix(phi, low, y))


@pytest.mark.parametrize("phi", [PoisRFPlus(), GeomRFPlus()], ids=repr)
def test_the_margin_below_the_vectors_is_in_their_standard_deviations(phi):
    x, y = pairs(3)
    one = phi.fit(Statistics.of(x, y))
    ten = phi.fit(Statistics.of(10 * x, 10 * y))
    assert_close(ten.shift, 10 * one.shift)


X = torch.ones(1, 2, 3)
Y = torch.ones(1, 2, 4)
BAD = {
    "A=0.125: expected a number < 0.125": lambda: OPRF(A=0.125),
    r"Re\(1 - 8A\)": lambda: GERF(A=0.2 + 1j, s=-1),
    "A=.* with s='auto'": lambda: GERF(A=0.1),
    "has 5 dimensions, expected 4": lambda: PosRF().phi_q(torch.zeros(3, 5), samplers.iid(2, 4)),
    "mask: 4": lambda: Statistics.of(torch.zeros(3, 5), torch.zeros(3, 5), torch.ones(4) > 0),
    "A: not finite": lambda: OPRF().fit(
        Statistics.of(torch.full((3, 2), torch.inf), torch.zeros(3, 2))
    ),
    "(p|shift): not finite": lambda: GeomRFPlus().fit(
        Statistics.of(torch.full((3, 2), torch.nan), torch.zeros(3, 2))
    ),
    "needs exactly Gaussian": lambda: PoisRF().phi_q(
        torch.ones(3, 4), samplers.orthogonal(4, 4, lengths="sqrt_d"), PoisRF(rate=1.0).fit(None)
    ),
    "weights: 2": lambda: Sum(PosRF(), weights=(1, 2)),
    "MaternRF needs chi-distributed lengths": lambda: MaternRF().phi_q(
        torch.ones(2, 4), samplers.orthogonal(8, 4, lengths="sqrt_d")
    ),
    "LaplaceRF needs exactly Gaussian": lambda: LaplaceRF().phi_q(
        torch.ones(2, 4), samplers.hadamard(8, 4)
    ),
    "Poisson rate": lambda: PoisRF(rate=1e5).phi_q(
        torch.ones(3, 4), samplers.iid(2, 4), PoisRF(rate=1e5).fit(None)
    ),
    "expected a number, d numbers": lambda: CERF(M="a"),
    "M=.*1.0, 2.0.* d rows of d numbers": lambda: CERF(M=[[1.0, 2.0]]),
    "M=inf: .* finite": lambda: CERF(M=math.inf),
    "real entries with field='real'": lambda: CERF(M=1j, field="real"),
    "expected a number or a list": lambda: GaussianCoefficient(M=[[1.0]]),
    "M: 2 dimensions, expected 3": lambda: GaussianCoefficient(M=(1.0, 2.0)).mean(X, X),
    "parts: empty": lambda: Sum(),
    "kernel=other": lambda: OPRF(kernel="other"),
    "expected \\(..., L, d\\)": lambda: Statistics.of(X[0, 0], X[0, 0]),
    "at least one vector": lambda: Statistics.of(X[:, :0], X),
    "x has 3 dimensions, y has 4": lambda: Statistics.of(X, Y),
    "one device": lambda: Statistics.of(X, X.to("meta")),
    "unknown": lambda: Hybrid(coefficients=["other"], bases=["oprf", "pos"]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip()):
        BAD[message]()


# What noise a map takes.
