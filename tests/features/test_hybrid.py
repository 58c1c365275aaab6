"""Hybrid random features: properties of their estimates, their algebra, complex exponential features."""

import pytest
import torch
from helpers.covering import in_turn, slow
from helpers.hybrid_cases import draw, vectors
from helpers.kernel_estimates import estimate_kernel, estimate_pairs
from helpers.maps import HYBRID
from helpers.sampled_means import check_mean
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.features import (
    CERF,
    AngularHybrid,
    BipolarGaussianCoefficient,
    ClusteredHybrid,
    GaussianHybrid,
    GaussianMixtureHybrid,
    Hybrid,
    HypRF,
    PosRF,
    Statistics,
    TrigRF,
)
from crt_exp.features.complex_exponential import diagonal_by_centres, diagonal_by_moments

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


def at_angle(theta, r=1.0, d=3):
    """x and y (..., d) of length r at angles theta (...), in a plane that no axis lies in."""
    u, v = torch.linalg.qr(vectors(d, 2, seed=5))[0].mT
    x = r * u.expand(*theta.shape, d)
    return x, r * (theta.cos()[..., None] * u + theta.sin()[..., None] * v)


@pytest.mark.parametrize("phi, d", in_turn(HYBRID, [3, 1]), ids=lambda value: repr(value))
def test_unbiased_and_of_the_variance_in_closed_form(phi, d):
    def cut(t):
        return 0.3 * t / t.norm(dim=-1, keepdim=True).clamp(min=0.5)

    # of long vectors the tails are too heavy
    x = cut(vectors(5, d))
    y = cut(vectors(6, d, seed=1))
    draws = 15_000
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, 1, d, (draws,), seed=2)
    x = x[:2]
    y = y[:3]
    estimate = estimate_kernel(phi, x, y, noise, params)
    exact = phi.log_kernel(x[:, None], y[None]).exp()
    error = check_mean(estimate, exact, rounding=1e-9)
    assert (error < 0.05 * exact).float().mean() > 0.6
    square = (estimate - exact).square()
    closed = phi.log_variance(x[:, None], y[None], params).exp()
    error = check_mean(square, closed)
    assert (error < 0.25 * closed + 1e-12).float().mean() > 0.5  # power; the rest have heavy tails


@pytest.mark.parametrize("shared", [True, slow(False)])
@pytest.mark.parametrize("phi", [AngularHybrid, GaussianHybrid], ids=lambda c: c.__name__)
def test_mse_theorems(phi, shared):
    """n and m projections, vectors of unequal length, where shared projections and independent ones differ."""
    phi = phi(n=3, shared=shared)
    n = 3
    m = 2
    draws = 120_000
    x = vectors(2, 3, scale=0.3)
    y = vectors(2, 3, seed=1, scale=0.8)
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, m, 3, (draws,), seed=3)
    estimate = estimate_kernel(phi, x, y, noise, params)
    log_exact = x @ y.mT
    square = (estimate - log_exact.exp()).square()
    log_closed = phi.log_relative_variance(x[:, None], y[None], params, n, m)
    closed = (log_closed + 2 * log_exact).exp()
    error = check_mean(square, closed)
    assert (error < 0.05 * closed).all()


def test_angular_hybrid_is_exact_at_both_ends_and_nowhere_between():
    """theta/pi weights the positive features: with the weights the other way round both ends would be the worst."""
    x = vectors(1, 4).expand(3, 4)
    y = torch.stack([x[0], x[0].flip(0), -x[0]])
    cases = [AngularHybrid(n=3), AngularHybrid(n=3, base="pos", shared=False)]
    for phi in cases:
        actual = (phi.log_variance(x, y, phi.fit(None)) == -torch.inf).tolist()
        assert actual == [True, False, True]
        noise = draw(phi, 2, 4)
        found = estimate_pairs(phi, x, y, noise, phi.fit(None))
        actual = found[[0, 2]]
        expected = (x * y).sum(-1).exp()[[0, 2]]
        assert_close(actual, expected)


