"""Laws of the tables: what `load` returns, and what it says of files that are not the published ones."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crt_exp.data import DataError, chess
from crt_exp.data.tabular import EMBEDDED, LAYOUTS, load, names, source_of, target_field

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")
FILES = sorted(LAYOUTS)
WITH_NUMBERS = [name for name in FILES if any(field.levels is None for field in LAYOUTS[name].fields)]
WITH_LEVELS = [name for name in FILES if any(field.levels for field in LAYOUTS[name].fields)]
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
BUNDLED = {"wine": (178, 13), "breast_cancer": (569, 30), "iris": (150, 4), "digits": (1797, 64), "chess": (28056, 6)}


def rows_of(name: str, **changed: str) -> list[list[str]]:
    """A valid made-up table in the layout of `name`, with as many rows as published.

    changed: new text by place, as in r9c0="abc" for the first field of line 10.
    """
    rows = [*valid_rows(name)]
    for place, text in changed.items():
        row, column = map(int, place[1:].split("c"))
        rows[row] = [text if j == column else old for j, old in enumerate(rows[row])]
    return rows


@functools.cache
def valid_rows(name: str) -> list[list[str]]:
    count = source_of(name).files[0].rows
    columns = [[field.levels[i % len(field.levels)] if field.levels else f"{i % 7}.{j}" for i in range(count)]
               for j, field in enumerate(LAYOUTS[name].fields)]
    return [*map(list, zip(*columns))]


def write(folder: Path, name: str, rows: list[list[str]], end: str = "\n", last: str = "\n") -> Path:
    path = folder / Path(source_of(name).files[0].path).name
    text = end.join((LAYOUTS[name].separator or "  ").join(row) for row in rows) + last
    path.write_bytes(text.encode())
    return path


def refusal(name: str, folder: Path | None) -> str:
    """The message of the DataError that loading raises: one to three lines, none of them endless."""
    with pytest.raises(DataError) as caught:
        load(name, folder)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message


def place_of(name: str, numeric: bool) -> int:
    layout = LAYOUTS[name]
    return next(j for j, field in enumerate(layout.fields)
                if (field.levels is None) == numeric and field.name != layout.dropped)


# ------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("name", FILES)
def test_layout_gives_the_documented_shape(name, tmp_path):
    write(tmp_path, name, rows_of(name))
    table, (rows, ordinal, onehot, counts) = load(name, tmp_path), PUBLISHED[name]
    assert len(table) == rows and str(tmp_path) in table.source
    for coding, width in (("ordinal", ordinal), ("onehot", onehot)):
        encoded = table.encode(coding)
        assert encoded.shape == (rows, width)
        assert encoded.dtype == np.float64 and np.isfinite(encoded).all()
    assert (table.classes is None) == (counts is None) == (target_field(LAYOUTS[name]).levels is None)
    assert table.target.dtype == (np.int64 if table.classes else np.float64)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in ("chess", "nursery") else [])
                                  for name in FILES])  # the two have tens of thousands of rows, read by the same code
def test_line_ends_do_not_matter(name, tmp_path):
    write(tmp_path, name, rows_of(name))
    plain = load(name, tmp_path)
    for end, last in (("\r\n", "\r\n"), ("\n", ""), ("\r\n", ""), ("\n", "\n\n  \n"), ("\n\n", "\n")):
        write(tmp_path, name, rows_of(name), end, last)
        other = load(name, tmp_path)
        assert all((a.values == b.values).all() for a, b in zip(other.columns, plain.columns))
        assert (other.target == plain.target).all()


def test_blanks_and_byte_order_mark_do_not_matter(tmp_path):
    path = write(tmp_path, "car", [[f" {text} " for text in row] for row in rows_of("car")])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load("car", tmp_path).encode().shape == (1728, 6)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_number_of_columns(name, change, tmp_path):
    rows = rows_of(name)
    rows[2] = rows[2][:-1] if change < 0 else rows[2] + ["1"]
    path, width = write(tmp_path, name, rows), len(LAYOUTS[name].fields)
    message = refusal(name, tmp_path)
    assert f"{path}, line 3: {width + change} columns, {width} expected" in message
    assert f"fetch uci/{name}" in message and source_of(name).page in message


@pytest.mark.parametrize("name", WITH_NUMBERS)
@pytest.mark.parametrize("text, problem", [("abc", "not a number"), ("?", "not a number"), ("1_0", "not a number"),
                                           ("nan", "not a finite number"), ("-inf", "not a finite number"),
                                           ("1e999", "not a finite number")])
def test_bad_number(name, text, problem, tmp_path):
    j = place_of(name, numeric=True)
    path = write(tmp_path, name, rows_of(name, **{f"r9c{j}": text}))
    assert f"{path}, line 10, column {LAYOUTS[name].fields[j].name}: {text!r} is {problem}" in refusal(name, tmp_path)


@pytest.mark.parametrize("name", WITH_LEVELS)
def test_unseen_level(name, tmp_path):
    j = place_of(name, numeric=False)
    path, field = write(tmp_path, name, rows_of(name, **{f"r4c{j}": "unheard"}), end="\n\n"), LAYOUTS[name].fields[j]
    message = refusal(name, tmp_path)                            # blank lines count as lines
    assert f"{path}, line 9, column {field.name}: 'unheard' is not one of {', '.join(field.levels)}" in message


@pytest.mark.parametrize("name", [name for name in FILES if target_field(LAYOUTS[name]).levels])
def test_unseen_label(name, tmp_path):
    layout = LAYOUTS[name]
    write(tmp_path, name, rows_of(name, **{f"r6c{layout.fields.index(target_field(layout))}": "28"}))
    assert f"line 7, column {layout.target}: '28' is not one of" in refusal(name, tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(name, tmp_path):
    rows = rows_of(name)
    write(tmp_path, name, rows[:-5])
    assert f"truncated: {len(rows) - 5} rows, expected {len(rows)}" in refusal(name, tmp_path)
    write(tmp_path, name, rows[:20] + [rows[20][:2]], last="")        # cut in the middle of a row
    message = refusal(name, tmp_path)
    assert "line 21" in message and f"21 rows, {len(rows)} expected: the file looks truncated" in message
    write(tmp_path, name, rows + rows[:1])
    assert f"{len(rows) + 1} rows, expected {len(rows)}" in refusal(name, tmp_path)


@pytest.mark.parametrize("content, problem", [
    (b"", "empty"), (b"\n \r\n\n", "empty"), (b"\x1f\x8b\x08\xff", "text file"),
    (b"<html>Not Found</html>\n", "line 1: 1 columns, 7 expected")])
def test_file_that_is_no_table(content, problem, tmp_path):
    (tmp_path / "car.data").write_bytes(content)
    assert problem in refusal("car", tmp_path)


def test_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "car.data").mkdir()
    assert "cannot be read" in refusal("car", tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_says_what_to_get_and_where_to_put_it(name, tmp_path, monkeypatch):
    file = Path(source_of(name).files[0].path).name
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    if name not in EMBEDDED:
        message = refusal(name, None)
        assert f"{tmp_path / 'uci' / file} is not there" in message
        assert f"python -m crt_exp.data fetch uci/{name} --dir {tmp_path}" in message
    monkeypatch.delenv("CRT_DATA")
    for message in [refusal(name, tmp_path)] + ([] if name in EMBEDDED else [refusal(name, None)]):
        assert file in message and source_of(name).page in message
        assert f"python -m crt_exp.data fetch uci/{name} --dir DIR" in message
        assert "CRT_DATA=DIR" in message and "task.data_dir=DIR/uci" in message
    if name not in EMBEDDED:
        assert "CRT_DATA is not set" in refusal(name, None)


def test_data_dir_that_is_a_file(tmp_path):
    path = write(tmp_path, "car", rows_of("car"))
    assert "is not there" in refusal("car", path)


def test_unknown_name_and_coding():
    assert "Did you mean nursery?" in refusal("nurssery", None)
    assert "abalone" in refusal("", None)
    with pytest.raises(DataError, match="ordinal or onehot"):
        load("chess").encode("one-hot")


# ------------------------------------------------------------------------------------------------------ coding
def test_orders_are_the_documented_ones(tmp_path):
    write(tmp_path, "car", [["low", "vhigh", "5more", "more", "small", "high", "vgood"]] * 1728)
    table = load("car", tmp_path)
    assert table.encode("ordinal")[0].tolist() == [0, 3, 3, 2, 0, 2] and table.target[0] == 3
    assert table.encode("onehot")[0].tolist() == [1, 0, 0, 0, *[0, 0, 0, 1] * 2, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert table.columns[0].name == "buying" and table.columns[0].levels == ("low", "med", "high", "vhigh")


def test_category_without_order_is_never_a_number(tmp_path):
    write(tmp_path, "abalone", rows_of("abalone", r0c0="I", r1c0="M", r2c0="F"))
    table = load("abalone", tmp_path)
    assert table.columns[0].levels == ("M", "F", "I") and not table.columns[0].ordered
    assert table.encode("ordinal")[:3, :3].tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert "28" not in table.classes and table.classes[-1] == "29" and len(table.classes) == 28


@pytest.mark.parametrize("name", FILES)
def test_codings_agree(name, tmp_path):
    write(tmp_path, name, rows_of(name))
    for column in load(name, tmp_path).columns:
        onehot = column.encode("onehot")
        if column.levels:
            assert (onehot.sum(1) == 1).all() and (onehot.argmax(1) == column.values).all()
        else:
            assert (onehot[:, 0] == column.values).all()


# ---------------------------------------------------------------------------------------------------- embedded
@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets_need_nothing(name, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    table, (rows, columns) = load(name), BUNDLED[name]
    assert table.encode().shape == (rows, columns) and np.isfinite(table.encode()).all()
    assert "embedded" in table.source and set(table.target) == set(range(len(table.classes)))


def test_names_describes_all():
    assert set(names()) == set(FILES) | set(EMBEDDED)


def test_chess_has_the_published_class_counts():
    rows = chess.positions()
    assert rows.shape == (28056, 7) and len(np.unique(rows[:, :6], axis=0)) == 28056
    assert np.bincount(rows[:, 6]).tolist() == CHESS_COUNTS
    assert (rows == chess.positions()).all()


def test_chess_values_are_those_of_every_mirror_image():
    code = chess.solve()
    mirrors = (8 * (7 - chess.FILE) + chess.RANK, 8 * chess.FILE + 7 - chess.RANK, 8 * chess.RANK + chess.FILE)
    for mirror in mirrors:
        assert (code[np.ix_(mirror, mirror, mirror)] == code).all()


def test_chess_known_positions():
    square = lambda name: 8 * "abcdefgh".index(name[0]) + int(name[1]) - 1
    value = lambda *squares: code[tuple(map(square, squares))]
    code = chess.solve()
    assert chess.CLASSES[value("c1", "a3", "a1")] == "zero"       # mate on the edge
    assert chess.CLASSES[value("a1", "c1", "d2")] == "draw"       # the rook is taken
    assert chess.CLASSES[value("c2", "b2", "a1")] == "draw"       # stalemate: the rook is guarded
    assert value("d4", "h8", "d5") == value("d4", "d4", "h1") == -1


# ------------------------------------------------------------------------------------------------ official files
def official_folder(name: str) -> Path:
    return Path(os.environ["CRT_DATA"]) / "uci"


@official
@pytest.mark.parametrize("name", FILES)
def test_official_file(name):
    folder, (rows, _, _, counts) = official_folder(name), PUBLISHED[name]
    table = load(name, folder)
    assert len(table) == rows and np.isfinite(table.encode()).all()
    assert counts is None or np.bincount(table.target).tolist() == counts
    widths = [np.ptp(column, axis=0) for column in table.encode("onehot").T]
    assert min(widths) > 0                                       # no constant feature
    if name not in EMBEDDED:
        assert (load(name).encode() == table.encode()).all()     # the default folder


@official
def test_first_rows_of_official_files():
    for name in ("abalone", "cmc", "boston", "yeast"):
        official_folder(name)
    row = load("abalone")
    assert row.encode()[0].tolist() == [1, 0, 0, 0.455, 0.365, 0.095, 0.514, 0.2245, 0.101, 0.15]
    assert row.classes[row.target[0]] == "15"
    assert load("cmc").encode()[0].tolist() == [24, 1, 2, 3, 1, 1, 0, 1, 0, 0, 2, 0]
    assert load("boston").target[0] == 24.0 and load("boston").encode()[0, 0] == 0.00632
    assert load("yeast").encode()[0].tolist() == [0.58, 0.61, 0.47, 0.13, 0.5, 0, 0.48, 0.22]


@official
@pytest.mark.parametrize("name", ["wine", "chess"])
def test_embedded_set_is_the_official_file(name):
    embedded, file = load(name), load(name, official_folder(name))
    assert (embedded.encode("onehot") == file.encode("onehot")).all() and (embedded.target == file.target).all()
    assert [column.name for column in embedded.columns] == [column.name for column in file.columns]
    assert embedded.classes == file.classes
    assert embedded.source != file.source


def test_importing_the_command_loads_no_heavy_library():
    code = "import sys, crt_exp.data.__main__; print(*{'torch', 'sklearn', 'pandas', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("options, by", [
    ("task=uci task.dataset=iris", "task.dataset=iris, which is embedded"),
    ("task=trembl", "task.dataset=generated: leave it out, or set task.dataset=uniprot"),
    ("task=ptb task.corpus=some.txt", "task.corpus=some.txt"),
    ("task=lra task.dataset=pathfinder", "task.dataset=pathfinder"),
    ("task=books task.text=some.txt", "task.text"),
    ("task=mlm task.text=some.txt", "task.text"),
    ("task=mlm task.hub.name=some/set", "task.hub.name"),
    ("task=librispeech task.source=hub trainer.steps=1", "task.source=hub"),
])
def test_a_folder_that_is_not_used_is_refused(typed, options, by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("some words of a text\n" * 40)
    code, _, err = typed(*options.split(), "task.data_dir=/some/folder", "logger=none")
    assert code == 2 and f"task.data_dir = /some/folder is not used by {by}" in err, err
