"""Decoding: causal attention token by token, with a state of M (dv + 1) numbers a head, whatever the length.

The state is a `Partial` whose rows are the features; a token is merged into it and read from it, so that nothing but rounding
distinguishes the result from that of the whole sequence at once.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from crt_exp.attention.checks import check_inputs, compute_dtype, repeat_heads
from crt_exp.attention.chunked import PIECES, Call, Part, chunks
from crt_exp.attention.partials import DenominatorCount, Partial, check_policy
from crt_exp.features.base import Bound, FeatureMap
from crt_exp.samplers import Noise
from crt_exp.samplers.noise import precise


class DecodingState:
    """What causal attention remembers of the tokens so far, for fixed noise and parameters.

    `version` tags them for a caller that counts redraws and refits: a `step` with another version is refused, and so is one after
    the noise or the parameters were changed in place. The state holds features of the old ones, which mean nothing in the new.
    """

    def __init__(self, phi: FeatureMap, noise, params=(), *, denominator: str = "none", normalize: bool = True,
                 counter: DenominatorCount | None = None, version: Hashable = None):
        check_policy(denominator)
        self.version, self.length, self.sums = version, 0, None
        self._noise, self._params = noise, params
        self._bound = {torch.float32: phi.bind(noise, params)}
        self._call = Call(phi, noise, params, True, None, denominator, normalize, counter)
        self._marks = _marks(noise) + _marks(params)

    @torch.no_grad()
    def step(self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None = None, version: Hashable = None) -> Tensor:
        """Takes T >= 1 new tokens x (B,H,T,d), y (B,Hkv,T,d), v (B,Hkv,T,dv) and returns their outputs (B,H,T,dv), no gradient.

        key_mask (B, T), True = keep: a masked token leaves the state untouched. Raises ValueError as `attention` does, and where
        the noise or the parameters are not those that the state was made with.
        """
        check_inputs(x, y, v, self._noise, self._params, True, key_mask)
        if x.shape[2] != y.shape[2]:
            raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: a step takes both of each new token")
        self._check(x, version)
        y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
        out = v.new_empty(*x.shape[:3], v.shape[3])
        self._advance(Part(self._call, self._bind(compute_dtype(x, y, v)), key_mask), x, y, v, out)
        self.length += x.shape[2]
        return out

    def _bind(self, dtype: torch.dtype) -> Bound:
        if dtype not in self._bound:
            self._bound[dtype] = self._call.phi.bind(precise(self._noise, dtype), self._params)
        return self._bound[dtype]

    def _advance(self, part: Part, x: Tensor, y: Tensor, v: Tensor, out: Tensor) -> None:
        seen = None
        if part.keep is not None and self.sums is None:
            seen = part.keep[:, None].cumsum(-1) > 0
        for chunk in chunks(x.shape[2]):
            for length in PIECES:
                after = part.pieces(x, y, v, 0, chunk, min(length, x.shape[2]), self.sums, seen, out)
                if after is not None:
                    break
            self.sums = after

    def select(self, rows: Tensor) -> None:
        """Keeps these batch entries, in this order: what a beam search needs."""
        if self.sums is not None:
            self.sums = Partial(*(None if t is None else t.expand(self._batch, *t.shape[1:])[rows] for t in self.sums))

    @property
    def _batch(self) -> int:
        return self.sums.numerator.shape[0]

    def _check(self, x: Tensor, version: Hashable) -> None:
        changed = _marks(self._noise) + _marks(self._params) != self._marks
        if changed or (version is not None and version != self.version):
            raise ValueError(f"the decoding state belongs to version {self.version} of the noise and parameters, which have "
                             f"changed since (now {version}): start a new state, and keep them fixed while decoding")
        if self.sums is not None and self._batch != x.shape[0]:
            raise ValueError(f"the decoding state holds {self._batch} sequences but {x.shape[0]} came")


def _marks(of) -> tuple:
    """Counters of in-place changes of all tensors of a noise or parameters."""
    if isinstance(of, Tensor):
        return (0 if of.is_inference() else of._version,)
    if isinstance(of, Noise):
        of = tuple(of.__dict__.values())
    return tuple(m for part in of for m in _marks(part)) if isinstance(of, tuple) else ()
