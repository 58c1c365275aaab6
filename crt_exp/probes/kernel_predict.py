"""The model that a run of task=kernel keeps, and its predictions for the rows of other files, a chunk at a time.

Legend: n rows, d columns.
"""

import csv
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.row_files import check_names, open_rows
from crt_exp.probes.held_out import Z
from crt_exp.probes.reading import Coded, Model, Reading, Scale
from crt_exp.ridge import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.stored import json_object
from crt_exp.whole_files import whole

WEIGHTS, INPUTS = "model.safetensors", "kernel.json"
ROWS = 8192  # of a chunk


def keep(directory: Path, reading: Reading, coded: Coded, target: str) -> None:
    """What `load` reads. A map of the user's own, which no file can hold, is told and costs the run nothing else."""
    try:
        reading.model.save(directory / WEIGHTS)
    except ValueError as error:
        warnings.warn(f"the model is not kept: {error}", stacklevel=2)
        return
    scale = reading.scale
    described = {"target": target, "classes": isinstance(reading.model, RandomFeatureClassifier),
                 "columns": [*coded.columns], "levels": dict(coded.levels), "mean": scale.mean.tolist(),
                 "width": scale.width.tolist(), "precision": scale.dtype.name}
    with whole(directory / INPUTS) as part:
        part.write_text(json.dumps(described, indent=1))


@dataclass(frozen=True)
class Kept:
    """The model of a run, and what makes its rows of the columns of a file."""

    model: Model
    coded: Coded
    scale: Scale
    target: str

    @property
    def header(self) -> list[str]:
        more = map(str, self.model.classes_) if isinstance(self.model, RandomFeatureClassifier) else ("low", "high")
        return [self.target, *more]

    def rows(self, columns: dict[str, np.ndarray]) -> list[list[Any]]:
        """Means and the ends of 95% intervals; or labels and the probability of each class."""
        X = self.scale(self.coded(columns))
        if isinstance(self.model, RandomFeatureClassifier):
            shares = self.model.predict_proba(X)
            labels = self.model.classes_[shares.argmax(1)]
            return [[label, *map(short, row)] for label, row in zip(labels.tolist(), shares.tolist())]
        mean, std = self.model.predict(X, return_std=True)
        return [[*map(short, row)] for row in np.stack([mean, mean - Z * std, mean + Z * std], 1).tolist()]


def short(number: float) -> str:
    return f"{number:.6g}"


def load(run: Path) -> Kept:
    """Raises DataError where a run has not ended, or holds something else."""
    if not (run / INPUTS).is_file():
        raise DataError(f"run={run} holds no kernel machine: it has not ended, or was made before runs kept theirs")
    described = json_object(run / INPUTS)
    try:
        kind = RandomFeatureClassifier if described["classes"] else RandomFeatureRidge
        scale = Scale(*(np.array(described[name], dtype=np.float64) for name in ("mean", "width")),
                      np.dtype(described["precision"]))
        kept = Kept(kind.load(run / WEIGHTS), Coded(described["columns"], described["levels"]), scale,
                    described["target"])
        if not kept.model.n_features_in_ == len(kept.coded.names) == len(scale.mean) == len(scale.width):
            raise ValueError("its columns are not those of the model")
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise DataError(f"{run / INPUTS} describes no kernel machine: {error}") from None
    return kept


def predict(run: Path, source: str, output: str | None) -> None:
    """A csv file, or lines on the terminal: a header, then a line for each row of `source`. Raises DataError."""
    kept, file = load(run), open_rows(source)
    check_names(file, dict.fromkeys(kept.coded.columns, f"run={run}"))
    with opened(output) as place:
        writer = csv.writer(place)
        writer.writerow(kept.header)
        for chunk in file.chunks(kept.coded.columns, [*kept.coded.levels], ROWS, lambda _: True):
            writer.writerows(kept.rows(chunk.columns))


@contextmanager
def opened(output: str | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with whole(Path(output).expanduser()) as part, part.open("w", newline="") as file:
        yield file
