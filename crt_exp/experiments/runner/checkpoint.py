"""Atomic checkpoints `<root>/step-N/` and the training state in them.

A checkpoint has tensors as safetensors (`model`, `optimizer`), other state as JSON (`state`), and `manifest.json` with
the SHA-256 of each file. It is written under a temporary name and renamed. Nothing is pickled.
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn

from crt_exp.attention.state import make_room
from crt_exp.experiments.data import full_tensor
from crt_exp.experiments.models.folder import mismatch
from crt_exp.experiments.runner.run import (
    CONFIG,
    RunDirectory,
    names_in,
    write_atomic,
)
from crt_exp.experiments.runner.trainer_config import Adapters
from crt_exp.experiments.tasks.base import Task

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # subfolder of the run directory


class CheckpointError(OSError):
    """A checkpoint cannot be written, read or used; the message states how to proceed."""


# ---- directories


def save(
    root: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]
) -> Path:
    """Write `<root>/step-<step>`: one safetensors file per entry, and state.json.

    Raises CheckpointError if the disk is full or not writable; earlier checkpoints are preserved.
    """
    temporary = root / f".step-{step}.{os.getpid()}"
    final = root / f"step-{step}"
    try:
        temporary.mkdir(parents=True)
        files = {f"{name}.safetensors": encode(part) for name, part in tensors.items()}
        files["state.json"] = json.dumps(state).encode()
        digests = {}
        for name, content in files.items():
            write_atomic(temporary / name, content)
            digests[name] = {"sha256": hashlib.sha256(content).hexdigest()}
        write_atomic(temporary / MANIFEST, {"step": step, "files": digests})
        shutil.rmtree(final, ignore_errors=True)  # exists if a continued run repeats the step
        temporary.rename(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step}: {error}; remaining steps: {steps(root) or 'none'}"
        ) from None
    return final


def steps(root: Path) -> list[int]:
    """Return the steps that have a checkpoint, in increasing order.

    Raises OSError if the folder cannot be read.
    """
    numbers = [name.removeprefix("step-") for name in names_in(root) if name.startswith("step-")]
    return sorted(int(number) for number in numbers if number.isdigit())


def damage(path: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None if it is intact.

    Damage is a file that is missing or differs from its checksum, or a manifest that names no files. Raises
    CheckpointError if the checkpoint cannot be read: it may be intact.
    """
    file = path / MANIFEST
    try:
        files = json.loads(file.read_bytes())["files"]
        for name, entry in files.items():
            file = path / name
            digest = entry["sha256"]
            with file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                    return f"{name} differs from its checksum"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); the checkpoints stay, try again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is not a manifest: {error}"
    return None


def newest(root: Path) -> Path | None:
    """Return the newest intact checkpoint, or None; remove damaged ones.

    Raises OSError, and removes nothing more, if a checkpoint cannot be read.
    """
    for name in names_in(root):
        if name.startswith(".step-"):  # an incomplete checkpoint of a killed process
            shutil.rmtree(root / name, ignore_errors=True)
    intact = steps(root)
    while intact:
        path = root / f"step-{intact.pop()}"
        reason = damage(path)
        if reason is None:
            return path
        rest = f"trying step-{intact[-1]}" if intact else "no earlier checkpoint"
        print(f"checkpoint {path}: damaged ({reason}); removed, {rest}")
        shutil.rmtree(path)
    return None


def prune(root: Path, keep: int, best: int | None = None) -> None:
    """Remove all checkpoints except the newest `keep` and the best."""
    for step in {*steps(root)[:-keep]} - {best}:
        # an interrupted removal leaves a damaged checkpoint
        shutil.rmtree(root / f"step-{step}", ignore_errors=True)


def load_state(path: Path) -> dict[str, Any]:
    """Load the `state` that `save` wrote."""
    return json.loads((path / "state.json").read_bytes())


def check_records(path: Path, state: dict[str, Any], records: int) -> None:
    """Raise CheckpointError if metrics.jsonl lacks records that precede a checkpoint."""
    if records < state["records"]:
        raise CheckpointError(
            f"{path}: expected {state['records']} records in metrics.jsonl, found {records}; "
            f"restore the file, or move {path.parent} away to start over"
        )


# ---- tensors


