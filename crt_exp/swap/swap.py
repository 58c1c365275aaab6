"""Any pretrained model with linear attention, by one call, and back.

Every swapped attention module gets one submodule, `swapped`, that holds noise and statistics: checkpoint keys stay, and
these buffers are added to them. Families: Hugging Face models on the attention interface, timm's Attention,
torch.nn.MultiheadAttention (with it TransformerEncoder, and torchaudio's Conformer), self-attention of diffusers.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention.linear import LinearAttention
from crt_exp.attention.nearfar.layer import NearFar
from crt_exp.swap import diffusion, families
from crt_exp.swap import record as configured
from crt_exp.swap.measured import OPENS, Priced, Watcher, shared_out
from crt_exp.swap.refusals import SEES, places, refusal

# (heads, d, *, kv_heads, causal, cross, scaling, layer) -> module of (q, k, v, key_mask)
LayerMaker = Callable[..., nn.Module]


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
    if saved:
        source = getattr(getattr(model, "config", None), "_name_or_path", None) or ""
        folder = Path(source if isinstance(source, str) else "")
        files = sorted(folder.glob("*.safetensors")) if folder.name and folder.is_dir() else []
        restore(model, list(states.values()), files, folder)
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
        if families.family(module) == "diffusers":
            diffusion.take(module)
        del module.swapped
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


def calibrate_attention(model: nn.Module, batches: Iterable, budget: int | None = None) -> nn.Module:
    """Runs the model over batches, in eval mode and without gradient, to fill the running statistics: those that causal
    layers are fitted to, and of the queries of cross-attention. Measures each layer's error on the way, for
    `describe_attention`.

    A batch is what the model is called with: a dictionary of keyword arguments, a tuple or list of arguments, or one
    tensor; tensors are moved to the model's device. All passes count alike; earlier statistics are replaced. Layers
    that attend to their own sequence in both directions fit each by itself and change nothing.

    The error is |output - exact| / |exact| with the layer's own q, k, v and noise, over heads and queries: of the first
    4 sequences of each batch and at most 128 queries of each, 16 MB of the exact matrix at a time. Warns of layers that
    are further from exact attention than uniform attention is, the mean of the values that a query may see.

    budget: keys that all causal layers of near-far attention together let each query read, shared out where they take
    most of the error; `describe_attention` tells how many each has, and `swap_attention` takes them back as a list,
    open=[...]. Sequences should be longer than `exact_until`, below which nothing is to be seen.

    Returns the model. Raises ValueError where no layer has random features, for no batches, and for a budget that no
    layer can use or that is too small.
    """
    sharing = _sharing(model, budget)
    with ExitStack() as stack:
        for state in _states(model).values():
            stack.callback(state.register_forward_hook(Watcher(state), with_kwargs=True).remove)
        for state in sharing:
            stack.callback(state.register_forward_hook(Priced(state), with_kwargs=True).remove)
        fill_statistics(model, batches)
    for state, open in zip(sharing, shared_out([state.prices for state in sharing], budget or 0) if sharing else ()):
        state.set_open(open)
    if sharing:
        configured.write(model)
    _warn_of_errors(model)
    return model


def _sharing(model: nn.Module, budget: int | None) -> list[NearFar]:
    """The layers that share a budget of keys to open."""
    if budget is None:
        return []
    sharing = [state for state in _states(model).values() if isinstance(state, NearFar) and state.causal
             and state.sizes.open]
    if not sharing:
        raise ValueError(f"budget = {budget}: no layer of this {type(model).__name__} is causal near-far attention "
                         "that reads keys")
    if not isinstance(budget, Integral) or budget < OPENS[0] * len(sharing):
        raise ValueError(f"budget = {budget}: it takes a whole number of at least {OPENS[0] * len(sharing)}, "
                         f"{OPENS[0]} keys for each of {len(sharing)} layers")
    return sharing


@torch.no_grad()
def fill_statistics(model: nn.Module, batches: Iterable) -> None:
    """What `calibrate_attention` does, without measuring."""
    count = 0
    with eval_mode(model), ExitStack() as stack:
        for state in _states(model).values():
            stack.enter_context(state.calibration())
        for batch in batches:
            call(model, batch)
            count += 1
    if not count:
        raise ValueError("no batches to calibrate with")


def describe_attention(model: nn.Module):
    """Prints, and returns as a DataFrame, one row for each attention module: see `swap_table.COLUMNS`."""
    from crt_exp.swap.table import table

    rows = table(_modules(model), families.others(model))
    print(rows.to_string(index=False, na_rep="", float_format=lambda value: f"{value:.3g}"))
    return rows


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
                     "the attention interface, timm's Attention, torch.nn.MultiheadAttention and self-attention of "
                     f"diffusers can be{hint}")


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
    held = places(model)
    return {i: _reason(module, *held.get(id(module), (None, ""))) for i, (_, module) in enumerate(modules)}


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


def _reason(module: nn.Module, holder: nn.Module | None, attribute: str) -> str | None:
    if families.family(module) == "hf":
        return refusal(module, f"{type(holder).__name__}.{attribute}")
    return families.read_by_hand(module, holder)


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
    device = next((p.device for p in module.parameters()), None)
    return state.to(device).train(module.training)


def swap_module(module: nn.Module, maker: LayerMaker, name: str, i: int, record: dict[str, Any]) -> None:
    """One attention module by itself, as layer i of a model that is still being built."""
    state = _state(maker, name, i, f"layer {i}", module, None)
    state.record = record | {"causal": None}
    _attach(module, state)


def _attach(module: nn.Module, state: nn.Module) -> None:
    swapped = families.swapped_class(module)
    module.swapped = state
    if families.family(module) == "diffusers":
        diffusion.put(module)
    if swapped is not None and type(module) is not swapped:
        module.__dict__["unswapped_class"] = type(module)
        module.__class__ = swapped


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

    families.register()
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
    model.__dict__.setdefault("unswapped_configs", []).extend(before)
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
    unreached = [(path, module) for path, module in swapped if not module.swapped.reached]
    for _, module in unreached:
        module.swapped.__dict__["reached"] = False
    if unreached:
        warnings.warn(f"this forward pass of {type(model).__name__} did not reach {len(unreached)} of {len(swapped)} "
                      f"swapped modules: {_names(unreached)}; they may serve other inputs, or the model may compute "
                      "their attention by other means, which swapping does not change", stacklevel=3)


# ---- noise and statistics saved with a Hugging Face model

def restore(model: nn.Module, states: list[nn.Module], files: list[Path], folder: str | Path,
            strict: bool = False) -> None:
    """from_pretrained leaves the buffers of `swapped` aside, which its class does not know: takes them from the same
    files, for each layer that they hold; in their number format where that is the model's, as after model.bfloat16().
    strict: raises ValueError where a layer's buffers are not there."""
    dtype = next((p.dtype for p in model.parameters()), None)
    saved = _saved_buffers(files)
    own_paths = {state.path: _same_path(state.path, saved) for state in states}
    left = {path: buffers for path, buffers in saved.items() if path not in own_paths.values()}
    for state in states:
        own = saved[own_paths[state.path]] if own_paths[state.path] else _same_numbers(state.path, left)
        fits = own is not None and own.keys() == state.state_dict().keys()
        if strict and not fits and state.state_dict():
            raise ValueError(f"{state.path}: its noise and statistics are not in the weights of {folder}: load the "
                             "others by from_pretrained of its class, and call swap_attention for new noise")
        if fits:
            _load(state, own, folder, dtype)


