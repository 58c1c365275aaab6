"""Base classes of the attention layers that replace softmax attention.

Notation: B batch, H query heads, Hkv key heads (H is a multiple of Hkv), L queries, S keys, d head dimension.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from crt_exp.attention.checks import check_kv_heads
from crt_exp.attention.decoding import RecurrentPast, TokenState
from crt_exp.features.base import values_readable
from crt_exp.samplers import at_least_float32
from crt_exp.validation import whole_number

# By tensor: its version and its value, for scalar buffers that Python wrote or read last.
_VALUES = WeakTensorKeyDictionary()


def known_value(t: Tensor) -> int | None:
    """Return the value of a scalar tensor if Python wrote or read this version of it, else None.

    Reading it from a device would wait. Compiled code knows no value.
    """
    if torch.compiler.is_compiling() or t.is_inference():
        return None
    version, value = _VALUES.get(t, (None, None))
    return value if version == t._version else None


def set_known_value(t: Tensor, value: int | None) -> None:
    """State the value of a scalar tensor after an operation in place; None for unknown."""
    if not torch.compiler.is_compiling() and not t.is_inference():
        _VALUES[t] = (t._version, value)


def read_value(t: Tensor) -> int:
    """Return the integer in a scalar tensor, which is read from a device only if it is not known.

    Averages that write through `Tensor.data` leave the version as it is: on a CPU the tensor itself is read.

    >>> counter = torch.zeros((), dtype=torch.long)
    >>> read_value(counter), read_value(counter.add_(2))
    (0, 2)
    """
    value = None if values_readable(t) else known_value(t)
    if value is None:
        value = int(t)
        set_known_value(t, value)
    return value


def add_to_counter(t: Tensor, number: int = 1) -> None:
    """Add to a counter in place, without reading it."""
    value = known_value(t)
    t.add_(number)
    if value is not None:
        set_known_value(t, value + number)


class AttentionLayer(nn.Module):
    """Base class of attention layers.

    Inputs are q (B,H,L,d), k (B,Hkv,S,d), v (B,Hkv,S,dv) and an optional key_mask (B,S), True for keys to keep.
    The output is (B,H,L,dv). The layer applies the scaling, so q and k are unscaled.

    Args:
        kv_heads: Hkv, by default `heads`.
        scaling: factor of q.k in the logits, by default d^(-1/2).

    Raises:
        ValueError: a size is not a positive integer, or `kv_heads` does not divide `heads`.
    """

    can_be_causal = True
    # whether training passes continue the step of the previous pass: see `same_step`
    continues_step = False
    # whether outputs depend on token positions, beyond the set of visible keys
    position_dependent = True
    can_cross = True  # whether queries and keys may come from different sequences
    mechanism: str | None = None  # name of the method, such as favorpp, in tables and warnings
    # set by a swap: path of the attention module, saved record, whether a forward pass reached it
    path = ""
    record: dict | None = None
    reached: bool | None = None
    columns: int | None = None  # number of value columns, where a caller has appended others

    def __init__(
        self,
        heads: int,
        d: int,
        kv_heads: int | None,
        causal: bool,
        scaling: float | None,
    ):
        super().__init__()
        self.heads = whole_number(heads, "heads")
        self.d = whole_number(d, "d")
        self.kv_heads = self.heads
        if kv_heads is not None:
            self.kv_heads = whole_number(kv_heads, "kv_heads")
        check_kv_heads(self.heads, self.kv_heads)
        self.causal = causal
        self.scaling = self.d**-0.5 if scaling is None else scaling

    @property
    def exact_to(self) -> int:
        """Sequence length up to which the layer is exact attention."""
        return 0

    def check_call(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError if q or k has a head dimension other than the layer's d."""
        for name, t in (("q", q), ("k", k)):
            if t.shape[-1] != self.d:
                raise ValueError(
                    f"{name}: d={t.shape[-1]}, expected d={self.d} of this {type(self).__name__} layer"
                )


