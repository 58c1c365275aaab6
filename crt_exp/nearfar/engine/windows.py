"""The softmax of sets.py, whose legend is that of this file, without a matrix of pairs: chunk by chunk in products of
matrices, with its closed form in the backward pass.

With G = [g, -g.out] for the gradient g to the output, that to a logit of a set is e^logit (G . [V, N]) and that to
[V, N] e^logit G. Windows are overlapping views of the keys, never copies. native.py is the faster twin in
float32 on CPUs, fused.py that on GPUs. Derived here.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import transformed
from crt_exp.nearfar.engine import fused
from crt_exp.nearfar.engine.sets import (
    Gathered,
    Weighted,
    Window,
    check_backward,
    log_weight,
    near_bias,
    over,
    plain_gather,
)
from crt_exp.precision import as_given

ROWS = 4096      # queries of a chunk


def gather(q: Tensor, window: Window | None, sets: tuple[Weighted, ...], logsum: bool = False,
           precise: bool = True) -> Gathered:
    """What queries q (Z, n, r, d) gather from their window and the sets, the last of which is that of the cells. What
    a query gathers that sees no key means nothing. `logsum`: with the logs of the denominators. precise: no products of
    TF32 on a GPU.

    Differentiable in q, keys, values, sums and biases of sets. In plain operations, which keep all weights, under
    transforms of torch.func, forward-mode differentiation and torch.compile."""
    flat = [t for part in sets for t in part]
    near = () if window is None else (window.keys, window.values)
    if torch.compiler.is_compiling() or transformed(q, *near, *flat):
        return plain_gather(q, window, sets)
    if fused.applies(q, *near, *flat):
        return fused.gather(q, window, sets, precise)
    return Gathered(*_Gather.apply(window, logsum, q, *(near or (None, None)), *flat))


class _Chunk(NamedTuple):
    """Some blocks of some heads: all blocks of several heads, or several of one."""

    heads: slice
    blocks: slice

    def of(self, t: Tensor) -> Tensor:
        """(Z, n or 1, ...) -> (z, t or 1, ...)."""
        return t[self.heads] if t.shape[1] == 1 else t[self.heads, self.blocks]


def _chunks(Z: int, n: int, r: int, whole: bool) -> Iterator[_Chunk]:
    """`whole`: windows of several heads lie side by side."""
    most = max(1, ROWS // r)
    if n <= most and whole:
        for z in range(0, Z, most // n):
            yield _Chunk(slice(z, min(z + most // n, Z)), slice(0, n))
    else:
        for z in range(Z):
            for t in range(0, n, most):
                yield _Chunk(slice(z, z + 1), slice(t, min(t + most, n)))


class _Near:
    """The window of a call: keys and values of all heads in one row with a block of zeros at both ends, so that the
    windows of consecutive blocks are a view. At the ends of a head they reach into other heads, where the bias hides
    what they see."""

    def __init__(self, window: Window, n: int):
        self.Z, self.N, self.b, _ = window.keys.shape
        self.n, self.start, self.width = n, self.N - n, window.blocks * self.b
        self.keys, self.values = _flat(window.keys), _flat(window.values)
        self.bias, self.hidden = near_bias(window, n), window.hidden

    def given_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """Its tensors, for the graph to keep no longer than it needs them."""
        tensors = self.keys, self.values, self.bias
        self.keys = self.values = self.bias = None
        return tensors

    def with_tensors(self, keys: Tensor, values: Tensor, bias: Tensor) -> "_Near":
        other = copy.copy(self)
        other.keys, other.values, other.bias = keys, values, bias
        return other

    def first(self, at: _Chunk) -> int:
        return at.heads.start * self.N + self.start + at.blocks.start

    def windows(self, flat: Tensor, at: _Chunk) -> Tensor:
        """(count, W, .) of the chunk's blocks."""
        count = (at.heads.stop - at.heads.start) * (at.blocks.stop - at.blocks.start)
        width, first = flat.shape[-1], self.first(at) * self.b
        return flat[first:].as_strided((count, self.width, width), (self.b * width, width, 1))

    def add(self, flat: Tensor, at: _Chunk, grad: Tensor) -> None:
        """Adds gradients to the windows (count, W, .) to those of the keys."""
        count, first = grad.shape[0], self.first(at)
        for i, part in enumerate(grad.split(self.b, 1)):
            rows = flat[(first + i) * self.b:(first + i + count) * self.b]
            rows.view(count, self.b, part.shape[-1]).add_(part)

    def unflat(self, flat: Tensor) -> Tensor:
        return flat[self.b:-self.b].view(self.Z, self.N, self.b, flat.shape[-1])


