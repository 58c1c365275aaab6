"""Attention transfer: each swapped layer learns to give the exact layer's output on the exact layer's input.

While a model is `Transferring` every swapped layer passes on what exact attention gives, so that the next layer's input
is the exact model's, and keeps how far its own output is from that. No layer's error depends on another layer, and no
labels are needed. Legend: B batch, H query heads, L queries, S keys, dv.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.linear import LinearAttention
from crt_exp.swap.calibration import call, fill_statistics


class Squares(NamedTuple):
    """Of one call of a layer, over heads, real queries and columns: |output - exact|^2 and |exact|^2."""

    error: Tensor
    exact: Tensor


class Teacher:
    """A forward hook of a swapped layer: gives exact attention in place of its output, and keeps `squares`."""

    def __init__(self) -> None:
        self.squares: Squares | None = None

    def __call__(self, state: AttentionLayer, args: tuple, kwargs: dict, out: Tensor) -> Tensor:
        q, k, v, key_mask = _given(*args, **kwargs)
        root = state.scaling**0.5
        with torch.no_grad():
            exact = exact_attention(q * root, k * root, v, causal=state.causal, key_mask=key_mask)
        self.squares = squares(out, exact, _real(state, q, k, key_mask))
        return exact


class Transferring(nn.Module):
    """A swapped model whose layers are taught. A call gives their errors (layers,), |output - exact|^2 / |exact|^2, and
    what the model with exact attention returns.

    The model itself is in eval mode, without dropout, and of its parameters only those of the swapped layers are
    trained. `taught` = False gives the swapped model. Raises ValueError where nothing is swapped.
    """

    taught = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        states = swapped_layers(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in learned(states):
            parameter.requires_grad_(True)
        self.teachers = [Teacher() for _ in states]
        self.hooks = [state.register_forward_hook(self._hook(teacher), with_kwargs=True)
                      for state, teacher in zip(states, self.teachers)]

    def _hook(self, teacher: Teacher):
        return lambda *call: teacher(*call) if self.taught else None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        for teacher in self.teachers:
            teacher.squares = None
        out = self.model(*args, **kwargs)
        errors = [t.squares.error / t.squares.exact.clamp(min=1e-30) for t in self.teachers if t.squares is not None]
        if not errors:
            raise ValueError("this call reached no swapped layer: there is nothing to transfer to")
        return torch.stack(errors), out

    def train(self, mode: bool = True) -> "Transferring":
        super().train(mode)
        self.model.eval()
        for state in swapped_layers(self.model):
            state.train(mode)
        return self


class Lesson(NamedTuple):
    """A call of a layer in the exact model, and what exact attention gives, (B, H, L, dv)."""

    given: tuple[Tensor | None, ...]
    exact: Tensor


class Lessons:
    """The calls of all layers for some batches: a step then costs the layers and not the model, and the pass back one
    layer at a time. Memory: q, k, v and the output of every layer and batch."""

    def __init__(self, taught: Transferring, batches: Sequence):
        self.states = swapped_layers(taught.model)
        self.batches = [self._of(taught.eval(), batch) for batch in batches]

    @torch.no_grad()
    def _of(self, taught: Transferring, batch: Any) -> dict[int, Lesson]:
        """By the number of the layer, those that the batch reaches."""
        kept: dict[int, Lesson] = {}

        def keep(number: int):
            return lambda state, args, kwargs, out: kept.update({number: Lesson(_given(*args, **kwargs), out)})

        with ExitStack() as stack:   # behind the teachers, which put exact attention in the place of outputs
            for number, state in enumerate(self.states):
                stack.callback(state.register_forward_hook(keep(number), with_kwargs=True).remove)
            call(taught, batch)
        return kept

    def backward(self, i: int) -> None:
        """The gradient of the mean error of batch i, of layers that are taught no longer."""
        for number, (given, exact) in self.batches[i].items():
            state = self.states[number]
            of = squares(state(*given), exact, _real(state, given[0], given[1], given[3]))
            (of.error / of.exact.clamp(min=1e-30) / len(self.batches[i])).backward()


def transfer_attention(model: nn.Module, batches: Sequence, steps: int = 200, lr: float = 1e-2,
                       captured: bool = False) -> nn.Module:
    """Teaches the swapped layers of a model what exact attention gives, in place, and returns it.

    Statistics are taken from the exact model's queries and keys of all batches (`fill_statistics`); parameters of the
    layers are then trained by Adam for `steps` steps of the batches in turn, all others staying as they are. Batches
    are as `calibrate_attention` takes them. captured: the model reads each batch once and its layers learn from what
    `Lessons` keeps: the same steps, in less time and more memory. Raises ValueError for no batches, and where no layer
    has anything to learn.
    """
    batches, training, wanted = list(batches), model.training, [p for p in model.parameters() if p.requires_grad]
    if not batches:
        raise ValueError("no batches to transfer with")
    taught = Transferring(model)
    calibrate(taught, batches)
    parameters = [p for p in taught.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr) if parameters else None
    lessons = Lessons(taught, batches) if captured and parameters else None
    if lessons:
        release(taught)
    taught.train()
    for step in range(steps if parameters else 0):
        optimizer.zero_grad()
        if lessons:
            lessons.backward(step % len(batches))
        else:
            call(taught, batches[step % len(batches)])[0].mean().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - (step + 1) / steps)
    return release(taught, wanted).train(training)


def calibrate(taught: Transferring, batches: Iterable) -> None:
    """Fills what the layers keep of earlier inputs, from the exact model's. Raises ValueError where they have nothing
    to learn, neither so nor by gradients."""
    states, batches = swapped_layers(taught.model), list(batches)
    kept = any(isinstance(state, LinearAttention) and state.learns for state in states)
    if not (kept or learned(states)):
        raise ValueError(f"attention={states[0].mechanism} has nothing to learn from the exact layer: take hedgehog, "
                         "or random features with attention.learn=parameters or projections")
    if kept:
        fill_statistics(taught.model, batches)


def release(taught: Transferring, wanted: Iterable[nn.Parameter] = ()) -> nn.Module:
    """The model, taught no longer; `wanted` parameters take gradients again."""
    for hook in taught.hooks:
        hook.remove()
    for parameter in wanted:
        parameter.requires_grad_(True)
    return taught.model


def swapped_layers(model: nn.Module) -> list[AttentionLayer]:
    """In the order of the model's modules. Raises ValueError where there are none."""
    states = [part.swapped for part in model.modules() if "swapped" in part._modules]
    if not states:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped: call swap_attention first")
    return states


def learned(states: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for state in states for parameter in state.parameters()]


def squares(out: Tensor, exact: Tensor, real: Tensor | None) -> Squares:
    """Sums over everything, of real queries (B or 1, L) alone where it is said."""
    weight = 1.0 if real is None else real[:, None, :, None].to(exact.dtype)
    return Squares(*((t.float().square() * weight).sum() for t in (out - exact, exact)))


def _real(state: AttentionLayer, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """Queries that are not padding: of their own sequence the mask of the keys tells."""
    own = state.causal or (q.shape[2] == k.shape[2] and not getattr(state, "cross", False))
    return key_mask[:, k.shape[2] - q.shape[2]:] if key_mask is not None and own else None


def _given(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The arguments of a layer's call."""
    return q, k, v, key_mask
