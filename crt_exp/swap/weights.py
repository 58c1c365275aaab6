"""Which files hold the weights that a model was loaded from: noise is taken from these and from no others."""

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from crt_exp.stored import json_object
from crt_exp.swap.buffers import largest_dimension

NAME = "model.safetensors"
CHOOSING = ("variant", "subfolder", "use_safetensors")   # options of from_pretrained that say which of a folder's files


def weights_of(source: str | Path, variant: str | None = None, use_safetensors: bool | None = None,
               **fetching: Any) -> list[Path]:
    """The files that from_pretrained reads with these options, of a folder, or of the hub's copy on this machine;
    empty where they are none of safetensors. fetching: as cached_file of transformers takes it."""
    if use_safetensors is False:
        return []
    folder = Path(source) / (fetching.get("subfolder") or "")
    if folder.is_dir():
        return _files(lambda file: folder / file if (folder / file).is_file() else None, variant)
    from transformers.utils import cached_file

    fetch = partial(cached_file, str(source), _raise_exceptions_for_missing_entries=False, **fetching)
    return _files(fetch, variant)


def _files(fetch, variant: str | None) -> list[Path]:
    """The whole file, or those that its index names, as the libraries look for them."""
    whole = fetch(_with_variant(NAME, variant))
    if whole is not None:
        return [Path(whole)]
    index = fetch(_with_variant(f"{NAME}.index.json", variant))
    shards = [] if index is None else sorted(set(json_object(Path(index))["weight_map"].values()))
    return [Path(file) for shard in shards if (file := fetch(Path(shard).name)) is not None]


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def note_choice(model: nn.Module, options: dict[str, Any]) -> None:
    """What a model was loaded with, for a swap that comes later."""
    model.__dict__["loaded_with"] = {key: options[key] for key in CHOOSING if key in options}


def own_weights(model: nn.Module) -> tuple[list[Path], Path]:
    """Those of the folder that a model of transformers was loaded from, and this folder. Raises ValueError where
    several files hold noise and it is not known which are its own."""
    source = getattr(getattr(model, "config", None), "_name_or_path", None) or ""
    folder = Path(source if isinstance(source, str) else "")
    if not folder.name or not folder.is_dir():
        return [], folder
    files = weights_of(folder, **model.__dict__.get("loaded_with", {}))
    if "loaded_with" not in model.__dict__:   # loaded by transformers alone
        _refuse_several(model, files, folder)
    return files, folder


def _refuse_several(model: nn.Module, files: list[Path], folder: Path) -> None:
    others = [file for file in sorted(folder.glob("*.safetensors")) if file not in files]
    if largest_dimension(others):
        raise ValueError(f"{folder} holds noise in {others[0].name} too, and of which files this "
                         f"{type(model).__name__} was loaded is not known: crt_exp.from_pretrained(..., variant=...) "
                         "gives it back with its own, saved=False makes new noise")
