"""Tables of means, and their Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from crt_exp.experiments.drawing import LABELS, markdown
from crt_exp.experiments.intervals import geometric_interval, mean_ci, ratio_interval
from crt_exp.experiments.report.rows import Rows

Tables = dict[str, pd.DataFrame]  # by title


def label(method: str, labels: Mapping[str, str] | None = None) -> str:
    """Format a method as in the papers.

    >>> label("favorpp m=256"), label("favorpp causal")
    ('FAVOR++, m = 256', 'FAVOR++, causal')
    """
    if labels and method in labels:
        return labels[method]
    name, *options = method.split(" ")
    if not all("=" in option or option == "causal" for option in options):
        return method
    words = [LABELS.get(name, name)]
    for option in options:
        key, _, value = option.partition("=")
        if option == "redraw_every=1":
            words.append("redrawn every step")
        elif key == "redraw_every":
            words.append(f"redrawn every {value} steps")
        elif option == "causal":
            words.append(option)
        else:
            words.append(f"{key} = {value}")
    return ", ".join(words)


def mean_table(
    rows: Rows,
    columns: Mapping[str, Mapping[str, Any]],
    methods: Sequence[str] | Mapping[str, str] = (),
    scale: float = 1.0,
    spec: str = ".3g",
    overlap: float = 0.0,
    format: Callable[[pd.Series], str] | None = None,
    less: str = "",
    over: str = "",
    geometric: bool = False,
) -> pd.DataFrame:
    """Tabulate the mean ± 95% CI of each method (rows) in each column.

    Args:
        columns: Column name to the filter of its rows, such as {"metric": ..., "dataset": ...}.
        methods: Methods, or a mapping from methods to labels. Default: the methods of the first column.
        scale: Factor on all values, such as 100 for percent.
        overlap: See `mean_ci`.
        format: Function from samples to text, in place of the mean.
        less: Method whose values are subtracted, sample by sample. With `geometric`, values are divided by its values.
        over: Method whose values are divided by those of each method; geometric means.
        geometric: Use geometric means, for heavy-tailed values.
    """
    is_ratio = bool(over or (less and geometric))
    methods = methods or rows.methods(**next(iter(columns.values())))
    labels = methods if isinstance(methods, Mapping) else None
    table = {}
    for column, where in columns.items():
        table[column] = {}
        samples = rows.by_method(
            methods=methods, factor=scale, less=less, over=over, log=is_ratio, **where
        )
        for method, values in samples.items():
            if not len(values):
                continue
            if format:
                cell = format(values)
            elif is_ratio:
                cell = ratio_interval(values, spec)
            elif geometric:
                cell = geometric_interval(values, spec)
            else:
                cell = f"{mean_ci(values, overlap=overlap):{spec}}"
            table[column][label(method, labels)] = cell
    names = dict.fromkeys(label(method, labels) for method in methods)
    frame = pd.DataFrame(table, index=[*names], columns=[*columns], dtype=object)
    return frame.dropna(how="all").fillna("").rename_axis("method")


def filters_over(
    key: str, values: Iterable[Any], title: str = "{}", **where: Any
) -> dict[str, dict[str, Any]]:
    """Return one filter of rows for each value of a column: columns of a table, or cases of a claim.

    >>> filters_over("length", [512, 2048], "L = {}", metric="error")
    {'L = 512': {'metric': 'error', 'length': 512}, 'L = 2048': {'metric': 'error', 'length': 2048}}
    """
    return {title.format(value): {**where, key: value} for value in values}


def to_markdown(table: pd.DataFrame) -> str:
    """Format a table as Markdown, with the index as first column."""
    return markdown(with_index(table))


def with_index(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its index as first column; missing values are empty."""
    return table.astype(object).fillna("").reset_index(names=table.index.name or "")
