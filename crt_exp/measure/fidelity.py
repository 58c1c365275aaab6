"""Trained models with another attention and without training: losses, and errors of layers and hidden states.

task=fidelity: a pretrained language model. task=swap_loss: a saved run with exact attention, whose weights are loaded
as task.init does.

Notation: L tokens of a document, H query heads, d their dimension, D the width of the model, "above" the loss increase
over exact attention in nats. Errors are relative, in the Frobenius norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.data import text as data
from crt_exp.data.text import official_file
from crt_exp.measure import SwapMeasurement
from crt_exp.measure.advise import length_in, opened, rows_of
from crt_exp.mechanism import Mechanism
from crt_exp.options import Count, Several, Whole, checked
from crt_exp.runner.configuration import kept_task
from crt_exp.swap.bench import SHARE, TextBench, looked_at, nats
from crt_exp.swap.calibration import learns
from crt_exp.tasks.base import Batch, Plan, Reader, Task

SPLITS = ("train", "valid", "test")  # of WikiText-2


class LayerCall(NamedTuple):
    """One call of an attention layer: q (1,H,L,d), k and v (1,Hkv,L,.), unscaled, and its output."""

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


class Pass(NamedTuple):
    """Hidden states of one document after each layer, and the mean loss of its predicted tokens in nats; None for a
    bare encoder."""

    states: list[Tensor]         # (1, L, D) each
    loss: float | None

    @property
    def embedding(self) -> Tensor:
        """The last states, mean over tokens, (D,) float64."""
        return self.states[-1][0].double().mean(0)


class Subject(TextBench):
    """A Hugging Face model that was trained with exact attention, and `texts` pieces of `length` tokens.

    model: a hub name, a folder or a run of task=mlm. text: held-out files or folders. calibration: others, to which
    causal layers with fitted parameters are fitted, as by `calibrate_attention`. Pieces are spread over the text, whose
    tokens are stored in `cache_dir`. `seed` sets the masked positions, the same for every attention.

    Raises DataError for a missing model, tokenizer or text. Raises ValueError for a model that was not trained with
    exact attention or reads no text, for too few tokens, and for a file in both text and calibration.
    """

    def __init__(self, model: str, text: str | Sequence[str], calibration: str | Sequence[str] | None,
                 tokenizer: str | None, length: int | None, texts: int, calibration_texts: int, seed: int,
                 cache_dir: str | Path | None = None):
        self.name = model
        loaded, self.tokenizer = opened(model, tokenizer)
        L = length_in(loaded, length)
        check_apart(text, calibration)

        def pieces(source: str | Sequence[str], count: int, option: str) -> Tensor:
            return spread(rows_of(source, loaded, self.tokenizer, L, cache_dir), count, source, option)

        super().__init__(loaded, pieces(text, texts, "task.texts"), None if calibration is None else
                         pieces(calibration, calibration_texts, "task.calibration_texts"), seed=seed)
        self.calls: list[list[LayerCall]] = []
        self.exact = [self.captured(i) for i in range(texts)]

    # ---- reading

    @torch.no_grad()
    def read(self, i: int) -> Pass:
        """The model with its present attention on document i."""
        out = self.run(self.rows[i:i + 1])
        states = list(out.hidden_states[1:])
        if self.predicts is None:
            return Pass(states, None)
        inputs, labels = self.asked(i)
        logits = out.logits if self.causal else self.model(input_ids=inputs).logits
        return Pass(states, float(nats(logits, labels).mean()))

    def run(self, ids: Tensor) -> Any:
        return super().run(ids, output_hidden_states=True)

    def asked(self, i: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of document i; masked models get BERT's corruption."""
        if self.causal:
            return super().asked(i)
        draw = data.uniforms([data.generator_of(self.seed, i)], self.length)
        batch = data.Masking.of(self.tokenizer, SHARE)(self.rows[i:i + 1].numpy(), draw)
        return batch["input_ids"], batch["labels"]

    def captured(self, i: int) -> Pass:
        """The exact model on document i; `calls` stores the calls of its attention layers."""
        exact = self.read(i)
        self.calls.append(self.watched(self.rows[i:i + 1], LayerCall.of)[0])
        return exact

    # ---- other attention

    @torch.no_grad()
    def measured(self, mechanism: Mechanism) -> dict[str, np.ndarray]:
        """Without training, of each document: `attention` (texts, calls), the relative error of every layer's output
        for the exact model's queries, keys and values; `hidden` (texts, layers), that of the hidden states with all
        layers swapped; `cosine` (texts,) of the mean states; `above` (texts,), the loss increase over exact attention
        in nats, where the model predicts tokens."""
        with self.swapped(mechanism) as states:
            of_texts = [self.of_text(i, states) for i in range(len(self.rows))]
        return {key: np.array([each[key] for each in of_texts]) for key in of_texts[0]}

    def of_text(self, i: int, states: dict[str, nn.Module]) -> dict[str, Any]:
        exact, now = self.exact[i], self.read(i)
        errors = [float(relative_error(states[call.path].forward(call.q, call.k, call.v), call.output))
                  for call in self.calls[i]]
        hidden = [float(relative_error(a, b)) for a, b in zip(now.states, exact.states)]
        record = {"attention": errors, "hidden": hidden,
                 "cosine": float(F.cosine_similarity(now.embedding, exact.embedding, dim=0))}
        return record if exact.loss is None else record | {"above": now.loss - exact.loss}

    def fit(self, attention: Mechanism) -> None:
        if self.training is None and learns(self.model):
            raise ValueError(f"attention {attention.name} of this model is fitted to training text: give "
                             "task.calibration=<file>, another than task.text")
        super().fit(attention)


