"""Result rows of a page (outputs/report/<page>.csv).

One row is one measured value. Columns: `sweep` (the sweep that made the row), the columns of the page (data set,
method, m, step, ...), `sample` (the independent unit: a seed, pair, document or process; empty for a closed form),
`metric`, `value`, and the origin: `seconds` (on the first row of a run), `commit`, `date`, `versions`.
"""

import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.experiments.runner.run import names_in, write_atomic

FOLDER = Path("outputs/report")
ORIGIN = ("seconds", "commit", "date", "versions")
TEXT = ("sweep", "method", "sample", "metric", *ORIGIN)  # columns that are never numbers
LARGEST = 2**20  # maximum bytes of an uncompressed file


class Rows:
    """Result rows of a page, with filters column=value or column=[values].

    >>> frame = pd.DataFrame({"method": ["a", "a", "b"], "sample": [0, 1, 1], "metric": "loss", "value": [3, 4, 2]})
    >>> Rows(frame).paired("a", "b", "loss").to_dict()
    {1: 2.0}
    """

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame
        self._columns = {name: frame[name].to_numpy() for name in frame if name not in ORIGIN}
        self._groups = frame.groupby(["metric", "method"], sort=False).indices

    def select(self, metric: str, method: str | None = None, **where: Any) -> pd.DataFrame:
        """Return the rows of a metric, in their order."""
        return self.frame.iloc[self._places(metric, method, where)]

    def values(self, metric: str, method: str, log: bool = False, **where: Any) -> pd.Series:
        """Return values by sample, float64; several rows of a sample are averaged.

        log: average logarithms.
        """
        places = self._places(metric, method, where)
        values = self._columns["value"][places].astype(float)
        if log:
            values = np.log(values)
        samples = pd.Series(values, self._columns["sample"][places])
        return samples.groupby(level=0, sort=False).mean()

    def paired(
        self, first: str, second: str, metric: str, log: bool = False, **where: Any
    ) -> pd.Series:
        """Return first - second by sample, for samples that both methods have.

        log: difference of logarithms. A value without a sample is deterministic, and is compared with each sample of
        the other method.
        """
        one = self.values(metric, first, log, **where)
        two = self.values(metric, second, log, **where)
        return (_spread(one, two) - _spread(two, one)).dropna()

    def ratio(self, first: str, second: str, metric: str, **where: Any) -> pd.Series:
        """Return log(first / second) by sample; exp of the mean is the geometric mean."""
        return self.paired(first, second, metric, log=True, **where)

    def paired_by_case(
        self,
        first: str,
        others: str | Mapping[str, str],
        metric: str,
        cases: Mapping[str, Mapping[str, Any]],
        scale: float = 1.0,
        log: bool = False,
        looks: Sequence[int] = (),
    ) -> dict[str, pd.Series]:
        """Return scale * (first - other) for each case; `cases` holds the filter of each.

        others: one method, or the labels of several, which begin the names of their cases.
        looks: leave out samples that were seen before others were added, see `added`.
        """
        differences = {}
        for other, label in ({others: ""} if isinstance(others, str) else others).items():
            for case, where in cases.items():
                samples = scale * self.paired(first, other, metric, log, **where)
                name = ", ".join(part for part in (label, case) if part)
                differences[name] = added(samples, *looks)
        return differences

    def by_method(
        self,
        metric: str,
        methods: Iterable[str],
        factor: float = 1.0,
        less: str = "",
        over: str = "",
        log: bool = False,
        **where: Any,
    ) -> dict[str, pd.Series]:
        """Return the values of each method.

        less: method whose values are subtracted, sample by sample; it is left out itself. log: subtract logarithms.
        over: method whose ratio to each method is returned, as a logarithm.
        """
        samples = {}
        for method in methods:
            if over:
                samples[method] = self.ratio(over, method, metric, **where)
            elif not less:
                samples[method] = factor * self.values(metric, method, **where)
            elif method != less:
                samples[method] = factor * self.paired(method, less, metric, log, **where)
        return samples

    def best(self, column: str, by: Sequence[str]) -> "Rows":
        """Return the rows with the best value of a column, such as a learning rate, of each group.

        The best value has the largest mean.
        """
        means = self.frame.groupby([*by, column])["value"].transform("mean")
        best = means.groupby([self.frame[name] for name in by]).transform("max")
        return Rows(self.frame[means == best])

    def without_options(self) -> "Rows":
        """Return the rows with methods named without their options.

        >>> frame = pd.DataFrame({"method": ["favorp m=32", "elu"], "sample": 0, "metric": "loss", "value": [3, 4]})
        >>> Rows(frame).without_options().methods("loss")
        ['favorp', 'elu']
        """
        names = self.frame["method"].str.replace(r" \S+=.*", "", regex=True)
        return Rows(self.frame.assign(method=names))

    def renamed(self, names: Mapping[str, str]) -> "Rows":
        """Return the rows with other names of these methods."""
        return Rows(self.frame.assign(method=self.frame["method"].replace(names)))

    def cases(self, metric: str, *columns: str, **where: Any) -> dict[str, dict[str, Any]]:
        """Return a filter for each combination of values that the columns have, by these values.

        >>> frame = pd.DataFrame({"data": ["x", "y"], "method": "a", "sample": 0, "metric": "loss", "value": 1})
        >>> Rows(frame).cases("loss", "data", method="a")
        {'x': {'method': 'a', 'data': 'x'}, 'y': {'method': 'a', 'data': 'y'}}
        """
        cases = {}
        combinations = self.select(metric, **where)[[*columns]].drop_duplicates()
        for values in combinations.itertuples(index=False):
            cases[", ".join(values)] = {**where, **dict(zip(columns, values))}
        return cases

    def methods(self, metric: str, **where: Any) -> list[str]:
        """Return the methods that have a metric, in the order of the rows."""
        return [*self.select(metric, **where)["method"].unique()]

    def _places(self, metric: str, method: str | None, where: dict[str, Any]) -> np.ndarray:
        if method is None:
            places = np.flatnonzero(self._columns["metric"] == metric)
        else:
            places = self._groups.get((metric, method), np.empty(0, int))
        for name, wanted in where.items():
            column = self._columns[name][places]
            if isinstance(wanted, list | tuple | range):
                matches = np.isin(column, wanted)
            elif wanted == "" and column.dtype != object:
                matches = pd.isna(column)
            else:
                matches = column == wanted
            places = places[matches]
        return places


