"""Sampled softmax: classifiers with many classes, whose training looks at a few classes a query.

Legend: B queries h (hidden vectors), V classes with vectors e_c and biases b_c, logits o_c = h.e_c + b_c, d dimension,
k negatives a query, m projections, M features; t is a query's target.

A sampler proposes classes and says with which probability it did: uniform, log-uniform, unigram, the exact softmax, a
quadratic kernel, or in proportion to a random-feature estimate of the softmax.
`TreeFeatures` draws from the last without a number for each pair of query and class: O(M + log V) a draw.
`SampledSoftmax` makes a loss of it. Sources: HRF 4.2 and appendix I.
"""

from crt_exp.sampled_softmax.base import ClassSampler, Drawn, ExactSoftmax, LogUniform, Quadratic, Uniform, Unigram
from crt_exp.sampled_softmax.softmax import SampledSoftmax
from crt_exp.sampled_softmax.tree_features import DenseFeatures, TreeFeatures

__all__ = ["ClassSampler", "DenseFeatures", "Drawn", "ExactSoftmax", "LogUniform", "Quadratic", "SampledSoftmax",
            "TreeFeatures", "Uniform", "Unigram"]
