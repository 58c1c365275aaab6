"""What other attention makes of pretrained models without training: task=swap_text, a language model on new text,
repeated passages, pass keys and answers; task=swap_embeddings, an encoder of sentences and paragraphs.

A row is read once with each attention, and what exact attention makes of it is kept for those that follow in the
process. Models are those of `python -m crt_exp.data fetch`, or folders.
Legend: L tokens of a row, n answers of w tokens, B texts, h the width of states.
"""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from crt_exp.advice.bench import Bench, quiet
from crt_exp.advice.bench_pieces import AT_ONCE, UNSURE, TextBench
from crt_exp.data import glue
from crt_exp.data.text import lines_of, local_blocks, official_file
from crt_exp.hints import Count
from crt_exp.measure.base import SwapMeasurement
from crt_exp.measure.recall import attention_of
from crt_exp.measure.texts import FOLDER
from crt_exp.mechanism import Mechanism
from crt_exp.pretrained.published import fetched
from crt_exp.schema import checked

APART = 8192                  # tokens of the text between the beginnings of two rows, so that lengths share their texts
CHARACTERS = 1_500_000        # of a split that are read
SEGMENT = 64                  # tokens that are said again at one distance
ANSWER = 64                   # tokens of a greedy answer
FITTED, FITTED_ROWS = 1024, 2                        # tokens and number of rows that attention is fitted to
TOGETHER = 32                 # texts of one length
SENTENCES, PARAGRAPHS = 64, 8   # that attention is fitted to
NEAREST, TENTHS = 10, 10      # paragraphs that are retrieved; parts of STS-B
NAMES = ("Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Lukas",
         "Marta", "Nils", "Olga", "Paul")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = "{text}"               # stands for what a user says in a chat


class Opened(NamedTuple):
    """A model in eval mode and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def encoded(self, text: str) -> Tensor:
        """(n,), without marks of its own."""
        return torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
                            dtype=torch.long)


class Row(NamedTuple):
    """ids (1, L); asked: a place on the page's axis -> the answers that are judged there, (n, w) indices of ids."""

    ids: Tensor
    asked: dict[float | str, Tensor]

    @property
    def places(self) -> Tensor:
        return torch.cat([each.flatten() for each in self.asked.values()])


class Reading(NamedTuple):
    """Of the places of a row, one after the other: the losses of their tokens, nats, and the tokens that were thought
    most likely."""

    nats: Tensor
    best: Tensor


def folder_of(model: str) -> Path:
    """Raises DataError, with the command that brings it, for a model that was not fetched."""
    return fetched(model) or Path(model)


@lru_cache(maxsize=1)
def opened(model: str) -> Opened:
    folder = folder_of(model)
    return Opened(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
                  AutoTokenizer.from_pretrained(folder))


# ---- texts


def plain_text(split: str) -> str:
    """Of WikiText-2 as it was before it was cut into words."""
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
    return opened(model).encoded(plain_text(split))


def passage(model: str, split: str, seed: int, length: int) -> Tensor:
    """(length,) from a place of its own. Raises ValueError where the text ends before."""
    text, first = tokens(model, split), seed * APART
    if first + length > len(text):
        raise ValueError(f"row {seed} of {length} tokens ends at token {first + length}, and the {split} text of "
                         f"WikiText-2 has {len(text)}: take fewer seeds")
    return text[first:first + length]


# ---- rows


def new(model: str, length: int, seed: int) -> Row:
    return Row(passage(model, "valid", seed, length)[None], {"": torch.arange(1, length).unsqueeze(1)})


def repeated(model: str, length: int, seed: int) -> Row:
    """The second half is the first again, and judged but for its beginning."""
    half = length // 2
    ids = passage(model, "valid", seed, half).repeat(2)
    return Row(ids[None], {"": torch.arange(half + UNSURE, 2 * half).unsqueeze(1)})


