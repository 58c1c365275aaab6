"""What other attention makes of a pretrained language model: texts, passages said again, needles, lists, and answers.

A row is read once with each attention, and what exact attention makes of it is kept for those that follow in the
process. Models are those of `python -m crt_exp.data fetch`, or folders.
Legend: L tokens of a row, n answers of w tokens.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from crt_exp import mechanism_text
from crt_exp.config import unknown
from crt_exp.data.text import lines_of, official_file
from crt_exp.pretrained.published import fetched
from crt_exp.advice.bench import Bench, quiet
from crt_exp.advice.bench_pieces import AT_ONCE, UNSURE, TextBench
from crt_exp.measure.recall import attention_of

APART = 8192                  # tokens of the text between the beginnings of two rows, so that lengths share their texts
CHARACTERS = 1_500_000        # of a split that are read
SEGMENT = 64                  # tokens that are said again at one distance
ANSWER = 64                   # tokens of a greedy answer
FITTED, FITTED_ROWS = 1024, 2                        # tokens and number of rows that attention is fitted to
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


def plain(model: str, length: int, seed: int) -> Row:
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


def needle(model: str, length: int, seed: int) -> Row:
    """One pass key, somewhere in a text, that is asked for behind it in the model's own format of a chat."""
    return keys(model, length, seed, 1)


def pairs(model: str, length: int, seed: int) -> Row:
    """Eight of them, asked for in another order."""
    return keys(model, length, seed, 8)


def keys(model: str, length: int, seed: int, count: int) -> Row:
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


ROWS = {made.__name__: made for made in (plain, repeated, distances, needle, pairs, answer)}


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
def arranged(arm: str, bench: Bench, whole: nn.Module, seed: int) -> Iterator[nn.Module]:
    """The whole model, of which the bench's has the arm's attention meanwhile; for "exact dtype=bfloat16" a copy that
    computes in that type, which shows what else is accepted for speed."""
    name, options = mechanism_text.read(arm)
    if name == "exact" and options:
        yield in_type(whole, **options)
        return
    with bench.swapped(attention_of(arm, seed=seed)), quiet():
        yield whole


def in_type(model: nn.Module, dtype: str) -> nn.Module:
    """A copy with parameters of that type. Frequencies of positions, which are none, stay float32, as in a model that
    is loaded so. Raises ConfigError for a type that is not known."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, [*DTYPES])
    made = deepcopy(model)
    for each in made.parameters():
        each.data = each.data.to(DTYPES[dtype])
    return made


@torch.no_grad()
def readings(arm: str, model: str, row: str, length: int, seed: int) -> Iterator[dict[str, Any]]:
    """What `compared` says of an attention."""
    made, exact = exact_of(model, row, length, seed)
    found = exact
    if arm != "exact":
        bench = bench_of(model, made, length)
        with arranged(arm, bench, bench.model, seed) as reader:
            found = read(reader, made)
    yield from compared(made, found, exact)


def compared(row: Row, found: Reading, exact: Reading) -> Iterator[dict[str, Any]]:
    """Of each place of the axis, `x`: nats a token and what of it is `above` exact attention; the share of answers of
    which each token is the likeliest, `right`; the share of tokens at which it is the same as with exact attention,
    `agrees`, and how many go before the first where it is not, `kept`."""
    sizes = [each.numel() for each in row.asked.values()]
    split = zip(row.asked.items(), *(each.split(sizes) for each in (found.nats, found.best, exact.nats, exact.best)))
    for (x, asked), nats, best, exact_nats, exact_best in split:
        same = best == exact_best
        yield {"x": x, "nats": float(nats.mean()), "above": float((nats - exact_nats).mean()),
               "right": float((best.view_as(asked) == row.ids[0, asked]).all(-1).float().mean()),
               "agrees": float(same.float().mean()), "kept": int(same.long().cumprod(0).sum())}


def times(arm: Mapping[str, str], model: str, length: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Milliseconds of the layers for one row in each round, in which all take their turn, and MiB at the peak."""
    row = plain(model, length, seed)
    bench, arms = bench_of(model, row, length), {name: attention_of(each) for name, each in arm.items()}
    spent = bench.times(arms, row.ids, rounds, torch.no_grad()(bench.body))
    return [{"arm": name, "ms": each, "mib": bench.memory(arms[name], row.ids)} for name, each in spent.items()]