def relative_error(estimate: Tensor, expected: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """|estimate - expected| / |expected| in the Frobenius norm over `dims` (default all), float64."""
    error, size = (t.double().square().sum(dims).sqrt() for t in (estimate.double() - expected, expected))
    return error / size


def spread(rows: Tensor, count: int, source: str | Sequence[str], option: str) -> Tensor:
    """`count` of the rows, spread over the text. Raises ValueError for too few."""
    if len(rows) < count:
        raise ValueError(f"{option} = {count}: {source} has {len(rows)} pieces of {rows.shape[1]} tokens; give more "
                         "text, fewer pieces or a smaller task.length")
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def check_apart(text: str | Sequence[str], calibration: str | Sequence[str] | None) -> None:
    """Raises ValueError where text and calibration share a file."""
    if calibration is None:
        return
    seen = {data.content(file): file for file in data.text_files(text)}
    both = [seen[digest] for digest in map(data.content, data.text_files(calibration)) if digest in seen]
    if both:
        raise ValueError(f"task.calibration holds {Path(both[0]).name}, which is task.text too: fit to training text, "
                         "and judge on text that was held out")


# ---- task=fidelity


@lru_cache(maxsize=2)
def subject(model: str, text: str | tuple[str, ...], calibration: str | tuple[str, ...] | None, **options: Any
            ) -> Subject:
    return Subject(model, text, calibration, seed=0, **options)


def files(text: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Files of a text; train, valid and test name the parts of WikiText-2."""
    if text is None or isinstance(text, str):
        return str(official_file("wikitext2", text)) if text in SPLITS else text
    return tuple(text)


@checked("task")
class Fidelity(SwapMeasurement):
    """task=fidelity; see conf/task/fidelity.yaml for the options.

    Rows: `above`, `hidden_error`, `attention_error` and `cosine` of each document, lists; both errors of each `layer`;
    last their means, with `cost` the mean of `above`; with attention=exact also the `loss` of the model.
    """

    metric = "hidden_error"

    def __init__(self, model: str | None, text: str | Sequence[str] | None, calibration: str | Sequence[str] | None,
                 tokenizer: str | None, length: Count | None, texts: Count, calibration_texts: Count, draws: Whole,
                 cache_dir: str | None):
        if model is None or text is None:
            raise ValueError("task=fidelity needs task.model=... (a folder, a run or a hub name) and task.text=... "
                             "(held out, or a part of WikiText-2)")
        self.draws = draws
        self.read = {"model": model, "text": files(text), "calibration": files(calibration), "tokenizer": tokenizer,
                     "length": length, "texts": texts, "calibration_texts": calibration_texts, "cache_dir": cache_dir}

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        read = subject(**self.read)
        made = [errors_of(read, replace(mechanism, seed=each)) for each in range(self.draws) or [seed]]
        of_texts, of_layers = ({key: np.mean([each[key] for each in found], 0).tolist() for key in found[0]}
                               for found in zip(*made))
        yield of_texts
        yield from ({"layer": i, "sample": "", **{key: values[i] for key, values in of_layers.items()}}
                    for i in range(len(read.calls[0])))
        last = {"sample": "", "cost": float(np.mean(of_texts.get("above", np.nan))),
                "hidden_error": float(np.mean(of_texts["hidden_error"]))}
        if mechanism.is_exact and read.predicts:
            last["loss"] = float(np.mean([each.loss for each in read.exact]))
        yield last

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return f"hidden_error {last['hidden_error']:.4g}, loss increase {last['cost']:.4g} nats"


def errors_of(subject: Subject, mechanism: Mechanism) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Errors of each document, and of each layer, means over documents."""
    measured = subject.measured(mechanism)
    layers = {f"{kind}_error": measured[kind].mean(0).tolist() for kind in ("attention", "hidden")}
    texts = {"attention_error": measured["attention"].mean(1), "hidden_error": measured["hidden"][:, -1],
             **{key: measured[key] for key in ("cosine", "above") if key in measured}}
    return {key: values.tolist() for key, values in texts.items()}, layers


# ---- task=swap_loss


@lru_cache(maxsize=8)
def task_of(start: str) -> Task:
    """The task of a saved run, which starts from its weights."""
    return kept_task(start, init=start)


@checked("task")
class SwapLoss(SwapMeasurement):
    """task=swap_loss: metrics of a saved run with another attention and without training, one row a split."""

    metric = "loss"

    def __init__(self, start: str | None, splits: Several[str], offset: Whole = 0, fit: Whole = 0):
        self.start, self.splits, self.offset, self.fit = start, splits, offset, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        task = task_of(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            looked_at(model, [called(task, batch) for batch in islice(task.batches("train", Plan(1)), self.fit)])
        read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
        for split in self.splits:
            found = read(model, split, Reader(task))
            yield {"split": split, "step": 0} | {metric: value for metric, value in found.items()
                                                 if isinstance(value, (int, float))}


def called(task: Task, batch: Batch) -> Any:
    """What the model is called with."""
    if hasattr(task, "arguments"):
        return task.arguments(batch)
    return batch["images"] if "images" in batch else {key: batch[key] for key in batch if key != "labels"}
