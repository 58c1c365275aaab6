"""Sharded models (FSDP2)."""

import warnings
from collections.abc import Iterator

import torch
from torch import nn


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
