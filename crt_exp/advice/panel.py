"""A model and pieces of data: its losses, times and memory with its own attention and with others.

"Above" is a loss above that of the model's own attention, nats. Pieces for judging and pieces for fitting are different
ones. `TokenPanel` (tokens.py) reads texts, `BatchPanel` (batches.py) images and audio.
"""

import math
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.advice.arms import EXACT, Arm
from crt_exp.attention.linear import LinearAttention
from crt_exp.mechanism import Mechanism
from crt_exp.studies.times import added, give_back
from crt_exp.nonfinite import NotFinite
from crt_exp.swap.measured import Watcher
from crt_exp.swap.calibration import fill_statistics, learns, swapped_states
from crt_exp.swap.swap import unswap_attention


class Bench(ABC):
    """A model in eval mode that gets other attention for a while, and `training`, pieces to fit that to."""

    def __init__(self, model: nn.Module, training: Sequence[Any], seed: int):
        self.model, self.training, self.seed = model.eval(), training, seed
        self.device = next(model.parameters()).device

    @abstractmethod
    def run(self, piece: Any) -> Any:
        """What the model makes of a piece."""

    @contextmanager
    def swapped(self, mechanism: Mechanism | None) -> Iterator[dict[str, nn.Module]]:
        """Within it the model has this attention, fitted where it has something to fit; its layers by path. None: its
        own."""
        if mechanism is None:
            yield {}
            return
        mechanism.swap(self.model, saved=False)
        try:
            if learns(self.model):
                self.fit(mechanism)
            yield {state.path: state for state in swapped_states(self.model)}
        finally:
            unswap_attention(self.model)

    def fit(self, mechanism: Mechanism) -> None:
        fill_statistics(self.model, self.training)

    def times(self, mechanisms: Mapping[str, Mechanism | None], piece: Any, rounds: int,
              call: Callable[[Any], Any] | None = None) -> dict[str, float]:
        """Milliseconds of a call, by default a pass without gradient: medians over rounds, in which all take their
        turn, each after a call that is not timed: buffers and libraries."""
        call, spent = call or self.once, {label: [] for label in mechanisms}
        for _ in range(rounds):
            for label, mechanism in mechanisms.items():
                with self.swapped(mechanism):
                    call(piece)
                    spent[label].append(self._timed(call, piece))
        return {label: statistics.median(each) for label, each in spent.items()}

    @torch.no_grad()
    def once(self, piece: Any) -> None:
        self.run(piece)

    def _timed(self, call: Callable[[Any], Any], piece: Any) -> float:
        self._wait()
        start = time.perf_counter()
        call(piece)
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Panel(Bench):
    """A model and pieces: `count` to judge on, and those to fit to.

    Raises ValueError for a model that is swapped already.
    """

    noun: str                # what its pieces are called
    causal = recalls = False

    def __init__(self, model: nn.Module, count: int, training: Sequence[Any], seed: int):
        if any("swapped" in part._modules for part in model.modules()):
            raise ValueError(f"this {type(model).__name__} is swapped already: call unswap_attention(model) first")
        super().__init__(model, training, seed)
        self.count = count

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

    @contextmanager
    def having(self, arm: Arm) -> Iterator[None]:
        """`swapped`, without a word of what the swap leaves and fits: that is in the advice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with self.swapped(arm.mechanism(self.seed)):
                yield

    def losses(self, arm: Arm) -> dict[str, list[float]]:
        """Of each judged piece: `loss`, nats, and where pieces can be repeated `again`. Raises NotFinite where they are
        not, of the model's own attention."""
        with self.having(arm), torch.no_grad():
            losses = {"loss": [self.loss(i) for i in range(self.count)], **self.again()}
        odd = [i for each in losses.values() for i, loss in enumerate(each) if not math.isfinite(loss)]
        if odd and arm.name == EXACT:
            where = next((f"; its parameter {name} holds NaN or infinity" for name, p in self.model.named_parameters()
                          if not bool(p.isfinite().all())), "")
            raise NotFinite(f"the model's own loss on {self.noun} number {odd[0]} is not finite, so nothing can be "
                            f"compared with it{where}")
        return losses

    @torch.no_grad()
    def layers(self, arm: Arm) -> list[dict[str, Any]]:
        """Relative error of each layer's output on training pieces, and that of uniform attention; of attention that
        can be measured so."""
        with self.having(arm):
            states = [state for state in swapped_states(self.model) if isinstance(state, LinearAttention)]
            hooks = [state.register_forward_hook(Watcher(state), with_kwargs=True) for state in states]
            for piece in self.training[:2] if states else ():
                self.run(piece)
            for hook in hooks:
                hook.remove()
            return [{"path": state.path, "error": state.measured.relative_error,
                     "uniform": state.measured.relative_uniform} for state in states]

    def exact_to(self, arm: Arm) -> int:
        """Tokens up to which every swapped layer is exact attention; 0 for attention that never is."""
        with self.having(arm):
            return min((getattr(state, "exact_to", 0) for state in swapped_states(self.model)), default=0)

    # ---- costs

    def cost(self, arms: Sequence[Arm], length: int, rounds: int) -> dict[str, dict[str, float]]:
        """Medians over rounds, all attention in turn in each: {"ms": label -> milliseconds of a pass without gradient}.

        At the longest length also `step`, of a pass and its gradient, and `mib` at the peak of `body`, beyond what
        the process held before; that is left out where the system does not say it.
        """
        mechanisms = {arm.label: arm.mechanism(self.seed) for arm in arms}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            piece, result = self.timed()[length], {}
            result["ms"] = self.times(mechanisms, piece, rounds)
            if length == self.length:
                result["step"] = self.times(mechanisms, piece, rounds, self._step)
                result["mib"] = {arm.label: self._memory(arm, piece) for arm in arms}
        return {key: costs for key, costs in result.items() if None not in costs.values()}

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

    @torch.no_grad()
    def _memory(self, arm: Arm, piece: Any) -> float | None:
        with self.having(arm):
            give_back()
            try:
                return added(lambda: self.body(piece), self.device)
            except OSError:                              # the system does not say it
                return None