def _spread(values: pd.Series, other: pd.Series) -> pd.Series:
    if [*values.index] == [""] and len(other):
        return pd.Series(values.iloc[0], other.index)
    return values


def share(gain: pd.Series, whole: pd.Series) -> pd.Series:
    """Return samples whose mean is mean(gain) / mean(whole).

    The spread of the samples is that of the ratio (delta method).
    """
    both = pd.DataFrame({"gain": gain, "whole": whole}).dropna()
    ratio = both["gain"].mean() / both["whole"].mean()
    return ratio + (both["gain"] - ratio * both["whole"]) / both["whole"].mean()


def added(samples: pd.Series, *looks: int) -> pd.Series:
    """Return the samples that were added last, after looks at earlier ones; all if none were added.

    Samples added because earlier ones did not decide must decide alone. looks: numbers of samples seen at each look.

    >>> samples = pd.Series([5.0, 1.0, 2.0], ["0", "1", "2"])
    >>> added(samples, 1).to_dict()
    {'1': 1.0, '2': 2.0}
    >>> added(samples, 1, 2).to_dict()
    {'2': 2.0}
    """
    for look in looks:
        later = samples[samples.index.astype(int) >= look]
        if len(later):
            samples = later
    return samples


# ---- files


def read_rows(page: str, folder: Path = FOLDER) -> Rows:
    """Read the rows of a page; empty numbers are nan.

    Raises:
        FileNotFoundError: If the page has no rows.
        OSError: If the file cannot be read.
        ValueError: If the file is truncated or lacks columns.
    """
    path = rows_path(page, folder)
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        frame = _parse(content.decode())
    except (EOFError, gzip.BadGzipFile, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path}: truncated or damaged ({error}); restore the file, or run `python -m crt_exp report "
            f"{page} --run`"
        ) from None
    if missing := {"method", "sample", "metric", "value", *ORIGIN} - {*frame.columns}:
        raise ValueError(f"{path}: missing columns {', '.join(sorted(missing))}")
    return Rows(frame)


def _parse(text: str) -> pd.DataFrame:
    if not text.endswith("\n"):
        raise ValueError("the last line is incomplete")
    names = text.partition("\n")[0].split(",")
    frame = pd.read_csv(
        StringIO(text),
        dtype=dict.fromkeys(TEXT, str),
        keep_default_na=False,
        na_values={name: [""] for name in names if name not in TEXT},
        low_memory=False,
    )
    words = frame.select_dtypes(exclude="number").columns
    frame[words] = frame[words].fillna("")
    return frame


def rows_path(page: str, folder: Path = FOLDER) -> Path:
    """Return the file of a page's rows. Raises FileNotFoundError if there is none."""
    present = names_in(folder)
    for name in (f"{page}.csv", f"{page}.csv.gz"):
        if name in present:
            return folder / name
    raise FileNotFoundError(
        f"{folder / page}.csv: no rows; run `python -m crt_exp report {page} --run`"
    )


def has_rows(page: str, folder: Path = FOLDER) -> bool:
    try:
        rows_path(page, folder)
    except FileNotFoundError:
        return False
    return True


def write_rows(page: str, frame: pd.DataFrame, folder: Path = FOLDER) -> Path:
    """Write rows atomically; files above 1 MiB are compressed."""
    text = frame.to_csv(index=False, lineterminator="\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{page}.csv", folder / f"{page}.csv.gz"
    path, other = plain, packed
    if len(text) > LARGEST:
        path, other = packed, plain
        text = gzip.compress(text, mtime=0)
    write_atomic(path, text)
    other.unlink(missing_ok=True)
    return path


def concatenate(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate sweeps; columns that a sweep lacks are empty, origin columns last."""
    frame = pd.concat(frames, ignore_index=True).fillna("")
    return frame[[name for name in frame if name not in ORIGIN] + [*ORIGIN]]
