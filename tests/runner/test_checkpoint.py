"""Checkpoints are whole or absent, and say what is wrong with them."""

import errno
import json
import os

import pytest
import torch
from torch import nn

from crt_exp.nearfar import NearFar
from crt_exp.runner import checkpoint
from crt_exp.runner.checkpoint import CheckpointError


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a buffer that is not contiguous."""

    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(width, 4)
        self.b.weight = self.a.weight
        self.register_buffer("counts", torch.arange(6))
        self.register_buffer("turned", torch.randn(3, 2).T)


def write(root, step, best=None, model=None):
    tensors = {"model": (model or Tied()).state_dict(), "optimizer": {"a.weight.step": torch.tensor(3.0)}}
    return checkpoint.save(root, step, tensors, {"step": step, "best": {"step": best} if best else None})


def test_round_trip_keeps_ties_and_layout(tmp_path):
    model, other = Tied(), Tied()
    path = write(tmp_path, 7, model=model)
    checkpoint.load_model(other, checkpoint.load_tensors(path / "model.safetensors"), path)
    assert all(torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items())
    assert other.b.weight is other.a.weight
    assert path.name == "step-7" and checkpoint.load_state(path)["step"] == 7 and checkpoint.damage(path) is None
    files = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(p.name for p in path.iterdir()) == files
    assert (path / "model.safetensors").stat().st_size < 1000  # the shared weight is there once


def test_samples_between_two_fits(tmp_path):
    """As many rows as passes left: a model that has none yet takes them, and goes on to the same fit."""
    q, k, v = torch.randn(3, 1, 2, 12, 4)
    layers = [NearFar(2, 4, heavy=2, cells=2, cross=True, fit_steps=4) for _ in range(2)]
    for _ in range(3):
        layers[0](q, k, v)
    path = write(tmp_path, 3, model=layers[0])
    checkpoint.load_model(layers[1], checkpoint.load_tensors(path / "model.safetensors"), path)
    assert layers[1].clusters.queries.shape[1] > 1
    for layer in layers:
        layer(k, q, v)
        layer(q, k, v)
    assert int(layers[0].clusters.fits) == 1
    for name, found in layers[0].state_dict().items():
        assert torch.equal(found, layers[1].state_dict()[name]), name


def test_low_precision_and_empty_tensors(tmp_path):
    tensors = {"half": torch.randn(3).bfloat16(), "empty": torch.zeros(0, 2), "scalar": torch.tensor(1.5),
               "part": torch.randn(4, 4)[1:3], "same_part": torch.ones(1).expand(3)}
    path = checkpoint.save(tmp_path, 1, {"model": tensors}, {})
    loaded = checkpoint.load_tensors(path / "model.safetensors")
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = [
    (lambda p: os.truncate(p / "model.safetensors", 99), "model.safetensors differs from its checksum"),
    (lambda p: flip(p / "optimizer.safetensors"), "optimizer.safetensors differs from its checksum"),
    (lambda p: (p / "model.safetensors").unlink(), "No such file or directory"),
    (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    (lambda p: (p / "manifest.json").write_text('{"files": '), "cannot be read"),
    (lambda p: (p / "manifest.json").write_text(json.dumps({"format": 99, "files": {}})), "its format is 99"),
]


@pytest.mark.parametrize("harm, reason", DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_damage_is_found_and_passed_over(harm, reason, tmp_path, capsys):
    write(tmp_path, 5)
    harm(write(tmp_path, 10))
    assert checkpoint.newest(tmp_path) == tmp_path / "step-5" == checkpoint.newest(tmp_path)
    said, = capsys.readouterr().out.splitlines()
    assert "step-10: damaged" in said and reason in said and "removed, trying step-5" in said
    assert checkpoint.steps(tmp_path) == [5]
    harm(tmp_path / "step-5")
    assert checkpoint.newest(tmp_path) is None and "removed, no earlier checkpoint" in capsys.readouterr().out


def test_nothing_to_continue_from(tmp_path):
    assert checkpoint.newest(tmp_path / "absent") is None
    (tmp_path / ".step-3.123").mkdir()  # left by a killed process
    assert checkpoint.newest(tmp_path) is None and not list(tmp_path.iterdir())


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step, best in [(1, None), (2, 1), (3, 2), (4, 2), (5, 2)]:
        write(tmp_path, step, best)
        checkpoint.prune(tmp_path, keep=2, best=best)
    assert checkpoint.steps(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("synced", [0, 1, 3])
def test_full_disk_leaves_no_half_checkpoint(synced, tmp_path, monkeypatch):
    write(tmp_path, 5)
    fsync, files = os.fsync, []

    def full(handle):
        files.append(handle)
        if len(files) > synced:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 10: .*No space left.*resume=auto.*; remaining steps: \[5\]"):
            write(tmp_path, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]
    assert checkpoint.newest(tmp_path) == tmp_path / "step-5"


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="remaining steps: none"):
        write(tmp_path / "file" / "new", 10)


def test_weights_that_do_not_fit(tmp_path):
    path = write(tmp_path, 1)
    tensors = checkpoint.load_tensors(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a.weight has shape \(4, 4\), expected \(4, 5\)"):
        checkpoint.load_model(Tied(width=5), tensors, path)
    with pytest.raises(CheckpointError, match=r"counts has shape none, expected \(6,\)"):
        checkpoint.load_model(Tied(), {k: v for k, v in tensors.items() if k != "counts"}, path)
    with pytest.raises(CheckpointError, match=r"more has shape \(1,\), expected none"):
        checkpoint.load_model(Tied(), tensors | {"more": torch.zeros(1)}, path)
