"""Cells as jobs of a queue: submitted once, taken when they have ended, and queued again when they are stopped."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from crt_exp.probes import cells, jobs
from crt_exp.report.draws import read as read_draws

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

    def __init__(self, most=2):
        self.most, self.submitted, self.at_once, self.here = most, [], 0, []

    def job(self, home, cell):
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


def test_a_job_that_fails_is_said_in_the_end(filled):
    """The others are taken, and the failed one is submitted again by the next command."""
    with pytest.raises(jobs.JobsFailed, match="1 jobs ended without a result.*outputs/mine/jobs/.*: x = -1: exp"):
        filled(Queue(), [{"x": -1}, *KEYS[:2]])
    queue = Queue()
    with pytest.raises(jobs.JobsFailed):
        filled(queue, [{"x": -1}, *KEYS[:2]])
    assert queue.submitted == [-1]


# ---- with submitit on this machine


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
