"""The golden suite: what the product computes is what the committed files of this folder hold. `make golden` runs it.

`python tests/golden/write.py [section ...]` writes them: only in a commit that says why a value changes.
"""

import attention_values
import config_values
import map_values
import pytest
import run_values
import swap_values
import torch
from values import OTHER, SAME, differences, load, machine

SECTIONS = {
    "attention": attention_values,
    "maps": map_values,
    "swaps": swap_values,
    "runs": run_values,
    "configurations": config_values,
}
CASES = [(section, group) for section, module in SECTIONS.items() for group in module.groups()]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("section, group", CASES, ids=[" ".join(case) for case in CASES])
def test_values_are_those_of_the_files(section, group):
    golden = load(section)
    tolerance = SAME if golden["machine"] == machine() else OTHER
    lines = differences(golden["groups"][group], SECTIONS[section].cases(group), tolerance)
    assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("section", SECTIONS)
def test_each_group_of_the_files_is_compared(section):
    assert set(load(section)["groups"]) == set(SECTIONS[section].groups())
