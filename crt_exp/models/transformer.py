"""A plain pre-norm Transformer body that takes any attention: the model of the speed benchmarks."""

from torch import Tensor, nn

from crt_exp.swap.swap import LayerMaker


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); x (B, L, dim)."""

    def __init__(self, dim: int, heads: int, ffn: int, attention: nn.Module):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.ffn = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, ffn), nn.GELU(), nn.Linear(ffn, dim))

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, d)
        x = x + self.proj(self.attention(q, k, v, key_mask).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    """`layers` blocks of width `dim`; (B, L, dim) -> (B, L, dim)."""

    def __init__(self, heads: int, layers: int, ffn: int, dim: int, make: LayerMaker, causal: bool = False):
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim = {dim} must be a multiple of heads = {heads}")
        attentions = (make(heads, dim // heads, causal=causal, layer=i) for i in range(layers))
        self.blocks = nn.ModuleList(Block(dim, heads, ffn, attention) for attention in attentions)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, key_mask)
        return x
