"""What `make bench-estimators` measures: fit and transform of RandomFeatures and of RBFSampler, in turns.

The control is GaussianRandomProjection: a product with a matrix, which every map computes as well, and no kernel.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from sklearn.exceptions import DataDimensionalityWarning
from sklearn.kernel_approximation import RBFSampler
from sklearn.random_projection import GaussianRandomProjection

from crt_exp import drawing
from crt_exp.estimators import RandomFeatures
from crt_exp.studies.cells import Cells, Draw
from crt_exp.times import by_part, in_turns, milliseconds

WITHOUT = drawing.DENSE | dict.fromkeys(("gerf", *drawing.HYBRIDS), "its features differ for the two sides of the "
                                        "kernel, which one transform cannot give")
PEER, CONTROL = "RBFSampler", "GaussianRandomProjection"
STEPS, DTYPES = ("fit", "transform"), ("float32", "float64")
REST = 0.2  # seconds between timings, in which the threads of the library before stop spinning


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings are dtypes, metrics fit and transform (ms, geometric mean over the rounds of a process, the unit)."""
    cells = Cells(name, sources, keep)
    keys = [{"dtype": dtype, "process": process, **{key: size[key] for key in ("rounds", "rows", "columns", "width")}}
            for process, dtype in product(range(size["processes"]), DTYPES)]
    cells.fill(keys, times, name, apart=True)
    for key in keys:
        for place, spent in cells[key].items():
            arm, step = place.split(": ")
            value = float(np.exp(np.log(spent).mean()))
            yield cells.draw(key, key["dtype"], arm, step, value, key["process"])


def times(dtype: str, process: int, rounds: int, rows: int, columns: int, width: int) -> dict[str, list[float]]:
    """"arm: step" -> ms of each round; the rounds of a process begin where the last one's ended."""
    warnings.filterwarnings("ignore", category=DataDimensionalityWarning)  # the control may widen its input as maps do
    X = np.random.default_rng(0).normal(size=(rows, columns)).astype(dtype)
    models = arms(width)
    for model in models.values():
        model.fit(X[:1000]).transform(X[:1000])
    spent: dict[str, list[dict[str, float]]] = {arm: [] for arm in models}
    for turn in range(process * rounds, (process + 1) * rounds):  # another arm is first in every round
        for arm, values in in_turns(models, 1, partial(steps, X=X), warm=0, turn=turn).items():
            spent[arm] += values
    return {f"{arm}: {step}": ms for arm, values in spent.items() for step, ms in by_part(values).items()}


def arms(width: int) -> dict[str, Any]:
    """To `width` columns; maps with two columns of a projection to twice as many too."""
    maps = drawing.maps(WITHOUT)
    doubled = [name for name in maps if drawing.feature_map(name).width(1) == 2]
    return {PEER: RBFSampler(gamma=0.005, n_components=width, random_state=0),
            CONTROL: GaussianRandomProjection(n_components=width, random_state=0),
            **{name: RandomFeatures(name, n_components=width, gamma=0.005, random_state=0) for name in maps},
            **{f"{name}, {2 * width} columns": RandomFeatures(name, n_components=2 * width, gamma=0.005, random_state=0)
               for name in doubled}}


def steps(model: Any, X: np.ndarray) -> dict[str, float]:
    return {step: rested(getattr(model, step), X) for step in STEPS}


def rested(call: Callable[..., Any], X: np.ndarray) -> float:
    time.sleep(REST)
    return milliseconds(call, X)