def test_angular_hybrid_is_exact_in_float32_where_its_other_base_is_huge():
    """At y = -x the kernel is e^-|x|^2 and the trigonometric base e^|x|^2: its weight must be a true 0."""
    x = 3 * torch.nn.functional.normalize(torch.randn(200, 16, generator=seeded()), dim=-1)
    y = torch.cat([-x[:100], x[100:]])
    phi = AngularHybrid(n=8)
    noise = phi.noise(16, lambda p: samplers.orthogonal(p.m, 16, seeded(p.m)))
    actual = estimate_pairs(phi, x, y, noise, phi.fit(None))
    expected = (x * y).sum(-1).exp()
    assert_close(actual, expected, rtol=2e-5, atol=0)


def test_gaussian_coefficients_are_never_clipped():
    """Estimates below 0 and above 1 occur, and their mean is lambda: clipped they would be biased."""
    phi = BipolarGaussianCoefficient(sigma=1.0, r=1.0)
    x, y = at_angle(torch.tensor(2.5, dtype=torch.float64))
    params = phi.fit(None)
    noise = draw(phi, 1, 3, (40_000,))
    queries = phi.lambda_columns(phi.rho(x[None], noise, params, False), params, False)
    keys = phi.lambda_columns(phi.rho(y[None], noise, params, True), params, True)
    found = (queries * keys).sum((-2, -1))
    exact = float(phi.mean(x, y, params))
    spread = float(phi.variance(x, y, params))
    difference = abs(found.mean() - exact)
    assert difference < 5 * (spread / len(found)) ** 0.5
    difference = abs(found.clamp(0, 1).mean() - exact)
    assert difference > 20 * (spread / len(found)) ** 0.5
    actual = float(found.var())
    assert actual == pytest.approx(spread, rel=0.05)


def test_zero_vectors_and_ties():
    zero = torch.zeros(1, 3, dtype=torch.float64)
    x = vectors(4, 3)
    for phi in (AngularHybrid(), GaussianHybrid(), ClusteredHybrid()):
        params = phi.fit(Statistics.of(x, x))
        noise = draw(phi, 3, 3)
        cases = [
            (zero, x),
            (x, zero),
            (zero, zero),
        ]
        for a, b in cases:
            assert (estimate_kernel(phi, a, b, noise, params)).isfinite().all()
        assert not phi.log_variance(zero, x, params).isnan().any()
    nothing = GaussianHybrid().fit(Statistics.of(zero, zero))[0][0]
    assert nothing.norm == 1
    assert nothing.sigma == 1


# ---- the algebra -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phi",
    [
        AngularHybrid(n=3),
        GaussianHybrid(n=3, base="pos"),
        AngularHybrid(n=3, shared=False),
    ],
    ids=repr,
)
def test_a_hybrid_is_the_sum_of_its_products(phi):
    (coefficient,), bases = phi.parts
    x = vectors(5, 3)
    y = vectors(6, 3, seed=1)
    params = phi.fit(Statistics.of(x, y))
    noise = draw(phi, 2, 3)

    def weights(t, key):
        own = params[0][0]
        rho = coefficient.rho(t, noise[0][0], own, key)
        of_first = coefficient.lambda_columns(rho, own, key)
        of_second = phi._weights([rho], params[0], key)[1]
        return of_first, of_second

    shares = []
    for of_x, of_y in zip(weights(x, False), weights(y, True)):
        shares.append(of_x @ of_y.mT)
    assert_close(sum(shares), torch.ones(5, 6, dtype=torch.float64))
    expected = 0
    for share, base, own_noise, own_params in zip(shares, bases, noise[1], params[1]):
        expected = expected + share * estimate_kernel(base, x, y, own_noise, own_params)
    actual = estimate_kernel(phi, x, y, noise, params)
    assert_close(actual, expected)


def test_widths():
    assert AngularHybrid(n=8).width(8) == 8 * 8 * 8
    assert AngularHybrid(n=8, base="pos").width(8) == 6 * 8 * 8
    assert GaussianHybrid(n=4).width(3) == 4 * 3 * 9
    assert ClusteredHybrid().width(64) == 256


def test_one_projection_serves_all_or_each_has_its_own():
    cases = [
        (AngularHybrid(), ["coefficient", "base"]),
        (AngularHybrid(shared=False), ["coefficient", "base_0", "base_1"]),
        (ClusteredHybrid(), [""]),
        (GaussianMixtureHybrid(), ["coefficient", "base"]),
    ]
    for phi, names in cases:
        found = []
        phi.noise(4, lambda p, found=found: found.append(p.name) or samplers.iid(p.m, 2))
        assert found == names


