"""Any pretrained model with other attention, by one call, and back.

Every swapped attention module gets one submodule, `swapped`, that holds noise and statistics: checkpoint keys stay, and
these buffers are added to them. Families: Hugging Face models on the attention interface, timm's Attention,
torch.nn.MultiheadAttention (with it TransformerEncoder, and torchaudio's Conformer).
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
from torch import nn

from crt_exp.swap import families
from crt_exp.swap import record as configured
from crt_exp.swap.buffers import moved, place_of, restore
from crt_exp.swap.replaced import unwatch, watch
from crt_exp.swap.refusals import SEES, places, refusal
from crt_exp.swap.weights import own_weights

# (heads, d, *, kv_heads, causal, cross, scaling, layer) -> module of (q, k, v, key_mask)
LayerMaker = Callable[..., nn.Module]


@torch.inference_mode(False)   # buffers of inference mode could not be trained or loaded later
def swap_layers(model: nn.Module, maker: LayerMaker, name: str, layers: Iterable[int] | int | str | None = None, *,
                causal: bool | None = None, saved: bool = True, record: dict[str, Any] | None = None) -> nn.Module:
    """`swap_attention` (crt_exp/mechanism.py) with any maker of layers; `name` is what tables call it.

    record: what the model's configuration keeps of the mechanism; without one it is not rebuilt from a saved folder.
    """
    modules = _modules(model)
    reasons = _reasons(model, modules)
    chosen = _choose(modules, reasons, layers)
    if layers is None:
        _warn_of_others(model)
        _warn_of_windows(model, [modules[i] for i in reasons if i not in chosen])
    _refuse(modules, reasons, chosen)
    states = {i: _state(maker, name, i, *modules[i], causal) for i in chosen}  # all before the first change
    _check_cross(model, modules, states)
    if saved:
        restore(model, list(states.values()), *own_weights(model))
    for i, state in states.items():
        state.record = {"name": name, "rebuilds": False} if record is None else record | {"causal": causal}
        _attach(modules[i][1], state)
    _tell_libraries(model)
    configured.write(model)
    return model


def unswap_attention(model: nn.Module) -> nn.Module:
    """Gives the model its own attention back, bit for bit, in place. Raises ValueError where nothing is swapped."""
    swapped = [module for _, module in _modules(model) if "swapped" in module._modules]
    if not swapped:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped")
    if any(families.family(module) == "hf" for module in swapped):
        from crt_exp.swap import cache as swap_cache

        swap_cache.uninstall(model)
    for module in swapped:
        unwatch(module)
        del module.swapped
        module.__dict__.pop("swap_interface", None)
        if "unswapped_class" in module.__dict__:
            module.__class__ = module.__dict__.pop("unswapped_class")
    for part in model.modules():
        if "unswapped_nested" in part.__dict__:
            part.use_nested_tensor = part.__dict__.pop("unswapped_nested")
        for config, implementation in part.__dict__.pop("unswapped_configs", ()):
            config._attn_implementation_internal = implementation
        part.__dict__.pop("unmasked_causal", None)
    _remove_check(model)
    configured.write(model)
    return model


def describe_attention(model: nn.Module):
    """A DataFrame with one row for each attention module: see `table.COLUMNS`, some of which are of some kinds of
    attention alone. Nothing is printed.
    """
    from crt_exp.swap.table import table

    return table(_modules(model), families.others(model))


# ---- finding and choosing

def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All attention modules with their paths, in the order of the model's modules."""
    modules = [(path or type(module).__name__, module) for path, module in model.named_modules()
             if families.family(module)]
    if modules:
        return modules
    others = families.others(model)
    hint = f"; what it has is of other kinds: {_names(others)}" if others else ""
    raise ValueError(f"no attention found in this {type(model).__name__} that can be swapped: Hugging Face models on "
                     f"the attention interface, timm's Attention and torch.nn.MultiheadAttention can be{hint}")


def _warn_of_others(model: nn.Module) -> None:
    others = families.others(model)
    if others and any(families.family(part) for part in model.modules()):
        warnings.warn(f"attention of other kinds stays as it is in this {type(model).__name__}: {_names(others)}",
                      stacklevel=4)


