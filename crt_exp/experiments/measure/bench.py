"""Measure loss, time and memory of a model with other attention.

`Bench` swaps the attention of any model and restores it. `TextBench` adds the losses of language models, `BatchBench`
those of models of images, audio and other inputs. A sample has the form of a batch of `calibrate_attention`. Samples
that attention is fitted to are not evaluated. Models that were built with other attention need no bench: see
`fit_attention`.

Notation: B batch, L tokens, V vocabulary size, C classes.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.experiments.data.text import SHARE
from crt_exp.experiments.measure import TensorPair, seeded
from crt_exp.experiments.measure.times import peak_increase, time_after_warmup, trim_memory
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import call_model, fill_statistics, learns, swapped_states
from crt_exp.swap.swap import pretrained_models, unswap_attention

MASKED = "masked"
NEXT = "next"
HEADS = {"ForMaskedLM": MASKED, "ForPreTraining": MASKED, "ForCausalLM": NEXT, "LMHeadModel": NEXT}
IGNORED = -100  # label of a token without loss, as in torch and transformers
MIN_CONTEXT = 16  # tokens after which a model can detect that a passage is repeated
REPEATED = 4  # rows that are also evaluated as repeated passages
SHORTEST = 128  # tokens of the shortest timed input
LENGTH = 512  # default length of a document, in tokens
SAMPLES = {"texts": 8, "images": 64, "pieces": 16}  # default numbers of samples
TOKENS_PER_BLOCK = 256  # tokens whose losses are computed at a time


def fit_attention(model: nn.Module, batches: Iterable) -> nn.Module:
    """Fit the attention of a model to batches, if it needs fitting; return the model."""
    if learns(model):
        fill_statistics(model, batches)
    return model


def swap_and_fit(model: nn.Module, mechanism: Mechanism, batches: Iterable) -> nn.Module:
    """Swap the model's attention, unless it stays exact, and fit it; return the model."""
    if mechanism.is_exact:
        return model
    with quiet():
        mechanism.swap(model, saved=False)
        return fit_attention(model, batches)


# context manager that hides the UserWarnings of swaps and calibrations
quiet = partial(warnings.catch_warnings, action="ignore", category=UserWarning)


@contextmanager
def recorded_calls(layers: Iterable[nn.Module], record: Callable[..., Any]) -> Iterator[list]:
    """Context manager: list record(layer, arguments, output) of every call of the layers."""
    calls: list[Any] = []

    def hook(*call: Any) -> None:
        calls.append(record(*call))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        yield calls