def encode(tensors: dict[str, Tensor]) -> bytes:
    """Serialise tensors as safetensors; tied weights are stored once, with aliases."""
    contents = {}
    first = {}
    aliases = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(key, name) != name:
            aliases[name] = first[key]
        else:
            contents[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return serialise(contents, metadata={"aliases": json.dumps(aliases)})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of one `.safetensors` file by name."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {name: tensors[first] for name, first in aliases.items()}


def load_model(
    model: nn.Module, tensors: dict[str, Tensor], source: Path | str, absent: Collection[str] = ()
) -> None:
    """Load weights by name, except those of `absent`.

    Raises CheckpointError that names the first mismatch.
    """
    make_room(model, tensors)
    own = model.state_dict()
    expected = {name: tensor for name, tensor in own.items() if name not in absent}
    if wrong := mismatch(expected, tensors):
        raise CheckpointError(f"{source}: {wrong}")
    shards = {name: sharded_like(own[name], tensor) for name, tensor in tensors.items()}
    model.load_state_dict(shards, strict=not absent)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, placed as `own`, without communication."""
    if not hasattr(own, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )


def optimizer_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the optimiser's tensors as "<parameter name>.<key>"."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = full_tensor(value)
    return tensors


def load_optimizer(model: nn.Module, optimizer: Any, tensors: dict[str, Tensor]) -> None:
    """Restore the result of optimizer_tensors."""
    parameters = dict(model.named_parameters())
    positions: dict[nn.Parameter, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            positions[parameter] = len(positions)
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        parameter = parameters[path]
        if key != "step":
            tensor = sharded_like(parameter, tensor)
        states.setdefault(positions[parameter], {})[key] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})


# ---- random generators


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, as plain JSON.

    Of GPUs, only the current device is included.
    """
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of rng_state, with or without a round trip through JSON."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes_of(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_of(state["cuda"]))


def _bytes_of(digits: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


# ---- training state


@dataclass
class Progress:
    """Progress of a run, saved in each checkpoint."""

    step: int = 0
    epoch: int = 0
    position: int = 0  # completed steps of this epoch
    evaluated: int = 0  # step of the last evaluation
    best: dict[str, Any] | None = None  # step, epoch and validation metrics
    loss: float = 0.0  # sum since the last training record
    losses: int = 0


class TrainingState:
    """Weights, optimiser, generators, task state and progress of one process.

    All processes must call each method together. Subclasses set the attributes.

    Attributes:
        adapters: None without adapters; else checkpoints lack the frozen weights.
        per_epoch: Steps of an epoch.
        progress: The run's progress.
        saved, saved_at: Step and time of the last checkpoint.
    """

    module: nn.Module
    optimizer: Any
    task: Task
    run: RunDirectory
    accelerator: Accelerator
    per_epoch: int
    adapters: Adapters | None = None
    progress: Progress
    saved = 0
    saved_at: float

    @property
    def root(self) -> Path:
        """Folder of the checkpoints."""
        return self.run.directory / CHECKPOINTS

    @property
    def epoch(self) -> float:
        """Completed epochs, as a fraction."""
        progress = self.progress
        return round(progress.epoch + progress.position / max(1, self.per_epoch), 4)

    def save(self, keep: int) -> None:
        """Write a checkpoint and remove old ones, on the first process.

        keep: number of checkpoints to keep in addition to the best.
        """
        weights = {}
        for name, tensor in self.module.state_dict().items():
            if self.adapters is None or name not in self.adapters.stay:
                weights[name] = full_tensor(tensor)
        tensors = {
            "model": weights,
            "optimizer": optimizer_tensors(self.module, self.optimizer),
        }
        own = {}
        for name, value in self.task.state_dict().items():
            own[name] = value.detach().cpu() if isinstance(value, Tensor) else value
        task_values: list[dict[str, Any]] = []  # of each process
        for rank, values in enumerate(gather_object([own])):
            task_values.append({})
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors.setdefault("task", {})[f"{rank}.{name}"] = value
                else:
                    task_values[rank][name] = value
        state = asdict(self.progress) | {
            "rng": gather_object([rng_state()]),
            "records": len(self.run.records),
            "task": task_values,
            "scaler": self.accelerator.scaler and self.accelerator.scaler.state_dict(),
            "stay": self.adapters and self.adapters.digest,
        }
        if self.accelerator.is_main_process:
            save(self.root, self.progress.step, tensors, state)
            prune(self.root, keep, (self.progress.best or {}).get("step"))
        self.saved = self.progress.step
        self.saved_at = time.monotonic()

    def restore(self) -> None:
        """Load the newest intact checkpoint and remove later records.

        Without a checkpoint the run starts over. Raises CheckpointError.
        """
        seen = gather_object([(self.run.directory / CONFIG).is_file()])
        if not all(seen):
            raise CheckpointError(
                f"hydra.run.dir={self.run.directory}: not seen by process {seen.index(False)}; "
                "expected a disk that all nodes share"
            )
        path = None
        if self.accelerator.is_main_process and self.run.existed:
            path = newest(self.root)
        path, records = gather_object([(path, len(self.run.records))])[0]  # of the first process
        if path is None:
            self.run.rewind(0)
            return
        state = load_state(path)
        check_records(path, state, records)
        self._load_weights(path, state)
        load_optimizer(self.module, self.optimizer, load_tensors(path / "optimizer.safetensors"))
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**{key: state[key] for key in asdict(Progress())})
        self.saved = self.progress.step
        self.run.rewind(state["records"])
        note = f"epoch {self.epoch:g}"
        if len(state["rng"]) == self.accelerator.num_processes:
            set_rng_state(state["rng"][self.accelerator.process_index])
        else:
            note += ", new random seeds"
        if self.accelerator.is_main_process:
            print(f"continuing from {path} ({note})")

    def _load_weights(self, path: Path, state: dict[str, Any]) -> None:
        """Load weights and task state. Raises CheckpointError for those of another run."""
        if state.get("stay") != (self.adapters and self.adapters.digest):
            raise CheckpointError(
                f"{path}: adapters of a different base model; use the task.init of the original run"
            )
        absent = self.adapters.stay if self.adapters else ()
        load_model(self.module, load_tensors(path / "model.safetensors"), path, absent)
        states = state.get("task", [{}])
        file = path / "task.safetensors"
        tensors = load_tensors(file) if file.exists() else {}
        own = 0
        if len(states) == self.accelerator.num_processes:
            own = self.accelerator.process_index
        elif tensors or any(values != states[0] for values in states):
            raise CheckpointError(
                f"{path}: has task states of {len(states)} processes; use the same number"
            )
        task_state = dict(states[own])
        for key, tensor in tensors.items():
            rank, _, name = key.partition(".")
            if int(rank) == own:
                task_state[name] = tensor
        self.task.load_state_dict(task_state)

    def load_best(self) -> None:
        """Load weights and task state of the best evaluation. Raises CheckpointError."""
        path = self.root / f"step-{self.progress.best['step']}"
        reason = damage(path) if self.accelerator.is_main_process else None
        reason = gather_object([reason])[0]
        if reason:
            raise CheckpointError(
                f"{path}: best checkpoint is damaged ({reason}); use another hydra.run.dir"
            )
        self._load_weights(path, load_state(path))
