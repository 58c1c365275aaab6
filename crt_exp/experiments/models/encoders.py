"""Encoders of transformers: loading, swapping, and saving in a run's folder.

`crt_exp.from_pretrained` loads the folder `<run>/model`: config.json, model.safetensors, tokenizer. `crt_exp` in its
config.json records the attention of training, and the weights include its random projections.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.sources import from_hub, reason_of
from crt_exp.experiments.models import folder
from crt_exp.experiments.models.folder import Tensors, whole_folder
from crt_exp.mechanism import Mechanism
from crt_exp.optional import explain
from crt_exp.registry import ConfigError, differences, fetched
from crt_exp.swap.saved import IMPLEMENTATION, KEY, check_record
from crt_exp.swap.swap import take_record
from crt_exp.validation import did_you_mean

EXACT = {"attention": "exact"}  # `Mechanism.describe` of exact attention, without nulls
WANTED = "a folder with config.json and model.safetensors, the directory of a run of task=mlm, or a name of the hub"


class Origin(NamedTuple):
    """The source of a model: a folder or a hub name, and what is loaded from it.

    `option` is the configuration key that named the source.
    """

    name: str
    option: str
    weights: bool
    noise: bool  # load the random projections of the attention that the weights were trained with


NEW = Origin("", "task.model", weights=False, noise=False)  # a new model


def origin_of(model: str | None, init: str) -> Origin:
    """Resolve task.model and task.init. Raises DataError for an unknown `init`."""
    if model is None and init == "scratch":
        return NEW
    if model is None and init == "uptrain":
        raise ConfigError("task.init=uptrain: expected a pretrained model; set task.model=...")
    if init in ("scratch", "uptrain"):
        return Origin(folder_of(model, "task.model"), "task.model", init == "uptrain", False)
    if not Path(init).expanduser().is_dir():
        near = did_you_mean(init, ("scratch", "uptrain"))
        raise DataError(
            f"task.init={init}: expected scratch, uptrain, or the directory of a run of task=mlm{near}"
        )
    return Origin(folder_of(init, "task.init"), "task.init", True, True)


def folder_of(name: str, option: str) -> str:
    """The folder with config.json: `name` itself, a run's model, or a fetched model.

    Names of the hub are returned unchanged. Raises DataError.
    """
    path = fetched(name, option) or Path(name).expanduser()
    if not path.exists() and not name.startswith((".", "/", "~")) and name.count("/") <= 1:
        return name
    return str(folder.folder_of(path, option, WANTED))


def load_tokenizer(origin: Origin):
    """Load the tokenizer. Raises DataError if there is none."""
    from transformers import AutoTokenizer

    tokenizer = load_or_explain(
        lambda: AutoTokenizer.from_pretrained(origin.name, trust_remote_code=False),
        origin,
        "tokenizer",
    )
    # transformers returns an empty tokenizer for a folder without tokenizer files
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise DataError(
            f"{origin.option}={origin.name}: no tokenizer; expected tokenizer.json or vocab.txt"
        )
    return tokenizer


def check_vocabulary(tokenizer, vocab_size: int, pad_token_id: int | None = None) -> None:
    """Raise DataError if the tokenizer does not fit the model.

    The tokenizer's ids must have embeddings, and its padding id must be the model's. vocab_size, pad_token_id: those of
    the model's configuration. A model may have unused entries at the end.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    problem = ""
    if largest >= vocab_size:
        problem = f"the tokenizer's ids go up to {largest} ({token!r}), the model's vocabulary ends at {vocab_size - 1}"
    elif pad_token_id is not None and tokenizer.pad_token_id != pad_token_id:
        problem = (
            f"the tokenizer pads with id {tokenizer.pad_token_id}, the model with id {pad_token_id}"
        )
    if problem:
        raise DataError(
            f"tokenizer: does not fit the model: {problem}; use the tokenizer of the model's training"
        )


def load_config(origin: Origin, **changes: Any):
    """Load the model's configuration with changed keys. Raises DataError."""
    from transformers import AutoConfig

    unnamed = {IMPLEMENTATION: None}  # a swapped model names an attention of its own
    return load_or_explain(
        lambda: AutoConfig.from_pretrained(
            origin.name, trust_remote_code=False, **(unnamed | changes)
        ),
        origin,
        "configuration",
    )


