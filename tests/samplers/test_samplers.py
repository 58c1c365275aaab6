"""Samplers: Gaussian rows where promised, orthogonal blocks, Haar directions,
one projection for every path."""

import math
from functools import partial

import pytest
import scipy.linalg
import torch
from helpers.covering import in_turn
from helpers.seeds import seeded
from scipy.stats import kstest
from torch.testing import assert_close

from crt_exp import samplers
from crt_exp.features import SMREG, GeomRF, PoisRF, PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices
from crt_exp.samplers import (
    givens,
    hadamard,
    iid,
    measured_bias,
    noise,
    orthogonal,
    simplex,
    sobol,
)
from crt_exp.samplers.blocks import haar
from crt_exp.samplers.noise import fwht

# All of conf/sampler, as the files say; one that is not exact stands here with its reason, and the laws of the others
# run over the rest.
INEXACT = {
    "hadamard": "signs in place of Gaussian numbers",
    "givens": "a walk of a finite number of steps",
}
PRESETS = {name: Mechanism.of(features="pos", sampler=name).sampler for name in choices("sampler")}
EXACT = [PRESETS[name] for name in PRESETS if name not in INEXACT]
APPROXIMATE = [
    *(PRESETS[name] for name in INEXACT),
    partial(hadamard, blocks=1),
    partial(hadamard, lengths="fixed"),
    partial(hadamard, lengths="sqrt_d"),
    partial(orthogonal, lengths="sqrt_d"),
]
ALL = EXACT + APPROXIMATE
SHAPES = [
    (1, 1),
    (5, 1),
    (3, 4),
    (4, 4),
    (11, 4),
    (7, 6),
]  # m < d, m = d, m no multiple of d, d no power of two


def name(sampler):
    own = next((name for name, preset in PRESETS.items() if preset is sampler), None)
    return own or "-".join([sampler.func.__name__, *map(str, sampler.keywords.values())])


def rows(sampler, m, d, draws, seed=0):
    """(draws, m, d), float64."""
    return sampler(m, d, seeded(seed), batch=(draws,), dtype=torch.float64).rows()


def within(values, target, errors=5.0):
    """The mean over draws lies within so many standard errors of its target."""
    sem = values.std(0) / len(values) ** 0.5
    return bool(((values.mean(0) - target).abs() <= errors * sem + 1e-12).all())


@pytest.mark.parametrize("sampler", ALL, ids=name)
@pytest.mark.parametrize("batch", [(0,), (2, 0)])
def test_an_empty_batch_has_no_rows(sampler, batch):
    actual = sampler(5, 3, seeded(), batch=batch).rows().shape
    assert actual == (*batch, 5, 3)


@pytest.mark.parametrize("sampler", ALL, ids=name)
def test_shapes_seeds_and_batches(sampler):
    batches = [(), (), (3,), (2, 3), (2,), (2, 3)]
    for (m, d), batch in zip(SHAPES, batches):
        one = sampler(m, d, seeded(1), batch=batch)
        same = sampler(m, d, seeded(1), batch=batch)
        other = sampler(m, d, seeded(2), batch=batch)
        assert one.m == m
        assert one.d == d
        assert one.batch == batch
        assert one.rows().shape == (*batch, m, d)
        assert one.sq_norm.shape == (*batch, 1, m)
        assert one.rows().dtype == torch.float32
        assert one.rows().isfinite().all()
        assert torch.equal(one.rows(), same.rows())
        expected = one.rows().square().sum(-1).unsqueeze(-2)
        assert_close(one.sq_norm, expected, rtol=1e-5, atol=1e-6)
        if batch:
            actual = one.rows()[0]
            expected = one.rows()[1]
            assert not torch.equal(actual, expected)
            assert not torch.equal(one.rows(), other.rows())
    torch.manual_seed(5)
    first = sampler(6, 4).rows()
    torch.manual_seed(5)
    actual = sampler(6, 4).rows()
    assert torch.equal(actual, first)


def test_maps_of_gaussian_rows_refuse_others():
    x = torch.ones(2, 4)
    for sampler in ALL:
        rows_of = sampler(6, 4, seeded())
        assert rows_of.gaussian == (sampler in EXACT), name(sampler)
        cases = [PoisRF(rate=0.5), GeomRF(p=0.5)]
        for phi in cases:
            if rows_of.gaussian:
                assert phi.phi_q(x, rows_of, phi.fit(None)).log_scale.isfinite().all(), name(
                    sampler
                )
            else:
                with pytest.raises(ValueError, match="exactly Gaussian projections"):
                    phi.phi_q(x, rows_of, phi.fit(None))


@pytest.mark.parametrize("sampler", PRESETS.values(), ids=PRESETS)
def test_mean_zero_and_identity_covariance(sampler, d=3):
    """Of each row, also those of the cut last block."""
    w = rows(sampler, d + 2, d, 1500)
    assert within(w, 0)
    assert within(w.unsqueeze(-1) * w.unsqueeze(-2), torch.eye(d))


