"""`RandomFeatureAttention`: linear attention with a feature map, as a module.

The state of a layer changes only at the start of a forward pass in training. The statistics of that pass stay pending
and are folded in at the start of the next one.
A checkpointed layer runs again in the backward pass, where nothing changes, so that it uses the same projections and
parameters.
Within `same_step` a pass continues the step of the previous pass: nothing changes at its start, and statistics are
pooled.

Notation: B batch, H query heads, Hkv key heads, L queries, S keys, d, m projections. q, k and v are unscaled; x = scale
q and y = scale k, where scale^2 = scaling is the factor of q.k in the logits.
"""

import copy
import sys
import weakref
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crt_exp.attention.base import Redraws, in_backward, read_value
from crt_exp.attention.baselines import exact_attention
from crt_exp.attention.checks import check_key_mask
from crt_exp.attention.compiled import compiled
from crt_exp.attention.decoding import DecodingState
from crt_exp.attention.feature_attention import attention
from crt_exp.attention.partials import DenominatorCount
from crt_exp.attention.running import MEANS, Running, averages, fit_to_call, for_query_heads
from crt_exp.attention.state import FittedOnce, FittedToSequences
from crt_exp.features.base import FeatureMap, distinct
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers import DenseNoise, Noise
from crt_exp.samplers.noise import Nested, map_leaves, transforming
from crt_exp.validation import Count, Whole, checked, warn

# A torch operator takes only tensors and numbers, so `_count_pass` looks its layer up by id.
_MODULES: "weakref.WeakValueDictionary[int, RandomFeatureAttention]" = weakref.WeakValueDictionary()


