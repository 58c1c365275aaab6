"""A layer of transformers' Cache that holds the recurrent state of decoding.

`install` makes `generate`, and calls with use_cache=True, create caches with a `RecurrentLayer` for each swapped causal
layer. An attention module passes new keys to `update` and hands the returned keys to the attention function. `update`
returns the new keys only, with the cache layer attached, so that the attention function finds the state. The state
belongs to the cache, so several caches can be in use. The layer stores all keys, like DynamicLayer, if a module changes
keys after the cache. It also stores all keys in training, with gradients, for attention that is not causal, and for a
window with padded rows. A step then takes time linear in the position.

Notation: B batch, H query heads, Hkv key heads, T new tokens, S all tokens, d head dimension, dv value dimension, M
features.
"""

import copy
import inspect
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
)
from transformers.generation import GenerationMixin, GenerationMode

from crt_exp.attention.base import LinearAttention
from crt_exp.attention.baselines import Window
from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.decoding import DecodingState, changes
from crt_exp.swap.attend import Call, last_used, prepare, read_mask
from crt_exp.swap.families import is_cross, names_in_forward, remove_hook

NAMES = ("cache", "past_key_values")  # argument of forward, and its deprecated name
RECURRENT = (LinearAttention, Window)  # layers with a decoding state
WHOLE = "pass past_key_values=DynamicCache()"