@pytest.mark.parametrize(
    "sampler, m, d",
    [*((sampler, 6, 4) for sampler in EXACT), (PRESETS["simplex"], 5, 1)],
    ids=lambda value: name(value) if callable(value) else str(value),
)
def test_every_entry_is_standard_normal(sampler, m, d):
    """Kolmogorov-Smirnov over draws, and along a direction that mixes coordinates; m no power of two."""
    w = rows(sampler, m, d, 1500, seed=1)
    direction = torch.ones(d, dtype=torch.float64) / d**0.5
    columns = torch.cat([w.flatten(1), w @ direction], -1)
    pvalues = []
    for column in columns.T:
        pvalues.append(kstest(column.numpy(), "norm").pvalue)
    assert min(pvalues) > 0.01 / len(pvalues)


@pytest.mark.parametrize("sampler", [PRESETS["orthogonal"], PRESETS["givens"]], ids=name)
def test_blocks_are_orthogonal(sampler):
    for m, d in SHAPES:
        for block in rows(sampler, m, d, 20).split(d, dim=-2):
            gram = block @ block.mT
            assert (
                gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
            ).abs().max() < 1e-10 * d, (m, d)


def hadamard_matrix(n):
    return torch.from_numpy(scipy.linalg.hadamard(n)).double()


def test_hadamard_is_the_product():
    draw = hadamard(8, 8, seeded(), blocks=3, lengths="fixed", dtype=torch.float64)
    h = hadamard_matrix(8) / 8**0.5
    product = torch.eye(8).double()
    for signs in draw.signs[0]:
        product = h @ torch.diag(signs * 8**0.5) @ product
    assert_close(draw.rows(), 8**0.5 * product)


def test_fwht_is_the_hadamard_product():
    for n in (1, 2, 64, 128, 1024):
        x = torch.randn(3, n, generator=seeded(), dtype=torch.float64)
        assert_close(fwht(x), x @ hadamard_matrix(n))
    long = torch.randn(128, 64, generator=seeded(), dtype=torch.float64)  # three factors
    product = hadamard_matrix(128) @ long @ hadamard_matrix(64)
    assert_close(fwht(long.flatten()), product.flatten())


@pytest.mark.parametrize("d", [2, 6])
def test_simplex_cosines(d):
    for block in rows(simplex, 2 * d, d, 20).split(d, dim=-2):
        unit = block / block.norm(dim=-1, keepdim=True)
        expected = torch.eye(d).double() * (1 + 1 / (d - 1)) - 1 / (d - 1)
        expected = expected.expand(20, d, d)
        assert_close(unit @ unit.mT, expected)


@pytest.mark.parametrize("d", [1, 4])
def test_haar(d):
    """Signs fixed: without that the mean of Q_00 is -0.28 at d = 4, and never positive at all."""
    q = haar((20_000, d, d), seeded())
    difference = (q @ q.mT - torch.eye(d)).abs().max()
    assert difference < 1e-10
    assert within(q, 0)
    assert within(q.square(), 1 / d)
    assert within(q[:, 0, 0] ** 4, 3 / (d * (d + 2)))


