"""The cases of a law over several lists: every value of every list is among the fast tests, every combination among
all tests."""

from itertools import product

import pytest

PARAM = type(pytest.param())


def in_turn(first, *others, each=1):
    """What pytest.mark.parametrize takes: the product of the lists. Of each value of the first, `each` of the
    combinations of the others are fast, one value taking up where the one before it stopped."""
    rest = list(product(*others))
    cases = []
    for number, value in enumerate(first):
        values, marks = (value.values, value.marks) if isinstance(value, PARAM) else ((value,), ())
        fast = {(number * each + n) % len(rest) for n in range(each)}
        for place, combination in enumerate(rest):
            slow = [] if place in fast else [pytest.mark.slow]
            cases.append(pytest.param(*values, *combination, marks=[*marks, *slow]))
    return cases
