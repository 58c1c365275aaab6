"""Swap the attention of a pretrained model in place, and restore it.

Each swapped attention module gets a submodule `swapped` that holds random projections and statistics. Parameter names
stay the same; the state dict gains the buffers of `swapped`. Supported are Hugging Face models on the attention
interface, timm's Attention, and torch.nn.MultiheadAttention (including TransformerEncoder and torchaudio's Conformer).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from crt_exp import __version__
from crt_exp.attention.base import AttentionLayer
from crt_exp.swap import families
from crt_exp.swap.families import WINDOW_REASON
from crt_exp.swap.saved import IMPLEMENTATION, KEY, restore_own
from crt_exp.validation import warn

# builder (heads, d, *, kv_heads, causal, cross, scaling, layer) -> AttentionLayer
LayerMaker = Callable[..., Any]
HOOKS = ("refuse_replaced", "recurrent_cache_hook", "swap_check")


@torch.inference_mode(False)  # tensors created in inference mode cannot be trained or loaded into
def swap_layers(
    model: nn.Module,
    maker: LayerMaker,
    name: str,
    layers: Iterable[int] | int | str | None = None,
    *,
    causal: bool | None = None,
    saved: bool = True,
    record: dict[str, Any] | None = None,
) -> nn.Module:
    """Do `swap_attention` with any builder of layers.

    Args:
        maker: builds a layer, see `LayerMaker`.
        name: the method's name in tables.
        saved: load projections and statistics from the folder of the model.
        record: what the model's configuration stores of the mechanism. Without a record `from_pretrained` cannot
            rebuild the mechanism.
    """
    places = swappable(model)
    chosen = _choose_layers(places, layers)
    if layers is None:
        kind = type(model).__name__
        if others := families.unknown_modules(model):
            warn(f"{kind}: unsupported attention stays unchanged: {_names(others)}")
        if windows := [place for i, place in enumerate(places) if i not in chosen]:
            warn(
                f"{kind}: {len(windows)} layers with window attention stay unchanged: "
                f"{_names(windows)}"
            )
    _refuse_unsupported(places, chosen)
    # build and check all layers before the first change to the model
    states = {i: _build_layer(maker, name, i, places[i], causal) for i in chosen}
    if saved:
        restore_own(model, list(states.values()))
    if record is None:
        record = {"name": name, "rebuilds": False}
    else:
        record = record | {"causal": causal}
    for i, state in states.items():
        state.record = record
        module = places[i].module
        module.swapped = state
        replacement = families.swapped_class(module)
        if replacement is not None and replacement is not type(module):
            module.__dict__.setdefault("unswapped_class", type(module))
            module.__class__ = replacement
    modules = [place.module for place in places if "swapped" in place.module._modules]
    _configure_libraries(model, modules)
    write_record(model)
    return model


def unswap_attention(model: nn.Module) -> nn.Module:
    """Restore the model's own attention exactly, in place; return the model.

    Raises ValueError if no layer is swapped.

    >>> import crt_exp
    >>> module = crt_exp.swap_attention(nn.MultiheadAttention(16, 2), "favorpp", m=8)
    >>> type(crt_exp.unswap_attention(module)).__name__
    'MultiheadAttention'
    """
    modules = [module for _, module in families.attention_modules(model)]
    swapped = [module for module in modules if "swapped" in module._modules]
    if not swapped:
        raise ValueError(f"{type(model).__name__}: no swapped attention; call swap_attention first")
    for module in swapped:
        del module.swapped
        if "unswapped_class" in module.__dict__:
            module.__class__ = module.__dict__.pop("unswapped_class")
    _return_configurations(model)
    for part in model.modules():
        if "unswapped_nested" in part.__dict__:
            part.use_nested_tensor = part.__dict__.pop("unswapped_nested")
        for config, implementation in part.__dict__.pop("unswapped_configs", ()):
            config._attn_implementation_internal = implementation
        part.__dict__.pop("unmasked_causal", None)
        part.__dict__.pop("_prepare_cache_for_generation", None)
        for name in HOOKS:
            families.remove_hook(part, name)
    write_record(model)
    return model


# ---- select layers


class AttentionModule(NamedTuple):
    """An attention module, its parent module, and why it cannot be swapped, or None."""

    path: str
    module: nn.Module
    holder: nn.Module | None
    reason: str | None

    @property
    def has_window(self) -> bool:
        return self.reason is not None and self.reason.startswith(WINDOW_REASON)


def swappable(model: nn.Module) -> list[AttentionModule]:
    """All attention modules. Raises ValueError if there are none."""
    parents = {}
    for part in model.modules():
        for name, child in part.named_children():
            parents[id(child)] = (part, name)
    modules = []
    for path, module in families.attention_modules(model):
        holder, name = parents.get(id(module), (None, ""))
        reason = families.refusal(module, holder, name)
        modules.append(AttentionModule(path, module, holder, reason))
    if modules:
        return modules
    raise ValueError(
        f"{type(model).__name__}: no supported attention; unsupported: "
        f"{_names(families.unknown_modules(model)) or 'none'}"
    )


def _names(parts: Sequence[tuple]) -> str:
    names = ", ".join(f"{path} ({type(part).__name__})" for path, part, *_ in parts[:3])
    if len(parts) > 3:
        names += f" and {len(parts) - 3} more"
    return names


def _choose_layers(
    places: list[AttentionModule], layers: Iterable[int] | int | str | None
) -> list[int]:
    """Return the indices of the layers to swap.

    By default these are all layers. If some layers have window attention and all others are supported, the layers with
    a window stay as they are.
    """
    count = len(places)
    supported = [i for i, place in enumerate(places) if place.reason is None]
    if layers is None or (isinstance(layers, str) and layers == "supported"):
        unsupported = [place for place in places if place.reason is not None]
        leave_out = layers is not None or all(place.has_window for place in unsupported)
        return supported if supported and leave_out else list(range(count))
    numbers: Any = [layers] if isinstance(layers, Integral) else layers
    try:
        chosen = {range(count)[i] for i in numbers}
    except (IndexError, TypeError):
        chosen = set()
    if not chosen:
        raise ValueError(f"layers={layers!r}: expected indices of {count} layers, 0 to {count - 1}")
    return sorted(chosen)


def _refuse_unsupported(places: list[AttentionModule], chosen: list[int]) -> None:
    """Raise ValueError if a selected layer cannot be swapped; list those that can."""
    refused = [places[i] for i in chosen if places[i].reason]
    if not refused:
        return
    # report window attention last: on its own it would stay as it is
    first = min(refused, key=lambda place: place.has_window)
    fit = [i for i, place in enumerate(places) if not place.reason]
    way = f"layers='supported' swaps {fit}" if fit else "no layer can be swapped"
    raise ValueError(
        f"{_names([first])}: this attention {first.reason}, which linear attention does not support; "
        f"{way}"
    )


# ---- build and attach layers


def _build_layer(
    maker: LayerMaker, name: str, i: int, place: AttentionModule, causal: bool | None
) -> AttentionLayer:
    """Build one attention layer on the device of its module.

    The layer serves causal and bidirectional calls, unless causal=False.
    """
    path = place.path
    module = place.module
    size = families.sizes(module, path)
    options: dict[str, Any] = {"kv_heads": size.kv_heads, "scaling": size.scaling, "layer": i}
    if size.cross:
        options["cross"] = True
    state = maker(size.heads, size.d, causal=causal is not False, **options)
    leave_out = f"not supported by attention={name}; leave it out with layers=[...]"
    where = f"{path} ({type(module).__name__})"
    if families.is_cross(module, path, place.holder) and not state.can_cross:
        raise ValueError(f"{where} attends to another sequence: {leave_out}")
    is_causal = getattr(module, "is_causal", False) is True and causal is not False
    if is_causal and not state.can_be_causal:
        raise ValueError(f"{where} is causal: {leave_out}, or set causal=False")
    state.path = path
    state.mechanism = name
    state.causal = size.causal if causal is None else causal
    for parameter in module.parameters():
        if not parameter.is_meta:
            state.to(parameter.device)
            break
    return state.train(module.training)


def _configure_libraries(model: nn.Module, swapped: list[Any]) -> None:
    """Prepare torch, transformers and the check of the first forward pass for the swapped modules."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and _has_swapped(part):
            part.__dict__.setdefault("unswapped_nested", part.use_nested_tensor)
            # in eval mode it would pass nested tensors to the layers
            part.use_nested_tensor = False
    hf = [module for module in swapped if families.family(module) == "hf"]
    if hf:
        _use_interface(model, hf)
    for module in swapped:
        module.swapped.__dict__["reached"] = None  # unknown before the first forward pass
    if "swap_check" not in model.__dict__:
        model.__dict__["swap_check"] = model.register_forward_hook(_warn_unreached)


