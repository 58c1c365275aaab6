"""Tables of cells: where rows and cells end, and what is refused by its line."""

from pathlib import Path

import pytest

from crt_exp.data import DataError
from crt_exp.data.delimited import PLAIN, QUOTED, table

WITHIN = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e")


@pytest.mark.parametrize("quoting, separator", [(QUOTED, ","), (QUOTED, ";"), (QUOTED, "\t"), (PLAIN, "\t")])
@pytest.mark.parametrize("mark", WITHIN, ids=ascii)
def test_rows_end_at_line_feeds_alone(mark, quoting, separator):
    text = separator.join(["a", "b"]) + "\n" + separator.join([f"x{mark}y", "1"]) + "\n\n" + separator.join("z2")
    names, rows = table(Path("t"), text, separator, quoting)
    assert names == ["a", "b"] and rows == [(2, [f"x{mark}y", "1"]), (4, ["z", "2"])]


def test_quoted_cells_keep_separators_marks_and_line_feeds():
    _, rows = table(Path("t"), 'a,b\n"x, ""y""\nz",1\nu,2', ",")
    assert rows == [(2, ['x, "y"\nz', "1"]), (4, ["u", "2"])]
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
