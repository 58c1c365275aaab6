"""Kernel regression on tables by every map, scikit-learn's, and controls: a probe of task=uci, and what follows of it.

A unit is a random split, whose value is the mean over draws of the noise. Sigma is tuned on the validation part of each
split; the test part is read once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.dummy import DummyClassifier
from sklearn.kernel_approximation import Nystroem, RBFSampler

from crt_exp.config import choices
from crt_exp.mechanism import Mechanism
from crt_exp.probes.cells import Draw
from crt_exp.probes.uci import UCI

PEERS = {"RBFSampler": RBFSampler, "Nystroem": Nystroem}
CHOICE, AVERAGE = "the choice of validation", "average"


class Accuracies(UCI):
    """Accuracy and validation, in percent, of each split, and sigma of each draw.

    peer: a name of PEERS, or "majority", in the place of the mechanism's map; columns: of a peer.
    """

    def __init__(self, dataset: str, coding: str, split: Sequence[float], sigmas: Sequence[float], repeats: int,
                 draws: int = 1, peer: str | None = None, columns: int = 0):
        super().__init__(dataset, coding, "standard", split, repeats, sigmas, draws)
        self.peer, self.columns = peer, columns

    def records(self, mechanism: Mechanism, seed: int, done: Sequence[dict] = ()) -> Iterator[dict[str, Any]]:
        found = [record for record in super().records(mechanism, seed, done) if record["split"] == "split"]
        means = {ours: np.reshape([100 * record[theirs] for record in found], (self.repeats, -1)).mean(1).tolist()
                 for ours, theirs in (("accuracy", "accuracy"), ("validation", "validation_accuracy"))}
        yield means | {"sigma": [record["sigma"] for record in found]}

    def draws_of(self, mechanism: Mechanism) -> int:
        return super().draws_of(mechanism) if self.peer is None else self.draws

    def estimator(self, mechanism: Mechanism, sigma: float, seed: int) -> Any:
        if self.peer is None:
            return super().estimator(mechanism, sigma, seed)
        if self.peer == "majority":
            return DummyClassifier(strategy="most_frequent")
        return PeerClassifier(PEERS[self.peer](gamma=sigma**2 / 2, n_components=self.columns, random_state=seed))


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


# ---- what follows of all draws


def chosen(draws: Sequence[Draw]) -> Iterator[Draw]:
    """The test accuracy of each split's own choice of map and coding ("car", or "car, onehot"), which its validation
    part makes; of the first of equals."""
    valid: dict[tuple[str, Any], list[Draw]] = {}
    tested = {(draw.setting, draw.arm, draw.unit): draw for draw in draws if draw.metric == "accuracy"}
    for draw in draws:
        if draw.metric == "validation" and draw.arm in choices("features"):
            valid.setdefault((draw.setting.partition(", ")[0], draw.unit), []).append(draw)
    for (dataset, unit), each in valid.items():
        best = max(each, key=lambda draw: draw.value)
        yield replace(tested[best.setting, best.arm, unit], setting=dataset, arm=CHOICE, seconds="")


def averages(draws: Sequence[Draw]) -> Iterator[Draw]:
    """Over all data sets, with categories in documented order, of the splits that all have."""
    of: dict[tuple[str, Any], list[Draw]] = {}
    for draw in draws:
        if draw.metric == "accuracy" and ", " not in draw.setting:
            of.setdefault((draw.arm, draw.unit), []).append(draw)
    most = max(map(len, of.values()))
    for each in of.values():
        if len(each) == most:
            yield replace(each[0], setting=AVERAGE, value=float(np.mean([draw.value for draw in each])), seconds="")
