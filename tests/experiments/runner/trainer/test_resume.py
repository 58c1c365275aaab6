"""Runs that were stopped, killed or damaged, and continued: they end as one that never stopped. And their checkpoints:
whole or absent."""

import errno
import hashlib
import os
import random
import re
import shutil
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from helpers import toy
from helpers.covering import slow
from helpers.failing import failing
from helpers.refusals import check_error
from helpers.stopping import during_step, stop_signal, stopped_and_continued
from helpers.toy import ARGS, CARRYING, assert_same, checkpoints, records
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import nn

from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.checkpoint import CheckpointError
from crt_exp.experiments.runner.configuration import override
from crt_exp.experiments.tasks.base import Plan, Task
from crt_exp.nearfar import NearFar

# ---- stopped ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "signum, code",
    [
        (signal.SIGTERM, 143),
        (signal.SIGUSR1, 138),
        slow(signal.SIGINT, 130),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_resume_is_exact(
    signum, code, typed, whole, tmp_path, interruptible
):
    """The step is finished first; the continued run gives the numbers of the one that was never stopped."""
    with stop_signal(toy.Toy, 7, signum):  # in the middle of the first epoch, between two records
        actual, _, err = typed(*ARGS)
    assert actual == code
    assert "resume=auto" in err
    assert signal.Signals(signum).name in err
    assert len(err.splitlines()) == 1
    assert checkpoints(tmp_path / "run") == [5, 7]
    actual, out, err = typed(*ARGS, "resume=auto")
    assert actual == 0
    assert "continuing from" in out
    assert "step-7" in out
    assert_same(tmp_path / "run", whole)
    assert signal.getsignal(signum) in (
        signal.SIG_DFL,
        signal.default_int_handler,
    )  # handlers are put back


@pytest.mark.parametrize(
    "task, step, options",
    [
        (
            "Toy",
            9,
            [
                "trainer.accumulate=2",
                "task.weighted=true",
                "trainer.precision=bf16",
                "trainer.optimizer=adam",
            ],
        ),
        ("Carrying", 11, ["trainer.accumulate=2", "trainer.save_every=3"]),
        slow(
            "Toy",
            9,
            [
                "trainer.steps=30",
                "trainer.eval_every=4",
                "trainer.prefetch=0",
            ],
        ),
    ],
)
def test_resume_is_exact_whatever_the_options(task, step, options, typed, tmp_path, monkeypatch):
    args = [f"task._target_=helpers.toy.{task}", "trainer.keep=20", *options]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, getattr(toy, task), step, *args)
    assert_same(tmp_path / "run", tmp_path / "stopped")
    steps = (
        toy.Carrying().epoch_steps(Plan(8, 2)) if task == "Carrying" else 12
    )  # an epoch by cost has its own number
    actual = records(tmp_path / "run")[-1]["step"]
    expected = 30 if "trainer.steps=30" in options else 2 * steps
    assert actual == (expected)


def test_the_state_of_a_task_is_in_the_checkpoint_and_verified(typed, tmp_path):
    assert typed(*CARRYING, "trainer.save_minutes=1e-9")[0] == 0
    assert checkpoints(tmp_path / "run") == [
        *range(1, 7)
    ]  # one after so many minutes: here after every step
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept = checkpoint.load_tensors(path / "task.safetensors")
    weights = checkpoint.load_tensors(path / "model.safetensors")
    assert kept.keys() == {"0.seen", "0.table"}
    assert torch.equal(kept["0.table"], weights["outer.weight"] + 6)  # after the update
    actual = checkpoint.load_state(path)["task"]
    assert actual == [{"count": 6}]
    assert checkpoint.damage(path) is None
    (path / "task.safetensors").unlink()
    assert "task.safetensors" in checkpoint.damage(path)
    with pytest.raises(ValueError, match="Carrying: has state_dict but no load_state_dict"):
        Task.load_state_dict(toy.Carrying(), {"count": 6})


def test_other_options_are_refused_and_a_damaged_checkpoint_is_skipped(
    typed, whole, cut, tmp_path, monkeypatch
):
    run = shutil.copytree(cut, tmp_path / "run")
    assert checkpoints(run) == [10, 12, 13]
    check_error(
        typed(*ARGS, "resume=auto", "features.m=64", "trainer.lr=0.1"),
        "these keys differ: features.m (it was 256, now 64), trainer.lr (it was 0.01, now 0.1)",
    )
    code, _, err = typed(*ARGS)
    assert code == 2
    assert "set resume=auto" in err
    with monkeypatch.context() as patch:  # the configuration is the same, the model is not
        patch.setattr(toy.Toy, "build", lambda self, _: toy.Network(self.dim, self.width + 1, 0.0))
        code, _, err = typed(*ARGS, "resume=auto")
    assert code == 2
    assert "inner.0.bias has shape (16,), expected (17,)" in err
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    check_error(
        typed(*ARGS, "resume=auto"),
        f"step-13: expected {len(lines)} records in metrics.jsonl, found 1; restore the file",
    )
    assert (run / "metrics.jsonl").read_text() == lines[0]
    (run / "metrics.jsonl").write_text("".join(lines))
    os.truncate(run / "checkpoints" / "step-13" / "optimizer.safetensors", 100)
    code, out, _ = typed(*ARGS, "resume=auto", "trainer.prefetch=0")  # these may differ
    assert code == 0
    assert "step-13: damaged (optimizer.safetensors differs" in out
    assert "step-12" in out
    assert records(run) == records(whole)


