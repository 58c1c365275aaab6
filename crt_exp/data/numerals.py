"""Columns of numbers as tables write them: 1234.5, and also 1234,5, 1.234,5, 1 234, 12 %, $1,234, with "-" for none.

A column is read in one way, which is told; where its cells leave two ways, or some are numbers and others are not, it
is refused: a guess would be wrong without a word.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crt_exp.data.tabular import as_number, is_number

EMPTY = {"na", "n/a", "n.a.", "n.d.", "nd", "nan", "-nan", "+nan", "none", "null", "nil", "-", "--", "---", ".", "..",
         "...", "missing", "unknown", "(missing)", "(blank)", "<na>", "#na", "#n/a", "#null!", "#value!", "#div/0!",
         "#ref!", "#num!", "#name?"}
FEW = 20               # different numbers among other texts are names of categories
LONGEST = 64           # characters of a number with its unit
MINUS = "\u2212"
CURRENCY = "[$€£¥₹]|(?:USD|EUR|GBP|JPY|CHF|CNY|INR)(?![A-Za-z])"
NUMERAL = r"[-+\u2212]?[\d.,'’\s]*\d[\d.,]*(?:[eE][-+]?\d+)?"
SIGNED = re.compile(rf"([-+\u2212]?)\s*({CURRENCY})?\s*({NUMERAL})\s*(%|{CURRENCY})?")


class Mixed(ValueError):
    """Cells that can be read in two ways, or not in one; the message says which, and the caller whose they are."""


class Style(NamedTuple):
    """How numerals are written: what parts thousands (none: ""), and the decimals."""

    thousands: str
    decimal: str
    name: str

    def value(self, numeral: str) -> float | None:
        """None where it is not written so."""
        group = rf"[1-9]\d{{0,2}}(?:[{self.thousands}]\d{{3}})+|" if self.thousands else ""
        if not re.fullmatch(rf"[-+]?(?:{group}\d*)(?:[{self.decimal}]\d*)?(?:[eE][-+]?\d+)?", numeral):
            return None
        plain = re.sub(f"[{self.thousands}]", "", numeral) if self.thousands else numeral
        plain = plain.replace(self.decimal, ".")
        return as_number(plain) if is_number(plain) else None


POINT = Style("", ".", "decimal points")
COMMA = Style("", ",", "decimal commas")
SPACES, APOSTROPHES = " \u00a0\u202f\u2009", "'’"
POINTS = Style(".", ",", "points between thousands")
STYLES = (POINT, COMMA, Style(",", ".", "commas between thousands"), POINTS,
          Style(SPACES, ".", "spaces between thousands"), Style(SPACES, ",", "spaces between thousands"),
          Style(APOSTROPHES, ".", "apostrophes between thousands"),
          Style(APOSTROPHES, ",", "apostrophes between thousands"))


class Numbers(NamedTuple):
    """(n,) float64, NaN where a cell holds none; how they are written, in words; and how many are not plainly so."""

    values: np.ndarray
    styles: tuple[Style, ...]     # several: they give the same values
    told: str = ""
    unusual: int = 0

    @property
    def commas(self) -> bool:
        """Whether there are decimal commas, without doubt."""
        return all(style.decimal == "," for style in self.styles)


def numbers(texts: Sequence[str | None], commas: bool = False) -> Numbers | None:
    """Of the cells of a column, None where one is empty; None for a column that holds other texts.

    commas: other columns of the file have decimal commas. Raises Mixed.
    """
    try:
        plain = np.array([np.nan if text is None else as_number(text) for text in texts])
    except ValueError:
        return written(texts, commas)
    if commas and (other := grouped(texts, plain)) is not None:
        raise Mixed(f"{other!r} has a decimal point, or parts thousands: other columns have decimal commas")
    return Numbers(plain, (POINT,))


def grouped(texts: Sequence[str | None], plain: np.ndarray) -> str | None:
    """The first of several points, where all might part thousands."""
    values = [np.nan if text is None else POINTS.value(text) for text in texts]
    if None in values or np.array_equal(values, plain, equal_nan=True):
        return None
    return next(text for text, one, other in zip(texts, values, plain) if text is not None and one != other)


def written(texts: Sequence[str | None], commas: bool) -> Numbers | None:
    """Numbers in another style than Python's, with units, or with cells that stand for none."""
    filled = [None if text is None or text.lower() in EMPTY else text for text in texts]
    parts = [(None, "") if text is None else unit_of(text) for text in filled]
    values = {style: [np.nan if text is None else numeral and style.value(numeral)
                      for text, (numeral, _) in zip(filled, parts)] for style in STYLES}
    missed = {style: sum(value is None for value in column) for style, column in values.items()}
    fewest = min(missed.values())
    present = sum(text is not None for text in filled)
    if fewest == present and (present or len(set(texts) - {None}) > 1):
        return None
    best = [style for style in STYLES if missed[style] == fewest]
    if fewest:
        return refuse_odd(filled, values, best[0])
    check_units([unit for numeral, unit in parts if numeral])
    style = chosen(best, values, filled, commas)
    same = tuple(each for each in best if equal(values[each], values[style]))
    return Numbers(np.array(values[style], np.float64), same, *told(texts, parts, style))