def distances(model: str, length: int, seed: int) -> Row:
    """The second half has the segments of the first in reverse order: each place of the axis is a power of two, of
    distances above half of it."""
    segments = passage(model, "valid", seed, length // 2).split(SEGMENT)
    asked: dict[float | str, list[Tensor]] = {}
    for j in range(len(segments)):
        begin = (len(segments) + j) * SEGMENT
        far = 2 ** ((2 * j + 1) * SEGMENT - 1).bit_length()
        asked.setdefault(far, []).append(torch.arange(begin + UNSURE, begin + SEGMENT))
    return Row(torch.cat([*segments, *segments[::-1]])[None],
               {far: torch.cat(each).unsqueeze(1) for far, each in asked.items()})


def pass_keys(model: str, length: int, seed: int, count: int) -> Row:
    """Pass keys, somewhere in a text, that are asked for behind it in another order, in the model's own format of a
    chat."""
    start, draw = opened(model), random.Random(1000 * count + seed)
    names = draw.sample(NAMES, count)
    said = {name: f"{draw.randrange(10**5):05d}" for name in names}
    before, after = chat(start.tokenizer)
    facts = [start.encoded(f"\nThe pass key of {name} is {said[name]}.\n") for name in names]
    asked = draw.sample(names, count)
    head = start.encoded(f"{before}Read this text and remember the pass keys in it.\n\n")
    tail = [start.encoded(f"\n\nWhat is the pass key of {' and of '.join(asked)}?{after}")]
    answers: list[Tensor] = []                                 # each with how far it is from the first of the tail
    for name in asked:
        tail.append(start.encoded(f"The pass key of {name} is "))
        digits = torch.cat([start.encoded(digit) for digit in said[name]])
        answers.append(sum(map(len, tail)) + torch.arange(len(digits)))
        tail += [digits, start.encoded(".\n")]
    room = length - sum(map(len, [head, *facts, *tail]))
    if room < count:
        raise ValueError(f"{count} pass keys and their questions take {length - room} tokens, and rows have {length}")
    text = hidden_in(passage(model, "valid", seed, room), facts, sorted(draw.sample(range(room), count)))
    ids = torch.cat([head, text, *tail])
    return Row(ids[None], {"": torch.stack(answers) + len(head) + len(text)})


def hidden_in(text: Tensor, facts: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    return torch.cat([cut[0], *(each for fact, part in zip(facts, cut[1:]) for each in (fact, part))])


def chat(tokenizer: Any) -> tuple[str, str]:
    """What stands before and behind the words of a user."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": HERE}], tokenize=False,
                                         add_generation_prompt=True)
    before, _, after = text.partition(HERE)
    return before, after


@torch.no_grad()
def answer(model: str, length: int, seed: int) -> Row:
    """A text with exact attention's greedy continuation."""
    prompt = passage(model, "valid", seed, length - ANSWER)[None]
    ids = opened(model).model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER,
                                       min_new_tokens=ANSWER, do_sample=False)
    return Row(ids, {"": torch.arange(length - ANSWER, length).unsqueeze(0)})


ROWS = {"new": new, "repeated": repeated, "distances": distances, "pass_key": partial(pass_keys, count=1),
        "pass_keys": partial(pass_keys, count=8), "answer": answer}


# ---- what is measured


@lru_cache(maxsize=4)
def exact_of(model: str, row: str, length: int, seed: int) -> tuple[Row, Reading]:
    """A row, and what the model makes of it."""
    made = ROWS[row](model, length, seed)
    return made, read(opened(model).model, made)


@torch.no_grad()
def read(model: nn.Module, row: Row) -> Reading:
    states = model.base_model(input_ids=row.ids, use_cache=False).last_hidden_state[0, row.places - 1]
    head, wanted, nats, best = model.get_output_embeddings(), row.ids[0, row.places], [], []
    for part, labels in zip(states.split(AT_ONCE), wanted.split(AT_ONCE)):
        logits = head(part).float()
        nats.append(F.cross_entropy(logits, labels, reduction="none").double())
        best.append(logits.argmax(-1))
    return Reading(torch.cat(nats), torch.cat(best))


def bench_of(model: str, row: Row, length: int) -> TextBench:
    """Attention is fitted to rows of the training text."""
    fitted_to = [passage(model, "train", i, min(length, FITTED)) for i in range(FITTED_ROWS)]
    return TextBench(opened(model).model, row.ids, torch.stack(fitted_to))


@contextmanager
def arranged(method: str | Mechanism, bench: Bench, whole: nn.Module, seed: int, dtype: str | None = None
             ) -> Iterator[nn.Module]:
    """The whole model, of which the bench's has this attention meanwhile; with `dtype` a copy that computes in that
    type with exact attention, which shows what else is accepted for speed."""
    if dtype is not None:
        yield in_type(whole, dtype)
        return
    with bench.swapped(attention_of(method, seed=seed)), quiet():
        yield whole


def in_type(model: nn.Module, dtype: str) -> nn.Module:
    """A copy with parameters of that type. Frequencies of positions, which are none, stay float32, as in a model that
    is loaded so."""
    made = deepcopy(model)
    for each in made.parameters():
        each.data = each.data.to(DTYPES[dtype])
    return made


@checked("task")
class SwapText(SwapMeasurement):
    """task=swap_text: a language model on one row of a kind, number `seed`. Of each `distance` of kind=distances, else
    one row: `nats` a token, and what of it is `above` exact attention; the share of answers of which each token is the
    likeliest, `right`; the share of tokens at which it is the same as with exact attention, `agrees`, and how many go
    before the first where it is not, `kept`. With dtype the whole model computes in that type, with exact attention."""

    metric = "above"

    def __init__(self, model: str, kind: Literal[*ROWS], length: Count, baseline: str | None,
                 dtype: Literal[*DTYPES] | None):
        self.model, self.kind, self.length, self.baseline, self.dtype = model, kind, length, baseline, dtype

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        row, exact = exact_of(self.model, self.kind, self.length, seed)
        found = exact
        if not mechanism.is_exact or self.baseline or self.dtype:
            bench = bench_of(self.model, row, self.length)
            with arranged(self.baseline or mechanism, bench, bench.model, seed, self.dtype) as reader:
                found = read(reader, row)
        yield from compared(row, found, exact)


def compared(row: Row, found: Reading, exact: Reading) -> Iterator[dict[str, Any]]:
    sizes = [each.numel() for each in row.asked.values()]
    split = zip(row.asked.items(), *(each.split(sizes) for each in (found.nats, found.best, exact.nats, exact.best)))
    for (x, asked), nats, best, exact_nats, exact_best in split:
        same = best == exact_best
        yield {"distance": x, "nats": float(nats.mean()), "above": float((nats - exact_nats).mean()),
               "right": float((best.view_as(asked) == row.ids[0, asked]).all(-1).float().mean()),
               "agrees": float(same.float().mean()), "kept": int(same.long().cumprod(0).sum())}


# ---- encoders of sentences and paragraphs


@lru_cache(maxsize=1)
def encoder(model: str) -> tuple[nn.Module, Any]:
    folder = folder_of(model)
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def alike(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of rows of one length, and their tokens (B, L)."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    for same in by_length.values():
        for i in range(0, len(same), TOGETHER):
            part = same[i:i + TOGETHER]
            yield part, torch.tensor([rows[each] for each in part])


@torch.no_grad()
def states(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean state of each, (n, h)."""
    found = [(i, model(input_ids=ids).last_hidden_state.mean(1)) for i, ids in alike(rows)]
    order = torch.tensor([each for i, _ in found for each in i])
    return torch.cat([each for _, each in found])[order.argsort()]


@lru_cache(maxsize=4)
def blocks(model: str, split: str, length: int) -> Tensor:
    """(n, length), pieces of WikiText-2 with the model's marks."""
    rows = local_blocks(official_file("wikitext2", split), encoder(model)[1], length, FOLDER / "tokens")
    return torch.from_numpy(rows.astype(np.int64))


@lru_cache(maxsize=4)
def paragraphs(model: str, split: str, length: int, count: int) -> list[list[int]]:
    """The first `length` tokens of the first so many paragraphs that have as many. Raises ValueError for fewer."""
    found: list[list[int]] = []
    for line in lines_of([official_file("wikitext2", split)]):
        ids = encoder(model)[1](line.strip(), truncation=True, max_length=length)["input_ids"]
        found += [ids] if len(ids) == length else []
        if len(found) == count:
            return found
    raise ValueError(f"the {split} text of WikiText-2 has {len(found)} paragraphs of {length} tokens, not {count}")


@checked("task")
class SwapEmbeddings(SwapMeasurement):
    """task=swap_embeddings: mean states of an encoder. kind=pairs: Spearman's correlation of the scores of STS-B (dev)
    with the cosine of the states of a pair, over all, `all_pairs`, and over each tenth, `spearman`. kind=texts:
    `cosine` of the state of each of `texts` pieces of WikiText-2 of `length` tokens with exact attention's.
    kind=paragraphs: of each of so many paragraphs the share of its nearest ten, by the cosine with exact attention,
    that stay so, `nearest`."""

    metric, lower_is_better = "mean", False

    def __init__(self, model: str, kind: Literal["pairs", "texts", "paragraphs"], length: Count, texts: Count,
                 baseline: str | None):
        self.model, self.kind, self.length, self.texts, self.baseline = model, kind, length, texts, baseline

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        made, tokenizer = encoder(self.model)

        def states_of(method: str | Mechanism, rows: Sequence[Sequence[int]], train: Sequence[Sequence[int]]) -> Tensor:
            bench = Bench(made, training=[ids for _, ids in alike(train)])
            with bench.swapped(attention_of(method, seed=seed)):
                return states(made, rows)

        method = self.baseline or mechanism
        if self.kind == "pairs":
            given, train = glue.load("sts-b", "dev"), glue.load("sts-b", "train").subsample(SENTENCES)
            rows = tokenizer([*given.sentence1, *given.sentence2])["input_ids"]
            first, second = states_of(method, rows, tokenizer(train.sentence1)["input_ids"]).chunk(2)
            cosines, scores = F.cosine_similarity(first, second).numpy(), np.array(given.labels)
            by_part = [float(spearmanr(cosines[i::TENTHS], scores[i::TENTHS])[0]) for i in range(TENTHS)]
            every = float(spearmanr(cosines, scores)[0])
            yield {"spearman": by_part, "all_pairs": every, "mean": every}
            return
        if self.kind == "texts":
            rows, train = (blocks(self.model, split, self.length) for split in ("valid", "train"))
            rows, train = rows[::max(len(rows) // self.texts, 1)][:self.texts].tolist(), train[:4].tolist()
            exact, found = (states_of(each, rows, train) for each in ("exact", method))
            values = {"cosine": F.cosine_similarity(found, exact)}
        else:
            rows, train = (paragraphs(self.model, split, self.length, count)
                           for split, count in (("valid", self.texts), ("train", PARAGRAPHS)))
            exact, found = (nearest(states_of(each, rows, train)) for each in ("exact", method))
            values = {"nearest": (exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean(1)}
        yield {key: each.tolist() for key, each in values.items()} | {"mean": float(*map(torch.mean, values.values()))}


def nearest(found: Tensor) -> Tensor:
    """(n, NEAREST): of each row those of the largest cosine with it, itself apart."""
    unit = F.normalize(found, dim=-1)
    return (unit @ unit.mT).fill_diagonal_(-torch.inf).topk(min(NEAREST, len(unit) - 1), -1).indices
