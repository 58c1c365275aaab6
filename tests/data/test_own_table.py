"""task.csv: a table of one's own, its missing values, and what is refused."""

import numpy as np
import pytest
from refusals import check_refused

from crt_exp.data import DataError
from crt_exp.data.own_table import read


def write(path, rows, header="area,rooms,city,id,price"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def homes(path, count=60):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        area, city = rng.integers(20, 200), ["Ulm", "Bonn", "Kiel"][i % 3]
        price = "" if i == 7 else f"{1000 * area + 5000 * (i % 3):.0f}.5"
        rows.append(f"{'NA' if i == 3 else area},{i % 5 + 1},{'?' if i == 5 else city},h{i},{price}")
    return write(path, rows)


def test_columns_are_what_their_values_say(tmp_path):
    table, told = read(homes(tmp_path / "homes.csv"), "price")
    assert table.name == "homes" and table.classes is None and len(table) == 59
    assert [column.name for column in table.columns] == ["area", "rooms", "city"]
    area, _, city = table.columns
    assert np.isnan(area.values).sum() == 1 and city.levels == ("Bonn", "Kiel", "Ulm", "(missing)")
    for part in ("1 of 60 rows have no price", "area: 1 of 59 values are missing", "city: 1 of 59 values are missing",
                 "id has 59 different texts and is left out"):
        assert part in told
    classes, _ = read(tmp_path / "homes.csv", "rooms")
    assert classes.classes == ("1", "2", "3", "4", "5") and classes.target.dtype == np.int64
    assert read(tmp_path / "homes.csv", "rooms", "regression")[0].classes is None


def test_semicolons_tabs_and_quotes(tmp_path):
    (tmp_path / "t.csv").write_text('\ufeffa;"b c";y\n1;x;p\n2;"x;y";q\n3;x;p\n4;x;q\n\n')
    table, _ = read(tmp_path / "t.csv", "y")
    assert table.columns[1].levels == ("x", "x;y") and table.classes == ("p", "q")


@pytest.mark.parametrize("text, target, message", [
    ("a,y\n1,2\n3", "y", "line 3: 1 cells, 2 expected"), ("a,a,y\n1,2,3\n", "y", "a name of its own"),
    ("1,2\n3,4\n", "y", "the first line must name"), ("a,y\n", "y", "1 lines"),
    ("a,price\n1,2\n2,3\n", "prise", "did you mean price"),
    ("a,y\n1,2\n", None, "needs task.target"), ("a,y\n1,\n2,NA\n", "y", "no row has a y"),
    ("y\n1\n2\n", "y", "its only column"),
    ("a,y\n1,u\n2,v\n3,w\n", "y", "3 classes in 3 rows"), ("a,y\n,0\n,1\n,0\n,1\n", "y", "no column beside y"),
    ("a,y\n1,2.5\ninf,3.5\n", "y", "infinite")])
def test_what_is_refused_names_file_line_and_column(text, target, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "t.csv", target)


def test_regression_takes_numbers_alone(tmp_path):
    with pytest.raises(DataError, match="'Ulm' is not a number, which task.kind=regression"):
        read(homes(tmp_path / "homes.csv"), "city", "regression")


def test_the_task_trains_and_says_what_is_missing(typed, tmp_path):
    given = ["task=uci", f"task.csv={homes(tmp_path / 'homes.csv')}", "logger=none", "task.repeats=2",
             "task.split=[0.6,0.2,0.2]", "features=trig", "features.m=128"]
    code, out, err = typed(*given, "task.target=price", f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "homes: r2 0." in out and "area: 1 of 59 values are missing" in out
    for words, message in ((["task.target=prize"], "did you mean price"), (["task.target=null"], "needs task.target"),
                           (["task.target=price", "task.scaling=none"], "values are missing"),
                           (["task.target=price", "task.data_dir=x"], "task.csv is read by itself"),
                           (["task.csv=none.csv", "task.target=price"], "cannot be read"),
                           (["task.csv=null", "task.target=price"], "give task.csv=FILE")):
        check_refused(typed(*given, *words, f"hydra.run.dir={tmp_path / 'no'}"), [message], tmp_path / "no")
