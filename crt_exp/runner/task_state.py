"""The state of a task within a checkpoint: tensors as safetensors, plain values as JSON, those of every process."""

from typing import Any

import torch
from torch import Tensor

from crt_exp.tasks.base import Task

PLAIN = (int, float, bool, str, type(None))
State = dict[str, Any]


def state_of(task: Task) -> State:
    """What the task keeps, with tensors on the CPU. Raises ValueError for values that are neither tensors nor plain."""
    state = task.state_dict()
    for name, value in state.items():
        if not isinstance(value, (Tensor, *PLAIN)):
            raise ValueError(f"{type(task).__name__}.state_dict()[{name!r}] is a {type(value).__name__}: a checkpoint "
                             "keeps tensors, numbers and text")
    return {name: value.detach().to("cpu") if isinstance(value, Tensor) else value for name, value in state.items()}


def split(states: list[State]) -> tuple[dict[str, Tensor], list[State]]:
    """The tensors of all processes as "<rank>.<name>", and the plain values of each."""
    tensors = {f"{rank}.{name}": value for rank, state in enumerate(states) for name, value in state.items()
               if isinstance(value, Tensor)}
    plain = [{name: value for name, value in state.items() if not isinstance(value, Tensor)} for state in states]
    return tensors, plain


def joined(tensors: dict[str, Tensor], plain: list[State]) -> list[State]:
    """The reverse of split."""
    states = [dict(values) for values in plain]
    for key, tensor in tensors.items():
        rank, _, name = key.partition(".")
        states[int(rank)][name] = tensor
    return states


def share(states: list[State], rank: int, world: int) -> State | None:
    """This process's state; of another number of processes any one's, where all had the same,
    and None where they had not."""
    if len(states) == world:
        return states[rank]
    return states[0] if all(same(states[0], state) for state in states[1:]) else None


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in ((one[name], other[name]) for name in one))
