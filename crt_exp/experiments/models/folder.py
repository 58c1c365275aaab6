"""The folder `<run>/model` of a run, written atomically.

`save_folder` and `open_folder` are for models of this package: config.json and tensors.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from crt_exp.experiments.data import DataError
from crt_exp.registry import ConfigError, json_object, read_yaml

Tensors = dict[str, Tensor]
MODEL = "model"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRANSDUCER = "conformer_transducer"  # the kind of speech models; their module needs torchaudio
# LoRA adapters, and other trained weights
ADAPTER = "adapter"
TRAINED = "trained.safetensors"


def refuse_adapters(path: Path, named: str) -> None:
    """Raise DataError if a run saved adapters without the weights they modify."""
    if (path / ADAPTER).is_dir() and not (path / MODEL).is_dir():
        raise DataError(
            f"{named}: only adapters are saved ({ADAPTER}/); run it with trainer.lora.merge=true"
        )


@contextmanager
def whole_folder(
    directory: Path, name: str = MODEL, then: str = "continue with resume=auto"
) -> Iterator[Path]:
    """Yield a temporary folder that replaces `<directory>/<name>` at the end.

    After an error the temporary folder is removed and an existing folder stays. Raises OSError if the folder cannot be
    written; `then` is the advice in the message.
    """
    temporary = directory / f".{name}.{os.getpid()}"
    final = directory / name
    shutil.rmtree(temporary, ignore_errors=True)  # folders of other processes may be in use
    try:
        temporary.mkdir(parents=True)
        yield temporary
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write {final}: {reason}; free space and {then}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Save tensors of any device as safetensors, each with its own storage."""
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path
    )


def without(tensors: Mapping[str, Tensor], part: str) -> Tensors:
    """The tensors whose names do not contain a part, such as ".swapped."."""
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def mismatch(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], more: bool = False
) -> str | None:
    """The first tensor that is missing, unexpected or of another shape; None if all fit.

    more: whether there may be unexpected tensors.
    """
    names = expected.keys() if more else expected.keys() | tensors.keys()
    for name in sorted(names):
        shapes = []
        for source in (tensors, expected):
            shapes.append(tuple(source[name].shape) if name in source else "none")
        if shapes[0] != shapes[1]:
            return f"{name} has shape {shapes[0]}, expected {shapes[1]}"
    return None


def check_shapes(
    make: Callable[[], nn.Module], layers: int, tensors: Mapping[str, Tensor], named: str
) -> None:
    """Raise ConfigError unless the tensors fit the model that `make` builds.

    The model is built on the meta device, so that a configuration with huge sizes takes no memory. `layers` is the
    number of layers in the configuration.
    """
    if layers > len(tensors):
        raise ConfigError(
            f"{named}: {CONFIG} describes {layers} layers, but there are {len(tensors)} tensors"
        )
    try:
        with torch.device("meta"):
            state = make().state_dict()
    except RuntimeError:  # overflow of the number of elements
        raise ConfigError(f"{named}: {CONFIG} describes a model that is too large") from None
    if wrong := mismatch(state, tensors, more=True):
        raise ConfigError(f"{named}: {wrong} from {CONFIG}")


def take_weights(model: nn.Module, tensors: Tensors, source: str) -> None:
    """Load the weights of a saved recogniser into a model with any attention.

    The random projections of the model stay. Raises ConfigError for a weight that is missing or has another shape.
    """
    weights = without(tensors, ".swapped.")
    if wrong := mismatch(without(model.state_dict(), ".swapped."), weights):
        raise ConfigError(f"{source}: {wrong}; use the task.sizes of that run")
    model.load_state_dict(weights, strict=False)


def trained_length(folder: str | Path) -> int | None:
    """Tokens of the training rows of the run that saved a model: task.block or task.max_length.

    Returns None for other models. Raises ConfigError if the run's config.yaml cannot be read.
    """
    folder = Path(folder)
    config = folder.parent / "config.yaml"
    task = read_yaml(config).get("task") if folder.name == MODEL and config.is_file() else None
    if not isinstance(task, dict):
        return None
    length = task.get("block", task.get("max_length"))
    return length if type(length) is int and length > 0 else None


def folder_of(run: str | Path, option: str, wanted: str) -> Path:
    """The folder with config.json: `run` itself, or the model of that run.

    Raises DataError, naming `option`, if there is none; `wanted` states what to give.
    """
    path = Path(run).expanduser()
    named = f"{option}={run}"
    for folder in (path / MODEL, path):
        if (folder / CONFIG).is_file():
            return folder
    refuse_adapters(path, named)
    if not path.is_dir():
        raise DataError(f"{named}: no such directory; expected {wanted}")
    raise DataError(
        f"{named}: no {CONFIG}; continue an unfinished run with resume=auto; expected {wanted}"
    )


# ---- config.json and tensors -----------------------------------------------------------------------------------------
def save_folder(
    directory: Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write `<directory>/model` with further files, atomically. Raises OSError."""
    with whole_folder(directory) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        save_tensors(tensors, folder / WEIGHTS)


@contextmanager
def open_folder(
    run: str | Path, option: str, kind: str, task: str
) -> Iterator[tuple[Path, dict[str, Any], Tensors]]:
    """Context manager: yield the folder, config and tensors of a run's model.

    Errors of the folder and of the with block become a DataError naming `option`; ConfigError passes unchanged.
    """
    named = f"{option}={run}"
    folder = folder_of(run, option, f"the directory of a run of {task}")
    try:
        config = json_object(folder / CONFIG)
        if (actual := config.pop("kind", None)) != kind:
            raise DataError(f"{named}: {CONFIG} has kind={actual}; expected a run of {task}")
        tensors = load_file(folder / WEIGHTS)
        yield folder, config, tensors
    except ConfigError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise DataError(
            f"{named}: {folder}: not readable: {type(error).__name__}: {error}"
        ) from None
