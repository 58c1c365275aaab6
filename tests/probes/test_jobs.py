"""Cells as jobs of a queue: submitted once, taken when they have ended, and queued again when they are stopped."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from crt_exp.config import ConfigError
from crt_exp.probes import cells, jobs
from crt_exp.report import __main__ as command_line
from crt_exp.report.draws import read as read_draws
from crt_exp.runner import sweep

needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="the extra `sweep` is not installed")
KEYS = [{"x": x} for x in range(5)]


def half(x):
    """Of a job; it leaves a line where it runs."""
    with open("calls", "a") as file:
        file.write(f"{x}\n")
    if x < 0:
        raise ValueError(f"x = {x}: expected at least 0")
    return x / 2


# ---- without a queue


class Queue:
    """In place of a Launcher: a job ends when it has been looked at twice, by `half`; keeps what it was asked."""

    def __init__(self, most=2, found=()):
        self.most, self.found, self.submitted, self.at_once = most, found, [], 0
        self.here = []

    def job(self, home, cell):
        if cell.digest not in self.found:
            self.submitted.append(cell.key["x"])
        self.here.append(job := Looked(self, home / cell.digest, cell))
        self.at_once = max(self.at_once, len(self.here))
        return job


class Looked:
    def __init__(self, queue, folder, cell):
        self.queue, self.folder, self.cell, self.looks = queue, folder, cell, 0

    def ended(self):
        self.looks += 1
        return self.looks > 1

    def outcome(self):
        self.queue.here.remove(self)
        try:
            return "success", (half(**self.cell.key), 0.5)
        except ValueError as error:
            return "error", str(error)


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "PAUSE", 0)
    monkeypatch.setattr(cells, "_launcher", None)

    def fill(queue, keys):
        cells.through(queue)
        return cells.Cells("mine", ["kernels.py"]).fill(keys, half, "test")
    return fill


def test_every_cell_is_a_job_once_and_so_many_wait_at_once(filled):
    queue = Queue(most=2)
    made = filled(queue, [*KEYS, KEYS[0]])
    assert [made[key] for key in KEYS] == [0, 0.5, 1, 1.5, 2] and sorted(queue.submitted) == [0, 1, 2, 3, 4]
    assert queue.at_once == 2 and made.kept['{"x": 1}']["seconds"] == 0.5
    again = Queue()
    filled(again, KEYS)
    assert again.submitted == []


def test_what_an_earlier_command_submitted_is_waited_for(filled):
    code = cells.Cells("mine", ["kernels.py"]).code
    earlier = [jobs.Cell(half, key, ("kernels.py",), code) for key in KEYS[:3]]
    queue = Queue(found={cell.digest for cell in earlier})
    made = filled(queue, KEYS)
    assert queue.submitted == [3, 4] and [made[key] for key in KEYS] == [0, 0.5, 1, 1.5, 2]


def test_a_job_that_fails_is_said_in_the_end(filled):
    """The others are taken, and the failed one is submitted again by the next command."""
    with pytest.raises(jobs.JobsFailed, match="1 jobs ended without a result.*outputs/mine/jobs/.*: x = -1: exp"):
        filled(Queue(), [{"x": -1}, *KEYS[:2]])
    queue = Queue()
    with pytest.raises(jobs.JobsFailed):
        filled(queue, [{"x": -1}, *KEYS[:2]])
    assert queue.submitted == [-1]


def test_nothing_is_submitted_after_the_time_given(filled, monkeypatch):
    monkeypatch.setattr(cells, "_end", time.monotonic())
    with pytest.raises(cells.OutOfTime, match="5 of 5 cells are left"):
        filled(queue := Queue(), KEYS)
    assert queue.submitted == []


def test_a_job_computes_nothing_by_other_code():
    with pytest.raises(jobs.JobsFailed, match="has changed since its job was submitted"):
        jobs.Cell(half, {"x": 1}, ("kernels.py",), "other")()


def test_cells_measured_again_leave_their_jobs_behind(tmp_path):
    for _ in range(2):
        (tmp_path / "mine/jobs/some").mkdir(parents=True)
        cells.forget("mine", tmp_path)
        assert not (tmp_path / "mine/jobs").exists() and (tmp_path / "mine/jobs.old/some").is_dir()


@pytest.mark.parametrize("given, message", [
    ("slurm", r"hydra/launcher=slurm needs hydra-submitit-launcher.*: pip install 'crt_exp\[sweep\]'"),
    ("slrum partition=gpu", "unknown launcher 'slrum'; did you mean slurm"), ("joblib", "unknown launcher 'joblib'"),
    ("basic", "unknown launcher 'basic'")])
def test_a_launcher_that_is_none_or_lacks_its_package(given, message, monkeypatch, capsys):
    """In one line of the command, which measures nothing."""
    monkeypatch.setattr(sweep, "PLUGINS", {name: f"{package}_absent" for name, package in sweep.PLUGINS.items()})
    monkeypatch.setattr(command_line, "make", None)
    with pytest.raises(ConfigError, match=message):
        jobs.Launcher.read(given)
    monkeypatch.setattr(sys, "argv", ["report", "demo", "--launcher", given])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 2 and "crt_exp.report: error: " in capsys.readouterr().err


def test_jobs_of_several_processes_are_refused():
    given = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher", "nodes": 1}
    assert jobs.Launcher.of("slurm", given | {"partition": "gpu"}).settings["partition"] == "gpu"
    for key in ("nodes", "tasks_per_node"):
        with pytest.raises(ConfigError, match=rf"{key} = 2: one process computes a cell.*expected 1"):
            jobs.Launcher.of("slurm", given | {key: 2})
    with pytest.raises(ConfigError, match="submits nothing through submitit"):
        jobs.Launcher.of("basic", given | {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"})


# ---- with submitit on this machine


@needs_submitit
def test_settings_are_those_of_hydras_launcher():
    """conf/hydra/launcher and conf/sweeps.yaml, with the user's over them."""
    made = jobs.Launcher.read("slurm partition=gpu gpus_per_node=1")
    assert made.cluster == "slurm" and made.most == 256
    assert {key: made.settings[key] for key in ("partition", "gpus_per_node", "cpus_per_task", "signal_delay_s",
                                                "timeout_min", "max_num_timeout", "name")} == {
        "partition": "gpu", "gpus_per_node": 1, "cpus_per_task": 64, "signal_delay_s": 300, "timeout_min": 1440,
        "max_num_timeout": 20, "name": "crt_exp"}
    with pytest.raises(ConfigError, match="did you mean hydra.launcher.partition"):
        jobs.Launcher.read("slurm partitoin=gpu")
    assert jobs.Launcher.read("submitit_local").cluster == "local"


