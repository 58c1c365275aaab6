"""The attention matrices of a model's layers, exact or linear.

A linear attention never forms its matrix, but that is its output for the unit vectors as values. Legend: B batch,
H heads, L tokens.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from crt_exp.attention import Baseline, LinearAttention


@torch.no_grad()
def attention_matrices(model: nn.Module, *inputs: Tensor,
                       keep: Callable[[Tensor], Tensor] = lambda A: A) -> list[Tensor]:
    """keep(A) of each layer's matrix A (B, H, L, L) in one forward pass, in the order of the calls; rows sum to 1.

    Layers are those that were swapped, and of models that were made with a `Mechanism` their own. Raises ValueError
    where there are none: `swap_attention(model, "exact")` makes exact attention visible too.
    """
    matrices, states = [], [part.swapped for part in model.modules() if "swapped" in part._modules]
    states = states or [part for part in model.modules() if isinstance(part, (LinearAttention, Baseline))]
    if not states:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped: swap_attention(model, 'exact') "
                         "comes first")

    def note(state: nn.Module, args: tuple, out: Tensor) -> None:
        q, k, _, *mask = args
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
        matrices.append(keep(state.forward(q, k, unit, *mask)))  # not called as a module, which would come here again

    with ExitStack() as stack:
        for state in states:
            stack.callback(state.register_forward_hook(note).remove)
        model(*inputs)
    return matrices
