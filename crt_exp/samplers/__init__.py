"""Samplers of random projections: rows omega with marginal distribution N(0, I_d).

Notation: m projections (rows), d dimension, n = 2^ceil(log2 d), `batch` leading dimensions (heads, layers).

A sampler is a function `(m, d, generator=None, batch=()) -> Noise`. It samples in float64 on the device of the
generator and casts the result. Without a CUDA generator it samples on the CPU, so a seed gives equal projections on
every machine.

Exactly Gaussian rows give unbiased estimates and are required by discrete maps: iid, orthogonal, simplex, halton
and sobol. Approximate samplers are hadamard, givens, and all with lengths other than chi. `measured_bias`
estimates their bias.
"""

from crt_exp.samplers.bias import Bias, measured_bias
from crt_exp.samplers.blocks import givens, haar, hadamard, halton, iid, orthogonal, simplex, sobol
from crt_exp.samplers.noise import DenseNoise, HadamardNoise, Noise, at_least_float32

__all__ = [
    "Bias",
    "DenseNoise",
    "HadamardNoise",
    "Noise",
    "at_least_float32",
    "givens",
    "haar",
    "hadamard",
    "halton",
    "iid",
    "measured_bias",
    "orthogonal",
    "simplex",
    "sobol",
]
