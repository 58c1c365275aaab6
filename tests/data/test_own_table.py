"""task.csv: a table of one's own, its missing values, and what is refused."""

import gzip

import numpy as np
import pytest
from refusals import check_refused

from crt_exp.data import DataError
from crt_exp.data.tabular import read_own
from crt_exp.mechanism import Mechanism
from crt_exp.tasks import uci

NAN = np.nan


def write(path, header, *columns, separator=","):
    quoted = [separator.join('"{}"'.format(str(cell).replace('"', '""')) for cell in row) for row in zip(*columns)]
    path.write_text("\n".join([header, *quoted]), encoding="utf-8")
    return path


@pytest.fixture
def homes(tmp_path):
    rng = np.random.default_rng(0)
    area, city = rng.integers(20, 200, 60), ["Ulm", "Bonn", "Kiel"] * 20
    price = [f"{1000 * a + 5000 * (i % 3):.0f}.5" for i, a in enumerate(area)]
    return write(tmp_path / "homes.csv", "area,rooms,city,id,price",
                 ["NA" if i == 3 else a for i, a in enumerate(area)], [i % 5 + 1 for i in range(60)],
                 ["?" if i == 5 else each for i, each in enumerate(city)], [f"h{i}" for i in range(60)], price)


def test_columns_are_what_their_values_say(homes):
    table, told = read_own(homes, "price")
    assert table.name == "homes" and table.classes is None and len(table) == 60
    assert [column.name for column in table.columns] == ["area", "rooms", "city"]
    area, _, city = table.columns
    assert np.isnan(area.values).sum() == 1 and city.levels == ("Bonn", "Kiel", "Ulm", "(missing)")
    for part in ("area: 1 of 60 values are missing", "city: 1 of 60 values are missing",
                 "id has 60 different texts and is left out"):
        assert part in told
    classes, _ = read_own(homes, "rooms")
    assert classes.classes == ("1", "2", "3", "4", "5") and classes.target.dtype == np.int64
    assert read_own(homes, "rooms", "regression")[0].classes is None


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_quotes_and_gzip(separator, tmp_path):
    cells = ['\ufeffa', '"b c"', "y\n1", "x", "p\n2", f'"x{separator}y"', "q\n3", "x", "p\n4", "x\u2028", "q\n\n"]
    text = separator.join(cells)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    table, _ = read_own(tmp_path / "t.csv.gz", "y")
    assert table.name == "t" and table.classes == ("p", "q") and table.columns[0].values.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("cells, values, told", [
    (["1.5", "-2e3", ""], [1.5, -2000, NAN], "x: 1 of 3 values are missing"),
    (["1.5", "#N/A", ".", "-", "<NA>", "NA", "?", "n.d."], [1.5] + 7 * [NAN], "7 of 8"),
    (["+.5", "1.", "1e-3"], [0.5, 1, 0.001], "")])
def test_one_way_to_read_numbers(cells, values, told, tmp_path):
    count = len(cells)
    table, said = read_own(write(tmp_path / "t.csv", "x,y", cells * 4, ["p", "q"] * 2 * count), "y")
    np.testing.assert_array_equal(table.columns[0].values[:count], values)
    assert told.replace("1 of 3", "4 of 12").replace("7 of 8", "28 of 32") in said and bool(said) == bool(told)


MANY = [i / 4 for i in range(38)]


@pytest.mark.parametrize("cells, message", [
    ([*MANY, "<0.1", "low"], "column x, row 39: '<0.1'"), (["1", "2", "3", "4+"] * 10, "row 4: '4[+]'"),
    (["1,5", "1.5", "2.5", "3"] * 10, "row 1: '1,5'"), (["1,234", "12"] * 20, "row 1: '1,234'"),
    (["1.234,5", "7"] * 20, "'1.234,5'"),
    (["1,234.5", "7"] * 20, "'1,234.5'"), (["12 %"] * 40, "'12 %'"), (["$5"] * 40, r"'\$5'"), (["5 kg"] * 40, "'5 kg'"),
    (["1 234", "7"] * 20, "'1 234'"), (["12 EUR"] * 40, "'12 EUR'"), (["1'234"] * 40, '"1\'234"'),
    ([*MANY, "inf", "1"], "row 39: 'inf'")])
