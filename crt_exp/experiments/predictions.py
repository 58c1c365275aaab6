"""Predictions of a run for each test example: predictions.csv.gz in the run directory.

Columns: `example` (its name or its number in the test data), `label` and `prediction`. Tasks may add columns that
identify a prediction, such as the random split.
"""

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crt_exp.atomic_write import atomic_path
from crt_exp.validation import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

PREDICTIONS = "predictions.csv.gz"
ANSWERS = ("label", "prediction")  # the other columns identify a prediction

Prediction = Mapping[str, Any]  # one row: values by column


def write_predictions(predictions: Sequence[Prediction], directory: Path) -> None:
    """Write the predictions of a run, atomically."""
    from pandas import DataFrame

    text = DataFrame(predictions).to_csv(index=False, lineterminator="\n")
    with atomic_path(directory / PREDICTIONS) as part:
        part.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_predictions(directory: Path) -> "DataFrame | None":
    """Read the predictions of a run, all as strings; None if the run wrote none.

    Raises ConfigError if the file is damaged.
    """
    from pandas import read_csv

    path = directory / PREDICTIONS
    try:
        frame = read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        return None
    except (EOFError, ValueError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: damaged ({error}); repeat the run in another folder") from None
    if not {"example", *ANSWERS} <= {*frame.columns}:
        raise ConfigError(f"{path}: expected the columns example, label and prediction")
    return frame
