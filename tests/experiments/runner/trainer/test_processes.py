"""A run on two processes, what they share, and how they end."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import toy
from helpers.refusals import check_error
from helpers.torchrun import ENVIRONMENT, TORCHRUN, torchrun
from helpers.toy import BASE, CARRYING, FILES, PLAIN, assert_close, checkpoints, records

from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.checkpoint import rng_state
from crt_exp.experiments.runner.exit_handling import StopSignals


def test_two_processes_are_one_with_twice_the_batch(plain, tmp_path):
    """In the default directory, which must be one; with micro-batches and a mean over parts of different size."""
    out = torchrun(*BASE, *PLAIN, "trainer.accumulate=2", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("toy: accuracy") == 1
    (directory,) = (tmp_path / "outputs" / "toy").iterdir()
    assert sorted(p.name for p in directory.iterdir()) == FILES
    assert_close(records(directory), records(plain))
    state = checkpoint.load_state(directory / "checkpoints" / "step-12")
    assert len(state["rng"]) == 2
    assert state["rng"][0] != state["rng"][1]


def test_each_process_continues_with_its_own_random_numbers(tmp_path, monkeypatch):
    model = toy.Network(6, 16, 0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    states = []
    expected = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(rng_state())
        expected.append(torch.rand(3))

    def gather_object(values):
        return states if values == [rng_state()] else values * 2

    monkeypatch.setattr(checkpoint, "gather_object", gather_object)

    def process(rank):
        shared = SimpleNamespace(
            process_index=rank, num_processes=2, is_main_process=True, scaler=None
        )
        run = SimpleNamespace(
            directory=tmp_path, existed=True, records=[], rewind=lambda count: None
        )
        state = checkpoint.TrainingState()
        state.module, state.optimizer, state.task = model, optimizer, toy.Toy()
        state.run, state.accelerator, state.per_epoch = run, shared, 12
        state.progress = checkpoint.Progress()
        return state

    process(0).save(keep=1)
    with pytest.raises(checkpoint.CheckpointError, match="not seen by process 0"):
        process(0).restore()
    (tmp_path / "config.yaml").touch()
    for rank in (0, 1):
        process(rank).restore()
        assert torch.equal(torch.rand(3), expected[rank]), rank


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "fsdp"])
def test_two_processes_stop_and_resume(strategy, plain, tmp_path):
    """A SIGTERM to torchrun: both processes stop at the same step, and go on to the same numbers: those of one."""
    args = [
        *BASE,
        *PLAIN,
        f"trainer={strategy}",
        "trainer.precision=no",
        "task.pause=0.05",
        "trainer.keep=20",
    ]
    whole = tmp_path / "whole"
    run = tmp_path / "a b"
    assert torchrun(*args, f"hydra.run.dir={whole}").returncode == 0
    assert_close(records(whole), records(plain))
    optimizer = "checkpoints/step-12/optimizer.safetensors"
    one = checkpoint.load_tensors(plain / optimizer)
    two = checkpoint.load_tensors(whole / optimizer)
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-6)
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "crt_exp", *args, "trainer.save_minutes=1e-9", f"hydra.run.dir={run}"],
        env=os.environ | ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not checkpoints(run):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    err = process.communicate()[1]
    assert process.returncode, err
    assert err.count("stopped by SIGTERM") == 1, err
    assert torchrun(*args, f"hydra.run.dir={run}", "resume=auto").returncode == 0
    assert records(run) == records(whole)


@pytest.mark.slow
def test_a_state_of_two_processes(typed, tmp_path):
    """Each has its own; another number of processes cannot continue it. Rows of unequal cost are divided."""
    out = torchrun(*BASE, *CARRYING, f"hydra.run.dir={tmp_path / 'run'}")
    assert out.returncode == 0, out.stderr
    path = tmp_path / "run" / "checkpoints" / "step-6"
    kept = checkpoint.load_tensors(path / "task.safetensors")
    assert not torch.equal(kept["0.seen"], kept["1.seen"])
    assert torch.equal(kept["0.table"], kept["1.table"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # as if it had been stopped before the final record
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
    check_error(typed(*CARRYING, "resume=auto"), "has task states of 2 processes")


@pytest.mark.slow
def test_two_processes_print_an_error_once(tmp_path):
    out = torchrun(*BASE, "task.poison=5", "trainer=fsdp", cwd=tmp_path)
    assert out.returncode == 1, out.stderr
    assert out.stderr.count("first not finite: output of inner.0 (Linear)") == 1, out.stderr


def test_only_a_later_interrupt_stops_at_once(interruptible):
    """And a signal that was ignored from the start stays so, as nohup and a shell's & start a run."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
        # ignored, then as torchrun and a terminal send them together
        cases = [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
        for signum in cases:
            os.kill(os.getpid(), signum)
        assert signals.signum == signal.SIGTERM
        signals.first -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