# ---- complex exponential features ------------------------------------------------------------------------------------


def test_complex_exponential_features_contain_the_others():
    x = vectors(3, 4)
    y = vectors(5, 4, seed=1)
    noise = samplers.iid(6, 4, seeded(), dtype=torch.float64)

    def product(f):
        return estimate_kernel(f, x, y, noise, f.fit(None))

    for kernel in ("softmax", "gaussian"):
        cases = [
            (PosRF, {"M": 1}),
            (HypRF, {"M": 1, "antithetic": True}),
            (TrigRF, {"M": 1j}),
            (TrigRF, {"M": [1j] * 4}),
            (PosRF, {"M": torch.eye(4)}),
        ]
        for twin, options in cases:
            phi = CERF(kernel, **options)
            twin = twin(kernel)
            assert_close(product(phi), product(twin))
            actual = phi.log_variance(x, y[:3], phi.fit(None))
            expected = twin.log_variance(x, y[:3])
            assert_close(actual, expected)


def test_variance_for_dense_complex_matrices():
    g = seeded(2)
    real = torch.randn(3, 3, generator=g)
    imaginary = torch.randn(3, 3, generator=g)
    M = torch.eye(3) + 0.3 * real + 0.4j * imaginary
    phi = CERF(M=M, antithetic=True)
    draws = 50_000
    x = vectors(2, 3, scale=0.3)
    y = vectors(3, 3, scale=0.3, seed=1)
    noise = draw(phi, 1, 3, (draws,))
    params = phi.fit(None)
    estimate = estimate_kernel(phi, x, y, noise, params)
    square = (estimate - (x @ y.mT).exp()).square()
    closed = phi.log_variance(x[:, None], y[None], params).exp()
    error = check_mean(square, closed)
    assert (error < 0.1 * closed).all()


def test_real_parts_that_cancel_are_not_enough_for_no_variance():
    """M = iI: Re(M) x + Re(M^-T) y = 0 for all pairs, but only w = 0 makes the estimate exact."""
    x = vectors(1, 3)
    y = vectors(1, 3, seed=1)
    phi = CERF(M=1j)
    actual = phi.log_variance(x, y, phi.fit(None))
    assert actual > -20
    actual = phi.log_variance(x, x, phi.fit(None))
    assert actual == -torch.inf


def test_matrices_in_closed_form():
    """Of least |M r + M^-T t|^2 at the centres, and least on average over the pairs of two sets."""
    r = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0])
    t = torch.tensor([-4.0, 2.0, 0.0, 1.0, 0.0])
    found = diagonal_by_centres(r, t)
    actual = found.size.tolist()
    assert actual == [2, 1, 1, 100, 0.01]
    actual = found.imaginary.tolist()
    assert actual == [False, True, False, False, False]
    assert not diagonal_by_centres(r, t, "real").imaginary.any()
    x = vectors(50, 4) + 0.3
    spread = torch.tensor([0.2, 1, 2, 3.0])
    shift = torch.tensor([1, -1, 0, 0.5])
    y = vectors(60, 4, seed=1) * spread - shift

    def mean(t):
        return (t.mean(0), t.square().mean(0))

    for field in ("real", "complex"):
        moments = diagonal_by_moments(*mean(x), *mean(y), field)
        centres = diagonal_by_centres(x.mean(0), y.mean(0), field)

        def loss(M):
            return (M.M * x[:, None] + y / M.M).abs().square().mean((0, 1))

        assert (loss(moments) <= loss(centres) + 1e-9).all()
        for factor in (0.99, 1.01):
            assert (
                loss(moments) <= loss(moments._replace(size=moments.size * factor)) + 1e-6
            ).all()


def test_variance_of_unknown_covariances_is_refused():
    bases = ["oprf A=-0.1", TrigRF()]
    phi = Hybrid(coefficients=["angular"], bases=bases)
    with pytest.raises(NotImplementedError, match="shared=False"):
        phi.log_variance(vectors(6, 3), vectors(6, 3), phi.fit(None))