@needs_submitit
def test_without_a_queue_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    cell = jobs.Cell(half, {"x": 1}, ("kernels.py",), "code")
    with pytest.raises(jobs.JobsFailed, match="jobs cannot be submitted to slurm: .*srun"):
        jobs.Launcher.read("slurm").submit(tmp_path / "job", cell)


SLURM = {
    "sbatch": """cp "${@: -1}" $folder/job.sh; echo >> $folder/submitted; id=$(wc -l < $folder/submitted)
SLURM_JOB_ID=$id SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_JOB_NODELIST=here SLURM_PROCID=0 SLURM_LOCALID=0 \\
  SLURM_NODEID=0 setsid bash "${@: -1}" </dev/null >$folder/out 2>&1 &
echo "Submitted batch job $id"
""",
    "srun": """while [[ $1 == -* ]]; do [[ $1 == --output || $1 == --error ]] && shift; shift; done
exec "$@"
""",
    "sacct": """echo "JobID|State|NodeList|"; for i in 1 2; do echo "$i|RUNNING|here|"; done
"""}


@needs_submitit
@pytest.mark.slow
def test_slurm_gets_a_job_for_each_cell(tmp_path, filled, monkeypatch):
    """By commands that stand for it: with the launcher's settings, and the values are those of a call."""
    (tmp_path / "bin").mkdir()
    for name, lines in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\nfolder={tmp_path}/bin\n{lines}")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ENV["PYTHONPATH"])
    cells.through(jobs.Launcher.read("slurm partition=gpu gpus_per_node=1"))
    made = cells.Cells("mine", ["kernels.py"]).fill(KEYS[:2], dict, "test")
    assert [made[key] for key in KEYS[:2]] == KEYS[:2]
    for line in ("--gpus-per-node=1", "--nodes=1", "--partition=gpu", "--signal=USR2@300", "--time=1440"):
        assert f"#SBATCH {line}" in (tmp_path / "bin/job.sh").read_text()


PAGE = """
title: Queued
metrics: {loss: {better: lower}}
sizes:
  small:
    runs:
      - {metrics: [loss], tested: [loss], seeds: 1, cost: false, settings: {A: []}, arms: [exact, "favorp m=4"],
         common: [task=recall, +task.sizes.d=16, trainer.batch=2, task.block=16, task.pairs=2, task.queries=2,
                  task.evaluated=2, task.rows=16, trainer.save_every=1, trainer.log_every=1, trainer.steps=STEPS]}
"""
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
    [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])}


def report(folder, *options):
    return subprocess.Popen([sys.executable, "-m", "crt_exp.report", "queued.yaml", "--out", "out", *options],
                            cwd=folder, env=os.environ | ENV, start_new_session=True, stderr=subprocess.PIPE, text=True)


def draws_of(folder):
    found = read_draws("queued", folder / "out")
    return [(draw.arm, str(draw.x), draw.unit, draw.value) for draw in found.itertuples()]


@needs_submitit
@pytest.mark.slow
def test_a_killed_report_waits_for_the_jobs_that_it_submitted(tmp_path):
    """kill -9 after the submission: the same command submits nothing again, and its draws are those of runs without a
    queue. A job that gets SIGUSR2 meanwhile is queued again and goes on."""
    here, queue = tmp_path / "here", tmp_path / "queue"
    for folder in (here, queue):
        folder.mkdir()
        (folder / "queued.yaml").write_text(PAGE.replace("STEPS", "30"))
    assert report(here).wait() == 0
    first = report(queue, "--launcher", "submitit_local")
    runs = queue / "outputs/runs"
    while len([*runs.glob("*/checkpoints/step-1*")]) < 2:
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    jobs_of = {path.name: path.parent for path in queue.glob("outputs/queued/jobs/*/*_submitted.pkl")}
    controller = next(iter(jobs_of)).removesuffix("_submitted.pkl")
    os.kill(int(Path(f"/proc/{controller}/task/{controller}/children").read_text().split()[0]), signal.SIGUSR2)
    log = next(iter(jobs_of.values())) / f"{controller}_0_log.out"
    end = time.monotonic() + 60
    while "Requeued job" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    second = report(queue, "--launcher", "submitit_local")
    seen = set()
    while second.poll() is None:
        seen |= {path.name for path in queue.glob("outputs/queued/jobs/*/*_submitted.pkl")}
        time.sleep(0.02)
    assert second.returncode == 0, second.stderr.read()
    assert len(jobs_of) == 2 and seen == {*jobs_of} and draws_of(queue) == draws_of(here)
    assert not [*queue.glob("outputs/queued/jobs/*")]
