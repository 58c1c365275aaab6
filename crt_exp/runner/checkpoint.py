"""Checkpoints that are whole or absent: `<root>/step-N/`, written under a temporary name, checksummed, renamed.

A directory holds tensors as safetensors (`model`, `optimizer`), everything else as JSON (`state`), and `manifest.json`
with the size and SHA-256 of each file. Nothing is pickled, so a checkpoint from elsewhere can be read without running
its code.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from crt_exp.attention.fitted_once import make_room
from crt_exp.runner.run import free_name
from crt_exp.data.ranks import whole
from crt_exp.runner.sharding import sharded_like
from crt_exp.stored import read_json

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(OSError):
    """A checkpoint that cannot be written, read or used; the message says what is left and what to do."""


def save(root: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Writes `<root>/step-<step>` with `<name>.safetensors` for each entry of `tensors` and `state.json`;
    returns its path.

    Raises CheckpointError where the disk is full or not writable; what was there before stays as it was.
    """
    temporary, final = root / f".step-{step}.{os.getpid()}", root / f"step-{step}"
    try:
        clear_temporary(root)
        temporary.mkdir(parents=True)
        files = {f"{name}.safetensors": encode(part) for name, part in tensors.items()}
        files["state.json"] = json.dumps(state).encode()
        manifest = {name: write_file(temporary / name, content) for name, content in files.items()}
        content = json.dumps({"format": FORMAT, "step": step, "files": manifest}, indent=1)
        write_file(temporary / MANIFEST, content.encode())
        sync_directory(temporary)
        shutil.rmtree(final, ignore_errors=True)  # one that `newest` found damaged and could not set aside
        temporary.rename(final)
        sync_directory(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = error.strerror or error
        raise CheckpointError(f"cannot write the checkpoint of step {step} to {root}: {reason}; "
                              f"{remaining(root)}") from None
    return final


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Writes and syncs a file; returns its entry in the manifest."""
    with open(path, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view):]
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def steps(root: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    names = (path.name.removeprefix("step-") for path in root.glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def damage(path: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint directory, or with the file `only` of it; None where all is as it was written."""
    try:
        manifest = read_json((path / MANIFEST).read_bytes(), MANIFEST)
        for name, entry in manifest["files"].items() if only is None else [(only, manifest["files"][only])]:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes where {entry['bytes']} were written"
            if checksum(path / name) != entry["sha256"]:
                return f"{name} differs from its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    kind = manifest.get("format")
    return None if kind == FORMAT else f"its format is {kind}, this version reads {FORMAT}"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest(root: Path, say=print) -> Path | None:
    """The newest intact checkpoint; None where there is none.

    Damaged ones on the way to it are set aside as damaged-step-N, so that no later run meets them,
    and named through `say`.
    """
    clear_temporary(root)
    for step in reversed(steps(root)):
        path = root / f"step-{step}"
        reason = damage(path)
        if reason is None:
            return path
        say(f"checkpoint {path} is damaged ({reason}): going back to the one before; "
            f"it is kept as {set_aside(path).name}")
    return None


def set_aside(path: Path) -> Path:
    """Gives a damaged checkpoint a name under which nothing looks for it; the same where the disk refuses that."""
    aside = free_name(lambda i: path.with_name(f"damaged-{path.name}" + (f".{i}" if i > 1 else "")))
    try:
        path.rename(aside)
    except OSError:
        return path
    return aside


def prune(root: Path, keep: int, best: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints, the best, and those that intact ones of the
    newest call the best."""
    newest_steps = steps(root)[-keep:]
    intact = [path for path in (root / f"step-{step}" for step in newest_steps) if damage(path, "state.json") is None]
    bests = {(load_state(path).get("best") or {}).get("step") for path in intact}
    for step in set(steps(root)) - {*newest_steps, best} - bests:
        target = root / f".step-{step}.old"  # a half-removed directory must not look like a checkpoint
        (root / f"step-{step}").rename(target)
        shutil.rmtree(target, ignore_errors=True)


def clear_temporary(root: Path) -> None:
    """Removes what a killed process left half-written or half-removed."""
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def remaining(root: Path) -> str:
    """What a failed write leaves to continue from."""
    left = steps(root)
    return (f"that of step {left[-1]} remains: free space and continue with resume=auto" if left
            else "there is none before it")


def load_state(path: Path) -> dict[str, Any]:
    """What `save` was given as `state`. Raises CheckpointError."""
    try:
        return read_json((path / "state.json").read_bytes(), "state.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path / 'state.json'}: {error}") from None


# ---- tensors ---------------------------------------------------------------------------------------------------------


def encode(tensors: dict[str, Tensor]) -> bytes:
    """Safetensors; a tensor that several names share (tied weights) is written once,
    the other names in the metadata."""
    from safetensors.torch import save as serialise

    kept, first, aliases, storages = {}, {}, {}, set()
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(),
               tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        own = tensor.detach().to("cpu").contiguous()
        kept[name] = own.clone() if own.untyped_storage().data_ptr() in storages else own
        storages.add(kept[name].untyped_storage().data_ptr())
    return serialise(kept, metadata={"aliases": json.dumps(aliases)})


def load_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one `.safetensors` file by name, such as `<run>/checkpoints/step-40/model.safetensors`.

    Raises CheckpointError where the file is not there or not readable.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            aliases = read_json((file.metadata() or {}).get("aliases", "{}"), "aliases")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def load_model(model: nn.Module, tensors: dict[str, Tensor], source: Path | str,
               absent: Collection[str] = ()) -> None:
    """Loads weights by name, but for those that are left out (`absent`). Raises CheckpointError naming what is missing,
    superfluous or of another shape."""
    make_room(model, tensors)
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in tensors and name not in absent]
    problems += [f"{name} is not in this model" for name in tensors if name not in own]
    problems += [f"{name} has shape {tuple(tensors[name].shape)}, the model's has {tuple(tensor.shape)}"
                 for name, tensor in own.items() if name in tensors and tensors[name].shape != tensor.shape]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{source} does not fit this model: {'; '.join(problems[:3])}{more}")
    model.load_state_dict({name: sharded_like(own[name], tensor) for name, tensor in tensors.items()},
                          strict=not absent)


def optimizer_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The optimiser's tensors as "<parameter name>.<key>"; its settings are the configuration's."""
    return {f"{name}.{key}": whole(value) for name, parameter in model.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()}


def load_optimizer(model: nn.Module, optimizer: Any, tensors: dict[str, Tensor]) -> None:
    """The reverse of optimizer_tensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(parameter, {})[key] = tensor
    state_dict, trained = optimizer.state_dict(), [p for group in optimizer.param_groups for p in group["params"]]
    state_dict["state"] = {i: {key: t if key == "step" else sharded_like(p, t) for key, t in states[names[p]].items()}
                           for i, p in enumerate(trained) if names[p] in states}
    optimizer.load_state_dict(state_dict)
