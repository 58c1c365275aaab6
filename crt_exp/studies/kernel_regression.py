"""What `make table1` and `make demo` measure: kernel regression on tables by every map, scikit-learn's, and controls.

A setting is a data set with its coding of categories; a unit is a random split, whose value is the mean over draws of
the noise. Sigma is tuned on the validation part of each split; the test part is read once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.kernel_approximation import Nystroem, RBFSampler

from crt_exp import drawing
from crt_exp.mechanism import Mechanism
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.uci import UCI

WITHOUT = {"smreg": "it estimates a kernel of its own, not the one that is tuned here and that `exact` stands for",
           **drawing.APART}
PEERS = {"RBFSampler": RBFSampler, "Nystroem": Nystroem}
MAJORITY, CHOICE, AVERAGE = "majority", "the choice of validation", "average"
SEED = 0


@dataclass(frozen=True)
class Size:
    """What one SIZE stands for. datasets: name -> codings; few: data sets with half the splits, for their test parts
    are large; peers: scikit-learn's maps too, and all maps at m columns as well."""

    datasets: Mapping[str, Sequence[str]]
    split: Sequence[float]
    sigmas: Sequence[float]
    repeats: int
    m: int = 128
    draws: int = 1
    few: Sequence[str] = ()
    peers: bool = False
    workers: int | None = None

    @cached_property
    def arms(self) -> dict[str, tuple[str, int]]:
        """arm -> (name, m)."""
        maps = drawing.maps(WITHOUT)
        arms = {name: (name, self.m) for name in ("exact", *maps, MAJORITY)}
        if self.peers:
            arms |= {f"{name} m={self.m // 2}": (name, self.m // 2) for name in maps if width(name) == 2}
            arms |= {f"{name} m={k * self.m}": (name, k * self.m) for name in PEERS for k in (1, 2)}
        return arms

    def key(self, dataset: str, coding: str, arm: str) -> Key:
        name, m = self.arms[arm]
        return {"dataset": dataset, "coding": coding, "name": name, "m": m, "split": [*self.split],
                "sigmas": [*self.sigmas], "repeats": self.repeats // (1 + (dataset in self.few)), "draws": self.draws}


def width(name: str) -> int:
    return Mechanism.of(features=name).map("gaussian").width(1)


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics accuracy and validation, in percent, and sigma of each draw; setting "average": over all data sets with
    their first coding, of the splits that all have; arm "the choice of validation": of each split's own map."""
    setting = Size(**size)
    keys = {(dataset, coding, arm): setting.key(dataset, coding, arm)
            for dataset, codings in setting.datasets.items() for coding, arm in product(codings, setting.arms)}
    cells = Cells(name, sources, keep).fill([*keys.values()], accuracies, name, setting.workers)
    for (dataset, coding, arm), key in keys.items():
        for metric, values in cells[key].items():
            for unit, value in enumerate(values):
                yield cells.draw(key, named(dataset, coding), arm, metric, value, unit)
    for dataset, codings in setting.datasets.items():
        yield from choices(cells, keys, dataset, codings)
    for arm in setting.arms:
        first = [keys[dataset, codings[0], arm] for dataset, codings in setting.datasets.items()]
        for unit, values in enumerate(zip(*(cells[key]["accuracy"] for key in first))):
            yield cells.draw(first[0], AVERAGE, arm, "accuracy", float(np.mean(values)), unit)


def named(dataset: str, coding: str) -> str:
    return dataset if coding == "ordinal" else f"{dataset}, {coding}"


def choices(cells: Cells, keys: Mapping[tuple[str, str, str], Key], dataset: str,
            codings: Sequence[str]) -> Iterator[Draw]:
    """The test accuracy of each split's own choice of map and coding, which its validation part makes."""
    arms = [keys[dataset, coding, arm] for coding in codings for arm in drawing.maps(WITHOUT)]
    picks = np.argmax([cells[key]["validation"] for key in arms], 0)
    for unit, pick in enumerate(picks):
        yield cells.draw(arms[pick], dataset, CHOICE, "accuracy", cells[arms[pick]]["accuracy"][unit], unit)


def accuracies(dataset: str, coding: str, name: str, m: int, split: list[float], sigmas: list[float], repeats: int,
               draws: int) -> dict[str, list[float]]:
    task = Peers(dataset, coding, "standard", split, repeats, sigmas, draws)
    records = [record for record in task.records(mechanism(name, m), SEED) if record["split"] == "split"]
    means = {ours: np.reshape([100 * record[theirs] for record in records], (repeats, -1)).mean(1).tolist()
             for ours, theirs in (("accuracy", "accuracy"), ("validation", "validation_accuracy"))}
    return means | {"sigma": [record["sigma"] for record in records]}


def mechanism(name: str, m: int) -> Mechanism:
    if name in (*PEERS, MAJORITY):
        return Mechanism(name, {}, m=m)
    return Mechanism.parse(name) if name == "exact" else Mechanism.parse(name, m=m, sampler="orthogonal")


class Peers(UCI):
    """The task for the maps of scikit-learn and the majority class too."""

    def estimator(self, mechanism, sigma, seed):
        if mechanism.name == MAJORITY:
            return DummyClassifier(strategy="most_frequent")
        if mechanism.name not in PEERS:
            return super().estimator(mechanism, sigma, seed)
        return PeerClassifier(PEERS[mechanism.name](gamma=sigma**2 / 2, n_components=mechanism.m, random_state=seed))


class PeerClassifier:
    """The largest kernel sum, as KernelRegressionClassifier, with features Z of a scikit-learn transformer."""

    def __init__(self, transformer):
        self.transformer = transformer

    def fit(self, X, y):
        self.classes = np.unique(y)
        self.state = self.transformer.fit_transform(X).T @ (y[:, None] == self.classes).astype(X.dtype)
        return self

    def score(self, X, y) -> float:
        best = (self.transformer.transform(X) @ self.state).argmax(1)
        return float((self.classes[best] == y).mean())
