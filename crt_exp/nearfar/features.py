"""Random features for the far keys of near-far attention, in place of cells: unbiased.

Legend: B batch, H heads, L queries x, S keys y, d, dv; N blocks of b tokens, M features. Queries are taken less their
mean and keys less theirs, and the log weight w of a key, which makes up for it, joins the logs of its features. The
states of the blocks are summed before and after each block, each with its own maxima, and never subtracted.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.partials import Partial, finish, merge, normalised, read, scale_keys, summarise
from crt_exp.features.base import ONE, FeatureMap, Features, Params
from crt_exp.features.statistics import Statistics
from crt_exp.nearfar.engine.constants import HIDDEN
from crt_exp.nearfar.engine.sets import Gathered
from crt_exp.nested import Nested
from crt_exp.samplers import iid
from crt_exp.samplers.noise import precise


class FarKeys(NamedTuple):
    """Keys in the blocks by whose sums they are distinguished."""

    y: Tensor       # (N, B, H, b, d), less the shift
    v: Tensor       # (N, B, H, b, dv)
    w: Tensor       # (N, B, H, b)
    keep: Tensor    # (N, B, H, b)


@dataclass(frozen=True)
class FarFeatures:
    """A map with noise and parameters of (H, ...) or (B, H, ...), for heads of which `kv_heads` have keys."""

    phi: FeatureMap
    noise: Nested
    params: Params
    kv_heads: int

    def merged(self, near: Gathered, x: Tensor, own: FarKeys, lag: int | None, both: bool, start: int = 0) -> Tensor:
        """Outputs (Z, N, G b, dv) of queries x (Z, N, G b, d), less their mean, whose near keys gave `near`; those from
        block `start` on. lag: None where all keys are far from all queries."""
        states = self.states(own)
        if lag is None:
            states = states * x.shape[1]
        else:
            states = far_states(states, lag, both)[start:]
        heads = x.unflatten(0, (-1, self.kv_heads)).movedim(2, 0)                       # (N, B, Hkv, G b, d)
        groups = own.y.shape[2] // self.kv_heads
        far = self.read(heads.unflatten(3, (groups, -1)).flatten(2, 3), states)         # (N, B, H, b, .)
        far = Partial(*(t.unflatten(2, (self.kv_heads, -1)).flatten(3, 4).movedim(0, 2).flatten(0, 1)
                        for t in far.rows()[:3]))
        logsum = near.logsum.masked_fill(near.logsum < HIDDEN / 2, -torch.inf)
        return finish(merge(normalised(near.out, logsum), far))

    def keys(self, y: Tensor, v: Tensor, w: Tensor, keep: Tensor, heads: int) -> FarKeys:
        """Of keys (Z, N, b, .) for all query heads."""
        groups = heads // self.kv_heads
        by_head = (t.unflatten(0, (-1, self.kv_heads)) for t in (y, v, w, keep))
        return FarKeys(*(t.repeat_interleave(groups, 1).movedim(2, 0) for t in by_head))

    def states(self, keys: FarKeys) -> list[Partial]:
        """What the keys of each block leave in the features, (B, H, M, .) each."""
        f = self.phi.phi_k(keys.y, precise(self.noise, keys.y.dtype), self.params).dense()
        f = Features(f.value, f.log_scale + keys.w.unsqueeze(-1))
        summed = summarise(scale_keys(f, keys.keep), keys.v)
        return [Partial(*parts) for parts in zip(*(t.unbind(0) for t in summed[:3]))]

    def read(self, x: Tensor, states: list[Partial]) -> Partial:
        """What queries x (N, B, H, b, d), less their mean, gather from the state of their block."""
        f = self.phi.phi_q(x, precise(self.noise, x.dtype), self.params).dense()
        return read(f, Partial(*(torch.stack(parts) for parts in zip(*(state[:3] for state in states)))))


def far_states(own: list[Partial], lag: int, both: bool) -> list[Partial]:
    """For each block the sum of the states of those up to t - lag, and, where `both`, of those from t + lag on."""
    none = Partial(*(torch.zeros_like(t) for t in own[0][:2]), torch.full_like(own[0].log_scale, -torch.inf))
    before = _lagged(own, lag, none)
    if not both:
        return before
    after = _lagged(own[::-1], lag, none)[::-1]
    return [merge(a, b) for a, b in zip(before, after)]


def _lagged(own: list[Partial], lag: int, none: Partial) -> list[Partial]:
    totals, total = [], none
    for t in range(len(own)):
        total = merge(total, own[t - lag]) if t >= lag else total
        totals.append(total)
    return totals


def check_positive(phi: FeatureMap) -> None:
    """Raises ValueError for a map whose features have signs: their sums could take away what near keys add."""
    x = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)) / 4
    noise = phi.noise(2, lambda p: iid(p.m, 4, torch.Generator().manual_seed(0)))
    f = phi.phi_k(x, noise, phi.fit(Statistics.of(x, x))).dense()
    if f.value is not ONE:
        raise ValueError(f"far = features takes positive features, and those of {phi} have signs: choose features=pos, "
                         "oprf, sderf, auto, hyp, smreg, pois_plus or geom_plus")
