"""Attention to one sequence whose tokens lie on several processes, each with a part of it, in the order of ranks.

Legend: R processes, M features. Each process summarises its own keys in the features, M (dv + 1) numbers a head, all gather the
summaries of all, and each adds up those that its queries see: bidirectional all of them, causal those of earlier ranks, to which
it merges what its queries gather from their own part. The length of a part matters to its own process alone.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from crt_exp.attention.checks import check_gradient, transformed
from crt_exp.attention.engines.generic import Call, Rows, chunked_partial, keys_state, read_state
from crt_exp.attention.engines.operators import form_of, part_of, positive_partial
from crt_exp.attention.partials import Partial, finite, merge
from crt_exp.features.base import FeatureMap
from crt_exp.features.exponential import PositiveExponential


def sequence_partial(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params, causal: bool, keep: Tensor | None,
                     factor: float, group, modulus: bool) -> Partial:
    """What the queries of this process gather from the keys of all; checked arguments, as many key heads as query heads."""
    _check(x, y, v, causal, group)
    positive = isinstance(phi, PositiveExponential) and not modulus
    if positive:
        part = part_of(form_of(x, y, v, phi, noise, params, keep, factor), causal)
    else:
        x, y = x * factor, y * factor
        part = Call(phi, noise, params, causal, keep, Rows(modulus)).whole()
    states = _of_all(keys_state(y, v, part), group)
    if not causal:
        return read_state(x, total(states), part)
    past = read_state(x, total(_hidden_from(states, dist.get_rank(group))), part)
    return merge(past, positive_partial(x, y, v, phi, noise, params, True, keep, factor) if positive
                 else chunked_partial(x, y, v, part.call))


def _check(x: Tensor, y: Tensor, v: Tensor, causal: bool, group) -> None:
    if torch.compiler.is_compiling() or transformed(x, y, v):
        raise ValueError("attention of a sequence that is split over processes (group=...) cannot be compiled, exported or "
                         "transformed by torch.func: call it by itself, for one backward pass")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of the group that was given to attention")
    if causal and x.shape[2] != y.shape[2]:
        raise ValueError(f"causal attention with {x.shape[2]} queries and {y.shape[2]} keys on this process: in a sequence that "
                         "is split over processes each token is a query and a key")


def total(states: Partial) -> Partial:
    """The sum over the first dimension, in the scale of the largest."""
    top = states.log_scale.amax(0)
    weights = torch.exp(states.log_scale - finite(top))
    add = lambda t: None if t is None else (t * weights).sum(0)
    return Partial(add(states.numerator), add(states.denominator), top, add(states.modulus))


def _hidden_from(states: Partial, rank: int) -> Partial:
    """The states of later processes and its own as nothing gathered: they stay in the graph, for all must take part in the
    backward pass."""
    later = torch.arange(states.log_scale.shape[0], device=states.log_scale.device) >= rank
    return states._replace(log_scale=states.log_scale.masked_fill(later.view(-1, *[1] * (states.log_scale.ndim - 1)), -torch.inf))


def _of_all(state: Partial, group) -> Partial:
    """The partials of all processes, (R, ...), differentiable."""
    sums = torch.cat([state.numerator, state.denominator], -1)
    sums = _Gather.apply(sums, group)
    gather = lambda t: None if t is None else _gathered(t, group)
    return Partial(sums[..., :-1], sums[..., -1:], gather(state.log_scale), gather(state.modulus))


def _gathered(t: Tensor, group) -> Tensor:
    t = t.contiguous()
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, t, group=group)
    return torch.stack(parts)


class _Gather(torch.autograd.Function):
    """What every process holds, on every process; the gradient to each is the sum of those that all have to it."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group = group
        return _gathered(t, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        check_gradient(grad)
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None
