"""`NearFar`: near-far attention with its state, as a module.

Legend: B batch, H query heads, Hkv key heads, L queries, S keys, d, K cells. q, k, v are unscaled; x = scale q and
y = scale k. The state changes in one place and at one moment, as that of `RandomFeatureAttention`: at the start of a
forward pass in training.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.base import in_backward
from crt_exp.attention.baselines import VECTOR
from crt_exp.attention.checks import transformed
from crt_exp.attention.fitted_once import FittedOnce
from crt_exp.attention.linear import LinearAttention
from crt_exp.compiling import outside_graphs
from crt_exp.features.statistics import Statistics
from crt_exp.hints import Count, Whole, above, below, checked
from crt_exp.nearfar.call import Result, Stated, by_rows, near_far_attention, stated
from crt_exp.nearfar.causal import Codebook
from crt_exp.nearfar.choice import KeyMetric, Sizes, centres_of
from crt_exp.nearfar.decoding import NearFarState
from crt_exp.nearfar.engine.constants import AWAY
from crt_exp.nearfar.past import RecallState
from crt_exp.samplers.noise import transforming

PRESETS = {"cheap": Sizes(16, 16, 16, open=16, exact_until=1536),
           "default": Sizes(32, 16, 64, open=96, exact_until=1536),
           "quality": Sizes(32, 64, 128, True, open=256, exact_until=1536),
           "bounded": Sizes(32, 16, 64)}
SAMPLE = 2048        # vectors of each head that a codebook is made of, queries and keys each
SHORT = 512          # keys up to which attention in both directions and cross-attention is exact, which is as fast
LONG = 1000          # keys from which on values are taken to first order, where it is not said


@checked("attention")
class NearFar(LinearAttention):
    """Exact attention to near and heavy keys and cells for the rest, for any pretrained model.

    preset: sizes; block (tokens), heavy (keys), cells and first_order (values of a cell to first order in the query; by
    default from 1000 keys on, if not causal, and with preset quality always) take the place of its own. A query sees
    the keys of its own block and of those before and, if not causal, after it exactly, and as many heavy keys; all
    others by cells. open: keys of cells that each query reads exactly, those of the largest logits; by default causal
    queries alone read some, of their past, and more from 2304 tokens on, as the root of it (`Sizes.opens`); a list
    holds a number for each layer of a model. exact_until: the place up to which causal queries see all keys exactly
    (1536), and the number of keys up to which attention that is not causal is exact (512). Preset bounded, or open = 0,
    opens none: causal, its memory does not grow with the sequence. error: causal queries see all keys where more of
    their weight than that may lie on keys that they did not read (bound.py).

    What the sets are chosen by, so that a query never sees a later one:
    - bidirectional attention of a sequence to itself: its own queries and keys;
    - causal: the keys before it, at renewals (recall.py): nothing is fitted or calibrated;
    - causal with open = 0: a codebook of earlier sequences, made of those of each `fit_steps` training passes or of a
      calibration; before the first, the first `heavy` keys are the heavy ones and all cells are one, which is said
      once;
    - cross-attention (`cross`, and every call that is not causal with other numbers of queries and keys): no key is
      near; the keys of the call, and the moments of earlier queries where there are some.

    Buffers: those of `FittedOnce` in `clusters`, where the layer is causal and opens no keys, or cross.
    """

    one_kernel = True

    def __init__(self, heads: int, d: int, *, preset: Literal["cheap", "default", "quality", "bounded"] = "default",
                 block: Count | None = None, heavy: Whole | None = None, cells: Count | None = None,
                 first_order: bool | None = None, open: Whole | Sequence[Whole] | None = None,
                 exact_until: Whole | None = None, kv_heads: int | None = None, causal: bool = False,
                 cross: bool = False, scaling: float | None = None, normalize_qk: bool = False, fit_steps: Count = 10,
                 seed: int = 0, layer: int = 0, error: Annotated[float, above(0), below(1)] | None = None):
        super().__init__(heads, d, kv_heads, causal, cross, scaling, normalize_qk)
        self.preset, self.first_order = preset, first_order
        self.number, self.listed = layer, None if open is None or isinstance(open, int) else len(open)
        open = open_in_layer(open, layer)
        opens = 0 if open is None and preset == "bounded" else open
        self.sizes = preset_sizes(preset, block, heavy, cells, first_order, opens, exact_until, causal, error)
        self.opens = opens or 0                 # this and the next: of calls that are not causal
        self.exact_until = SHORT if exact_until is None else exact_until
        makes = cross or causal and not self.sizes.open
        self.clusters = FittedAgain(CodebookMaker(self.sizes.cells), self.kv_heads, d, fit_steps) if makes else None
        self.predicted = None    # mean predicted error of the calls of the last calibration
        self._said, self._changes = False, 0

    @property
    def exact_to(self) -> int:
        """Tokens of a sequence up to which this is exact attention."""
        return self.sizes.exact_until if self.causal else self.exact_until

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """q (B,H,L,d), k (B,Hkv,S,d), v (B,Hkv,S,dv), key_mask (B,S) True = keep -> (B,H,L,dv)."""
        if key_mask is None and self._is_one_kernel(q, k, v):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scaling)
            if not out.is_cpu or math.isfinite(out.sum(dtype=torch.float32).item()):    # else the other way says why
                return out
        self.check_call(q, k)
        changing = self.training and not in_backward()
        if changing and not self.going_on:
            self._advance(self.uses_codebook(q, k))
        result = self._attend(q, k, v, key_mask)
        if changing or self.calibrated is not None:
            self._note(q, k, key_mask)
        if self.calibrated is not None:
            self.predicted += float(result.predicted.mean())
            self.calibrated += 1
        return result.out

    def _is_one_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether this call, without a mask, is one of torch's kernel, as is seen at a glance: each query sees all its
        keys, and nothing is learned or noted. What is not so, wrong arguments too, goes the other way. Each function
        that is called here costs a short call."""
        until = self.sizes.exact_until if self.causal else self.exact_until
        return (q.shape == k.shape and q.ndim == 4 and VECTOR <= q.shape[2] <= until and q.shape[3] == self.d
                and q.shape[1] == self.heads == self.kv_heads and q.shape[:3] == v.shape[:3] and v.numel() > 0
                and q.dtype == k.dtype == v.dtype and q.is_floating_point() and q.device == k.device == v.device
                and self.clusters is None and self.calibrated is None and not self.normalize_qk
                and not torch.compiler.is_compiling() and not transformed(q, k, v))

    def estimate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self._attend(q, k, v, key_mask).out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Result:
        if self.first_order is not None or self.preset == "quality" or self.causal or k.shape[2] < LONG:
            return self._with_sizes(self.sizes, q, k, v, key_mask)
        plain = partial(self._with_sizes, self.sizes)
        long = partial(self._with_sizes, self.sizes._replace(first_order=True))
        if key_mask is None:
            return long(q, k, v, None)
        return by_rows(key_mask.sum(1) >= LONG, long, plain, q, k, v, key_mask)

    def _with_sizes(self, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Result:
        book, cross = None, self.cross or q.shape[2] != k.shape[2]
        sizes = sizes if self.causal else sizes._replace(exact_until=self.exact_until, open=self.opens)
        if self.causal and not sizes.open or (cross and self.clusters is not None and self.clusters.done):
            book = self.codebook(len(q))
        return near_far_attention(self.normalized(q), self.normalized(k), v, sizes, causal=self.causal, cross=cross,
                                  codebook=book, key_mask=key_mask, factor=self.scale)

    def stated(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Stated:
        """What causal calls state of their queries (`call.stated`)."""
        return stated(self.normalized(q), self.normalized(k), self.sizes, key_mask, self.scale)

    # ---- the codebook

    def uses_codebook(self, q: Tensor, k: Tensor) -> bool:
        if self.clusters is None or (self.causal and self.sizes.open):
            return False
        return self.causal or self.cross or q.shape[2] != k.shape[2]

    @property
    def serves_causal(self) -> bool:
        return self.sizes.open > 0 or self.clusters is not None

    @property
    def recurrent_heads(self) -> int:
        return self.kv_heads

    @property
    def learns(self) -> bool:
        """Whether calls as the layer now stands use what earlier calls or a calibration left here."""
        return self.clusters is not None and (self.causal and not self.sizes.open or self.cross)

    @property
    def version(self) -> int:
        """Changes with every refit and `set_open`: a decoding state is valid for one version."""
        return self._changes + (0 if self.clusters is None else int(self.clusters.fits))

    def codebook(self, batch: int = 1) -> Codebook:
        """Of (batch Hkv, ...)."""
        self._say_uncalibrated()
        shift, tilt, root, centres = (t.repeat(batch, 1, 1) for t in self.clusters.params())
        return Codebook(KeyMetric(shift, tilt, root), centres)

    def set_open(self, open: int) -> None:
        """Opens so many keys from now on, in a causal layer that opens some; decoding states of before are refused."""
        if not self.causal or not self.sizes.open or open < 1:
            raise ValueError(f"open = {open}: a causal layer of near-far attention that reads keys can read more or "
                             "fewer, at least one")
        self.sizes, self._changes = self.sizes._replace(open=open), self._changes + 1

    def decoding(self) -> NearFarState | RecallState:
        if not self.causal:
            raise ValueError("decoding needs causal attention")
        if self.sizes.open:
            return RecallState(self.sizes, self.kv_heads, self.version)
        return NearFarState(self.sizes, self.codebook(), self.kv_heads, self.version)

    def _advance(self, uses_codebook: bool) -> None:
        if uses_codebook and transforming():
            raise ValueError("this layer changes its codebook in training mode, which transforms of torch.func cannot "
                             "follow: call eval() before")
        if uses_codebook:
            self.clusters.advance()

    def _note(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        if self.uses_codebook(q, k):
            same = q.shape[2] == k.shape[2] and (self.causal or not self.cross)
            self.clusters.note(self.scaled(q), self.scaled(k), key_mask if same else None, key_mask)

    def _say_uncalibrated(self) -> None:
        if self.training or self.calibrated is not None or self._said or torch.compiler.is_compiling():
            return
        self._said = True
        if not self.clusters.done:
            warnings.warn("causal near-far attention has no codebook yet, so all far keys are one cell and the first "
                          "keys are the heavy ones: train it for fit_steps passes, or call "
                          "calibrate_attention(model, batches)", stacklevel=5)

    @contextmanager
    def calibration(self):
        self.calibrated, self.predicted = 0, 0.0
        if self.clusters is not None:
            self.clusters.calibrate(True)
        try:
            yield
        finally:
            self.predicted = self.predicted / self.calibrated if self.calibrated else None
            self.calibrated = None
            if self.clusters is not None:
                self.clusters.calibrate(False)

    def extra_repr(self) -> str:
        opens = self.sizes.open if self.causal else self.opens
        return (f"block={self.sizes.block}, heavy={self.sizes.heavy}, cells={self.sizes.cells}, "
                f"open={opens}, heads={self.heads}, d={self.d}, causal={self.causal}, cross={self.cross}")


def open_in_layer(open: int | Sequence[int] | None, layer: int) -> int | None:
    """The number of a layer where there is a list of them."""
    if open is None or isinstance(open, int):
        return open
    if layer >= len(open):
        raise ValueError(f"open holds {len(open)} numbers, and there is a layer {layer}: it takes one for each layer, "
                         "or one number for all")
    return open[layer]


def preset_sizes(preset: str, block: int | None, heavy: int | None, cells: int | None, first_order: bool | None,
                 open: int | None, exact_until: int | None, causal: bool, error: float | None) -> Sizes:
    """Those of the preset, but for those that are given. Raises ValueError for numbers that cannot be."""
    if preset == "bounded" and open:
        raise ValueError(f"open = {open} with preset = bounded, whose memory does not grow and holds no keys to read: "
                         "take preset cheap, default or quality")
    if causal and open == 0 and exact_until:
        raise ValueError(f"exact_until = {exact_until} with open = 0: the bounded memory of a causal layer holds no "
                         "keys to see exactly")
    if error is not None and open == 0:
        raise ValueError(f"error = {error} with open = 0 (preset bounded), which holds no keys that a query could see "
                         "where its bound is above that: take preset cheap, default or quality")
    given = {"block": block, "heavy": heavy, "cells": cells, "first_order": first_order, "open": open,
             "exact_until": 0 if open == 0 else exact_until, "error": error}
    return PRESETS[preset]._replace(**{name: value for name, value in given.items() if value is not None})


class Fitted(NamedTuple):
    """What a codebook is made of, (Hkv, ., d): see `KeyMetric` and `Codebook`."""

    shift: Tensor
    tilt: Tensor
    root: Tensor
    centres: Tensor


class CodebookMaker:
    """Makes codebooks of samples, as `FittedOnce` asks for it."""

    def __init__(self, cells: int):
        self.cells = cells

    def unfitted(self, d: int) -> Fitted:
        """All keys score alike, and there is one centre."""
        zero = torch.zeros(1, d)
        return Fitted(zero, zero.clone(), torch.zeros(d, d), torch.zeros(self.cells, d))

    def fit(self, stats: Statistics) -> Fitted:
        """Of each head's vectors that are there."""
        (_, queries), (_, keys) = stats.x.sets(), stats.y.sets()
        x, y = torch.stack(queries), torch.stack(keys)      # as many of each head
        if not x.shape[1] or not y.shape[1]:
            return Fitted(*(t.expand(len(x), -1, -1).to(x) for t in self.unfitted(x.shape[-1])))
        metric = KeyMetric.of(x, y, None, None)
        few = min(self.cells, y.shape[1])
        places = centres_of((y - metric.shift) @ metric.root, metric.log_weights(y - metric.shift), few)
        none = (places.abs() > AWAY / 2).any(-1, keepdim=True)     # more centres than vectors that differ
        centres = torch.linalg.solve_triangular(metric.root, places, upper=False, left=False) + metric.shift
        centres = torch.where(none, centres[:, :1], centres)
        return Fitted(*metric, torch.cat([centres, centres[:, :1].expand(-1, self.cells - few, -1)], 1))


class FittedAgain(FittedOnce):
    """Fitted again after each `steps` training passes."""

    vectors = SAMPLE

    @outside_graphs
    def advance(self) -> None:
        if int(self.passes) >= self.steps:
            self._fit({side: getattr(self, side) for side in ("queries", "keys")})
            self._forget()
