"""What `make recall` measures: heads in which a single far key matters, and a model that was trained to recall pairs.

The model is two layers of exact attention with rotary positions, trained here on task=recall from short rows to long
ones; its attention is then swapped without training.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from crt_exp.mechanism import Mechanism
from crt_exp.studies import associative, far_key, far_key_both, runs
from crt_exp.studies.cells import Cells, Draw

PLACE = Path("outputs/recall")
SOURCES = ("conf/task/recall.yaml", *runs.EXACT)
# tokens of a row, pairs, queries, rows of a batch, steps, learning rate
STAGES = ((16, 2, 6, 256, 400, 2e-3), (32, 4, 12, 128, 400, 2e-3), (64, 8, 24, 64, 500, 2e-3),
          (128, 16, 48, 32, 500, 2e-3), (256, 32, 64, 16, 500, 2e-3), (512, 64, 128, 8, 500, 2e-3),
          (2048, 64, 128, 4, 300, 5e-4), (8192, 64, 256, 2, 150, 5e-4))
OPTIONS = ("task=recall", "attention=exact", "task.symbols=256", "task.rows=512000", "task.evaluated=16",
           "trainer.eval_every=1000000", "trainer.select=last")
KINDS = {"iid keys": False, "keys in 32 clusters": True}
OPENED, SEEDS = (32, 128), 10
BOTH, BOTH_SEEDS = (512, 2048), 5
TRIALS = {"64 pairs in 2048 tokens": (2048, 64, 4), "64 pairs in 8192 tokens": (8192, 64, 2),
          "a needle in 2048 tokens": (2048, 1, 16), "a needle in 8192 tokens": (8192, 1, 8)}  # tokens, pairs, rows
MODEL_SEEDS, M = 8, 256
ATTENTIONS = ("exact", "uniform", "window block=64 first=16", "favorpp", "nearfar preset=bounded",
              "nearfar exact_until=64 open=64", "nearfar exact_until=1024")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings: KINDS, causal and in both directions (x: tokens, metric error), and TRIALS (metric accuracy); units are
    seeds."""
    cells = Cells(name, sources, keep)
    yield from in_both_directions(cells, name)
    keys = {place: {"length": place[1], "clustered": KINDS[place[0]], "seed": place[2], "opened": list(OPENED)}
            for place in product(KINDS, size["lengths"], range(SEEDS))}
    cells.fill([*keys.values()], far_key.errors, f"{name}: heads")
    for (kind, length, seed), key in keys.items():
        for arm, error in cells[key].items():
            yield cells.draw(key, kind, arm, "error", error, seed, length)
    yield from of_model(cells, str(runs.staged(PLACE, SOURCES, stages())))


def in_both_directions(cells: Cells, name: str) -> Iterator[Draw]:
    keys = {place: {"length": place[1], "clustered": KINDS[place[0]], "seed": place[2]}
            for place in product(KINDS, BOTH, range(BOTH_SEEDS))}
    cells.fill([*keys.values()], far_key_both.errors, f"{name}: both directions")
    for (kind, length, seed), key in keys.items():
        for arm, error in cells[key].items():
            yield cells.draw(key, f"{kind}, both directions", arm, "error", error, seed, length)


def of_model(cells: Cells, start: str) -> Iterator[Draw]:
    keys = {}
    for trial, attention, seed in product(TRIALS, ATTENTIONS, range(MODEL_SEEDS)):
        length, pairs, rows = TRIALS[trial]
        keys[trial, attention, seed] = {"start": start, "length": length, "pairs": pairs, "rows": rows, "seed": seed,
                                        "attention": attention, "m": M if Mechanism.parse(attention).draws else None}
    cells.fill([*keys.values()], associative.accuracy, "recall: rows")
    for (trial, attention, seed), key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, trial, attention, metric, value, seed)


def stages() -> list[list[str]]:
    """The command line of each, but for where it starts."""
    names = ("task.block", "task.pairs", "task.queries", "trainer.batch", "trainer.steps", "trainer.lr")
    return [[*OPTIONS, *(f"{name}={value}" for name, value in zip(names, stage))] for stage in STAGES]
