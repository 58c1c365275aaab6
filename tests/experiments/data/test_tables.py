"""Tables: the published files, a user's csv file with missing values, and refusals."""

import dataclasses
import functools
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from crt_exp.experiments.data import DataError, arena, corpora
from crt_exp.experiments.data.tabular import BLANKS, LAYOUTS, file_of, load
from crt_exp.experiments.tasks.books import Books
from crt_exp.experiments.tasks.mlm import MLM
from crt_exp.registry import ConfigError

# name: (rows, width, number of classes), from UCI's pages
PUBLISHED = {
    "abalone": (4177, 10, 28),
    "car": (1728, 21, 4),
    "yeast": (1484, 8, 10),
    "cmc": (1473, 21, 3),
    "wine": (178, 13, 3),
    "boston": (506, 13, None),
}


@functools.cache
def valid_rows(name: str) -> list[list[str]]:
    """A made-up table in the layout of `name`, with as many rows as published."""
    levels = [field.levels.split() for field in LAYOUTS[name]]
    entries = []
    for i in range(PUBLISHED[name][0]):
        entries.append(
            [
                values[i % len(values)] if values else f"{i % 7}.{j}"
                for j, values in enumerate(levels)
            ]
        )
    return entries


def write(
    folder: Path,
    name: str,
    rows: list[list[str]],
    end: str = "\n",
    begin: str = "",
) -> Path:
    path = file_of(name, folder)
    separator = ","
    if name in BLANKS:
        separator = "  "
    path.write_text(begin + end.join(separator.join(row) for row in rows) + end, encoding="utf-8")
    return path


def refusal(name: str, folder: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        load(name, folder)
    return str(caught.value)


# ---- published tables ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_gives_the_documented_shape(name, tmp_path):
    """Line ends, blanks and a byte order mark do not matter."""
    write(tmp_path, name, valid_rows(name))
    table = load(name, tmp_path)
    rows, width, classes = PUBLISHED[name]
    assert len(table) == rows
    assert str(tmp_path) in table.source
    encoded = table.encode()
    assert encoded.shape == (rows, width)
    assert encoded.dtype == np.float64
    assert np.isfinite(encoded).all()
    assert (table.classes and len(table.classes)) == classes
    expected = np.int64 if table.classes else np.float64
    assert table.target.dtype == expected
    padded = []
    for row in valid_rows(name):
        padded.append([f"{cell} " for cell in row])
    write(tmp_path, name, padded, "\r\n", "\ufeff")
    other = load(name, tmp_path)
    assert (other.encode() == table.encode()).all()
    assert (other.target == table.target).all()


CLASS_ROWS = {
    "abalone": [
        1,
        1,
        15,
        57,
        115,
        259,
        391,
        568,
        689,
        634,
        487,
        267,
        203,
        126,
        103,
        67,
        58,
        42,
        32,
        26,
        14,
        6,
        9,
        2,
        1,
        1,
        2,
        1,
    ],
    "banknote": [762, 610],
    "car": [1210, 384, 69, 65],
    "cmc": [629, 333, 511],
    "chess": [
        2796,
        27,
        78,
        246,
        81,
        198,
        471,
        592,
        683,
        1433,
        1712,
        1985,
        2854,
        3597,
        4194,
        4553,
        2166,
        390,
    ],
    "nursery": [4320, 2, 328, 4266, 4044],
    "wifi": [500, 500, 500, 500],
    "wine": [59, 71, 48],
    "yeast": [463, 429, 244, 163, 51, 44, 35, 30, 20, 5],
}


@pytest.mark.data
@pytest.mark.skipif(
    not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: the official files are needed"
)
@pytest.mark.parametrize("name", CLASS_ROWS)
def test_rows_of_each_class_are_as_published(name):
    table = load(name, Path(os.environ["CRT_DATA"]) / "uci")
    actual = np.bincount(table.target).tolist()
    assert actual == CLASS_ROWS[name]


@pytest.mark.parametrize(
    "name, change, problem",
    [
        ("car", lambda rows: rows[2].pop(), "row 3, column class: '' is not one of unacc"),
        ("car", lambda rows: rows[4].append("1"), "line 5, saw 8"),
        ("car", lambda rows: rows.pop(), "expected (1728, 7)"),
        ("car", list.clear, "No columns"),
        *[
            (
                "yeast",
                lambda rows, text=text: rows[9].__setitem__(1, text),
                f"row 10, column mcg: '{text}' is not a finite",
            )
            for text in ("abc", "nan", "1e999")
        ],
    ],
)
def test_faults_of_a_file_are_named(name, change, problem, tmp_path):
    rows = [list(row) for row in valid_rows(name)]
    change(rows)
    path = write(tmp_path, name, rows)
    message = refusal(name, tmp_path)
    assert str(path) in message
    assert problem in message
    assert f"fetch uci/{name}" in message


def test_missing_files_and_unknown_names(tmp_path):
    assert "fetch uci/wine --dir" in refusal("wine", tmp_path)
    with pytest.raises(ConfigError, match="did you mean nursery?"):
        load("nurssery")


def test_a_category_has_an_indicator_for_each_level(tmp_path):
    """Also where the levels have an order; a category of two levels is one column."""
    write(tmp_path, "car", [["low", "vhigh", "5more", "more", "small", "high", "vgood"]] * 1728)
    table = load("car", tmp_path)
    first = [1, 0, 0, 0]
    last = [0, 0, 0, 1]
    expected = [*first, *last, *last, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert table.encode()[0].tolist() == expected
    assert table.target[0] == 3
    married = pd.DataFrame({"married": pd.Categorical(["no", "yes", "yes"])})
    assert dataclasses.replace(table, features=married).encode().tolist() == [[0], [1], [1]]
    write(tmp_path, "abalone", [["I", *row[1:]] for row in valid_rows("abalone")])
    table = load("abalone", tmp_path)
    assert [*table.features["sex"].cat.categories] == ["M", "F", "I"]
    assert table.encode()[0, :3].tolist() == [0, 0, 1]


def task_with(**options) -> SimpleNamespace:
    defaults = {
        "text": None,
        "source": "auto",
        "validation_text": None,
        "test_text": None,
        "hub": {"name": None},
    }
    return SimpleNamespace(**defaults | options)


@pytest.mark.parametrize(
    "read, by",
    [
        (lambda folder: load("iris", folder), "task.dataset=iris, which is embedded"),
        (lambda folder: corpora.word_files("some.txt", folder), "task.corpus=some.txt"),
        (
            lambda folder: arena.load("pathfinder", folder, {}, "small", None),
            "task.dataset=pathfinder",
        ),
        (lambda folder: Books.files(task_with(data_dir=folder, text="some.txt")), "task.text"),
        (lambda folder: MLM.named_texts(task_with(data_dir=folder, text="some.txt")), "task.text"),
        (
            lambda folder: MLM.named_texts(task_with(data_dir=folder, hub={"name": "some/set"})),
            "task.hub.name",
        ),
    ],
)
def test_a_folder_that_is_not_used_is_refused(read, by):
    with pytest.raises(DataError, match=f"task.data_dir=/some/folder: not used by {by}"):
        read("/some/folder")
