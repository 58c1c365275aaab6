"""GLUE for `table2`: what two controls answer, scores of answers, and their differences with a paired bootstrap."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crt_exp.data import glue
from crt_exp.metrics import METRICS
from crt_exp.report.evidence import Interval, bootstrapped, over_runs

MAJORITY, OVERLAP = "majority class", "word overlap"
CUTS = 101                 # quantiles of the overlap among which a class task chooses its cut


def score(data: str, answers: Sequence[float], labels: Sequence[float]) -> float:
    """The paper's metric, in percent."""
    return 100 * METRICS[glue.TASKS[data].metrics[0]](answers, labels)


def controls(data: str) -> dict[str, Any]:
    """Labels of the dev split, and the answers of two controls that are fitted to the training split: its most frequent
    class (of scores, their mean); for pairs of sentences, which words they share. None where there is no pair."""
    train, dev = (glue.load(data, split) for split in ("train", "dev"))
    classes = bool(glue.TASKS[data].names)
    usual = int(np.bincount(train.labels).argmax()) if classes else float(np.mean(train.labels))
    found = {"labels": list(dev.labels), MAJORITY: [usual] * len(dev), OVERLAP: None}
    if dev.sentence2 is not None:
        shared = overlaps(dev)
        found[OVERLAP] = cut(data, overlaps(train), train.labels, shared) if classes else shared.tolist()
    return found


def overlaps(examples: glue.Examples) -> np.ndarray:
    """Words of both sentences over words of either, (n,)."""
    words = [[set(text.lower().split()) for text in texts] for texts in (examples.sentence1, examples.sentence2)]
    return np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*words)])


def cut(data: str, shared: np.ndarray, labels: Sequence[int], dev: np.ndarray) -> list[int]:
    """Classes of the dev split by whether the overlap lies above the cut, and in the sense, that are best in training;
    of three classes the first two alone."""
    cuts = np.quantile(shared, np.linspace(0, 1, CUTS))
    tried = [(score(data, (shared > at) == high, labels), at, high) for at in cuts for high in (True, False)]
    _, at, high = max(tried)
    return ((dev > at) == high).astype(int).tolist()


Runs = Mapping[int, Sequence[float]]  # seed -> answers


def difference(data: str, first: Runs, second: Runs, labels: Sequence[float]) -> Interval:
    """First minus second, points, mean over the seeds that both have, with chance by another training and by other
    examples. ValueError below two such seeds."""
    labels = np.asarray(labels)
    pairs = [(np.asarray(first[seed]), np.asarray(second[seed])) for seed in first if seed in second]

    def gaps(rows: np.ndarray) -> list[float]:
        return [score(data, a[rows], labels[rows]) - score(data, b[rows], labels[rows]) for a, b in pairs]
    examples = bootstrapped(lambda rows: float(np.mean(gaps(rows))), len(labels))
    return over_runs(gaps(np.arange(len(labels))), examples)


def best_control(data: str, found: dict[str, Any]) -> float:
    """The higher of the controls' scores."""
    return max(score(data, found[name], found["labels"]) for name in (MAJORITY, OVERLAP) if found[name] is not None)