class LinearAttention(AttentionLayer):
    """Base class of linear-time attention layers.

    Args:
        cross: whether the layer is cross-attention.
        normalize_qk: scale queries and keys to norm d^(1/4), the norm of x for entries of unit variance.

    >>> from crt_exp import Mechanism
    >>> layer = Mechanism.of("favorpp", m=16).layer(heads=2, d=4)
    >>> isinstance(layer, LinearAttention)
    True
    """

    recurrent_heads: int  # heads of keys and values in a decoding state
    clusters: Any  # `FittedOnce` or None: state that is fitted to vectors or sequences
    # of the last calibration: errors, and the parameters fitted to the sequences of its last batch
    measured: Any = None
    fitted_to_calls: Any = None

    def __init__(
        self,
        heads: int,
        d: int,
        kv_heads: int | None,
        causal: bool,
        cross: bool,
        scaling: float | None,
        normalize_qk: bool,
    ):
        super().__init__(heads, d, kv_heads, causal, scaling)
        self.cross = cross
        self.normalize_qk = normalize_qk
        # factor of queries and keys: x = scale q
        self.scale = self.d**0.25 if normalize_qk else self.scaling**0.5
        self.calibrated: int | None = None  # number of passes in the current calibration

    @property
    @abstractmethod
    def learns(self) -> bool:
        """Whether calls use the state of earlier calls or of a calibration."""

    @property
    @abstractmethod
    def serves_causal(self) -> bool:
        """Whether calls may be causal: a layer may switch between calls."""

    @property
    @abstractmethod
    def version(self) -> Hashable:
        """Changes whenever decoding states become invalid."""

    @abstractmethod
    def estimate(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the output of `forward`, without redraws, recorded statistics or counts."""

    @abstractmethod
    def decoding(self) -> TokenState:
        """Return a new state for token-by-token causal attention on x = `scaled(q)`."""

    def past(self) -> RecurrentPast:
        """Return a decoding state that takes q, k and v as `forward` does."""
        return RecurrentPast(self)

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Replace the fitted state by that of the passes in eval mode within the context."""
        self.calibrated = 0
        if self.clusters is not None:
            self.clusters.calibrate(True)
        try:
            yield
        finally:
            self.calibrated = None
            if self.clusters is not None:
                self.clusters.calibrate(False)

    def normalized(self, q: Tensor) -> Tensor:
        """Return q scaled to unit norm if the layer normalizes, else q."""
        if not self.normalize_qk:
            return q
        return F.normalize(q.float(), dim=-1).to(q.dtype)

    def scaled(self, q: Tensor) -> Tensor:
        """Return x = scale q in float32 or float64, as a decoding state takes it."""
        return at_least_float32(self.normalized(q)) * self.scale


class Redraws(nn.Module):
    """Mixin for layers with random tensors that are drawn from a seed and redrawn.

    The tensors are buffers, and so are the counters `steps` and `draws`.

    Averages of weights (EMA, SWA) change buffers in place, and an average of projections has another distribution.
    The layer therefore computes with copies of its buffers. It redraws when `draws` exceeds the number of the copies.
    A buffer that was replaced by another tensor (by a loader or torch.func.functional_call) is used directly.
    """

    redraw_every: int
    steps: Tensor
    draws: Tensor
    copied_draw = 0  # number of the projections in the copies
    copies: dict[str, tuple[Tensor, Tensor]] = {}  # buffers and their copies

    @abstractmethod
    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        """Return the tensors of one draw by name."""

    def register_drawn(self, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            self.register_buffer(name, t)
        for name in ("steps", "draws"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        if self.redraw_every:
            self._copy_buffers(tensors)

    def rows(self, name: str) -> Tensor:
        """Return the tensor to compute with."""
        buffer = getattr(self, name)
        if name not in self.copies:
            return buffer
        copied, copy = self.copies[name]
        if torch.compiler.is_compiling() or buffer.is_meta:
            return copy
        if copied is not buffer:
            return buffer
        # averaged counters are rounded down: fewer draws change nothing
        if read_value(self.draws) > self.copied_draw:
            self._redraw_buffers()
        return self.copies[name][1].to(buffer)

    def count_pass(self) -> None:
        """Count a training pass at its start, and redraw first if that is due."""
        steps = read_value(self.steps)
        if steps and steps % self.redraw_every == 0:
            self.redraw()
        add_to_counter(self.steps)

    def redraw(self) -> None:
        """Redraw now into new tensors; existing autograd graphs keep the old tensors."""
        add_to_counter(self.draws)
        self._redraw_buffers()

    @torch.inference_mode(False)  # buffers of inference mode could not be trained or loaded later
    def _redraw_buffers(self) -> None:
        self.copied_draw = read_value(self.draws)
        for name, t in self.rows_of_draw(self.copied_draw).items():
            setattr(self, name, t.to(getattr(self, name)).contiguous())
        self._copy_buffers(self.copies)

    def _copy_buffers(self, names: Iterable[str]) -> None:
        copies = {}
        for name in names:
            buffer = getattr(self, name)
            copies[name] = (buffer, buffer.clone())
        self.copies = copies

    def _apply(self, *args, **options) -> "Redraws":
        for name in self.copies:  # convert the copies, not averaged buffers
            setattr(self, name, self.rows(name))
        super()._apply(*args, **options)
        self._copy_buffers(self.copies)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.copies:
            destination[prefix + name] = self.rows(name).clone()

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        if self.copies:
            self.copied_draw = read_value(self.draws)
            self._copy_buffers(self.copies)


@contextmanager
def same_step(model: nn.Module, continues_step: bool = True) -> Iterator[None]:
    """Treat the training passes within this context as one optimizer step.

    Gradient accumulation splits a batch into micro-batches. Within the context no layer redraws random projections or
    refits its feature map, and statistics are pooled over the passes.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    before = [layer.continues_step for layer in layers]
    for layer in layers:
        layer.continues_step = continues_step
    try:
        yield
    finally:
        for layer, value in zip(layers, before):
            layer.continues_step = value


def in_backward() -> bool:
    """Return whether a backward pass is running, which recomputes checkpointed layers.

    Only a private function of torch distinguishes a recomputed forward pass from the first one.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