def _warn_of_windows(model: nn.Module, windows: list[tuple[str, nn.Module]]) -> None:
    if windows:
        warnings.warn(f"{len(windows)} attention layers of this {type(model).__name__} see a window only, in time "
                      f"linear in the length already: they stay as they are: {_names(windows)}", stacklevel=4)


def _names(parts: list[tuple[str, nn.Module]]) -> str:
    shown = ", ".join(f"{path} ({type(part).__name__})" for path, part in parts[:3])
    return shown + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _choose(modules: list, reasons: dict[int, str | None], layers: Iterable[int] | int | str | None) -> list[int]:
    """Without a choice all layers, or where some see a window and nothing is against the others, these."""
    supported = [i for i, reason in reasons.items() if reason is None]
    if layers is None:
        mixed = supported and all(reason is None or reason.startswith(SEES) for reason in reasons.values())
        return supported if mixed else list(reasons)
    if isinstance(layers, str):
        if layers != "supported":
            raise ValueError(f"layers = {layers!r}: it takes numbers of layers, 'supported' or None")
        return supported or list(reasons)
    layers = [layers] if isinstance(layers, Integral) else list(layers)
    for i in layers:
        if not isinstance(i, Integral) or isinstance(i, bool) or not -len(modules) <= i < len(modules):
            raise ValueError(f"layers holds {i!r}: this model has {len(modules)} attention layers, "
                             f"0 to {len(modules) - 1}")
    if not layers:
        raise ValueError("layers is empty: nothing to swap")
    return sorted({int(i) % len(modules) for i in layers})


# ---- refusing before anything changes

