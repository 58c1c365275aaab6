"""Tables of cells: where rows and cells end, and what is refused by its line."""

import re
from pathlib import Path

import pytest
from test_data import rows_of

from crt_exp.data import DataError, arena, glue, own_table, tabular
from crt_exp.data.delimited import PLAIN, QUOTED, table
from crt_exp.data.protein import read_families
from crt_exp.data.speech_table import entries

WITHIN = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e")


@pytest.mark.parametrize("quoting, separator", [(QUOTED, ","), (QUOTED, ";"), (QUOTED, "\t"), (PLAIN, "\t")])
@pytest.mark.parametrize("mark", WITHIN, ids=ascii)
def test_rows_end_at_line_feeds_alone(mark, quoting, separator):
    text = separator.join(["a", "b"]) + "\n" + separator.join([f"x{mark}y", "1"]) + "\n\n" + separator.join("z2")
    names, rows = table(Path("t"), text, separator, quoting)
    assert names == ["a", "b"] and rows == [(2, [f"x{mark}y", "1"]), (4, ["z", "2"])]


def test_quoted_cells_keep_separators_marks_and_line_feeds():
    _, rows = table(Path("t"), 'a,b\n"w, x, ""y""\nz",1\nu,2', ",")
    assert rows == [(2, ['w, x, "y"\nz', "1"]), (4, ["u", "2"])]
    _, rows = table(Path("t"), 'a\tb\n"x\t1\n"y\t2', "\t", PLAIN)
    assert rows == [(2, ['"x', "1"]), (3, ['"y', "2"])]


@pytest.mark.parametrize("text, message", [
    ("a,b\n1,2\n3\n", "line 3: 1 cells, 2 expected"),
    ("a,b\n1,well, no\n", "line 2: 3 cells, 2 expected; a cell that holds ',' stands between quotation marks"),
    ("a,b,a\n1,2,3\n", "line 1: the header must give each column a name of its own, and 'a' stands there twice"),
    ('a,b\n1,2\n"x,3\n4,5\n', "line 3: a cell begins with a quotation mark that does not end"),
    ('a,b\n1,2\n"x" y,3\n', "line 3: behind the quotation mark that ends a cell no ',' stands"),
    ("a,b\n1," + "x" * 140_000 + "\n", "line 2: a cell of more than 131072 characters")])
def test_what_is_refused_names_the_line(text, message):
    with pytest.raises(DataError, match="t.csv, " + message.replace('"', '\\"')):
        table(Path("t.csv"), text, ",")


# ---- every reader of tables ------------------------------------------------------------------------------------------

ROWS = 40


def own(path, separator, cells):
    lines = [separator.join([str(7 * i % 11), cell, "ab"[i % 2]]) for i, cell in enumerate(cells)]
    path.write_text("\n".join([separator.join(("x", "note", "y")), *lines]))
    return len(own_table.read(path, "y")[0])


def pairs(path, separator, cells):
    path.write_text("\n".join(["note,y", *(f"{cell},{'ab'[i % 2]}" for i, cell in enumerate(cells))]))
    return len(own_table.read(path, "y")[0])


def speech(path, separator, cells):
    lines = [separator.join([f"{i}.wav", cell, "train"]) for i, cell in enumerate(cells)]
    path.write_text("\n".join([separator.join(("audio", "text", "split")), *lines]))
    return len(entries(path))


def sentences(path, separator, cells):
    path.write_text("\n".join(["sentence\tlabel", *(f"{cell}\t{i % 2}" for i, cell in enumerate(cells))]))
    path.rename(path.with_name("train.tsv"))
    read = glue.load("sst2", "train", path.parent)
    return len(read.labels) if read.texts[0] == cells else 0


def families(path, separator, cells):
    path.write_text("\n".join(f"P{i}\t{cell}" for i, cell in enumerate(cells)))
    return len(list(read_families(path)))


def documents(path, separator, cells):
    path.write_text("\n".join(f"{i % 2}\ta\tb\t{cell}\ttext" for i, cell in enumerate(cells)))
    return len(arena.pairs(path))


def published(path, separator, cells):
    rows = [separator.join(row) for row in rows_of("car")]
    rows[:ROWS] = [cell.replace("word", "") + row for cell, row in zip(cells, rows)]
    path.write_text("\n".join(rows))
    return len(tabular.read("car", path))


@pytest.mark.parametrize("first, last", [('"open', 'close"'), ('"open', "word"), ('"a"b', "word"), ('a"', '"'),
                                         ('"', '"'), ('""', '"'), ('"x', '","')])
@pytest.mark.parametrize("read, name, separator", [
    (own, "t.csv", ","), (pairs, "t.csv", ","), (own, "t.csv", ";"), (own, "t.tsv", "\t"),
    (speech, "t.csv", ","), (speech, "t.tsv", "\t"), (sentences, "t.tsv", "\t"),
    (families, "t.tsv", "\t"), (documents, "t.tsv", "\t"), (published, "car.data", ",")])
def test_a_lone_quotation_mark_loses_no_row_without_a_word(read, name, separator, first, last, tmp_path):
    """Every row is read, or the file is refused by its line; files that use no quoting (.tsv of GLUE) are read."""
    cells = ["word"] * ROWS
    cells[10], cells[20] = first, last
    try:
        assert read(tmp_path / name, separator, cells) == ROWS
    except DataError as error:
        assert re.search(r", line \d+[:,]", str(error)) and (name != "t.tsv" or read is own), error


def test_cells_of_several_lines_stay_where_they_are_quoted_well():
    text = 'x,note,y\n1,"Dear, sir,\nthanks","a"\n2,"one\n\nthree, four",b\n3,c,"d\ne, f"'
    assert [len(cells) for _, cells in table(Path("t"), text, ",")[1]] == [3, 3, 3]
