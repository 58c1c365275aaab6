"""Parameters, gradients and optimiser state split over processes (FSDP2)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def shard(model: nn.Module, precision: str) -> nn.Module:
    """Splits `model` in place, one unit for each repeated block and one for the rest;
    bf16 computes in it, float32 is kept.

    Needs the process group; call it before the optimiser is made.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    last = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32,
                                output_dtype=torch.float32 if low else None)
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=last)  # within it what follows a block computes in its dtype too


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated layers: members of one class in a list or sequence of at least two."""
    for child in model.children():
        members = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        if len(members) >= 2 and len({type(m) for m in members}) == 1 and any(True for _ in members[0].parameters()):
            yield from members
        else:
            yield from blocks(child)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """This process's share of `tensor`, placed as `own` is; no process needs to hear from another."""
    if not hasattr(own, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
