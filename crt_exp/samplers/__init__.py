"""Samplers: rows omega for random features, each marginally N(0, I_d) unless said otherwise.

Legend: m projections (rows), d dimension, n = 2^ceil(log2 d), `batch` leading dimensions (heads, layers). A sampler is
a function `(m, d, generator=None, batch=()) -> Noise`. Numbers are drawn in float64 on the generator's device (CPU
unless a CUDA generator is given, so that one seed means one draw on every machine) and cast at the end.

Exactly Gaussian rows, which make estimates unbiased and serve the discrete maps: iid, orthogonal, simplex,
scrambled halton and sobol. Approximate: hadamard, givens, lengths other than chi; `measured_bias` says by how much.
"""

from crt_exp.samplers.bias import Bias, measured_bias
from crt_exp.samplers.blocks import givens, haar, hadamard, halton, iid, orthogonal, simplex, sobol
from crt_exp.samplers.noise import DenseNoise, HadamardNoise, Noise, at_least_float32

__all__ = ["Bias", "DenseNoise", "HadamardNoise", "Noise", "at_least_float32", "givens", "haar", "hadamard", "halton",
           "iid", "measured_bias", "orthogonal", "simplex", "sobol"]
