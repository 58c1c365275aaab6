"""ListOps: nested lists of digits under operators, and the digit that each of them is worth (Nangia and Bowman, 2018).

A text is `[MAX 2 9 [MIN 4 7 ] 0 ]`, worth 9. Operators: MIN, MAX, MED (the median; the mean of the middle two of an
even number, rounded down) and SM (the sum modulo 10). Trees are drawn as those of the Long Range Arena are (Tay et al.,
2021): a node is a list with chance 1/4, at the last depth always a digit; lists have 2 to `arguments` entries; only
trees of more than `shortest` and fewer than `longest` symbols are taken, none twice.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from crt_exp.data import DataError
from crt_exp.data.text import numbered_lines
from crt_exp.options import Count, Whole

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
SYMBOLS = (*map(str, range(10)), *OPERATORS, END)
NUMBERS = {symbol: i for i, symbol in enumerate(SYMBOLS)}
LISTS = 0.25                                                 # the chance that a node is a list
TRIES = 100_000                                              # in vain, after which the rules are refused
HEADER = ["Source", "Target"]


class ListOpsRules(NamedTuple):
    """Sequences of each split, and what bounds them; the root has depth 1."""

    train: Count
    validation: Count
    test: Count
    shortest: Whole
    longest: Count
    depth: Count
    arguments: Annotated[int, Field(ge=2)]


PRESETS = {"small": ListOpsRules(2000, 500, 500, 8, 64, 4, 5),
           "full": ListOpsRules(96_000, 2000, 2000, 500, 2000, 10, 10)}  # those of the Long Range Arena


# ---- texts -----------------------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[np.ndarray, int]:
    """Symbols (L,) uint8 of a text and what it is worth. Parentheses, which the published files have around every
    operation, say nothing and are left out. Raises ValueError, naming the first symbol that is wrong."""
    words = text.replace("(", " ").replace(")", " ").split()
    unknown = next((word for word in words if word not in NUMBERS), None)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is no symbol of ListOps, which are {' '.join(SYMBOLS)}")
    return np.array([NUMBERS[word] for word in words], np.uint8), worth(words)


def worth(words: Sequence[str]) -> int:
    """Raises ValueError for lists that are open, empty, or followed by something."""
    opened: list[list] = [["", []]]                          # the operator and the entries of each open list
    for word in words:
        if word in OPERATORS:
            opened.append([word, []])
        elif word != END:
            opened[-1][1].append(int(word))
        else:
            operator, entries = opened.pop()
            if not opened:
                raise ValueError("a ] closes no list")
            if not entries:
                raise ValueError(f"a list {operator} ] is empty")
            opened[-1][1].append(result(operator, entries))
    if len(opened) > 1:
        raise ValueError(f"{len(opened) - 1} of its lists are not closed")
    if len(opened[0][1]) != 1:
        raise ValueError(f"it is {len(opened[0][1])} lists or digits side by side, and not one")
    return opened[0][1][0]


def result(operator: str, entries: Sequence[int]) -> int:
    if operator == "[SM":
        return sum(entries) % 10
    return int({"[MIN": min, "[MAX": max, "[MED": median}[operator](entries))


# ---- drawn -----------------------------------------------------------------------------------------------------------


def drawn(rules: ListOpsRules, seed: int) -> dict[str, list[list[str]]]:
    """The words of the sequences of each split, all different. Raises DataError where the rules make too few."""
    rng, sequences, vain = random.Random(seed), {}, 0
    wanted = rules.train + rules.validation + rules.test
    while len(sequences) < wanted:
        words = tuple(tree(rng, rules, 1, rules.longest - 1))
        new = len(words) > rules.shortest and words not in sequences
        vain = 0 if new else vain + 1
        if new:
            sequences[words] = None
        if vain > TRIES:
            raise DataError(f"these rules make {len(sequences)} different sequences, and {wanted} are wanted: choose a "
                            "smaller task.rules.shortest, a larger longest or depth, or fewer sequences")
    rows, first, last = [list(words) for words in sequences], rules.train, rules.train + rules.validation
    return {"train": rows[:first], "validation": rows[first:last], "test": rows[last:]}


def tree(rng: random.Random, rules: ListOpsRules, depth: int, room: int) -> list[str]:
    """The words of a tree; none where it has more than `room`."""
    if depth >= rules.depth or rng.random() > LISTS:
        return [str(rng.randrange(10))] if room else []
    words, count = [], rng.randint(2, rules.arguments)
    for _ in range(count):
        part = tree(rng, rules, depth + 1, room - 2 - len(words))
        if not part:
            return []
        words += part
    return [rng.choice(OPERATORS), *words, END] if len(words) + 2 <= room else []


# ---- files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Symbols and labels of a published file: `Source<tab>Target` first, then a text, a tab and its worth in each line.

    Raises DataError, naming file and line, where a text does not parse or is worth something else.
    """
    for number, line in numbered_lines(path):
        cells = line.split("\t")
        if number == 1 and cells == HEADER:
            continue
        try:
            if len(cells) != 2:
                raise ValueError(f"it has {len(cells)} columns; a line is a text, a tab and what it is worth")
            symbols, value = parse(cells[0])
            if cells[1].strip() != str(value):
                raise ValueError(f"the file says that it is worth {cells[1].strip()!r}, and it is worth {value}")
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not a ListOps expression: {error}.") from None
        yield symbols, value
