"""Times of estimators of features, in turns."""

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.exceptions import DataDimensionalityWarning

from crt_exp.config import construct
from crt_exp.times import by_part, geometric_mean, in_turns, milliseconds


def estimators(arms: Mapping[str, Mapping[str, Any]], rows: int, columns: int, dtype: str, rounds: int, rest: float,
               seed: int) -> Iterator[dict[str, Any]]:
    """arm, fit, transform: the geometric means over rounds, which go on where those of the seed before ended.

    arms: of scikit-learn's estimators, `_target_` and arguments; "features" is the mechanism of RandomFeatures. rest:
    seconds between timings, in which the threads of the library before stop spinning.
    """
    warnings.filterwarnings("ignore", category=DataDimensionalityWarning)  # a projection may widen its input as maps do
    X = np.random.default_rng(0).normal(size=(rows, columns)).astype(dtype)
    models = {name: estimator(**given) for name, given in arms.items()}
    for model in models.values():
        model.fit(X[:1000]).transform(X[:1000])

    def steps(model: Any) -> dict[str, float]:
        spent = {}
        for step in ("fit", "transform"):
            time.sleep(rest)
            spent[step] = milliseconds(getattr(model, step), X)
        return spent

    taken: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for turn in range(seed * rounds, (seed + 1) * rounds):  # another arm is first in every round
        for name, values in in_turns(models, 1, steps, warm=0, turn=turn).items():
            taken[name] += values
    for name, each in taken.items():
        yield {"arm": name} | {step: geometric_mean(times) for step, times in by_part(each).items()}


def estimator(features: str | None = None, **given: Any) -> Any:
    return construct(given | ({} if features is None else {"mechanism": features}), random_state=0)
