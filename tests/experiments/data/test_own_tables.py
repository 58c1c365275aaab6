"""A csv file of one's own: kinds of columns, missing values, and what is refused."""

import gzip

import numpy as np
import pytest
from helpers.refusals import check_refused

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.tabular import read_own
from crt_exp.experiments.tasks import uci
from crt_exp.mechanism import Mechanism


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
    features = table.features
    assert list(features) == ["area", "rooms", "city"]
    assert features["area"].isna().sum() == 1
    assert [*features["city"].cat.categories] == ["Bonn", "Kiel", "Ulm", "(missing)"]
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
    actual = table.features.iloc[:, 0].tolist()
    assert actual == [1, 2, 3, 4]


def test_numbers_and_missing_values(tmp_path):
    cells = ["+.5", "1.", "-2e3", "", "#N/A", "<NA>", "NA", "?"]
    table, notes = read_own(write_own(tmp_path / "t.csv", "x,y", cells * 4, ["p", "q"] * 16), "y")
    actual = table.features["x"][:8]
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
    assert table.classes == tuple(table.features["x"].cat.categories)
    assert table.classes == tuple(sorted(cells))
    actual = table.features["x"].cat.codes.tolist()
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