def test_numbers_that_are_not_plain_are_never_categories(cells, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_own(write(tmp_path / "t.csv", "x,y", cells, ["p", "q"] * 20), "y")
    with pytest.raises(DataError, match=message.replace("column x", "column y")):
        read_own(write(tmp_path / "t.csv", "x,y", ["p", "q"] * 20, cells), "y")


@pytest.mark.parametrize("cells", [["a", "b"], ["2024-01-05", "2024-01-06"], ["12:30", "1:00"], ["+", "-"],
                                   ["none", "Attchd"], ["1", "b"]])
def test_words_are_categories_and_classes(cells, tmp_path):
    file = write(tmp_path / "t.csv", "x,y", cells * 10, cells * 10)
    table, _ = read_own(file, "y")
    assert table.classes == table.columns[0].levels == tuple(sorted(cells))
    assert table.columns[0].values.tolist() == table.target.tolist()


@pytest.mark.parametrize("text, target, message", [
    ("a,y\n1,2\n3", "y", "row 2 has fewer cells"), ("a,y\n1,2\n3,4,5", "y", "line 3, saw 3"),
    ("a,a,y\n1,2,3\n", "y", "names each column"), ("1,2\n3,4\n", "y", "names each column"), ("a,y\n", "y", "0 rows"),
    ("a,price\n1,2\n2,3\n", "prise", "did you mean price"), ("a,y\n1,2\n", None, "task.target"),
    ("y\n1\n1\n2\n2\n", "y", "no usable column"), ("a,y\n1,u\n2,v\n3,w\n", "y", "3 distinct values in 3 rows"),
    ("a,y\n,0\n,1\n,0\n,1\n", "y", "a is empty and is left out"),
    ("a,y\n1,u\n2,\n3,u\n", "y", "column y, row 2 has no value"),
    ("a,y\n1,2.5\n3,NA\n", "y", "column y, row 2 has no value"), ("a,y\n1,2.5\n3,2.5\n", "y", "1 distinct values"),
    ('a,y\nu,1\n"u,2\nu,3\nu,4\nu",5\n', "y", "column a, row 2: line end inside a cell"),
    ('a,y\n"u,1\n', "y", "EOF inside"), ("", "y", "No columns"),
    ("a,y\nu,1\n\udcff,2\n", "y", "UTF-8")])
def test_what_is_refused_names_column_and_row(text, target, message, tmp_path):
    (tmp_path / "t.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((DataError, ValueError), match=message):
        read_own(tmp_path / "t.csv", target)


def test_kind_decides(homes, tmp_path):
    with pytest.raises(DataError, match="column city, .*task.kind=regression"):
        read_own(write(tmp_path / "t.csv", "x,city", range(6), ["Ulm", "Bonn"] * 3), "city", "regression")
    for labels, classes in ((["1", "1.0", "2", "2.00"], ("1", "2")), (["1", "2", "3", "x"], ("1", "2", "3", "x"))):
        file = write(tmp_path / "t.csv", "x,y", [3, 1, 4, 1] * 5, labels * 5)
        assert read_own(file, "y", "classification")[0].classes == classes


def test_the_task_trains_and_states_what_is_missing(typed, homes, tmp_path):
    given = ["task=uci", f"task.csv={homes}", "logger=none", "task.repeats=2", "task.split=[0.6,0.2,0.2]",
             "features=trig", "features.m=128"]
    code, out, err = typed(*given, "task.target=price", f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "homes: r2 0." in out and "area: 1 of 60 values are missing" in out
    for words, message in ((["task.target=prize"], "did you mean price"), (["task.csv=none.csv"], "not readable"),
                           (["task.target=price", "task.scaling=none"], "values are missing"),
                           (["task.target=price", "task.data_dir=x"], "task.data_dir is not"),
                           (["task.csv=null", "task.target=price"], "task.csv=FILE")):
        check_refused(typed(*given, *words, f"hydra.run.dir={tmp_path / 'no'}"), [message], tmp_path / "no")


def task_of(path, sigmas):
    return uci.UCI("wine", "ordinal", "standard", (0.6, 0.2, 0.2), 2, sigmas, csv=str(path), target="y")


@pytest.mark.parametrize("scaling", ["standard", "minmax"])
def test_columns_are_scaled_before_they_are_rounded(scaling, tmp_path):
    x = np.random.default_rng(0).normal(size=300)
    whole = (202401010000 + 1000 * x).round().astype(np.int64)
    task = task_of(write(tmp_path / "t.csv", "x,y", whole, np.sin(2 * x)), [5.0])
    task.scaling = scaling
    scaled = np.concatenate(task.divide(0, 0)[0])[:, 0]
    order = np.random.default_rng([0, 0]).permutation(300)
    assert scaled.dtype == np.float32 and np.corrcoef(scaled, x[order])[0, 1] > 0.99999
    assert list(task.records(Mechanism.of("exact"), 0))[-1]["r2"] > (0.9 if scaling == "standard" else -1)


@pytest.mark.parametrize("number", [True, False])
def test_a_fit_that_is_worse_than_none_is_named(number, tmp_path):
    noise, x = np.random.default_rng(0).normal(size=(2, 200))
    for y, worse in ((noise if number else ["aaaab"[i % 5] for i in range(200)], True),
                     (x if number else np.where(x > 0, "a", "b"), False)):
        task = task_of(write(tmp_path / "t.csv", "x,y", x, y), [1000.0 if worse else 2.0])
        said = task.summary(list(task.records(Mechanism.of("exact"), 0)))
        assert ("of the training part" in said) == worse and len(said.splitlines()) == 1 + worse
