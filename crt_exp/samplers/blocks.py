"""Samplers with coupled or independent rows, and their random number functions.

Orthogonal, simplex, Hadamard and Givens rows come in independent blocks; the last block is cut to m rows in total. The
other samplers are i.i.d. or quasi-Monte Carlo. `generator=None` is torch's default generator.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from crt_exp.samplers.noise import DenseNoise, HadamardNoise, Noise
from crt_exp.samplers.threads import threads
from crt_exp.validation import Count, Whole, whole_number

ONE_THREAD = 256  # largest matrix factorised with one thread
U_MARGIN = 2.0**-33  # u is clamped to [U_MARGIN, 1 - U_MARGIN], so |g| <= 6.4


def orthogonal(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    lengths: Literal["chi", "sqrt_d"] = "chi",
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample blocks of d orthogonal rows with Haar directions (Performers 2.4).

    Args:
        lengths: "chi" samples lengths from chi(d), which makes rows exactly Gaussian; "sqrt_d" fixes them, for SMREG.

    >>> rows = orthogonal(4, 4, torch.Generator().manual_seed(0)).rows()
    >>> bool(((rows @ rows.mT).fill_diagonal_(0).abs() < 1e-5).all())
    True
    """
    m, d = check(m, d)
    directions = haar((*batch, -(-m // d), d, d), generator)
    return _rows_of(directions, m, lengths, generator, dtype, gaussian=lengths == "chi")


def simplex(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample blocks of d rows with pairwise cosines -1/(d - 1) (Reid et al. 2023).

    Blocks are randomly rotated with chi(d) lengths, so rows are exactly Gaussian. The variance is lower than with
    orthogonal rows for positive features, but higher for antithetic features (HypRF) and mostly for trigonometric
    features. For d = 1 the sampler is `iid`.

    >>> rows = simplex(3, 3, torch.Generator().manual_seed(0)).rows()
    >>> round(float(torch.cosine_similarity(rows[0], rows[1], dim=0)), 4)
    -0.5
    """
    m, d = check(m, d)
    if d == 1:
        return iid(m, d, generator, batch, dtype)
    rotation = haar((*batch, -(-m // d), d, d), generator)
    directions = (rotation - rotation.mean(-2, keepdim=True)) * (d / (d - 1)) ** 0.5
    return _rows_of(directions, m, "chi", generator, dtype, gaussian=True)


def hadamard(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    blocks: Count = 3,
    lengths: Literal["chi", "fixed", "sqrt_d"] = "chi",
    dtype: torch.dtype = torch.float32,
) -> Noise:
    """Sample rows of sqrt(n) H D_k ... H D_1, k = `blocks` (Performers B.2).

    H is the orthonormal Hadamard matrix, D_i are diagonals of random signs. Rows are not Gaussian, so estimates are
    biased: with k = 1 rows are sign vectors and the bias does not vanish with d; with k = 3 it is 1% to 2% at d = 64.
    Inputs are padded with zeros to n = 2^ceil(log2 d). Rows are orthogonal if d = n, else columns of a stack are.
    Stacks of n rows are independent.

    Args:
        lengths: "chi" samples chi(n), the lengths of Gaussian rows in n dimensions; "fixed" is sqrt(n); "sqrt_d"
            rescales the cut rows, for SMREG.

    >>> noise = hadamard(8, 8, torch.Generator().manual_seed(0))
    >>> noise.project(torch.ones(5, 8)).shape, noise.gaussian
    (torch.Size([5, 8]), False)
    """
    blocks = whole_number(blocks, "blocks")
    m, d = check(m, d)
    n = 2 ** (d - 1).bit_length()
    flips = signs((*batch, -(-m // n), blocks, n), generator) / n**0.5
    kind = "sqrt_d" if lengths == "fixed" else lengths
    scale = row_lengths((*batch, m), n, kind, generator)
    noise = HadamardNoise(flips.to(dtype), scale.to(dtype), d)
    return noise.on_sphere() if lengths == "sqrt_d" else noise


def givens(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    rotations: Whole | None = None,
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample blocks of d orthogonal rows by Kac's random walk (Performers B.2).

    The walk applies `rotations` Givens rotations in random planes. Row signs are random, so the mean is zero for every
    walk; lengths are chi(d). Directions are Haar-distributed only in the limit of many rotations. Projections use the
    dense matrix: applying the rotations to vectors is at least 30 times slower for d = 16 to 256.

    Args:
        rotations: default 4 ceil(d log d).

    >>> rows = givens(4, 4, torch.Generator().manual_seed(0)).rows()
    >>> bool(((rows @ rows.mT).fill_diagonal_(0).abs() < 1e-5).all())
    True
    """
    m, d = check(m, d)
    if rotations is None:
        rotations = 4 * math.ceil(d * math.log(d))
    steps = whole_number(rotations, "rotations", 0)
    unit = torch.diag_embed(signs((*batch, -(-m // d), d), generator))
    directions = kac_walk(unit.flatten(0, -3), steps, generator).view_as(unit)
    return _rows_of(directions, m, "chi", generator, dtype, gaussian=False)


def _rows_of(
    directions: Tensor,
    m: int,
    lengths: str,
    generator,
    dtype: torch.dtype,
    gaussian: bool,
) -> DenseNoise:
    """Cut blocks of unit rows (*batch, stacks, d, d) to m rows and sample lengths."""
    rows = directions.flatten(-3, -2)[..., :m, :]
    rows = rows * row_lengths(rows.shape[:-1], rows.shape[-1], lengths, generator)
    return DenseNoise(rows.to(dtype), gaussian)


def haar(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Sample Haar-distributed orthogonal matrices, float64, shape (..., d, d).

    The result is Q of a Gaussian G = QR with positive diagonal of R. Without this sign convention Q is not
    Haar-distributed and exponential features, which are not even in omega, are biased.

    >>> q = haar((4, 4), torch.Generator().manual_seed(0))
    >>> torch.allclose(q @ q.mT, torch.eye(4, dtype=torch.float64))
    True
    """
    g = normal(shape, generator)
    # more threads do not help small matrices
    with threads(1) if g.shape[-1] <= ONE_THREAD else nullcontext():
        q, r = torch.linalg.qr(g)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * signs.to(q).unsqueeze(-2)


def kac_walk(x: Tensor, steps: int, generator: torch.Generator | None) -> Tensor:
    """Apply `steps` random rotations to the d coordinates of x (B, d, L).

    Each rotation has a random plane and a uniform angle, independent over B.
    """
    count, d, _ = x.shape
    if d == 1 or steps == 0:
        return x
    first = randint(0, d, (steps, count), generator)
    second = (first + randint(1, d, (steps, count), generator)) % d
    angle = 2 * math.pi * uniform((steps, count, 1), generator).to(x.dtype)
    offset = d * torch.arange(count, device=x.device)
    flat = x.flatten(0, 1).clone()
    for i, j, c, s in zip(first + offset, second + offset, angle.cos(), angle.sin()):
        a = flat.index_select(0, i)
        b = flat.index_select(0, j)
        flat.index_copy_(0, i, c * a - s * b)
        flat.index_copy_(0, j, s * a + c * b)
    return flat.view_as(x)


def iid(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample independent Gaussian rows.

    >>> iid(6, 4, torch.Generator().manual_seed(0), batch=(2,))
    DenseNoise(m=6, d=4, batch=(2,))
    """
    m, d = check(m, d)
    return DenseNoise(normal((*batch, m, d), generator).to(dtype), gaussian=True)


def halton(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample quasi-Monte Carlo rows g = Phi^-1(u) from the scrambled Halton sequence.

    Each batch entry has an independent scramble. Rows are exactly Gaussian over scrambles.

    >>> halton(6, 2, torch.Generator().manual_seed(0)).gaussian
    True
    """
    from scipy.stats.qmc import Halton

    m, d = check(m, d)
    return _quasi(lambda seed: Halton(d, seed=seed).random(m), generator, batch, dtype)


def sobol(
    m: int,
    d: int,
    generator: torch.Generator | None = None,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> DenseNoise:
    """Sample quasi-Monte Carlo rows from the scrambled Sobol sequence, as `halton`.

    m = 2^k is most accurate. Other m use the first m of 2^k points, which keeps the estimate unbiased.

    Raises:
        ValueError: d > 21201.

    >>> sobol(8, 2, torch.Generator().manual_seed(0))
    DenseNoise(m=8, d=2, batch=())
    """
    from scipy.stats.qmc import Sobol

    m, d = check(m, d)

    def draw(seed):
        return Sobol(d, seed=seed).random_base2((m - 1).bit_length())[:m]

    return _quasi(draw, generator, batch, dtype, spacing=2.0**-30)


def _quasi(
    draw: Callable,
    generator,
    batch: tuple[int, ...],
    dtype: torch.dtype,
    spacing: float = 0.0,
) -> DenseNoise:
    """Transform points u (m, d) of `draw(seed)` to Gaussian rows.

    The points lie in [0, 1). A jitter of size `spacing` makes their grid continuous.
    """
    import numpy as np

    count = math.prod(batch)
    seeds = randint(0, 2**62, (count,), generator).tolist()
    # of an empty batch one sample gives the shape
    points = np.stack([draw(np.random.default_rng(seed)) for seed in seeds or [0]])
    u = torch.from_numpy(points[:count]).to(device_of(generator))
    if spacing:
        u = u + spacing * uniform(u.shape, generator)
    rows = torch.special.ndtri(u.clamp(U_MARGIN, 1 - U_MARGIN)).to(dtype)
    return DenseNoise(rows.view(*batch, *rows.shape[1:]), gaussian=True)


def normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def randint(
    low: int, high: int, shape: tuple[int, ...], generator: torch.Generator | None
) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=device_of(generator))


def signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return 2.0 * randint(0, 2, shape, generator).double() - 1


def row_lengths(
    shape: tuple[int, ...], d: int, kind: str, generator: torch.Generator | None
) -> Tensor:
    """Return row lengths (*shape, 1)."""
    ones = torch.ones((*shape, 1), dtype=torch.float64, device=device_of(generator))
    if kind == "sqrt_d":
        return ones * d**0.5
    if kind == "chi":
        # chi^2_d is twice a gamma variable of shape d/2: one random number per row instead of d
        return (2 * torch._standard_gamma(ones * d / 2, generator=generator)).sqrt()
    raise ValueError(f"lengths={kind!r}: expected chi, sqrt_d or (hadamard only) fixed")


def device_of(generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else torch.device("cpu")


def check(m: int, d: int) -> tuple[int, int]:
    """Return m and d as ints. Raises ValueError unless both are positive integers."""
    return whole_number(m, "m"), whole_number(d, "d")
