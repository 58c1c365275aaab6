"""A run on two processes, what they share, and how they end."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from toy_runs import (
    BASE,
    CARRYING,
    ENVIRONMENT,
    FILES,
    PLAIN,
    TESTS,
    assert_close,
    checkpoints,
    crt_exp,
    records,
)

from crt_exp.config import ConfigError
from crt_exp.runner import checkpoint, task_state
from crt_exp.runner.command_line import compose
from crt_exp.runner.run import Lock
from crt_exp.runner.processes import StopSignals
from crt_exp.runner.trainer_config import TrainerConfig, check_processes, start_world

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "crt_exp")


def test_two_processes_are_one_with_twice_the_batch(plain, tmp_path):
    """Under torchrun, in the default directory, which must be one;
    with micro-batches and a mean over parts of different size."""
    out = crt_exp(*PLAIN, "trainer.accumulate=2", start=TORCHRUN, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("toy: accuracy") == 1
    directory, = (tmp_path / "outputs" / "toy").iterdir()
    assert sorted(p.name for p in directory.iterdir()) == FILES
    assert_close(records(directory), records(plain))
    state = checkpoint.load_state(directory / "checkpoints" / "step-12")
    assert len(state["rng"]) == 2 and state["rng"][0] != state["rng"][1]


@pytest.mark.slow
def test_two_machines_are_one(plain, tmp_path):
    """Two agents of torchrun with --nnodes=2, here of one process each, that share the directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
             f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=1", "-m", "crt_exp", *BASE, *PLAIN,
             f"hydra.run.dir={tmp_path / 'run'}"]
    agents = [subprocess.Popen(start, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True) for _ in range(2)]
    said = [agent.communicate(timeout=280) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(out for out, _ in said).count("toy: accuracy") == 1
    assert_close(records(tmp_path / "run"), records(plain))


@pytest.mark.slow
def test_two_processes_read_the_same_costs_as_one(typed, tmp_path):
    """Two processes are one with twice the micro-batches: of every step each has its half."""
    args = ["task=uneven", "trainer.epochs=1", "task.dropout=0"]
    out = crt_exp(*args, "trainer.processes=2", f"hydra.run.dir={tmp_path / 'two'}")
    assert out.returncode == 0, out.stderr
    assert typed(*args, "trainer.accumulate=2")[0] == 0
    assert_close(records(tmp_path / "two"), records(tmp_path / "run"))


@pytest.mark.slow
def test_sharded_over_two_processes_from_one_command(plain, tmp_path):
    """trainer.processes starts a torchrun; FSDP gives the same numbers."""
    out = crt_exp(*PLAIN, "trainer=fsdp", "trainer.precision=no", "trainer.processes=2",
                  f"hydra.run.dir={tmp_path}/a b")
    assert out.returncode == 0, out.stderr
    assert_close(records(tmp_path / "a b"), records(plain))
    one, two = (checkpoint.load_tensors(d / "checkpoints/step-12/optimizer.safetensors")
                for d in (plain, tmp_path / "a b"))
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-6)


SCALED = ("task=trembl", "attention=favorp", "features.m=8", "logger=none", "task.preset=performer36",
          "+task.sizes.layers=4", "+task.sizes.d=16", "+task.sizes.d_ff=32", "task.max_length=24", "task.dropout=0",
          "task.generated.sequences=200", "task.generated.shortest=12", "task.generated.longest=24", "trainer.batch=16",
          "trainer.steps=3", "trainer.eval_every=3", "trainer.log_every=1", "trainer.warmup=0", "trainer.lr=1e-3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_eight_processes_are_one(strategy, tmp_path):
    """The 36-layer model scaled down: losses, norms of gradients and perplexities; and the weights after three steps.
    fsdp: its weights, gradients and moments lie on all eight."""
    command = [sys.executable, str(Path(__file__).with_name("forked.py"))]
    for count, name, more in ((1, "one", []), (8, "eight", [f"trainer.strategy={strategy}"])):
        out = subprocess.run([*command, str(count), *SCALED, *more, f"hydra.run.dir={tmp_path / name}"],
                             env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=280)
        assert out.returncode == 0 and out.stdout.count("trembl: perplexity") == 1, out.stderr
    one, eight = tmp_path / "one", tmp_path / "eight"
    assert_close(records(eight), records(one))
    for file in ("model", "optimizer"):
        a, b = (checkpoint.load_tensors(run / f"checkpoints/step-3/{file}.safetensors") for run in (one, eight))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-5)
    assert len(checkpoint.load_state(eight / "checkpoints/step-3")["rng"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "fsdp"])