def _reasons(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> dict[int, str | None]:
    """Why linear attention cannot stand for each layer; None where it can."""
    held, reasons = places(model), {}
    for i, (_, module) in enumerate(modules):
        holder, name = held.get(id(module), (None, ""))
        reasons[i] = (refusal(module, f"{type(holder).__name__}.{name}") if families.family(module) == "hf"
                      else families.read_by_hand(module, holder))
    return reasons


def _refuse(modules: list[tuple[str, nn.Module]], reasons: dict[int, str | None], chosen: list[int]) -> None:
    """Raises ValueError for the chosen layers that linear attention cannot stand for, with those that it can."""
    refused = [i for i in chosen if reasons[i]]
    if not refused:
        return
    first = next((i for i in refused if not reasons[i].startswith(SEES)), refused[0])  # windows alone would stay
    path, module = modules[first]
    rest = f", and {len(refused) - 1} more of {len(chosen)} layers" if len(refused) > 1 else ""
    fit = [i for i, reason in reasons.items() if not reason]
    way = f"layers='supported' swaps those that can be, {fit}" if fit else "no layer of this model can be swapped"
    raise ValueError(f"{path} ({type(module).__name__}){rest}: this attention {reasons[first]}, "
                     f"which linear attention cannot represent; {way}")


# ---- making and attaching

def _state(maker, name: str, i: int, path: str, module: nn.Module, causal: bool | None) -> nn.Module:
    """The attention of one layer, on its device; ready for causal calls and others, unless `causal` rules them out."""
    size = families.sizes(module, path)
    state = maker(size.heads, size.d, kv_heads=size.kv_heads, causal=causal is not False, scaling=size.scaling, layer=i,
                  **({"cross": True} if size.cross else {}))
    is_causal = getattr(module, "is_causal", False) is True and causal is not False
    if is_causal and not getattr(state, "can_be_causal", True):
        raise ValueError(f"{path} ({type(module).__name__}) is causal, which attention {name} cannot be: leave it out "
                         "with layers=[...], or give causal=False if this model is never used so")
    state.path, state.mechanism = path, name
    state.causal = size.causal if causal is None else causal
    return moved(state, place_of(module)).train(module.training)


def _check_cross(model: nn.Module, modules: list[tuple[str, nn.Module]], states: dict[int, nn.Module]) -> None:
    """Raises ValueError for attention within one sequence in the place of one to another."""
    held = places(model)
    crossing = [i for i, (path, module) in enumerate(modules)
                if families.is_cross(module, path, held.get(id(module), (None, ""))[0])]
    odd = [i for i in crossing if i in states and not getattr(states[i], "can_cross", True)]
    if odd:
        path, module = modules[odd[0]]
        raise ValueError(f"{path} ({type(module).__name__}) attends to another sequence, which attention "
                         f"{states[odd[0]].mechanism} cannot: leave such layers out with layers="
                         f"{[i for i in states if i not in crossing]}")


def _attach(module: nn.Module, state: nn.Module) -> None:
    swapped = families.swapped_class(module)
    module.swapped = state
    if swapped is not None and type(module) is not swapped:
        module.__dict__.setdefault("unswapped_class", type(module))
        module.__class__ = swapped
    watch(module)


def _tell_libraries(model: nn.Module) -> None:
    swapped = [module for _, module in _modules(model) if "swapped" in module._modules]
    inside = {id(module) for module in swapped}
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and any(id(inner) in inside for inner in part.modules()):
            part.__dict__.setdefault("unswapped_nested", part.use_nested_tensor)
            part.use_nested_tensor = False  # it hands nested tensors to the layers in eval mode
    if any(families.family(module) == "hf" for module in swapped):
        _use_interface(model, swapped)
    _check_first_pass(model)


def _use_interface(model: nn.Module, swapped: list[nn.Module]) -> None:
    """Names our attention in the configurations that the swapped modules read, and in no other.

    Two models made from one configuration share it: this one gets copies, so that the other stays what it is.
    """
    from crt_exp.swap import cache as swap_cache

    own_configurations(model)
    read = {id(module.config): module.config for module in swapped if families.family(module) == "hf"}
    before = [(config, config._attn_implementation) for config in read.values() if not families.is_ours(config)]
    others = families.others(model)
    for part in model.modules():
        implementation = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if id(getattr(part, "config", None)) in read and families.family(part) == "hf" and implementation == "eager":
            part.__dict__["unmasked_causal"] = False
    for config, _ in before:
        config._attn_implementation_internal = families.interface_name(config, others)
    for module in swapped:
        if families.family(module) == "hf":
            module.__dict__["swap_interface"] = families.Registered(module.config._attn_implementation)
    kept = model.__dict__.setdefault("unswapped_configs", [])
    known = {id(config) for config, _ in kept}  # swapped before, and given another implementation since
    kept.extend((config, name) for config, name in before if id(config) not in known)
    swap_cache.install(model)


def own_configurations(model: nn.Module) -> None:
    """Copies of the configurations, the same one for all parts that shared one; once for a model."""
    from transformers import PreTrainedConfig

    if "unswapped_configs" in model.__dict__:
        return
    memo: dict = {}
    for part in model.modules():
        for key, value in list(vars(part).items()):
            if isinstance(value, PreTrainedConfig):
                vars(part)[key] = copy.deepcopy(value, memo)


# ---- whether a forward pass reaches what was swapped

def _check_first_pass(model: nn.Module) -> None:
    """After the first forward pass of the whole model, says which swapped modules it did not reach."""
    _remove_check(model)
    for part in model.modules():
        if "swapped" in part._modules:
            part.swapped.__dict__["reached"] = None  # not known yet
    model.__dict__["swap_check"] = model.register_forward_hook(_tell_unreached)


def _remove_check(model: nn.Module) -> None:
    if (hook := model.__dict__.pop("swap_check", None)) is not None:
        hook.remove()


def _tell_unreached(model: nn.Module, *_) -> None:
    if torch.compiler.is_compiling():
        return
    _remove_check(model)
    swapped = [(path, module) for path, module in model.named_modules() if "swapped" in module._modules]
    compiled = {id(module) for part in model.modules()      # torch.compile(part), part.compile()
                if "_orig_mod" in part._modules or part._compiled_call_impl is not None for module in part.modules()}
    unreached = [(path, module) for path, module in swapped
                 if module.swapped.reached is None and id(module) not in compiled]   # which do not note their calls
    for _, module in unreached:
        module.swapped.__dict__["reached"] = False
    if unreached:
        warnings.warn(f"this forward pass of {type(model).__name__} did not reach {len(unreached)} of {len(swapped)} "
                      f"swapped modules: {_names(unreached)}; they may serve other inputs, or the model may compute "
                      "their attention by other means, which swapping does not change", stacklevel=3)
