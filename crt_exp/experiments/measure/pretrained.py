"""Pretrained models after a swap, without training.

task=swap_text: a language model on new text and on repeated passages. task=swap_embeddings: a sentence encoder.
task=swap_images: a vision transformer.

Models are those of `python -m crt_exp data fetch`, or folders. Outputs of exact attention are computed once per
process.

Notation: L tokens of a row, n predicted tokens, B documents.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from crt_exp.experiments.data import images
from crt_exp.experiments.data.corpora import FOLDER
from crt_exp.experiments.data.text import lines_of, local_blocks, official_file
from crt_exp.experiments.measure import SwapMeasurement
from crt_exp.experiments.measure.bench import MIN_CONTEXT, TOKENS_PER_BLOCK, Bench, TextBench, quiet
from crt_exp.experiments.measure.recall import attention_of
from crt_exp.mechanism import Mechanism
from crt_exp.swap.saved import fetched
from crt_exp.validation import Count, FileName, checked

APART = 8192  # tokens between the starts of rows, so that all lengths use the same documents
CHARACTERS = 1_500_000  # characters to read from a split
FITTED = 1024  # maximum tokens of a calibration row
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Opened(NamedTuple):
    """A model in eval mode and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def encoded(self, text: str) -> Tensor:
        """Return token ids (n,) without special tokens."""
        return torch.tensor(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            dtype=torch.long,
        )


class Row(NamedTuple):
    """Token ids (1, L), and the positions (n,) of the predicted tokens."""

    ids: Tensor
    places: Tensor


class Reading(NamedTuple):
    """Loss in nats and most likely token at each predicted position of a row, (n,)."""

    nats: Tensor
    best: Tensor


def folder_of(model: str) -> Path:
    """Return the folder of a model. Raises DataError that names the fetch command."""
    return fetched(model) or Path(model).expanduser()


@lru_cache(maxsize=1)
def load_model_and_tokenizer(model: str, kind: type = AutoModelForCausalLM) -> Opened:
    folder = folder_of(model)
    return Opened(
        kind.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )


# ---- rows


FitText = Literal["train", "code"]  # calibration text: WikiText-2's training split, or source code


def code() -> str:
    """Return the source of Python's standard library."""
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))
    )


def plain_text(split: str) -> str:
    """Return a split of WikiText-2 without tokenisation blanks, or "code"."""
    if split == "code":
        return code()[:CHARACTERS]
    lines = lines_of([official_file("wikitext2", split)], "<unk>")
    text, size = [], 0
    for line in lines:
        text.append(re.sub(r" ([.,;:!?)%])|(?<=[($]) ", lambda found: found[1] or "", line))
        size += len(line)
        if size >= CHARACTERS:
            break
    return "".join(text)


@lru_cache(maxsize=2)
def tokens(model: str, split: str) -> Tensor:
    return load_model_and_tokenizer(model).encoded(plain_text(split))


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


def new(model: str, length: int, seed: int) -> Row:
    return Row(passage(model, "valid", seed, length)[None], torch.arange(1, length))


def repeated(model: str, length: int, seed: int) -> Row:
    """Return a row whose second half repeats the first half.

    The first tokens of the second half are not predicted.
    """
    half = length // 2
    return Row(
        passage(model, "valid", seed, half).repeat(2)[None],
        torch.arange(half + MIN_CONTEXT, 2 * half),
    )


ROWS = {"new": new, "repeated": repeated}


# ---- a language model


@lru_cache(maxsize=4)
def exact_reading(model: str, kind: str, length: int, seed: int) -> tuple[Row, Reading]:
    """Return a row and its reading with exact attention."""
    made = ROWS[kind](model, length, seed)
    return made, run_row(load_model_and_tokenizer(model).model, made)


@torch.no_grad()
def run_row(model: nn.Module, row: Row) -> Reading:
    states = model.base_model(input_ids=row.ids, use_cache=False).last_hidden_state
    states = states[0, row.places - 1]
    labels = row.ids[0, row.places]
    head = model.get_output_embeddings()
    nats, best = [], []
    for part, wanted in zip(states.split(TOKENS_PER_BLOCK), labels.split(TOKENS_PER_BLOCK)):
        logits = head(part).float()
        nats.append(F.cross_entropy(logits, wanted, reduction="none").double())
        best.append(logits.argmax(-1))
    return Reading(torch.cat(nats), torch.cat(best))


def text_bench(model: str, row: Row, length: int, fit: int, fit_text: str) -> TextBench:
    """Return a bench of the model on a row, with `fit` calibration rows."""
    fitted_to = [passage(model, fit_text, i, min(length, FITTED)) for i in range(fit)]
    return TextBench(load_model_and_tokenizer(model).model, row.ids, torch.stack(fitted_to))


