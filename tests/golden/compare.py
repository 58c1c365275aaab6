"""The golden suite: what the product computes is what the committed files of this folder hold. `make golden` runs it.

`python tests/golden/write.py [section ...]` writes them: only in a commit that says why a value changes. Differences
are relative to the largest number of a list: `SAME` on the kind of processor that wrote a file, `OTHER` on any other,
where products of matrices round in another order.
"""

import json
import math
import platform
from pathlib import Path

import attention_values
import map_values
import pytest
import run_values
import swap_values
import torch

SECTIONS = {  # the names of the groups, and the values of one
    "attention": (attention_values.groups, attention_values.cases),
    "maps": (map_values.groups, map_values.cases),
    "swaps": (swap_values.groups, swap_values.cases),
    "runs": (run_values.groups, run_values.cases),
    "configurations": (run_values.configurations, run_values.configuration),
}
SAME = 1e-6
OTHER = 1e-3


def file_of(section):
    return Path(__file__).with_name(f"{section}.json")


def load(section):
    """{"machine": ..., "tolerance": ..., "groups": {group: {case: value}}}"""
    return json.loads(file_of(section).read_text())


def machine():
    """The processor, and the release of torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{model}, torch {torch.__version__}"


def differences(expected, found, tolerance, path=""):
    """One line for each value that differs."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            pair = expected.get(key, "(none)"), found.get(key, "(none)")
            yield from differences(*pair, tolerance, f"{path}/{key}")
    elif (
        isinstance(expected, list) and isinstance(found, list) and not are_numbers(expected + found)
    ):
        yield from differences(dict(enumerate(expected)), dict(enumerate(found)), tolerance, path)
    elif isinstance(expected, float) and are_numbers([found]):
        yield from differences([expected], [found], tolerance, path)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        scale = max((abs(x) for x in expected if math.isfinite(x)), default=0) + 1e-12
        if not all(
            a == b or abs(a - b) <= tolerance * scale or (a != a and b != b)
            for a, b in zip(expected, found)
        ):
            yield f"{path}: expected {expected}, found {found}"
    elif expected != found:
        yield f"{path}: expected {expected!r}, found {found!r}"


def are_numbers(values):
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)


CASES = [(section, group) for section, (groups, _) in SECTIONS.items() for group in groups()]


@pytest.mark.parametrize("section, group", CASES, ids=[" ".join(case) for case in CASES])
def test_values_are_those_of_the_files(section, group, one_thread):
    golden = load(section)
    tolerance = OTHER
    if golden["machine"] == machine():
        tolerance = SAME
    lines = list(differences(golden["groups"][group], SECTIONS[section][1](group), tolerance))
    assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("section", SECTIONS)
def test_each_group_of_the_files_is_compared(section):
    assert set(load(section)["groups"]) == set(SECTIONS[section][0]())
