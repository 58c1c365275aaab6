"""Encoders of transformers: where they come from, which attention they get, and the folder in which a run keeps them.

That folder, `<run>/model`, is what `crt_exp.from_pretrained` loads: config.json, model.safetensors, tokenizer. Its
config.json says under `crt_exp` with which attention the weights were trained, its weights hold the noise of that
attention.
"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.mechanism import Mechanism
from crt_exp.models.folder import MODEL, check_numbers, refuse_adapters, verify, whole_folder
from crt_exp.pretrained.published import fetched, instead
from crt_exp.swap import record

EXACT = Mechanism.of("exact").describe()
HOW = ("With network: `hf download {name} --local-dir DIR`. Without: copy that folder (config.json, model.safetensors, "
       "tokenizer.json or vocab.txt) here. Then set {option}=DIR.")


class Origin(NamedTuple):
    """Where a model comes from: a folder or a name of the hub, the option that named it, and what is taken over."""

    name: str
    option: str
    weights: bool
    noise: bool                        # that of the attention the weights were trained with


def origin_of(model: str, init: str) -> Origin:
    """What task.model and task.init mean. Raises DataError for an `init` that is neither a word nor a folder."""
    if init in ("scratch", "uptrain"):
        return Origin(folder_of(model, "task.model"), "task.model", init == "uptrain", False)
    if not Path(init).expanduser().is_dir():
        near = difflib.get_close_matches(init, ("scratch", "uptrain"), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"task.init = {init}: it takes scratch, uptrain, or the directory of a run of task=mlm, and "
                        f"there is no such directory{hint}")
    return Origin(folder_of(init, "task.init"), "task.init", True, True)


def folder_of(name: str, option: str) -> str:
    """The folder that holds config.json: `name` itself, the model of that run, or the fetched model of that name;
    names of the hub stay. Raises DataError."""
    path = fetched(name, option) or Path(name).expanduser()
    for folder in (path / MODEL, path):
        if (folder / "config.json").is_file():
            verify(folder, f"{option} = {name}")
            return str(folder)
    refuse_adapters(path, f"{option} = {name}")
    if (path / "config.yaml").is_file():
        raise DataError(f"{option} = {name}: this run has not ended, so it holds no {MODEL}/ yet. Continue it with "
                        f"resume=auto hydra.run.dir={name}")
    if path.is_dir():
        raise DataError(f"{option} = {name}: this folder has no config.json. Give the directory of a run of task=mlm, "
                        "or a model's folder (config.json, model.safetensors, tokenizer.json or vocab.txt)")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"{option} = {name}: there is no such folder. Give a model's folder, the directory of a run of "
                        "task=mlm, or a name of the Hugging Face hub such as google-bert/bert-base-uncased")
    return name


def load_tokenizer(origin: Origin):
    """Raises DataError where there is none, here and on the hub."""
    from transformers import AutoTokenizer

    tokenizer = loaded(lambda: AutoTokenizer.from_pretrained(origin.name, trust_remote_code=False), origin, "tokenizer")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise DataError(f"{origin.option} = {origin.name} holds no tokenizer: "
                        "put the model's tokenizer.json or vocab.txt there")
    return tokenizer


def load_config(origin: Origin, **changes: Any):
    """The model's configuration with other values for some keys. Raises DataError."""
    from transformers import AutoConfig

    load = partial(AutoConfig.from_pretrained, origin.name, trust_remote_code=False, **changes)
    return loaded(load, origin, "configuration")


def load_model(kind: str, config, origin: Origin, mechanism: Mechanism) -> nn.Module:
    """A model of the class `kind` (such as AutoModelForMaskedLM) in float32, with `mechanism` in
    place of its own attention.

    Raises DataError where weights are missing, ConfigError where noise is to be taken over from another attention.
    """
    import transformers

    auto = getattr(transformers, kind)
    if origin.noise:
        check_attention(config, origin, mechanism)
    if origin.weights:
        load = partial(auto.from_pretrained, origin.name, config=config, dtype=torch.float32, output_loading_info=True,
                       trust_remote_code=False, ignore_mismatched_sizes=True)  # as a head for other classes must
        model, info = loaded(load, origin, "weights")
        check_complete(model, info, origin)
        model.__dict__["made_anew"] = sorted(info["missing_keys"])
        check_numbers(model.named_parameters(), f"{origin.option} = {origin.name}")
    else:
        model = auto.from_config(config).float()
    record.taken(model)  # of the attention that the weights were saved with
    return model if mechanism.is_exact else mechanism.swap(model, saved=origin.noise)


