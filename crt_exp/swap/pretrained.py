"""Load a saved swapped model: the inverse of save_pretrained."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, fetched
from crt_exp.swap import saved
from crt_exp.swap.calibration import swapped_states
from crt_exp.swap.families import attention_modules
from crt_exp.swap.swap import swap_layers, take_record, write_record

FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
ANEW = "load the weights with from_pretrained of their class, then call swap_attention"


@torch.inference_mode(False)  # tensors created in inference mode cannot be trained
def from_pretrained(auto: Any, folder: str | Path, **options: Any) -> nn.Module:
    """Load a swapped model that save_pretrained wrote to a folder or a hub repository, or the model of a run.

    The model has the same attention in the same layers, exactly: projections and statistics come from the saved
    weights. The projections take the dtype of the model if they were saved in it. The model of a run has the attention
    of its training, which may be exact. A model of the `fetch` command, such
    as "models/smollm2-135m", is loaded as the pretrained checkpoint, with its own attention. No code from the folder
    runs, unless `trust_remote_code=True`.

    Args:
        auto: the class to load, such as AutoModelForCausalLM.
        folder: the folder, the name of a hub repository, or the directory of a run, such as outputs/mine.
        options: further arguments of auto.from_pretrained.

    Raises:
        ConfigError: a ValueError. The folder holds no swapped model, its mechanism was built from objects, or a layer
            has no entry.
        ValueError: the projections of a layer are missing.

    >>> from tempfile import TemporaryDirectory
    >>> from crt_exp import describe_attention
    >>> from transformers import AutoModel, BertConfig, BertModel
    >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = BertModel(BertConfig(vocab_size=10, hidden_size=8, **sizes))
    >>> with TemporaryDirectory() as folder:
    ...     Mechanism.of("favorpp", m=16).swap(model).save_pretrained(folder)
    ...     loaded = from_pretrained(AutoModel, folder)
    >>> describe_attention(loaded)["mechanism"].tolist()
    ['favorpp']
    """
    published = fetched(folder)
    if published is not None:
        return auto.from_pretrained(published, **options)
    run_model = Path(folder, "model")
    is_run = (run_model / "config.json").is_file() and not Path(folder, "config.json").is_file()
    if is_run:
        folder = run_model
    # refuse remote code without asking
    safely = {"trust_remote_code": False} if hasattr(auto, "_model_mapping") else {}
    # the layers that are not swapped have the default implementation, not the saved name
    unnamed = {saved.IMPLEMENTATION: None}
    with saved.ignoring_buffers():
        model = auto.from_pretrained(folder, **(unnamed | safely | options))
    record = take_record(model)
    if record is None and is_run:
        return model
    if record is None:
        raise ConfigError(
            f"{folder}: no swapped model ({saved.KEY} is missing in config.json); {ANEW}"
        )
    files = saved.weight_files(folder, **{key: options[key] for key in FETCHING if key in options})
    return _swapped(model, saved.check_record(record, folder), files, folder)


def _swapped(
    model: nn.Module, record: dict[str, Any], files: list[Path], folder: str | Path
) -> nn.Module:
    """Swap the attention of an unswapped model as its record states."""
    if record.get("open"):
        raise ConfigError(
            f"{folder}: saved by crt_exp {record.get('version')}, unsupported; {ANEW}"
        )
    mechanisms = []
    for saved_mechanism in record["mechanisms"]:
        if not saved_mechanism.get("rebuilds", True):
            raise ConfigError(
                f"{folder}: attention {saved_mechanism.get('name')} was built from Python objects, not "
                f"restorable; {ANEW}"
            )
        mechanisms.append(Mechanism.from_saved(saved_mechanism, str(folder)))
    numbers = [_number(path, record["layers"], folder) for path, _ in attention_modules(model)]
    for number, mechanism in enumerate(mechanisms):
        layers = [i for i, other in enumerate(numbers) if other == number]
        if layers:
            options = record["mechanisms"][number]
            causal = options.get("causal")
            swap_layers(
                model,
                mechanism.layer,
                mechanism.name,
                layers,
                causal=causal,
                saved=False,
                record=options,
            )
    saved.restore(model, swapped_states(model), files, folder, strict=True)
    write_record(model)
    return model


def _number(path: str, layers: dict[str, int | None], folder: str | Path) -> int | None:
    """The index of the mechanism of an attention module; None if unswapped."""
    same = [other for other in layers if saved.same_path(path, other)]
    if not same:
        raise ConfigError(f"{folder}: {saved.KEY} in config.json has no entry for {path}; {ANEW}")
    return layers[max(same, key=len)]
