"""Monte Carlo estimates of the bias of approximate samplers."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.samplers.noise import Noise

PAIRS = 16  # of vectors, for the record of a run


class Bias(NamedTuple):
    """Ratio of mean estimate to exact kernel, with its standard error.

    >>> Bias(ratio=torch.ones(1), error=torch.full((1,), 0.01)).error
    tensor([0.0100])
    """

    ratio: Tensor
    error: Tensor


def measured_bias(
    phi,
    sampler: Callable,
    x: Tensor,
    y: Tensor,
    params=(),
    draws: int = 2000,
    generator: torch.Generator | None = None,
) -> Bias:
    """Estimate the bias of a feature map under a sampler, with d projections (one block).

    A ratio of 1 within the standard error means no detectable bias. The standard error is underestimated if the
    relative variance is large (positive features at large |x + y|).

    Args:
        x: queries (pairs, d).
        y: keys (pairs, d).
        draws: number of independent samples.

    Returns:
        Ratio and standard error, (pairs,) each.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import iid
    >>> bias = measured_bias(PosRF(), iid, torch.zeros(1, 4), torch.zeros(1, 4), draws=10)
    >>> bias.ratio.item()
    1.0
    """
    d = x.shape[-1]
    x = x.double()
    y = y.double()
    chunk = max(1, 2**22 // (d * d))  # 32 MiB of rows at a time
    sizes = [min(chunk, draws - start) for start in range(0, draws, chunk)]

    def draw(p, size: int) -> Noise:
        return sampler(p.m, d, generator, batch=(size,), dtype=torch.float64)

    parts = []
    for size in sizes:
        noise = phi.noise(d, partial(draw, size=size))
        parts.append(estimate_ratios(phi, x, y, noise, params))
    ratios = torch.cat(parts)
    return Bias(ratios.mean(0), ratios.std(0) / draws**0.5)


def bias_record(phi, sampler: Callable, x: Tensor, y: Tensor, params=()) -> dict[str, float]:
    """Return the mean bias over PAIRS random pairs of x and y (n, d), for metrics.

    Exact samplers return {}.
    """
    g = torch.Generator().manual_seed(0)
    if sampler(2, 2, g).gaussian:  # independent of the dimension
        return {}
    i = torch.randint(len(x), (PAIRS,), generator=g)
    j = torch.randint(len(y), (PAIRS,), generator=g)
    bias = measured_bias(phi, sampler, x[i], y[j], params, generator=g)
    return {
        "sampler_bias": bias.ratio.mean().item(),
        "sampler_bias_error": bias.error.mean().item(),
    }


def bias_sentence(record: dict) -> str:
    """Format `bias_record` as a sentence; empty for exact samplers."""
    if "sampler_bias" not in record:
        return ""
    return (
        f"\napproximate sampler: estimate / exact kernel = {record['sampler_bias']:.3f} ± "
        f"{record['sampler_bias_error']:.3f} (1 is unbiased)"
    )


def estimate_ratios(phi, x: Tensor, y: Tensor, noise: Noise, params) -> Tensor:
    """Return estimate / kernel for each sample and pair, (draws, pairs).

    x and y are (pairs, d). The division by the kernel is done in log space.
    """
    fx = phi.phi_q(x, noise, params)
    fy = phi.phi_k(y, noise, params)
    log_scale = fx.log_scale + fy.log_scale - phi.log_kernel(x, y).unsqueeze(-1)
    return (fx.value * fy.value * log_scale.exp()).sum(-1)
