"""A saved model whose attention was swapped, as it was: the reverse of save_pretrained after `swap_attention`."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.swap import families, record
from crt_exp.swap.buffers import restore
from crt_exp.swap.swap import swap_layers

WEIGHTS = "model.safetensors", "diffusion_pytorch_model.safetensors"
FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")  # of cached_file


def from_pretrained(auto: type, folder: str | Path, **options: Any) -> nn.Module:
    """The model that save_pretrained wrote to a folder (or to a repository of the hub) after `swap_attention`, with the
    same attention in the same layers, bit for bit: noise, statistics and codebooks are those of its weights.

    auto: the class to load, such as AutoModelForCausalLM, or a model of diffusers. options: what its from_pretrained
    takes. The noise has the number format of the saved weights where that is the model's.

    Raises ValueError where the folder holds no swapped model, where it was saved with a mechanism that its names do not
    rebuild, where a layer has no entry or its noise is missing. Nothing of the folder is executed.
    """
    if options.get("output_loading_info"):
        raise ValueError("output_loading_info: crt_exp.from_pretrained returns the model alone")
    if not hasattr(auto, "from_pretrained"):
        raise ValueError(f"auto = {auto!r}: give a class with from_pretrained, such as AutoModelForCausalLM")
    with record.by_hand(), record.ignoring_buffers(auto, hasattr(auto, "_keys_to_ignore_on_load_unexpected")):
        model = auto.from_pretrained(folder, **options)
    saved = record.taken(model) or _record_in(folder)
    if saved is None:
        raise ValueError(f"{folder}: its config.json has no {record.KEY}, so it holds no swapped model: load it by "
                         f"{getattr(auto, '__name__', auto)}.from_pretrained, then call swap_attention")
    return bring_back(model, saved, folder, **{key: options[key] for key in FETCHING if key in options})


def bring_back(model: nn.Module, saved: dict[str, Any], folder: str | Path, **fetching: Any) -> nn.Module:
    """Swaps the attention of a model, which has its own, as `saved` says."""
    mechanisms = [_mechanism(each, folder) for each in _listed(saved, folder)]
    chosen = _chosen(model, saved, folder)
    for number, mechanism in enumerate(mechanisms):
        layers = [i for i, other in enumerate(chosen.values()) if other == number]
        if layers:
            causal = saved["mechanisms"][number].get("causal")
            swap_layers(model, mechanism.layer, mechanism.name, layers, causal=causal, saved=False,
                        record=saved["mechanisms"][number])
    states = [module.swapped for _, module in model.named_modules() if "swapped" in module._modules]
    restore(model, states, weights_of(folder, **fetching), folder, strict=True)
    for state in states:
        _reopen(state, saved.get("open") or {})
    record.write(model)
    return model


def _listed(saved: Any, folder: str | Path) -> list[dict[str, Any]]:
    listed = saved.get("mechanisms") if isinstance(saved, dict) else None
    if not isinstance(listed, list) or not isinstance(saved.get("layers"), dict):
        raise ConfigError(f"{folder}: {record.KEY} in its config.json is not what swap_attention writes: it has no "
                          "mechanisms and layers. Load the weights by from_pretrained and call swap_attention")
    return listed


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


def _reopen(state: nn.Module, opens: dict[str, int]) -> None:
    same = [open for path, open in opens.items()
            if state.path == path or state.path.endswith(f".{path}") or path.endswith(f".{state.path}")]
    if same and state.sizes.open != same[0]:
        state.set_open(same[0])


def _record_in(folder: str | Path) -> dict[str, Any] | None:
    """Of a configuration that drops keys which its class does not know, as those of diffusers do."""
    file = Path(folder) / "config.json"
    return json.loads(file.read_text()).get(record.KEY) if file.is_file() else None


def weights_of(source: str | Path, **fetching: Any) -> list[Path]:
    """The files of weights of a folder, or of the hub's copy on this machine."""
    folder = Path(source) / (fetching.get("subfolder") or "")
    if folder.is_dir():
        return sorted(folder.glob("*.safetensors"))
    from transformers.utils import cached_file

    fetch = partial(cached_file, str(source), _raise_exceptions_for_missing_entries=False, **fetching)
    index = fetch(f"{WEIGHTS[0]}.index.json")
    shards: Iterable[str] = WEIGHTS[:1]
    if index is not None:
        shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [Path(file) for name in shards if (file := fetch(name)) is not None]
