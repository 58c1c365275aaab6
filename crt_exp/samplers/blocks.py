"""Samplers: rows in blocks of coupled directions, single points, and the seeded float64 numbers that both are made of.

Blocks (orthogonal, simplex, Hadamard, Givens) are independent; the last one is cut to make m rows. Single points are
independent or quasi-Monte Carlo. `generator=None` is torch's default generator.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from crt_exp.options import Count, Whole, whole_number
from crt_exp.samplers.noise import DenseNoise, HadamardNoise, Noise

ONE_THREAD = 256     # columns up to which a factorisation takes one thread
SOBOL_MAX_DIM = 21201  # direction numbers known to scipy
ALWAYS = 2**28   # bytes below which the free memory is not looked up
U_MARGIN = 2.0**-33  # quantiles of u nearer to 0 or 1 are cut: |g| <= 6.4


def orthogonal(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
               lengths: Literal["chi", "sqrt_d"] = "chi", dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Blocks of d mutually orthogonal rows with Haar directions (Performers 2.4). Exact with chi lengths.

    `lengths`: "chi" draws row lengths from chi(d), so rows are exactly Gaussian; "sqrt_d" fixes them (SMREG noise).
    """
    m, d = check(m, d, batch, generator)
    directions = haar((*batch, -(-m // d), d, d), generator)
    return _rows_of(directions, m, lengths, generator, dtype, gaussian=lengths == "chi")


def simplex(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
            dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Blocks of d rows with pairwise cosines -1/(d - 1), randomly rotated, chi(d) lengths (Reid et al. 2023). Exact.

    Less variance than orthogonal rows for positive features; more for antithetic ones (HypRF), whose rows also meet at
    the opposite cosine, and mostly for trigonometric ones. At d = 1: iid.
    """
    m, d = check(m, d, batch, generator)
    if d == 1:
        return iid(m, d, generator, batch, dtype)
    rotation = haar((*batch, -(-m // d), d, d), generator)
    directions = (rotation - rotation.mean(-2, keepdim=True)) * (d / (d - 1)) ** 0.5
    return _rows_of(directions, m, "chi", generator, dtype, gaussian=True)


def hadamard(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
             blocks: Count = 3, lengths: Literal["chi", "fixed", "sqrt_d"] = "chi",
             dtype: torch.dtype = torch.float32) -> Noise:
    """Rows of sqrt(n) H D_k ... H D_1: k = `blocks` products of a Hadamard matrix and random signs (Performers B.2).

    Approximate: not Gaussian. With k = 1 rows are sign vectors, and e_1 sees a kernel of cosh whatever d; k = 3 is
    within one percent or two at d = 64. Any d, by zero padding to n = 2^ceil(log2 d): rows are orthogonal where d = n,
    else the columns of a stack are. Stacks of n rows are independent. `lengths`: "chi" draws chi(n), as Gaussian rows
    have in n dimensions; "fixed" keeps the sqrt(n) of the product; "sqrt_d" puts the cut rows on the sphere (SMREG
    noise).
    """
    blocks = whole_number(blocks, "blocks")
    m, d = check(m, d, batch, generator, row=blocks + 1)
    n = 2 ** (d - 1).bit_length()
    flips = signs((*batch, -(-m // n), blocks, n), generator) / n**0.5
    scale = row_lengths((*batch, m), n, "sqrt_d" if lengths == "fixed" else lengths, generator)
    noise = HadamardNoise(flips.to(dtype), scale.to(dtype), d)
    return noise.on_sphere() if lengths == "sqrt_d" else noise


def givens(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
           rotations: Whole | None = None, dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Blocks of d orthogonal rows from Kac's walk: `rotations` Givens rotations in random planes (Performers B.2).

    Approximate: Haar only as rotations grow; default 4 ceil(d log d). Lengths chi(d). Random signs of the rows make the
    mean zero however short the walk (which alone never leaves the rotations: at d = 1 it would stay at +1). Projections
    are dense: the walk visits two coordinates at a time, in thousands of steps, and was 30 times slower or more at
    every d measured (16, 64, 256).
    """
    m, d = check(m, d, batch, generator)
    steps = 4 * math.ceil(d * math.log(d)) if rotations is None else whole_number(rotations, "rotations", 0)
    start = torch.diag_embed(signs((*batch, -(-m // d), d), generator))
    directions = kac_walk(start.flatten(0, -3), steps, generator).view_as(start)
    return _rows_of(directions, m, "chi", generator, dtype, gaussian=False)


def _rows_of(directions: Tensor, m: int, lengths: str, generator, dtype: torch.dtype, gaussian: bool) -> DenseNoise:
    """Blocks of unit rows (*batch, stacks, d, d) -> m rows with independent lengths."""
    rows = directions.flatten(-3, -2)[..., :m, :]
    return DenseNoise((rows * row_lengths(rows.shape[:-1], rows.shape[-1], lengths, generator)).to(dtype), gaussian)


def haar(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Haar-distributed orthogonal matrices, float64, shape (..., d, d).

    The Q of G = QR, G Gaussian, with a positive diagonal of R. Without that sign LAPACK's Q is not Haar (the mean of
    Q_00 is about -0.3 at d = 4), and exponential features, which are not even in omega, are biased.
    """
    g = normal(shape, generator)
    with one_thread() if g.shape[-1] <= ONE_THREAD else nullcontext():
        q, r = torch.linalg.qr(g)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q).unsqueeze(-2)


@contextmanager
def one_thread():
    """For factorisations of small matrices: a second thread gains nothing there, and on a busy
    machine is waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def kac_walk(x: Tensor, steps: int, generator: torch.Generator | None) -> Tensor:
    """x (B, d, L) turned by `steps` rotations of the d coordinates, each in its own random plane by a uniform angle."""
    count, d, _ = x.shape
    if d == 1 or steps == 0:
        return x
    first = randint(0, d, (steps, count), generator)
    second = (first + randint(1, d, (steps, count), generator)) % d
    angle = 2 * math.pi * uniform((steps, count, 1), generator).to(x.dtype)
    offset = d * torch.arange(count, device=x.device)
    flat = x.flatten(0, 1).clone()
    for i, j, c, s in zip(first + offset, second + offset, angle.cos(), angle.sin()):
        a, b = flat.index_select(0, i), flat.index_select(0, j)
        flat.index_copy_(0, i, c * a - s * b).index_copy_(0, j, s * a + c * b)
    return flat.view_as(x)


def iid(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Independent Gaussian rows. Exact."""
    m, d = check(m, d, batch, generator)
    return DenseNoise(normal((*batch, m, d), generator).to(dtype), gaussian=True)


def halton(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (), scramble: bool = True,
           dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Quasi-Monte Carlo rows g = Phi^-1(u) of the Halton sequence, one independent scramble per batch entry.

    Exact when scrambled (each row is Gaussian over scrambles). `scramble=False`, for reference, is deterministic and
    biased (the point 0 is dropped), and poor beyond some 50 dimensions.
    """
    from scipy.stats.qmc import Halton

    m, d = check(m, d, batch, generator)
    skip = 0 if scramble else 1

    def draw(seed):
        return Halton(d, scramble=scramble, seed=seed).random(m + skip)[skip:]

    return _quasi(draw, generator, batch, scramble, dtype)


def sobol(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (), scramble: bool = True,
          dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Quasi-Monte Carlo rows of the Sobol sequence; otherwise as `halton`. Best at m = 2^k; d <= 21201.

    Other m keep the first m of 2^k points, which leaves each row exactly Gaussian and so the estimate unbiased.
    """
    from scipy.stats.qmc import Sobol

    m, d = check(m, d, batch, generator)
    if d > SOBOL_MAX_DIM:
        raise ValueError(f"d = {d}: Sobol points exist up to d = {SOBOL_MAX_DIM}; use halton or orthogonal")
    skip = 0 if scramble else 1

    def draw(seed):
        points = Sobol(d, scramble=scramble, seed=seed).random_base2((m + skip - 1).bit_length())
        return points[skip:m + skip]

    return _quasi(draw, generator, batch, scramble, dtype, spacing=2.0**-30 if scramble else 0.0)


def _quasi(draw: Callable, generator, batch: tuple[int, ...], scramble: bool, dtype,
           spacing: float = 0.0) -> DenseNoise:
    """`draw(seed)` gives points u (m, d) in [0, 1), multiples of `spacing`, which a jitter makes continuous."""
    import numpy as np

    count = math.prod(batch) if scramble else 1
    seeds = randint(0, 2**62, (count,), generator).tolist() if scramble else [None]
    u = torch.from_numpy(np.stack([draw(np.random.default_rng(seed)) for seed in seeds])).to(device_of(generator))
    if spacing:
        u = u + spacing * uniform(u.shape, generator)
    g = gaussian_quantile(u).to(dtype)
    rows = g.view(*batch, *g.shape[1:]) if scramble else g[0].expand(*batch, *g.shape[1:])
    return DenseNoise(rows, gaussian=scramble)


def normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def randint(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=device_of(generator))


def signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return 2.0 * randint(0, 2, shape, generator).double() - 1


def row_lengths(shape: tuple[int, ...], d: int, kind: str, generator: torch.Generator | None) -> Tensor:
    """Row lengths (*shape, 1)."""
    if kind == "chi":  # chi^2_d is twice a gamma variable of shape d/2: one number a row instead of d
        half = torch.full((*shape, 1), d / 2, dtype=torch.float64, device=device_of(generator))
        return (2 * torch._standard_gamma(half, generator=generator)).sqrt()
    if kind == "sqrt_d":
        return torch.full((*shape, 1), d**0.5, dtype=torch.float64, device=device_of(generator))
    raise ValueError(f"unknown lengths {kind!r}: choose chi (Gaussian rows), sqrt_d (rows on the sphere) or, for "
                     "hadamard, fixed")


def gaussian_quantile(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.clamp(U_MARGIN, 1 - U_MARGIN))


def device_of(generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else torch.device("cpu")


def check(m: int, d: int, batch: tuple[int, ...] = (), generator: torch.Generator | None = None,
          row: int | None = None) -> tuple[int, int]:
    """Projections and dimension as ints. Raises ValueError for sizes that are no counts, or too large for the memory.

    row: numbers drawn for each of m, else d.
    """
    m = whole_number(m, "m")
    d = whole_number(d, "d")
    size = 8 * math.prod(batch) * m * (row or d)
    if size > ALWAYS and size > (free := free_memory(device_of(generator))):
        heads = f" for {math.prod(batch)} heads" if batch else ""
        raise ValueError(f"m = {m}: projections of dimension {d}{heads} take {size / 2**30:.1f} GiB, and "
                         f"{free / 2**30:.1f} GiB of memory are free; choose fewer (features.m)")
    return m, d


def available() -> float:
    """Bytes of the machine's memory that can still be had; infinity where the system does not say."""
    table = Path("/proc/meminfo")
    lines = dict(line.split(":", 1) for line in table.read_text().splitlines()) if table.is_file() else {}
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else math.inf


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had: of the GPU, or of the machine or the container around this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = available()
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
