"""Attention to one sequence whose tokens lie on several processes, each with a part of it, in the order of ranks.

Legend: R processes, M features. Each process summarises its own keys in the features, M (dv + 1) numbers a head, all
gather the summaries of all, and each adds up those that its queries see: bidirectional all of them, causal those of
earlier ranks, to which it merges what its queries gather from their own part. The length of a part matters to its own
process alone.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from crt_exp.attention.checks import check_gradient, finite, transformed
from crt_exp.attention.engines.chunks import Call, Rows
from crt_exp.attention.engines.generic import chunked_partial, keys_state, read_state
from crt_exp.attention.engines.operators import entered, form_partial, part_of
from crt_exp.attention.partials import Partial, merge
from crt_exp.features.base import FeatureMap
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.statistics import Moments, centred
from crt_exp.samplers.noise import cached


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def sequence_partial(x: Tensor, y: Tensor, v: Tensor, phi: FeatureMap, noise, params, causal: bool, keep: Tensor | None,
                     factor: float, group, modulus: bool) -> Partial:
    """What the queries of this process gather from the keys of all; checked arguments, key heads as query heads."""
    _check(x, y, v, causal, group)
    check_agreed(x, y, keep, group, values=v.shape[-1], causal=causal, modulus=modulus)
    positive = isinstance(phi, PositiveExponential) and not modulus
    if positive:
        x, y, form = entered(x, y, v, phi, noise, params, keep, factor)
        part = part_of(form, causal)
    else:
        x, y = x * factor, y * factor
        part = Call(phi, noise, params, causal, keep, Rows(modulus)).whole()
    states = _of_all(keys_state(y, v, part), group)
    if not causal:
        return read_state(x, total(states), part)
    past = read_state(x, total(_hidden_from(states, dist.get_rank(group))), part)
    return merge(past, form_partial(x, y, form, v, True) if positive else chunked_partial(x, y, v, part.call))


def _check(x: Tensor, y: Tensor, v: Tensor, causal: bool, group) -> None:
    if torch.compiler.is_compiling() or transformed(x, y, v):
        raise ValueError("attention of a sequence that is split over processes (group=...) cannot be compiled, "
                         "exported or transformed by torch.func: call it by itself, for one backward pass")
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of the group that was given to attention")
    if causal and x.shape[2] != y.shape[2]:
        raise ValueError(f"causal attention with {x.shape[2]} queries and {y.shape[2]} keys on this process: in a "
                         "sequence that is split over processes each token is a query and a key")


def check_agreed(x: Tensor, y: Tensor, keep: Tensor | None, group, **more: int) -> None:
    """Raises ValueError, on every process, where calls of the processes do not go together: what they exchange would
    have other sizes, or be other numbers, and end in a crash of the library below or in a wait for its timeout."""
    grad = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    mine = {"dtype": DTYPES.index(x.dtype), "batch": len(x), "heads": x.shape[1], "key heads": y.shape[1],
            "dimensions": x.shape[3], "mask": keep is not None, "gradient": grad, **more}
    gathered = _gathered(torch.tensor([int(value) for value in mine.values()], device=x.device), group).tolist()
    for name, values in zip(mine, zip(*gathered)):
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            shown = [DTYPES[values[rank]] if name == "dtype" else values[rank] for rank in (0, other)]
            raise ValueError(f"the processes of a sequence disagree: {name} is {shown[0]} on rank 0 and {shown[1]} on "
                             f"rank {other} of the group. Give all of them the same, and a mask to all or to none")


def total(states: Partial) -> Partial:
    """The sum over the first dimension, in the scale of the largest."""
    top = states.log_scale.amax(0)
    weights = torch.exp(states.log_scale - finite(top))
    numerator, denominator, modulus = (None if t is None else (t * weights).sum(0)
                                       for t in (states.numerator, states.denominator, states.modulus))
    return Partial(numerator, denominator, top, modulus)


def _hidden_from(states: Partial, rank: int) -> Partial:
    """The states of later processes and its own as nothing gathered: they stay in the graph, for all must take part in
    the backward pass."""
    top = states.log_scale
    later = (torch.arange(len(top), device=top.device) >= rank).view(-1, *[1] * (top.ndim - 1))
    return states._replace(log_scale=top.masked_fill(later, -torch.inf))


def _of_all(state: Partial, group) -> Partial:
    """The partials of all processes, (R, ...), differentiable."""
    sums = torch.cat([state.numerator, state.denominator], -1)
    sums = _Gather.apply(sums, group)
    top = state.log_scale.expand(*state.numerator.shape[:2], *state.log_scale.shape[-2:])
    return Partial(sums[..., :-1], sums[..., -1:], _gathered(top, group),
                   None if state.modulus is None else _gathered(state.modulus, group))


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


def summed(t: Tensor, group) -> Tensor:
    """The sum of the tensors of all processes, on each of them, differentiable: every process must call the backward
    pass."""
    return _Gather.apply(t, group).sum(0)


class Pooled:
    """Moments of a set whose parts lie on several processes, each gathered when first asked for: by all processes at
    once.

    of: those of the part here. mask (B, L) of its vectors, True = keep: a part without any counts for nothing.
    """

    def __init__(self, of: Moments, mask: Tensor | None, group):
        self._of, self._group, self.d = of, group, of.d
        self._any = None if mask is None else mask.any(-1)[:, None, None]

    @cached
    def _weight(self) -> Tensor:
        """Vectors of this part, (..., 1)."""
        return self._of.count if self._any is None else self._of.count * self._any

    @cached
    def count(self) -> Tensor:
        return self._reduced(self._of.count * 0 + self._weight).clamp(min=1)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "covariance":  # no mean over parts: each has its own centre
            return centred(self.second, self.mean)
        value = getattr(self._of, name)
        if name in ("minimum", "largest"):
            empty = torch.inf if name == "minimum" else 0.0
            value = value if self._any is None else torch.where(self._any, value, empty)
            pooled = self._reduced(value, dist.ReduceOp.MIN if name == "minimum" else dist.ReduceOp.MAX)
            pooled = torch.where(pooled.isinf(), 0.0, pooled)  # nothing but masked positions
        else:
            weight, count = (_as_moment(t, name) for t in (self._weight, self.count))
            pooled = self._reduced(value * weight) / count
        self.__dict__[name] = pooled
        return pooled

    def _reduced(self, t: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        t = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(t, op, group=self._group)
        return t


def _as_moment(count: Tensor, name: str) -> Tensor:
    """(..., 1) with the dimensions of a moment: a number, a vector or a matrix."""
    return count.squeeze(-1) if name == "mean_norm" else count.unsqueeze(-1) if name == "second" else count
