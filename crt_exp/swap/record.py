"""What a swap writes into a model's configuration, so that a saved model says which attention it was saved with.

`config.crt_exp` is a dictionary of plain values: `version`; `mechanisms`, each as `Mechanism.saved` gives it, with
`causal` as the swap was given it; `layers`, the path of every attention module -> the number of its mechanism, null for
one that kept its own. save_pretrained of transformers and of diffusers stores it. It is written again after each swap
and unswap, and goes with the last swap.
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
from crt_exp.config import ConfigError
from crt_exp.hints import Whole, fits, shown
from crt_exp.stored import check_depth

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
    mechanisms, layers = [], {}
    for path, module in _attention(model):
        state = module._modules.get("swapped")
        if state is None:
            layers[path] = None
            continue
        if state.record not in mechanisms:
            mechanisms.append(state.record)
        layers[path] = mechanisms.index(state.record)
    return {"version": __version__, "mechanisms": mechanisms, "layers": layers}


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


def checked(record: Any, source: Any) -> dict[str, Any]:
    """The record that a file holds, in the form that `record_of` gives it. Raises ConfigError, naming `source`, for any
    other: nothing is taken from it before. Mechanisms are read by `Mechanism.of_saved`."""
    try:
        check_form(record)
    except ConfigError as error:
        raise ConfigError(f"{source}: {KEY} in its config.json is not what swap_attention writes: {error}. Load the "
                          "weights by from_pretrained and call swap_attention") from None
    return record


def check_form(record: Any) -> None:
    check_depth(record, KEY)
    if not isinstance(record, dict):
        raise ConfigError(f"{KEY} = {shown(record)}")
    mechanisms, layers = (record.get(key) for key in ("mechanisms", "layers"))
    if not isinstance(mechanisms, (list, tuple)) or not isinstance(layers, dict):
        raise ConfigError("it has no mechanisms and layers")
    if not all(isinstance(each, dict) for each in mechanisms):
        raise ConfigError("its mechanisms are no keys with values")
    for path, number in layers.items():
        if number is not None and not (fits(number, Whole) and number < len(mechanisms)):
            raise ConfigError(f"layers.{path} = {shown(number)}, which takes null or the number of one of its "
                              f"{len(mechanisms)} mechanisms, counted from 0")
    if all(number is None for number in layers.values()):
        raise ConfigError("none of its layers is swapped")


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
    if record is not None:
        try:
            swapped = [number is not None for number in checked(record, source)["layers"].values()]
            content += f", {' and '.join(names(record))} in {sum(swapped)} of {len(swapped)} layers"
        except ConfigError:
            content += f", and a {KEY} in its config.json that is not what swap_attention writes"
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
