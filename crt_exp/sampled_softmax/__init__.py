"""Sampled softmax for classifiers with many classes (HRF 4.2, appendix I).

Notation: B queries h (hidden vectors) with targets t; V classes with vectors e_c, biases b_c and logits o_c = h.e_c +
b_c; d dimension; k negatives per query; m projections, M features.

A `ClassSampler` samples negatives and returns their probabilities. Distributions are uniform, log-uniform, unigram,
exact softmax, a quadratic kernel, or a random-feature estimate of the softmax. `TreeFeatures` samples from this
estimate in O(M + log V) per negative, without computing all V estimates. `SampledSoftmax` is the loss.
"""

from crt_exp.sampled_softmax.base import (
    ClassSampler,
    Drawn,
    ExactSoftmax,
    LogUniform,
    Quadratic,
    Uniform,
    Unigram,
)
from crt_exp.sampled_softmax.softmax import SampledSoftmax
from crt_exp.sampled_softmax.tree_features import DenseFeatures, TreeFeatures

__all__ = [
    "ClassSampler",
    "DenseFeatures",
    "Drawn",
    "ExactSoftmax",
    "LogUniform",
    "Quadratic",
    "SampledSoftmax",
    "TreeFeatures",
    "Uniform",
    "Unigram",
]
