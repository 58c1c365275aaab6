"""The most memory that a computation holds, measured in a process of its own."""

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn


def in_new_process(call: Callable[..., Any], **arguments: Any) -> Any:
    """In a process that has done nothing else: an allocator keeps what earlier calls freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, **arguments).result()


def added(call: Callable[[], Any]) -> float:
    """MiB at the peak of a call beyond what the process holds before it."""
    before = reset_peak()
    call()
    return (peak() - before) / 2**20


def added_by_step(step: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """MiB at the peak of a training step beyond weights, gradients and the optimiser's state."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-9)
    optimizer.step()
    return added(step)


def reset_peak() -> int:
    """Sets the process's peak to what it holds now (Linux) and returns that, in bytes."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return peak()


def peak() -> int:
    with open("/proc/self/status") as f:
        lines = dict(line.split(":", 1) for line in f)
    if "VmHWM" in lines:
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
