"""Locate the first non-finite number of a training step."""

import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from crt_exp.features.base import NotFinite


def first_nonfinite(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> str | None:
    """Name the first non-finite parameter, layer output, loss or gradient.

    The function recomputes the forward and backward passes of `batches`. It checks layers in execution order, inner
    layers first, and gradients in backward order. It leaves gradients behind.

    Args:
        model: the uncompiled model, because compiled code runs no hooks.

    Returns:
        A description, or None if everything is finite.
    """
    names = nonfinite_parameters(model)
    model.zero_grad()
    with ExitStack() as hooks:  # removed at the end, whatever the loss raises
        for name, module in model.named_modules():
            what = f"output of {name or 'the model'} ({type(module).__name__})"
            hooks.enter_context(module.register_forward_hook(partial(record, names, what)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(record, names, f"gradient of {name}")
                hooks.enter_context(parameter.register_hook(hook))
        for batch in batches:
            try:
                value = loss(model, batch)
                if not names and not finite(value):
                    names.append("the loss itself")
                value.backward()
            except NotFinite as error:
                if not names:
                    names.append(layer_of(error, model))
    if names:
        return names[0]
    # Only the sum over micro-batches or processes overflowed. Backward reaches the last layer first.
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not finite(parameter.grad):
            return f"gradient of {name}"
    return None


def nonfinite_parameters(model: nn.Module) -> list[str]:
    named = model.named_parameters()
    return [f"parameter {name}" for name, parameter in named if not finite(parameter)]


def layer_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost layer that ran when `error` was raised, with its message."""
    names = {module: name for name, module in model.named_modules()}
    message = str(error)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            message = f"{names[module]} ({type(module).__name__}): {error}"
    return message


def record(names: list[str], what: str, *args: Any) -> None:
    """Hook that appends `what` if names is empty and its last argument is not finite."""
    tensors = [leaf for leaf in tree_leaves(args[-1]) if isinstance(leaf, Tensor)]
    if not names and not all(map(finite, tensors)):
        names.append(what)


def finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())
