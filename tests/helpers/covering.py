"""The cases of a law over several lists: every value of every list is among the fast tests, every combination among
all tests."""

from itertools import product

import pytest

PARAM = type(pytest.param())


def in_turn(first, *others, times=1):
    """What pytest.mark.parametrize takes: the product of the lists. Of each value of the first, `times` of the
    combinations of the others are fast, one value taking up where the one before it stopped."""
    combinations = list(product(*others))
    cases = []
    for number, value in enumerate(first):
        if not isinstance(value, PARAM):
            value = pytest.param(value)
        start = number * times
        fast = {(start + n) % len(combinations) for n in range(times)}
        for i, combination in enumerate(combinations):
            marks = [*value.marks]
            if i not in fast:
                marks.append(pytest.mark.slow)
            cases.append(pytest.param(*value.values, *combination, marks=marks))
    return cases


def cover(items, parts_of):
    """Few of the items that together have every part of all: each time the one with most missing parts."""
    parts = [parts_of(item) for item in items]
    missing = set().union(*parts)
    chosen = []
    while missing:
        best = max(range(len(items)), key=lambda i: len(parts[i] & missing))
        missing -= parts[best]
        chosen.append(items[best])
    return chosen


def slow(*values):
    """A case that is among all tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow)
