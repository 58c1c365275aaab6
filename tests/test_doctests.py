"""The examples in docstrings give the printed results, and every public name has one."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch

import crt_exp

PACKAGE = Path(crt_exp.__file__).parent
PUBLIC = [
    "crt_exp",
    "crt_exp.attention",
    "crt_exp.features",
    "crt_exp.nearfar",
    "crt_exp.sampled_softmax",
    "crt_exp.samplers",
]


SLOW = ("crt_exp.experiments.measure.advise",)  # it compares three methods in a model


def modules_with_examples():
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            marks = [pytest.mark.slow] if name in SLOW else []
            modules.append(pytest.param(name, marks=marks))
    return modules


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_give_the_printed_results(name):
    torch.manual_seed(0)
    result = doctest.testmod(import_module(name))
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_have_an_example(package):
    module = import_module(package)
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        described = inspect.isclass(value) or inspect.isfunction(value)
        if described and ">>> " not in inspect.getsource(value):
            missing.append(name)
    assert not missing
