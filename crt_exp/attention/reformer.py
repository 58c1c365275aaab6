"""Reformer's attention by locality-sensitive hashing with shared queries and keys (Kitaev et al., 2020): a peer.

Legend: B batch, H heads, S tokens, R rounds of hashing, d, dv; n chunks of c places. Tokens are sorted by bucket and
then by position; the place of a token is where it then lies. In each round a query sees the keys of its bucket that lie
at most c places before it, and if not causal also those at most c after it. So time and memory are O(R S c).

The paper lets a query see the own chunk of c places and the one before: where a chunk begins depends on how many tokens
of other buckets come later in the sequence. A band of places does not, and so causal attention is that of each prefix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.attention.checks import check_inputs, repeat_heads
from crt_exp.attention.redrawn import Redrawn
from crt_exp.options import Count, Whole, checked
from crt_exp.samplers import at_least_float32

SELF = -1e5  # the logit of a token to itself, so that it is seen where there is no other: the authors' value


@checked("attention")
class Reformer(Redrawn):
    """Softmax over the keys that share a bucket with the query in one of `hashes` rounds, with keys q / |q|.

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
