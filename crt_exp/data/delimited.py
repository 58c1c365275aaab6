"""Rows of cells with a header: csv files, as spreadsheets write them, and tables with tabs between.

Rows end at line feeds alone: the other line ends that Unicode knows (U+2028, NEL, VT, FF) may stand in cells.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crt_exp.data import DataError

QUOTED, PLAIN = csv.QUOTE_MINIMAL, csv.QUOTE_NONE  # whether a cell may stand between quotation marks


class DelimitedRow(NamedTuple):
    line: int              # of the file, where the row begins
    cells: list[str]


def table(path: Path, text: str, separator: str, quoting: int = QUOTED) -> tuple[list[str], list[DelimitedRow]]:
    """The names in the header, and the rows that are not blank, all of as many cells; of an empty text no names.

    Raises DataError naming file and line for quotation marks that do not end or enclose whole rows, for a cell of more
    characters than the csv module takes, for two columns of one name, and for a row of more or fewer cells.
    """
    lines = text.split("\n")
    rows = [DelimitedRow(line, cells) for line, cells in numbered(path, text, separator, quoting)
            if any(map(str.strip, cells))]
    if not rows:
        return [], []
    names = [name.strip() for name in rows[0].cells]
    if twice := next((name for i, name in enumerate(names) if name and name in names[:i]), None):
        raise DataError(f"{path}, line {rows[0].line}: the header must give each column a name of its own, and "
                        f"{twice!r} stands there twice")
    for line, cells in rows[1:]:
        if len(cells) != len(names):
            raise DataError(f"{path}, line {line}: {len(cells)} cells, {len(names)} expected"
                            + advice(separator, quoting))
        spanned = lines[line - 1:line + sum(cell.count("\n") for cell in cells)]
        if spanned[1:] and names[1:] and all(len(names) in widths(each, separator) for each in spanned if each):
            raise DataError(f"{path}, line {line}: a quoted cell spans {len(spanned)} lines that read as rows of "
                            'their own: write a quotation mark within a cell twice, "", or take the line ends out')
    return names, rows[1:]


def widths(line: str, separator: str) -> tuple[int, int]:
    """Cells of a line by itself, whether quotation marks are read or not."""
    return line.count(separator) + 1, len(next(csv.reader([line], delimiter=separator)))


def advice(separator: str, quoting: int) -> str:
    if quoting == PLAIN:
        return "; a cell holds no tab and no line end"
    return f"; a cell that holds {separator!r} stands between quotation marks" if separator != "\t" else ""


def numbered(path: Path, text: str, separator: str, quoting: int) -> Iterator[DelimitedRow]:
    reader = csv.reader(io.StringIO(text), delimiter=separator, quoting=quoting, strict=quoting != PLAIN)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}, line {line}: {reason(error, separator)}") from None
        if cells is None:
            return
        yield DelimitedRow(line, cells)


def reason(error: csv.Error, separator: str) -> str:
    if "field limit" in str(error):
        return f"a cell of more than {csv.field_size_limit()} characters: does a quotation mark not end?"
    if "unexpected end" in str(error):
        return "a cell begins with a quotation mark that does not end"
    return (f"behind the quotation mark that ends a cell no {separator!r} stands; within a cell each one is written "
            'twice, ""')
