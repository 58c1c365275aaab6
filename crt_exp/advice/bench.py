"""A model that gets other attention for a while, and its own back: losses, errors of layers, times and memory.

`Bench` swaps in place what it is given; models that a run built with other attention use `fitted` and `looked_at`.
Legend: L tokens, H query heads, Hkv key heads. Pieces for judging and pieces for fitting are different ones.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.linear import LinearAttention
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.features.nonfinite import NotFinite
from crt_exp.measure.times import LONG, Watch, added, again, give_back, in_turns
from crt_exp.swap.calibration import calibrate_attention, call, fill_statistics, learns, swapped_states
from crt_exp.swap.measured import Watcher
from crt_exp.swap.swap import LayerMaker, swap_layers, unswap_attention

FIRST = 3    # pieces after which it is asked whether the others are needed: fewer give no interval to speak of
KEPT = 8     # fits that are kept


class Swap(Protocol):
    """What a bench can put in place of a model's attention: a `Mechanism`, or `Layers` of any maker."""

    def swap(self, model: nn.Module, layers: Any = None, *, saved: bool = True) -> nn.Module: ...


@dataclass(frozen=True)
class Layers:
    """Attention that no name of conf/attention says; `name` is what tables call it."""

    make: LayerMaker
    name: str

    def swap(self, model: nn.Module, layers: Any = None, *, saved: bool = True) -> nn.Module:
        return swap_layers(model, self.make, self.name, layers, saved=saved)


class LayerCall(NamedTuple):
    """One call of an attention layer: q (1, H, L, d), k and v (1, Hkv, L, ...), unscaled, and its output."""

    path: str
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    causal: bool
    output: Tensor

    @classmethod
    def of(cls, state: nn.Module, given: tuple, output: Tensor) -> "LayerCall":
        return cls(state.path, *given[:3], state.scaling, state.causal, output)

    def sums(self) -> Tensor:
        """Mean |x + y|^2 of each head, (H,), over all pairs, float64."""
        root = self.scaling**0.5
        x, y = root * self.q.double(), root * repeat_heads(self.k, self.q.shape[1]).double()
        return Statistics.of(x, y).mean_sq_sum.flatten()


def fitted(model: nn.Module, batches: Iterable) -> nn.Module:
    """The model, whose attention is fitted to these batches where it has something to fit."""
    if learns(model):
        fill_statistics(model, batches)
    return model


def looked_at(model: nn.Module, batches: Iterable) -> list[LinearAttention]:
    """The layers of the model, calibrated, with what they saw of these batches, `seen`, and how far they are from exact
    attention, `measured`."""
    with quiet():
        calibrate_attention(model, batches)
    return [part for part in model.modules() if isinstance(part, LinearAttention)]


class Known(NamedTuple):
    """What is known of an attention before it is measured: the tokens up to which every layer is exact attention (0:
    never), whether it is then one call of torch's kernel whatever its options, and whether it is fitted to something.
    """

    exact_to: int
    one_kernel: bool
    wants_fit: bool


