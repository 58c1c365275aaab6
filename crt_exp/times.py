"""The one timer: arms that take turns, what a call takes, and the most memory that it holds.

What is timed (attention alone, layers, whole models, a decoded token, estimators) is a call without arguments, made
where it is known. An arm is such a call, or whatever `measure` makes one of. All arms take their turn in every round,
so that load from outside hits all of them alike. Times are milliseconds. Memory is MiB beyond what is held before a
call, in a process that has done nothing else: an allocator keeps what earlier calls freed.
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
LONG = 1000.0  # ms of a call that no cache matters to
WALL, PROCESSOR = time.perf_counter, time.process_time  # the latter hardly changes with other work on the machine


# ---- one call


def milliseconds(call: Callable[..., Any], *given: Any, clock: Callable[[], float] = WALL,
                 device: torch.device | str | None = None) -> float:
    """Of call(*given), with what a CUDA device has to do for it; by default the current one, where CUDA is in use."""
    wait_for(device)
    begun = clock()
    call(*given)
    wait_for(device)
    return 1e3 * (clock() - begun)


def wait_for(device: torch.device | str | None) -> None:
    """Until a CUDA device, by default the current one where CUDA is in use, has done what it was given."""
    if torch.cuda.is_initialized() if device is None else torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def again(call: Callable[..., Any], *given: Any, below: float = float("inf"),
          device: torch.device | str | None = None) -> float:
    """Milliseconds of call(*given) after one that does not count: buffers and libraries are there, and caches hold what
    it reads. A call of `below` or more is not made twice."""
    first = milliseconds(call, *given, device=device)
    return first if first >= below else milliseconds(call, *given, device=device)


# ---- arms in turns


def in_turns(arms: Mapping[Name, Arm], rounds: int, measure: Callable[[Arm], Value] = milliseconds, warm: int = 1,
             turn: int = 0) -> dict[Name, list[Value]]:
    """measure(arm) of every arm in every round, one round after the other; the first `warm` rounds do not count.

    measure: by default an arm is a call, and its milliseconds are kept. turn: by how many places the arms are rotated,
    so that in processes with different numbers another one is first.
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
    """The median over rounds of the ratio to another arm within the round, in which both saw the same load."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def interval(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Mean, standard deviation and half-width of the 95% Student interval (None for one value)."""
    from scipy.special import stdtrit  # slow to import

    n = len(values)
    std = float(np.std(values, ddof=1)) if n > 1 else None
    half = float(stdtrit(n - 1, 0.975)) * std / n**0.5 if n > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": std, f"{name}_ci95": half, "repeats": n}


# ---- threads and signals


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within it torch has this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started within it ignore ^C: the command decides what it means, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- memory


def added(call: Call, device: torch.device | str | None = None) -> float:
    """MiB at the peak of a call beyond what is held before it: by tensors on a CUDA device, else by the process.

    Raises OSError where the system does not say what a process holds.
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
    """Bytes. Raises OSError where the system does not say what a process holds."""
    with open("/proc/self/status") as f:
        lines = dict(line.split(":", 1) for line in f)
    if "VmHWM" in lines:
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- training steps


class Update:
    """A training step as a call without arguments: a loss, its gradient and AdamW's update. Gradients end as zeros."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]):
        self.model, self.loss = model.train(), loss
        self.optimizer = torch.optim.AdamW(model.parameters())

    def __call__(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def added(self) -> float:
        """MiB at its peak beyond weights, gradients and the optimiser's state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-9)
        self.optimizer.step()
        return added(self)