def unit_of(text: str) -> tuple[str | None, str]:
    """The numeral and its unit; None where the text is no number with one at most."""
    if is_number(text):
        return text, ""
    match = SIGNED.fullmatch(text) if len(text) <= LONGEST else None
    if match is None or (match[1] and match[3][0] in f"-+{MINUS}") or (match[2] and match[4]):
        return None, ""
    return (match[1] + match[3]).replace(MINUS, "-").strip(), match[2] or match[4] or ""


def equal(a: Sequence[float], b: Sequence[float]) -> bool:
    return bool(np.array_equal(np.array(a, np.float64), np.array(b, np.float64), equal_nan=True))


def chosen(best: Sequence[Style], values: dict[Style, list], texts: Sequence[str | None], commas: bool) -> Style:
    """The style in which all cells can be read. Raises Mixed where another one gives other numbers."""
    if commas and COMMA in best:
        return COMMA
    first = best[0]
    for style in best[1:]:
        pairs = zip(texts, values[first], values[style])
        if differ := next((each for each in pairs if each[0] is not None and each[1] != each[2]), None):
            text, one, other = differ
            raise Mixed(f"{text!r} is {one:.15g} with {first.name} and {other:.15g} with {style.name}: write it with a "
                        "decimal point and nothing between thousands")
    return first


def check_units(units: Sequence[str]) -> None:
    counts = Counter(units)
    signs = [unit for unit in counts if unit]
    if len(signs) > 1:
        raise Mixed(f"numbers in {signs[0]} and in {signs[1]}: bring them to one unit")
    if "%" in counts and counts[""]:
        raise Mixed(f"{counts['%']} numbers with a percent sign and {counts['']} without: bring them to one unit")


def told(texts: Sequence[str | None], parts: Sequence[tuple[str | None, str]], style: Style) -> tuple[str, int]:
    """What is unusual about the numerals, and how many are so."""
    unusual = [(text, unit) for text, (numeral, unit) in zip(texts, parts) if numeral and not is_number(text)]
    signs = dict.fromkeys(unit or MINUS for text, unit in unusual if unit or MINUS in text)
    words = [f"the sign {sign}" for sign in signs]
    if any(not is_number((numeral or "0").strip()) for numeral, _ in parts):
        words.insert(0, style.name)
    return " and ".join(words), len(unusual)


def refuse_odd(texts: Sequence[str | None], values: dict[Style, list], style: Style) -> None:
    """Raises Mixed for numbers with a few texts among them; nothing for texts with a few numbers among them."""
    read = [value for value in values[style] if value is not None and value == value]
    odd = [text for text, value in zip(texts, values[style]) if value is None]
    numerals = [text for i, text in enumerate(texts) if values[style][i] is None
                and any(column[i] is not None for column in values.values())]
    if numerals or (len(read) > len(odd) and len(set(read)) > FEW):
        shown = ", ".join(map(repr, dict.fromkeys(numerals or odd)))
        shown = shown if len(shown) < 60 else f"{shown[:60]}..."
        raise Mixed(f"{len(read)} cells are numbers with {style.name}, and {len(odd)} are not: {shown}. Correct these, "
                    "or leave them empty")
