"""The result rows of a page, outputs/report/<page>.csv: one measured value a row.

Columns: `sweep` (which sweep of the page made the row), those that the page needs (data set, method, m, step, ...),
`sample` (the unit of independence: a seed, pair, document or process; empty for a closed form), `metric`, `value`, and
where the value comes from: `seconds` of the run (on its first row), `commit`, `date`, `versions`.
"""

import gzip
import zlib
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.runner.run import write_atomic

FOLDER = Path("outputs/report")
ORIGIN = ("seconds", "commit", "date", "versions")
LARGEST = 2**20  # bytes of a file that is not compressed


class Rows:
    """A page's result rows. `select`, `values`, `paired` and `ratio` take column=value or column=[values]."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self._columns = {name: frame[name].to_numpy() for name in frame.columns if name not in ORIGIN}
        self._groups = frame.groupby(["metric", "method"], sort=False).indices

    def select(self, metric: str, method: str | None = None, **where: Any) -> pd.DataFrame:
        """The rows of a metric, in their order."""
        return self.frame.iloc[self._places(metric, method, where)]

    def values(self, metric: str, method: str, log: bool = False, **where: Any) -> pd.Series:
        """sample -> value, float64; the mean of several rows of a sample, of their logarithms with `log`."""
        places = self._places(metric, method, where)
        values = self._columns["value"][places].astype(float)
        return pd.Series(np.log(values) if log else values, self._columns["sample"][places]).groupby(
            level=0, sort=False).mean()

    def paired(self, first: str, second: str, metric: str, log: bool = False, **where: Any) -> pd.Series:
        """sample -> first - second, of the samples that both methods have; with `log` of their logarithms. A value
        without a sample, which involves no chance, is compared with each sample of the other method."""
        one, two = (self.values(metric, method, log, **where) for method in (first, second))
        one, two = _spread(one, two), _spread(two, one)
        return (one - two).dropna()

    def ratio(self, first: str, second: str, metric: str, **where: Any) -> pd.Series:
        """sample -> log of first / second; the exponential of its mean is the geometric mean of the ratios."""
        return self.paired(first, second, metric, log=True, **where)

    def methods(self, metric: str, **where: Any) -> list[str]:
        """The methods that have a metric, in the order of the rows."""
        return [*self.frame.iloc[self._places(metric, None, where)]["method"].unique()]

    def _places(self, metric: str, method: str | None, where: dict[str, Any]) -> np.ndarray:
        places = (np.flatnonzero(self._columns["metric"] == metric) if method is None else
                  self._groups.get((metric, method), np.empty(0, int)))
        for name, wanted in where.items():
            column = self._columns[name][places]
            empty = isinstance(wanted, str) and wanted == "" and column.dtype != object
            places = places[pd.isna(column) if empty else np.isin(column, wanted)
                            if isinstance(wanted, list | tuple | range) else column == wanted]
        return places


def _spread(values: pd.Series, other: pd.Series) -> pd.Series:
    return pd.Series(values.iloc[0], other.index) if [*values.index] == [""] and len(other) else values


def share(gain: pd.Series, whole: pd.Series) -> pd.Series:
    """Samples whose mean is mean(gain) / mean(whole), with the spread of this ratio (delta method)."""
    both = pd.DataFrame({"gain": gain, "whole": whole}).dropna()
    ratio = both["gain"].mean() / both["whole"].mean()
    return ratio + (both["gain"] - ratio * both["whole"]) / both["whole"].mean()


# ---- files


def read_rows(page: str, folder: Path = FOLDER) -> Rows:
    """Raises FileNotFoundError where a page has no rows, ValueError for a file that is cut off."""
    path = rows_path(page, folder)
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        if not text.endswith("\n"):
            raise ValueError("the last line has no end")
        frame = pd.read_csv(StringIO(text), keep_default_na=False, na_values={}, dtype={"sample": str, "versions": str},
                            low_memory=False)
        if frame.isna().any(axis=None):
            raise ValueError("a line has too few fields")
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: cut off or damaged ({error}): get the committed file again, or run "
                         f"`python -m crt_exp.report {page} --run`") from None
    for name in frame.columns:
        if name not in ("sample", *ORIGIN):
            frame[name] = _numbers(frame[name])
    if missing := {"method", "sample", "metric", "value", *ORIGIN} - {*frame.columns}:
        raise ValueError(f"{path}: columns {', '.join(frame.columns)}, expected also {', '.join(sorted(missing))}")
    return Rows(frame)


def _numbers(column: pd.Series) -> pd.Series:
    """As numbers where all values that are not empty are numbers; empty ones are then nan."""
    if column.dtype != object and not pd.api.types.is_string_dtype(column):
        return column
    values = pd.to_numeric(column.where(column != ""), errors="coerce")
    return values if values.notna().any() and (values.notna() | (column == "")).all() else column


def rows_path(page: str, folder: Path = FOLDER) -> Path:
    for path in (folder / f"{page}.csv", folder / f"{page}.csv.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder / page}.csv: no rows of this page; `python -m crt_exp.report {page} --run` "
                            "makes them")


def write_rows(page: str, frame: pd.DataFrame, folder: Path = FOLDER) -> Path:
    """Written atomically, compressed above 1 MB."""
    text = frame.to_csv(index=False, lineterminator="\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{page}.csv", folder / f"{page}.csv.gz"
    path, other = (plain, packed) if len(text) <= LARGEST else (packed, plain)
    write_atomic(path, text if path == plain else gzip.compress(text, mtime=0))
    other.unlink(missing_ok=True)
    return path


def concatenated(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of several sweeps; a column that a sweep lacks is empty there. Origin columns come last."""
    frame = pd.concat(frames, ignore_index=True).fillna("")
    return frame[[name for name in frame.columns if name not in ORIGIN] + [*ORIGIN]]
