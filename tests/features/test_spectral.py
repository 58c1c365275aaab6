"""Kernels that have one map: their closed forms, and the laws of their spectral rows."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from covering import in_turn
from maps import OTHER_KERNELS, SPECTRAL, map_names
from sklearn.gaussian_process.kernels import Matern, RationalQuadratic
from sklearn.metrics.pairwise import laplacian_kernel

from crt_exp import samplers
from crt_exp.config import ConfigError, choices
from crt_exp.features import ArcCosineRF, LaplaceRF, MaternRF, RationalQuadraticRF, Statistics
from crt_exp.mechanism import Mechanism

EXACT = {MaternRF(nu=nu): Matern(nu=nu) for nu in (0.5, 1.5, 2.5)} | {
    RationalQuadraticRF(alpha=a): RationalQuadratic(alpha=a) for a in (0.3, 1.0, 7.0)} | {
    LaplaceRF(): lambda x, y: laplacian_kernel(x, y, gamma=1.0)}


@pytest.mark.parametrize("phi", SPECTRAL, ids=repr)
def test_kernels_are_those_of_scikit_learn(phi):
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3))
    ours = phi.log_kernel(torch.from_numpy(x)[:, None], torch.from_numpy(y)[None]).exp()
    np.testing.assert_allclose(ours, EXACT[phi](x, y), rtol=1e-9)


@pytest.mark.parametrize("d", [1, 3, 40])
@pytest.mark.parametrize("phi", [MaternRF(nu=0.5), MaternRF(nu=2.5)], ids=repr)
def test_lengths_of_matern_rows_have_the_law_of_student(phi, d):
    rows = phi.directions(samplers.iid(20_000, d, torch.Generator().manual_seed(0), dtype=torch.float64)).rows()
    law = scipy.stats.f(d, 2 * phi.nu)
    assert scipy.stats.kstest((rows.square().sum(1) / d).numpy(), law.cdf).pvalue > 1e-3
    far = phi.squared_length(np.array([[1e-8, 40.0, 90.0]]), d)[0]
    assert (np.diff(far) > 0).all() and np.isfinite(far).all()


@pytest.mark.parametrize("d", [1, 3, 40])
@pytest.mark.parametrize("alpha", [0.3, 1.0, 7.0])
def test_lengths_of_rational_quadratic_rows(alpha, d):
    phi = RationalQuadraticRF(alpha=alpha)
    r = np.random.default_rng(0)
    drawn = 4 * r.gamma(d / 2, size=20_000) * r.gamma(alpha, size=20_000) / (2 * alpha)
    rows = phi.directions(samplers.iid(20_000, d, torch.Generator().manual_seed(0), dtype=torch.float64)).rows()
    assert scipy.stats.ks_2samp(drawn, rows.square().sum(1).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("phi", [MaternRF(), RationalQuadraticRF()], ids=repr)
def test_directions_stay_orthogonal_and_fast(phi):
    g = torch.Generator().manual_seed(0)
    rows = phi.directions(samplers.orthogonal(16, 16, g, dtype=torch.float64)).rows()
    cosines = rows @ rows.mT / rows.norm(dim=1) / rows.norm(dim=1)[:, None]
    torch.testing.assert_close(cosines, torch.eye(16, dtype=torch.float64), atol=1e-9, rtol=0)
    fast = phi.directions(samplers.hadamard(2048, 1024, g))
    assert fast.matrix_free and isinstance(fast, samplers.HadamardNoise)


@pytest.mark.parametrize("phi, sampler", in_turn(SPECTRAL, [samplers.simplex, samplers.halton,
                                                            samplers.sobol], each=2),
                         ids=lambda value: getattr(value, "__name__", repr(value)))
def test_every_exact_sampler_is_unbiased(phi, sampler):
    g = torch.Generator().manual_seed(0)
    x = torch.tensor([[0.3, -0.2], [0.0, 0.1], [-0.5, 0.4]], dtype=torch.float64)
    noise = sampler(8, 2, g, batch=(400,), dtype=torch.float64)
    f = phi.phi_q(x, noise).exp()
    estimate, exact = f @ f.mT, phi.log_kernel(x[:, None], x[None]).exp()
    error = estimate.std(0) / 400**0.5
    assert error.max() < 0.02 and ((estimate.mean(0) - exact).abs() < 5 * error + 1e-9).all()


def test_arc_cosine_kernels_are_those_of_layers_at_random():
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    steps, relus = (ArcCosineRF(order=n).log_kernel(x[:, None], x[None]).exp() for n in (0, 1))
    torch.testing.assert_close(steps[0], torch.tensor([1, 0.5, 0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(relus[0], torch.tensor([9, 6 / math.pi, 0, 0], dtype=torch.float64))
    noise = samplers.iid(200_000, 2, torch.Generator().manual_seed(0))
    f = ArcCosineRF(order=0).phi_q(x, noise).exp()
    torch.testing.assert_close(f @ f.mT, steps, atol=0.01, rtol=0)


OWN = [name for name in choices("features") if Mechanism.of(features=name).own_kernel]


def test_every_kernel_of_conf_is_under_the_laws():
    assert OWN == ["arc_cosine", "laplace", "matern", "rational_quadratic"] and not {*OWN} & {*map_names()}
    assert {Mechanism.of(features=name).kernel_map() for name in OWN} <= {*OTHER_KERNELS}
    assert Mechanism.of(features="matern", **{"features.nu": 2.5}).kernel_map() == MaternRF(nu=2.5)
    assert Mechanism.of(features=ArcCosineRF(order=0)).kernel_map() == ArcCosineRF(order=0)
    assert Mechanism.of(features="matern").estimates and Mechanism.of(features="pos").kernel_map().kernel == "gaussian"


@pytest.mark.parametrize("name", OWN)
def test_kernels_of_rows_are_choices_of_tasks_on_tables_alone(name, typed):
    code, out, err = typed("task=uci", f"features={name}", "features.m=64", "task.repeats=1", "task.sigmas=[0.3,0.6]",
                           "logger=none", "hydra.run.dir=run")
    assert code == 0 and float(out.split("accuracy ")[1].split()[0]) > 0.5, err
    code, _, err = typed("task=projections", f"features={name}", "logger=none")
    said = f"features={name}: has its own kernel"
    assert code == 2 and said in err and "Traceback" not in err
    with pytest.raises(ConfigError, match="has its own kernel"):
        Mechanism.of("favorp", features=name).layer(2, 8)


BAD = {
    "MaternRF needs chi-distributed lengths": lambda: MaternRF().phi_q(
        torch.ones(2, 4), samplers.orthogonal(8, 4, lengths="sqrt_d")),
    "LaplaceRF needs exactly Gaussian": lambda: LaplaceRF().phi_q(
        torch.ones(2, 4), samplers.hadamard(8, 4)),
    "nu=1: expected 0.5, 1.5 or 2.5": lambda: MaternRF(nu=1),
    "alpha=0: expected a number > 0": lambda: RationalQuadraticRF(alpha=0),
    "order=2: expected 0 or 1": lambda: ArcCosineRF(order=2),
    "kernel=gaussian: expected matern": lambda: MaternRF("gaussian"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_nothing_is_fitted():
    assert MaternRF().fit(Statistics.of(torch.ones(2, 3), torch.ones(2, 3))) == ()
