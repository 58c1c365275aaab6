"""What answers the tasks of GLUE without a model: the most frequent class, and the words that two sentences share."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from crt_exp.data import glue
from crt_exp.data.sources import task_folder
from crt_exp.mechanism import Mechanism
from crt_exp.measure.base import Measurement
from crt_exp.metrics import METRICS
from crt_exp.schema import checked

CUTS = 101  # quantiles of the overlap among which a class task chooses its cut


@checked("task")
class GLUEBaselines(Measurement):
    """task=glue_baselines: the metric of a task of GLUE on its dev split, of "majority class" (of scores the mean) and
    "word overlap" (of pairs of sentences). No attention has a part in it."""

    lower_is_better = False

    def __init__(self, dataset: str, data_dir: str | None = None):
        self.dataset, self.data_dir = dataset, data_dir
        self.metric = glue.task_of(dataset).metrics[0]

    def inputs(self) -> list:
        return [task_folder(glue.task_of(self.dataset).source.name, self.data_dir)]

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        for name, (answers, labels) in answers_of(self.dataset, self.data_dir).items():
            yield {"method": name, self.metric: float(METRICS[self.metric](answers, labels))}


def answers_of(data: str, data_dir: str | None = None) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Method -> its answers on the dev split, and the right ones."""
    train, dev = (glue.load(data, split, data_dir) for split in ("train", "dev"))
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
