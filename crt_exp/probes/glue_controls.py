"""Answers to the tasks of GLUE without a model, fitted to the training split: its most frequent class (of scores, their
mean) and, for pairs of sentences, which words they share."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from crt_exp.data import glue
from crt_exp.metrics import METRICS

CUTS = 101         # quantiles of the overlap among which a class task chooses its cut


def scores(arm: str, data: str, seed: int) -> Iterator[dict[str, Any]]:
    """Of each way to answer (`arm`), the task's metric, as a fraction, under its name."""
    metric = glue.TASKS[data].metrics[0]
    for name, (answers, labels) in answers_of(data).items():
        yield {"arm": name, metric: float(METRICS[metric](answers, labels))}


def answers_of(data: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Control -> its answers on the dev split, and the right ones."""
    train, dev = (glue.load(data, split) for split in ("train", "dev"))
    classes = bool(glue.TASKS[data].names)
    usual = int(np.bincount(train.labels).argmax()) if classes else float(np.mean(train.labels))
    made = {"majority class": ([usual] * len(dev), list(dev.labels))}
    if dev.sentence2 is not None:
        shared = overlaps(dev)
        answers = cut(data, overlaps(train), train.labels, shared) if classes else shared.tolist()
        made["word overlap"] = (answers, list(dev.labels))
    return made


def overlaps(examples: glue.Examples) -> np.ndarray:
    """Words of both sentences over words of either, (n,)."""
    words = [[set(text.lower().split()) for text in texts] for texts in (examples.sentence1, examples.sentence2)]
    return np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*words)])


def cut(data: str, shared: np.ndarray, labels: Sequence[int], dev: np.ndarray) -> list[int]:
    """Classes of the dev split by whether the overlap lies above the cut, and in the sense, that are best in training;
    of three classes the first two alone."""
    metric, cuts = METRICS[glue.TASKS[data].metrics[0]], np.quantile(shared, np.linspace(0, 1, CUTS))
    tried = [(metric((shared > at) == high, labels), at, high) for at in cuts for high in (True, False)]
    _, at, high = max(tried)
    return ((dev > at) == high).astype(int).tolist()
