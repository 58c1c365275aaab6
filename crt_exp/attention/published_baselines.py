"""Attention of other papers: kernels other than softmax (Performers), Linformer, Reformer.

Notation: B batch, H heads, L queries, S keys or tokens, d, dv; R rounds of hashing, n chunks of c places.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import Redraws, in_backward
from crt_exp.attention.baselines import Baseline
from crt_exp.attention.checks import check_inputs, from_first, repeat_heads
from crt_exp.features.base import ONE, FeatureMap, Features, Projections
from crt_exp.options import Count, NotNegative, Whole, checked
from crt_exp.samplers import at_least_float32

Function = Literal["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
FUNCTIONS = {"relu": torch.relu, "elu+1": lambda t: F.elu(t) + 1, "sigmoid": torch.sigmoid, "abs": torch.abs,
             "gelu": F.gelu, "cos": torch.cos, "tanh": torch.tanh, "identity": lambda t: t}
SELF = -1e5  # the logit of a token to itself, so that it is seen where there is no other: the authors' value


@dataclass(frozen=True)
class Generalized(FeatureMap):
    """Features f(W u) / sqrt(M) + kernel_epsilon. Without `projection` W = I, M = d, and the noise may be None.

    With Gaussian rows W: Performers 2.2, A.4, D.3; elu+1 without projection is the Linear Transformer. It estimates no
    known kernel: it defines one.

    Denominators are positive for relu, elu+1, sigmoid, exp and abs; for the others choose what `attention` does with
    those that are not. The epsilon belongs to the definition of these kernels; it makes every key count a little.
    """

    f: Function = "relu"
    kernel_epsilon: NotNegative = 1e-3
    projection: bool = True

    estimates = False

    @property
    def positive(self) -> bool:
        return self.f in ("relu", "elu+1", "sigmoid", "exp", "abs")

    def projections(self, m) -> Projections | None:
        return super().projections(m) if self.projection else None

    def phi_q(self, x, noise=None, params=()) -> Features:
        if self.projection and noise is None:
            raise ValueError("generalised features with projection=True need a noise")
        u = noise.project(x) if self.projection else at_least_float32(x)
        scale = math.log(u.shape[-1]) / 2
        if self.f == "exp":  # in logs, so that it cannot overflow
            floor = math.log(self.kernel_epsilon) if self.kernel_epsilon else -math.inf
            return Features(ONE, torch.logaddexp(u - scale, u.new_tensor(floor)))
        value = FUNCTIONS[self.f](u) * math.exp(-scale) + self.kernel_epsilon
        return Features(value, u.new_zeros(1, 1))

    def log_kernel(self, x, y):
        raise NotImplementedError(f"generalised features ({self.f}) estimate no known kernel")


class Redrawn(Redraws, Baseline):
    """A layer whose tensor `name` is drawn from (seed, layer, draw), the same on every process: again after every
    `redraw_every` training passes, never in eval mode, in a backward pass or within a step; 0: never.

    Subclasses define `sample(generator)`, and call `register_drawn` at the end of `__init__`.
    """

    name: str

    def __init__(self, heads: int, d: int, *, redraw_every: int = 0, seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, seed=seed, layer=layer, **sizes)
        self.redraw_every, self.seeds = redraw_every, (seed, layer)

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        seed = zlib.crc32("/".join(map(str, (*self.seeds, draw))).encode())
        return {self.name: self.sample(torch.Generator().manual_seed(seed))}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        if self.training and self.redraw_every and not self.going_on and not in_backward():
            self.count_pass()
        return super().forward(q, k, v, key_mask)


@checked("attention")
class Linformer(Redrawn):
    """Softmax attention to `rank` mixtures of up to `length` keys, not causal (Wang et al., 2020).

    redraw_every: 0, the mixtures are learned, one projection for keys and one for values; n: they are random, one
    projection for both, and drawn again after n training passes, as Performers has it (appendix A.6; of its multiplier
    e^-delta the paper says too little). Entries begin as N(0, 1 / length) either way. Projections are shared by heads
    and batch; masked keys enter no mixture, and places are counted from the first real key of each row.

    Parameters key_projection and value_projection (rank, length), or the buffer `mixtures` of that shape.
    """

    can_be_causal, name = False, "mixtures"

    def __init__(self, heads: int, d: int, *, length: Count = 512, rank: Count = 128, redraw_every: Whole = 0,
                 seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, redraw_every=redraw_every, seed=seed, layer=layer, **sizes)
        if not 1 <= rank <= length:
            raise ValueError(f"rank = {rank}: it must lie between 1 and the length {length}")
        self.shape = (rank, length)
        if redraw_every:
            self.register_drawn(self.rows_of_draw(0))
        else:
            self.key_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)
            self.value_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator) / self.shape[1]**0.5

    def attend(self, x, y, v, *, causal, key_mask):
        check_inputs(x, y, v, None, (), causal, key_mask)
        most, S = self.shape[1], y.shape[2]
        if causal:
            raise ValueError("linformer mixes all keys: it cannot be causal")
        if most < S:
            raise ValueError(f"linformer was made for up to {most} keys, got {S}")
        y, v = repeat_heads(y, x.shape[1]), repeat_heads(v, x.shape[1])
        if key_mask is not None:
            y, v = (from_first(torch.where(key_mask[:, None, :, None], t, 0.0), key_mask, S) for t in (y, v))
        of_keys, of_values = self.projections()
        keys, values = of_keys[:, :S].to(y.dtype) @ y, of_values[:, :S].to(v.dtype) @ v
        return F.scaled_dot_product_attention(x, keys, values, scale=1.0)

    def projections(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values, (rank, length)."""
        return (self.rows("mixtures"),) * 2 if self.redraw_every else (self.key_projection, self.value_projection)