@checked("attention")
class RandomFeatureAttention(Redraws, Running):
    """Linear attention with a feature map and random projections for each head.

    The parameters of a fitted map depend on the kind of attention, so that no query uses later queries:

    - Bidirectional self-attention: queries and keys of the call, for each batch entry and key head.
    - Causal attention: running averages over earlier batches (`decay`), with bias correction. Before the first
      training pass or calibration: zero vectors (A = 0).
    - Cross-attention (`cross`, and bidirectional calls with different numbers of queries and keys): the keys of the
      call and running averages of queries. Without averages, queries are assumed to be as large as the keys, with
      either sign.
    - Maps that are fitted to vectors (clusters, AutoRF), in any attention: a sample of the first `fit_steps` training
      passes or of a calibration, once. Before the fit: the unfitted parameters.

    Buffers: omega (H, m, d), or one buffer for each independent set of projections, named after its part, such as
    omega_0 and omega_1_0 (see `FeatureMap.projections`); steps and draws; running and pending statistics where a fitted
    map is causal or cross, with second moments (Hkv, d, d) if the map uses them; those of `FittedOnce` in `clusters`.
    Checkpoints restore all of them exactly. Projections depend only on (seed, layer, draw, name), so that all ranks
    agree.

    Args:
        phi: feature map of the softmax kernel, possibly a sum or product of maps.
        m: number of projections.
        kv_heads: number of key heads, by default `heads`.
        scaling: factor of q.k in the logits, by default d^(-1/2).
        redraw_every: training passes between redraws; 0 for never. Eval mode, backward passes and decoding never
            redraw.
        normalize_qk: scale queries and keys to norm d^(1/4), the norm of x for entries of unit variance.
        normalize: False omits the division by the denominator; outputs then grow with the number of keys.
        denominator: see `attention`. Non-positive denominators are counted in `denominators`.
        fit_steps: training passes that are sampled for a fit to vectors.
        layer: index of the layer, part of the seed.
        learn: "parameters" trains the parameters of the map from one fit on; all inputs then share them. "projections"
            also trains the random projections, which makes estimates biased. Learned maps (hedgehog) always train their
            projections.

    Raises:
        ValueError: phi estimates another kernel, or cannot be trained as `learn` asks.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import orthogonal
    >>> layer = RandomFeatureAttention(PosRF(), orthogonal, 32, heads=2, d=8)
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> tuple(layer(q, k, v).shape)
    (1, 2, 10, 8)
    """

    position_dependent = False

    def __init__(
        self,
        phi: FeatureMap,
        sampler: Callable[..., Noise] | None,
        m: int,
        heads: int,
        d: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        cross: bool = False,
        scaling: float | None = None,
        redraw_every: Whole = 0,
        normalize_qk: bool = False,
        normalize: bool = True,
        denominator: str = "none",
        decay: float = 0.99,
        fit_steps: Count = 10,
        seed: int = 0,
        layer: int = 0,
        learn: Literal["none", "parameters", "projections"] = "none",
    ):
        super().__init__(heads, d, kv_heads, causal, cross, scaling, normalize_qk)
        if phi.kernel != "softmax":
            raise ValueError(f"{phi}: kernel={phi.kernel}; attention needs kernel='softmax'")
        if phi.on_sequences:
            phi = phi.of_size(m)
        self.phi = phi
        self.sampler: Any = sampler  # None if the map needs no projections
        self.m = m
        self.redraw_every = redraw_every
        self.normalize = normalize
        self.denominator = denominator
        self.decay = decay
        self.recurrent_heads = heads
        self.seed = seed
        self.layer = layer
        self.denominators = DenominatorCount()
        self.projections = phi.projections(m)
        # equal names are one object, so that shared projections stay shared
        self._buffer_names = map_leaves(lambda p: sys.intern(p.buffer), self.projections)
        check_learning(phi, learn, redraw_every)
        noises = self._draw(0)
        # by buffer of projections
        self.gaussian = {name: noise.gaussian for name, noise in noises.items()}
        rows = {name: noise.rows().contiguous().clone() for name, noise in noises.items()}
        trained_rows = phi.learned or learn == "projections"
        if trained_rows:
            for name, t in rows.items():
                self.register_parameter(name, nn.Parameter(t))
            rows = {}
        self.register_drawn(rows)
        self._warned = False
        trained = learn != "none" and phi.fitted
        self.clusters = None
        if phi.on_sequences:
            self.clusters = FittedToSequences(phi, heads, d, trained, causal)
        elif phi.on_vectors or trained:
            self.clusters = FittedOnce(phi, self.kv_heads, d, fit_steps, trained)
        moments = [name for name in (*MEANS, "minimum") if name in phi.moments]
        if phi.second_moments:
            moments.append("second")
        self.moments = tuple(moments)
        if phi.fitted and (causal or cross) and self.clusters is None:
            self._register_statistics()
        _MODULES[id(self)] = self

    def __setstate__(self, state) -> None:  # copies and unpickled layers register themselves
        super().__setstate__(state)
        _MODULES[id(self)] = self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the attention outputs (B,H,L,dv).

        q (B,H,L,d), k (B,Hkv,S,d) and v (B,Hkv,S,dv) are unscaled; key_mask (B,S) is True for keys to keep.
        """
        self.check_call(q, k)
        if key_mask is not None:
            check_key_mask(key_mask, k)
        if self.normalize_qk:
            q = self.normalized(q)
            k = self.normalized(k)
        changing = self.training and not in_backward()
        if changing and not self.continues_step:
            self._advance()
        if self.calibrated is not None and self.phi.on_sequences:
            x = q * self.scale
            y = k * self.scale
            out = exact_attention(x, y, v, causal=self.causal, key_mask=key_mask)
        else:
            out = self._attend(q, k, v, key_mask, self.denominators)
        if changing or self.calibrated is not None:
            if self.running:
                self._note(q, k, key_mask)
            elif self.clusters is not None:
                self._note_sample(q, k, key_mask)
        return out

    def estimate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the output of `forward` without changing the state of the layer."""
        return self._attend(self.normalized(q), self.normalized(k), v, key_mask, DenominatorCount())

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        counter: DenominatorCount,
    ) -> Tensor:
        return attention(
            q,
            k,
            v,
            self.phi,
            self.noise,
            self.fitted_params(q, k, key_mask),
            causal=self.causal,
            key_mask=key_mask,
            denominator=self.denominator,
            normalize=self.normalize,
            counter=counter,
            scale=self.scale,
        )

    @property
    def noise(self) -> Nested:
        """Random projections as `phi` takes them.

        A Noise of batch (H,), a tuple for a map with parts, or None for a map without projections.
        """
        return map_leaves(
            lambda name: DenseNoise(self.rows(name), self.gaussian[name]), self._buffer_names
        )

    @property
    def width(self) -> int:
        """Number M of features."""
        if not self.gaussian:  # a map without projections
            return self.phi.width(self.d)
        return self.phi.width(self.m)

    @property
    def serves_causal(self) -> bool:
        return not self.phi.fitted or self.keeps_statistics or self.clusters is not None

    @property
    def learns(self) -> bool:
        return self.running or self.clusters is not None

    @property
    def version(self) -> tuple[int, int]:
        """Changes with every redraw and refit, which invalidate decoding states."""
        if self.clusters is not None:
            return read_value(self.draws), read_value(self.clusters.fits)
        folds = read_value(self.folds) if self.running else 0
        return read_value(self.draws), folds

    def decoding(self) -> DecodingState:
        """Return a new state for token-by-token causal attention on x = `scaled(q)`.

        Raises ValueError if the layer is not causal.
        """
        if not self.causal:
            raise ValueError("causal=False: decoding needs causal=True")
        return DecodingState(
            self.phi,
            self.noise,
            self.fitted_params(),
            denominator=self.denominator,
            normalize=self.normalize,
            counter=self.denominators,
            version=self.version,
        )

    def extra_repr(self) -> str:
        sampler = getattr(self.sampler, "__name__", self.sampler)
        return (
            f"{self.phi}, {sampler}, m={self.m}, heads={self.heads}, d={self.d}, "
            f"causal={self.causal}, cross={self.cross}, redraw_every={self.redraw_every}"
        )

    # ---- noise and parameters

    def _draw(self, draw: int) -> dict[str, Noise]:
        """Sample the independent sets of projections by buffer name."""
        drawn = {}
        for p in distinct(self.projections):
            seed = f"{self.seed}/{self.layer}/{draw}"
            if p.drawn_as:
                seed += f"/{p.drawn_as}"
            generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
            drawn[p.buffer] = self.sampler(p.m, self.d, generator, batch=(self.heads,))
        return drawn

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        return {name: noise.rows() for name, noise in self._draw(draw).items()}

    def fitted_params(self, q: Any = None, k: Any = None, key_mask: Tensor | None = None):
        """Return the parameters of the map for queries and keys, (H, ., .) or for each batch entry.

        Those of causal attention and of maps that are fitted once do not depend on the inputs.
        """
        if not self.phi.fitted:
            return self.phi.fit(None)
        heads = self.kv_heads
        if self.causal or self.clusters is not None:
            if not (self.training or self._warned):
                self._warn_uncalibrated()
            if self.clusters is None:
                params = self.fit_to_running()
            else:
                params = self.clusters.params()
                heads = self.clusters.heads
        elif not self.cross and q.shape[2] == k.shape[2]:
            fit = compiled(fit_to_call, q.device)
            params = fit(self.phi, q, k, key_mask, self.scale)
        else:
            params = self.phi.fit(self._without_queries(k, key_mask))
        if heads != self.heads:
            params = for_query_heads(params, self.heads // heads)
        return params

    def _without_queries(self, k: Tensor, key_mask: Tensor | None) -> Statistics:
        """Return statistics of these keys and of the queries of earlier batches.

        The queries of the call may lie in the future of each other.
        """
        mask = None if key_mask is None else key_mask[:, None]
        keys = Moments.from_vectors(k, mask, self.scale)
        queries = keys.mirrored(self.moments)
        if self.keeps_statistics:
            known = self.running_weight > 0
            running = averages(self.running_weight, self.statistics("running")[0])
            values = {}
            for name in self.moments:
                value = getattr(running, name)
                values[name] = torch.where(known, value, getattr(queries, name))
            queries = Moments.from_values(**values)
        return Statistics(queries, keys)

    # ---- redraws and running statistics

    def _advance(self) -> None:
        """Fold in the statistics of the last pass, and redraw if that is due."""
        unfitted = self.clusters
        if unfitted is not None and unfitted.done:
            unfitted = None
        if transforming() and (self.running or self.redraw_every or unfitted is not None):
            raise ValueError(
                "training mode updates state, which torch.func cannot trace: call eval() first"
            )
        if self.running:
            self._fold(1 - self.decay)
        if unfitted is not None:
            unfitted.advance()
        if not self.redraw_every or not self.gaussian:
            return
        if torch.compiler.is_compiling():
            omegas = [self.rows(name) for name in self.gaussian]
            _count_pass(omegas, self.steps, self.draws, self.redraw_every, id(self))
        else:
            self.count_pass()

    def _warn_uncalibrated(self) -> None:
        if self.calibrated is not None or torch.compiler.is_compiling():
            return
        self._warned = True
        state = "using A = 0"
        if self.clusters is not None:
            state = self.phi.until_fitted
            uncalibrated = not read_value(self.clusters.fits)
        else:
            uncalibrated = float(self.running_weight) <= 0
        if uncalibrated:
            warn(
                f"{self.mechanism or type(self.phi).__name__}: no statistics yet, {state}: train, or call "
                "calibrate_attention(model, batches)"
            )

    def _note_sample(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        """Store a sample for the fit of a map that is fitted once."""
        clusters: Any = self.clusters
        if self.calibrated is None and clusters.done:
            return
        same = q.shape[2] == k.shape[2] and (self.causal or not self.cross)
        clusters.causal = self.causal
        query_mask = key_mask if same else None
        clusters.note(q * self.scale, k * self.scale, query_mask, key_mask)

    @contextmanager
    def calibration(self):
        """Replace the fitted state by that of the passes in eval mode within the context.

        Running statistics become the unweighted mean over the passes. Maps that are fitted to vectors use all passes.

        Raises:
            ValueError: the passes give no finite parameters; the state stays as it was.
        """
        if self.keeps_statistics:
            self._forget()
        before = copy.deepcopy(self.state_dict())
        try:
            with super().calibration():
                yield
                if self.running:
                    groups = self.heads // self.kv_heads
                    params = for_query_heads(self.fit_to_running(), groups)
                    self.phi.bind(self.noise, params)  # raises for unusable values
        except Exception:
            self.load_state_dict(before)
            raise

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name in self.gaussian:
            saved = state_dict.get(prefix + name)
            own = getattr(self, name)
            if saved is not None and saved.shape != own.shape:
                raise ValueError(
                    f"{prefix}{name}: saved (heads, m, d)={tuple(saved.shape)}, expected "
                    f"{tuple(own.shape)}; use m={saved.shape[1]}, or load without these buffers"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_learning(phi: FeatureMap, learn: str, redraw_every: int) -> None:
    """Raise ValueError if the map cannot be trained as `learn` asks.

    Trained projections cannot be redrawn either.
    """
    if learn != "none" and not phi.trainable:
        raise ValueError(
            f"learn={learn}: {type(phi).__name__} has no trainable parameters; expected pos, hyp, oprf, "
            "sderf, mixture or hedgehog"
        )
    if learn == "parameters" and not (phi.fitted or phi.learned):
        raise ValueError(f"learn=parameters: {phi} has none; use learn=projections")
    if redraw_every and (phi.learned or learn == "projections"):
        raise ValueError(f"redraw_every={redraw_every}: expected 0 with trained projections")


@torch.library.custom_op("crt_exp::count_pass", mutates_args=("omegas", "steps", "draws"))
def _count_pass(
    omegas: list[Tensor],
    steps: Tensor,
    draws: Tensor,
    every: int,
    module: int,
) -> None:
    """Count a pass and redraw in place, as an operator opaque to torch.compile."""
    if int(steps) and int(steps) % every == 0:
        draws.add_(1)
        layer = _MODULES[module]
        layer.copied_draw = int(draws)
        drawn = layer.rows_of_draw(layer.copied_draw)
        for omega, rows in zip(omegas, drawn.values(), strict=True):
            omega.copy_(rows)
    steps.add_(1)


@_count_pass.register_fake
def _(omegas, steps, draws, every, module):
    return None