def _has_swapped(part: nn.Module) -> bool:
    return any("swapped" in inner._modules for inner in part.modules())


def _use_interface(model: nn.Module, swapped: list[Any]) -> None:
    """Set our attention function in the configurations of the swapped modules.

    Models built from one configuration object share it. The swapped model gets copies, so that other models keep
    theirs.
    """
    from transformers import PreTrainedConfig

    from crt_exp.swap import interface

    if "unswapped_configs" in model.__dict__:
        _return_configurations(model)
    else:
        model.__dict__["unswapped_configs"] = []
        memo: dict = {}  # parts that shared a configuration share the copy
        for part in model.modules():
            for key, value in list(vars(part).items()):
                if isinstance(value, PreTrainedConfig):
                    vars(part)[key] = copy.deepcopy(value, memo)
    originals = model.__dict__["unswapped_configs"]
    names = {id(config): name for config, name in originals}
    for config in {id(module.config): module.config for module in swapped}.values():
        name = config._attn_implementation
        if name in interface.OURS:
            name = names.get(id(config), "eager")
        if id(config) not in names:
            originals.append((config, name))
        config._attn_implementation_internal = _implementation(model, config, name)
        for module in swapped:
            if module.config is config and name == "eager":
                module.__dict__["unmasked_causal"] = False
    for module in swapped:
        if "refuse_replaced" not in module.__dict__:
            hook = module.register_forward_pre_hook(interface.refuse_replaced)
            module.__dict__["refuse_replaced"] = hook
    if any(getattr(module, "is_causal", True) for module in swapped):  # may read a cache
        from crt_exp.swap import cache

        cache.install(model)