@pytest.mark.parametrize("d", [3, 8])
def test_row_lengths(d):
    """chi(d) has E r^2 = d and E r^4 = d (d + 2); the others are fixed. Independent of each other within a block."""
    n = 2 ** math.ceil(math.log2(d))
    for sampler in (orthogonal, simplex, givens):
        sq = rows(sampler, d, d, 4000).square().sum(-1)
        assert within(sq, d)
        assert within(sq**2, d * (d + 2))
        assert within(sq[:, 0] * sq[:, 1], d * d)
    cases = [partial(orthogonal, lengths="sqrt_d"), partial(hadamard, lengths="sqrt_d")]
    for sampler in cases:
        sq = rows(sampler, d + 2, d, 50).square().sum(-1)
        expected = torch.full((50, d + 2), float(d)).double()
        assert_close(sq, expected)
    fixed = rows(partial(hadamard, lengths="fixed"), n, d, 50)
    fixed = fixed.square().sum((-2, -1))
    expected = torch.full((50,), float(n * d)).double()
    assert_close(fixed, expected)
    draw = hadamard(d, d, seeded(), batch=(4000,), dtype=torch.float64)
    chi = draw.lengths.squeeze(-1).square()
    assert within(chi, n)
    assert within(chi**2, n * (n + 2))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sobol(4, 21202), "Maximum supported dimensionality is 21201"),
        (lambda: hadamard(4, 4, blocks=0), "blocks=0"),
        (lambda: iid(True, 4), "expected an integer >= 1"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "sampler, rounding",
    in_turn(ALL, [(torch.float64, 1e-12), (torch.float32, 1e-5)]),
    ids=lambda value: name(value) if callable(value) else str(value),
)
def test_project_is_the_product(sampler, rounding):
    """Also against the matrix-free path, with batched noise, broadcast heads and gradients."""
    dtype, tolerance = rounding
    x = torch.randn(2, 3, 5, 6, generator=seeded(1), dtype=dtype)
    cases = [(), (3,), (2, 1), (2, 3)]
    for batch in cases:
        draw = sampler(11, 6, seeded(), batch=batch, dtype=torch.float64).to(dtype)
        expected = x @ draw.rows().mT
        paths = [draw.project]
        if isinstance(draw, samplers.HadamardNoise):
            paths.append(draw._transform)
        for project in paths:
            leaf = x.clone().requires_grad_()
            out = project(leaf)
            assert_close(out, expected, rtol=tolerance, atol=10 * tolerance)
            weight = torch.randn(out.shape, generator=seeded(2), dtype=dtype)
            (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
            assert_close(gradient, weight @ draw.rows(), rtol=tolerance, atol=100 * tolerance)


@pytest.mark.parametrize(
    "m, d, free",
    [
        (1024, 1024, True),
        (2048, 600, False),
        (64, 64, False),
    ],
)
def test_hadamard_path_switches(m, d, free):
    draw = hadamard(m, d, seeded())
    assert draw.matrix_free == free
    x = torch.randn(4, d, generator=seeded())
    actual = draw.project(x)
    expected = x @ draw.rows().mT
    assert_close(actual, expected, rtol=1e-3, atol=1e-2)
    actual = draw.to(torch.float64).project(x.double()).dtype
    assert actual == torch.float64


@pytest.mark.parametrize("draw", [hadamard(8, 8, seeded()), iid(8, 8, seeded())], ids=repr)
def test_projection_is_float32_at_least(draw):
    """And of rows in float32, not rounded under autocast."""
    x = torch.randn(2, 8, generator=seeded()).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = draw.project(x)
    expected = x.float() @ draw.rows().mT
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_inference_first_then_training():
    """What a first pass in inference mode keeps must serve a later backward pass."""
    noise._hadamard_matrix.cache_clear()
    cases = [hadamard(8, 8, seeded()), hadamard(1024, 1024, seeded())]
    for draw in cases:
        x = torch.ones(2, draw.d)
        with torch.inference_mode():
            draw.project(x), draw.sq_norm
        x.requires_grad_()
        a = torch.ones((), requires_grad=True)
        (draw.project(x).sum() + (a * draw.sq_norm).sum()).backward()
        assert x.grad.isfinite().all()
        assert a.grad.isfinite()


def test_on_sphere():
    cases = [
        iid(9, 3, seeded()),
        hadamard(9, 8, seeded()),
        hadamard(64, 3, seeded(), batch=(50,), blocks=3),
    ]
    for draw in cases:
        sphere = draw.on_sphere()
        lengths = sphere.rows().square().sum(-1)
        assert not sphere.gaussian
        assert_close(
            lengths, torch.full_like(lengths, draw.d), rtol=1e-4, atol=0
        )  # zero rows included


RATIOS = {(1, "fixed"): 0.50, (2, "chi"): 1.07, (3, "fixed"): 0.93}


@pytest.mark.parametrize("blocks, lengths", RATIOS)
def test_measured_bias_of_hadamard(blocks, lengths):
    """PosRF at x = y = e_1, d = 64: one block sees a cosh, more blocks come near;
    the printed values have errors of 0.02."""
    x = torch.eye(64)[:1]
    sampler = partial(hadamard, blocks=blocks, lengths=lengths)
    bias = measured_bias(PosRF(), sampler, x, x, draws=1500, generator=seeded())
    assert bias.error < 0.025
    difference = abs(bias.ratio - RATIOS[blocks, lengths])
    assert difference < 5 * math.hypot(bias.error, 0.02)
    if blocks == 1 and lengths == "fixed":
        difference = abs(bias.ratio - math.cosh(2) * math.exp(-2))
        assert difference < 5 * bias.error


def test_measured_bias_shows():
    """Lengths sqrt(d) estimate SMREG, not the softmax kernel: the ratio is known."""
    x = torch.tensor([[0.9, 0.3, 0.0, 0.0], [0.1, 0.0, 0.2, 0.0]])
    bias = measured_bias(
        PosRF(), partial(orthogonal, lengths="sqrt_d"), x, x, draws=4000, generator=seeded()
    )
    softmax = (x.double() * x).sum(-1)
    known = (SMREG().log_kernel(x, x) - softmax).exp()
    assert ((bias.ratio - known).abs() < 5 * bias.error).all()
    actual = bias.ratio[0] + 5 * bias.error[0]
    assert actual < 1
