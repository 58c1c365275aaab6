"""What layers of random features and of near-far attention have in common, which learn from what they see: what swaps,
caches of decoding and tables ask of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.decoding import RecurrentPast
from crt_exp.samplers import at_least_float32


class LinearAttention(AttentionLayer):
    """normalize_qk: puts queries and keys on the sphere of radius d^(1/4), the mean length of x for entries of unit
    variance.

    Subclasses define `estimate(q, k, v, key_mask=None)`, what `forward` would give as the layer now stands, where
    nothing is drawn, noted or counted; `calibration()`, a context in which passes in eval mode replace what the layer
    has learned; and `decoding()`, a fresh state for token-by-token use of x = `scaled(q)`, of causal attention only.
    """

    recurrent_heads: int     # of keys and values, as a decoding state takes them
    learns: bool             # whether calls as the layer now stands use what earlier calls or a calibration left here
    serves_causal: bool      # whether calls may be causal: some layers are so in one call and not in the next
    version: object          # changes with all that a decoding state depends on

    def __init__(self, heads: int, d: int, kv_heads: int | None, causal: bool, cross: bool, scaling: float | None,
                 normalize_qk: bool):
        super().__init__(heads, d, kv_heads, causal, scaling)
        self.cross, self.normalize_qk = cross, normalize_qk
        self.calibrated = None   # within a calibration: how many passes it has seen
        self.columns = None      # of the values proper, where a caller has put others behind them

    def past(self) -> RecurrentPast:
        """The same for q, k and v as `forward` takes them."""
        return RecurrentPast(self)

    @property
    def scale(self) -> float:
        """What queries and keys are multiplied by: x = scale q."""
        return self.d**0.25 if self.normalize_qk else self.scaling**0.5

    def normalized(self, q: Tensor) -> Tensor:
        return F.normalize(q.float(), dim=-1).to(q.dtype) if self.normalize_qk else q

    def scaled(self, q: Tensor) -> Tensor:
        """What a decoding state takes for queries or keys q."""
        return at_least_float32(self.normalized(q)) * self.scale


@contextmanager
def same_step(model: nn.Module, going_on: bool = True) -> Iterator[None]:
    """Within it, training passes of a model belong to the step of the pass before: a batch in micro-batches is read as
    a whole.

    No layer draws noise or changes the parameters that its map is fitted to; statistics are pooled over the passes.
    """
    before = [(layer, layer.going_on) for layer in model.modules() if isinstance(layer, AttentionLayer)]
    for layer, _ in before:
        layer.going_on = going_on
    try:
        yield
    finally:
        for layer, was in before:
            layer.going_on = was
