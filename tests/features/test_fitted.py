"""Dense-exponential features: their fitted parameters are the best ones; any parameters are unbiased."""

import pytest
import torch
from helpers.kernel_estimates import estimate_kernel
from helpers.sampled_means import check_mean
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import Mechanism, samplers
from crt_exp.attention import (
    attention,
)
from crt_exp.features import (
    OPRF,
    SDERF,
    Hedgehog,
    Moments,
    PosRF,
    Statistics,
)
from crt_exp.features.base import NotFinite
from crt_exp.features.dense import SDERFParams, balance
from crt_exp.samplers.noise import map_leaves

DENSE = [
    SDERF("gaussian"),
    SDERF(balance=False),
    SDERF(antithetic=True),
    SDERF(diagonal=True, centred=False),
]


def vectors(d=6, n=60, seed=0, apart=0.5):
    """Queries and keys (n, d) of other spreads and means, float64."""
    g = seeded(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def spread():
        rows = draw(n, d)
        directions = draw(d, d) * draw(d).exp() / (2 * d**0.5)
        return rows @ directions

    x = spread()
    y = spread()
    return x + apart * draw(d), y + apart * draw(d)


def moment(phi, x, y, params=None):
    """The mean over all pairs of the log second moment, relative to the squared kernel."""
    if params is None:
        params = phi.fit(Statistics.of(x, y))
    return phi.log_relative_second_moment(x[:, None], y[None], params).mean().item()


# ---- the fit


@pytest.mark.parametrize("seed", range(2))
def test_each_fitted_parameter_lowers_the_mean_log_second_moment(seed):
    x, y = vectors(seed=seed)
    plain = {"centred": False, "balance": False}
    order = [
        SDERF(),
        SDERF(balance=False),
        SDERF(**plain),
        SDERF(diagonal=True, **plain),
        OPRF(),
        PosRF(),
    ]
    actual = [moment(phi, x, y) for phi in order]
    assert actual == sorted(actual)
    assert actual[-1] > actual[0] + 1
    diagonal = []
    for balanced in (None, False):
        diagonal.append(moment(SDERF(diagonal=True, balance=balanced), x, y))
    assert actual[0] < diagonal[0] < diagonal[1]


@pytest.mark.parametrize(
    "phi",
    [
        SDERF(balance=False),
        SDERF(balance=False, centred=False),
        SDERF(diagonal=True),
        SDERF("gaussian"),
    ],
    ids=repr,
)
def test_no_other_root_or_shift_is_better(phi):
    """Whatever G is: R and h are the best ones for it."""
    x, y = vectors()
    params = phi.fit(Statistics.of(x, y))
    g = seeded(1)
    best = moment(phi, x, y, params)
    for size in (1e-3, 0.1):
        for _ in range(5):
            change = size * torch.randn(params.root.shape, generator=g, dtype=torch.float64)
            root = (
                params.root + (change if phi.diagonal else change + change.mT) * params.root.mean()
            )
            assert (
                moment(
                    phi, x, y, params._replace(root=root.clamp(min=0.8) if phi.diagonal else root)
                )
                >= best
            )
            if params.shift is not None:
                shift = params.shift + size * torch.randn(
                    params.shift.shape, generator=g, dtype=torch.float64
                )
                actual = moment(phi, x, y, params._replace(shift=shift))
                assert actual >= best


@pytest.mark.parametrize("diagonal", [False, True])
def test_balance_gives_both_sides_the_same_second_moments(diagonal):
    x, y = vectors()
    G = SDERF(diagonal=diagonal).fit(Statistics.of(x, y)).balance
    if diagonal:
        of_x = x * G
        of_y = y / G
    else:
        of_x = x @ G.mT
        of_y = y @ torch.linalg.inv(G)
    a = torch.cov(of_x.mT)
    b = torch.cov(of_y.mT)
    a, b = (a.diagonal(), b.diagonal()) if diagonal else (a, b)
    assert_close(a, b, rtol=0.05, atol=0.01 * float(a.abs().max()))  # up to the ridge
    expected = G.mT if not diagonal else G
    assert_close(G, expected)


def test_balance_of_one_side_that_lies_in_a_plane_is_finite_and_moderate():
    x, y = vectors(n=200)
    x[:, 2:] = 0
    G = balance(torch.cov(x.mT), torch.cov(y.mT))
    sizes = torch.linalg.eigvalsh(G)
    assert (sizes > 1e-3).all()
    assert (sizes < 1e3).all()
    none = torch.zeros(2, 4, 4, dtype=torch.float64)
    actual = balance(none, none)
    expected = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    assert_close(actual, expected)


def test_parameters_of_nothing_are_those_of_favor_plus():
    zeros = torch.zeros(2, 1, 4)
    for phi in (SDERF(), SDERF(diagonal=True)):
        params = phi.fit(Statistics.of(zeros, zeros))
        assert (params.A.abs() < 1e-12).all()
        assert (params.shift == 0).all()
        x = torch.randn(2, 3, 4)
        noise = samplers.iid(5, 4, seeded())
        actual = phi.phi_k(x, noise, params).exp()
        expected = PosRF().phi_k(x, noise).exp()
        assert_close(actual, expected)


@pytest.mark.parametrize("phi", DENSE, ids=repr)
def test_any_parameters_are_unbiased(phi):
    """R, h and G of other vectors, and trained ones far from every fit: a stale fit costs variance alone."""
    x, y = vectors(d=3)
    x = x[:4] / 2
    y = y[:4] / 2
    params = phi.fit(Statistics.of(*vectors(d=3, seed=5)))
    g = seeded(2)
    noise = samplers.orthogonal(4, 3, g, batch=(20_000,), dtype=torch.float64)

    def move(t):
        return t + 0.1 * torch.randn(t.shape, generator=g, dtype=torch.float64)

    cases = [params, phi.admitted(map_leaves(move, params))]
    for own in cases:
        estimate = estimate_kernel(phi, x, y, noise, own)
        exact = phi.log_kernel(x[:, None], y[None]).exp()
        error = check_mean(estimate, exact)
        assert (error < 0.2 * exact).float().mean() > 0.5


# ---- what leaves softmax unchanged


@pytest.mark.parametrize("phi", [SDERF(diagonal=True), SDERF(antithetic=True)], ids=repr)
def test_shifts_change_no_error_and_no_attention(phi):
    x, y = vectors(d=4)
    shift = torch.tensor([3.0, -2.0, 1.0, 5.0], dtype=torch.float64)
    actual = moment(phi, x + shift, y - 2 * shift)
    expected = moment(phi, x, y)
    assert actual == pytest.approx(expected, rel=1e-9)
    noise = samplers.orthogonal(8, 4, seeded(), dtype=torch.float64)
    v = torch.randn(60, 3)

    def run(y):
        return attention(
            x[None, None], y[None, None], v[None, None], phi, noise, phi.fit(Statistics.of(x, y))
        )

    actual = run(y + shift)
    assert_close(actual, run(y), rtol=1e-8, atol=1e-10)


# ---- statistics


def test_covariances_of_all_kinds_of_moments():
    x = torch.randn(3, 9, 4) + 2
    mask = torch.rand(3, 9, generator=seeded()) > 0.3
    own = Moments.from_vectors(x.masked_fill(~mask[..., None], torch.nan), mask, scale=0.5)
    for i in range(3):
        expected = torch.cov(0.5 * x[i][mask[i]].double().mT, correction=0)
        assert_close(own.covariance[i], expected, rtol=1e-6, atol=1e-9)
    known = Moments.from_values(mean=own.mean, second=own.second)
    assert_close(known.covariance, own.covariance, rtol=1e-5, atol=1e-6)
    assert_close(own.mirrored(["mean", "second"]).covariance, own.second)
    actual = own.second.diagonal(dim1=-2, dim2=-1)
    assert_close(actual, own.mean_sq.double(), rtol=1e-5, atol=1e-6)


def test_favorsharp_is_dense_centred_balanced_and_antithetic():
    actual = Mechanism.of("favorsharp").map()
    expected = SDERF(antithetic=True)
    assert actual == expected
    assert SDERF().centred
    assert SDERF().balanced


# ---- what is refused

WITHOUT_SECOND = Moments.from_values(mean=torch.zeros(3), mean_sq=torch.ones(3))
BAD = {
    "d=257: expected at most 256": lambda: SDERF().fit(
        Statistics.of(torch.zeros(2, 257), torch.zeros(2, 257))
    ),
    "balance=True: expected kernel='softmax'": lambda: SDERF("gaussian", balance=True),
    "no 'covariance'": lambda: SDERF().fit(Statistics(WITHOUT_SECOND, WITHOUT_SECOND)),
    "estimate no kernel": lambda: Hedgehog().log_kernel(torch.ones(2), torch.ones(2)),
    "expected softmax": lambda: Hedgehog("gaussian"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((ValueError, AttributeError, NotImplementedError), match=message):
        BAD[message]()


def test_vectors_that_are_not_finite_are_refused_and_the_diagonal_has_no_limit():
    for phi in (SDERF(), SDERF(diagonal=True)):
        with pytest.raises(NotFinite, match="fitted A: not finite"):
            phi.fit(Statistics.of(torch.full((3, 2), torch.inf), torch.zeros(3, 2)))
    wide = torch.randn(2, 300)
    actual = SDERF(diagonal=True).fit(Statistics.of(wide, wide)).root.shape
    assert actual == (1, 300)
    assert isinstance(SDERF().fit(Statistics.of(wide[:, :256], wide[:, :256])), SDERFParams)
