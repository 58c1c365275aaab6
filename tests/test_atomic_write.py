"""What is written whole or not at all, on a disk that refuses it: the file is named, and the older one stays."""

import os
import resource
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.data import images
from crt_exp.drawing import new_figure, save_figure
from crt_exp.models.folder import MODEL, save_tensors, whole_folder
from crt_exp.runner.run import write_atomic
from crt_exp.atomic_write import atomic_path, write_rows

NOISE = np.random.default_rng(0).integers(0, 256, (100, 100, 3), np.uint8)


@pytest.fixture
def small_files():
    """No file may have more than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def save_a_figure(path):
    figure, axes = new_figure()
    axes.imshow(NOISE)
    save_figure(figure, path)


def save_an_animation(path):
    with atomic_path(path, ".gif") as part:
        images.read_pixels(NOISE).save(part, save_all=True)


def save_a_model(path):
    with whole_folder(path.parent) as folder:
        save_tensors({"a": torch.ones(10_000)}, folder / "model.safetensors")


WRITERS = {"picture.png": save_a_figure, "image.png": lambda path: images.save_grid([NOISE], path),
           "film.gif": save_an_animation, "rows.csv": lambda path: write_rows(path, [[i] for i in range(5000)]),
           "text.md": lambda path: write_atomic(path, "text " * 2000), MODEL: save_a_model}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("before", [False, True])
def test_what_the_disk_refuses_is_named_and_leaves_nothing(name, before, small_files, tmp_path):
    path = tmp_path / name
    if before and name != MODEL:
        path.write_bytes(b"older")
    small_files(4096)
    with pytest.raises(OSError) as error:
        WRITERS[name](path)
    small_files(resource.RLIM_INFINITY)
    said = str(error.value)
    assert str(path) in said and any(word in said for word in ("File too large", "No space left"))
    assert "free space" in said
    assert {each.name for each in tmp_path.iterdir()} <= {name}
    assert path.read_bytes() == b"older" if before and name != MODEL else not path.exists() or path.stat().st_size == 0


def test_other_errors_leave_nothing_either(tmp_path):
    with pytest.raises(KeyError), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise KeyError
    with pytest.raises(FileNotFoundError, match="nowhere/a.txt cannot be written: No such file"):
        write_atomic(tmp_path / "nowhere" / "a.txt", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(set(WRITERS) - {MODEL}))
def test_only_a_regular_file_is_replaced_with_its_mode_and_nothing_beside_it(name, tmp_path):
    path, beside, elsewhere = tmp_path / name, tmp_path / f"{name}.tmp", tmp_path / "elsewhere"
    WRITERS[name](path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    beside.write_text("mine")
    elsewhere.write_text("older")
    elsewhere.chmod(0o600)
    path.unlink()
    path.symlink_to("elsewhere")
    WRITERS[name](path)
    assert path.is_symlink() and elsewhere.read_bytes() != b"older" and beside.read_text() == "mine"
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    elsewhere.unlink()
    for make in (os.mkfifo, Path.mkdir):
        make(elsewhere)
        kind = stat.S_IFMT(elsewhere.stat().st_mode)
        with pytest.raises(OSError, match=f"{name} cannot be written: expected a regular file"):
            WRITERS[name](path)
        assert stat.S_IFMT(elsewhere.stat().st_mode) == kind and path.is_symlink()
        elsewhere.unlink() if make is os.mkfifo else elsewhere.rmdir()
    assert {each.name for each in tmp_path.iterdir()} <= {name, beside.name}


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_devices_and_links_that_lead_to_themselves_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to(os.devnull)
    for path in (tmp_path / "loop", tmp_path / "null", Path(os.devnull)):
        with pytest.raises(OSError, match="expected a regular file"):
            write_atomic(path, "text")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
