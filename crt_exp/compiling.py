"""What graphs of torch.compile leave out."""

import functools
from collections.abc import Callable

import torch


def outside_graphs(function: Callable) -> Callable:
    """As `torch.compiler.disable`, but the compiler, which takes longer to import than torch itself, is imported where
    it is at work alone."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)
    return call
