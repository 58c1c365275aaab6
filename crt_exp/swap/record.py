"""What a swap writes into a model's configuration, so that a saved model says which attention it was saved with.

`config.crt_exp` is a dictionary of plain values: `version`; `mechanisms`, each as `Mechanism.saved` gives it, with
`causal` as the swap was given it; `layers`, the path of every attention module -> the number of its mechanism, null for
one that kept its own; `open`, the keys that layers of causal near-far attention read. save_pretrained of transformers
and of diffusers stores it. It is written again after each swap, calibration and unswap, and goes with the last swap.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import nn

from crt_exp import __version__

KEY = "crt_exp"
LIBRARIES = ("crt_exp", "transformers")
BUFFERS = ".swapped."                      # within the names of the tensors that a swap adds
_BY_HAND = ContextVar("by_hand", default=False)


def write(model: nn.Module) -> None:
    """Brings the configuration of each outermost model with one up to date."""
    for holder in holders(model):
        swapped = any(BUFFERS[1:-1] in part._modules for part in holder.modules())
        set_record(holder, record_of(holder) if swapped else None)


def record_of(model: nn.Module) -> dict[str, Any]:
    mechanisms, layers, opens = [], {}, {}
    for path, module in _attention(model):
        state = module._modules.get("swapped")
        if state is None:
            layers[path] = None
            continue
        if state.record not in mechanisms:
            mechanisms.append(state.record)
        layers[path] = mechanisms.index(state.record)
        if getattr(state, "causal", False) and getattr(getattr(state, "sizes", None), "open", 0):
            opens[path] = state.sizes.open
    return {"version": __version__, "mechanisms": mechanisms, "layers": layers, "open": opens}


def _attention(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from crt_exp.swap.families import family

    return [(path, module) for path, module in model.named_modules() if family(module)]


def holders(model: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers or diffusers: the model itself, or those that a wrapper holds."""
    if _keeps_configuration(model):
        return [model]
    return [holder for child in model.children() for holder in holders(child)]


def _keeps_configuration(model: nn.Module) -> bool:
    return hasattr(type(model), "save_pretrained") and getattr(model, "config", None) is not None and any(
        kind.__name__ in ("PreTrainedModel", "ConfigMixin") for kind in type(model).__mro__)


def set_record(holder: nn.Module, record: dict[str, Any] | None) -> None:
    """None removes it."""
    if hasattr(holder, "register_to_config"):  # a frozen dictionary of diffusers
        if record is None and KEY in holder.config:
            kept = {key: value for key, value in holder.config.items() if key != KEY}
            holder._internal_dict = type(holder.config)(kept)
        elif record is not None:
            holder.register_to_config(**{KEY: record})
    elif record is None:
        vars(holder.config).pop(KEY, None)
    else:
        setattr(holder.config, KEY, record)


def get_record(holder: nn.Module) -> dict[str, Any] | None:
    config = holder.config
    return config.get(KEY) if hasattr(holder, "register_to_config") else getattr(config, KEY, None)


def taken(holder: nn.Module) -> dict[str, Any] | None:
    """The record, which the configuration then has no more: the model as it was loaded is not swapped."""
    record = get_record(holder)
    set_record(holder, None)
    return record


def names(record: dict[str, Any]) -> list[str]:
    return [str(each.get("name")) for each in record.get("mechanisms", ())]


# ---- loading

@contextmanager
def by_hand() -> Iterator[None]:
    """Within it the caller answers for the swap that a folder holds: `from_pretrained` says nothing and swaps nothing.
    """
    before = _BY_HAND.set(True)
    try:
        yield
    finally:
        _BY_HAND.reset(before)


def is_by_hand() -> bool:
    return _BY_HAND.get()


@contextmanager
def ignoring_buffers(kind: type, wanted: bool = True) -> Iterator[None]:
    """Within it loading does not list the buffers of a swap as weights that it does not know."""
    if not wanted:
        yield
        return
    before, own = kind._keys_to_ignore_on_load_unexpected, "_keys_to_ignore_on_load_unexpected" in vars(kind)
    kind._keys_to_ignore_on_load_unexpected = [*(before or ()), r"\.swapped\."]
    try:
        yield
    finally:
        if own:
            kind._keys_to_ignore_on_load_unexpected = before
        else:
            del kind._keys_to_ignore_on_load_unexpected


def warn_of_loss(model: nn.Module, source: Any) -> None:
    """Says by name that a folder holds a swapped model, which this one is not."""
    record = taken(model)
    if record is None and not _holds_buffers(source):
        return
    content = "a model with swapped attention"
    if record and names(record):
        swapped = sum(number is not None for number in record.get("layers", {}).values())
        content += f", {' and '.join(names(record))} in {swapped} of {len(record.get('layers', {}))} layers"
    kind = type(model).__name__
    warnings.warn(f"{source} holds {content}, and this {kind} has exact attention with its weights: "
                  f"crt_exp.from_pretrained({kind}, {str(source)!r}) gives it back as it was saved",
                  stacklevel=_caller())


def _caller() -> int:
    """The stacklevel, in the function that asks, of the first frame outside transformers and this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _holds_buffers(source: Any) -> bool:
    from safetensors import safe_open

    folder = Path(str(source))
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            if any(BUFFERS in name for name in tensors.keys()):  # noqa: SIM118 (not a dictionary)
                return True
    return False
