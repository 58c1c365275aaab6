"""A plain pre-norm Transformer body that takes any attention: of the sequence model and of the speed benchmarks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crt_exp.swap.swap import LayerMaker


class Rotary(nn.Module):
    """Rotary positions: coordinates i and i + d/2 of a head turn by position * base^(-2i/d) (Su et al., 2021, as
    transformers arranges them)."""

    def __init__(self, d: int, base: float = 10_000.0):
        super().__init__()
        self.register_buffer("rates", base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d), persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions start, start + 1, ...: (length, d) each, float32."""
        places = torch.arange(start, start + length, device=self.rates.device, dtype=torch.float32)
        angles = (places[:, None] * self.rates).repeat(1, 2)
        return angles.cos(), angles.sin()


def turned(t: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys (B, H, L, d) at their positions."""
    first, second = t.chunk(2, -1)
    cos, sin = (part.to(t.dtype) for part in turn)
    return t * cos + torch.cat([-second, first], -1) * sin


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); x (B, L, dim). Dropout is of what each of the two adds."""

    def __init__(self, dim: int, heads: int, ffn: int, attention: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.ffn = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, ffn), nn.GELU(), nn.Linear(ffn, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_mask: Tensor | None = None, turn: tuple[Tensor, Tensor] | None = None,
                past=None) -> Tensor:
        """turn: of `Rotary`. past: what the attention remembers of earlier tokens, and then of these too."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, d)
        q, k = (turned(q, turn), turned(k, turn)) if turn else (q, k)
        out = self.attention(q, k, v, key_mask) if past is None else past.step(q, k, v)
        x = x + self.dropout(self.proj(out.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class Transformer(nn.Module):
    """`layers` blocks of width `dim`; (B, L, dim) -> (B, L, dim).

    rotary: positions that turn queries and keys. checkpointing: the backward pass computes each block again, so that
    training keeps O(B L dim) numbers a block.
    """

    def __init__(self, heads: int, layers: int, ffn: int, dim: int, make: LayerMaker, causal: bool = False, *,
                 dropout: float = 0.0, rotary: bool = False, checkpointing: bool = False):
        super().__init__()
        attentions = (make(heads, dim // heads, causal=causal, layer=i) for i in range(layers))
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads, ffn, attention, dropout) for attention in attentions)
        self.rotary = Rotary(dim // heads) if rotary else None
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, key_mask: Tensor | None = None, pasts: Sequence | None = None) -> Tensor:
        """key_mask (B, L), True = keep. pasts: of `begin`, which these tokens then belong to; without gradient."""
        if pasts and key_mask is not None:
            raise ValueError("symbol by symbol there is no padding: give sequences of one length, without key_mask")
        turn = self.rotary and self.rotary(pasts[0].length if pasts else 0, x.shape[1])
        again = self.checkpointing and not pasts and torch.is_grad_enabled()
        for block, past in zip(self.blocks, pasts or [None] * len(self.blocks)):
            x = checkpoint(block, x, key_mask, turn, use_reentrant=False) if again else block(x, key_mask, turn, past)
        return x

    def begin(self) -> list:
        """What each attention remembers before the first token, to decode with; causal attention alone."""
        return [block.attention.past() for block in self.blocks]