def _flat(t: Tensor) -> Tensor:
    """(Z, N, b, k) -> ((Z N + 2) b, k), zeros at both ends."""
    Z, N, b, k = t.shape
    out = t.new_empty((Z * N + 2) * b, k)
    out[:b], out[-b:] = 0, 0
    out[b:-b].view(Z, N, b, k).copy_(t)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, window, logsum, q, keys, values, *flat):
        Z, n, r, _ = q.shape
        sets = _sets(flat)
        near = None if window is None else _Near(window, n)
        dv = sets[0].sums.shape[-1] - 1
        result = Gathered(q.new_empty(Z, n, r, dv), q.new_empty(Z, n, r, 1),
                          q.new_empty(Z, n, r, 1) if logsum else None)
        kept = []
        for at in _chunks(Z, n, r, near is None or near.start == 0):
            shares = _forward(q, near, sets, at, Gathered(*(None if t is None else at.of(t) for t in result)))
            kept += [shares] if any(ctx.needs_input_grad) else []
        ctx.near, ctx.sizes = near, (len(flat), len(kept))
        windows = () if near is None else near.given_up()
        ctx.save_for_backward(q, result.out, result.share, *flat, *kept, *windows)
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx, grad, grad_share, grad_logsum):
        q, out, share, *rest = ctx.saved_tensors
        flat, kept = rest[:ctx.sizes[0]], rest[ctx.sizes[0]:sum(ctx.sizes)]
        near = None if ctx.near is None else ctx.near.with_tensors(*rest[sum(ctx.sizes):])
        check_backward(grad, grad_share, grad_logsum)
        grad = torch.zeros_like(out) if grad is None else grad
        delta = (grad * out).sum(-1, keepdim=True)
        if grad_share is not None:
            delta += grad_share * share
        if grad_logsum is not None:
            delta -= grad_logsum
        sets = _sets(flat)
        grads = _Grads(q, near, sets)
        with as_given(q):
            for at, shares in zip(_chunks(*q.shape[:3], near is None or near.start == 0), kept):
                _backward(q, near, sets, at, shares, grad, delta, grad_share, grads)
        windows = (None, None) if near is None else (near.unflat(grads.keys), near.unflat(grads.values))
        return None, None, grads.q, *windows, *(t for part in grads.sets for t in part)


class _Grads:
    """What the chunks of a backward pass add up."""

    def __init__(self, q: Tensor, near: _Near | None, sets: list[Weighted]):
        self.q = torch.empty_like(q)
        self.keys = self.values = None
        if near is not None:
            self.keys, self.values = torch.zeros_like(near.keys), torch.zeros_like(near.values)
        self.sets = [Weighted(*map(_to_add_up, part)) for part in sets]


def _to_add_up(t: Tensor) -> Tensor:
    """(Z, n or 1, ...): chunks add to what all blocks share, and write the rest."""
    return torch.zeros_like(t) if t.shape[1] == 1 else torch.empty_like(t, memory_format=torch.contiguous_format)


def _sets(flat) -> list[Weighted]:
    return [Weighted(*flat[i:i + 3]) for i in range(0, len(flat), 3)]


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a (z, t, r, k) times b (z, t or 1, k, l) as (z, t, r, l)."""
    if b.shape[1] == 1:
        return torch.bmm(a.flatten(1, 2), b[:, 0]).view(*a.shape[:3], -1)
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(*a.shape[:3], -1)


def _shares(q: Tensor, near: _Near | None, sets: list[Weighted], at: _Chunk) -> tuple[Tensor, Tensor]:
    """Logits (z, t, r, .) of a chunk's queries q, and their softmax: first of the window, then of each set."""
    logits = []
    if near is not None:
        window = near.windows(near.keys, at)
        logits.append(torch.bmm(q.flatten(0, 1), window.mT).view(*q.shape[:3], -1).add_(at.of(near.bias)))
        if near.hidden is not None:
            logits[0].add_(near.hidden)
    for part in sets:
        keys, sums, bias = map(at.of, part)
        logits.append(_times(q, keys.mT).add_((bias + log_weight(sums)).unsqueeze(-2)))
    logits = logits[0] if len(logits) == 1 else torch.cat(logits, -1)
    return logits, logits.softmax(-1)


