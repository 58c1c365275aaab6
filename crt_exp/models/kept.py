"""What runs keep of a model: a description as JSON and its tensors, read whole or refused in one line."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.models.folder import CONFIG, check_numbers, description_in, folder_of, save_tensors, whole_folder

WEIGHTS = "model.safetensors"


def write(directory: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
    """Writes `<directory>/model`, with further files, whole or not at all. Raises OSError."""
    with whole_folder(directory) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        save_tensors(tensors, folder / WEIGHTS)


@contextmanager
def read(run: str | Path, option: str, kind: str,
         task: str) -> Iterator[tuple[Path, dict[str, Any], dict[str, Tensor]]]:
    """The folder, its description and tensors. Errors of these and of the block become a DataError naming `option`."""
    named = f"{option}={run}"
    folder = folder_of(run, option, f"the directory of a run of {task}")
    try:
        config = description_in(folder, named)
        if config.pop("kind", None) != kind:
            raise DataError(f"{named} is a run of another task: give a run of {task}")
        tensors = load_file(folder / WEIGHTS)
        check_numbers(tensors.items(), named)
        yield folder, config, tensors
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{named}: {folder} cannot be read: {type(error).__name__}: {error}") from None
