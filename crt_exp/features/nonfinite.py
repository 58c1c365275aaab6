"""Where a number stopped being finite: the layer that a diverged run names."""

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class NotFinite(ValueError):
    """What a computation that needs finite numbers raises where it meets others, before they reach a loss."""


def first_nonfinite(model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]) -> str | None:
    """The first parameter, layer output, loss or gradient that is not finite when `batches` are computed again;
    None if all are.

    Layers are looked at in the order in which they ran, inner ones before those around them, gradients in backward
    order. Hooks do not run in compiled code: `model` must be the one that was not compiled. Everything is computed to
    the end, because the layers of a sharded model only work when all processes take part. Leaves gradients behind.
    """
    names = nonfinite_parameters(model)
    model.zero_grad()
    for batch in batches:
        replay(model, batch, loss, names)
    if not names:  # a gradient that only the sum over micro-batches or processes made so; the last layer's came first
        late = [name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)]
        names = [f"gradient of {name}" for name in reversed(late)]
    return names[0] if names else None


def nonfinite_parameters(model: nn.Module) -> list[str]:
    return [f"parameter {name}" for name, parameter in model.named_parameters() if not finite(parameter)]


def layer_of(error: BaseException, model: nn.Module) -> str:
    """The innermost layer of `model` that was at work when `error` was raised, and what the error says."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    layers = [module for module in frames if isinstance(module, nn.Module) and names.get(module)]
    return f"{names[layers[-1]]} ({type(layers[-1]).__name__}): {error}" if layers else str(error)


def replay(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], names: list[str]) -> None:
    """Runs one micro-batch forward and backward with a hook on every module and parameter;
    appends to an empty `names`."""
    hooks = [module.register_forward_hook(output_hook(name, names)) for name, module in model.named_modules()]
    hooks += [p.register_hook(gradient_hook(name, names)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        value = loss(model, batch)
        if not names and not finite(value):
            names.append("the loss itself")
        value.backward()
    except NotFinite as error:
        if not names:
            names.append(layer_of(error, model))
    finally:
        for hook in hooks:
            hook.remove()


def output_hook(name: str, names: list[str]):
    def hook(module, args, output):
        if not names and not all(finite(t) for t in tensors_in(output)):
            names.append(f"output of {name or 'the model'} ({type(module).__name__})")
    return hook


def gradient_hook(name: str, names: list[str]):
    def hook(gradient):
        if not names and not finite(gradient):
            names.append(f"gradient of {name}")
    return hook


def finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return not local.is_floating_point() or bool(torch.isfinite(local).all())


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors of nested tuples, lists and mappings (such as the outputs of transformers)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "values"):
        for item in value.values():
            yield from tensors_in(item)
