"""Time and memory of calls, measured in turns.

A measured call takes no arguments: attention, a layer, a model, a decoded token or an estimator. All methods take turns
in every round, so that external load affects all of them.
Times are milliseconds. Memory is MiB beyond what is held before the call. It needs a fresh process, because an
allocator keeps what earlier calls freed.
"""

import ctypes
import gc
import resource
import signal
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Call = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
Arm = TypeVar("Arm")
Value = TypeVar("Value")
LONG = 1000.0  # ms of a call on which caches have no effect
WALL, PROCESSOR = time.perf_counter, time.process_time  # the latter hardly depends on other work on the machine


# ---- one call


def milliseconds(call: Callable[..., Any], *given: Any, clock: Callable[[], float] = WALL,
                 device: torch.device | str | None = None) -> float:
    """Return the time of call(*given), including its work on a CUDA device.

    device: by default the current CUDA device, where CUDA is in use.
    """
    wait_for(device)
    begun = clock()
    call(*given)
    wait_for(device)
    return 1e3 * (clock() - begun)


def wait_for(device: torch.device | str | None) -> None:
    """Wait until a CUDA device has finished its work.

    device: by default the current CUDA device, where CUDA is in use.
    """
    if torch.cuda.is_initialized() if device is None else torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def again(call: Callable[..., Any], *given: Any, below: float = float("inf"),
          device: torch.device | str | None = None) -> float:
    """Return the milliseconds of call(*given) after a warm-up call.

    A first call of `below` ms or more is not repeated; its time is returned.
    """
    first = milliseconds(call, *given, device=device)
    return first if first >= below else milliseconds(call, *given, device=device)


# ---- methods in turns


def in_turns(arms: Mapping[Name, Arm], rounds: int, measure: Callable[[Arm], Value] = milliseconds, warm: int = 1,
             turn: int = 0) -> dict[Name, list[Value]]:
    """Measure every method in every round, and return the values by name.

    Args:
        arms: methods by name, as `measure` takes them.
        measure: returns the value of a method; by default the milliseconds of a call.
        warm: first rounds, which are discarded.
        turn: rotation of the order, so that processes with different numbers begin with different methods.
    """
    kept: dict[Name, list[Value]] = {name: [] for name in arms}
    first = turn % len(arms) if arms else 0
    for i in range(warm + rounds):
        for name in [*arms][first:] + [*arms][:first]:
            value = measure(arms[name])
            if i >= warm:
                kept[name].append(value)
    return kept


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of times / base.

    Both methods see the same load within a round.
    """
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def interval(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Return mean, standard deviation and half-width of the 95% Student interval.

    The latter two are None for one value.
    """
    from scipy.special import stdtrit  # slow to import

    n = len(values)
    std = float(np.std(values, ddof=1)) if n > 1 else None
    half = float(stdtrit(n - 1, 0.975)) * std / n**0.5 if n > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": std, f"{name}_ci95": half, "repeats": n}


# ---- threads and signals


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Let processes that start within the context ignore ^C.

    The command handles ^C and ends them.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- memory


def added(call: Call, device: torch.device | str | None = None) -> float:
    """Return the peak memory of a call in MiB beyond what is held before it.

    It is that of tensors on a CUDA device, else that of the process. Raises OSError if the system does not report it.
    """
    if device is not None and torch.device(device).type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait_for(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    before = reset_peak()
    call()
    return (peak() - before) / 2**20


def give_back() -> None:
    """Return freed memory to the system, so that it does not hide a later peak.

    Does nothing if the C library cannot.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> int:
    """Set the process's peak memory to its current memory (Linux); return it in bytes."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return peak()


def peak() -> int:
    """Return the peak memory of the process in bytes.

    Raises OSError if the system does not report it.
    """
    with open("/proc/self/status") as f:
        lines = dict(line.split(":", 1) for line in f)
    if "VmHWM" in lines:
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- training steps


class Update:
    """A training step as a call without arguments: loss, gradient, AdamW update.

    Gradients are zeros afterwards.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]):
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters())

    def __call__(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def added(self) -> float:
        """Return the peak in MiB beyond weights, gradients and optimizer state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-9)
        self.optimizer.step()
        return added(self)