def _implementation(model: nn.Module, config: Any, name: str) -> str:
    """The attention function of ours for a configuration whose own implementation is `name`.

    Modules with this configuration that keep their own attention get a copy of it with their own implementation.
    """
    from crt_exp.swap import interface

    others = []
    for _, part in [*families.attention_modules(model), *families.unknown_modules(model)]:
        if "swapped" not in part._modules and getattr(part, "config", config) is config:
            others.append(part)
    if not others:
        return interface.INTERFACE
    plain = interface.plain_implementation(name, others)
    own = copy.copy(config)
    own._attn_implementation_internal = plain
    for part in others:
        for inner in part.modules():
            if vars(inner).get("config") is config:
                inner.__dict__["shared_config"] = config
                inner.config = own
    return interface.AS_BEFORE[plain]


def _return_configurations(model: nn.Module) -> None:
    """Undo what `_implementation` did to unswapped modules."""
    for part in model.modules():
        if "shared_config" in part.__dict__:
            part.config = part.__dict__.pop("shared_config")


# ---- check that a forward pass reaches the swapped modules


def _warn_unreached(model: nn.Module, *_: Any) -> None:
    """After the first forward pass, warn of swapped modules that it did not reach."""
    if torch.compiler.is_compiling():
        return
    families.remove_hook(model, "swap_check")
    for part in model.modules():
        if "_orig_mod" in part._modules or part._compiled_call_impl is not None:
            return  # compiled modules do not record their calls
    unreached = []
    for path, module in families.attention_modules(model):
        state = module._modules.get("swapped")
        if isinstance(state, AttentionLayer) and state.reached is None:
            state.__dict__["reached"] = False
            unreached.append((path, module))
    if unreached:
        warn(
            f"{type(model).__name__}: {len(unreached)} swapped modules were not called: {_names(unreached)}; "
            "other inputs may call them, or the model computes attention itself"
        )


# ---- the record that save_pretrained of transformers stores


def write_record(model: nn.Module) -> None:
    """Update `config.crt_exp` of each outermost transformers model."""
    written: set[nn.Module] = set()
    for holder in pretrained_models(model):
        if holder in written:
            continue
        written.update(holder.modules())
        mechanisms: list[dict] = []
        layers = {}
        for path, module in families.attention_modules(holder):
            state: Any = module._modules.get("swapped")
            if state is not None and state.record not in mechanisms:
                mechanisms.append(state.record)
            layers[path] = None if state is None else mechanisms.index(state.record)
        take_record(holder)
        if not mechanisms:
            continue
        record = {"version": __version__, "mechanisms": mechanisms, "layers": layers}
        setattr(holder.config, KEY, record)
        # a model inside another one may be saved by itself
        for part in pretrained_models(holder):
            if _has_swapped(part):
                setattr(part.config, IMPLEMENTATION, KEY)


def pretrained_models(model: nn.Module) -> list[nn.Module]:
    """The transformers models in a model, each before those inside it."""
    models = []
    for part in model.modules():
        bases = {kind.__name__ for kind in type(part).__mro__}
        if "PreTrainedModel" in bases and getattr(part, "config", None) is not None:
            models.append(part)
    return models


def take_record(holder: nn.Module) -> dict[str, Any] | None:
    """Remove `config.crt_exp` and return it; None if there is none."""
    for part in pretrained_models(holder):
        vars(part.config).pop(IMPLEMENTATION, None)
    return vars(holder.config).pop(KEY, None)