@contextmanager
def with_attention(
    method: str | Mechanism, bench: Bench, whole: nn.Module, seed: int, dtype: str | None = None
) -> Iterator[nn.Module]:
    """Swap attention in the bench's model and yield the whole model.

    With `dtype`, yield a copy of that type with exact attention instead.
    """
    if dtype is not None:
        yield in_type(whole, dtype)
        return
    with bench.swapped(attention_of(method, seed=seed)), quiet():
        yield whole


def in_type(model: nn.Module, dtype: str) -> nn.Module:
    """Return a copy with parameters of type `dtype`.

    Rotary frequencies are buffers and stay float32, as in a loaded model.
    """
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return copy


@checked("task")
class SwapText(SwapMeasurement):
    """task=swap_text: loss of a language model on one row of text after a swap.

    The row is number `seed` of its kind. Records `nats` per token, the increase `above` over exact attention, and the
    share of tokens `agrees` with equal predictions. With `dtype`, the whole model has that type and exact attention.
    Attention is fitted to `fit` rows of `fit_text`.
    """

    metric = "above"

    def __init__(
        self,
        model: FileName,
        kind: Literal[*ROWS],
        length: Count,
        dtype: Literal[*DTYPES] | None,
        fit: Count,
        fit_text: FitText,
    ):
        self.model = model
        self.kind = kind
        self.length = length
        self.dtype = dtype
        self.fit, self.fit_text = fit, fit_text

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        row, exact = exact_reading(self.model, self.kind, self.length, seed)
        found = exact
        if not mechanism.is_exact or self.dtype:
            bench = text_bench(self.model, row, self.length, self.fit, self.fit_text)
            with with_attention(mechanism, bench, bench.model, seed, self.dtype) as reader:
                found = run_row(reader, row)
        yield {
            "nats": float(found.nats.mean()),
            "above": float((found.nats - exact.nats).mean()),
            "agrees": float((found.best == exact.best).float().mean()),
        }


# ---- an encoder of sentences


@checked("task")
class SwapEmbeddings(SwapMeasurement):
    """task=swap_embeddings: cosine of an encoder's mean states to exact attention's.

    The input is `texts` passages of `length` tokens of WikiText-2. Attention is fitted to `fit` passages of `fit_text`.
    """

    metric, lower_is_better = "mean", False

    def __init__(self, model: FileName, length: Count, texts: Count, fit: Count, fit_text: FitText):
        self.model = model
        self.length = length
        self.texts = texts
        self.fit = fit
        self.fit_text = fit_text

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        model, tokenizer = load_model_and_tokenizer(self.model, AutoModel)

        def of_wikitext2(split: str) -> Tensor:
            file = official_file("wikitext2", split)
            return torch.from_numpy(
                local_blocks(file, tokenizer, self.length, FOLDER / "tokens").astype(np.int64)
            )

        pieces = of_wikitext2("valid")
        pieces = pieces[:: max(len(pieces) // self.texts, 1)][: self.texts]
        if self.fit_text == "code":
            training = Opened(model, tokenizer).encoded(plain_text("code"))[
                : self.fit * self.length
            ]
        else:
            training = of_wikitext2("train")[: self.fit]
        exact = model(input_ids=pieces).last_hidden_state.mean(1)
        with Bench(model, training=[training.view(self.fit, self.length)]).swapped(
            attention_of(mechanism)
        ):
            cosine = F.cosine_similarity(model(input_ids=pieces).last_hidden_state.mean(1), exact)
        yield {"cosine": cosine.tolist(), "mean": float(cosine.mean())}


# ---- a vision transformer


@checked("task")
class SwapImages(SwapMeasurement):
    """task=swap_images: cosine of a vision transformer's outputs to exact attention's.

    The input is `images` validation images of `size` pixels. Attention is fitted to `fit` training images.
    """

    metric, lower_is_better = "mean", False

    def __init__(self, model: FileName, dataset: str, size: Count, images: Count, fit: Count):
        self.model = model
        self.dataset = dataset
        self.size = size
        self.images = images
        self.fit = fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        import timm

        model = timm.create_model(
            f"local-dir:{folder_of(self.model)}", pretrained=True, img_size=self.size
        ).eval()
        mean, deviation = (
            torch.tensor(model.pretrained_cfg[name]).view(3, 1, 1) for name in ("mean", "std")
        )
        splits = images.load(self.dataset)

        def batch(split: str, count: int) -> Tensor:
            places = np.linspace(0, len(splits[split].labels) - 1, count).astype(int)
            pixels = np.stack([images.square_image(splits[split], i, self.size, 3) for i in places])
            return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / deviation

        judged = batch("val", self.images)
        exact = model(judged)
        with Bench(model, training=[batch("train", self.fit)]).swapped(attention_of(mechanism)):
            cosine = F.cosine_similarity(model(judged), exact)
        yield {"cosine": cosine.tolist(), "mean": float(cosine.mean())}
