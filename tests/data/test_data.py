"""Laws of the tables: what `load` returns, and what is refused of files that are not the published ones."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.tabular import BLANKS, LAYOUTS, file_of, load

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")
FILES = sorted(LAYOUTS)
CHESS_COUNTS = [2796, 27, 78, 246, 81, 198, 471, 592, 683, 1433, 1712, 1985, 2854, 3597, 4194, 4553, 2166, 390]

# name: (rows, width by ordinal, width by onehot, rows of each class in the order of `classes`), from UCI's pages
PUBLISHED = {
    "abalone": (4177, 10, 10, [1, 1, 15, 57, 115, 259, 391, 568, 689, 634, 487, 267, 203, 126, 103, 67, 58, 42, 32, 26,
                               14, 6, 9, 2, 1, 1, 2, 1]),
    "banknote": (1372, 4, 4, [762, 610]),
    "car": (1728, 6, 21, [1210, 384, 69, 65]),
    "yeast": (1484, 8, 8, [463, 429, 244, 163, 51, 44, 35, 30, 20, 5]),
    "cmc": (1473, 12, 24, [629, 333, 511]),
    "nursery": (12960, 8, 27, [4320, 2, 328, 4266, 4044]),
    "wifi": (2000, 7, 7, [500, 500, 500, 500]),
    "chess": (28056, 6, 40, CHESS_COUNTS),
    "wine": (178, 13, 13, [59, 71, 48]),
    "boston": (506, 13, 14, None),
}
BUNDLED = {"wine": (178, 13), "breast_cancer": (569, 30), "iris": (150, 4), "digits": (1797, 64)}


@functools.cache
def valid_rows(name: str) -> list[list[str]]:
    """A made-up table in the layout of `name`, with as many rows as published."""
    levels = [field.levels.split() for field in LAYOUTS[name]]
    return [[each[i % len(each)] if each else f"{i % 7}.{j}" for j, each in enumerate(levels)]
            for i in range(PUBLISHED[name][0])]


def write(folder: Path, name: str, rows: list[list[str]], end: str = "\n", begin: str = "") -> Path:
    path = file_of(name, folder)
    separator = "  " if name in BLANKS else ","
    path.write_text(begin + end.join(separator.join(row) for row in rows) + end, encoding="utf-8")
    return path


def refusal(name: str, folder: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        load(name, folder)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_the_documented_shape(name, tmp_path):
    write(tmp_path, name, valid_rows(name))
    table, (rows, ordinal, onehot, counts) = load(name, tmp_path), PUBLISHED[name]
    assert len(table) == rows and str(tmp_path) in table.source
    for coding, width in (("ordinal", ordinal), ("onehot", onehot)):
        encoded = table.encode(coding)
        assert encoded.shape == (rows, width) and encoded.dtype == np.float64 and np.isfinite(encoded).all()
    assert (table.classes is None) == (counts is None)
    assert table.target.dtype == (np.int64 if table.classes else np.float64)
    write(tmp_path, name, [[f"{cell} " for cell in row] for row in valid_rows(name)], "\r\n", "\ufeff")
    other = load(name, tmp_path)                       # line ends, blanks and a byte order mark do not matter
    assert (other.encode("onehot") == table.encode("onehot")).all() and (other.target == table.target).all()


@pytest.mark.parametrize("name, change, problem", [
    ("car", lambda rows: rows[2].pop(), "row 3, column class: '' is not one of unacc"),
    ("car", lambda rows: rows[4].append("1"), "line 5, saw 8"), ("car", lambda rows: rows.pop(), "expected (1728, 7)"),
    ("car", lambda rows: rows.append(rows[0]), "(1729, 7)"), ("car", list.clear, "No columns"),
    ("car", lambda rows: rows[3].__setitem__(0, "unheard"), "row 4, column buying: 'unheard' is not one of low, med"),
    ("abalone", lambda rows: rows[6].__setitem__(8, "28"), "row 7, column rings: '28' is not one of"),
    *[("yeast", lambda rows, text=text: rows[9].__setitem__(1, text), f"row 10, column mcg: '{text}' is not a finite")
      for text in ("abc", "?", "1_0", "nan", "-inf", "1e999")]])
def test_what_is_wrong_in_a_file_is_named(name, change, problem, tmp_path):
    rows = [list(row) for row in valid_rows(name)]
    change(rows)
    path, message = write(tmp_path, name, rows), refusal(name, tmp_path)
    assert str(path) in message and problem in message and f"fetch uci/{name}" in message


def test_missing_files_and_unknown_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    assert f"{tmp_path / 'uci' / 'car.data'} is not there" in refusal("car", None)
    monkeypatch.delenv("CRT_DATA")
    assert "CRT_DATA is not set" in refusal("car", None) and "fetch uci/wine --dir DIR" in refusal("wine", tmp_path)
    assert "is not there" in refusal("car", write(tmp_path, "car", valid_rows("car")))
    with pytest.raises(ConfigError, match="did you mean nursery?"):
        load("nurssery")


def test_orders_are_the_documented_ones(tmp_path):
    write(tmp_path, "car", [["low", "vhigh", "5more", "more", "small", "high", "vgood"]] * 1728)
    table = load("car", tmp_path)
    assert table.encode("ordinal")[0].tolist() == [0, 3, 3, 2, 0, 2] and table.target[0] == 3
    assert table.encode("onehot")[0].tolist() == [1, 0, 0, 0, *[0, 0, 0, 1] * 2, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    write(tmp_path, "abalone", [["I", *row[1:]] for row in valid_rows("abalone")])
    table = load("abalone", tmp_path)                  # a category without order is never a number
    assert table.columns[0].levels == ("M", "F", "I") and table.encode("ordinal")[0, :3].tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", BUNDLED)
def test_embedded_sets_need_nothing(name, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    table = load(name)
    assert table.encode().shape == BUNDLED[name] and np.isfinite(table.encode()).all()
    assert "embedded" in table.source and set(table.target) == set(range(len(table.classes)))


@official
@pytest.mark.parametrize("name", FILES)
def test_official_file(name):
    table, (rows, _, _, counts) = load(name, Path(os.environ["CRT_DATA"]) / "uci"), PUBLISHED[name]
    assert len(table) == rows and counts in (None, np.bincount(table.target.astype(int)).tolist())
    embedded = load(name)                              # or the default folder
    assert (embedded.encode("onehot") == table.encode("onehot")).all() and (embedded.target == table.target).all()
    assert embedded.classes == table.classes
    first = {"abalone": [1, 0, 0, 0.455, 0.365, 0.095, 0.514, 0.2245, 0.101, 0.15],
             "cmc": [24, 1, 2, 3, 1, 1, 0, 1, 0, 0, 2, 0], "yeast": [0.58, 0.61, 0.47, 0.13, 0.5, 0, 0.48, 0.22]}
    assert table.encode()[0].tolist() == first.get(name, table.encode()[0].tolist())


def test_importing_the_command_loads_no_heavy_library():
    code = "import sys, crt_exp.data.__main__; print(*{'torch', 'sklearn', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("options, by", [
    ("task=uci task.dataset=iris", "task.dataset=iris, which is embedded"),
    ("task=ptb task.corpus=some.txt", "task.corpus=some.txt"),
    ("task=lra task.dataset=pathfinder", "task.dataset=pathfinder"),
    ("task=books task.text=some.txt", "task.text"),
    ("task=mlm task.text=some.txt", "task.text"),
    ("task=mlm task.hub.name=some/set", "task.hub.name"),
])
def test_a_folder_that_is_not_used_is_refused(typed, options, by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("some words of a text\n" * 40)
    code, _, err = typed(*options.split(), "task.data_dir=/some/folder", "logger=none")
    assert code == 2 and f"task.data_dir=/some/folder: not used by {by}" in err, err
