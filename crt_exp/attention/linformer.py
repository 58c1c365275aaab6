"""Linformer's attention to mixtures of the keys (Wang et al., 2020): a peer.

Legend: B batch, H heads, L queries, S keys, d, dv.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.checks import check_inputs, repeat_heads
from crt_exp.attention.padding import from_first
from crt_exp.attention.redrawn import Redrawn
from crt_exp.options import Count, Whole, checked


@checked("attention")
class Linformer(Redrawn):
    """Softmax attention to `rank` mixtures of the keys, for sequences of up to `length` tokens, not causal.

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
