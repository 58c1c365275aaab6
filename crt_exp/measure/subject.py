"""A pretrained model and documents, for task=fidelity: its states and losses with exact and with another attention.

Notation: L tokens of a document, H query heads, d their dimension, D the width of the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.attention.checks import repeat_heads
from crt_exp.data import text as data
from crt_exp.features import Statistics
from crt_exp.measure.advise import length_in, opened, rows_of
from crt_exp.mechanism import Mechanism
from crt_exp.swap.bench import SHARE, TextBench, nats
from crt_exp.swap.calibration import learns


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

    def sums(self) -> Tensor:
        """Mean |x + y|^2 of each head, (H,), over all pairs, float64."""
        root = self.scaling**0.5
        x, y = root * self.q.double(), root * repeat_heads(self.k, self.q.shape[1]).double()
        return Statistics.of(x, y).mean_sq_sum.flatten()


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
