"""A layer of transformers' Cache that keeps the recurrent state of decoding.

`install` has `generate`, and calls with use_cache=True, make caches with a `RecurrentLayer` for each swapped causal
layer. Within the forward pass the attention module hands new keys to `update` and what it gets back to the attention
function, with nothing between: so `update` gives back the new keys alone, with the layer attached to them, and the
attention function finds the state there. The state thus belongs to the cache, however many there are. Where that path
does not hold (a module that works on keys after the cache gave them, training, gradients, attention that is not
causal), the layer keeps all keys and values, as a DynamicLayer does: right, in time linear in the position.

Notation: B batch, H query heads, Hkv key heads, T new tokens, S tokens in all, d, dv.
"""

import copy
import inspect
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.generation import GenerationMixin, GenerationMode

from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.decoding import changes
from crt_exp.attention.base import LinearAttention
from crt_exp.nearfar.decoding import RecallState
from crt_exp.swap.call import attend, prepare, read_mask
from crt_exp.swap.families import is_cross, names_in_forward

NAMES = ("cache", "past_key_values")  # of the argument: from transformers 5.24 on, and before
WHOLE = "give the model a DynamicCache(), which keeps all keys"


class NewKeys(Tensor):
    """Keys or values of new tokens alone, whose past is in the state of `cache_layer`:
    any other use would lose the past."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "numel", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ValueError(f"{name} was called outside of swapped attention on keys that end a recurrent state: {WHOLE}")


class RecurrentLayer(DynamicLayer):
    """One layer's cache: M (dv + 1) numbers a head and no keys.

    It decides at its first call, which sees all keys, whether the state can stand for them; else it keeps them
    (`whole`). A state does not go back, so that assisted generation gets a cache of all keys.
    """

    def __init__(self):
        super().__init__()
        self._clear()

    def _clear(self) -> None:
        self.length, self.whole = 0, False
        self.given = None      # new keys and values that no attention function has taken yet
        self.handed = None     # references to what `update` gave for them
        self.state = None      # of all tokens
        self.padding = None    # (B, p): which of the first p tokens count; all later ones do
        self.owner = self.marks = None

    # ---- what a forward pass calls

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self._keep_given()
        if self.whole or (self.state is None and type(key_states) is not Tensor):
            self.whole = True
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.given, self.length = (key_states, value_states), self.length + key_states.shape[-2]
        kind = Tensor if self.state is None else NewKeys  # the first keys are all keys, so they may be used in any way
        keys, values = key_states.as_subclass(kind), value_states.as_subclass(kind)
        self.handed = weakref.ref(keys), weakref.ref(values)
        keys.cache_layer = self
        return keys, values

    def attend(self, swapped: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, keep: Tensor | None,
               mask: Tensor | None, causal: bool, scaling: float | None, dropout: float,
               matrix: bool) -> tuple[Tensor, Tensor | None]:
        """`call.attend` for queries (B,H,T,d) and what `update` gave;
        keep (B,S) and mask (B,.,T,S) are those of all tokens.

        Raises ValueError, naming the layer, where the state cannot give what is asked for.
        """
        used, first = self.length, not isinstance(key, NewKeys)
        at_once = partial(attend, swapped, query, key, value, keep=keep, mask=mask, causal=causal, scaling=scaling,
                          dropout=dropout, matrix=matrix)
        if not self._takes(key, value, swapped.path):
            return at_once()
        (key, value), self.given = self.given, None
        if mask is not None:
            keep, causal, used = read_mask(mask, keep, causal, query.shape[2], swapped.path)
        keep = None if keep is None or bool(keep.all()) else keep.expand(query.shape[0], -1)
        prepare(swapped, query, key, causal)
        if first and not self._begins(swapped, query, key, value, causal and not matrix and used == self.length):
            self._keep_whole(key, value)
            return at_once()
        if first:
            self._set_padding(keep)
        else:
            self._check(swapped, query, causal, matrix, used)
            keep = self._new_padding(keep, query.shape[2], swapped.path)
        if first and not isinstance(self.state, RecallState):
            key, value = (repeat_heads(t, swapped.recurrent_heads) for t in (key, value))
            self.state.take(swapped.scaled(key), value, keep)
            return at_once()
        q = query if scaling is None or scaling == swapped.scaling else query * (scaling / swapped.scaling)
        return self.state.step(swapped.scaled(q), swapped.scaled(key), value, keep), None

    def _takes(self, key: Tensor, value: Tensor, path: str) -> bool:
        """Whether these are the new keys and values as `update` gave them, and come for the first time."""
        same = self.handed[0]() is key and self.handed[1]() is value
        if same and self.given is not None:
            return True
        if isinstance(key, NewKeys):
            raise ValueError(f"{path}: the keys of a recurrent state are used twice or with other values: {WHOLE}")
        if self.given is None and not self.whole:  # they serve other attention too, which one state cannot
            self.state = None
            self._keep_whole(key, value)
        self._keep_given()
        return False

    def _begins(self, swapped: nn.Module, query: Tensor, key: Tensor, value: Tensor, possible: bool) -> bool:
        """Before the first tokens are taken: a new state, or False where none can stand for their keys."""
        possible = possible and isinstance(swapped, LinearAttention) and query.shape[2] == key.shape[2]
        if not possible or _all_keys(swapped) or swapped.calibrated is not None:
            return False
        # sizes are asked for
        self.keys, self.values = (torch.empty_like(t[:, :, :0]).as_subclass(NewKeys) for t in (key, value))
        self.owner, self.marks = weakref.ref(swapped), _marks(swapped)
        self.state = swapped.decoding()
        return True

    def _check(self, swapped: nn.Module, query: Tensor, causal: bool, matrix: bool, used: int) -> None:
        marks = _marks(swapped)
        same = self.owner() is swapped and all(a is b and x == y for (a, x), (b, y) in zip(self.marks, marks))
        if not same:
            raise ValueError(f"{swapped.path}: noise or statistics changed since then: start with a new cache")
        for wrong, what in ((matrix, "output_attentions=True"), (swapped.training, "training mode"),
                            (torch.is_grad_enabled() and query.requires_grad, "a gradient"),
                            (query.shape[2] > 1 and not causal, "attention that is not causal"),
                            (used != self.length, "a mask that leaves out the last tokens")):
            if wrong:
                raise ValueError(f"{swapped.path}: its state in the cache cannot give {what}: {WHOLE}")

    # ---- padding: the state has taken that of the past

    def _new_padding(self, keep: Tensor | None, new: int, path: str) -> Tensor | None:
        """The mask of the new tokens (B, T), of one for all tokens.
        Raises ValueError where that differs for the past."""
        past, padded = self.length - new, 0 if self.padding is None else self.padding.shape[1]
        if keep is not None and keep.shape[1] != self.length:
            raise ValueError(f"{path}: attention mask of {keep.shape[1]} tokens: expected {past} cached, {new} new")
        same = padded == 0 or (keep is not None and torch.equal(keep[:, :padded], self.padding))
        if not same or (keep is not None and not bool(keep[:, padded:past].all())):
            raise ValueError(f"{path}: the attention mask leaves out other tokens of the past than before: {WHOLE}")
        if keep is None or bool(keep[:, past:].all()):
            return None
        self._set_padding(keep)
        return keep[:, past:]

    def _set_padding(self, keep: Tensor | None) -> None:
        """Remembers a mask of all tokens, up to the last one that it leaves out."""
        left_out = () if keep is None else (~keep).any(0).nonzero()
        self.padding = keep[:, :int(left_out[-1]) + 1].clone() if len(left_out) else None

    # ---- keeping the keys after all

    def _keep_whole(self, key: Tensor, value: Tensor) -> None:
        self.whole = True
        self.lazy_initialization(key, value)
        super().update(key, value)

    def _keep_given(self) -> None:
        """Keys that no swapped attention took: the first ones are all there are, later ones would miss their past."""
        if self.given is None:
            return
        given, self.given = self.given, None
        if self.state is not None:
            raise ValueError(f"no swapped attention took the new keys: start with a new cache, or {WHOLE}")
        self._keep_whole(*given)

    # ---- what generation asks of a layer

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self.whole else self.length

    def nbytes(self) -> int:
        """Bytes of all tensors that are kept for later tokens."""
        state = self.state.kept if self.state is not None and self.state.kept is not None else ()
        return sum(t.nbytes for t in (self.keys, self.values, self.padding, *state) if t is not None)

    def reset(self) -> None:
        super().reset()
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._keep_given()
        if self.whole or self.state is None:
            super().reorder_cache(beam_idx)
            return
        self.state.select(beam_idx.to(self.device))
        self._set_padding(None if self.padding is None else self.padding[beam_idx.to(self.padding.device)])

    def __deepcopy__(self, memo: dict) -> "RecurrentLayer":
        """Another cache of the same tokens, whose layer is still that of the model.
        Nothing in a state changes in place."""
        other = copy.copy(self)
        other.state = None if self.state is None else self.state.copy()
        if self.whole:
            other.keys, other.values = copy.deepcopy((self.keys, self.values), memo)
        return other


def _marks(swapped: nn.Module) -> list[tuple[Tensor, int]]:
    """The tensors that a state depends on and how often each was changed in place;
    reading them would wait for a device."""
    return [(t, changes(t)) for name, t in swapped.named_buffers()
            if name in ("draws", "folds") or name.startswith(("omega", "running_", "clusters."))]


# ---- how models get such caches

def install(model: nn.Module) -> None:
    """Has `generate` and use_cache=True of all models within this one make caches with recurrent layers."""
    uninstall(model)
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        layers = _recurrent_layers(part)
        if layers and "DynamicCache" in names_in_forward(type(part)):
            hook = partial(_give_cache, layers=layers)
            part.__dict__["recurrent_cache_hook"] = part.register_forward_pre_hook(hook, with_kwargs=True)
        # a model's own generate reads the keys (Whisper's)
        if layers and getattr(type(part), "generate", None) is GenerationMixin.generate:
            part.__dict__["_prepare_cache_for_generation"] = partial(_prepare_cache, part, layers)


def uninstall(model: nn.Module) -> None:
    for part in model.modules():
        part.__dict__.pop("_prepare_cache_for_generation", None)
        if "recurrent_cache_hook" in part.__dict__:
            part.__dict__.pop("recurrent_cache_hook").remove()


def _recurrent_layers(model: nn.Module) -> frozenset[int]:
    """Indices in the cache of the layers that are causal and have a recurrent state."""
    parts = [part for part in model.modules() if isinstance(part._modules.get("swapped"), LinearAttention)
             and getattr(part, "is_causal", True) and not is_cross(part, "")]
    return frozenset(part.layer_idx for part in parts if isinstance(getattr(part, "layer_idx", None), int))


def _give_cache(model: nn.Module, args: tuple, kwargs: dict, layers: frozenset[int]) -> tuple[tuple, dict] | None:
    """A forward pre-hook: a cache where use_cache=True is given without one, which the model itself would make now."""
    if kwargs.get("use_cache") is not True or _given(kwargs) is not None or _all_keys(model):
        return None
    config = model.config.get_text_config(decoder=True)
    made = DynamicCache(config=config)
    _make_recurrent(made, layers)
    crosses = (config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
               or kwargs.get("encoder_hidden_states") is not None)
    if crosses and "EncoderDecoderCache" in names_in_forward(type(model)):
        made = EncoderDecoderCache(made, DynamicCache(config=config))
    name = next(name for name in NAMES if name in inspect.signature(type(model).forward).parameters)
    return args, kwargs | {name: made}


def _all_keys(module: nn.Module) -> bool:
    return module.training or torch.is_grad_enabled() or torch.compiler.is_compiling()


def _given(kwargs: dict) -> Cache | None:
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)


def _prepare_cache(model: nn.Module, layers: frozenset[int], generation_config, model_kwargs: dict,
                   mode: GenerationMode, *args) -> None:
    """In the place of `GenerationMixin._prepare_cache_for_generation`."""
    given = _given(model_kwargs)
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, mode, *args)
    made = _given(model_kwargs)
    own = made.self_attention_cache if isinstance(made, EncoderDecoderCache) else made
    assists = mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant  # and goes back in the cache
    if made is not given and type(own) is DynamicCache and not own.offloading and not assists:
        _make_recurrent(own, layers)


def _make_recurrent(made: DynamicCache, layers: frozenset[int]) -> None:
    """Puts recurrent layers in the place of plain ones; not where layers share keys, and so use each other's."""
    if not any(isinstance(layer, DummyLayer) for layer in made.layers):
        for i, layer in enumerate(made.layers):
            if i in layers and type(layer) is DynamicLayer:
                made.layers[i] = RecurrentLayer()