def attention_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The options in which two `Mechanism.describe` results differ, each with both values."""
    changes = []
    for key, change in differences(old, new).items():
        changes.append(f"features.{change}" if key == "m" else change.replace("._target_", ""))
    return ", ".join(changes)


def load_model(kind: str, config, origin: Origin, mechanism: Mechanism) -> nn.Module:
    """Build a model of class `kind` in float32 with the attention of `mechanism`.

    `kind` is a name such as AutoModelForMaskedLM. Raises DataError for missing weights. Raises ConfigError if random
    projections of another attention would have to be loaded.
    """
    import transformers

    auto = getattr(transformers, kind)
    if origin.noise:
        changed = attention_changes(saved_attention(config), mechanism.describe())
        if changed:
            raise ConfigError(
                f"{origin.option}={origin.name}: trained with another attention "
                f"({changed}); "
                f"use that attention, or task.init=uptrain task.model={origin.name}"
            )
    if origin.weights:
        model, info = load_or_explain(
            lambda: auto.from_pretrained(
                origin.name,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
            ),
            origin,
            "weights",
        )  # a head for other classes has other shapes
        check_complete(model, info, origin)
        model.__dict__["made_anew"] = sorted(info["missing_keys"])
    else:
        model = auto.from_config(config).float()
    take_record(model)  # the record of the attention that the weights were saved with
    return model if mechanism.is_exact else mechanism.swap(model, saved=origin.noise)


def saved_attention(config) -> dict[str, Any]:
    """`Mechanism.describe` of the attention that the weights were saved with."""
    if (saved := getattr(config, KEY, None)) is None:
        return EXACT
    return check_record(saved, config.name_or_path)["mechanisms"][0].get("described", {})


def check_exact(named: str, described: dict[str, Any]) -> None:
    """Raise ConfigError for weights that were saved with other than exact attention."""
    if changed := attention_changes(described, EXACT):
        raise ConfigError(f"{named}: expected exact attention; different keys: {changed}")


def check_complete(model: nn.Module, info: dict, origin: Origin) -> None:
    """Raise DataError for encoder weights that are missing or of another shape.

    Weights of heads may be new.
    """
    prefix = ""  # a model without a head has no prefix
    if hasattr(model, model.base_model_prefix):
        prefix = f"{model.base_model_prefix}."
    names = set(info["missing_keys"])
    names.update(name for name, *_ in info["mismatched_keys"])
    wrong = []
    for name in sorted(names):
        if name.startswith(prefix) and not name.startswith(f"{prefix}pooler."):
            wrong.append(name)
    if wrong:
        raise DataError(
            f"{origin.option}={origin.name}: wrong weights for {type(model).__name__}: "
            f"{', '.join(wrong[:3])}"
        )


def load_or_explain(load: Callable[[], Any], origin: Origin, what: str) -> Any:
    """Call `load` and turn its errors into a DataError that states the fix."""
    name = f"{origin.option}={origin.name}: its {what}"
    local = origin.name if Path(origin.name).is_dir() else None
    fix = f"Or `hf download {origin.name} --local-dir DIR`, then {origin.option}=DIR"
    with quiet():
        return from_hub(load, name, "" if local else fix, local)


@contextmanager
def quiet():
    """Context manager that hides transformers' warnings and progress bars.

    `check_complete` reports missing weights.
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def check_length(config, length: int, option: str) -> None:
    """Raise ConfigError for sequences longer than the model's positions.

    RoBERTa models count positions from the padding index.
    """
    from transformers import AutoModel

    most = getattr(config, "max_position_embeddings", length)
    # on the meta device, which takes neither memory nor random numbers
    with buildable(f"{option}={length}"), torch.device("meta"):
        model = AutoModel.from_config(config)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            most = min(most, module.num_embeddings - padding - 1)
    if length > most:
        raise ConfigError(
            f"{option}={length}: expected at most {most} tokens, the positions of the model"
        )


@contextmanager
def buildable(option: str, library: str = "transformers") -> Iterator[None]:
    """Context manager: raise a ConfigError for any error of building a model."""
    try:
        with quiet():
            yield
    except ConfigError:
        raise
    except Exception as error:  # exception types differ between models and libraries
        cause = f"{option}: {library} cannot build the model: {reason_of(error)}"
        raise ConfigError(explain(error) or cause) from None


def save_model(model: nn.Module, tensors: Tensors, tokenizer, directory: Path) -> None:
    """Write `<directory>/model` atomically from the model's state. Raises OSError."""
    with whole_folder(directory) as path, quiet():
        model.save_pretrained(path, state_dict=tensors)
        tokenizer.save_pretrained(path)
