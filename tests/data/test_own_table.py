"""task.csv: a table of one's own, its missing values, and what is refused."""

import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import check_refused
from sklearn.datasets import load_diabetes

from crt_exp.data import DataError
from crt_exp.data.own_table import read
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import blocks
from crt_exp.tasks import uci


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


def columns(path, header, *made, target="y", kind=None):
    """The table of columns of cells, and what is said of it."""
    quoted = [",".join('"{}"'.format(str(cell).replace('"', '""')) for cell in row) for row in zip(*made)]
    path.write_text("\n".join([header, *quoted]), encoding="utf-8")
    return read(path, target, kind)


@pytest.mark.parametrize("written, told", [
    (lambda x: f"{x:.4f}".replace(".", ","), "x: 60 of 60 values are read with decimal commas"),
    (lambda x: f"{1e6 * x:,.0f}", "commas between thousands"), (lambda x: f"{x:.3f} %", "the sign %"),
    (lambda x: f"€{x:.2f}", "the sign €")])
def test_numbers_in_other_styles_are_numbers_as_feature_and_target(written, told, tmp_path):
    x = np.random.default_rng(0).normal(size=60)
    plain, _ = columns(tmp_path / "a.csv", "x,y", x.tolist(), (2 * x).tolist())
    other, said = columns(tmp_path / "b.csv", "x,y", map(written, x), map(written, 2 * x))
    assert told in said and other.classes is None
    for mine, theirs in ((other.columns[0].values, plain.columns[0].values), (other.target, plain.target)):
        assert np.corrcoef(mine, theirs)[0, 1] > 0.9999


def test_numbers_with_a_few_texts_are_refused_by_name(tmp_path):
    cells = [i / 3 for i in range(50)]
    table, said = columns(tmp_path / "t.csv", "x,y", [*cells[:-2], "-", "n.a."], ["p", "q"] * 25)
    assert np.isnan(table.columns[0].values).sum() == 2 and "x: 2 of 50 values are missing" in said
    table, said = columns(tmp_path / "t.csv", "x,y", cells, [*cells[:-1], "-"])
    assert len(table) == 49 and table.classes is None and "1 of 50 rows have no y" in said
    with pytest.raises(DataError, match="column x: 49 cells are numbers with decimal points, and 1 are not: '<3'"):
        columns(tmp_path / "t.csv", "x,y", [*cells[:-1], "<3"], ["p", "q"] * 25)
    with pytest.raises(DataError, match="column x: '1,234' is 1.234 with decimal commas and 1234 with commas"):
        columns(tmp_path / "t.csv", "x,y", ["1,234"] * 50, ["p", "q"] * 25)


def test_words_for_missing_values_are_classes_and_categories_of_their_own(tmp_path):
    """Among numbers they are missing values."""
    regions, garages = ["NA", "EU", "None", "null"] * 15, ["none", "Attchd", "n/a", "", "?"] * 12
    table, said = columns(tmp_path / "t.csv", "x,garage,n,y", [f"{i}.5" for i in range(60)], garages,
                          ["1.5", "NA", "2", "None"] * 15, regions)
    assert table.classes == ("EU", "NA", "None", "null") and np.bincount(table.target).tolist() == [15] * 4
    _, garage, n = table.columns
    assert garage.levels == ("Attchd", "n/a", "none", "(missing)")
    assert np.bincount(garage.values).tolist() == [12, 12, 12, 24] and np.isnan(n.values).sum() == 30
    for part in ("y: NA, None, null count as values of their own", "garage: n/a, none count as values",
                 "garage: 24 of 60 values are missing", "n: 30 of 60 values are missing"):
        assert part in said
    empty = columns(tmp_path / "t.csv", "x,z,y", regions, ["NA", ""] * 30, ["a", "b"] * 30)[1]
    assert "z is empty and left out" in empty


