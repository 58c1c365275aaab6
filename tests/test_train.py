"""The doors to the command line: the file and the module run what `python -m crt_exp` runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crt_exp import train

FILE = Path(train.__file__)
SHORT = ["task=uci", "task.repeats=1", "task.sigmas=[0.3]", "logger=none"]
# Stands in for the package's __main__: prints its arguments, and whether a process that it starts has the package.
PROBE = """
import hydra, json, os, subprocess, sys
main = sys.modules["__main__"]
asks = [sys.executable, "-c", "import crt_exp; print(crt_exp.__file__)"]
child = subprocess.run(asks, capture_output=True, text=True)
print(json.dumps({"argv": sys.argv, "name": __name__, "spec": __spec__.name, "file": __file__, "hydra": hydra.__file__,
                  "main": main.__spec__.name, "found": main.__dict__ is globals(), "child": child.stdout.strip()}))
"""


def enter(*door, path=FILE.parents[1], cwd=None):
    env = {}
    for key, value in os.environ.items():
        if key != "PYTHONPATH":
            env[key] = value
    return subprocess.run(
        [sys.executable, *door],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=280,
        env=env | ({"PYTHONPATH": str(path)} if path else {}),
    )


def test_main_is_that_of_the_package_by_every_door(tmp_path):
    """The same arguments, path of the program, __main__ (by whose name pickles and spawned processes find it) and
    modules; the file needs neither an installed package nor a working directory, and what it starts has the package.
    A module beside it with a library's name hides none."""
    package = tmp_path / "place" / "crt_exp"
    package.mkdir(parents=True)
    shutil.copy(FILE, package)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    for name in ("hydra", "runpy", "json"):
        (package / f"{name}.py").write_text("raise SystemExit('this file hides another module')")
    (tmp_path / "link.py").symlink_to(package / "train.py")
    expected = enter("-m", "crt_exp", "a=b", path=package.parent, cwd=tmp_path)
    actual = json.loads(expected.stdout)
    assert actual["found"]
    assert actual["main"] == "crt_exp.__main__"
    assert actual["child"] == str(package / "__init__.py")
    cases = [
        enter(tmp_path / "link.py", "a=b", path=None, cwd=tmp_path),
        enter("-m", "crt_exp.train", "a=b", path=package.parent, cwd=tmp_path),
    ]
    for out in cases:
        assert out.returncode == 0, out.stderr
        assert json.loads(out.stdout) == actual, out.stderr


def test_missing_libraries_are_named_by_the_file(tmp_path):
    (tmp_path / "hydra.py").write_text(
        "raise ModuleNotFoundError('No module named hydra', name='hydra')"
    )
    out = enter(FILE, *SHORT, path=tmp_path)
    assert out.returncode == 2
    assert (
        out.stderr == "crt_exp: error: the command line needs hydra: pip install 'crt_exp[run]'\n"
    )


def test_the_console_script_finds_code_in_the_working_directory(tmp_path, monkeypatch, capsys):
    """As python -m does, which puts the working directory on the path."""
    from crt_exp import __main__ as door

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["crt_exp", "--version"])
    door.main()
    assert sys.path[-1] == str(tmp_path)
    assert capsys.readouterr().out.startswith("crt_exp ")


@pytest.mark.slow
def test_a_run_by_the_file_is_that_of_the_module(tmp_path, typed):
    out = enter(FILE, *SHORT, f"hydra.run.dir={tmp_path}/a")
    assert out.returncode == 0
    assert "wine: accuracy 0." in out.stdout
    assert out.stderr == ""
    assert typed(*SHORT, f"hydra.run.dir={tmp_path}/b")[0] == 0
    found = []
    for name in "ab":
        found.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]))
    actual = found[0] | {"time_s": 0}
    expected = found[1] | {"time_s": 0}
    assert actual == expected
