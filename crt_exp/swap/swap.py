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
from crt_exp.swap.refusals import SEES, refusal
from crt_exp.swap.saved import restore_own, write_record

# (heads, d, *, kv_heads, causal, cross, scaling, layer) -> module of (q, k, v, key_mask)
LayerMaker = Callable[..., nn.Module]


@torch.inference_mode(False)   # buffers of inference mode could not be trained or loaded later
def swap_layers(model: nn.Module, maker: LayerMaker, name: str, layers: Iterable[int] | int | str | None = None, *,
                causal: bool | None = None, saved: bool = True, record: dict[str, Any] | None = None) -> nn.Module:
    """`swap_attention` (crt_exp/mechanism.py) with any maker of layers; `name` is what tables call it.

    saved: take noise and statistics from the folder of the model. record: what the model's configuration keeps of the
    mechanism; without one it is not rebuilt from a saved folder.
    """
    modules = swappable(model)
    held = {id(child): (part, name) for part in model.modules() for name, child in part.named_children()}
    holders = [held.get(id(module), (None, "")) for _, module in modules]
    reasons = {i: _reason(module, *holder) for i, ((_, module), holder) in enumerate(zip(modules, holders))}
    chosen = _choose(modules, reasons, layers)
    if layers is None:
        _warn_of_others(model, [modules[i] for i in reasons if i not in chosen])
    _refuse(modules, reasons, chosen)
    # all before the first change
    states = {i: _state(maker, name, i, *modules[i], holders[i][0], causal) for i in chosen}
    if saved:
        restore_own(model, list(states.values()))
    for i, state in states.items():
        state.record = {"name": name, "rebuilds": False} if record is None else record | {"causal": causal}
        module = modules[i][1]
        swapped = families.swapped_class(module)
        module.swapped = state
        if swapped is not None and type(module) is not swapped:
            module.__dict__.setdefault("unswapped_class", type(module))
            module.__class__ = swapped
    _tell_libraries(model)
    write_record(model)
    return model


def unswap_attention(model: nn.Module) -> nn.Module:
    """Restore the model's own attention bit for bit, in place. Raises ValueError where nothing is swapped."""
    swapped = [module for _, module in swappable(model) if "swapped" in module._modules]
    if not swapped:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped")
    if any(families.family(module) == "hf" for module in swapped):
        from crt_exp.swap import cache

        cache.uninstall(model)
    for module in swapped:
        del module.swapped
        if "refuse_replaced" in module.__dict__:
            module.__dict__.pop("refuse_replaced").remove()
        if "unswapped_class" in module.__dict__:
            module.__class__ = module.__dict__.pop("unswapped_class")
    for part in model.modules():
        if "unswapped_nested" in part.__dict__:
            part.use_nested_tensor = part.__dict__.pop("unswapped_nested")
        for config, implementation in part.__dict__.pop("unswapped_configs", ()):
            config._attn_implementation_internal = implementation
        part.__dict__.pop("unmasked_causal", None)
    _remove_check(model)
    write_record(model)
    return model


# ---- finding and choosing

