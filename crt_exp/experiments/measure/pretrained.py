"""Pretrained models after a swap, without training.

task=swap_text: a language model on new text and on repeated passages. task=swap_embeddings: a sentence encoder.
task=swap_images: a vision transformer.

Models are those of `python -m crt_exp data fetch`, or folders. Outputs of exact attention are computed once per
process.

Notation: L tokens of a row, n predicted tokens, B documents.
"""

import os
import re
from abc import abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.experiments.data import images
from crt_exp.experiments.data.corpora import FOLDER
from crt_exp.experiments.data.text import lines_of, official_file
from crt_exp.experiments.measure import Records, SwapMeasurement
from crt_exp.experiments.measure.bench import (
    MIN_CONTEXT,
    TOKENS_PER_BLOCK,
    Bench,
    TextBench,
)
from crt_exp.experiments.measure.model_files import load_language_model, origin_of, rows_of
from crt_exp.experiments.models.encoders import folder_of, load_tokenizer
from crt_exp.experiments.tasks.base import task_class
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, FileName

APART = 8192  # tokens between the starts of rows, so that all lengths use the same documents
CHARACTERS = 1_500_000  # characters to read from a split
FITTED = 1024  # maximum tokens of a calibration row


load_pretrained = lru_cache(maxsize=2)(load_language_model)


@lru_cache(maxsize=8)
def wikitext_rows(model: str, split: str, length: int) -> Tensor:
    """Return token ids (n, length) of a split of WikiText-2, with [CLS] and [SEP] for encoders."""
    text = official_file("wikitext2", split)
    return rows_of(text, *load_pretrained(model), length, FOLDER / "tokens")


# ---- rows of text


class Row(NamedTuple):
    """Token ids (1, L), and the positions (n,) of the predicted tokens."""

    ids: Tensor
    positions: Tensor


