"""Attention without a loop over the tokens, in torch's own operators, for torch.export with a length that is left open.

Legend: n chunks of C = CHUNK tokens, the last one or two of them padding; M features. The sums of what the chunks
before each one left in the features take n^2 M (dv + 1) multiply-adds: below the linear part of the work up to some C^2
tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.checks import compute_dtype, finite
from crt_exp.attention.engines.chunks import CHUNK, BatchPart
from crt_exp.attention.engines.constants import TINY
from crt_exp.attention.partials import Partial, merge, read, scale_keys, summarise, within
from crt_exp.features.base import Features
from crt_exp.precision import as_given


def attend_at_once(x: Tensor, y: Tensor, v: Tensor, part: BatchPart) -> Partial:
    """What `generic.plain_attention` gathers. What that would do about an underflow stops the program."""
    with as_given(x):
        if part.call.causal:
            return _causal(x, y, v, part)
        return part.read(x, part.summary(y, v, slice(None)))


def _causal(x: Tensor, y: Tensor, v: Tensor, part: BatchPart) -> Partial:
    L, S, dtype = x.shape[2], y.shape[2], compute_dtype(y, v)
    if L != S:  # the queries are the last tokens
        x = F.pad(x, (0, 0, S - L, 0))
    keep = torch.ones_like(y[:, 0, :, 0], dtype=torch.bool) if part.keep is None else part.keep
    y, v = (torch.where(keep[:, None, :, None], t, 0.0) for t in (y, v))  # padding may hold NaN
    # to two chunks at least: sizes that may be 1 make another program
    padding = CHUNK * ((S + CHUNK - 1) // CHUNK + 1) - S
    x, y, v = (F.pad(t.to(dtype), (0, 0, 0, padding)) for t in (x, y, v))
    keep = F.pad(keep, (0, padding)).unfold(-1, CHUNK, CHUNK)[:, None]
    queries, keys = (_split(phi(t).dense()) for phi, t in zip(part.bound, (x, y)))
    keys, v = scale_keys(keys, keep), _chunks(v)
    rows = merge(read(queries, before(summarise(keys, v, part.modulus))), within(queries, keys, v, part.modulus))
    small = (rows.denominator.abs() < TINY) & (keep.flatten(2).cumsum(-1) > 0).unfold(-1, CHUNK, CHUNK)[..., None]
    torch._assert_async(
        ~small.any(), f"a key outweighs those before it in its {CHUNK} tokens by more than float32 can hold: an "
                      "exported program cannot take shorter pieces, as attention does otherwise")
    last = torch.arange(S - L, S, device=x.device)
    return Partial(*(None if t is None else t.flatten(2, 3).index_select(2, last) for t in rows.rows()))


def _split(f: Features) -> Features:
    return Features(*(t if t.ndim < 2 else t.unsqueeze(-3) if t.shape[-2] == 1 else _chunks(t) for t in f))


def _chunks(t: Tensor) -> Tensor:
    """(..., n C, M) -> (..., n, C, M), in a way whose sizes torch.export can prove."""
    return t.unfold(-2, CHUNK, CHUNK).mT


def before(states: Partial) -> Partial:
    """For every chunk (..., n, M, .) the sum of those before it, in the scale of their largest:
    exact, whatever comes later."""
    tops = states.log_scale.unsqueeze(-4)                                               # (..., 1, n, M or 1, 1)
    count = tops.shape[-3]
    past = torch.ones(count, count, dtype=torch.bool, device=tops.device).tril(-1)
    tops = torch.where(past[..., None, None], tops, -torch.inf)                         # (..., n, n, M or 1, 1)
    top = tops.amax(-3)
    weights = torch.exp(tops - finite(top).unsqueeze(-3)).squeeze(-1)
    numerator, denominator, modulus = (None if t is None else torch.einsum("...cem,...emv->...cmv", weights, t)
                                       for t in (states.numerator, states.denominator, states.modulus))
    return Partial(numerator, denominator, top, modulus)