@pytest.mark.parametrize("written", ["{}%", "{} %", "${}", "{} EUR", "{}"])
@pytest.mark.parametrize("missing", ["", "?", "NA", "-"])
@pytest.mark.parametrize("target", [False, True])
def test_empty_cells_take_nothing_from_a_unit(written, missing, target, tmp_path):
    cells = [missing if i in (3, 40) else written.format(7 * i % 31 / 4) for i in range(60)]
    made = (["p", "q", "r"] * 20, cells) if target else (cells, ["p", "q", "r"] * 20)
    table, said = columns(tmp_path / "t.csv", "x,y", *made)
    expected = [np.nan if i in (3, 40) else 7 * i % 31 / 4 for i in range(60)]
    if target:
        assert table.classes is None and table.target.tolist() == [x for x in expected if x == x]
    else:
        np.testing.assert_array_equal(table.columns[0].values, expected)
    assert ("2 of 60 rows have no y" if target else "x: 2 of 60 values are missing") in said


@pytest.mark.parametrize("labels, classes", [
    (["1", "1.0", "2", "2.00"], ("1", "2")), (["1", "1.0", "x", "x"], ("1", "x")),
    (["-1", "-1.", "+1", "1"], ("-1", "1")),
    (["1.5", "1.50", "2", "2"], ("1.5", "2")), (["007", "007", "7a", "7a"], ("007", "7a")),
    (["+", "-", "+", "-"], ("+", "-"))])
def test_one_number_is_one_class_however_it_is_written(labels, classes, tmp_path):
    table, _ = columns(tmp_path / "t.csv", "x,y", [3, 1, 4, 1] * 5, labels * 5, kind="classification")
    assert table.classes == classes and sorted(np.bincount(table.target)) == [10, 10]


def shuffled(values):
    return np.random.default_rng(0).permutation(values)


IDENTIFIERS = {"from 0": np.arange(60), "from 1000, down": 1000 - np.arange(60), "steps of 10": 10 * np.arange(60),
               "shuffled": shuffled(np.arange(60)), "shuffled steps": shuffled(7 * np.arange(60) + 3),
               "with gaps": np.delete(np.arange(64), [3, 9, 20, 41]), "written 1.0": np.arange(60) / 1.0,
               "with wider gaps": np.cumsum(np.random.default_rng(0).integers(1, 12, 60))}
FEATURES = {"dates": 202401010000 + 37 * np.arange(60) ** 2, "counts": np.random.default_rng(0).poisson(30, 60),
            "halves": np.arange(60) / 2, "years of pairs": 1960 + np.arange(60) // 2,
            "large": np.random.default_rng(0).choice(10_000, 60, replace=False)}


@pytest.mark.parametrize("values", IDENTIFIERS.values(), ids=IDENTIFIERS)
def test_whole_numbers_that_identify_rows_are_left_out_and_named(values, tmp_path):
    noise = np.random.default_rng(1).normal(size=60)
    table, said = columns(tmp_path / "t.csv", "no,x,y", values, noise, ["a"] * 30 + ["b"] * 30)
    assert [column.name for column in table.columns] == ["x"] and "no counts the rows and is left out" in said


@pytest.mark.parametrize("values", FEATURES.values(), ids=FEATURES)
def test_other_whole_numbers_stay(values, tmp_path):
    table, said = columns(tmp_path / "t.csv", "no,y", values, ["a"] * 30 + ["b"] * 30)
    assert [column.name for column in table.columns] == ["no"] and "left out" not in said


def test_rows_without_target_do_not_hide_an_identifier(tmp_path):
    labels = ["a"] * 20 + [""] * 20 + ["b"] * 20
    assert "no counts the rows" in columns(tmp_path / "t.csv", "no,x,y", range(60), [1, 2, 3] * 20, labels)[1]


def task_of(path, **given):
    sigmas = given.pop("sigmas", [0.2, 0.5, 1.0])
    return uci.UCI("wine", "ordinal", "standard", (0.6, 0.2, 0.2), 2, sigmas, csv=str(path), **given)


@pytest.mark.parametrize("scaling", ["standard", "minmax"])
def test_columns_are_scaled_before_they_are_rounded(scaling, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=300)
    columns(tmp_path / "t.csv", "x,y", (202401010000 + 1000 * x).round().astype(np.int64), np.sin(2 * x))
    task = task_of(tmp_path / "t.csv", target="y", sigmas=[5.0])
    task.scaling = scaling
    scaled = np.concatenate(task.divide(0, 0).x)[:, 0]
    order = np.random.default_rng([0, 0]).permutation(300)
    assert scaled.dtype == np.float32 and np.corrcoef(scaled, x[order])[0, 1] > 0.99999
    assert list(task.records(Mechanism.of("exact"), 0))[-1]["r2"] > (0.9 if scaling == "standard" else -1)


