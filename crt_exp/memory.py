"""The most memory that a computation holds: of a call in this process or in a new one, on the CPU or a CUDA device."""

import ctypes
import gc
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn


def in_new_process(call: Callable[..., Any], **arguments: Any) -> Any:
    """In a process that has done nothing else: an allocator keeps what earlier calls freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, **arguments).result()


def added(call: Callable[[], Any], device: torch.device | None = None) -> float:
    """MiB at the peak of a call beyond what is held before it: by tensors on a CUDA device, else by the process.

    Raises OSError where the system does not say what a process holds.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    before = reset_peak()
    call()
    return (peak() - before) / 2**20


def added_by_step(step: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """MiB at the peak of a training step beyond weights, gradients and the optimiser's state."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-9)
    optimizer.step()
    return added(step)


def give_back() -> None:
    """What earlier calls freed goes back to the system, so that it does not hide a peak in a process that has done
    other things. Nothing where the C library has no way to."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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
