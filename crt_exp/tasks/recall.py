"""Multi-query associative recall (Arora et al., 2023): values that were said once, after their keys, are asked for.

A row says P pairs of a key and its value, in any order, among noise, and asks Q times for one of them behind that: its
key, whose value comes next. With one pair it is a needle in a haystack. Attention that forgets single keys fails
here, however well it models text. Legend: L tokens of a row, P pairs, Q queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from crt_exp.config import ConfigError
from crt_exp.data.text import IGNORED
from crt_exp.options import Count, checked
from crt_exp.tasks.base import Batch, Plan
from crt_exp.tasks.sequences import SymbolTask

SPLITS = {"train": 0, "validation": 1, "test": 2}
NOISE = 64                         # symbols of what lies between
WIDTH = 128                        # of a new model, where nothing is said


@checked("task")
@dataclass(eq=False)
class Recall(SymbolTask):
    """See `conf/task/recall.yaml` for the options. Raises ConfigError for options that do not go together."""

    block: Annotated[int, Field(ge=8)]
    pairs: Count
    queries: Count | None
    symbols: Count
    rows: Count
    evaluated: Count

    metric, lower_is_better, counted = "accuracy", False, "queries"
    causal, length_option, ours = True, "block", "a run of task=recall of as many symbols"

    def __post_init__(self):
        self.predictable = self.symbols
        self.asked = self.pairs if self.queries is None else self.queries
        if self.pairs > self.symbols:
            raise ConfigError(f"task.pairs={self.pairs}: expected at most task.symbols={self.symbols}")
        if 2 * (self.pairs + self.asked) > self.block:
            raise ConfigError(f"task.block={self.block}: expected at least {2 * (self.pairs + self.asked)}, for "
                              f"{self.pairs} pairs and {self.asked} queries")
        self.load()
        if self.kept is None and self.preset is None:
            self.sizes = {"d": WIDTH} | dict(self.sizes)
        self.tied = False if self.tied is None and self.kept is None else self.tied
        self.describe(2 * self.symbols + NOISE, self.block, {"values": self.symbols, "noise": NOISE})

    # ---- rows

    def length(self, split: str) -> int:
        return self.rows if split == "train" else self.evaluated

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        for chosen in plan.rows(self.length(split), split):
            rows = [drawn(split, i, self.block, self.symbols, self.pairs, self.asked) for i in chosen]
            tokens, labels = (torch.from_numpy(np.stack(each)) for each in zip(*rows))
            yield {"tokens": tokens, "labels": labels}

    # ---- metrics

    @cached_property
    def unigram(self) -> np.ndarray:
        return np.full(self.symbols, 1 / self.symbols)


def drawn(split: str, i: int, length: int, symbols: int, pairs: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels (L,) of row i: values are the symbols from 0 on, then keys, then noise."""
    rng, n = np.random.default_rng([SPLITS[split], length, pairs, i]), symbols
    tokens, labels = rng.integers(2 * n, 2 * n + NOISE, length), np.full(length, IGNORED)
    keys, values, asked = n + rng.permutation(n)[:pairs], rng.integers(0, n, pairs), rng.integers(0, pairs, queries)
    said = length // 2 * pairs // (pairs + queries)                               # of the places, two tokens each
    places = 2 * rng.permutation(said)[:pairs]
    later = 2 * (said + rng.permutation(length // 2 - said)[:queries])
    tokens[places], tokens[places + 1] = keys, values
    tokens[later], tokens[later + 1] = keys[asked], values[asked]
    labels[later] = values[asked]
    return tokens, labels
