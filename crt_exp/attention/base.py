"""`AttentionLayer`: what every layer that can stand for softmax attention is made of, and what it refuses.

Legend: B batch, H query heads, Hkv key heads (H is a multiple of it), L queries, S keys, d.
"""


import torch
from torch import Tensor, nn

from crt_exp.attention.checks import check_shared
from crt_exp.options import whole_number


class AttentionLayer(nn.Module):
    """A layer for q (B,H,L,d), k (B,Hkv,S,d), v (B,Hkv,S,dv), unscaled, and key_mask (B,S), True = keep: (B,H,L,dv).

    scaling: the logit is scaling q.k, by default d^(-1/2). Raises ValueError for sizes that no call can have.
    """

    can_be_causal = True
    going_on = False         # whether a training pass belongs to the step of the one before: see `linear.same_step`
    counts_places = True     # whether outputs depend on where a token stands, and not only on which keys it sees
    exact_to = 0             # tokens of a sequence up to which it is exact attention
    one_kernel = False       # whether up to there it is one call of torch's kernel, whatever its options

    def __init__(self, heads: int, d: int, kv_heads: int | None, causal: bool, scaling: float | None):
        super().__init__()
        self.heads, self.d = whole_number(heads, "heads"), whole_number(d, "d")
        self.kv_heads = self.heads if kv_heads is None else whole_number(kv_heads, "kv_heads")
        check_shared(self.heads, self.kv_heads)
        self.causal, self.scaling = causal, self.d**-0.5 if scaling is None else scaling

    def check_call(self, q: Tensor, k: Tensor) -> None:
        """Raises ValueError for another d than that of the layer, whose scaling and state would be those of others."""
        for name, t in (("q", q), ("k", k)):
            if t.shape[-1] != self.d:
                raise ValueError(f"{name} has d = {t.shape[-1]}, but this {type(self).__name__} layer was made for "
                                 f"d = {self.d}")


def in_backward() -> bool:
    """Whether a backward pass is running: then a forward pass is the second run of a checkpointed layer.

    torch says so in a private function alone; nothing public tells a recomputed pass from a first one.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