def check_attention(config, origin: Origin, mechanism: Mechanism) -> None:
    """Raises ConfigError, saying which keys differ, unless the saved model has the attention of this run."""
    changed = differing_keys(saved_attention(config), mechanism.describe())
    if changed:
        raise ConfigError(f"{origin.option} = {origin.name} was trained with another attention; these keys differ: "
                          f"{', '.join(changed)}. Choose the same, or take its weights alone with new noise: "
                          f"task.init=uptrain task.model={origin.name}")


def saved_attention(config) -> dict[str, Any]:
    """What `Mechanism.describe` says of the attention that a model's weights were saved with."""
    saved = getattr(config, record.KEY, None)
    if saved is None:
        return EXACT
    if isinstance(saved, dict) and "mechanisms" not in saved:  # as runs of earlier versions wrote it
        return saved
    return record.checked(saved, config.name_or_path)["mechanisms"][0].get("described", {})


def differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Each key in which two descriptions of a mechanism differ, with both values."""
    old, new = dict(leaves(old)), dict(leaves(new))
    return [f"{'features.m' if k == 'm' else k.removesuffix('._target_')} (it was {old.get(k)}, now {new.get(k)})"
            for k in sorted(old | new) if old.get(k) != new.get(k)]


def leaves(node: Any, prefix: str = ""):
    """Dotted names and values of nested dictionaries."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    elif node is not None:
        yield prefix, node


def check_complete(model: nn.Module, info: dict, origin: Origin) -> None:
    """Raises DataError where the checkpoint lacks weights of the encoder or has them in another shape;
    heads may be new."""
    prefix = model.base_model_prefix
    prefix = f"{prefix}." if hasattr(model, prefix) else ""  # none in a model without a head
    missing, shapes = (sorted(name for name in names if name.startswith(prefix)
                              and not name.removeprefix(prefix).startswith("pooler."))
                       for names in (info["missing_keys"], [name for name, *_ in info["mismatched_keys"]]))
    if missing or shapes:
        problem = f"lacks {missing[0]}" if missing else f"has {shapes[0]} in another shape than config.json says"
        more = len(missing) + len(shapes) - 1
        others = f" and {more} more such weights" if more else ""
        raise DataError(f"{origin.option} = {origin.name} {problem}{others}: not a checkpoint of this "
                        f"{type(model).__name__}")


def loaded(load: Callable[[], Any], origin: Origin, what: str) -> Any:
    """`load()`, whose errors become one DataError that says what to get and where to put it."""
    from safetensors import SafetensorError

    local = Path(origin.name).is_dir()
    try:
        with quiet():
            return load()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(f"{origin.option} = {origin.name}: its {what} asks for code that lies there (auto_map), "
                            "which is not run: give a model whose class transformers has") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        source = f"{origin.option} = {origin.name}: its {what} "
        if local:
            raise DataError(f"{source}cannot be read: {reason}") from None
        raise DataError(f"{source}is not on this machine, and the Hugging Face hub does not give it: {reason}\n"
                        + HOW.format(name=origin.name, option=origin.option) + instead(origin.name)) from None


@contextmanager
def quiet():
    """Without the libraries' words on new weights (`check_complete` judges them), on the noise of a swap, and on
    repeated attempts to reach the hub."""
    from transformers.utils import logging

    hub, bars = getLogger("huggingface_hub"), logging.is_progress_bar_enabled()
    levels = logging.get_verbosity(), hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub.setLevel(levels[1])
        if bars:
            logging.enable_progress_bar()


def check_length(config, length: int, option: str) -> None:
    """Raises ConfigError for sequences that the model has no positions for."""
    most = getattr(config, "max_position_embeddings", None)
    if most is None or length < most - (getattr(config, "pad_token_id", None) or 0):
        return
    with buildable(f"{option} = {length}"):
        most -= unused_positions(config)
    if length > most:
        raise ConfigError(f"{option} = {length}: this model has positions for {most} tokens")


def unused_positions(config) -> int:
    """Rows of the table of positions before the first token's:
    RoBERTa and its kin count from the padding's number on."""
    from transformers import AutoModel

    with torch.device("meta"):  # which takes neither memory nor random numbers
        model = AutoModel.from_config(config)
    tables = [module for name, module in model.named_modules()
              if isinstance(module, nn.Embedding) and name.endswith("position_embeddings")]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


@contextmanager
def buildable(option: str) -> Iterator[None]:
    """Within it, whatever transformers and torch have against a configuration becomes a ConfigError about `option`."""
    try:
        with quiet():
            yield
    except ConfigError:
        raise
    except Exception as error:  # each model and library has its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(f"{option} makes no model: {reason}") from None


def keep(model: nn.Module, tensors: dict[str, Tensor], tokenizer, directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the model's state. Raises OSError."""
    with whole_folder(directory) as folder, quiet():
        model.save_pretrained(folder, state_dict=tensors)
        tokenizer.save_pretrained(folder)