class Bench:
    """Evaluate one model with several attention methods.

    `judged` samples are evaluated; attention is fitted to `training` samples. The model is put in eval mode. Raises
    ValueError if the model is already swapped.
    """

    noun = "pieces"  # name of the samples in tables
    repeats = 0  # number of samples that are also evaluated as repeated passages
    labelled = True  # whether losses use labels
    timed: dict[int, Any]  # number of tokens -> sample to time, in ascending order

    def __init__(
        self,
        model: nn.Module,
        judged: Sequence[Any] = (),
        training: Sequence[Any] | None = (),
    ):
        if swapped_states(model):
            raise ValueError(
                f"{type(model).__name__}: already swapped; call unswap_attention(model) first"
            )
        self.model = model.eval()
        self.judged = judged
        self.training = training
        self.device = next(model.parameters()).device
        # state dicts of fitted methods
        self.fits: dict[Mechanism, list[dict[str, Tensor]]] = {}

    def run(self, piece: Any) -> Any:
        """Return the model's output for a sample."""
        return call_model(self.model, piece)

    def body(self, piece: Any) -> Any:
        """The forward pass that is timed and whose memory is measured."""
        return self.run(piece)

    def fit(self, attention: Mechanism) -> None:
        """Fit the attention that the model now has."""
        fit_attention(self.model, self.training)

    @contextmanager
    def swapped(self, attention: Mechanism | None) -> Iterator[dict[str, nn.Module]]:
        """Context manager: swap the attention, fitted once, and yield its layers by path.

        None keeps the model's own attention.
        """
        if attention is None:
            yield {}
            return
        with quiet():
            attention.swap(self.model, saved=False)
        try:
            states = swapped_states(self.model)
            if learns(self.model):
                self._fit_once(attention, states)
            yield {state.path: state for state in states}
        finally:
            unswap_attention(self.model)

    @contextmanager
    def approximated(self, mechanism: Mechanism) -> Iterator[None]:
        """Context manager: swap the attention without warnings, unless the mechanism is exact."""
        with self.swapped(None if mechanism.is_exact else mechanism), quiet():
            yield

    def _fit_once(self, attention: Mechanism, states: list[nn.Module]) -> None:
        """Fit the layers, or restore the state of an earlier fit."""
        if attention in self.fits:
            for state, tensors in zip(states, self.fits[attention], strict=True):
                state.load_state_dict(tensors)
            return
        self.fit(attention)
        self.fits[attention] = [copy.deepcopy(state.state_dict()) for state in states]

    @torch.no_grad()
    def record_calls(self, piece: Any, record: Callable[..., Any]) -> tuple[list[Any], Any]:
        """Run a sample with exact attention and record each attention call.

        Returns:
            The values of record(layer, arguments, output) for every call, and the model's output.
        """
        with (
            self.swapped(Mechanism.of("exact")) as states,
            recorded_calls(states.values(), record) as calls,
        ):
            return calls, self.run(piece)

    # ---- losses

    def loss(self, i: int) -> float:
        """Loss of sample i in nats; subclasses define it to compare losses."""
        raise NotImplementedError

    def repeated_loss(self, i: int) -> float:
        """Loss of sample i as a repeated passage; subclasses with `repeats` > 0 define it."""
        raise NotImplementedError

    @torch.no_grad()
    def losses(
        self, attention: Mechanism | None, samples: Sequence[int] | None = None
    ) -> dict[str, list[float]]:
        """Losses in nats: "loss" of the samples (None: all), "repeated" of the first `repeats`.

        Raises NotFinite if the model's own loss is not finite.
        """
        samples = range(len(self.judged)) if samples is None else samples
        with self.swapped(attention):
            loss = [self.loss(i) for i in samples]
            repeated = [self.repeated_loss(i) for i in samples if i < self.repeats]
        losses = {"loss": loss, "repeated": repeated}
        if attention is None and not all(map(math.isfinite, losses["loss"])):
            raise NotFinite(
                f"{type(self.model).__name__}: loss without swap is not finite; check the parameters"
            )
        return losses

    # ---- time and memory

    @property
    def length(self) -> int:
        """Tokens of the longest timed sample."""
        return max(self.timed)

    @torch.no_grad()
    def milliseconds(self, attention: Mechanism | None, length: int) -> float:
        """Milliseconds of a forward pass at a length in `timed`, after an untimed pass."""
        with self.swapped(attention):
            return time_after_warmup(self.body, self.timed[length], device=self.device)

    @torch.no_grad()
    def memory(self, attention: Mechanism | None) -> float | None:
        """Peak MiB of the longest timed pass above the memory in use before; None if unknown."""
        with self.swapped(attention), suppress(OSError):
            trim_memory()
            return peak_increase(lambda: self.body(self.timed[self.length]), self.device)
        return None


# ---- language models


