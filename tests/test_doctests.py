"""The examples in docstrings give the printed results."""

import doctest
from importlib import import_module

import pytest
import torch

MODULES = [
    "crt_exp.estimators",
    "crt_exp.estimators.kernel_regression",
    "crt_exp.estimators.ridge",
    "crt_exp.features.complex_exponential",
    "crt_exp.features.dense",
    "crt_exp.features.discrete",
    "crt_exp.features.exponential",
    "crt_exp.features.hybrid",
    "crt_exp.features.mixture",
    "crt_exp.features.other_kernels",
    "crt_exp.features.statistics",
    "crt_exp.sampled_softmax.base",
    "crt_exp.sampled_softmax.softmax",
    "crt_exp.sampled_softmax.tree_features",
    "crt_exp.samplers.bias",
    "crt_exp.samplers.blocks",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_the_printed_results(name):
    torch.manual_seed(0)
    result = doctest.testmod(import_module(name))
    assert result.attempted, f"{name}: no examples"
    assert not result.failed
