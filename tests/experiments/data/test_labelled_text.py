"""Labelled text of one's own: formats, parts without a common text, and refusals."""

import pandas as pd
import pytest

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.labelled_text import (
    SHARES,
    read_files,
    read_hub,
    read_labelled,
)

ROWS = pd.DataFrame({"text": [f"text {i}" for i in range(60)], "label": ["b", "a", "NA"] * 20})
HUB = {"config": None, "train": "train", "validation": None, "test": None}


def read(path, kind=None, columns=None, **others):
    files = {"csv": path, "validation_csv": None, "test_csv": None} | others
    tables = read_files({f"task.{key}": file and str(file) for key, file in files.items()})
    return read_labelled(tables, columns, "label", kind, SHARES)


def rows_of(parts):
    return {name: [*zip(*part.texts, part.labels)] for name, part in parts.items()}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_parts(suffix, tmp_path):
    path = tmp_path / f"mine.{suffix}"
    ROWS.to_csv(tmp_path / "expected.csv", index=False)
    {
        "csv": lambda: ROWS.to_csv(path, index=False, sep=";"),
        "tsv": lambda: ROWS.to_csv(path, index=False, sep="\t"),
        "jsonl": lambda: ROWS.to_json(path, orient="records", lines=True),
        "parquet": lambda: ROWS.to_parquet(path),
    }[suffix]()
    task, parts = read(path)
    assert task.names == ("NA", "a", "b")
    assert rows_of(parts) == rows_of(read(tmp_path / "expected.csv")[1])
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 48,
        "validation": 6,
        "test": 6,
    }
    for text, code in rows_of(parts)["test"]:
        assert ROWS.label[int(text.split()[1])] == task.names[code]


def test_no_text_is_on_two_sides(tmp_path):
    """Neither a repeated text nor a text that pairs share; parts do not depend on the labels."""
    pairs = pd.DataFrame(
        {
            "text_a": [f"a{i // 3}" for i in range(60)],
            "text_b": [f"b{i}" if i % 9 else "a0" for i in range(60)],
            "label": ["x", "y"] * 30,
        }
    )
    pairs.to_csv(tmp_path / "pairs.csv", index=False)
    _, parts = read(tmp_path / "pairs.csv")
    sides = [{*part.texts[0], *part.texts[1]} for part in parts.values()]
    assert sum(len(part) for part in parts.values()) == 60
    assert sides[0].isdisjoint(sides[1] | sides[2])
    assert sides[1].isdisjoint(sides[2])


def test_given_parts_keep_their_rows_and_training_loses_them(tmp_path, caplog):
    ROWS.to_csv(tmp_path / "mine.csv", index=False)
    ROWS.iloc[:9].to_csv(tmp_path / "test.csv", index=False)
    _, parts = read(tmp_path / "mine.csv", test_csv=tmp_path / "test.csv")
    assert parts["test"].texts == [ROWS.text[:9].tolist()]
    trained = {*parts["train"].texts[0], *parts["validation"].texts[0]}
    assert trained == {*ROWS.text[9:]}
    assert "left out 9 rows whose text is in a later part" in caplog.text


def test_kind_of_labels(tmp_path):
    path = tmp_path / "mine.csv"
    ROWS.assign(label=[i % 5 + 1 for i in range(60)]).to_csv(path, index=False)
    assert read(path)[0].names == ("1", "2", "3", "4", "5")
    task, parts = read(path, "regression")
    assert not task.names
    assert task.metrics == ("spearman", "pearson")
    assert {*parts["train"].labels} == {1.0, 2.0, 3.0, 4.0, 5.0}
    ROWS.assign(label=[i % 5 + 0.5 for i in range(60)]).to_csv(path, index=False)
    assert not read(path)[0].names


def test_classes_of_a_hub_set_have_their_names(tmp_path, monkeypatch):
    import datasets

    names = ["World", "Sports"]
    features = datasets.Features(
        {"body": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    rows = {"body": [f"text {i}" for i in range(20)], "label": [0, 1] * 10}
    made = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: made)
    tables = read_hub(HUB | {"name": str(tmp_path), "data_files": None}, "label")
    task, parts = read_labelled(tables, ["body"], "label", None, SHARES)
    assert task.names == ("Sports", "World")
    for text, code in rows_of(parts)["train"]:
        assert task.names[code] == names[int(text.split()[1]) % 2]


@pytest.mark.parametrize(
    "content, kind, words",
    [
        ("text,class\nx,a\n", None, "no column label; its header has text, class; rename"),
        ("body,label\nx,a\n", None, "no column text; .*task.columns"),
        ("text,label\nx,a\ny,a\n", None, r"one class only \(a\)"),
        ("text,label\nx,a\n ,b\n", None, "row 2, column text is empty"),
        ("text,label\nx,a\ny\n", None, "row 2, column label is empty"),
        ("text,label\nx, y,a\nz, u,b\n", None, "row 1 has more cells than the header"),
        ("text,label\nx,a\ny,b\nx,a\ny,b\n", None, "2 groups of rows without a common text"),
        ("text,label\nx,a\ny,b\nz,a\nu,b\n", "regression", "the target holds words"),
        ("text,label\nx,1e3\ny,2.5\nz,1\nu,3\n", None, "numbers from 1 to 1000; expected at most"),
        ("text,label\nx,1\ny,2\nz,bad\nu,1\nv,2\nw,1\n", None, "row 3: 'bad'; expected a number"),
    ],
)
def test_tables_that_do_not_fit_are_refused(content, kind, words, tmp_path):
    (tmp_path / "mine.csv").write_text(content)
    with pytest.raises(DataError, match=f"task.csv=.*mine.csv: .*{words}"):
        read(tmp_path / "mine.csv", kind)


def test_a_class_without_training_rows_is_refused(tmp_path):
    ROWS.to_csv(tmp_path / "mine.csv", index=False)
    pd.DataFrame({"text": ["u", "v"], "label": ["new", "new"]}).to_csv(
        tmp_path / "test.csv", index=False
    )
    with pytest.raises(DataError, match="no row of class new"):
        read(tmp_path / "mine.csv", test_csv=tmp_path / "test.csv")
    with pytest.raises(DataError, match="mine.txt: expected a .csv, .tsv, .jsonl or .parquet"):
        (tmp_path / "mine.txt").touch()
        read(tmp_path / "mine.txt")
