"""Load a saved swapped model: the reverse of save_pretrained."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.swap import saved
from crt_exp.swap.families import attention_modules
from crt_exp.swap.swap import swap_layers

FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
ANEW = "load the weights by from_pretrained of their class, then call swap_attention"


@torch.inference_mode(False)   # tensors of inference mode could not be trained later
def from_pretrained(auto: type, folder: str | Path, **options: Any) -> nn.Module:
    """The model that save_pretrained wrote to a folder (or to a repository of the hub) after `swap_attention`, with the
    same attention in the same layers, bit for bit: noise and statistics are those of its weights.

    auto: the class to load, such as AutoModelForCausalLM. options: what its from_pretrained takes. The noise has the
    number format of the saved weights where that is the model's. A fetched model, such as "models/smollm2-135m", comes
    as it was published.

    Raises ConfigError, which is a ValueError, where the folder holds no swapped model, where its mechanism was built of
    objects, where a layer has no entry or its noise is missing. Nothing of the folder is executed: a model whose class
    is code that lies there is refused, unless `trust_remote_code=True` says that it was read.
    """
    if (published := saved.fetched(folder)) is not None:
        return auto.from_pretrained(published, **options)
    safely = {"trust_remote_code": False} if hasattr(auto, "_model_mapping") else {}  # without a question
    with saved.ignoring_buffers():
        model = auto.from_pretrained(folder, **(safely | options))
    if (record := saved.take_record(model)) is None:
        raise ConfigError(f"{folder}: its config.json has no {saved.KEY}, so it holds no swapped model: {ANEW}")
    files = saved.weight_files(folder, **{key: options[key] for key in FETCHING if key in options})
    return _swapped(model, saved.check_record(record, folder), files, folder)


def _swapped(model: nn.Module, record: dict[str, Any], files: list[Path], folder: str | Path) -> nn.Module:
    """Swaps the attention of a model, which has its own, as the record says."""
    if record.get("open"):
        raise ConfigError(f"{folder}: its record is one of an earlier crt_exp, {record.get('version')}: {ANEW}")
    if objects := [each.get("name") for each in record["mechanisms"] if not each.get("rebuilds", True)]:
        raise ConfigError(f"{folder}: {objects[0]} was built of objects, which no folder holds: {ANEW}")
    mechanisms = [Mechanism.of_saved(each, str(folder)) for each in record["mechanisms"]]
    numbers = [_number(path, record["layers"], folder) for path, _ in attention_modules(model)]
    for number, (mechanism, each) in enumerate(zip(mechanisms, record["mechanisms"])):
        if layers := [i for i, other in enumerate(numbers) if other == number]:
            swap_layers(model, mechanism.layer, mechanism.name, layers, causal=each.get("causal"), saved=False,
                        record=each)
    states = [module.swapped for module in model.modules() if "swapped" in module._modules]
    saved.restore(model, states, files, folder, strict=True)
    saved.write_record(model)
    return model


def _number(path: str, layers: dict[str, int | None], folder: str | Path) -> int | None:
    """The number of the mechanism of an attention module."""
    same = [other for other in layers if saved.same_path(path, other)]
    if not same:
        raise ConfigError(f"{folder}: {saved.KEY} in its config.json names no attention of {path}: {ANEW}")
    return layers[max(same, key=len)]
