"""The doors to the command line: the file, the module and torchrun run what `python -m crt_exp` runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import torchrun

from crt_exp import train

FILE = Path(train.__file__)
MODULE = (sys.executable, "-m", "crt_exp")
DOORS = [(sys.executable, str(FILE)), (sys.executable, "-m", "crt_exp.train")]
SHORT = ["task=uci", "task.repeats=1", "task.sigmas=[0.3]", "logger=none"]
# Stands in for the package's __main__: says what it was given, and whether a process that it starts has the package.
PROBE = """
import hydra, json, os, subprocess, sys
main = sys.modules["__main__"]
asks = [sys.executable, "-c", "import crt_exp; print(crt_exp.__file__)"]
child = subprocess.run(asks, capture_output=True, text=True)
print(json.dumps({"argv": sys.argv, "name": __name__, "spec": __spec__.name, "file": __file__, "hydra": hydra.__file__,
                  "main": main.__spec__.name, "found": main.__dict__ is globals(), "child": child.stdout.strip()}))
"""


def enter(door, *args, path=FILE.parents[1], cwd=None, **env):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env
    return subprocess.run([*door, *args], capture_output=True, text=True, cwd=cwd, timeout=280,
                          env=env | ({"PYTHONPATH": str(path)} if path else {}))


def record(directory):
    final = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    return {key: value for key, value in final.items() if key != "time_s"}


@pytest.fixture
def probed(tmp_path):
    """A package that is installed nowhere, with a module beside train.py that has a library's name."""
    package = tmp_path / "place" / "crt_exp"
    package.mkdir(parents=True)
    shutil.copy(FILE, package)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    for name in ("hydra", "runpy", "json"):
        (package / f"{name}.py").write_text("raise SystemExit('this file hides another module')")
    return package


@pytest.mark.parametrize("way", ["file", "link", "module"])
def test_main_is_the_packages_by_every_door(way, probed, tmp_path):
    """The same arguments, path of the program, __main__ (by whose name pickles and spawned processes find it) and
    modules; the file needs neither an installed package nor a working directory, and what it starts has the package."""
    (tmp_path / "link.py").symlink_to(probed / "train.py")
    door = {"file": [probed / "train.py"], "link": [tmp_path / "link.py"],
            "module": ["-m", "crt_exp.train"]}[way]
    expected = enter(MODULE, "a=b", path=probed.parent, cwd=tmp_path)
    out = enter((sys.executable, *door), "a=b", path=probed.parent if way == "module" else None, cwd=tmp_path)
    assert expected.returncode == out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == json.loads(expected.stdout)
    said = json.loads(out.stdout)
    assert said["found"] and said["main"] == "crt_exp.__main__" and said["child"] == str(probed / "__init__.py")


SAID = [["nonsense=1"], ["--help"], ["--version"], ["--nonsense"],
        pytest.param(["-m", "features.m=0,1"], marks=pytest.mark.slow)]


@pytest.mark.parametrize("args", SAID, ids=" ".join)
def test_words_and_exit_codes_are_the_same(args, tmp_path):
    expected = enter(MODULE, *args, cwd=tmp_path)
    for door in DOORS:
        out = enter(door, *args, cwd=tmp_path)
        assert (out.returncode, out.stdout, out.stderr) == (expected.returncode, expected.stdout, expected.stderr)
    assert expected.stdout + expected.stderr and not list(tmp_path.iterdir())


def test_missing_libraries_are_named_by_the_file(tmp_path):
    (tmp_path / "hydra.py").write_text("raise ModuleNotFoundError('No module named hydra', name='hydra')")
    out = enter(DOORS[0], *SHORT, path=tmp_path)
    assert out.returncode == 2 and out.stderr == "crt_exp: error: the command line needs hydra: " \
                                                 "pip install 'crt_exp[run]'\n"


@pytest.mark.parametrize("door", [DOORS[0], pytest.param(DOORS[1], marks=pytest.mark.slow)], ids=["file", "module"])
def test_a_run(door, tmp_path, typed):
    out = enter(door, *SHORT, f"hydra.run.dir={tmp_path}/a")
    assert out.returncode == 0 and "wine: accuracy 0." in out.stdout and out.stderr == ""
    assert typed(*SHORT, f"hydra.run.dir={tmp_path}/b")[0] == 0
    assert record(tmp_path / "a") == record(tmp_path / "b")
    versions = json.loads((tmp_path / "a" / "versions.json").read_text())
    assert versions["command"].startswith("python -m crt_exp task=uci ")


@pytest.mark.slow
def test_two_processes_by_the_file(tmp_path):
    """One run directory, one of them speaks. By the module: trainer/test_processes.py."""
    out = torchrun("--config-dir", str(Path(__file__).parent / "toy_conf"), "task=toy", "logger=none",
                   "trainer.epochs=1", door=[str(FILE)], cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("toy: accuracy") == 1 and len(list((tmp_path / "outputs" / "toy").iterdir())) == 1
