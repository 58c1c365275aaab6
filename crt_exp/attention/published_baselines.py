"""Attention of other papers: generalized Performers kernels, Linformer, Reformer.

Notation: B batch, H heads, L queries, S keys or tokens, d, dv, R hashing rounds, n chunks of c positions.
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
from crt_exp.attention.checks import check_inputs, from_first, repeat_heads, without_padding
from crt_exp.features.base import ONE, FeatureMap, Features, Projections
from crt_exp.samplers import at_least_float32
from crt_exp.validation import Count, NotNegative, Whole, checked

Function = Literal["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
FUNCTIONS = {
    "relu": torch.relu,
    "elu+1": lambda t: F.elu(t) + 1,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "gelu": F.gelu,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "identity": lambda t: t,
}
# logit of a token with itself, which counts only if there is no other; the authors' value
SELF = -1e5


@dataclass(frozen=True)
class Generalized(FeatureMap):
    """Generalized attention with features f(W u) / sqrt(M) + kernel_epsilon.

    These are the generalized kernels of Performers (sections 2.2, A.4, D.3) if W is Gaussian. Without `projection`, W =
    I and M = d, and the projections may be None; elu+1 then gives the Linear Transformer.
    The features define a kernel of their own and estimate no known kernel. The epsilon belongs to its definition and
    gives every key a small weight.
    Denominators are positive for relu, elu+1, sigmoid, exp and abs. The other functions need a `denominator` policy of
    `attention`.

    >>> phi = Generalized(f="elu+1", projection=False, kernel_epsilon=0.0)  # Linear Transformer
    >>> phi.phi_q(torch.zeros(1, 4)).exp()
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
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
            raise ValueError("noise=None: expected a noise with projection=True")
        u = noise.project(x) if self.projection else at_least_float32(x)
        scale = math.log(u.shape[-1]) / 2
        if self.f == "exp":  # logs cannot overflow
            floor = math.log(self.kernel_epsilon) if self.kernel_epsilon else -math.inf
            return Features(ONE, torch.logaddexp(u - scale, u.new_tensor(floor)))
        value = FUNCTIONS[self.f](u) * math.exp(-scale) + self.kernel_epsilon
        return Features(value, u.new_zeros(1, 1))

    def log_kernel(self, x, y):
        raise NotImplementedError(f"generalised features ({self.f}): no known kernel")


class Redrawn(Redraws, Baseline):
    """Base class of baselines with one random tensor that is redrawn.

    The tensor `name` depends only on (seed, layer, draw), so that all processes agree. It is redrawn after every
    `redraw_every` training passes (0: never), but not in eval mode, in a backward pass or within a step.
    Subclasses define `sample(generator)` and call `register_drawn` at the end of `__init__`.
    """

    name: str

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        redraw_every: int = 0,
        seed: int = 0,
        layer: int = 0,
        **sizes,
    ):
        super().__init__(heads, d, seed=seed, layer=layer, **sizes)
        self.redraw_every = redraw_every
        self.seed = f"{seed}/{layer}"

    def sample(self, generator: torch.Generator) -> Tensor:
        """Return one draw of the random tensor."""
        raise NotImplementedError

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        seed = zlib.crc32(f"{self.seed}/{draw}".encode())
        return {self.name: self.sample(torch.Generator().manual_seed(seed))}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        if self.training and self.redraw_every and not self.continues_step and not in_backward():
            self.count_pass()
        return super().forward(q, k, v, key_mask)


