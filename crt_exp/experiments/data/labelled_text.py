"""Text classification data of your own: a table, or a set of the Hugging Face hub.

A row has one text or a pair of texts, and a label: a class or a number. Without files (or splits) for validation and
test, a share of the rows is held out. Rows that share a text stay in one part, so that no text is on both sides.
Notation: n rows.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from crt_exp.experiments.data import DataError, warn
from crt_exp.experiments.data.files import check_cells, check_columns, read_text_table
from crt_exp.experiments.data.glue import Examples, GlueTask
from crt_exp.experiments.data.plan import SPLITS
from crt_exp.experiments.data.sources import Hub, load_rows
from crt_exp.experiments.data.tabular import Kind, numbers_of, target_of

SHARES = (0.8, 0.1, 0.1)
LARGEST = 10.0  # largest number of a regression; heads start near 0, and steps are small


class LabelledHub(Hub):
    """Splits of a Hugging Face data set; null: a share of the training split."""

    train: str
    validation: str | None
    test: str | None


def read_labelled(
    tables: dict[str, tuple[str, pd.DataFrame]],
    columns: Sequence[str] | None,
    target: str,
    kind: Kind | None,
    shares: Sequence[float],
) -> tuple[GlueTask, dict[str, Examples]]:
    """Task and examples of each part.

    Args:
        tables: name for errors and cells of each part that has a table.
        columns: one or two columns of text; None: text, or text_a and text_b.
        target: column of the labels.
        kind: None: regression for labels that are numbers, except a few integers.
        shares: training, validation and test; a part that has a table takes no share.

    Raises:
        DataError: a column or cell is missing, the labels are no classes, or a part is empty.
    """
    named, cells = tables["train"]
    columns = text_columns(cells, columns, named, ", or set task.columns")
    check_columns(cells, [target], named, ", or set task.target")
    labels = []
    values = []
    for name, cells in tables.values():
        check_cells(cells, [*columns, target], name)
        labels.append(cells[target])
        try:
            values.append(numbers_of(cells[target], kind == "classification"))
        except ValueError as error:
            raise DataError(f"{name}: column {target}, {error}") from None
    numbers = None
    if all(column is not None for column in values):
        numbers = pd.concat(values, ignore_index=True)
    try:
        targets, classes = target_of(pd.concat(labels, ignore_index=True), numbers, kind)
    except ValueError as error:
        raise DataError(f"{named}: column {target}, {error}") from None
    if classes is None and np.abs(targets).max() > LARGEST:
        raise DataError(
            f"{named}: column {target}: numbers from {targets.min():g} to {targets.max():g}; expected at most "
            f"{LARGEST:g} in size, because the model starts at 0; rescale them, or set "
            "task.kind=classification"
        )
    rows = pd.concat([cells[columns] for _, cells in tables.values()], ignore_index=True)
    lengths = [len(cells) for cells in labels]
    parts = np.repeat(np.array([*tables], object), lengths)
    hold_out(rows, parts, [part for part in SPLITS if part not in tables], shares, named)
    leave_out_repeated(rows, parts, named)
    examples = {}
    for part in SPLITS:
        chosen = parts == part
        texts = [rows.loc[chosen, column].tolist() for column in columns]
        examples[part] = Examples(texts, targets[chosen].tolist())
        if not len(examples[part]):
            raise DataError(f"{named}: no row is left for {part}")
    for code, name in enumerate(classes or ()):
        if code not in examples["train"].labels:
            raise DataError(
                f"{named}: column {target}, training part: no row of class {name}; expected at least 1"
            )
    task = GlueTask(
        named,
        target,
        names=classes or (),
        columns=tuple(columns),
        metrics=("spearman", "pearson") if classes is None else ("accuracy", "mcc"),
    )
    return task, examples


# ---- sources


def read_files(files: dict[str, str | None]) -> dict[str, tuple[str, pd.DataFrame]]:
    """Tables of the files of each part; files: option and file. Raises DataError."""
    tables = {}
    for part, (option, file) in zip(SPLITS, files.items()):
        if file is not None:
            named = f"{option}={file}"
            tables[part] = (named, read_text_table(Path(file).expanduser(), named))
    return tables


def read_hub(hub: LabelledHub, target: str) -> dict[str, tuple[str, pd.DataFrame]]:
    """Tables of the splits of a Hugging Face set; classes have their names. Raises DataError."""
    tables = {}
    for part in SPLITS:
        if hub[part] is None:
            continue
        rows = load_rows(hub, hub[part])
        cells = rows.to_pandas()
        names = getattr(rows.features.get(target), "names", None)
        if names is not None:  # -1: no label
            cells[target] = cells[target].map(dict(enumerate(names)))
        cells = cells.astype("str").fillna("")
        cells.index += 1
        tables[part] = (f"task.hub.name={hub['name']}, split {hub[part]}", cells)
    return tables


# ---- columns and cells


def text_columns(
    cells: pd.DataFrame, columns: Sequence[str] | None, named: str, instead: str = ""
) -> list[str]:
    """The columns of text. Raises DataError if there are none."""
    if columns is None:
        columns = ["text_a", "text_b"] if "text_a" in cells else ["text"]
    check_columns(cells, columns, named, instead)
    return list(columns)


# ---- parts


def hold_out(
    rows: pd.DataFrame, parts: np.ndarray, absent: list[str], shares: Sequence[float], named: str
) -> None:
    """Move a share of the training rows to each absent part, in `parts` (n,).

    The rows of a part are a random sample, the same for each run. Rows that share a text move together.
    """
    if not absent:
        return
    train = parts == "train"
    groups = groups_of(rows[train])
    count = groups.max() + 1
    place = np.random.default_rng(0).permutation(count)[groups]
    moved = parts[train]
    end = count
    for part in reversed(absent):
        start = end - max(1, round(shares[SPLITS.index(part)] * count))
        moved[(place >= start) & (place < end)] = part
        end = start
    if end < 1:
        raise DataError(
            f"{named}: {count} groups of rows without a common text; expected more than {len(absent)}; "
            "give a file for validation and for test"
        )
    parts[train] = moved


def groups_of(rows: pd.DataFrame) -> np.ndarray:
    """Number of the group of each row, (n,): rows that share a text, also through other rows.

    >>> groups_of(pd.DataFrame({"a": ["x", "y", "z"], "b": ["u", "x", "v"]})).tolist()
    [0, 0, 1]
    """
    count = len(rows)
    codes, texts = pd.factorize(rows.to_numpy().ravel())
    row = np.repeat(np.arange(count), rows.shape[1])
    size = count + len(texts)
    edges = coo_array((np.ones(len(codes)), (row, count + codes)), shape=(size, size))
    return connected_components(edges, directed=False)[1][:count]


def leave_out_repeated(rows: pd.DataFrame, parts: np.ndarray, named: str) -> None:
    """Leave out rows whose texts are in a later part, in `parts` (n,)."""
    order = pd.Series([SPLITS.index(part) for part in parts])
    last = order.groupby([rows[column] for column in rows]).transform("max")
    repeated = (order < last).to_numpy()
    if repeated.any():
        warn("%s: left out %d rows whose text is in a later part", named, int(repeated.sum()))
        parts[repeated] = ""
