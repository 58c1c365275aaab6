"""The processes of a run: what they share, their random generators, and models that are split over them (FSDP2)."""

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

PATIENCE = timedelta(hours=2)  # of processes that wait for one that reads or writes; NCCL's own is 10 minutes


class Distributed:
    """The processes of a run, set up by accelerate from the environment of torchrun. Use as a context manager.

    precision: no, bf16 or fp16. cpu: use no accelerator. unused: DDP's find_unused_parameters.
    """

    def __init__(self, precision: str = "no", cpu: bool = False, unused: bool = False):
        self.accelerator = Accelerator(cpu=cpu or not torch.accelerator.is_available(), mixed_precision=precision,
                                       kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused),
                                                        InitProcessGroupKwargs(timeout=PATIENCE)])
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.device, self.main = self.accelerator.device, self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """The value of the first process, on all processes."""
        return broadcast_object_list([value])[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in the order of ranks, on all processes."""
        return gather_object([value])

    def sum(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def __enter__(self) -> "Distributed":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave the group and clear accelerate's state: the next run of a sweep sets up its own."""
        if kind is not None and self.size > 1:  # the others may not come
            return
        self.accelerator.free_memory()
        self.accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


# ---- random generators


def rng_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch (GPU: the current device), as plain JSON."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest],
             "torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Reverse of rng_state, before or after a trip through JSON."""
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
    """Split `model` in place: one unit for each repeated block, one for the rest. bf16: float32 weights are kept.

    Needs the process group; call it before the optimiser is built.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if precision == "bf16" else None
    mesh = init_device_mesh(next(model.parameters()).device.type, (torch.distributed.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32))
    outputs = torch.float32 if low else None
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32, outputs))


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated layers: at least two of one class in a list or sequence."""
    for child in model.children():
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if len(members) >= 2 and len({type(m) for m in members}) == 1 and [*members[0].parameters()]:
            yield from members
        else:
            yield from blocks(child)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """This process's share of `tensor`, placed as `own` is; no communication."""
    if not hasattr(own, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
