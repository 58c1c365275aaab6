"""A model and pieces of data: its losses, times and memory with its own attention and with others.

"Above" is a loss above that of the model's own attention, nats. Pieces for judging and pieces for fitting are different
ones. `TokenPanel` (tokens.py) reads texts, `BatchPanel` (batches.py) images and audio.
"""

import ctypes
import gc
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.advice.arms import Arm
from crt_exp.attention.linear import LinearAttention
from crt_exp.swap.measured import Watcher
from crt_exp.swap.calibration import fill_statistics, learns, swapped_states
from crt_exp.swap.swap import unswap_attention


class Panel(ABC):
    """A model in eval mode, the number of pieces to judge on, and `training`, pieces to fit to.

    Raises ValueError for a model that is swapped already.
    """

    noun: str                # what its pieces are called
    causal = recalls = False

    def __init__(self, model: nn.Module, count: int, training: Sequence[Any], seed: int):
        if any("swapped" in part._modules for part in model.modules()):
            raise ValueError(f"this {type(model).__name__} is swapped already: call unswap_attention(model) first")
        self.model, self.count, self.training, self.seed = model.eval(), count, training, seed
        self.device = next(model.parameters()).device

    @abstractmethod
    def run(self, piece: Any) -> Any:
        """What the model makes of a piece."""

    @abstractmethod
    def loss(self, i: int) -> float:
        """Of judged piece i, nats."""

    @abstractmethod
    def step(self, piece: Any) -> Tensor:
        """A number whose gradient is that of a training step."""

    @abstractmethod
    def timed(self) -> dict[int, Any]:
        """Tokens -> a piece of so many, in rising order; the last is as long as those that are judged."""

    def again(self) -> dict[str, list[float]]:
        """`again`, of repeated pieces, where recall can be judged."""
        return {}

    def body(self, piece: Any) -> None:
        """A pass of which memory is measured."""
        self.run(piece)

    @property
    def length(self) -> int:
        """Tokens of the longest piece."""
        return max(self.timed())

    # ---- other attention

    @contextmanager
    def swapped(self, arm: Arm) -> Iterator[None]:
        """Within it the model has this attention, fitted to the training pieces where it has something to fit."""
        mechanism = arm.mechanism(self.seed)
        if mechanism is None:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what the swap leaves and fits is in the advice
            mechanism.swap(self.model, saved=False)
            try:
                if learns(self.model):
                    fill_statistics(self.model, self.training)
                yield
            finally:
                unswap_attention(self.model)

    def losses(self, arm: Arm) -> dict[str, list[float]]:
        """Of each judged piece: `loss`, nats, and where pieces can be repeated `again`."""
        with self.swapped(arm), torch.no_grad():
            return {"loss": [self.loss(i) for i in range(self.count)], **self.again()}

    @torch.no_grad()
    def layers(self, arm: Arm) -> list[dict[str, Any]]:
        """Relative error of each layer's output on training pieces, and that of uniform attention; of attention that
        can be measured so."""
        with self.swapped(arm):
            states = [state for state in swapped_states(self.model) if isinstance(state, LinearAttention)]
            hooks = [state.register_forward_hook(Watcher(state), with_kwargs=True) for state in states]
            for piece in self.training[:2] if states else ():
                self.run(piece)
            for hook in hooks:
                hook.remove()
            return [{"path": state.path, "error": state.measured.relative_error,
                     "uniform": state.measured.relative_uniform} for state in states]

    # ---- costs

    def cost(self, arms: Sequence[Arm], length: int, rounds: int) -> dict[str, dict[str, float]]:
        """Medians over rounds, all attention in turn in each: {"ms": label -> milliseconds of a pass without gradient}.

        At the longest length also `step`, of a pass and its gradient, and `mib` at the peak of `body`, beyond what
        the process held before; that is left out where the system does not say it.
        """
        spent: dict[str, dict[str, list[float]]] = {key: {arm.label: [] for arm in arms} for key in ("ms", "step")}
        piece, whole, memory = self.timed()[length], length == self.length, {}
        for turn in range(rounds):
            for arm in arms:
                with self.swapped(arm):
                    if not turn:
                        self._pass(piece)  # buffers and libraries
                    spent["ms"][arm.label].append(self._timed(self._pass, piece))
                    if whole:
                        spent["step"][arm.label].append(self._timed(self._step, piece))
                        if not turn:
                            memory[arm.label] = self._memory(piece)
        medians = {key: {label: statistics.median(each) for label, each in times.items()}
                   for key, times in spent.items() if whole or key == "ms"}
        return medians | ({"mib": memory} if whole and None not in memory.values() else {})

    @torch.no_grad()
    def _pass(self, piece: Any) -> None:
        self.run(piece)

    def _step(self, piece: Any) -> None:
        """A pass and its gradient; those that the parameters had come back."""
        held = [(p, p.grad, p.requires_grad) for p in self.model.parameters()]
        try:
            for p, _, _ in held:
                p.grad = None
                p.requires_grad_(p.is_floating_point())
            self.step(piece).backward()
        finally:
            for p, grad, wanted in held:
                p.grad = None
                p.requires_grad_(wanted)
                p.grad = grad

    def _timed(self, call, piece: Any) -> float:
        self._wait()
        start = time.perf_counter()
        call(piece)
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def _memory(self, piece: Any) -> float | None:
        with peak_of(self.device) as peak:
            self.body(piece)
        return peak.get("mib")


@contextmanager
def peak_of(device: torch.device) -> Iterator[dict[str, float]]:
    """`mib`: the most memory within it beyond what was held before; nothing where the system does not say."""
    peak: dict[str, float] = {}
    gc.collect()
    before = _reset(device)
    yield peak
    if before is not None:
        peak["mib"] = (_peak(device) - before) / 2**20


def _reset(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed goes back to the system, and does not hide a peak
        Path("/proc/self/clear_refs").write_text("5")
        return _peak(device)
    except (OSError, AttributeError, KeyError):
        return None


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024