@pytest.mark.parametrize("target, mark", [("number", "the mean"), ("class", "the most frequent class")])
def test_a_fit_that_is_worse_than_none_says_so(target, mark, tmp_path):
    rng = np.random.default_rng(0)
    noise, x = rng.normal(size=200), rng.normal(size=200)
    labels = {"number": [noise.tolist(), x.tolist()],
              "class": [["a" if i % 5 else "b" for i in range(200)], np.where(x > 0, "a", "b")]}
    for values, worse in zip(labels[target], (True, False)):
        columns(tmp_path / "t.csv", "x,y", x.tolist(), values)
        task = task_of(tmp_path / "t.csv", target="y", sigmas=[2.0 if not worse else 1000.0])
        said = task.summary(list(task.records(Mechanism.of("exact"), 0)))
        assert (f"worse than {mark} of the training part" in said) == worse and len(said.splitlines()) == 1 + worse


@pytest.mark.filterwarnings("ignore:.*no positive kernel mass:UserWarning")
def test_no_single_row_decides_r2(tmp_path):
    """trig on scikit-learn's diabetes: a mass near 0 made one prediction, and with it an r2 of -5000."""
    rows = load_diabetes(scaled=False)
    np.savetxt(tmp_path / "t.csv", np.column_stack([rows.data, rows.target]), "%g", ",", comments="",
               header=",".join([*rows.feature_names, "y"]))
    task = uci.UCI("wine", "ordinal", "standard", (0.9, 0.05, 0.05), 5, [0.1, 0.2, 0.4, 0.75, 1.5],
                   csv=str(tmp_path / "t.csv"), target="y")
    said = task.summary(list(task.records(Mechanism.of(features="trig", m=256), 0)))
    assert float(re.search(r"r2 (-?[\d.]+)", said)[1]) > 0.1, said


def test_a_target_of_one_value_is_refused(tmp_path):
    with pytest.raises(DataError, match="column y: 1 classes in 30 rows"):
        columns(tmp_path / "t.csv", "x,y", range(30), ["a"] * 30)
    with pytest.raises(DataError, match="column y: every row has 2.5: there is nothing to predict"):
        columns(tmp_path / "t.csv", "x,y", range(30), [2.5] * 30)


def test_a_pipe_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(DataError, match="t.csv cannot be read: a pipe, socket or device, not a file"):
        read(tmp_path / "t.csv", "y")


def test_all_bandwidths_have_the_rows_of_one_draw(tmp_path):
    """With thousands of columns rows are drawn longer than they are used."""
    columns(tmp_path / "t.csv", "x,z,y", *np.random.default_rng(0).normal(size=(2, 60)).tolist(), ["a", "b"] * 30)
    mechanism, drawn = Mechanism.of(features="oprf", sampler="orthogonal", m=4), []

    def sampler(m, d, *args, **options):
        drawn.append(m)
        return blocks.orthogonal(m, d, *args, **options)

    task, given = task_of(tmp_path / "t.csv", target="y"), SimpleNamespace(
        estimates=True, kernel_map=mechanism.kernel_map, sampler=sampler, m=4)
    split, states = task.divide(0, 0), []
    for sigma in task.sigmas:
        states.append(task.estimator(given, sigma, 7).fit(split.x[0], split.y[0]).state_)
    assert drawn == [4]
    for sigma, state in zip(task.sigmas, states):
        task.drawn = uci.DrawnOnce()
        assert torch.equal(task.estimator(given, sigma, 7).fit(split.x[0], split.y[0]).state_, state)
    assert drawn == [4] * 4


def test_thousands_of_columns_take_seconds(tmp_path):
    rng = np.random.default_rng(0)
    cells = rng.normal(size=(60, 3000)).round(3).astype(str)
    lines = [[*(f"c{i}" for i in range(3000)), "y"], *([*row, "ab"[i % 2]] for i, row in enumerate(cells))]
    (tmp_path / "t.csv").write_text("\n".join(map(",".join, lines)))
    start = time.perf_counter()
    assert len(read(tmp_path / "t.csv", "y")[0].columns) == 3000 and time.perf_counter() - start < 5
    with pytest.raises(DataError) as refused:
        read(tmp_path / "t.csv", None)
    assert "and 2981 more" in str(refused.value)