def python_source() -> str:
    """Return the source of Python's standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def plain_text(split: str) -> str:
    """Return a split of WikiText-2 without tokenisation blanks, or "code"."""
    if split == "code":
        return python_source()[:CHARACTERS]
    lines = []
    size = 0
    for line in lines_of([official_file("wikitext2", split)], "<unk>"):
        lines.append(re.sub(r" ([.,;:!?)%])|(?<=[($]) ", lambda match: match[1] or "", line))
        size += len(line)
        if size >= CHARACTERS:
            break
    return "".join(lines)


@lru_cache(maxsize=2)
def tokens(model: str, split: str) -> Tensor:
    """Return the token ids (n,) of a split, without special tokens."""
    tokenizer = load_tokenizer(origin_of(model))
    ids = tokenizer(plain_text(split), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def passage(model: str, split: str, seed: int, length: int) -> Tensor:
    """Return (length,) tokens of row `seed`. Raises ValueError for a short split."""
    text = tokens(model, split)
    first = seed * APART
    if first + length > len(text):
        raise ValueError(
            f"seed={seed}: rows of {length} tokens exceed the {len(text)} of WikiText-2 {split}; use "
            "fewer seeds"
        )
    return text[first : first + length]


def new_row(model: str, length: int, seed: int) -> Row:
    return Row(passage(model, "valid", seed, length)[None], torch.arange(1, length))


def repeated_row(model: str, length: int, seed: int) -> Row:
    """Return a row whose second half repeats the first half.

    The first tokens of the second half are not predicted.
    """
    half = length // 2
    ids = passage(model, "valid", seed, half).repeat(2)
    return Row(ids[None], torch.arange(half + MIN_CONTEXT, 2 * half))


ROWS = {"new": new_row, "repeated": repeated_row}


# ---- a language model


@lru_cache(maxsize=64)
def exact_losses(model: str, kind: str, length: int, seed: int) -> tuple[Row, Tensor]:
    """Return a row and its losses (n,) with exact attention."""
    row = ROWS[kind](model, length, seed)
    return row, token_losses(load_pretrained(model)[0], row)


@torch.no_grad()
def token_losses(model: nn.Module, row: Row) -> Tensor:
    """Return the loss of each predicted token of a row in nats, (n,) float64."""
    states = model.base_model(input_ids=row.ids, use_cache=False).last_hidden_state
    states = states[0, row.positions - 1]
    labels = row.ids[0, row.positions]
    head = model.get_output_embeddings()
    losses = []
    for part, wanted in zip(states.split(TOKENS_PER_BLOCK), labels.split(TOKENS_PER_BLOCK)):
        loss = F.cross_entropy(head(part).float(), wanted, reduction="none")
        losses.append(loss.double())
    return torch.cat(losses)


@task_class
class SwapText(SwapMeasurement):
    """task=swap_text: loss of a language model on one row of text after a swap.

    The row is number `seed` of its kind. `above` is the loss increase over exact attention in nats per token. Attention
    is fitted to `fit` rows of `fit_text`.
    """

    metric = "above"

    model: FileName
    kind: Literal[*ROWS]
    length: Count
    fit: Count
    fit_text: Literal["train", "code"]

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        row, exact = exact_losses(self.model, self.kind, self.length, seed)
        length = min(self.length, FITTED)
        training = [passage(self.model, self.fit_text, i, length) for i in range(self.fit)]
        bench = TextBench(load_pretrained(self.model)[0], row.ids, torch.stack(training))
        with bench.approximated(mechanism):
            losses = token_losses(bench.model, row)
        yield {"above": float((losses - exact).mean())}


# ---- cosine similarity to the outputs of exact attention


class SwapSimilarity(SwapMeasurement):
    """Cosine similarity of a model's outputs to those of exact attention, per sample."""

    metric = "mean"
    lower_is_better = False

    @abstractmethod
    def load(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the model, the samples (B, ...), and the calibration samples."""

    @abstractmethod
    def embed(self, model: nn.Module, samples: Tensor) -> Tensor:
        """Return one vector for each sample, (B, d)."""

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        model, samples, training = self.load()
        exact = self.embed(model, samples)
        bench = Bench(model, training=[training])
        with bench.approximated(mechanism):
            cosine = F.cosine_similarity(self.embed(model, samples), exact)
        yield {"cosine": cosine.tolist(), "mean": float(cosine.mean())}


@task_class
class SwapEmbeddings(SwapSimilarity):
    """task=swap_embeddings: cosine of an encoder's mean states to exact attention's.

    The input is `texts` passages of `length` tokens of WikiText-2. Attention is fitted to `fit` training passages.
    """

    model: FileName
    length: Count
    texts: Count
    fit: Count

    def load(self) -> tuple[nn.Module, Tensor, Tensor]:
        passages = wikitext_rows(self.model, "valid", self.length)
        step = max(len(passages) // self.texts, 1)
        training = wikitext_rows(self.model, "train", self.length)
        return load_pretrained(self.model)[0], passages[::step][: self.texts], training[: self.fit]

    def embed(self, model: nn.Module, samples: Tensor) -> Tensor:
        return model(input_ids=samples).last_hidden_state.mean(1)


@task_class
class SwapImages(SwapSimilarity):
    """task=swap_images: cosine of a vision transformer's outputs to exact attention's.

    The input is `images` validation images of `size` pixels. Attention is fitted to `fit` training images.
    """

    model: FileName
    dataset: str
    size: Count
    images: Count
    fit: Count

    def load(self) -> tuple[nn.Module, Tensor, Tensor]:
        import timm

        folder = f"local-dir:{folder_of(self.model, 'task.model')}"
        model = timm.create_model(folder, pretrained=True, img_size=self.size).eval()
        validation = self.pixels("val", self.images, model.pretrained_cfg)
        return model, validation, self.pixels("train", self.fit, model.pretrained_cfg)

    def pixels(self, split: str, count: int, config: dict[str, Any]) -> Tensor:
        """Return normalised images (count, 3, size, size), evenly spaced in the split."""
        source = images.load(self.dataset)[split]
        last = len(source.labels) - 1
        places = np.linspace(0, last, count).astype(int)
        pixels = [images.square_image(source, i, self.size, 3) for i in places]
        scaled = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255
        mean = torch.tensor(config["mean"]).view(3, 1, 1)
        deviation = torch.tensor(config["std"]).view(3, 1, 1)
        return (scaled - mean) / deviation

    def embed(self, model: nn.Module, samples: Tensor) -> Tensor:
        return model(samples)
