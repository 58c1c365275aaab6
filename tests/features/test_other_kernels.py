"""Kernels with one map: scikit-learn's values, spectral lengths, and the arc-cosine kernels."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from helpers.maps import (
    OTHER_KERNELS,
    SPECTRAL,
    map_names,
)
from helpers.refusals import check_error
from helpers.seeds import seeded
from helpers.vector_pairs import pairs
from sklearn.gaussian_process.kernels import Matern, RationalQuadratic
from sklearn.metrics.pairwise import laplacian_kernel
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.features import (
    OPRF,
    AngularHybrid,
    ArcCosineRF,
    GaussianHybrid,
    GeomRF,
    LaplaceRF,
    MaternRF,
    RationalQuadraticRF,
    Statistics,
    Sum,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, choices

EXACT = (
    {MaternRF(nu=nu): Matern(nu=nu) for nu in (0.5, 1.5, 2.5)}
    | {RationalQuadraticRF(alpha=a): RationalQuadratic(alpha=a) for a in (0.3, 1.0, 7.0)}
    | {LaplaceRF(): lambda x, y: laplacian_kernel(x, y, gamma=1.0)}
)


@pytest.mark.parametrize("phi", SPECTRAL, ids=repr)
def test_kernels_are_those_of_scikit_learn(phi):
    size = (2, 5, 3)
    x, y = np.random.default_rng(0).normal(size=size)
    ours = phi.log_kernel(torch.from_numpy(x)[:, None], torch.from_numpy(y)[None]).exp()
    expected = EXACT[phi](x, y)
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize(
    "phi, d",
    [
        (MaternRF(nu=0.5), 1),
        (MaternRF(nu=2.5), 40),
        (RationalQuadraticRF(alpha=0.3), 1),
        (RationalQuadraticRF(alpha=7.0), 3),
    ],
    ids=repr,
)
def test_squared_lengths_of_spectral_rows(phi, d):
    """F of Student's distribution, and a product of two gamma variables."""
    r = np.random.default_rng(0)
    rows = samplers.iid(20_000, d, seeded(), dtype=torch.float64)
    actual = phi.directions(rows).rows().square().sum(1).numpy()
    if isinstance(phi, MaternRF):
        expected = d * scipy.stats.f(d, 2 * phi.nu).rvs(20_000, random_state=r)
    else:
        expected = 2 * r.gamma(d / 2, size=20_000) * r.gamma(phi.alpha, size=20_000) / phi.alpha
    assert scipy.stats.ks_2samp(expected, actual).pvalue > 1e-3


@pytest.mark.parametrize("phi", [MaternRF(), RationalQuadraticRF()], ids=repr)
def test_directions_stay_orthogonal_and_fast(phi):
    g = seeded()
    rows = phi.directions(samplers.orthogonal(16, 16, g, dtype=torch.float64)).rows()
    cosines = rows @ rows.mT / rows.norm(dim=1) / rows.norm(dim=1)[:, None]
    expected = torch.eye(16, dtype=torch.float64)
    assert_close(cosines, expected, atol=1e-9, rtol=0)
    fast = phi.directions(samplers.hadamard(2048, 1024, g))
    assert fast.matrix_free
    assert isinstance(fast, samplers.HadamardNoise)


def test_arc_cosine_kernels_are_those_of_layers_at_random():
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    steps = ArcCosineRF(order=0).log_kernel(x[:, None], x[None]).exp()
    relus = ArcCosineRF(order=1).log_kernel(x[:, None], x[None]).exp()
    actual = steps[0]
    expected = torch.tensor([1, 0.5, 0, 0.5], dtype=torch.float64)
    assert_close(actual, expected)
    actual = relus[0]
    expected = torch.tensor([9, 6 / math.pi, 0, 0], dtype=torch.float64)
    assert_close(actual, expected)
    noise = samplers.iid(200_000, 2, seeded())
    f = ArcCosineRF(order=0).phi_q(x, noise).exp()
    assert_close(f @ f.mT, steps, atol=0.01, rtol=0)


def test_every_kernel_of_conf_is_under_the_laws():
    own = []
    for name in choices("features"):
        if Mechanism.of(features=name).map(own_kernel=True).own_kernel:
            own.append(name)
    assert own
    assert not {*own} & {*map_names()}
    actual = {Mechanism.of(features=name).map("gaussian", own_kernel=True) for name in own}
    assert actual <= {*OTHER_KERNELS}
    actual = Mechanism.of(features="matern", **{"features.nu": 2.5}).map(
        "gaussian", own_kernel=True
    )
    expected = MaternRF(nu=2.5)
    assert actual == expected
    assert Mechanism.of(features="matern").estimates
    assert Mechanism.of(features="pos").map("gaussian", own_kernel=True).kernel == "gaussian"
    for name in own:
        with pytest.raises(ConfigError, match="has its own kernel"):
            Mechanism.of("favorp", features=name).layer(2, 8)


def test_kernels_of_rows_are_choices_of_tasks_on_tables_alone(typed):
    code, out, err = typed(
        "task=uci",
        "features=matern",
        "features.m=64",
        "task.repeats=1",
        "task.sigmas=[0.3,0.6]",
        "logger=none",
        "hydra.run.dir=run",
    )
    assert code == 0, err
    assert float(out.split("accuracy ")[1].split()[0]) > 0.5, err
    check_error(
        typed("task=projections", "features=matern", "logger=none"),
        "features=matern: has its own kernel",
    )


@pytest.mark.parametrize(
    "phi",
    [
        Sum(OPRF(), GeomRF()),
        AngularHybrid(),
        GaussianHybrid(),
    ],
    ids=["sum", "angular", "gaussian"],
)
def test_second_moment_is_one_and_the_relative_variance(phi):
    x, y = pairs(3)
    x = x[:, None]
    y = y[None]
    params = phi.fit(Statistics.of(*pairs(3)))
    relative = phi.log_variance(x, y, params) - 2 * phi.log_kernel(x, y)
    actual = phi.log_relative_second_moment(x, y, params)
    expected = torch.log1p(relative.exp())
    assert_close(actual, expected)


def test_torch_func_cannot_map_over_projections():
    """Their lengths are converted outside torch, where each mapped entry would get those of all."""
    x = torch.randn(5, 4)

    def features(rows):
        return MaternRF().phi_q(x, samplers.DenseNoise(rows, gaussian=True)).exp()

    with pytest.raises(ValueError, match="map over the vectors"):
        torch.func.vmap(features)(torch.randn(3, 8, 4))
