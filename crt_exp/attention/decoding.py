"""Causal attention token by token, with a state of constant size.

The state holds M (dv + 1) numbers per head: the sums over past keys for each feature.
A single token updates and reads the state directly. Several tokens go through the `Partial` of their chunk, so that the
results equal those of the whole sequence up to rounding.
States are never changed in place, so copies are cheap and stay valid.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Self, cast

import torch
from torch import Tensor

from crt_exp.attention.checks import (
    check_inputs,
    check_result,
    compute_dtype,
    finite,
    repeat_heads,
    without_padding,
)
from crt_exp.attention.engines import PLAIN
from crt_exp.attention.engines.chunks import Chunked
from crt_exp.attention.engines.selection import choose_engine
from crt_exp.attention.feature_attention import positive_state
from crt_exp.attention.partials import DenominatorCount, Partial, finish, merge, read, with_ones
from crt_exp.features.base import BoundMap, FeatureMap, Features
from crt_exp.features.exponential import PositiveExponential
from crt_exp.samplers.noise import leaves, match_float64, no_autocast

CHANGED = "decoding state: noise or parameters have changed; start a new one"


class TokenState(ABC):
    """State of causal attention after the first `length` tokens."""

    length = 0
    version: Hashable = None  # tag of the projections and parameters that the state belongs to

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Append T >= 1 tokens and return their outputs (B,H,T,dv), without gradient.

        x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv); key_mask (B, T), True for tokens to keep.
        """

    def copy(self) -> Self:
        """Return a copy that can be continued independently."""
        return copy.copy(self)

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these batch entries in this order, for beam search.

        rows: any index of the batch dimension.
        """

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the stored tensors."""


class DecodingState(TokenState):
    """State of attention with feature maps: sums over past keys for each feature.

    Random projections and parameters are fixed, because the stored features belong to them. `step` raises ValueError
    after they were changed in place.

    Args:
        denominator: as in `attention`, and so are `normalize` and `counter`.
        version: tag of the projections and parameters, for callers that count redraws and refits.

    >>> from crt_exp.features import PosRF
    >>> from crt_exp.samplers import iid
    >>> state = DecodingState(PosRF(), iid(8, 4, torch.Generator()))
    >>> x, y, v = torch.randn(3, 1, 2, 5, 4)
    >>> tuple(state.step(x, y, v).shape), state.length
    ((1, 2, 5, 4), 5)
    """

    def __init__(
        self,
        phi: FeatureMap,
        noise,
        params=(),
        *,
        denominator: str = "none",
        normalize: bool = True,
        counter: DenominatorCount | None = None,
        version: Hashable = None,
    ):
        self.version = version
        # over past keys for each feature; None before the first key
        self.sums: Partial | None = None
        self._phi = phi
        self._noise = noise
        self._params = params
        self._bound = {torch.float32: phi.bind(noise, params)}
        self._fused = isinstance(phi, PositiveExponential) and normalize  # positive denominators
        self._policy = denominator
        self._normalize = normalize
        self._counter = None if self._fused else counter
        tensors = leaves(params)
        for part in leaves(noise):
            tensors += part.tensors()
        self._versions = [(t, changes(t)) for t in tensors]

    def tensors(self) -> list[Tensor]:
        if self.sums is None:
            return []
        return [t for t in self.sums if t is not None]

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Append tokens as `TokenState.step` does; a masked token does not change the state.

        Raises ValueError as `attention` does, and if the projections or parameters have changed.
        """
        dtype = check_inputs(x, y, v, self._noise, self._params, True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(
                f"T={x.shape[2]} queries, {y.shape[2]} keys: a step needs equal numbers"
            )
        self._check(x)
        if x.shape[2] == 1:
            out, self.sums = self.token(self.sums, x, y, v, key_mask)
        else:
            y = repeat_heads(y, x.shape[1])
            v = repeat_heads(v, x.shape[1])
            with no_autocast(x):
                chunked = self._chunked(dtype, key_mask)
                seen = chunked.seen(0) if self.length == 0 else None
                tokens = slice(0, x.shape[2])
                rows, state = chunked.stretch(x, y, v, self.sums, tokens, seen)
                out = self._outputs(rows).to(v.dtype)
                self.sums = _transposed(state)
        self.length += x.shape[2]
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Append T >= 1 tokens without computing outputs.

        y (B,H,T,d) has as many heads as the queries; v (B,H,T,dv). This is half of the work of `step`, in one pass: for
        a prompt whose outputs come from `attention`.
        """
        dtype = check_inputs(y, y, v, self._noise, self._params, True, key_mask)
        self._check(y)
        with no_autocast(y):
            engine = PLAIN
            if self._fused:
                engine = choose_engine(self._phi, y, y, v, self._noise, self._params)
            if engine != PLAIN:
                noise = match_float64(self._noise, dtype)
                vectors = (y.to(dtype), v.to(dtype))
                sums, top = positive_state(
                    *vectors, self._phi, noise, self._params, key_mask, dtype, engine
                )
                new = Partial(sums.mT, top.unsqueeze(-1))
            else:
                new = cast(Partial, self._chunked(dtype, key_mask).state(y, v, y.shape[2]))
        self.sums = _transposed(merge(self.sums, new))
        self.length += y.shape[2]

    @torch.no_grad()
    def token(
        self,
        past: Partial | None,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Partial]:
        """Return the output of one token and the new sums, as a pure function.

        All tokens have the same shapes, no operation waits for the device, and this object does not change. After
        `take` has read a prompt, this works in torch.compile(fullgraph=True) and CUDA graphs. Arguments are not
        checked.
        """
        y = repeat_heads(y, x.shape[1])
        v = repeat_heads(v, x.shape[1])
        dtype = compute_dtype(x, y, v)
        out_dtype = v.dtype
        with no_autocast(x):
            chunked = self._chunked(dtype, key_mask)
            y = y.to(dtype)
            v = v.to(dtype)
            y, v = without_padding(key_mask, y, v)
            keys, queries = _token_features(chunked.bound, y, x.to(dtype))
            if key_mask is not None:
                keep = key_mask[:, None, :, None]
                keys = keys._replace(log_scale=torch.where(keep, keys.log_scale, -torch.inf))
            sums = _add_key(past, keys, with_ones(v), chunked.modulus)
            return self._outputs(read(queries, sums)).to(out_dtype), sums

    def _chunked(self, dtype: torch.dtype, key_mask: Tensor | None) -> Chunked:
        if dtype not in self._bound:
            self._bound[dtype] = self._phi.bind(match_float64(self._noise, dtype), self._params)
        return Chunked(self._bound[dtype], key_mask, causal=True, modulus=self._policy == "clamp")

    def _outputs(self, rows: Partial) -> Tensor:
        check_result(rows.log_scale)
        if self._counter is not None:
            self._counter.add(rows)
        return finish(rows, self._policy, self._normalize)

    def select(self, rows: Tensor) -> None:
        if self.sums is None:
            return
        sums, top, modulus = self.sums
        if top.ndim >= 4 and len(top) == len(sums):  # else shared by all entries
            top = top[rows]
        if modulus is not None:
            modulus = modulus[rows]
        self.sums = Partial(sums[rows], top, modulus)

    def _check(self, x: Tensor) -> None:
        if any(changes(t) != count for t, count in self._versions):
            raise ValueError(CHANGED)
        if self.sums is not None and len(self.sums.sums) != x.shape[0]:
            sequences = len(self.sums.sums)
            raise ValueError(f"decoding state: {sequences} sequences, got {x.shape[0]}")