class NewKeys(Tensor):
    """New keys or values whose past is in the state of `cache_layer`.

    Any use outside swapped attention raises ValueError, because the past would be missing.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "numel", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ValueError(
            f"{name}: the recurrent cache does not support operations on its keys; {WHOLE}"
        )


class RecurrentLayer(DynamicLayer):
    """Cache of one layer: M (dv + 1) numbers for each head and no keys, or the keys that near-far or a window need.

    The first call sees all keys and decides whether the layer uses a state or stores all keys (`whole`). A state cannot
    be rolled back, so assisted generation gets a cache of all keys.
    """

    def __init__(self):
        super().__init__()
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.whole = False
        # new keys and values that no attention function has used yet
        self.new_keys: Any = None
        self.handed: Any = None  # weak references to what `update` returned for them
        self.state: Any = None  # recurrent state of all tokens
        # (B, p): padding mask of the first p tokens; all later tokens are kept
        self.padding: Tensor | None = None
        self.owner: Any = None  # weak reference to the layer that made the state
        self.marks: list[tuple[Tensor, int]] = []

    # ---- methods that a forward pass calls

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        self._store_new_keys()
        if self.whole or (self.state is None and type(key_states) is not Tensor):
            self.whole = True
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.new_keys = (key_states, value_states)
        self.length += key_states.shape[-2]
        # the first keys are all keys, so any use is valid
        kind: type[Any] = Tensor if self.state is None else NewKeys
        keys: Any = key_states.as_subclass(kind)
        values = value_states.as_subclass(kind)
        self.handed = weakref.ref(keys), weakref.ref(values)
        keys.cache_layer = self
        return keys, values

    def attend(self, swapped: Any, call: Call) -> Tensor | None:
        """Attend from queries (B,H,T,d) to the past and to the keys of `update`.

        None if `attend.attend` must make the call, from keys that are all there. keep (B,S) and mask (B,.,T,S) of the
        call cover all tokens. Raises ValueError, naming the layer, if the state cannot serve the call.
        """
        if not self._is_update(call, swapped.path):
            return None
        first = not isinstance(call.k, NewKeys)
        key, value = self.new_keys
        self.new_keys = None
        queries = call.q.shape[2]
        keep = call.keep
        causal = call.causal
        used = self.length
        if call.mask is not None:
            keep, causal, used = read_mask(call.mask, keep, causal, queries, swapped.path)
        keep = None if keep is None or bool(keep.all()) else keep.expand(len(key), -1)
        query = prepare(swapped, call.q, key, causal, scaling=call.scaling)
        if first:
            padded = keep is not None and isinstance(swapped, Window)
            possible = causal and not call.matrix and used == self.length and not padded
            if not (possible and self._create_state(swapped, queries, key, value)):
                self._store_all_keys(key, value)
                return None
            self._set_padding(keep)
            if isinstance(self.state, DecodingState):
                keys = repeat_heads(key, swapped.recurrent_heads)
                values = repeat_heads(value, swapped.recurrent_heads)
                self.state.take(swapped.scaled(keys), values, keep)
                return None
        else:
            self._check(swapped, call, causal, used)
            keep = self._new_padding(keep, queries, swapped.path)
        return self.state.step(swapped.scaled(query), swapped.scaled(key), value, keep)

    def _is_update(self, call: Call, path: str) -> bool:
        """Whether keys and values are the tensors of `update`, used for the first time."""
        same = self.handed[0]() is call.k and self.handed[1]() is call.v
        if same and self.new_keys is not None:
            return True
        if isinstance(call.k, NewKeys):
            raise ValueError(
                f"{path}: the recurrent cache does not support changed or reused keys; {WHOLE}"
            )
        # other attention uses the keys too, which a single state cannot serve
        if self.new_keys is None and not self.whole:
            self.state = None
            self._store_all_keys(call.k, call.v)
        self._store_new_keys()
        return False

    def _create_state(self, swapped: Any, queries: int, key: Tensor, value: Tensor) -> bool:
        """Create the state before the first tokens; False if a state cannot be used."""
        if not isinstance(swapped, RECURRENT) or queries != key.shape[2]:
            return False
        if _all_keys(swapped) or swapped.calibrated is not None:
            return False
        # empty tensors, because generation asks for their sizes
        self.keys = torch.empty_like(key[:, :, :0]).as_subclass(NewKeys)
        self.values = torch.empty_like(value[:, :, :0]).as_subclass(NewKeys)
        self.owner = weakref.ref(swapped)
        self.marks = _marks(swapped)
        self.state = swapped.decoding()
        return True

    def _check(self, swapped: Any, call: Call, causal: bool, used: int) -> None:
        same = self.owner() is swapped
        for (tensor, version), (before, version_before) in zip(_marks(swapped), self.marks):
            same = same and tensor is before and version == version_before
        if not same:
            raise ValueError(f"{swapped.path}: noise or statistics have changed; use a new cache")
        for wrong, what in (
            (call.matrix, "output_attentions=True"),
            (swapped.training, "training mode"),
            (torch.is_grad_enabled() and call.q.requires_grad, "gradients"),
            (call.q.shape[2] > 1 and not causal, "non-causal attention"),
            (used != self.length, "masks of the last tokens"),
        ):
            if wrong:
                raise ValueError(
                    f"{swapped.path}: the recurrent cache does not support {what}; {WHOLE}"
                )

    # ---- padding: the state already includes the padding of the past

    def _new_padding(self, keep: Tensor | None, new: int, path: str) -> Tensor | None:
        """The padding mask (B, T) of the new tokens, from a mask of all tokens.

        Raises ValueError if the mask of the past differs from the earlier one.
        """
        past = self.length - new
        if keep is not None and keep.shape[1] != self.length:
            raise ValueError(
                f"{path}: attention_mask of {keep.shape[1]} tokens: expected {past} cached + {new} new"
            )
        padded = 0
        same = True
        if self.padding is not None:
            padded = self.padding.shape[1]
            same = keep is not None and torch.equal(keep[:, :padded], self.padding)
        if not same or (keep is not None and not bool(keep[:, padded:past].all())):
            raise ValueError(
                f"{path}: the recurrent cache does not support changed masks of past tokens; {WHOLE}"
            )
        if keep is None or bool(keep[:, past:].all()):
            return None
        self._set_padding(keep)
        return keep[:, past:]

    def _set_padding(self, keep: Tensor | None) -> None:
        """Store a mask of all tokens, up to the last removed token."""
        self.padding = None
        if keep is not None and not bool(keep.all()):
            self.padding = keep[:, : last_used(~keep)].clone()

    # ---- fall back to storing the keys

    def _store_all_keys(self, key: Tensor, value: Tensor) -> None:
        self.whole = True
        self.lazy_initialization(key, value)
        super().update(key, value)

    def _store_new_keys(self) -> None:
        """Store keys that no swapped attention used.

        The first keys are complete; later keys would miss their past and raise ValueError.
        """
        if self.new_keys is None:
            return
        key, value = self.new_keys
        self.new_keys = None
        if self.state is not None:
            raise ValueError(f"no swapped attention used the new keys; use a new cache, or {WHOLE}")
        self._store_all_keys(key, value)

    # ---- methods that generation calls

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.whole else self.length

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        stored = [] if self.state is None else self.state.tensors()
        stored += [t for t in (self.keys, self.values, self.padding) if t is not None]
        return sum(t.nbytes for t in stored)

    def reset(self) -> None:
        super().reset()
        self._clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._store_new_keys()
        if self.whole or self.state is None:
            super().reorder_cache(beam_idx)
            return
        self.state.select(beam_idx.to(self.device))
        if self.padding is not None:
            self._set_padding(self.padding[beam_idx.to(self.padding.device)])

    def __deepcopy__(self, memo: dict) -> "RecurrentLayer":
        """Copy the cache; the copy refers to the same layer of the model.

        A state is shared safely, because its tensors never change in place.
        """
        other = copy.copy(self)
        other.state = None if self.state is None else self.state.copy()
        if self.whole:
            other.keys, other.values = copy.deepcopy((self.keys, self.values), memo)
        return other


def _marks(swapped: Any) -> list[tuple[Tensor, int]]:
    """The tensors that a state depends on, with their version counters.

    Version counters detect changes without a device synchronisation.
    """
    marks = []
    for name, tensor in swapped.named_buffers():
        if name.startswith(("draws", "folds", "omega", "running_", "clusters.")):
            marks.append((tensor, changes(tensor)))
    return marks


# ---- install the caches in a model


def install(model: nn.Module) -> None:
    """Make `generate` and use_cache=True of the model create recurrent caches."""
    for part in model.modules():
        part.__dict__.pop("_prepare_cache_for_generation", None)
        remove_hook(part, "recurrent_cache_hook")
        if not isinstance(part, PreTrainedModel):
            continue
        kind: Any = type(part)
        layers = _recurrent_layers(part)
        if layers and "DynamicCache" in names_in_forward(kind):
            hook = partial(_give_cache, layers=layers)
            part.__dict__["recurrent_cache_hook"] = part.register_forward_pre_hook(
                hook, with_kwargs=True
            )
        # a generate method of its own reads the keys (Whisper)
        if layers and getattr(kind, "generate", None) is GenerationMixin.generate:
            part.__dict__["_prepare_cache_for_generation"] = partial(_prepare_cache, part, layers)


def _recurrent_layers(model: nn.Module) -> frozenset[int]:
    """Cache indices of the swapped layers that are causal and have a recurrent state."""
    layers = set()
    for part in model.modules():
        index = getattr(part, "layer_idx", None)
        recurrent = isinstance(part._modules.get("swapped"), RECURRENT)
        causal = getattr(part, "is_causal", True)
        if recurrent and causal and isinstance(index, int) and not is_cross(part, ""):
            layers.add(index)
    return frozenset(layers)


def _give_cache(
    model: Any, args: tuple, kwargs: dict, layers: frozenset[int]
) -> tuple[tuple, dict] | None:
    """Forward pre-hook: create the cache for use_cache=True without a cache."""
    if kwargs.get("use_cache") is not True or _passed_cache(kwargs) is not None or _all_keys(model):
        return None
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config)
    _make_recurrent(own, layers)
    cache: Cache = own
    crosses = (
        config.is_encoder_decoder
        or getattr(config, "add_cross_attention", False)
        or kwargs.get("encoder_hidden_states") is not None
    )
    kind: Any = type(model)
    if crosses and "EncoderDecoderCache" in names_in_forward(kind):
        cache = EncoderDecoderCache(own, DynamicCache(config=config))
    parameters = inspect.signature(kind.forward).parameters
    name = next(name for name in NAMES if name in parameters)
    return args, kwargs | {name: cache}


def _all_keys(module: nn.Module) -> bool:
    return module.training or torch.is_grad_enabled() or torch.compiler.is_compiling()


def _passed_cache(kwargs: dict) -> Cache | None:
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)


def _prepare_cache(
    model: Any,
    layers: frozenset[int],
    generation_config,
    model_kwargs: dict,
    mode: GenerationMode,
    *args,
) -> None:
    """Replacement for `GenerationMixin._prepare_cache_for_generation`."""
    passed = _passed_cache(model_kwargs)
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, mode, *args)
    cache = _passed_cache(model_kwargs)
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    # assisted generation rolls the cache back
    assists = mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
    if cache is not passed and type(own) is DynamicCache and not own.offloading and not assists:
        _make_recurrent(own, layers)


def _make_recurrent(cache: DynamicCache, layers: frozenset[int]) -> None:
    """Replace plain cache layers by recurrent ones, unless layers share keys."""
    if any(isinstance(layer, DummyLayer) for layer in cache.layers):
        return
    for i, layer in enumerate(cache.layers):
        if i in layers and type(layer) is DynamicLayer:
            cache.layers[i] = RecurrentLayer()
