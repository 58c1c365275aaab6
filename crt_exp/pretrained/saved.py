"""A saved model whose attention was swapped, as it was: the reverse of save_pretrained after `swap_attention`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.models.folder import verify
from crt_exp.pretrained.published import fetched
from crt_exp.stored import json_object
from crt_exp.swap import families, record
from crt_exp.swap.buffers import largest_dimension, restore
from crt_exp.swap.swap import swap_layers
from crt_exp.swap.weights import CHOOSING, note_choice, weights_of

FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision", *CHOOSING)


@torch.inference_mode(False)   # tensors of inference mode could not be trained later
def from_pretrained(auto: type, folder: str | Path, **options: Any) -> nn.Module:
    """The model that save_pretrained wrote to a folder (or to a repository of the hub) after `swap_attention`, with the
    same attention in the same layers, bit for bit: noise and statistics are those of its weights.

    auto: the class to load, such as AutoModelForCausalLM. options: what its from_pretrained takes. The noise has the
    number format of the saved weights where that is the model's. A fetched model, such as "models/smollm2-135m", comes
    as it was published.

    Raises ValueError where the folder holds no swapped model, where it was saved with a mechanism that its names do not
    rebuild, where a layer has no entry or its noise is missing. Nothing of the folder is executed: a model whose class
    is code that lies there is refused, unless `trust_remote_code=True` says that it was read.
    """
    if options.get("output_loading_info"):
        raise ValueError("output_loading_info: crt_exp.from_pretrained returns the model alone")
    if not hasattr(auto, "from_pretrained"):
        raise ValueError(f"auto = {auto!r}: give a class with from_pretrained, such as AutoModelForCausalLM")
    published = fetched(folder)
    if published is not None:
        verify(published, str(folder))
        return auto.from_pretrained(published, **options)
    config = Path(folder) / (options.get("subfolder") or "") / "config.json"
    if config.is_file():    # before other code reads it
        json_object(config)
    model = _loaded(auto, folder, options)
    saved = record.taken(model)
    if saved is None:
        raise ValueError(f"{folder}: its config.json has no {record.KEY}, so it holds no swapped model: load it by "
                         f"{getattr(auto, '__name__', auto)}.from_pretrained, then call swap_attention")
    note_choice(model, options)
    return _bring_back(model, saved, folder, {key: options[key] for key in FETCHING if key in options})


def _loaded(auto: type, folder: str | Path, options: dict[str, Any]) -> nn.Module:
    """The model with its own attention; where the class is to be found, without asking whether code may be run."""
    finds = hasattr(auto, "_model_mapping")
    safely = {"trust_remote_code": False} if finds else {}
    try:
        with record.ignoring_buffers(_found(auto, folder, safely | options) if finds else auto):
            return auto.from_pretrained(folder, **(safely | options))
    except RecursionError:
        raise ConfigError(f"{folder}, config.json: nested too deeply") from None
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(f"{folder}: its config.json asks for code that lies there (auto_map), which is not run: give "
                          f"the model's own class in place of {auto.__name__}, or, once you have read that code, "
                          "trust_remote_code=True") from None


def _found(auto: type, folder: str | Path, options: dict[str, Any]) -> type:
    """The class that one such as AutoModelForCausalLM finds for this folder."""
    from transformers import AutoConfig, PreTrainedModel

    wanted = {key: options[key] for key in ("trust_remote_code", *FETCHING) if key in options}
    config = options.get("config") or AutoConfig.from_pretrained(folder, **wanted)
    kind = auto._model_mapping.get(type(config), PreTrainedModel)
    return kind[0] if isinstance(kind, tuple) else kind


def _bring_back(model: nn.Module, saved: dict[str, Any], folder: str | Path, fetching: dict[str, Any]) -> nn.Module:
    """Swaps the attention of a model, which has its own, as `saved` says. fetching: where its weights come from."""
    mechanisms = [_mechanism(each, folder) for each in record.checked(saved, folder)["mechanisms"]]
    files = weights_of(folder, **fetching)
    _check_rows(mechanisms, files, folder)
    chosen = _chosen(model, saved, folder)
    for number, mechanism in enumerate(mechanisms):
        layers = [i for i, other in enumerate(chosen.values()) if other == number]
        if layers:
            causal = saved["mechanisms"][number].get("causal")
            swap_layers(model, mechanism.layer, mechanism.name, layers, causal=causal, saved=False,
                        record=saved["mechanisms"][number])
    states = [module.swapped for _, module in model.named_modules() if "swapped" in module._modules]
    _check_open(states, saved, folder)
    restore(model, states, files, folder, strict=True)
    record.write(model)
    return model


def _check_open(states: list[nn.Module], saved: dict[str, Any], folder: str | Path) -> None:
    """Raises ConfigError where an earlier version saved another number of retrieved keys for a layer than its mechanism
    has, from a budget that all layers shared."""
    own = {state.path: state.sizes.open for state in states if hasattr(state, "sizes")}
    if any(open != own.get(path, open) for path, open in (saved.get("open") or {}).items()):
        raise ConfigError(f"{folder}: crt_exp {saved.get('version')} saved it with a budget of retrieved keys, which "
                          "was removed: load the weights by from_pretrained of its class, then call swap_attention "
                          "with open=N")


def _check_rows(mechanisms: Iterable[Mechanism], files: list[Path], folder: str | Path) -> None:
    """Raises ConfigError for more projections than the weights have rows of noise for, before any is drawn."""
    most = largest_dimension(files)
    for mechanism in mechanisms:
        if mechanism.m and not most:
            raise ConfigError(f"{mechanism.name}: its noise and statistics are not in the weights of {folder}: load "
                              "the others by from_pretrained of its class, and call swap_attention for new noise")
        if (mechanism.m or 0) > most:
            raise ConfigError(f"{folder}: {record.KEY} in its config.json asks for m = {mechanism.m}, and its weights "
                              f"hold noise of at most {most} rows")


def _mechanism(saved: dict[str, Any], folder: str | Path) -> Mechanism:
    if not saved.get("rebuilds", True):
        raise ConfigError(f"{folder} was saved with attention {saved.get('name')} that was built of objects, which are "
                          "not stored: load the weights by from_pretrained and call swap_attention with the same "
                          "objects; it takes the noise from the folder")
    return Mechanism.of_saved(saved, str(folder))


def _chosen(model: nn.Module, saved: dict[str, Any], folder: str | Path) -> dict[str, int | None]:
    """Path of each attention module -> the number of its mechanism."""
    layers, chosen = saved["layers"], {}
    for path, _ in ((path, part) for path, part in model.named_modules() if families.family(part)):
        same = [other for other in layers if path == other or path.endswith(f".{other}") or other.endswith(f".{path}")]
        if not same:
            raise ConfigError(f"{folder}: {record.KEY} in its config.json does not say which attention {path} has; it "
                              f"names {', '.join(list(layers)[:3])}: it is of another model, or another version of it")
        chosen[path] = layers[max(same, key=len)]
    return chosen