@pytest.mark.parametrize("break_at", [2, 3])
def test_a_full_disk_leaves_nothing_half_written(
    break_at, typed, whole, cut, tmp_path, monkeypatch
):
    """A checkpoint (of step 15), then a record (of step 16), that the disk refuses: one message, and resume goes on."""
    run = shutil.copytree(cut, tmp_path / "run")
    with (
        monkeypatch.context() as patch,
        during_step(toy.Toy, break_at, lambda: patch.setattr(os, "fsync", failing(errno.ENOSPC))),
    ):
        code, _, err = typed(*ARGS, "resume=auto")
    assert code == 2
    assert "No space left on device" in err
    assert len(err.splitlines()) == 1
    assert break_at > 2 or re.search(
        r"step 15: .*resume=auto.*; remaining steps: \[10, 12, 13\]", err
    ), err
    assert not list((run / "checkpoints").glob(".*"))
    assert typed(*ARGS, "resume=auto")[0] == 0
    assert_same(run, whole)


@pytest.mark.parametrize(
    "path", ["/a/b-c.d", "/a'b", "/[a]{b: c}=,", "/$HOME", "/a\\'b", '/a\\"b', "/ü~#! a\t"]
)
def test_overrides_hold_any_path(path):
    found = OverridesParser.create().parse_override(override("hydra.run.dir", path)).value()
    actual = OmegaConf.create({"dir": found if isinstance(found, str) else str(found)}).dir
    assert actual == path


# ---- killed ----------------------------------------------------------------------------------------------------------


LONG = [
    "trainer.epochs=10",
    "trainer.save_every=3",
    "trainer.log_every=2",
    "trainer.keep=3",
    "task.pause=0.01",
    "resume=auto",
]


@pytest.mark.slow
def test_kill_at_random_points(tmp_path, monkeypatch):
    """kill -9, a random time after the run wrote something, leaves no trace: not in the weights, the optimiser, the
    generators or the records."""

    def started():
        args = (run, *LONG)
        process = context.Process(target=toy.run, args=args)
        process.start()
        return process

    def written():
        metrics = run / "metrics.jsonl"
        time_of_records = metrics.stat().st_mtime_ns if metrics.exists() else 0
        return checkpoints(run), time_of_records

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = get_context("forkserver")
    rng = random.Random(2)
    steps = set()
    run = tmp_path / "killed"
    context.set_forkserver_preload(
        ["toy", "crt_exp.experiments.runner.trainer", "crt_exp.train", "accelerate", "hydra"]
    )
    for _ in range(10):
        before = written()
        process = started()
        while written() == before and process.exitcode is None:
            time.sleep(0.01)
        process.join(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        steps.add(max(checkpoints(run), default=0))
    process = started()
    process.join()
    assert process.exitcode == 0, steps
    assert len(steps) > 3, steps  # it was hit at different points
    toy.run(tmp_path / "whole", *LONG)
    assert_same(run, tmp_path / "whole")


# ---- the files of a checkpoint ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a buffer that is not contiguous."""

    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, 4, bias=False)
        self.b = nn.Linear(width, 4)
        self.b.weight = self.a.weight
        self.register_buffer("counts", torch.arange(6))
        self.register_buffer("turned", torch.randn(3, 2).T)


def write(root, step, best=None, model=None):
    tensors = {
        "model": (model or Tied()).state_dict(),
        "optimizer": {"a.weight.step": torch.tensor(3.0)},
    }
    state = {"step": step, "best": None}
    if best:
        state["best"] = {"step": best}
    return checkpoint.save(root, step, tensors, state)