def _split(shares: Tensor, near: _Near | None, sets: list[Weighted]) -> tuple[Tensor, ...]:
    widths = ([] if near is None else [near.width]) + [part.keys.shape[2] for part in sets]
    return shares.split(widths, -1)


def _forward(q: Tensor, near: _Near | None, sets: list[Weighted], at: _Chunk, result: Gathered) -> Tensor:
    """Writes outputs and log-sums; returns the shares."""
    logits, shares = _shares(at.of(q), near, sets, at)
    if result.logsum is not None:
        result.logsum.copy_(logits.logsumexp(-1, keepdim=True))
    parts = _split(shares, near, sets)
    result.share.copy_(parts[-1].sum(-1, keepdim=True))
    if near is None:
        out = torch.zeros_like(result.out)
    else:
        out = torch.bmm(parts[0].flatten(0, 1), near.windows(near.values, at)).view(result.out.shape)
    for part, share in zip(sets, parts[-len(sets):]):
        sums = at.of(part.sums)
        _add_times(out, share * over(sums[..., -1]).unsqueeze(-2), sums[..., :-1])
    result.out.copy_(out)
    return shares


def _backward(q: Tensor, near: _Near | None, sets: list[Weighted], at: _Chunk, shares: Tensor, grad: Tensor,
              delta: Tensor, grad_share: Tensor | None, grads: _Grads) -> None:
    q, grad, delta = at.of(q), at.of(grad).contiguous(), at.of(delta)
    parts = _split(shares, near, sets)
    dq = torch.zeros_like(q) if near is None else _window_backward(q, near, at, grad, delta, parts[0], grads)
    G = torch.cat([grad, -delta], -1)                                                 # (z, t, r, dv + 1)
    for i, (part, share) in enumerate(zip(sets, parts[-len(sets):])):
        if i == len(sets) - 1 and grad_share is not None:
            G[..., -1:] += at.of(grad_share)
        _set_backward(q, Weighted(*map(at.of, part)), G, share, grads.sets[i], at, dq)
    at.of(grads.q).copy_(dq)


def _window_backward(q: Tensor, near: _Near, at: _Chunk, grad: Tensor, delta: Tensor, share: Tensor,
                     grads: _Grads) -> Tensor:
    rows, g, share = q.flatten(0, 1), grad.flatten(0, 1), share.flatten(0, 1)
    keys, values = near.windows(near.keys, at), near.windows(near.values, at)
    slope = torch.bmm(g, values.mT).sub_(delta.flatten(0, 1)).mul_(share)             # (count, r, W)
    near.add(grads.values, at, torch.bmm(share.mT, g))
    near.add(grads.keys, at, torch.bmm(slope.mT, rows))
    return torch.bmm(slope, keys).view(q.shape)


def _set_backward(q: Tensor, part: Weighted, G: Tensor, share: Tensor, grads: Weighted, at: _Chunk,
                  dq: Tensor) -> None:
    weights = share * over(part.sums[..., -1]).unsqueeze(-2)                         # e^logit / denominator
    slope = _times(G, part.sums.mT).mul_(weights)                                     # (z, t, r, m)
    _add_product(grads.keys, at, slope, q)
    _add_product(grads.sums, at, weights, G)
    if grads.bias.shape[1] == 1:
        at.of(grads.bias).add_(slope.sum((1, 2)).unsqueeze(1))
    else:
        at.of(grads.bias).copy_(slope.sum(2))
    _add_times(dq, slope, part.keys)


def _add_times(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a (z, t, r, k) times b (z, t or 1, k, l) to (z, t, r, l)."""
    if b.shape[1] == 1:
        total.flatten(1, 2).baddbmm_(a.flatten(1, 2), b[:, 0])
    else:
        total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


def _add_product(total: Tensor, at: _Chunk, a: Tensor, b: Tensor) -> None:
    """Adds a^T b of a (z, t, r, m), b (z, t, r, k), to total (Z, 1, m, k), or writes it to (Z, n, .)."""
    if total.shape[1] == 1:
        at.of(total)[:, 0].baddbmm_(a.flatten(1, 2).mT, b.flatten(1, 2))
    else:
        at.of(total).flatten(0, 1).baddbmm_(a.flatten(0, 1).mT, b.flatten(0, 1), beta=0)
