"""The cache of tokens and vocabularies: made once by content, whole or not there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crt_exp.data import DataError
from crt_exp.data.files import cached

KILLED = """
import os, signal, sys, numpy as np
from crt_exp.data.files import cached

np.save_array, np.save = np.save, lambda *args: (np.save_array(*args), os.kill(os.getpid(), signal.SIGKILL))
cached(sys.argv[1], "key", lambda: {"tokens": np.arange(5)})
"""


def some():
    return {"tokens": np.arange(5), "ends": np.zeros(0, np.int64)}


def test_arrays_are_made_once_and_mapped(tmp_path):
    for make in (some, None):
        found = cached(tmp_path / "cache", "key", make)
        assert found["tokens"].tolist() == [*range(5)] and found["ends"].shape == (0,)
        assert isinstance(found["tokens"], np.memmap)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]


def test_a_killed_process_leaves_no_half_written_folder(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cache")], env=env)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "cache/key").exists()
    assert cached(tmp_path / "cache", "key", some)["tokens"].tolist() == [*range(5)]


def test_damage_and_folders_that_cannot_be_written_are_refused(tmp_path):
    cached(tmp_path / "cache", "key", some)
    file = tmp_path / "cache/key/tokens.npy"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="remove this folder"):
        cached(tmp_path / "cache", "key", some)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="expected a writable folder, or null"):
        cached(tmp_path / "file", "key", some)