def _load(state: nn.Module, own: dict[str, Tensor], folder: str | Path, dtype: torch.dtype | None) -> None:
    if any(t.dtype == dtype for t in own.values()):
        state.to(dtype)
    try:
        state.load_state_dict(own)
    except ValueError as error:
        raise ValueError(f"{state.path} in {folder}: {error}; saved=False makes new noise") from None


def _saved_buffers(files: list[Path]) -> dict[str, dict[str, Tensor]]:
    """Path of the layer -> buffers of its `swapped`, without reading other tensors."""
    from safetensors import safe_open

    saved: dict[str, dict[str, Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dictionary)
                path, _, buffer = key.partition(".swapped.")
                if buffer:
                    saved.setdefault(path, {})[buffer] = tensors.get_tensor(key)
    return saved


def _same_path(path: str, saved: Iterable[str]) -> str | None:
    """The saved path of this layer. Those in a bare model and in one with a head differ by a prefix."""
    same = lambda other: path == other or path.endswith("." + other) or other.endswith("." + path)
    return next(filter(same, saved), None)


def _same_numbers(path: str, saved: dict[str, dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """The buffers of this layer where save_pretrained gave the model the names of an older version: of the layers that
    no path given, the one with the same numbers in its path; of several the one whose path begins alike, as those of an
    encoder and a decoder do not. None where no saved layer has these numbers. ValueError: several may be its own."""
    numbers = lambda name: tuple(part for part in name.split(".") if part.isdigit())
    alike = [other for other in saved if numbers(other) == numbers(path)]
    shared = [_begin_alike(path, other) for other in alike]
    best = [other for other, count in zip(alike, shared) if count == max(shared)]
    if len(best) > 1:
        raise ValueError(f"{path}: the noise that was saved with {' and with '.join(best)} may each be its own; "
                         "saved=False makes new noise")
    return saved[best[0]] if best else None


def _begin_alike(path: str, other: str) -> int:
    """Parts that both paths begin with."""
    pairs = zip(path.split("."), other.split("."))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- calibration

def swapped_states(model: nn.Module) -> list[nn.Module]:
    """The attention that was swapped in, layer by layer."""
    return [part.swapped for part in model.modules() if "swapped" in part._modules]


def learns(model: nn.Module) -> bool:
    """Whether attention that was swapped in is fitted to what earlier calls saw."""
    return any(getattr(state, "learns", False) for state in swapped_states(model))


@contextmanager
def eval_mode(model: nn.Module):
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _states(model: nn.Module) -> dict[str, LinearAttention]:
    """The layers that a calibration concerns, by path."""
    states = {path.removesuffix(".swapped"): part for path, part in model.named_modules()
              if isinstance(part, LinearAttention)}
    if not states:
        names = dict.fromkeys(part.swapped.mechanism for part in model.modules() if "swapped" in part._modules)
        reason = f"{', '.join(names)} attention keeps no statistics" if names else "call swap_attention first"
        raise ValueError(f"this {type(model).__name__} has no random-feature attention to calibrate, nor near-far "
                         f"attention: {reason}")
    return states


def _warn_of_errors(model: nn.Module) -> None:
    states = _states(model)
    worse = [f"{path} ({state.measured.relative_error:.3g}, uniform {state.measured.relative_uniform:.3g})"
             for path, state in states.items() if state.measured.error > state.measured.uniform]
    if worse:
        shown = ", ".join(worse[:3]) + (f" and {len(worse) - 3} more" if len(worse) > 3 else "")
        warnings.warn(f"in {len(worse)} of {len(states)} layers the output of linear attention is further from "
                      f"exact attention than the mean of the values is (uniform attention): {shown}. Take more "
                      "features (m), another mechanism, or leave these layers as they are with layers=[...]",
                      stacklevel=3)


def call(model: nn.Module, batch):
    """The model's output for a batch, as `calibrate_attention` takes it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    move = lambda t: t.to(device) if isinstance(t, Tensor) else t
    if hasattr(batch, "keys"):
        return model(**{key: move(batch[key]) for key in batch.keys()})  # noqa: SIM118 (tokenizers' own mappings)
    if isinstance(batch, (tuple, list)):
        return model(*map(move, batch))
    return model(move(batch))