@checked("attention")
class Reformer(Redrawn):
    """Softmax over the keys that share a bucket with the query in one of `hashes` rounds, with keys q / |q|.

    Locality-sensitive hashing with shared queries and keys (Kitaev et al., 2020). Tokens are sorted by bucket and then
    by position; the place of a token is where it then lies. In each round a query sees the keys of its bucket that lie
    at most c places before it, and if not causal also those at most c after it: time and memory O(R S c). The paper
    lets a query see its own chunk and the one before: where a chunk begins depends on later tokens. A band of places
    does not, and so causal attention is that of each prefix.

    buckets: of each round, 1 or even; 2 S / chunk in the paper. chunk: places that a query looks back. The logit is
    scaling d^(1/2) q_i.q_j / |q_j|, that of a token to itself counts where it sees nothing else. redraw_every: training
    passes between draws of the rotations, 1 in the authors' code; 0: never. The keys that are given are not looked at.

    Buffers: rotations (H, R, d, buckets / 2), drawn from (seed, layer, draw); steps and draws.
    """

    name = "rotations"

    def __init__(self, heads: int, d: int, *, hashes: Count = 4, buckets: Count = 32, chunk: Count = 64,
                 redraw_every: Whole = 1, seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, redraw_every=redraw_every, seed=seed, layer=layer, **sizes)
        if buckets > 1 and buckets % 2:
            raise ValueError(f"buckets = {buckets}: each rotated axis has two of them, so their number is even, or 1")
        self.chunk, self.buckets, self.shape = chunk, buckets, (heads, hashes, d, buckets // 2)
        self.register_drawn(self.rows_of_draw(0))

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator)

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"reformer's keys are its queries, and there are {q.shape[2]} queries and {k.shape[2]} "
                             "keys: it attends to its own sequence alone, of which a cache holds no queries "
                             "(use_cache=False)")
        return q

    def attend(self, x, y, v, *, causal, key_mask):
        if x.shape[1] != self.heads:
            raise ValueError(f"q has {x.shape[1]} heads, but this Reformer layer was made for heads = {self.heads}")
        v = repeat_heads(v, x.shape[1])
        check_inputs(x, y, v, None, (), causal, key_mask)
        if x.shape[2] != y.shape[2] and not causal:
            raise ValueError(f"reformer with {x.shape[2]} queries and {y.shape[2]} keys: they must be one sequence")
        factor = (self.scaling * x.shape[3]) ** 0.5  # y is scaling^(1/2) q
        out = lsh_attention(y, v, self.hash(y, key_mask), self.chunk, causal, key_mask, factor)
        return out[:, :, -x.shape[2]:]

    def hash(self, y: Tensor, key_mask: Tensor | None) -> Tensor:
        """The bucket of each token in each round, (B, H, R, S): the largest of [y R, -y R]; padding has its own."""
        if self.buckets == 1:
            buckets = y.new_zeros(*y.shape[:2], self.shape[1], y.shape[2], dtype=torch.long)
        else:
            rotations = self.rows("rotations")
            sides = torch.einsum("bhsd,hrdn->bhrsn", y.detach().to(rotations.dtype), rotations)
            buckets = torch.cat([sides, -sides], -1).argmax(-1)
        return buckets if key_mask is None else buckets.masked_fill(~key_mask[:, None, None], self.buckets)


