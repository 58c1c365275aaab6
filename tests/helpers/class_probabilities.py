"""Exact probabilities of classes under a sampler of sampled softmax, without the targets."""

import torch

from crt_exp.sampled_softmax import TreeFeatures
from crt_exp.sampled_softmax.base import FixedDistribution
from crt_exp.sampled_softmax.feature_distribution import FeatureDistribution


def class_probabilities(sampler, queries, targets):
    """The probabilities (B, V) of all classes, 0 for the targets (B,); float64."""
    ids = torch.arange(sampler.classes).expand(len(queries), -1)
    if isinstance(sampler, FixedDistribution):
        q = sampler.log_probability(ids).exp()
    elif isinstance(sampler, TreeFeatures) and not sampler.features.positive:
        q = sampler._walk(queries, targets, ids).log_q.exp()
    elif isinstance(sampler, TreeFeatures):
        q = sampler.features.of_signed_queries(queries) @ sampler.tree.leaves.mT
    else:
        q = sampler.weights(queries)
    q = without_targets(q.double(), targets)
    if not isinstance(sampler, FeatureDistribution):
        return q
    uniform = without_targets(torch.ones_like(q), targets)
    return torch.lerp(q, uniform, sampler.defensive)


def without_targets(q, targets):
    q = q.scatter(1, targets[:, None], 0.0)
    return q / q.sum(1, keepdim=True)
