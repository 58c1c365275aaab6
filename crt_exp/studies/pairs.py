"""Errors of kernel estimates, pair by pair: the one place where studies measure them, and their closed form.

Legend: n pairs x, y (n, d) float64; D draws of the noise; SM(x, y) = exp(x.y). Errors are relative to SM, so that
nothing overflows: that of an estimate is estimate / SM - 1.
"""

import math
import zlib

import torch
from torch import Tensor

from crt_exp.features import FeatureMap
from crt_exp.features.base import Params
from crt_exp.mechanism import Mechanism
from crt_exp.nested import Nested
from crt_exp.samplers.bias import estimate_ratios

AT_ONCE = 2**24  # numbers of features that are held for a block of draws


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))


def drawn(phi: FeatureMap, mechanism: Mechanism, m: int, d: int, g: torch.Generator, batch: tuple[int, ...]) -> Nested:
    """Noise for the map, of the mechanism's sampler."""
    return phi.noise(m, lambda p: mechanism.sampler(p.m, d, g, batch=batch))


def drawn_ratios(phi: FeatureMap, mechanism: Mechanism, m: int, x: Tensor, y: Tensor, params: Params, draws: int,
                 g: torch.Generator) -> Tensor:
    """Estimates over SM of so many draws of the noise: (draws, n); of x and y (1, *heads, n, d): (draws, *heads, n)."""
    bias = torch.exp(phi.log_kernel(x, y) - (x * y).sum(-1))  # 1 but for SMREG
    block, ratios = max(1, AT_ONCE // (x[..., 0].numel() * phi.width(m))), []
    for start in range(0, draws, block):
        batch = (min(block, draws - start), *[1] * max(0, x.ndim - 3))
        noise = drawn(phi, mechanism, m, x.shape[-1], g, batch)
        ratios.append(bias * estimate_ratios(phi, x, y, noise, params))
    return torch.cat(ratios)


def squared_errors(phi: FeatureMap, mechanism: Mechanism, x: Tensor, y: Tensor, params: Params, groups: int,
                   draws: int, seed: int) -> Tensor:
    """Mean squared relative errors over `draws` draws, for each of `groups` groups of them: (groups, n).

    Groups are independent; one seed gives the same rows to all maps that take as many of them.
    """
    ratios = drawn_ratios(phi, mechanism, mechanism.m, x, y, params, groups * draws, generator(seed))
    return (ratios - 1).square().unflatten(0, (groups, draws)).mean(1)


def log_relative_mse(phi: FeatureMap, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
    """log E (estimate / SM - 1)^2 with m iid projections, pair by pair, by the closed forms; of maps that estimate
    another kernel (SMREG) with the bias."""
    logits = (x * y).sum(-1)
    log_bias = phi.log_kernel(x, y) - logits  # 0 but for SMREG
    variance = phi.log_mse(x, y, params, m) - 2 * logits
    return torch.logaddexp(variance, 2 * torch.expm1(log_bias).abs().log())


# ---- pairs of vectors


def at_angles(theta: Tensor, r: float, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """x and y (n, d) of length r at angles theta (n,), each pair in a random plane. Raises ValueError for d < 2."""
    if d < 2:
        raise ValueError(f"d = {d}: vectors at an angle need at least two dimensions")
    u, v = torch.randn(2, len(theta), d, generator=g, dtype=torch.float64)
    u = u / u.norm(dim=-1, keepdim=True)
    v = v - (v * u).sum(-1, keepdim=True) * u
    v = v / v.norm(dim=-1, keepdim=True)
    return r * u, r * (theta.cos()[:, None] * u + theta.sin()[:, None] * v)



def angles_of(n: int) -> Tensor:
    """n angles from 0 to pi, both included."""
    return torch.linspace(0.0, math.pi, n, dtype=torch.float64)
