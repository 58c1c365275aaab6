"""Samplers of single points: independent and quasi-Monte Carlo."""

import math
from collections.abc import Callable

import torch

from crt_exp.samplers.draws import check, device_of, gaussian_quantile, normal, randint, uniform
from crt_exp.samplers.noise import DenseNoise

SOBOL_MAX_DIM = 21201  # direction numbers known to scipy


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
