"""Tables: the published files, a user's csv file with missing values, and refusals."""

import functools
import gzip
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import check_refused

from crt_exp.experiments.data import DataError, arena, corpora
from crt_exp.experiments.data.tabular import BLANKS, LAYOUTS, Column, file_of, load, read_own
from crt_exp.experiments.tasks import uci
from crt_exp.experiments.tasks.books import Books
from crt_exp.experiments.tasks.mlm import MLM
from crt_exp.mechanism import Mechanism
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


def write(folder: Path, name: str, rows: list[list[str]], end: str = "\n", begin: str = "") -> Path:
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
    married = Column("married", np.array([0, 1, 1]), ("no", "yes"))
    assert married.encode().tolist() == [[0], [1], [1]]
    write(tmp_path, "abalone", [["I", *row[1:]] for row in valid_rows("abalone")])
    table = load("abalone", tmp_path)
    assert table.columns[0].levels == ("M", "F", "I")
    assert table.encode()[0, :3].tolist() == [0, 0, 1]


def task_with(**options) -> SimpleNamespace:
    defaults = {
        "text": None,
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


# ---- a csv file of one's own -----------------------------------------------------------------------------------------
def write_own(path, header, *columns, separator=","):
    quoted = []
    for row in zip(*columns):
        quoted.append(separator.join('"{}"'.format(str(cell).replace('"', '""')) for cell in row))
    path.write_text("\n".join([header, *quoted]), encoding="utf-8")
    return path


@pytest.fixture
def homes(tmp_path):
    rng = np.random.default_rng(0)
    area = rng.integers(20, 200, 60)
    city = ["Ulm", "Bonn", "Kiel"] * 20
    price = [f"{1000 * a + 5000 * (i % 3):.0f}.5" for i, a in enumerate(area)]
    return write_own(
        tmp_path / "homes.csv",
        "area,rooms,city,id,price",
        ["NA" if i == 3 else a for i, a in enumerate(area)],
        [i % 5 + 1 for i in range(60)],
        ["?" if i == 5 else value for i, value in enumerate(city)],
        [f"h{i}" for i in range(60)],
        price,
    )


def test_values_decide_the_kind_of_a_column(homes):
    table, notes = read_own(homes, "price")
    assert table.name == "homes"
    assert table.classes is None
    assert len(table) == 60
    actual = [column.name for column in table.columns]
    assert actual == ["area", "rooms", "city"]
    area, _, city = table.columns
    assert np.isnan(area.values).sum() == 1
    assert city.levels == ("Bonn", "Kiel", "Ulm", "(missing)")
    for part in (
        "area: 1 of 60 values are missing",
        "city: 1 of 60 values are missing",
        "id has 60 different texts and is left out",
    ):
        assert part in notes
    classes, _ = read_own(homes, "rooms")
    assert classes.classes == ("1", "2", "3", "4", "5")
    assert classes.target.dtype == np.int64
    assert read_own(homes, "rooms", "regression")[0].classes is None


@pytest.mark.parametrize("separator", [";", "\t"])
def test_separators_quotes_and_gzip(separator, tmp_path):
    cells = [
        "\ufeffa",
        '"b c"',
        "y\n1",
        "x",
        "p\n2",
        f'"x{separator}y"',
        "q\n3",
        "x",
        "p\n4",
        "x\u2028",
        "q\n\n",
    ]
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(separator.join(cells).encode()))
    table, _ = read_own(tmp_path / "t.csv.gz", "y")
    assert table.name == "t"
    assert table.classes == ("p", "q")
    actual = table.columns[0].values.tolist()
    assert actual == [1, 2, 3, 4]


def test_numbers_and_missing_values(tmp_path):
    cells = ["+.5", "1.", "-2e3", "", "#N/A", "<NA>", "NA", "?"]
    table, notes = read_own(write_own(tmp_path / "t.csv", "x,y", cells * 4, ["p", "q"] * 16), "y")
    actual = table.columns[0].values[:8]
    expected = [0.5, 1, -2000] + 5 * [np.nan]
    np.testing.assert_array_equal(actual, expected)
    assert notes == "x: 20 of 32 values are missing"


@pytest.mark.parametrize("cell", ["<0.1", "inf", "1'234"])
def test_a_word_among_numbers_is_named(cell, tmp_path):
    cells = [*(i / 4 for i in range(38)), cell, "1"]
    with pytest.raises(DataError, match=f"column x, row 39: .*{cell}"):
        read_own(write_own(tmp_path / "t.csv", "x,y", cells, ["p", "q"] * 20), "y")
    with pytest.raises(DataError, match=f"column y, row 39: .*{cell}"):
        read_own(write_own(tmp_path / "t.csv", "x,y", ["p", "q"] * 20, cells), "y")


@pytest.mark.parametrize(
    "cells",
    [
        ["2024-01-05", "2024-01-06"],
        ["+", "-"],
        ["1", "b"],
    ],
)
def test_words_are_categories_and_classes(cells, tmp_path):
    table, _ = read_own(write_own(tmp_path / "t.csv", "x,y", cells * 10, cells * 10), "y")
    assert table.classes == table.columns[0].levels
    assert tuple(sorted(cells)) == table.columns[0].levels
    actual = table.columns[0].values.tolist()
    expected = table.target.tolist()
    assert actual == expected