@contextmanager
def quiet() -> Iterator[None]:
    """Without a word of layers that a swap leaves as they are, or that uniform attention is nearer to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class Bench:
    """A model in eval mode, `judged` pieces, and `training`, those that other attention is fitted to.

    A piece is what `calibrate_attention` takes. Raises ValueError for a model that is swapped already.
    """

    noun = "pieces"             # what they are called
    causal = False
    repeats = 0                 # judged pieces that can be said twice, to see whether they are looked up
    labelled = True             # whether it is told what the model should predict
    trained_on: int | None = None   # tokens of the longest texts that the model was trained on, where its run says so

    def __init__(self, model: nn.Module, judged: Sequence[Any] = (), training: Sequence[Any] | None = (),
                 seed: int = 0):
        if any("swapped" in part._modules for part in model.modules()):
            raise ValueError(f"this {type(model).__name__} is swapped already: call unswap_attention(model) first")
        self.model, self.judged, self.training, self.seed = model.eval(), judged, training, seed
        self.device = next(model.parameters()).device
        self.fits: list[tuple[Any, list[dict[str, Tensor]]]] = []    # of the attentions that were here last

    def run(self, piece: Any) -> Any:
        """What the model makes of a piece."""
        return call(self.model, piece)

    # ---- other attention

    @contextmanager
    def placed(self, attention: Swap | None, layers: Any = None) -> Iterator[dict[str, nn.Module]]:
        """Within it the model has this attention, with nothing fitted; its layers by path. None: its own."""
        if attention is None:
            yield {}
            return
        attention.swap(self.model, layers, saved=False)
        try:
            yield {state.path: state for state in swapped_states(self.model)}
        finally:
            unswap_attention(self.model)

    @contextmanager
    def swapped(self, attention: Swap | None, layers: Any = None) -> Iterator[dict[str, nn.Module]]:
        """The same, fitted where it has something to fit: once, and what was fitted comes back."""
        with self.placed(attention, layers) as states:
            if learns(self.model):
                self._fit_once((attention, layers), list(states.values()), attention)
            yield states

    def _fit_once(self, key: tuple, states: list[nn.Module], attention: Swap) -> None:
        kept = next((kept for known, kept in self.fits if known == key), None)
        if kept is None:
            self.fit(attention)
            kept = [{name: t.clone() for name, t in state.state_dict().items()} for state in states]
            self.fits = [*self.fits, (key, kept)][-KEPT:]
            return
        for state, each in zip(states, kept, strict=True):
            state.load_state_dict(each)

    def fit(self, attention: Swap) -> None:
        """Attention that has something to fit, which the model now has."""
        fitted(self.model, self.training)

    @torch.no_grad()
    def watched(self, piece: Any, see: Callable[[nn.Module, tuple, Tensor], Any], layers: Any = None
                ) -> tuple[list[Any], Any]:
        """see(layer, its arguments, its output) of every call of exact attention while the model reads a piece, in the
        order of calls, and what the model makes of it."""
        seen: list[Any] = []
        with self.swapped(Mechanism.of("exact"), layers) as states, ExitStack() as stack:
            for state in states.values():
                stack.callback(state.register_forward_hook(lambda *of_call: seen.append(see(*of_call))).remove)
            return seen, self.run(piece)

    def known(self, attention: Swap | None) -> Known:
        with self.placed(attention) as states:
            each = states.values()
            return Known(min((getattr(state, "exact_to", 0) for state in each), default=0),
                         bool(each) and all(getattr(state, "one_kernel", False) for state in each), learns(self.model))

    # ---- losses and errors

    def loss(self, i: int) -> float:
        """Of judged piece i, nats."""
        raise NotImplementedError

    def again(self, i: int) -> float:
        """Of judged piece i said twice, where it is said again; of the first `repeats` pieces."""
        raise NotImplementedError

    @torch.no_grad()
    def losses(self, attention: Swap | None, settled: Callable[[dict[str, list[float]]], bool] | None = None
               ) -> dict[str, list[float]]:
        """Of each judged piece: `loss`, nats, and where pieces can be repeated `again`. Raises NotFinite where they are
        not, of the model's own attention.

        settled: asked after FIRST pieces whether these are enough, and then one is repeated; asked again after FIRST
        of both; else all are read.
        """
        judges = {"loss": (self.loss, len(self.judged)), "again": (self.again, self.repeats)}
        losses: dict[str, list[float]] = {}
        with self.swapped(attention):
            for key, (loss, count) in judges.items():
                few = 1 if losses and settled is not None and settled(losses) else FIRST
                if count:
                    losses[key] = [loss(i) for i in range(min(few, count))]
            if settled is None or not settled(losses):
                for key, each in losses.items():
                    loss, count = judges[key]
                    each += [loss(i) for i in range(len(each), count)]
        odd = [i for each in losses.values() for i, loss in enumerate(each) if not math.isfinite(loss)]
        if odd and attention is None:
            where = next((f"; its parameter {name} holds NaN or infinity" for name, p in self.model.named_parameters()
                          if not bool(p.isfinite().all())), "")
            raise NotFinite(f"the model's own loss on {self.noun} number {odd[0]} is not finite, so nothing can be "
                            f"compared with it{where}")
        return losses

    @torch.no_grad()
    def layer_errors(self, attention: Swap) -> list[dict[str, Any]]:
        """Relative error of each layer's output on training pieces, and that of uniform attention; of attention that
        can be measured so."""
        with self.swapped(attention) as states, ExitStack() as stack:
            states = [state for state in states.values() if isinstance(state, LinearAttention)]
            for state in states:
                stack.callback(state.register_forward_hook(Watcher(state), with_kwargs=True).remove)
            for piece in self.training[:2] if states else ():
                self.run(piece)
            return [{"path": state.path, "error": state.measured.relative_error,
                     "uniform": state.measured.relative_uniform} for state in states]

    # ---- costs

    def step(self, piece: Any) -> Tensor:
        """A number whose gradient is that of a training step."""
        raise NotImplementedError

    def timed(self) -> dict[int, Any]:
        """Tokens -> a piece of so many, in rising order; the last is as long as those that are judged."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens of the longest piece."""
        return max(self.timed())

    def body(self, piece: Any) -> None:
        """A pass of which memory is measured."""
        self.run(piece)

    def cost(self, arms: Mapping[str, Swap | None], length: int, rounds: int, once: Collection[str] = ()
             ) -> dict[str, dict[str, Any]]:
        """Of each round {"ms": label -> milliseconds of `body` without gradient}; those of `once` have a turn in the
        first round alone.

        At the longest length also `step`, of a pass and its gradient, where one takes LONG once and without `once`, and
        `mib` at the peak of the first pass, beyond what the process held before; that is left out where the system does
        not say it.
        """
        piece, body = self.timed()[length], torch.no_grad()(self.body)
        if length < self.length:
            return {"ms": self.times(arms, piece, rounds, body, once)}
        first = {label: self.first(attention, piece) for label, attention in arms.items()}
        if long := min(ms for ms, _ in first.values()) >= LONG:
            near = {label: each for label, each in arms.items() if label not in once}
            later = self.times(near, piece, rounds - 1, body) if rounds > 1 else {}
        else:
            later = self.times(arms, piece, rounds, body, once)
        costs = {"ms": {label: [*[ms] * long, *later.get(label, ())] for label, (ms, _) in first.items()},
                 "step": self._steps(arms, piece, rounds, once),
                 "mib": {label: mib for label, (_, mib) in first.items()}}
        return {key: each for key, each in costs.items() if None not in each.values()}

    def times(self, arms: Mapping[str, Swap | None], piece: Any, rounds: int,
              call: Callable[[Any], Any] | None = None, once: Collection[str] = ()) -> dict[str, list[float]]:
        """Milliseconds of a call in each round, by default a pass without gradient: all take their turn in it, but for
        those of `once` after the first round, each after a call that is not timed: buffers and libraries. A call that
        takes LONG is not made twice."""
        call = call or torch.no_grad()(self.run)

        def within(attention: Swap | None) -> float:
            with self.swapped(attention):
                return again(call, piece, below=LONG, device=self.device)
        first = in_turns(arms, 1, within, warm=0)
        rest = {label: each for label, each in arms.items() if label not in once}
        others = in_turns(rest, rounds - 1, within, warm=0)
        return {label: [*each, *others.get(label, ())] for label, each in first.items()}

    def _steps(self, arms: Mapping[str, Swap | None], piece: Any, rounds: int, once: Collection[str]
               ) -> dict[str, list[float]]:
        near = {label: each for label, each in arms.items() if label not in once}
        first = self.times(near, piece, 1, self._step)
        if max(map(max, first.values())) >= LONG:
            return first
        rest = self.times(near, piece, rounds - 1, self._step) if rounds > 1 else {}
        out = {label: each for label, each in arms.items() if label in once}
        return {label: [*each, *rest.get(label, ())] for label, each in first.items()} | self.times(
            out, piece, 1, self._step)

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
    def first(self, attention: Swap | None, piece: Any) -> tuple[float, float | None]:
        """Milliseconds of `body`, and MiB at its peak, beyond what was held before; None where the system does not say
        it."""
        with self.swapped(attention):
            give_back()
            with Watch(device=self.device) as watch:
                mib = self._peak(piece)
        return watch.ms, mib

    def _peak(self, piece: Any) -> float | None:
        try:
            return added(lambda: self.body(piece), self.device)
        except OSError:
            self.body(piece)
            return None

    def memory(self, attention: Swap | None, piece: Any) -> float | None:
        """As `first`, alone."""
        return self.first(attention, piece)[1]


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {label: statistics.median(each) for label, each in times.items()}
