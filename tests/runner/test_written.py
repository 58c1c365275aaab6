"""Mistyped values are said before torch is imported, by what the source says of them."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from crt_exp.config import CONF, ConfigError, imported
from crt_exp.options import describe, parameters
from crt_exp.runner.configuration import GROUPS
from crt_exp.runner.written import check_values, written_hints

WRONG = {"task=mlm task.block=abc": "task.block=abc: expected an integer >= 2",
         "task=mlm features.m=-3": "features.m=-3: expected an integer >= 1",
         "task=lra task.dropout=2": "task.dropout=2: expected a number >= 0 and < 1",  # of a base class
         "task=uci task.sigmas=[0.1,-1]": "task.sigmas=[0.1,-1]: expected a list",
         "task=uci trainer.lr=-1": "trainer.lr=-1: expected a number > 0",
         "attention=nearfar attention.block=0": "attention.block=0: expected an integer >= 1 or null",
         "-m seed=0 task.repeats=1,0": "task.repeats=0: expected an integer >= 1"}
REFUSED = """
import sys
from crt_exp.config import ConfigError
from crt_exp.runner.command_line import check_command_line
for words in sys.argv[1:]:
    try:
        check_command_line(words.split())
    except ConfigError as error:
        print(error)
print("torch" in sys.modules)
"""


def nodes():
    """All of conf/ that a `_target_` is built of."""
    for group in GROUPS:
        for path in sorted((CONF / group).rglob("*.yaml")):
            node = OmegaConf.to_container(OmegaConf.load(path))
            node = node if "_target_" in node else node.get(group, {})
            if "_target_" in node:
                yield node["_target_"]


def test_what_is_read_is_what_is_there():
    """Where both are known; which is of nearly all keys."""
    known = both = 0
    for target in {*nodes()}:
        written, real = written_hints(target), parameters(imported(target))
        assert {key: describe(hint) for key, hint in written.items() if key in real} == {
            key: describe(real[key].hint) for key in written if key in real}, target
        known, both = known + len(real), both + len(written.keys() & real.keys())
    assert both > 0.85 * known > 300


def test_values_are_refused_before_torch_is_imported(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED, *WRONG], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [*WRONG.values(), "False"], done.stderr


def test_what_lies_elsewhere_is_left_to_the_other_check():
    for target in ("mine.tasks.Task", "crt_exp.nowhere.Task", "crt_exp.tasks.uci.Nothing", "json.JSONDecoder"):
        assert written_hints(target) == {}
    check_values({"task": {"_target_": "mine.tasks.Task", "n": "x"}, "attention": None, "seed": 0})
    with pytest.raises(ConfigError, match="task.draws = x"):
        check_values({"task": {"_target_": "crt_exp.tasks.uci.UCI", "draws": "x"}})
