"""Pairs that were said once and are asked for, by a run of task=recall whose attention is swapped without training.

Legend: L tokens of a row, P pairs, V symbols.
"""

from functools import lru_cache

import torch

from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import LanguageModel
from crt_exp.studies.bench import fitted
from crt_exp.times import Watch
from crt_exp.tasks.recall import drawn

CALIBRATION = 4      # rows that codebooks and statistics are made of


@lru_cache(maxsize=1)
def kept_of(start: str) -> language.KeptLanguageModel:
    return language.load(start, "start")


@torch.no_grad()
def accuracy(start: str, length: int, pairs: int, rows: int, seed: int, attention: str, m: int | None = None,
             split: str = "test") -> dict[str, float]:
    """The share of the values that are right, of all pairs of so many rows, and milliseconds of a row."""
    model = swapped(start, length, pairs, attention, m)
    symbols, right, count = kept_of(start).symbols["values"], 0, 0
    with Watch() as watch:
        for i in range(rows):
            tokens, labels = map(torch.from_numpy, drawn(split, 1000 * seed + i, length, symbols, pairs, pairs))
            asked = labels >= 0
            chosen = model(tokens[None], chosen=asked[None])[:, :symbols].argmax(-1)
            right, count = right + int((chosen == labels[asked]).sum()), count + int(asked.sum())
    return {"accuracy": right / count, "ms": watch.ms / rows}


@lru_cache(maxsize=2)
def swapped(start: str, length: int, pairs: int, attention: str, m: int | None) -> LanguageModel:
    """The model with that attention, fitted to training rows where it has something to fit."""
    kept = kept_of(start)
    given = (drawn("train", i, length, kept.symbols["values"], pairs, pairs)[0] for i in range(CALIBRATION))
    return fitted(kept.build(Mechanism.parse(attention, m=m)), (torch.from_numpy(tokens)[None] for tokens in given))
