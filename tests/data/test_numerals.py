"""Columns of numbers as tables write them: read in one way, which is told, or refused."""

import time

import numpy as np
import pytest

from crt_exp.data.numerals import Mixed, numbers

MANY = [str(i / 4) for i in range(40)]


@pytest.mark.parametrize("cells, values, told", [
    (["1.5", "-2e3", None], [1.5, -2000, np.nan], ""),
    (["1,5", "2", "-0,25"], [1.5, 2, -0.25], "decimal commas"),
    (["0,123", "12,345"], [0.123, 12.345], "decimal commas"),
    (["1.234,5", "2"], [1234.5, 2], "points between thousands"),
    (["1.234.567", "1.234"], [1234567, 1234], "points between thousands"),
    (["1,234", "1,234,567.5"], [1234, 1234567.5], "commas between thousands"),
    (["1 234,5", "2\u00a0000,0", "7\u202f000,0"], [1234.5, 2000, 7000], "spaces between thousands"),
    (["1'234.5", "1’000.0"], [1234.5, 1000], "apostrophes between thousands"),
    (["12 %", "3%", "-1%"], [12, 3, -1], "the sign %"),
    (["$5", "-$1,234.50", "7"], [5, -1234.5, 7], "commas between thousands and the sign $"),
    (["12 EUR", "3,5 EUR"], [12, 3.5], "decimal commas and the sign EUR"),
    (["\u22125", "3"], [-5, 3], "the sign \u2212"),
    (["1.5", "-", "n.d.", ".", "#N/A", "unknown", "-nan"], [1.5] + 6 * [np.nan], ""),
    (["1,5", "-"], [1.5, np.nan], "decimal commas")])
def test_one_way_to_read_a_column(cells, values, told):
    found = numbers(cells)
    np.testing.assert_array_equal(found.values, values)
    assert found.told == told and found.values.dtype == np.float64


@pytest.mark.parametrize("cells, message", [
    (["1,234", "12", "999,000"], "'1,234' is 1.234 with decimal commas and 1234 with commas between thousands"),
    (["1,5", "1.5", "2.5"], "2 cells are numbers with decimal points, and 1 are not: '1,5'"),
    (["12%", "3"], "1 numbers with a percent sign and 1 without"), (["€5", "$5"], "numbers in € and in \\$"),
    ([*MANY, "<0.1", "low"], "40 cells are numbers with decimal points, and 2 are not: '<0.1', 'low'")])
def test_two_ways_and_none_are_refused(cells, message):
    with pytest.raises(Mixed, match=message):
        numbers(cells)


def test_other_columns_of_the_file_decide_what_a_comma_is():
    np.testing.assert_array_equal(numbers(["1,234", "12"], commas=True).values, [1.234, 12])
    np.testing.assert_array_equal(numbers(["0.5", "12.25"], commas=True).values, [0.5, 12.25])
    with pytest.raises(Mixed, match="'1.234' has a decimal point, or parts thousands"):
        numbers(["1.234", "999"], commas=True)


@pytest.mark.parametrize("cells", [["a", "b"], ["1", "2", "other"], ["5 kg", "3 kg"], ["2024-01-05"], ["1.2.3", "1.2"],
                                   ["12:30"], ["1_000", "3"], [",", "."], ["$", "1"], ["+", "-"]])
def test_other_texts_are_no_numbers(cells):
    assert numbers(cells) is None


def test_a_long_cell_takes_no_time():
    start = time.perf_counter()
    assert numbers(["1" * 100_000 + "x", "1," * 50_000, "a"]) is None
    assert time.perf_counter() - start < 1
