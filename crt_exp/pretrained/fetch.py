"""Pretrained models of the Hugging Face hub as folders below the data folder.

A folder appears under its name only when it is whole. fetched.json in it holds its source and licence, digests.json
what `verify` and every load compare its weights with.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.models.folder import verify, whole_folder
from crt_exp.pretrained.published import GROUP, SCRIPT, Published
from crt_exp.atomic_write import FULL

RECORD = "fetched.json"
NEEDED = ("config.json", "model.safetensors")
WANTED = (*NEEDED, "generation_config.json", "preprocessor_config.json", "tokenizer*", "special_tokens_map.json",
          "added_tokens.json", "vocab.*", "merges.txt", "normalizer.json", "*.jinja", "README.md", "LICENSE*")
PATIENCE = 5.0  # seconds for the hub's first answer


def fetch(model: Published, root: Path, say: Callable[[str], None] = print) -> None:
    """Brings a model of the hub to `<root>/models/<name>`; one that is there and whole stays. Raises DataError."""
    install(model, root, lambda folder: from_hub(model, folder), say)


def install(model: Published, root: Path, bring: Callable[[Path], str], say: Callable[[str], None] = print) -> None:
    """Makes the folder of a model. bring: writes its files to a folder and returns where they are from."""
    folder = root / model.name
    if folder.is_dir() and there(model, folder, say):
        return
    try:
        with whole_folder(root / GROUP, folder.name, then="run the command again") as made:
            record = {"name": model.name, "what": model.what, "source": bring(made), "page": model.page,
                      "licence": model.licence}
            (made / RECORD).write_text(json.dumps(record, indent=1) + "\n")
            for file in made.iterdir():
                file.chmod(0o644)  # safetensors writes for its user alone
    except OSError as error:
        raise DataError(f"{model.name}: {error}") from None
    say(f"{folder}: {model.what}; from {record['source']}; licence {model.licence}")


def there(model: Published, folder: Path, say: Callable[[str], None]) -> bool:
    """Whether a good one lies there. Raises DataError for a folder that was not fetched, which is never replaced."""
    if not (folder / RECORD).is_file():
        raise DataError(f"{folder} is there already, and not from this command: nothing was changed. Move it away to "
                        f"fetch {model.name}")
    try:
        verify(folder, model.name)
    except DataError as error:
        say(f"{error}. It is fetched anew")
        return False
    say(f"{folder}: already there, licence {model.licence}")
    return True


def from_hub(model: Published, folder: Path) -> str:
    """The hub's copy on this machine, which HF_HUB_OFFLINE=1 takes as it is. Raises DataError."""
    if not model.hub:
        raise DataError(f"{model.name}: it is not on the Hugging Face hub. {otherwise(model)}")
    try:
        import huggingface_hub

        snapshot = Path(huggingface_hub.snapshot_download(
            model.hub, allow_patterns=list(WANTED), etag_timeout=PATIENCE))
    except Exception as error:  # of httpx, which is no OSError, as well as its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise DataError(f"{model.name}: the Hugging Face hub does not give {model.hub} ({reason(error)}). "
                        f"{otherwise(model)}") from None
    if lacking := [name for name in NEEDED if not (snapshot / name).is_file()]:
        raise DataError(f"{model.name}: the Hugging Face hub gives {model.hub} without {lacking[0]}. "
                        f"{otherwise(model)}")
    for path in snapshot.iterdir():
        if path.is_file() and any(path.match(pattern) for pattern in WANTED):
            shutil.copyfile(path, folder / path.name)
    return f"the Hugging Face hub, {model.hub}, revision {snapshot.name}"


def otherwise(model: Published) -> str:
    return (f"Give the folder of a copy of your own in its place, or run `{SCRIPT} {model.name}` in a checkout of "
            "crt_exp, which takes it out of a wheel")


def reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "HF_HUB_OFFLINE=1, and it has no copy here" if "outgoing traffic" in first else first.rstrip(".")[:200]
