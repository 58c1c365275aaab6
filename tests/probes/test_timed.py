"""Times of pages at tiny sizes: each arm takes its turn, and rows say whose they are."""

import pytest

from crt_exp.report import page
from crt_exp.probes import grid
from crt_exp.probes.grid import Part


def cell(name, part=0, **probe):
    """The rows of the first cell of a part, at another size."""
    *_, key = next(Part.read(page.load(name)["sizes"]["small"]["parts"][part]).places())
    return grid.rows(**key | {"probe": key["probe"] | probe}), key["arms"]


@pytest.mark.usefixtures("one_thread")
def test_attention_of_every_kind_of_rows_is_timed():
    rows, arms = cell("hadamard", 2, length=8, m=4, rounds=1)
    assert [row["arm"] for row in rows] == [*arms] and "exact" in arms and all(row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_every_map_transforms():
    rows, arms = cell("bench-estimators", rows=20, columns=4, rounds=2, rest=0)
    assert [row["arm"] for row in rows] == [*arms] and all(row["fit"] > 0 < row["transform"] for row in rows)
    assert {"RBFSampler", "GaussianRandomProjection", "trig, 512 columns"} < {*arms} and "gerf" not in arms