def lsh_attention(q: Tensor, v: Tensor, buckets: Tensor, chunk: int, causal: bool, key_mask: Tensor | None = None,
                  factor: float = 1.0) -> Tensor:
    """Softmax of factor q_i.q_j / |q_j| over the union of what the rounds let a query see: (B, H, S, dv).

    q (B,H,S,d), v (B,H,S,dv), buckets (B,H,R,S). Outputs at padding are 0. A pair that meets in N rounds counts once:
    its logit is log N less in each of them.
    """
    q, values = at_least_float32(q), at_least_float32(v)
    if key_mask is not None:  # padding may hold NaN
        q, values = (torch.where(key_mask[:, None, :, None], t, 0.0) for t in (q, values))
    S, chunk = q.shape[2], min(chunk, q.shape[2])
    order = (buckets * S + torch.arange(S, device=q.device)).argsort(-1)          # (B, H, R, S): token at each place
    places = order.argsort(-1)                                                    # (B, H, R, S): place of each token
    band = (places + buckets * (chunk + 1)).int()  # at most `chunk` apart for those that meet, and for no others
    unit = q / q.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    around = range(1) if chunk == S else range(-1, 1 if causal else 2)
    queries, keys, kept = (_sorted(t, order, chunk) for t in (factor * q, unit, values))
    logits = queries @ _around(keys, around).mT                                   # (B, H, R, n, c, w)
    met, own = _meetings(band, order, chunk, around, causal, key_mask)
    logits = torch.where(own, SELF, logits)
    if order.shape[2] > 1:
        logits = logits - met.clamp(min=1).to(logits.dtype).log()
    logits = logits.masked_fill(met == 0, -torch.inf)
    sums = logits.logsumexp(-1, keepdim=True)                                     # (B, H, R, n, c, 1)
    weights = torch.exp(logits - torch.where(sums.isinf(), 0.0, sums))
    out, sums = (_unsorted(t, places) for t in (weights @ _around(kept, around), sums))   # (B, H, R, S, dv or 1)
    shares = torch.where(sums.isinf().all(2, keepdim=True), 0.0, sums).softmax(2)
    return (shares * out).sum(2).to(v.dtype)


def _sorted(t: Tensor, order: Tensor, chunk: int) -> Tensor:
    """Vectors (B, H, S, k) of the tokens at each place, in chunks: (B, H, R, n, c, k); zeros after the last."""
    index = order.unsqueeze(-1).expand(*order.shape, t.shape[-1])
    rows = t.unsqueeze(2).expand(-1, -1, order.shape[2], -1, -1).gather(3, index)
    return F.pad(rows, (0, 0, 0, -rows.shape[3] % chunk)).unflatten(3, (-1, chunk))


def _around(t: Tensor, around: range, value: float = 0) -> Tensor:
    """Each chunk (.., n, c, k) with those around it: (.., n, len(around) c, k)."""
    n = t.shape[3]
    padded = F.pad(t, (0, 0, 0, 0, 1, 1), value=value)
    return torch.cat([padded[:, :, :, 1 + i:1 + i + n] for i in around], 4)


def _unsorted(t: Tensor, places: Tensor) -> Tensor:
    """Chunks (B, H, R, n, c, k) back in the order of tokens: (B, H, R, S, k)."""
    return t.flatten(3, 4).gather(3, places.unsqueeze(-1).expand(*places.shape, t.shape[-1]))


def _meetings(band: Tensor, order: Tensor, chunk: int, around: range, causal: bool,
              key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """In how many rounds the query sees the key, 0 where it does not in this one, and whether both are one token:
    (B, H, R, n, c, w)."""
    gap = _gaps(band.gather(3, order), chunk, around)
    here, met = _near(gap, chunk, causal), None
    if key_mask is not None:
        rows = key_mask[:, None, None].expand_as(order).gather(3, order)
        here = here & _around(_chunks(rows.int(), chunk, 0), around).mT.bool()
    for turn in range(order.shape[2] if order.shape[2] > 1 else 0):
        seen = _near(_gaps(band[:, :, turn, None].expand_as(order).gather(3, order), chunk, around), chunk, causal)
        met = seen.to(torch.uint8) if met is None else met.add_(seen)
    return here.to(torch.uint8) if met is None else met.mul_(here), gap == 0


def _near(gap: Tensor, chunk: int, causal: bool) -> Tensor:
    return (gap <= chunk) & (gap >= 0) if causal else gap.abs() <= chunk


def _gaps(band: Tensor, chunk: int, around: range) -> Tensor:
    """Differences of the numbers (B, H, R, S) of queries (.., n, c, 1) and of the keys around them (.., n, 1, w); far
    more than `chunk` where there is none."""
    none = 2**30
    return _chunks(band, chunk, none) - _around(_chunks(band, chunk, -none), around, value=-none).mT


def _chunks(t: Tensor, chunk: int, value: int) -> Tensor:
    return F.pad(t, (0, -t.shape[3] % chunk), value=value).unflatten(3, (-1, chunk)).unsqueeze(-1)
