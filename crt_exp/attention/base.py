"""What layers that stand for softmax attention have in common, and what training asks of all of them.

Notation: B batch, H query heads, Hkv key heads (H is a multiple of it), L queries, S keys, d.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.checks import check_shared
from crt_exp.attention.decoding import RecurrentPast
from crt_exp.options import whole_number
from crt_exp.samplers import at_least_float32


class AttentionLayer(nn.Module):
    """A layer for q (B,H,L,d), k (B,Hkv,S,d), v (B,Hkv,S,dv), unscaled, and key_mask (B,S), True = keep: (B,H,L,dv).

    scaling: the logit is scaling q.k, by default d^(-1/2). Raises ValueError for sizes that no call can have.
    """

    can_be_causal = True
    going_on = False         # whether a training pass belongs to the step of the one before: see `linear.same_step`
    counts_places = True     # whether outputs depend on where a token stands, and not only on which keys it sees
    exact_to = 0             # tokens of a sequence up to which it is exact attention

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
        """On the unit sphere, for a layer that normalizes."""
        return F.normalize(q.float(), dim=-1).to(q.dtype) if self.normalize_qk else q

    def scaled(self, q: Tensor) -> Tensor:
        """What a decoding state takes for queries or keys q."""
        return at_least_float32(self.normalized(q)) * self.scale


class Redraws(nn.Module):
    """A layer with tensors that are drawn from a seed: buffers, with the counters `steps` and `draws`.

    Subclasses define `rows_of_draw(draw)`, which gives them by name.

    Averages of weights (EMA, SWA) change buffers in place, and a mean of draws is not a draw. The layer therefore
    computes with a copy of each buffer that is drawn again, and draws again where its `draws` have grown. A buffer that
    was replaced by another tensor (a loader, torch.func.functional_call) counts itself.
    """

    redraw_every: int
    held = 0                                       # the number of the draw in the copies
    kept: dict[str, tuple[Tensor, Tensor]] = {}    # buffers and their copies

    def register_drawn(self, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            self.register_buffer(name, t)
        for name in ("steps", "draws"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self._keep(tensors if self.redraw_every else ())

    def rows(self, name: str) -> Tensor:
        """The tensor to compute with."""
        buffer = getattr(self, name)
        own, copy = self.kept.get(name, (None, buffer))
        if torch.compiler.is_compiling() or buffer.is_meta or own is None:
            return copy
        if own is not buffer:
            return buffer
        if int(self.draws) > self.held:    # an average of counts is rounded down: fewer draws change nothing
            self._draw_again()
        return self.kept[name][1].to(buffer)

    def count_pass(self) -> None:
        """At the start of a training pass: draws again where it is time."""
        if int(self.steps) and int(self.steps) % self.redraw_every == 0:
            self.redraw()
        self.steps.add_(1)

    def redraw(self) -> None:
        """Draws again now, into new tensors: a graph that is still to be differentiated keeps its own."""
        self.draws.add_(1)
        self._draw_again()

    @torch.inference_mode(False)   # a buffer of inference mode could not be trained or loaded later
    def _draw_again(self) -> None:
        self.held = int(self.draws)
        for name, t in self.rows_of_draw(self.held).items():
            setattr(self, name, t.to(getattr(self, name)).contiguous())
        self._keep(self.kept)

    def _keep(self, names: Iterable[str]) -> None:
        self.kept = {name: (getattr(self, name), getattr(self, name).clone()) for name in names}

    def _apply(self, *args, **options) -> "Redraws":
        for name in self.kept:      # the new buffers are of the copies, not of averages
            setattr(self, name, self.rows(name))
        super()._apply(*args, **options)
        self._keep(self.kept)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update((prefix + name, self.rows(name).clone()) for name in self.kept)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        if self.kept:
            self.held = int(self.draws)
            self._keep(self.kept)


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


def in_backward() -> bool:
    """Whether a backward pass is running: then a forward pass is the second run of a checkpointed layer.

    Only a private function of torch returns this; nothing public distinguishes a recomputed pass from a first one.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