def test_two_processes_stop_and_resume(strategy, tmp_path):
    """A SIGTERM to one command: both processes stop at the same step, 143, and go on to the same numbers."""
    args = [f"trainer={strategy}", "trainer.precision=no", "trainer.processes=2", "trainer.save_every=5",
            "trainer.keep=20", "task.pause=0.05"]
    assert crt_exp(*args, f"hydra.run.dir={tmp_path}/whole").returncode == 0
    process = subprocess.Popen([sys.executable, "-m", "crt_exp", *BASE, *args, f"hydra.run.dir={tmp_path}/run"],
                               env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not checkpoints(tmp_path / "run"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    err = process.communicate()[1]
    assert process.returncode == 143 and "stopped by SIGTERM" in err
    assert crt_exp(*args, f"hydra.run.dir={tmp_path}/run", "resume=auto").returncode == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_the_state_of_other_processes_is_refused_unless_all_had_the_same():
    one, two = ({"a": torch.tensor([float(i)]), "n": 1} for i in (1, 2))
    states = task_state.joined(*task_state.split([one, two]))
    assert all(task_state.same(a, b) for a, b in zip(states, (one, two)))
    assert task_state.share(states, 1, 2)["a"] == 2 and task_state.share(states, 0, 1) is None
    assert task_state.same(task_state.share([one, dict(one)], 2, 4), one)


@pytest.mark.slow
def test_a_state_of_two_processes(tmp_path):
    """Each has its own; another number of processes cannot continue it."""
    args = [*CARRYING, f"hydra.run.dir={tmp_path / 'run'}"]
    out = crt_exp(*args, "trainer.processes=2")
    assert out.returncode == 0, out.stderr
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept = checkpoint.load_tensors(path / "task.safetensors")
    assert not torch.equal(kept["0.seen"], kept["1.seen"]) and torch.equal(kept["0.table"], kept["1.table"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # as if it had been stopped before the final record
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    out = crt_exp(*args, "resume=auto")
    assert out.returncode == 2 and "was written by 2 processes, each with its own state of this task" in out.stderr


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_tell_an_error_once(tmp_path):
    for args, message in [(["trainer.batch=7"], "trainer.batch = 7 does not divide over 2 processes"),
                          (["trainer.lrr=1"], "unknown key 'trainer.lrr'"),
                          (["task.poison=5", "trainer.epochs=1"], "first not finite: output of inner.0 (Linear)"),
                          (["task.poison=5", "trainer=fsdp"], "first not finite: output of inner.0 (Linear)")]:
        out = crt_exp(*args, start=TORCHRUN, cwd=tmp_path)
        assert out.returncode == 1 and out.stderr.count(message) == 1, out.stderr


@pytest.mark.parametrize("args, message", [
    (["trainer.batch=7"],
     "trainer.batch = 7 does not divide over 2 processes x 1 micro-batches: choose a multiple of 2"),
    (["trainer.betas=[a,b]"], "trainer.betas=[a,b]: expected a list"),
    (["task.rows=abc"], "task.rows=abc: expected a number"),
    (["task.rows=6"], "trainer.batch = 8 is more than the 6 rows"),
    (["trainer.epochs=0.001"], "trainer.epochs = 0.001 makes no step at all: an epoch has 12"),
    (["trainer.epochs=0.05"], "trainer.epochs = 0.05 makes no step at all"),       # 0.6 of one: it was rounded to one
    (["task.streamed=true"], "set trainer.steps"),
    (["attention=generalized", "attention.phi.kernel_epsilon=-1"], "attention.phi.kernel_epsilon=-1"),
], ids=str)
def test_a_mistake_is_told_before_the_processes_start(args, message, typed, tmp_path, monkeypatch):
    monkeypatch.setattr("crt_exp.runner.fit.torchrun", lambda *_: pytest.fail("processes were started"))
    code, _, err = typed("trainer.processes=2", *args)
    assert code == 2 and message in err and len(err.splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_the_processes_find_is_told_once_and_with_their_exit_code(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    for args, code, message in [(["hydra.run.dir=used"], 2, "used is not empty"),
                                (["task.poison=5"], 3, "first not finite")]:
        out = crt_exp("trainer.processes=2", *args, cwd=tmp_path)
        assert out.returncode == code and message in out.stderr and len(out.stderr.splitlines()) == 1, out.stderr


@pytest.mark.slow
def test_two_processes_are_refused_together(tmp_path):
    """Where the first cannot have the directory, and with the exit code of that error."""
    lock = Lock(tmp_path / "run")
    out = crt_exp("trainer.processes=2", "resume=auto", f"hydra.run.dir={tmp_path / 'run'}")
    lock.release()
    assert out.returncode == 2 and out.stderr.count(f"in use by process {os.getpid()}") == 1, out.stderr
    assert "terminate called" not in out.stderr


def test_batch_that_does_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="trainer.batch = 6 does not divide over 2 processes x 2 .* multiple of 4"):
        start_world(config(batch=6, accumulate=2))


@pytest.mark.parametrize("asked, around, message", [
    (8, None, "trainer.processes = 8: this machine has 2 GPUs, .* trainer.processes=2 with trainer.accumulate=4"),
    (None, 4, "torchrun --nproc_per_node = 4: this machine has 2 GPUs, .* trainer.accumulate=2"),
    (8, 2, None), (2, None, None), (None, None, None)])
def test_a_process_has_a_gpu_of_its_own(asked, around, message, monkeypatch):
    """Under torchrun its number counts, also where a recipe names another."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, str(around)) if around else monkeypatch.delenv(key, raising=False)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_processes(config(batch=32, processes=asked), 8)


def test_the_conformer_of_960_hours_never_runs_on_one_gpu_unasked():
    """Its batch is counted in seconds a process: one GPU would train with an eighth of it."""
    for name in ("crt_conformer_960h", "hrf_conformer_960h"):
        assert compose([f"experiment={name}"]).trainer.processes == 8


def config(**changes):
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.load(TESTS.parent / "conf" / "trainer" / "default.yaml"))
    del values["_target_"]
    return TrainerConfig(**values | changes)


# ---- their end -------------------------------------------------------------------------------------------------------


def test_only_a_later_interrupt_stops_at_once(interruptible):
    with StopSignals() as signals:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # as torchrun and a terminal send them together
            os.kill(os.getpid(), signum)
        assert signals.signum == signal.SIGTERM
        signals.first -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