def swappable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All attention modules with their paths. Raises ValueError where there are none."""
    if modules := families.attention_modules(model):
        return modules
    others = families.others(model)
    hint = f"; what it has is of other kinds: {_names(others)}" if others else ""
    raise ValueError(f"no attention found in this {type(model).__name__} that can be swapped: Hugging Face models on "
                     f"the attention interface, timm's Attention and torch.nn.MultiheadAttention can be{hint}")


def _warn_of_others(model: nn.Module, windows: list[tuple[str, nn.Module]]) -> None:
    kind = type(model).__name__
    if others := families.others(model):
        warnings.warn(f"attention of other kinds stays as it is in this {kind}: {_names(others)}", stacklevel=4)
    if windows:
        warnings.warn(f"{len(windows)} attention layers of this {kind} see a window only, in time linear in the length "
                      f"already: they stay as they are: {_names(windows)}", stacklevel=4)


def _names(parts: list[tuple[str, nn.Module]]) -> str:
    names = ", ".join(f"{path} ({type(part).__name__})" for path, part in parts[:3])
    return names + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _choose(modules: list, reasons: dict[int, str | None], layers: Iterable[int] | int | str | None) -> list[int]:
    """Without a choice all layers, or where some see a window and nothing is against the others, these."""
    supported = [i for i, reason in reasons.items() if reason is None]
    if layers is None:
        mixed = supported and all(reason is None or reason.startswith(SEES) for reason in reasons.values())
        return supported if mixed else list(reasons)
    if isinstance(layers, str) and layers == "supported":
        return supported or list(reasons)
    numbers = [layers] if isinstance(layers, Integral) else list(layers)
    if not numbers or any(isinstance(i, bool) or not isinstance(i, Integral) or not -len(modules) <= i < len(modules)
                          for i in numbers):
        raise ValueError(f"layers={layers!r}: expected some of the {len(modules)} layers, 0 to {len(modules) - 1}")
    return sorted({int(i) % len(modules) for i in numbers})


# ---- refusing before anything changes

def _reason(module: nn.Module, holder: nn.Module | None, name: str) -> str | None:
    """Why linear attention cannot stand for a layer; None where it can."""
    if families.family(module) == "hf":
        return refusal(module, f"{type(holder).__name__}.{name}")
    return families.read_by_hand(module, holder)


def _refuse(modules: list[tuple[str, nn.Module]], reasons: dict[int, str | None], chosen: list[int]) -> None:
    """Raises ValueError for the chosen layers that linear attention cannot stand for, with those that it can."""
    refused = [i for i in chosen if reasons[i]]
    if not refused:
        return
    first = next((i for i in refused if not reasons[i].startswith(SEES)), refused[0])  # windows alone would stay
    fit = [i for i, reason in reasons.items() if not reason]
    way = f"layers='supported' swaps those that can be, {fit}" if fit else "no layer of this model can be swapped"
    raise ValueError(f"{_names([modules[first]])}: this attention {reasons[first]}, which linear attention cannot "
                     f"represent; {way}")


# ---- making and attaching

def _state(maker, name: str, i: int, path: str, module: nn.Module, holder: nn.Module | None,
           causal: bool | None) -> nn.Module:
    """The attention of one layer, on its device; ready for causal calls and others, unless `causal` rules them out."""
    size = families.sizes(module, path)
    state = maker(size.heads, size.d, kv_heads=size.kv_heads, causal=causal is not False, scaling=size.scaling, layer=i,
                  **({"cross": True} if size.cross else {}))
    is_causal = getattr(module, "is_causal", False) is True and causal is not False
    for wrong, what in ((is_causal and not getattr(state, "can_be_causal", True), "is causal"),
                        (families.is_cross(module, path, holder) and not getattr(state, "can_cross", True),
                         "attends to another sequence")):
        if wrong:
            raise ValueError(f"{path} ({type(module).__name__}) {what}, which attention {name} cannot: leave it out "
                             f"with layers=[...]{', or give causal=False' if is_causal else ''}")
    state.path, state.mechanism = path, name
    state.causal = size.causal if causal is None else causal
    device = next((p.device for p in module.parameters() if not p.is_meta), None)
    return (state if device is None else state.to(device)).train(module.training)


def _tell_libraries(model: nn.Module) -> None:
    swapped = [module for _, module in swappable(model) if "swapped" in module._modules]
    inside = {id(module) for module in swapped}
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and any(id(inner) in inside for inner in part.modules()):
            part.__dict__.setdefault("unswapped_nested", part.use_nested_tensor)
            part.use_nested_tensor = False  # it hands nested tensors to the layers in eval mode
    if hf := [module for module in swapped if families.family(module) == "hf"]:
        _use_interface(model, hf)
    _remove_check(model)
    for module in swapped:
        module.swapped.__dict__["reached"] = None  # not known yet
    model.__dict__["swap_check"] = model.register_forward_hook(_tell_unreached)


def _use_interface(model: nn.Module, swapped: list[nn.Module]) -> None:
    """Names our attention in the configurations that the swapped modules read, and in no other.

    Two models made from one configuration share it: this one gets copies, so that the other stays what it is.
    """
    from crt_exp.swap import cache, interface

    _own_configurations(model)
    read = {id(module.config): module.config for module in swapped}
    before = [(config, config._attn_implementation) for config in read.values() if not interface.is_ours(config)]
    others = families.others(model)
    for _, part in families.attention_modules(model):
        config = getattr(part, "config", None)
        if id(config) in read and config._attn_implementation == "eager":
            part.__dict__["unmasked_causal"] = False
    for config, _ in before:
        config._attn_implementation_internal = interface.interface_name(config, others)
    for module in swapped:
        if "refuse_replaced" not in module.__dict__:
            module.__dict__["refuse_replaced"] = module.register_forward_pre_hook(interface.refuse_replaced)
    kept = model.__dict__.setdefault("unswapped_configs", [])
    known = {id(config) for config, _ in kept}  # swapped before, and given another implementation since
    kept.extend((config, name) for config, name in before if id(config) not in known)
    cache.install(model)


def _own_configurations(model: nn.Module) -> None:
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

def _remove_check(model: nn.Module) -> None:
    if (hook := model.__dict__.pop("swap_check", None)) is not None:
        hook.remove()


def _tell_unreached(model: nn.Module, *_) -> None:
    """After the first forward pass, warns of the swapped modules that it did not reach."""
    if torch.compiler.is_compiling():
        return
    _remove_check(model)
    if any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules()):
        return  # compiled parts do not note their calls
    unreached = [(path, module) for path, module in families.attention_modules(model)
                 if "swapped" in module._modules and module.swapped.reached is None]
    for _, module in unreached:
        module.swapped.__dict__["reached"] = False
    if unreached:
        warnings.warn(f"this forward pass of {type(model).__name__} did not reach {len(unreached)} swapped modules: "
                      f"{_names(unreached)}; they may serve other inputs, or the model computes their attention by "
                      "other means, which swapping does not change", stacklevel=3)