@pytest.mark.parametrize(
    "text, target, message",
    [
        ("a,y\n1,2\n3,4,5", "y", "line 3, saw 3"),
        ("a,y\n", "y", "0 rows"),
        ("a,price\n1,2\n2,3\n", "prise", "did you mean price"),
        ("a,y\n1,u\n2,v\n3,w\n", "y", "3 distinct values in 3 row"),
        ("a,y\n,0\n,1\n,0\n,1\n", "y", "a is empty and is left out"),
        ("a,y\n1,2.5\n3,NA\n", "y", "column y, row 2 has no value"),
        ("a,y\nu,1\n\udcff,2\n", "y", "UTF-8"),
    ],
)
def test_refusals_name_column_and_row(text, target, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((DataError, ValueError), match=message):
        read_own(tmp_path / "t.csv", target)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no.csv", "task.csv=.*no.csv: no such file$"),
        ("no.csv.gz", "no such file$"),
        ("no/such.csv", "no such file$"),
        ("", "Is a directory$"),
        ("empty.csv", "not readable as a UTF-8 table: No columns"),
        ("plain.csv.gz", "not readable as a UTF-8 table: Not a gzipped file"),
    ],
)
def test_files_that_are_no_table_are_named(name, message, tmp_path):
    (tmp_path / "empty.csv").touch()
    (tmp_path / "plain.csv.gz").write_text("a,y\n1,2\n")
    with pytest.raises(DataError, match=message):
        read_own(tmp_path / name, "y")


def test_kind_decides(tmp_path):
    with pytest.raises(DataError, match="column city, .*task.kind=regression"):
        read_own(
            write_own(tmp_path / "t.csv", "x,city", range(6), ["Ulm", "Bonn"] * 3),
            "city",
            "regression",
        )
    cases = [
        (["1", "1.0", "2", "2.00"], ("1", "1.0", "2", "2.00")),
        (["1", "2", "3", "x"], ("1", "2", "3", "x")),
    ]
    for labels, classes in cases:
        file = write_own(tmp_path / "t.csv", "x,y", [3, 1, 4, 1] * 5, labels * 5)
        assert read_own(file, "y", "classification")[0].classes == classes


@pytest.mark.parametrize(
    "labels",
    [
        ["01", "1", "2"],
        ["3.1", "3.10", "3.2"],
        ["1E2", "10E1", "2E2"],
    ],
)
def test_classes_of_equal_value_stay_apart(labels, tmp_path):
    file = write_own(tmp_path / "t.csv", "x,y", range(30), labels * 10)
    table, _ = read_own(file, "y", "classification")
    actual = [table.classes[code] for code in table.target]
    assert actual == labels * 10


def test_the_task_trains_and_states_missing_values(typed, homes, tmp_path):
    run = [
        "task=uci",
        f"task.csv={homes}",
        "logger=none",
        "task.repeats=2",
        "task.split=[0.6,0.2,0.2]",
        "features=trig",
        "features.m=128",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    check_refused(
        typed(*run, "task.target=price", "task.scaling=none"),
        ["values are missing"],
        tmp_path / "run",
    )
    code, out, err = typed(*run, "task.target=price")
    assert code == 0, err
    assert "homes: r2 0." in out
    assert "area: 1 of 60 values are missing" in out


def task_of(path, sigmas):
    return uci.UCI("wine", "standard", (0.6, 0.2, 0.2), 2, sigmas, csv=str(path), target="y")


def test_columns_are_scaled_before_they_are_rounded(tmp_path):
    x = np.random.default_rng(0).normal(size=300)
    whole = (202401010000 + 1000 * x).round().astype(np.int64)
    task = task_of(write_own(tmp_path / "t.csv", "x,y", whole, np.sin(2 * x)), [5.0])
    scaled = np.concatenate(task.divide(0, 0)[0])[:, 0]
    order = np.random.default_rng([0, 0]).permutation(300)
    assert scaled.dtype == np.float32
    actual = np.corrcoef(scaled, x[order])[0, 1]
    assert actual > 0.99999


def test_the_scale_is_that_of_the_training_part(tmp_path):
    x = np.random.default_rng(0).normal(size=50)
    train, *others = task_of(write_own(tmp_path / "t.csv", "x,y", x, np.sin(2 * x)), [5.0]).divide(
        0, 0
    )[0]
    assert abs(train.mean()) < 1e-6
    assert abs(train.std() - 1) < 1e-6
    for part in others:
        assert abs(part.mean()) > 1e-3


@pytest.mark.parametrize("number", [True, False])
def test_a_fit_that_is_worse_than_none_is_named(number, tmp_path):
    noise, x = np.random.default_rng(0).normal(size=(2, 100))
    cases = [
        (noise if number else ["aaaab"[i % 5] for i in range(100)], True),
        (x if number else np.where(x > 0, "a", "b"), False),
    ]
    for y, worse in cases:
        task = task_of(write_own(tmp_path / "t.csv", "x,y", x, y), [1000.0 if worse else 2.0])
        summary = task.summary(list(task.records(Mechanism.of("exact"), 0)))
        assert ("of the training part" in summary) == worse
        assert len(summary.splitlines()) == 1 + worse
