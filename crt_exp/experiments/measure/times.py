"""Time and memory of calls, measured for several methods in turns.

A measured call has no arguments. In every round all methods take their turn, so that other load on the machine affects
them equally. Times are in milliseconds. Memory is in MiB above the memory in use before the call. Measure memory in a
fresh process, because an allocator keeps memory that earlier calls freed.
"""

import ctypes
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Call = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
Method = TypeVar("Method")
Value = TypeVar("Value")
NO_WARMUP_MS = 1000.0  # ms; cache effects do not matter for longer calls
# process time is nearly independent of other load
WALL = time.perf_counter
PROCESSOR = time.process_time


# ---- one call


def milliseconds(
    call: Callable[..., Any],
    *given: Any,
    clock: Callable[[], float] = WALL,
    device: torch.device | str | None = None,
) -> float:
    """Milliseconds of call(*given), including its work on a CUDA device.

    Without `device` the current CUDA device counts, if CUDA is in use.
    """
    wait_for(device)
    begun = clock()
    call(*given)
    wait_for(device)
    return 1e3 * (clock() - begun)


def wait_for(device: torch.device | str | None) -> None:
    """Wait for a CUDA device; None is the current one, if CUDA is in use."""
    if device is None:
        in_use = torch.cuda.is_initialized()
    else:
        in_use = torch.device(device).type == "cuda"
    if in_use:
        torch.cuda.synchronize(device)


def time_after_warmup(
    call: Callable[..., Any], *given: Any, device: torch.device | str | None = None
) -> float:
    """Milliseconds of a second call, after a first one that warms up caches.

    A call that takes NO_WARMUP_MS or more runs only once.
    """
    first = milliseconds(call, *given, device=device)
    return first if first >= NO_WARMUP_MS else milliseconds(call, *given, device=device)


# ---- methods in turns


def in_turns(
    methods: Mapping[Name, Method],
    rounds: int,
    measure: Callable[[Method], Value] = milliseconds,
    warm: int = 0,
    turn: int = 0,
) -> dict[Name, list[Value]]:
    """Measure every method once in every round.

    Args:
        methods: name -> object that `measure` takes, by default a call.
        measure: returns the value of one measurement. Default: milliseconds.
        warm: number of further rounds before the others, whose values are dropped.
        turn: rotates the order of the methods, so that different processes start with different methods.
    """
    values: dict[Name, list[Value]] = {name: [] for name in methods}
    order = deque(methods)
    order.rotate(-turn)
    for i in range(warm + rounds):
        for name in order:
            value = measure(methods[name])
            if i >= warm:
                values[name].append(value)
    return values


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of times / base, both measured in the same round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


# ---- memory


def peak_increase(call: Call, device: torch.device | str | None = None) -> float:
    """Peak MiB of a call above the memory in use before it.

    Counts tensors on a CUDA device, else the memory of the process. Raises OSError if the system does not report it.
    """
    if device is not None and torch.device(device).type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait_for(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # resets the peak to the current use
    before = peak()
    call()
    return (peak() - before) / 2**20


def trim_memory() -> None:
    """Return freed memory to the system, so that it does not hide a later peak.

    Does nothing if the C library has no malloc_trim.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak() -> int:
    """Peak memory of the process in bytes. Raises OSError if it is not reported."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no VmHWM")


# ---- training steps


class Update:
    """One training step as a call: loss, gradient, AdamW update.

    Gradients are zero afterwards.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]):
        self.model = model.train()
        self.loss = loss
        self.optimizer = torch.optim.AdamW(model.parameters())

    def __call__(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def peak_increase(self) -> float:
        """Peak MiB of a step above weights, gradients and optimizer state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-9)
        self.optimizer.step()
        return peak_increase(self)
