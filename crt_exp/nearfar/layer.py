"""`NearFar`: near-far attention with its state, as a module.

The state changes only at the start of a forward pass in training, as that of `RandomFeatureAttention`.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, K clusters. q, k and v are unscaled; x = scale q
and y = scale k.
"""

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import LinearAttention, in_backward
from crt_exp.attention.baselines import VECTOR
from crt_exp.attention.checks import transformed
from crt_exp.attention.state import FittedOnce
from crt_exp.features.statistics import Statistics
from crt_exp.nearfar.choice import KeyMetric, Sizes
from crt_exp.nearfar.decoding import RecallState
from crt_exp.nearfar.dispatch import apply_by_row, near_far_attention
from crt_exp.samplers.noise import transforming
from crt_exp.validation import Count, Whole, checked

PRESETS = {
    "cheap": Sizes(16, 16, 16, open=16, exact_until=1536),
    "default": Sizes(32, 16, 64, open=96, exact_until=1536),
    "quality": Sizes(32, 64, 128, True, open=256, exact_until=1536),
}
SAMPLE = 2048  # vectors of each head for the moments of queries
SHORT = 512  # keys up to which attention that is not causal is exact, which is as fast
LONG = 1000  # keys from which first-order values are the default


@checked("attention")
class NearFar(LinearAttention):
    """Near-far attention: exact near keys and heavy hitters, clusters for all others.

    It can replace the attention of any pretrained model. A query sees exactly the keys of its own block, of the block
    before and, if not causal, of the block after, and the heavy hitters. Clusters represent all other keys.

    The choice of heavy hitters and clusters never lets a query use later queries:

    - Bidirectional self-attention: queries and keys of the call.
    - Causal attention: earlier keys, at renewals (causal.py); nothing is fitted or calibrated.
    - Cross-attention (`cross`, and bidirectional calls with different numbers of queries and keys): keys of the call,
      none of them near. With `cross`, moments of earlier queries from each `fit_steps` training passes or from a
      calibration.

    Buffers: those of `FittedOnce` in `clusters`, if the layer is cross.

    Args:
        preset: sizes, which the following arguments override.
        block: tokens of a block.
        heavy: number of heavy hitters.
        cells: number of clusters.
        first_order: cluster values to first order in the query, if not causal. By default from 1000 keys on, and always
            with preset "quality".
        open: keys of clusters that each causal query retrieves, those with its largest logits. From 2304 tokens on the
            number grows with the square root of the length (`Sizes.retrieval_count`).
        exact_until: position up to which causal queries see all keys exactly (default 1536); number of keys up to which
            other attention is exact (default 512).
        scaling: factor of q.k in the logits, by default d^(-1/2).
        normalize_qk: scale queries and keys to norm d^(1/4).
        fit_steps: training passes that are sampled for a fit of query moments.

    >>> layer = NearFar(4, 16, causal=True, exact_until=64)
    >>> q, k, v = torch.randn(3, 1, 4, 200, 16)
    >>> tuple(layer(q, k, v).shape)
    (1, 4, 200, 16)
    """

    clusters: FittedOnce | None
    serves_causal = True
    version = None  # decoding states stay valid

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        preset: Literal["cheap", "default", "quality"] = "default",
        block: Count | None = None,
        heavy: Whole | None = None,
        cells: Count | None = None,
        first_order: bool | None = None,
        open: Count | None = None,
        exact_until: Whole | None = None,
        kv_heads: int | None = None,
        causal: bool = False,
        cross: bool = False,
        scaling: float | None = None,
        normalize_qk: bool = False,
        fit_steps: Count = 10,
        seed: int = 0,
        layer: int = 0,
    ):
        super().__init__(heads, d, kv_heads, causal, cross, scaling, normalize_qk)
        self.recurrent_heads = self.kv_heads
        self.preset = preset
        self.first_order = first_order
        options = {
            "block": block,
            "heavy": heavy,
            "cells": cells,
            "first_order": first_order,
            "open": open,
            "exact_until": exact_until,
        }
        sizes = PRESETS[preset]._asdict()
        sizes |= {name: value for name, value in options.items() if value is not None}
        self.sizes = Sizes(**sizes)
        # for calls that are not causal
        self.exact_until = SHORT if exact_until is None else exact_until
        self.clusters = None
        if cross:
            self.clusters = FittedOnce(MetricMaker(), self.kv_heads, d, fit_steps, vectors=SAMPLE)

    @property
    def exact_to(self) -> int:
        """Sequence length up to which the layer is exact attention."""
        return self.sizes.exact_until if self.causal else self.exact_until

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the attention outputs (B,H,L,dv).

        q (B,H,L,d), k (B,Hkv,S,d) and v (B,Hkv,S,dv) are unscaled; key_mask (B,S) is True for keys to keep.
        """
        if key_mask is None and self._is_one_kernel(q, k, v):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scaling)
            # if not finite, the other path raises
            if not out.is_cpu or math.isfinite(out.sum(dtype=torch.float32).item()):
                return out
        self.check_call(q, k)
        changing = self.training and not in_backward()
        clusters = self._moments_for(q, k)
        if clusters is not None and changing and not self.continues_step:
            if transforming():
                raise ValueError(
                    "training mode updates state, which torch.func cannot trace: call eval() first"
                )
            clusters.advance()
        out = self.estimate(q, k, v, key_mask)
        if clusters is not None and (changing or self.calibrated is not None):
            clusters.note(self.scaled(q), self.scaled(k), None, key_mask)
        return out

    def _is_one_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether one call of torch's fused kernel does this call without a mask.

        Each query then sees all its keys, and nothing is learned or recorded. Invalid arguments return False and are
        reported later.
        The test is short, because each function call costs time in a short call.
        """
        return (
            q.shape == k.shape
            and q.ndim == 4
            and VECTOR <= q.shape[2] <= self.exact_to
            and q.shape[3] == self.d
            and q.shape[1] == self.heads == self.kv_heads
            and q.shape[:3] == v.shape[:3]
            and v.numel() > 0
            and q.dtype == k.dtype == v.dtype
            and q.is_floating_point()
            and q.device == k.device == v.device
            and self.clusters is None
            and self.calibrated is None
            and not self.normalize_qk
            and not torch.compiler.is_compiling()
            and not transformed(q, k, v)
        )

    def estimate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the output of `forward` without changing the state of the layer."""
        metric = None
        clusters = self._moments_for(q, k)
        if clusters is not None and clusters.done:
            metric = KeyMetric(*(t.repeat(len(q), 1, 1) for t in clusters.params()))
        sizes = self.sizes._replace(exact_until=self.exact_to)

        def attend(first_order: bool, x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None):
            return near_far_attention(
                x,
                y,
                v,
                sizes._replace(first_order=first_order),
                causal=self.causal,
                cross=self.cross or q.shape[2] != k.shape[2],
                metric=metric,
                key_mask=mask,
                factor=self.scale,
            )

        x = self.normalized(q)
        y = self.normalized(k)
        chosen = self.first_order is not None or self.preset == "quality" or self.causal
        if chosen or k.shape[2] < LONG:
            return attend(sizes.first_order, x, y, v, key_mask)
        if key_mask is None:
            return attend(True, x, y, v, None)
        is_long = key_mask.sum(1) >= LONG
        inputs = (x, y, v, key_mask)
        return apply_by_row(is_long, partial(attend, True), partial(attend, False), *inputs)

    # ---- learned state and decoding

    @property
    def learns(self) -> bool:
        return self.clusters is not None and self.cross

    def decoding(self) -> RecallState:
        if not self.causal:
            raise ValueError("causal=False: decoding needs causal=True")
        return RecallState(self.sizes)

    def _moments_for(self, q: Tensor, k: Tensor) -> FittedOnce | None:
        """Return the moments of earlier queries, if the call uses them."""
        if self.causal or not (self.cross or q.shape[2] != k.shape[2]):
            return None
        return self.clusters

    def extra_repr(self) -> str:
        opens = f"open={self.sizes.open}, " if self.causal else ""
        return (
            f"block={self.sizes.block}, heavy={self.sizes.heavy}, cells={self.sizes.cells}, {opens}"
            f"heads={self.heads}, d={self.d}, causal={self.causal}, cross={self.cross}"
        )


class MetricMaker:
    """Computes metrics from samples, with the interface that `FittedOnce` needs."""

    def unfitted(self, d: int) -> KeyMetric:
        return KeyMetric(torch.zeros(1, d), torch.zeros(1, d), torch.zeros(d, d))

    def fit(self, stats: Statistics) -> KeyMetric:
        """Compute the metric from the finite vectors of each head."""
        _, queries = stats.x.sets()
        _, keys = stats.y.sets()
        x = torch.stack(queries)  # equal numbers for all heads
        y = torch.stack(keys)
        if x.shape[1] and y.shape[1]:
            return KeyMetric.fit(x, y, None, None)
        return KeyMetric(*(t.expand(len(x), -1, -1).to(x) for t in self.unfitted(x.shape[-1])))