@checked("attention")
class Linformer(Redrawn):
    """Softmax attention to `rank` mixtures of keys (Linformer, Wang et al., 2020).

    It cannot be causal. Heads and batch entries share the projections, whose entries start as N(0, 1 / length). Masked
    keys enter no mixture, and positions are counted from the first real key of each row.

    The projections are key_projection and value_projection (rank, length), or the buffer `mixtures` of that shape.

    Args:
        length: maximal number of keys.
        rank: number of mixtures.
        redraw_every: 0 learns one projection for keys and one for values. n > 0 uses one random projection for both and
            redraws it after n training passes, as in Performers (appendix A.6). The multiplier e^-delta is omitted,
            because the paper does not define it fully.

    >>> Linformer(heads=2, d=4, length=16, rank=4)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    can_be_causal = False
    name = "mixtures"

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        length: Count = 512,
        rank: Count = 128,
        redraw_every: Whole = 0,
        **options,
    ):
        super().__init__(heads, d, redraw_every=redraw_every, **options)
        if not 1 <= rank <= length:
            raise ValueError(f"rank={rank}: expected 1 <= rank <= length={length}")
        self.shape = (rank, length)
        if redraw_every:
            self.register_drawn(self.rows_of_draw(0))
        else:
            self.key_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)
            self.value_projection = nn.Parameter(torch.randn(rank, length) / length**0.5)

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator) / self.shape[1] ** 0.5

    def attend(self, x, y, v, *, causal, key_mask):
        check_inputs(x, y, v, None, (), causal, key_mask)
        length = self.shape[1]
        S = y.shape[2]
        if causal:
            raise ValueError(
                "causal=True: not supported by attention=linformer; use another attention"
            )
        if length < S:
            raise ValueError(f"S={S}: linformer expected at most length={length} keys")
        y = repeat_heads(y, x.shape[1])
        v = repeat_heads(v, x.shape[1])
        if key_mask is not None:
            y, v = (from_first(t, key_mask, S) for t in without_padding(key_mask, y, v))
        key_projection, value_projection = self.projections()
        keys = key_projection[:, :S].to(y.dtype) @ y
        values = value_projection[:, :S].to(v.dtype) @ v
        return F.scaled_dot_product_attention(x, keys, values, scale=1.0)

    def projections(self) -> tuple[Tensor, Tensor]:
        """Return the projections of keys and of values, (rank, length) each."""
        if not self.redraw_every:
            return self.key_projection, self.value_projection
        mixtures = self.rows("mixtures")
        return mixtures, mixtures


@checked("attention")
class Reformer(Redrawn):
    """Softmax attention within hash buckets (Reformer, Kitaev et al., 2020).

    Queries, normalized to q / |q|, serve as keys; the keys of the call are ignored. Locality-sensitive hashing sorts
    the tokens of each round by bucket and then by position.
    In each of R rounds a query sees the keys of its bucket at most c sorted positions before it and, if not causal,
    after it. Time and memory are O(R S c).
    The logit is scaling d^(1/2) q_i.q_j / |q_j|. A token sees itself only if it sees no other token.

    In the paper a query sees its own chunk and the one before, and the borders of chunks depend on later tokens. The
    band of c sorted positions does not, so that causal outputs equal those of each prefix.

    Buffers: rotations (H, R, d, buckets / 2), drawn from (seed, layer, draw); steps and draws.

    Args:
        hashes: number R of rounds.
        buckets: buckets of a round, 1 or an even number; 2 S / chunk in the paper.
        chunk: number c of sorted positions that a query sees on each side.
        redraw_every: training passes between redraws of the rotations; 1 in the authors' code, 0 for never.

    >>> Reformer(heads=2, d=4, buckets=2, chunk=2)(*torch.randn(3, 1, 2, 6, 4)).shape
    torch.Size([1, 2, 6, 4])
    """

    name = "rotations"

    def __init__(
        self,
        heads: int,
        d: int,
        *,
        hashes: Count = 4,
        buckets: Count = 32,
        chunk: Count = 64,
        redraw_every: Whole = 1,
        **options,
    ):
        super().__init__(heads, d, redraw_every=redraw_every, **options)
        if buckets > 1 and buckets % 2:
            raise ValueError(f"buckets={buckets}: expected 1 or an even integer")
        self.chunk = chunk
        self.buckets = buckets
        self.shape = (heads, hashes, d, buckets // 2)
        self.register_drawn(self.rows_of_draw(0))

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator)

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"reformer: L={q.shape[2]}, S={k.shape[2]}: expected L == S (self-attention); set "
                "use_cache=False"
            )
        return q

    def attend(self, x, y, v, *, causal, key_mask):
        if x.shape[1] != self.heads:
            raise ValueError(
                f"q: {x.shape[1]} heads, expected heads={self.heads} of this Reformer layer"
            )
        v = repeat_heads(v, x.shape[1])
        check_inputs(x, y, v, None, (), causal, key_mask)
        factor = (self.scaling * x.shape[3]) ** 0.5  # y is scaling^(1/2) q
        out = lsh_attention(y, v, self.hash(y, key_mask), self.chunk, causal, key_mask, factor)
        return out[:, :, -x.shape[2] :]

    def hash(self, y: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return the bucket of each token in each round, (B, H, R, S).

        The bucket is the argmax of [y R, -y R]. Padding has its own bucket.
        """
        if self.buckets == 1:
            buckets = y.new_zeros(*y.shape[:2], self.shape[1], y.shape[2], dtype=torch.long)
        else:
            rotations = self.rows("rotations")
            sides = torch.einsum("bhsd,hrdn->bhrsn", y.detach().to(rotations.dtype), rotations)
            buckets = torch.cat([sides, -sides], -1).argmax(-1)
        if key_mask is None:
            return buckets
        return buckets.masked_fill(~key_mask[:, None, None], self.buckets)