class TextBench(Bench):
    """Bench of a transformers language model on token ids.

    The repeated-passage loss shows what a causal model loses because its attention cannot retrieve single tokens.

    Args:
        rows: token ids (n, L) to evaluate.
        training: token ids (k, L) to fit attention to.
        mask: id of the mask token, for masked language models.
        special: ids that are never masked.
    """

    noun = "texts"

    def __init__(
        self,
        model: nn.Module,
        rows: Tensor,
        training: Tensor | None = None,
        *,
        mask: int | None = None,
        special: Sequence[int] = (),
        seed: int = 0,
    ):
        batches = None if training is None else training.split(1)
        super().__init__(model, rows, batches)
        self.seed = seed
        self.predicts = predicts(model)
        self.rows = rows
        self.mask = mask
        self.special = torch.tensor([*special]).long()
        self.causal = self.predicts == NEXT
        self.options = {"use_cache": False} if self.causal else {}
        L = rows.shape[1]
        self.timed = {}
        length = SHORTEST
        while length < L:
            self.timed[length] = rows[:1, :length]
            length *= 2
        self.timed[L] = rows[:1]
        if self.causal and L >= 4 * MIN_CONTEXT:
            self.repeats = min(REPEATED, len(rows))

    def fit(self, attention: Mechanism) -> None:
        batches = [{"input_ids": piece, **self.options} for piece in self.training]
        fit_attention(self.model.base_model, batches)

    def run(self, ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=ids.to(self.device), **self.options, **options)

    def body(self, ids: Tensor) -> None:
        """Run the model without the output head, whose logits would dominate the cost."""
        self.model.base_model(input_ids=ids.to(self.device), **self.options)

    def loss(self, i: int) -> float:
        """Mean loss of row i, in nats per predicted token."""
        return float(self.nats(*self.inputs_and_labels(i)).mean())

    def repeated_loss(self, i: int) -> float:
        """Loss on a repeated passage, in nats per token.

        The input is the first half of row i, twice. The loss covers the second copy.
        """
        half = self.rows.shape[1] // 2
        inputs, labels = next_token_labels(self.rows[i : i + 1, :half].repeat(1, 2))
        labels[:, : half + MIN_CONTEXT - 1] = IGNORED
        return float(self.nats(inputs, labels).mean())

    def nats(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token with a label, labels (1, L), in float64."""
        return nats(self.run(inputs).logits, labels)

    def inputs_and_labels(self, i: int) -> TensorPair:
        """Inputs and labels of row i, (1, L) each, equal for all methods."""
        row = self.rows[i : i + 1]
        if self.causal:
            return next_token_labels(row)
        hidden = self.masked_positions(i)
        return row.masked_fill(hidden, self.mask), row.masked_fill(~hidden, IGNORED)

    def masked_positions(self, i: int) -> Tensor:
        """The tokens of row i to mask, as a boolean tensor (L,)."""
        generator = seeded(1000 * self.seed + i)
        uniform = torch.rand(self.rows.shape[1], generator=generator)
        uniform[torch.isin(self.rows[i], self.special)] = 1.0
        return uniform <= max(SHARE, float(uniform.min()))


def evenly_spaced(count: int, chosen: int) -> list[int]:
    """Indices of `chosen` evenly spaced samples of `count`, with the first and the last."""
    return np.linspace(0, count - 1, chosen).round().astype(int).tolist()


def spread(values: Sequence[int]) -> list[int]:
    """Reorder values so that the first ones, however many, are spread over all.

    >>> spread(range(8))
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    digits = (len(values) - 1).bit_length()
    places = sorted(range(len(values)), key=lambda place: f"{place:0{digits}b}"[::-1])
    return [values[place] for place in places]


class Split(NamedTuple):
    """Numbers of samples to evaluate (None: the default) and to fit attention to, and a seed."""

    samples: int | None
    calibration: int
    seed: int

    def indices(self, count: int, noun: str, kind: str) -> tuple[list[int], list[int]]:
        """Indices of evenly spaced samples to evaluate, spread, then of those to fit to.

        kind: key of SAMPLES. Raises ValueError if there are too few samples.
        """
        samples = SAMPLES[kind] if self.samples is None else self.samples
        if samples < 2 or self.calibration < 1 or count < samples + self.calibration:
            raise ValueError(
                f"samples={samples}, calibration={self.calibration}: expected at least 2 and 1, of "
                f"{count} {noun}"
            )
        chosen = evenly_spaced(count, samples + self.calibration)
        return spread(chosen[:samples]), chosen[samples:]


def next_token_labels(ids: Tensor) -> TensorPair:
    """Ids (1, L) and next-token labels; the last token has no label."""
    return ids, F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def nats(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (B, L, V) and labels (B, L) -> losses of the labelled tokens, float64."""
    labels = labels.to(logits.device)
    labelled = labels != IGNORED
    losses = []
    logit_blocks = logits[labelled].split(TOKENS_PER_BLOCK)
    for part, wanted in zip(logit_blocks, labels[labelled].split(TOKENS_PER_BLOCK)):
        losses.append(F.cross_entropy(part.double(), wanted, reduction="none"))
    return torch.cat(losses)


def predicts(model: nn.Module) -> str | None:
    """The training objective, MASKED or NEXT, by class name; None for other models."""
    for holder in pretrained_models(model)[:1]:
        for end, objective in HEADS.items():
            if type(holder).__name__.endswith(end):
                return objective
    return None


def length_of(model: nn.Module, length: int | None, least: int = 1) -> int:
    """The document length in tokens: `length`, or 512, at most the model's positions.

    Raises ValueError if `length` is below `least` or above the model's positions.
    """
    most = positions(model)
    length = min(LENGTH, most) if length is None else length
    if not least <= length <= most:
        raise ValueError(
            f"length={length}: expected {least} to {most} tokens, the positions of the model"
        )
    return length


def positions(model: nn.Module) -> int:
    """The longest input of the model in tokens, at most 2**20."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2**20
    for path, part in model.named_modules():
        if path.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            # RoBERTa's positions start after the padding index
            most = min(most, part.num_embeddings - part.padding_idx - 1)
    return min(most, 2**20)


# ---- other models


class BatchBench(Bench):
    """Bench of a model on samples that are tensors or dictionaries of its arguments.

    `labels` holds the labels (B,) of each evaluated sample. Without labels the loss is the model's own loss, or the
    cross-entropy with the outputs of the model's own attention. The loss increase is then a Kullback-Leibler
    divergence. Raises ValueError for a model that returns neither loss nor scores.
    """

    def __init__(
        self,
        model: nn.Module,
        judged: Sequence[Any],
        training: Sequence[Any],
        *,
        labels: Sequence[Tensor] | None = None,
        noun: str = "pieces",
    ):
        super().__init__(model, judged, training)
        self.labels = labels
        self.noun = noun
        lengths = []
        outputs = []
        for piece in judged:
            queries, output = self.record_calls(piece, count_queries)
            lengths.append(max(queries))
            outputs.append(output)
        longest = max(lengths)
        self.timed = {longest: judged[lengths.index(longest)]}
        self.labelled = labels is not None or own_loss(outputs[0], judged[0]) is not None
        if labels is not None:
            classes = scores(outputs[0]).shape[-1]
            if not all(0 <= int(label) < classes for label in torch.cat(list(labels))):
                raise ValueError(f"labels: expected classes 0 to {classes - 1}")
        elif not self.labelled:
            self.targets = [scores(output).softmax(-1) for output in outputs]

    def loss(self, i: int) -> float:
        output = self.run(self.judged[i])
        loss = own_loss(output, self.judged[i])
        if loss is None:
            targets = self.targets if self.labels is None else self.labels
            loss = F.cross_entropy(scores(output), targets[i].to(self.device))
        return float(loss)


def count_queries(layer: nn.Module, arguments: tuple, output: Tensor) -> int:
    return arguments[0].shape[2]


def own_loss(out: Any, piece: Any) -> Tensor | None:
    """The loss that a model returns for inputs with labels, or None.

    The loss is the attribute `loss`, or the mean of per-sample losses (B,) for inputs with "targets".
    """
    if isinstance(out, Tensor):
        per_sample = isinstance(piece, Mapping) and "targets" in piece and out.ndim == 1
        return out.float().mean() if per_sample else None
    loss = getattr(out, "loss", None)
    return None if loss is None else loss.float()


def scores(out: Any) -> Tensor:
    """Class scores (n, C) of a model's output (B, ..., C), float32. Raises ValueError."""
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.is_floating_point():
        raise ValueError(
            "model: no loss and no class scores; load it with its head, or pass labels"
        )
    return logits.float().flatten(0, -2)