class RecurrentPast:
    """Decoding state of a random-feature layer that takes unscaled q, k and v.

    `past()` of every layer returns an object with this interface; baselines store keys and values instead.
    """

    def __init__(self, layer):
        self.layer = layer
        self.state = layer.decoding()

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return self.state.length

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append T tokens and return their outputs (B,H,T,dv), without gradient.

        q (B,H,T,d), k (B,Hkv,T,d) and v (B,Hkv,T,dv) are unscaled.
        """
        if self.state.version != self.layer.version:
            raise ValueError(CHANGED)
        return self.state.step(self.layer.scaled(q), self.layer.scaled(k), v)


def _token_features(bound: BoundMap, y: Tensor, x: Tensor) -> tuple[Features, Features]:
    """Return the features of one key and one query.

    One evaluation serves both where their maps are equal: it is most of the cost of a token.
    """
    if torch.compiler.is_compiling() or bound.phi_q is not bound.phi_k:
        return bound.phi_k(y).dense(), bound.phi_q(x).dense()
    f = bound.phi_k(torch.cat([y, x], 2)).dense()
    key_features = Features(*(_select_row(t, 0) for t in f))
    return key_features, Features(*(_select_row(t, 1) for t in f))


def _select_row(t: Tensor, i: int) -> Tensor:
    return t[..., i : i + 1, :] if t.ndim and t.shape[-2] > 1 else t


def _add_key(past: Partial | None, keys: Features, v: Tensor, with_modulus: bool) -> Partial:
    """Add one key to the sums: features (..., 1, M), v (B, H, 1, dv + 1)."""
    top = keys.log_scale
    if past is not None:
        top = torch.maximum(past.log_scale.mT, top)
    finite_top = finite(top)
    phi = keys._replace(log_scale=keys.log_scale - finite_top).exp()
    sums = v.mT * phi
    modulus = phi.abs() if with_modulus else None
    if past is not None:
        fade = torch.exp(past.log_scale.mT - finite_top)
        sums = (past.sums.mT * fade).addcmul_(v.mT, phi)
        if modulus is not None and past.modulus is not None:
            modulus = past.modulus.mT * fade + modulus
    return Partial(sums.mT, top.mT, None if modulus is None else modulus.mT)


def _transposed(p: Partial) -> Partial:
    """Return equal sums in the layout of `_add_key`, columns in memory first."""
    modulus = None if p.modulus is None else p.modulus.mT.contiguous().mT
    return Partial(p.sums.mT.contiguous().mT, p.log_scale.mT.contiguous().mT, modulus)


def changes(t: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 in inference mode."""
    return 0 if t.is_inference() else t._version
