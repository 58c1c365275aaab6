"""What is written whole or not at all, on a disk that refuses it: the file is named, and the older one stays."""

import os
import resource
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.atomic_write import atomic_path, write_rows
from crt_exp.experiments.data import images
from crt_exp.experiments.drawing import new_figure, save_figure
from crt_exp.experiments.models.folder import MODEL, save_tensors, whole_folder
from crt_exp.experiments.runner.run import write_atomic

NOISE = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)


@pytest.fixture
def small_files():
    """Limits the size of files, as a disk that is full does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def save_a_figure(path):
    figure, axes = new_figure()
    axes.imshow(NOISE)
    save_figure(figure, path)


def save_a_model(path):
    with whole_folder(path.parent) as folder:
        save_tensors({"a": torch.ones(10_000)}, folder / "model.safetensors")


FILES = {
    "picture.png": save_a_figure,
    "image.png": lambda path: images.save_grid([NOISE], path),
    "rows.csv": lambda path: write_rows(path, [[i] for i in range(1000)] * 2),
    "text.md": lambda path: write_atomic(path, "text " * 2000),
}


@pytest.mark.parametrize("name", [*FILES, MODEL])
def test_a_full_disk_is_named_and_leaves_the_older_file(name, small_files, tmp_path):
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(b"older")
    small_files(4096)
    with pytest.raises(OSError, match=r"(File too large|No space left).*free space") as error:
        (FILES | {MODEL: save_a_model})[name](path)
    small_files(resource.RLIM_INFINITY)
    assert str(path) in str(error.value)
    actual = {path.name for path in tmp_path.iterdir()}
    assert actual <= {name}
    assert (
        path.read_bytes() == b"older"
        if name in FILES
        else not path.exists() or path.stat().st_size == 0
    )


def test_other_errors_leave_nothing_either(tmp_path):
    with pytest.raises(KeyError), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise KeyError
    with pytest.raises(FileNotFoundError, match="nowhere/a.txt cannot be written: No such file"):
        write_atomic(tmp_path / "nowhere" / "a.txt", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_only_a_regular_file_is_replaced_with_its_mode_and_nothing_beside_it(name, tmp_path):
    path = tmp_path / name
    beside = tmp_path / f"{name}.tmp"
    elsewhere = tmp_path / "elsewhere"
    FILES[name](path)
    beside.touch()
    assert path.stat().st_mode == beside.stat().st_mode  # that of the user's umask
    beside.write_text("mine")
    elsewhere.write_text("older")
    elsewhere.chmod(0o600)
    path.unlink()
    path.symlink_to("elsewhere")
    FILES[name](path)
    assert path.is_symlink()
    assert elsewhere.read_bytes() != b"older"
    assert beside.read_text() == "mine"
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    actual = {path.name for path in tmp_path.iterdir()}
    assert actual == {name, beside.name, "elsewhere"}


def test_devices_pipes_folders_and_circular_links_are_refused(tmp_path):
    cases = [
        ("loop", "loop"),
        ("null", os.devnull),
        ("to folder", "folder"),
    ]
    for name, target in cases:
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    paths = [*tmp_path.iterdir(), Path(os.devnull)]
    kinds = []
    for path in paths:
        kinds.append(stat.S_IFMT(path.lstat().st_mode))
    for path in paths:
        with pytest.raises(
            OSError, match=f"{path.name} cannot be written: expected a regular file"
        ):
            write_atomic(path, "text")
    expected = []
    for path in paths:
        expected.append(stat.S_IFMT(path.lstat().st_mode))
    assert kinds == expected
    assert len(kinds) == 6
