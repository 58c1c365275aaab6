"""Calibration: passes over batches that fill the statistics of swapped layers, and measure their errors on the way."""

import warnings
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from crt_exp.attention.linear import LinearAttention
from crt_exp.swap.measured import Watcher


def calibrate_attention(model: nn.Module, batches: Iterable) -> nn.Module:
    """Runs the model over batches, in eval mode and without gradient, to fill the running statistics: those that causal
    layers are fitted to, and of the queries of cross-attention. Measures each layer's error on the way, for
    `describe_attention`.

    A batch is what the model is called with: a dictionary of keyword arguments, a tuple or list of arguments, or one
    tensor; tensors are moved to the model's device. All passes count alike; earlier statistics are replaced. Layers
    that attend to their own sequence in both directions fit each by itself and change nothing.

    The error is |output - exact| / |exact| with the layer's own q, k, v and noise, over heads and queries: of the first
    4 sequences of each batch and at most 128 queries of each, 16 MB of the exact matrix at a time. Warns of layers that
    are further from exact attention than uniform attention is, the mean of the values that a query may see.

    Returns the model. Raises ValueError where no layer has random features, and for no batches.
    """
    with ExitStack() as stack:
        for state in _states(model).values():
            stack.callback(state.register_forward_hook(Watcher(state), with_kwargs=True).remove)
        fill_statistics(model, batches)
    _warn_of_errors(model)
    return model


@torch.inference_mode(False)   # buffers of inference mode could not be trained or loaded later
@torch.no_grad()
def fill_statistics(model: nn.Module, batches: Iterable) -> None:
    """What `calibrate_attention` does, without measuring."""
    count = 0
    with eval_mode(model), ExitStack() as stack:
        for state in _states(model).values():
            stack.enter_context(state.calibration())
        for batch in batches:
            call(model, batch)
            count += 1
    if not count:
        raise ValueError("no batches to calibrate with")


def swapped_states(model: nn.Module) -> list[nn.Module]:
    """The attention that was swapped in, layer by layer."""
    return [part.swapped for part in model.modules() if "swapped" in part._modules]


def learns(model: nn.Module) -> bool:
    """Whether attention of the model is fitted to what earlier calls saw."""
    return any(part.learns for part in model.modules() if isinstance(part, LinearAttention))


@contextmanager
def eval_mode(model: nn.Module):
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _states(model: nn.Module) -> dict[str, LinearAttention]:
    """The layers that a calibration concerns, by path."""
    states = {path.removesuffix(".swapped"): part for path, part in model.named_modules()
              if isinstance(part, LinearAttention)}
    if not states:
        names = dict.fromkeys(part.swapped.mechanism for part in model.modules() if "swapped" in part._modules)
        reason = f"{', '.join(names)} attention keeps no statistics" if names else "call swap_attention first"
        raise ValueError(f"this {type(model).__name__} has no random-feature attention to calibrate, nor near-far "
                         f"attention: {reason}")
    return states


def _warn_of_errors(model: nn.Module) -> None:
    states = _states(model)
    worse = [f"{path} ({state.measured.relative_error:.3g}, uniform {state.measured.relative_uniform:.3g})"
             for path, state in states.items() if state.measured.error > state.measured.uniform]
    if worse:
        shown = ", ".join(worse[:3]) + (f" and {len(worse) - 3} more" if len(worse) > 3 else "")
        warnings.warn(f"in {len(worse)} of {len(states)} layers the output of the new attention is further "
                      f"from exact attention than the mean of the values is (uniform attention): {shown}. Take more "
                      "features (m), another mechanism, or leave these layers as they are with layers=[...]",
                      stacklevel=3)


def call(model: nn.Module, batch):
    """The model's output for a batch, as `calibrate_attention` takes it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if hasattr(batch, "keys"):
        named = {key: _moved(batch[key], device) for key in batch.keys()}  # noqa: SIM118 (tokenizers' own mappings)
        return model(**named)
    if isinstance(batch, (tuple, list)):
        return model(*(_moved(each, device) for each in batch))
    return model(_moved(batch, device))


def _moved(value, device: torch.device):
    return value.to(device) if isinstance(value, Tensor) else value