def lsh_attention(
    q: Tensor,
    v: Tensor,
    buckets: Tensor,
    chunk: int,
    causal: bool,
    key_mask: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Softmax of factor q_i.q_j / |q_j| over the pairs that meet in any round.

    q (B,H,S,d), v (B,H,S,dv), buckets (B,H,R,S). Returns (B,H,S,dv), 0 at padding.
    A pair that meets in N rounds counts once: its logit is reduced by log N in each round.
    """
    q, values = without_padding(key_mask, at_least_float32(q), at_least_float32(v))
    S = q.shape[2]
    chunk = min(chunk, S)
    offsets = range(1) if chunk == S else range(-1, 1 if causal else 2)
    # (B, H, R, S): token at each sorted position, and sorted position of each token
    order = (buckets * S + torch.arange(S, device=q.device)).argsort(-1)
    positions = order.argsort(-1)
    # differ by at most `chunk` exactly where tokens meet
    band = (positions + buckets * (chunk + 1)).int()
    norms = q.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    queries = _sort_tokens(factor * q, order, chunk)
    keys = _with_neighbours(_sort_tokens(q / norms, order, chunk), offsets)
    logits = queries @ keys.mT  # (B, H, R, n, c, w)
    met, own = _count_meetings(band, order, chunk, offsets, causal, key_mask)
    logits = torch.where(own, SELF, logits)
    logits = logits - met.clamp(min=1).to(logits.dtype).log()
    logits = logits.masked_fill(met == 0, -torch.inf)
    sums = logits.logsumexp(-1, keepdim=True)  # (B, H, R, n, c, 1)
    weights = torch.exp(logits - torch.where(sums.isinf(), 0.0, sums))
    out = weights @ _with_neighbours(_sort_tokens(values, order, chunk), offsets)
    out = _restore_tokens(out, positions)  # (B, H, R, S, dv)
    sums = _restore_tokens(sums, positions)
    shares = torch.where(sums.isinf().all(2, keepdim=True), 0.0, sums).softmax(2)
    return (shares * out).sum(2).to(v.dtype)


def _sort_tokens(t: Tensor, order: Tensor, chunk: int) -> Tensor:
    """Sort vectors (B, H, S, k) into chunks (B, H, R, n, c, k), padded with zeros."""
    return _split_chunks(t.unsqueeze(2).take_along_dim(order.unsqueeze(-1), 3), chunk)


def _with_neighbours(t: Tensor, offsets: range, value: float = 0) -> Tensor:
    """Concatenate the chunks at these offsets from each chunk.

    (.., n, c, k) -> (.., n, len(offsets) c, k).
    """
    n = t.shape[3]
    padded = F.pad(t, (0, 0, 0, 0, 1, 1), value=value)
    return torch.cat([padded[:, :, :, 1 + i : 1 + i + n] for i in offsets], 4)


def _restore_tokens(t: Tensor, positions: Tensor) -> Tensor:
    """Return chunks (B, H, R, n, c, k) to the order of tokens: (B, H, R, S, k)."""
    return t.flatten(3, 4).take_along_dim(positions.unsqueeze(-1), 3)


def _count_meetings(
    band: Tensor,
    order: Tensor,
    chunk: int,
    offsets: range,
    causal: bool,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Count the rounds in which each pair meets, and mark each token with itself.

    Both results are (B, H, R, n, c, w). The count is 0 if the pair does not meet in this round.
    """
    gap = _gaps(band.gather(3, order), chunk, offsets)
    meets = _is_near(gap, chunk, causal)
    if key_mask is not None:
        sorted_mask = _sort_tokens(key_mask[:, None, :, None], order, chunk)
        meets = meets & _with_neighbours(sorted_mask, offsets, False).mT
    count = torch.zeros_like(meets, dtype=torch.uint8)
    for turn in range(order.shape[2]):
        band_of_turn = band[:, :, turn, None].take_along_dim(order, 3)
        count.add_(_is_near(_gaps(band_of_turn, chunk, offsets), chunk, causal))
    return count.mul_(meets), gap == 0


def _is_near(gap: Tensor, chunk: int, causal: bool) -> Tensor:
    if causal:
        return (gap <= chunk) & (gap >= 0)
    return gap.abs() <= chunk


def _gaps(band: Tensor, chunk: int, offsets: range) -> Tensor:
    """Differences of the numbers (B, H, R, S) of queries and the keys around them.

    The queries are (.., n, c, 1), the keys (.., n, 1, w). The difference to a missing key far exceeds `chunk`.
    """
    missing = 2**30
    band = band.unsqueeze(-1)
    keys = _with_neighbours(_split_chunks(band, chunk, -missing), offsets, value=-missing)
    return _split_chunks(band, chunk, missing) - keys.mT


def _split_chunks(t: Tensor, chunk: int, value: int = 0) -> Tensor:
    """Split (.., S, k) into chunks (.., n, c, k); `value` fills the last one."""
    return F.pad(t, (0, 0, 0, -t.shape[3] % chunk), value=value).unflatten(3, (-1, chunk))
