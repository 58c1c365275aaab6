"""What a swap writes into a model's configuration, so that a saved model says which attention it was saved with.

`config.crt_exp` is a dictionary of plain values: `version`; `mechanisms`, each as `Mechanism.saved` gives it, with
`causal` as the swap was given it; `layers`, the path of every attention module -> the number of its mechanism, null for
one that kept its own. save_pretrained of transformers stores it. It is written again after each swap and unswap, and
goes with the last swap.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from crt_exp import __version__
from crt_exp.config import ConfigError
from crt_exp.options import Whole, check

KEY = "crt_exp"


def write(model: nn.Module) -> None:
    """Brings the configuration of each outermost model with one up to date."""
    for holder in holders(model):
        if any("swapped" in part._modules for part in holder.modules()):
            setattr(holder.config, KEY, record_of(holder))
        else:
            taken(holder)


def record_of(model: nn.Module) -> dict[str, Any]:
    from crt_exp.swap.families import family

    mechanisms, layers = [], {}
    for path, module in ((path, module) for path, module in model.named_modules() if family(module)):
        state = module._modules.get("swapped")
        if state is None:
            layers[path] = None
            continue
        if state.record not in mechanisms:
            mechanisms.append(state.record)
        layers[path] = mechanisms.index(state.record)
    return {"version": __version__, "mechanisms": mechanisms, "layers": layers}


def holders(model: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers: the model itself, or those that a wrapper holds."""
    bases = {kind.__name__ for kind in type(model).__mro__}
    if "PreTrainedModel" in bases and getattr(model, "config", None) is not None:
        return [model]
    return [holder for child in model.children() for holder in holders(child)]


def taken(holder: nn.Module) -> dict[str, Any] | None:
    """The record, which the configuration then has no more: the model as it was loaded is not swapped."""
    return vars(holder.config).pop(KEY, None)


def checked(record: Any, source: Any) -> dict[str, Any]:
    """The record that a file holds, in the form that `record_of` gives it. Raises ConfigError, naming `source`, for any
    other: nothing is taken from it before. Mechanisms are read by `Mechanism.of_saved`."""
    try:
        check_form(record)
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{source}: {KEY} in its config.json is not what swap_attention writes: {error}. Load the "
                          "weights by from_pretrained and call swap_attention") from None
    return record


def check_form(record: Any) -> None:
    check(KEY, record, dict)
    mechanisms, layers = (record.get(key) for key in ("mechanisms", "layers"))
    check("mechanisms", mechanisms, Sequence[dict])
    check("layers", layers, dict)
    for path, number in layers.items():
        check(f"layers.{path}", number, Annotated[Whole, Field(lt=len(mechanisms))] | None)
    if all(number is None for number in layers.values()):
        raise ConfigError("none of its layers is swapped")


@contextmanager
def ignoring_buffers(kind: type) -> Iterator[None]:
    """Within it loading does not list the buffers of a swap as weights that it does not know."""
    own = "_keys_to_ignore_on_load_unexpected" in vars(kind)
    before = getattr(kind, "_keys_to_ignore_on_load_unexpected", None)
    kind._keys_to_ignore_on_load_unexpected = [*(before or ()), r"\.swapped\."]
    try:
        yield
    finally:
        if own:
            kind._keys_to_ignore_on_load_unexpected = before
        else:
            del kind._keys_to_ignore_on_load_unexpected
