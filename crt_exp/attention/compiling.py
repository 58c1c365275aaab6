"""What graphs of torch.compile leave out."""

import functools
from collections.abc import Callable

import torch


def left_open(*tensors: torch.Tensor) -> bool:
    """Whether a graph is made of these in which one of their sizes is left open, as by torch.compile(dynamic=True)."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(t.numel()) for t in tensors)


def end_graph(reason: str) -> None:
    """Ends the graph that torch.compile makes; with fullgraph=True it raises an error with the reason."""
    import torch._dynamo

    torch._dynamo.graph_break(msg=reason)


def outside_graphs(function: Callable) -> Callable:
    """As `torch.compiler.disable`, but the compiler, which takes longer to import than torch itself, is imported where
    it is at work alone."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)
    return call