def test_round_trip_keeps_ties_layout_and_precision(tmp_path):
    model = Tied()
    other = Tied()
    path = write(tmp_path, 7, model=model)
    checkpoint.load_model(other, checkpoint.load_tensors(path / "model.safetensors"), path)
    for key, value in model.state_dict().items():
        actual = other.state_dict()[key]
        assert torch.equal(actual, value)
    assert other.b.weight is other.a.weight
    assert path.name == "step-7"
    assert checkpoint.load_state(path)["step"] == 7
    assert checkpoint.damage(path) is None
    files = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(p.name for p in path.iterdir()) == files
    assert (path / "model.safetensors").stat().st_size < 1000  # the shared weight is there once
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(1.5),
        "part": torch.randn(4, 4)[1:3],
        "same_part": torch.ones(1).expand(3),
    }
    loaded = checkpoint.load_tensors(
        checkpoint.save(tmp_path, 8, {"model": tensors}, {}) / "model.safetensors"
    )
    for k, v in tensors.items():
        assert torch.equal(loaded[k], v)
        assert loaded[k].dtype == v.dtype


def test_round_trip_of_samples_between_two_fits(tmp_path):
    """As many rows as passes left: a model that has none yet takes them, and goes on to the same fit."""
    q, k, v = torch.randn(3, 1, 2, 12, 4)
    layers = []
    for _ in range(2):
        layers.append(NearFar(2, 4, heavy=2, cells=2, cross=True, fit_steps=4))
    for _ in range(3):
        layers[0](q, k, v)
    path = write(tmp_path, 3, model=layers[0])
    checkpoint.load_model(layers[1], checkpoint.load_tensors(path / "model.safetensors"), path)
    assert layers[1].clusters.queries.shape[1] > 1
    for layer in layers:
        layer(k, q, v)
        layer(q, k, v)
    assert int(layers[0].clusters.fits) == 1
    for name, actual in layers[0].state_dict().items():
        expected = layers[1].state_dict()[name]
        assert torch.equal(actual, expected), name


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = [
    (
        lambda p: flip(p / "optimizer.safetensors"),
        "optimizer.safetensors differs from its checksum",
    ),
    (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not a manifest"),
    (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is not a manifest"),
]


@pytest.mark.parametrize("harm, reason", DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_a_damaged_checkpoint_is_skipped(harm, reason, tmp_path, capsys):
    write(tmp_path, 5)
    harm(write(tmp_path, 10))
    (tmp_path / ".step-3.123").mkdir()  # left by a killed process
    assert checkpoint.newest(tmp_path) == tmp_path / "step-5" == checkpoint.newest(tmp_path)
    (printed,) = capsys.readouterr().out.splitlines()
    assert "step-10: damaged" in printed
    assert reason in printed
    assert "removed, trying step-5" in printed
    actual = [p.name for p in tmp_path.iterdir()]
    assert actual == ["step-5"]
    assert checkpoint.newest(tmp_path / "absent") is None


READS = [
    (os, "listdir"),
    (hashlib, "file_digest"),
    (Path, "read_bytes"),
    (Path, "open"),
]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("owner, name", READS, ids=[name for _, name in READS])
def test_a_read_error_is_not_damage_and_removes_nothing(owner, name, code, tmp_path, monkeypatch):
    for step in (5, 10):
        write(tmp_path, step)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(code)):
        patch.setattr(owner, name, failing(code))
        checkpoint.newest(tmp_path)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-10"
    assert checkpoint.steps(tmp_path) == [5, 10]


def test_a_run_whose_checkpoints_cannot_be_read_stays_as_it_is(
    typed, whole, cut, tmp_path, monkeypatch
):
    run = shutil.copytree(cut, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", failing(errno.EMFILE))
        code, _, err = typed(*ARGS, "resume=auto")
    assert code == 2
    assert "step-13: cannot be read (Too many open files)" in err
    assert len(err.splitlines()) == 1
    assert checkpoints(run) == [10, 12, 13]
    assert (run / "metrics.jsonl").read_bytes() == lines
    assert typed(*ARGS, "resume=auto")[0] == 0
    assert_same(run, whole)


def test_the_newest_and_the_best_are_kept(tmp_path):
    cases = [(1, None), (2, 1), (3, 2), (4, 2), (5, 2)]
    for step, best in cases:
        write(tmp_path, step, best)
        checkpoint.prune(tmp_path, keep=2, best=best)
    assert checkpoint.steps(tmp_path) == [2, 4, 5]


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = write(tmp_path, 1)
    tensors = checkpoint.load_tensors(path / "model.safetensors")
    without_counts = {key: t for key, t in tensors.items() if key != "counts"}
    with pytest.raises(CheckpointError, match=r"a.weight has shape \(4, 4\), expected \(4, 5\)"):
        checkpoint.load_model(Tied(width=5), tensors, path)
    with pytest.raises(CheckpointError, match=r"counts has shape none, expected \(6,\)"):
        checkpoint.load_model(Tied(), without_counts, path)
    with pytest.raises(CheckpointError, match=r"more has shape \(1,\), expected none"):
        checkpoint.load_model(Tied(), tensors | {"more": torch.zeros(1)}, path)
