"""Decoding: causal attention token by token, with a state of M (dv + 1) numbers a head, whatever the length.

The state holds what the keys so far have left in each feature. One token is added to it and read from it at once;
several go through the `Partial` of their own chunk, so that nothing but rounding distinguishes the result from that of
the whole sequence.

States are never changed in place: a copy, which costs nothing, is a point to come back to.
"""

import copy
from collections.abc import Hashable

import torch
from torch import Tensor

from crt_exp.attention.call import positive_state
from crt_exp.attention.checks import check_inputs, check_result, compute_dtype, finite, repeat_heads
from crt_exp.attention.engines.chunks import Chunked
from crt_exp.attention.partials import DenominatorCount, Packed, Partial, check_policy, finish, merge
from crt_exp.features.base import BoundMap, FeatureMap, Features
from crt_exp.features.exponential import PositiveExponential
from crt_exp.samplers.noise import as_given, leaves, precise


class DecodingState:
    """What causal attention remembers of the tokens so far, for fixed noise and parameters.

    `version` tags them for a caller that counts redraws and refits: a `step` with another version is refused, and so is
    one after the noise or the parameters were changed in place. The state holds features of the old ones, which mean
    nothing in the new.
    """

    def __init__(self, phi: FeatureMap, noise, params=(), *, denominator: str = "none", normalize: bool = True,
                 counter: DenominatorCount | None = None, version: Hashable = None):
        check_policy(denominator)
        self.version, self.length, self.kept = version, 0, None
        self._phi, self._noise, self._params = phi, noise, params
        self._bound = {torch.float32: phi.bind(noise, params)}
        self._fused = isinstance(phi, PositiveExponential) and normalize  # their denominators are positive
        self._policy, self._normalize, self._counter = denominator, normalize, None if self._fused else counter
        held = [t for n in leaves(noise) for t in n.tensors()] + leaves(params)
        self._seen = [(t, changes(t)) for t in held]

    @property
    def sums(self) -> Partial | None:
        """What the keys have left in the features; None before the first."""
        return None if self.kept is None else self.kept.partial()

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> Tensor:
        """Takes T >= 1 new tokens x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv) and returns their outputs (B,H,T,dv),
        no gradient.

        key_mask (B, T), True = keep: a masked token leaves the state untouched. Raises ValueError as `attention` does,
        and where the noise or the parameters are not those that the state was made with.
        """
        dtype = check_inputs(x, y, v, self._noise, self._params, True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: a step takes both of each new token")
        self._check(x, version)
        if x.shape[2] == 1:
            out, self.kept = self.token(self.kept, x, y, v, key_mask)
        else:
            y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
            with as_given(x):
                work = self._chunked(dtype, key_mask)
                seen = work.seen(0) if self.kept is None else None
                rows, state = work.stretch(x, y, v, self.sums, slice(0, x.shape[2]), seen)
                out, self.kept = self._outputs(rows).to(v.dtype), Packed.of(state)
        self.length += x.shape[2]
        return out

    @torch.no_grad()
    def take(self, y: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Takes T >= 1 tokens whose outputs are known or not wanted:
        y (B,H,T,d) with as many heads as the queries, v (B,H,T,dv).

        Half of the work of `step`, in one pass: for a prompt whose outputs `attention` gives.
        """
        dtype = check_inputs(y, y, v, self._noise, self._params, True, key_mask)
        self._check(y)
        with as_given(y):
            if self._fused:
                sums, top = positive_state(y, v, self._phi, precise(self._noise, dtype), self._params, key_mask, dtype)
                new = Packed(sums, top.unsqueeze(-2)).partial()
            else:
                new = self._chunked(dtype, key_mask).state(y, v, y.shape[2])
        self.kept = Packed.of(merge(self.sums, new))
        self.length += y.shape[2]

    @torch.no_grad()
    def token(self, kept: Packed | None, x: Tensor, y: Tensor, v: Tensor,
              key_mask: Tensor | None = None) -> tuple[Tensor, Packed]:
        """`step` of one token as a function of what is kept: its outputs, and what is kept after it.

        Of the same shapes for each token, with nothing asked of the device and nothing of this object changed: for
        torch.compile(fullgraph=True) and CUDA graphs, after a prompt that `take` has taken. Arguments are not checked.
        """
        y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
        dtype, given = compute_dtype(x, y, v), v.dtype
        with as_given(x):
            work, y, v = self._chunked(dtype, key_mask), y.to(dtype), v.to(dtype)
            keep = None if key_mask is None else key_mask[:, None, :, None]
            if keep is not None:
                y, v = torch.where(keep, y, 0.0), torch.where(keep, v, 0.0)  # padding may hold NaN
            keys, queries = _features(work.bound, y, x.to(dtype))
            if keep is not None:
                keys = keys._replace(log_scale=torch.where(keep, keys.log_scale, -torch.inf))
            kept = _added(kept, keys, torch.cat([v, torch.ones_like(v[..., :1])], -1).mT, work.modulus)
            return self._outputs(_read(kept, queries)).to(given), kept

    def _chunked(self, dtype: torch.dtype, key_mask: Tensor | None) -> Chunked:
        if dtype not in self._bound:
            self._bound[dtype] = self._phi.bind(precise(self._noise, dtype), self._params)
        return Chunked(self._bound[dtype], key_mask, causal=True, modulus=self._policy == "clamp")

    def _outputs(self, rows: Partial) -> Tensor:
        check_result(rows.log_scale)
        if self._counter is not None:
            self._counter.add(rows)
        return finish(rows, self._policy, self._normalize)

    def copy(self) -> "DecodingState":
        """The same state, to go on from here in two ways."""
        return copy.copy(self)

    def select(self, rows: Tensor) -> None:
        """Keeps these batch entries, in this order: what a beam search needs. rows: as tensors are indexed."""
        if self.kept is not None:
            batch = len(self.kept.sums)  # parts of other shapes are the same for all entries
            chosen = (t if t is None or t.ndim < 4 or len(t) != batch else t[rows] for t in self.kept)
            self.kept = Packed(*chosen)

    def _check(self, x: Tensor, version: Hashable = None) -> None:
        changed = any(changes(t) != count for t, count in self._seen)
        if changed or (version is not None and version != self.version):
            raise ValueError(f"the decoding state belongs to version {self.version} of the noise and parameters, which "
                             f"have changed since (now {version}): start a new state, and keep them fixed while "
                             "decoding")
        if self.kept is not None and len(self.kept.sums) != x.shape[0]:
            raise ValueError(f"the decoding state holds {len(self.kept.sums)} sequences, got {x.shape[0]}")


class RecurrentPast:
    """What a layer with random features remembers of the tokens so far: `step` takes and gives what the layer does.

    The interface of every layer's `past()`: baselines keep keys and values behind it.
    """

    def __init__(self, layer):
        self.layer, self.state = layer, layer.decoding()

    @property
    def length(self) -> int:
        """Tokens that were taken."""
        return self.state.length

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """New tokens q (B,H,T,d), k (B,Hkv,T,d), v (B,Hkv,T,dv), unscaled -> their outputs (B,H,T,dv), no gradient."""
        scaled = self.layer.scaled
        return self.state.step(scaled(q), scaled(k), v, version=self.layer.version)


def _features(bound: BoundMap, y: Tensor, x: Tensor) -> tuple[Features, Features]:
    """Those of one key and one query; at once where both have the same map, which is most of what a token costs."""
    if torch.compiler.is_compiling() or bound.phi_q is not bound.phi_k:
        return bound.phi_k(y).dense(), bound.phi_q(x).dense()
    f = bound.phi_k(torch.cat([y, x], 2)).dense()
    return Features(*(_row(t, 0) for t in f)), Features(*(_row(t, 1) for t in f))


def _row(t: Tensor, i: int) -> Tensor:
    return t[..., i:i + 1, :] if t.ndim and t.shape[-2] > 1 else t


def _added(kept: Packed | None, keys: Features, v: Tensor, with_modulus: bool) -> Packed:
    """The state with one more key: features of one row, v (B, H, dv + 1, 1)."""
    top = keys.log_scale if kept is None else torch.maximum(kept.top, keys.log_scale)
    at = finite(top)
    phi = keys.value * torch.exp(keys.log_scale - at)
    modulus = phi.abs() if with_modulus else None
    if kept is None:
        return Packed(v * phi, top, modulus)
    fade = torch.exp(kept.top - at)
    return Packed((kept.sums * fade).addcmul_(v, phi), top, None if modulus is None else kept.modulus * fade + modulus)


def _read(kept: Packed, queries: Features) -> Partial:
    log = queries.log_scale + kept.top
    top = log.amax(-1, keepdim=True)
    phi = queries.value * torch.exp(log - finite(top))
    sums = phi @ kept.sums.mT
    modulus = None if kept.modulus is None else phi.abs() @ kept.modulus.mT
    return Partial(sums[..., :-1], sums[..., -1:], top, modulus)


def changes(t: Tensor) -> int:
    """How often a tensor was changed in place, where it counts that."""
    return 0 if t.is_inference() else t._version
