"""A run on two processes, what they share, and how they end."""

import os
import signal
import subprocess
import time

import pytest
import torch
from omegaconf import OmegaConf
from torchrun import ENVIRONMENT, TORCHRUN, torchrun
from toy_runs import BASE, CARRYING, FILES, PLAIN, assert_close, checkpoints, records

from crt_exp.config import CONF, ConfigError
from crt_exp.runner import checkpoint
from crt_exp.runner.exit_handling import StopSignals
from crt_exp.runner.trainer_config import TrainerConfig


def test_two_processes_are_one_with_twice_the_batch(plain, tmp_path):
    """In the default directory, which must be one; with micro-batches and a mean over parts of different size."""
    out = torchrun(*BASE, *PLAIN, "trainer.accumulate=2", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("toy: accuracy") == 1
    directory, = (tmp_path / "outputs" / "toy").iterdir()
    assert sorted(p.name for p in directory.iterdir()) == FILES
    assert_close(records(directory), records(plain))
    state = checkpoint.load_state(directory / "checkpoints" / "step-12")
    assert len(state["rng"]) == 2 and state["rng"][0] != state["rng"][1]


@pytest.mark.slow
def test_two_processes_read_the_same_costs_as_one(typed, tmp_path):
    """Two processes are one with twice the micro-batches: of every step each has its half."""
    args = ["task=uneven", "trainer.epochs=1", "task.dropout=0"]
    out = torchrun(*BASE, *args, f"hydra.run.dir={tmp_path / 'two'}")
    assert out.returncode == 0, out.stderr
    assert typed(*args, "trainer.accumulate=2")[0] == 0
    assert_close(records(tmp_path / "two"), records(tmp_path / "run"))


@pytest.mark.slow
def test_sharded_over_two_processes(plain, tmp_path):
    """FSDP gives the same numbers."""
    out = torchrun(*BASE, *PLAIN, "trainer=fsdp", "trainer.precision=no", f"hydra.run.dir={tmp_path}/a b")
    assert out.returncode == 0, out.stderr
    assert_close(records(tmp_path / "a b"), records(plain))
    one, two = (checkpoint.load_tensors(d / "checkpoints/step-12/optimizer.safetensors")
                for d in (plain, tmp_path / "a b"))
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "fsdp"])
def test_two_processes_stop_and_resume(strategy, tmp_path):
    """A SIGTERM to torchrun: both processes stop at the same step, and go on to the same numbers."""
    args = [*BASE, f"trainer={strategy}", "trainer.precision=no", "trainer.save_every=5", "trainer.keep=20",
            "task.pause=0.05"]
    assert torchrun(*args, f"hydra.run.dir={tmp_path}/whole").returncode == 0
    process = subprocess.Popen([*TORCHRUN, "-m", "crt_exp", *args, f"hydra.run.dir={tmp_path}/run"],
                               env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not checkpoints(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    err = process.communicate()[1]
    assert process.returncode and err.count("stopped by SIGTERM") == 1, err
    assert torchrun(*args, f"hydra.run.dir={tmp_path}/run", "resume=auto").returncode == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_states_of_processes_are_compared():
    one, two = ({"a": torch.tensor([float(i)]), "n": 1, "s": None} for i in (1, 2))
    assert checkpoint.same_state(one, dict(one)) and not checkpoint.same_state(one, two)
    assert not checkpoint.same_state(one, one | {"n": 2}) and not checkpoint.same_state(one, one | {"b": 1})


@pytest.mark.slow
def test_a_state_of_two_processes(typed, tmp_path):
    """Each has its own; another number of processes cannot continue it."""
    out = torchrun(*BASE, *CARRYING, f"hydra.run.dir={tmp_path / 'run'}")
    assert out.returncode == 0, out.stderr
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept = checkpoint.load_tensors(path / "task.safetensors")
    assert not torch.equal(kept["0.seen"], kept["1.seen"]) and torch.equal(kept["0.table"], kept["1.table"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # as if it had been stopped before the final record
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    code, _, err = typed(*CARRYING, "resume=auto")
    assert code == 2 and "has task states of 2 processes" in err


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_tell_an_error_once(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    for args, message in [(["trainer.batch=7"], "trainer.batch=7: expected a multiple of 2"),
                          (["trainer.lrr=1"], "unknown key 'trainer.lrr'"),
                          (["hydra.run.dir=used"], "used: not empty"),
                          (["task.poison=5", "trainer.epochs=1"], "first not finite: output of inner.0 (Linear)"),
                          (["task.poison=5", "trainer=fsdp"], "first not finite: output of inner.0 (Linear)")]:
        out = torchrun(*BASE, *args, cwd=tmp_path)
        assert out.returncode == 1 and out.stderr.count(message) == 1, out.stderr


def test_processes_need_a_share_of_the_batch():
    values = OmegaConf.to_container(OmegaConf.load(CONF / "trainer" / "default.yaml"))
    del values["_target_"]
    with pytest.raises(ConfigError, match="batch=6: expected a multiple of 4"):
        TrainerConfig(**values | {"batch": 6, "accumulate": 2}).check_processes(2)


def test_only_a_later_interrupt_stops_at_once(interruptible):
    with StopSignals() as signals:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # as torchrun and a terminal send them together
            os.kill(os.getpid(), signum)
        assert signals.signum == signal.SIGTERM
        signals.first -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
