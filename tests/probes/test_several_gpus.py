"""What `make gpu` runs on two GPUs, and what it says where there are fewer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crt_exp.probes import several_gpus
from crt_exp.runner.command_line import check_command_line


def counted(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("count", [0, 1])
def test_with_fewer_gpus_one_line_says_why_it_was_not_run(count, monkeypatch, capsys):
    counted(monkeypatch, count)
    monkeypatch.setattr(subprocess, "run", None)
    several_gpus.main()
    said, = capsys.readouterr().out.splitlines()
    assert "torchrun with NCCL was not run: it needs 2 GPUs" in said and f"torch sees {count} here" in said


class Torchrun:
    """In place of torchrun: runs whose losses are 1/step, those of one way by `factor` more."""

    def __init__(self, factor=1.0, code=0):
        self.commands, self.factor, self.code = [], factor, code

    def __call__(self, command, **options):
        self.commands.append(command)
        place = Path(command[-1].removeprefix("hydra.run.dir="))
        place.mkdir()
        factor = self.factor if "trainer=fsdp" in command else 1.0
        (place / "metrics.jsonl").write_text("".join(
            f'{{"step": {i}, "split": "train", "loss": {factor / i}, "time_s": {i}}}\n' for i in range(1, 31)))
        return subprocess.CompletedProcess(command, self.code, "", "NCCL says no")


def test_with_two_gpus_a_run_is_compared_with_that_of_one(monkeypatch, capsys):
    """Each command is one of the command line; torchrun starts so many processes, and the batch stays."""
    counted(monkeypatch, 2)
    monkeypatch.setattr(subprocess, "run", ran := Torchrun())
    several_gpus.main()
    assert [re.match("several GPUs, (.*): loss 0.033333 after 30 steps, 1.0 steps/s", line)[1]
            for line in capsys.readouterr().out.splitlines()] == ["one process", "DDP", "FSDP"]
    starts = [[sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", "-m",
               "crt_exp"] for count in (1, 2, 2)]
    assert [command[:7] for command in ran.commands] == starts
    assert ["trainer=fsdp" in command for command in ran.commands] == [False, False, True]
    for command in ran.commands:
        check_command_line(command[7:])
        assert "trainer.batch=32" in command and not any(option.startswith("trainer.cpu") for option in command)


@pytest.mark.parametrize("torchrun, message", [
    (Torchrun(factor=1.01), "FSDP: the losses are not those of one process"),
    (Torchrun(code=1), "one process: torchrun ended with code 1\nNCCL says no")], ids=["other losses", "an error"])
def test_what_differs_is_an_error(torchrun, message, monkeypatch, capsys):
    counted(monkeypatch, 2)
    monkeypatch.setattr(subprocess, "run", torchrun)
    with pytest.raises(SystemExit) as stop:
        several_gpus.main()
    assert stop.value.code == 1 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu` compares them on GPUs")
def test_on_a_cpu_they_agree(capsys):
    several_gpus.compared()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_make_gpu_runs_it():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert re.search(r"processes\) \$\(PY\) -m crt_exp.probes.several_gpus", makefile)
    assert "processes" in re.search(r"^PART +\?= (.*)$", makefile, re.M)[1].split()
