"""Processes of a run, random generators, and sharded models (FSDP2)."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

PATIENCE = timedelta(
    hours=2
)  # of processes that wait for one that reads or writes; NCCL's own is 10 minutes


@contextmanager
def processes(precision: str = "no", cpu: bool = False) -> Iterator[Accelerator]:
    """Set up the processes of a run, with accelerate for torchrun, and leave them at the end.

    Args:
        precision: no, bf16 or fp16.
        cpu: Use no accelerator.
    """
    accelerator = Accelerator(
        cpu=cpu or not torch.accelerator.is_available(),
        mixed_precision=precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    failed = True
    try:
        yield accelerator
        failed = False
    finally:
        # after an error, the other processes may not reach this point
        if not failed or accelerator.num_processes == 1:
            # leave the process group and reset accelerate, for the next run of a sweep
            accelerator.free_memory()
            accelerator.end_training()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


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


# ---- FSDP2


def shard(model: nn.Module, precision: str) -> nn.Module:
    """Shard `model` in place: one unit per repeated block, one for the rest.

    Weights stay float32 with bf16. Needs the process group. Call before the optimiser is created.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # tasks change no output in place, for which this warning is
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    low = torch.bfloat16 if precision == "bf16" else None
    mesh = init_device_mesh(
        next(model.parameters()).device.type, (torch.distributed.get_world_size(),)
    )
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32))
    outputs = torch.float32 if low else None
    return fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32, outputs)
    )


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost repeated layers: at least two of one class in a list."""
    for child in model.children():
        members = (
            list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        )
        if (
            len(members) >= 2
            and len({type(m) for m in members}) == 1
            and [*members[0].parameters()]
        ):
            yield from members
        else:
            yield from blocks(child)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, placed as `own`, without communication."""
    if not hasattr(own, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )
