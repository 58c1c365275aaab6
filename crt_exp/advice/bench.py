"""A model that gets other attention for a while, and its own back: losses, errors of layers, times and memory.

`Bench` swaps in place what it is given; models that a run built with other attention use `fitted` and `looked_at`.
Legend: L tokens, H query heads, Hkv key heads. Pieces for judging and pieces for fitting are different ones.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.base import LinearAttention
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.features.base import NotFinite
from crt_exp.measure.times import LONG, added, again, give_back, in_turns
from crt_exp.swap.calibration import Watcher, calibrate_attention, call, fill_statistics, learns, swapped_states
from crt_exp.swap.swap import LayerMaker, swap_layers, unswap_attention

KEPT = 8  # fits that are kept


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

    def exact_to(self, attention: Swap | None) -> int:
        """Tokens up to which every layer computes exact attention; 0: never."""
        with self.placed(attention) as states:
            return min((getattr(state, "exact_to", 0) for state in states.values()), default=0)

    def is_fitted(self, attention: Swap | None) -> bool:
        """Whether the attention has something to fit to data."""
        with self.placed(attention):
            return learns(self.model)

    # ---- losses and errors

    def loss(self, i: int) -> float:
        """Of judged piece i, nats."""
        raise NotImplementedError

    def repeated_loss(self, i: int) -> float:
        """Of the second half of a row that repeats the first half of judged row i, nats."""
        raise NotImplementedError

    @torch.no_grad()
    def losses(self, attention: Swap | None) -> dict[str, list[float]]:
        """Nats of each judged piece, `loss`, and of the first `repeats` pieces `repeated`.

        Raises NotFinite where the model's own loss is not finite.
        """
        with self.swapped(attention):
            losses = {"loss": [self.loss(i) for i in range(len(self.judged))],
                      "repeated": [self.repeated_loss(i) for i in range(self.repeats)]}
        if attention is None and not all(map(math.isfinite, losses["loss"])):
            where = next((f"; its parameter {name} holds NaN or infinity" for name, p in self.model.named_parameters()
                          if not bool(p.isfinite().all())), "")
            raise NotFinite(f"the model's own loss is not finite, so nothing can be compared with it{where}")
        return losses

    @torch.no_grad()
    def layer_errors(self, attention: Swap) -> list[dict[str, Any]]:
        """Relative error of each layer's output on training pieces, and that of uniform attention."""
        with self.swapped(attention) as states, ExitStack() as stack:
            states = [state for state in states.values() if isinstance(state, LinearAttention)]
            for state in states:
                stack.callback(state.register_forward_hook(Watcher(state), with_kwargs=True).remove)
            for piece in self.training[:2] if states else ():
                self.run(piece)
            return [{"path": state.path, "error": state.measured.relative_error,
                     "uniform": state.measured.relative_uniform} for state in states]

    # ---- costs

    def body(self, piece: Any) -> Any:
        """What is timed, and whose memory counts: a pass, by default to the end."""
        return self.run(piece)

    def timed(self) -> dict[int, Any]:
        """Pieces to time, by the number of tokens that attention has in them, in growing order."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens of the longest piece."""
        return max(self.timed())

    def times(self, attentions: Mapping[str, Swap | None], piece: Any, rounds: int) -> dict[str, list[float]]:
        """Milliseconds of a pass in each round: all attentions take their turn in it, each after an untimed call."""
        call = torch.no_grad()(self.body)

        def within(attention: Swap | None) -> float:
            with self.swapped(attention):
                return again(call, piece, below=LONG, device=self.device)
        return in_turns(attentions, rounds, within, warm=0)

    @torch.no_grad()
    def memory(self, attention: Swap | None, piece: Any) -> float | None:
        """MiB at the peak of a pass beyond what was held before; None where the system does not report it."""
        with self.swapped(attention), suppress(OSError):
            give_back()
            return added(lambda: self.body(piece), self.device)
        return None
