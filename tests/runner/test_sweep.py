"""Sweeps: their table, a run that fails among others, Hydra's plugins, torchrun children."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from pandas import DataFrame

from crt_exp.config import ConfigError
from crt_exp.runner.sweep import check_direction, finished_runs, table
from crt_exp.measure.attention_errors import ProjectionErrors
from crt_exp.tasks.uci import UCI

HERE = Path(__file__).parents[1]
WINE = ("-m", "task=uci", "task.repeats=1", "task.sigmas=[0.3]", "logger=none")
TOY = ("-m", "--config-dir", str(HERE / "toy_conf"), "task=toy", "logger=none", "trainer.epochs=1")
needs_plugins = pytest.mark.skipif(find_spec("hydra_plugins") is None, reason="the extra `sweep` is not installed")


def crt_exp(*args):
    folders = (str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "crt_exp", *args], capture_output=True, text=True, env=env,
                          timeout=280)


def final(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_sweep_ends_with_its_table(typed, tmp_path):
    """Also where it is repeated: then nothing is left to run."""
    for _ in range(2):
        code, out, err = typed(*WINE, "features=trig,oprf", "features.m=4", "seed=0,1", "resume=auto",
                               f"hydra.sweep.dir={tmp_path}/s")
        assert code == 0, err
    values = {feature: [final(tmp_path / "s" / str(2 * i + seed))["accuracy"] for seed in (0, 1)]
              for i, feature in enumerate(("trig", "oprf"))}
    means = {feature: sum(v) / 2 for feature, v in values.items()}
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("sweep of 4 runs, mean over seeds")) + 2
    for feature, line in zip(sorted(means, key=means.get, reverse=True), lines[first:]):
        assert line.split()[:5] == [feature, "2", "accuracy", f"{means[feature]:.4f}", "+-"]
    rows = list(csv.DictReader((tmp_path / "s" / "sweep.csv").open()))
    assert [(r["run"], r["features"], r["seed"], float(r["value"])) for r in rows] == [
        (str(2 * i + seed), feature, str(seed), values[feature][seed])
        for i, feature in enumerate(values) for seed in (0, 1)]
    versions = json.loads((tmp_path / "s" / "3" / "versions.json").read_text())
    assert {"features=oprf", "seed=1", "features.m=4"} <= set(versions["overrides"])


def test_one_run_of_a_sweep_fails(typed, tmp_path):
    """The others run, its error is told without a traceback, and the sweep as a whole has failed."""
    code, out, err = typed(*WINE, "features=gerf", "features.A=0.1,null", "features.m=4,8",
                           f"hydra.sweep.dir={tmp_path}/s")
    assert code == 1 and "Traceback" not in err and "sweep of 2 runs" in out
    assert f"the run in {tmp_path}/s/0 failed: features=gerf: A=" in err
    assert f"the run in {tmp_path}/s/1 failed: features=gerf: A=" in err
    assert sorted(p.name for p in (tmp_path / "s").iterdir() if p.is_dir()) == ["2", "3"]


@pytest.mark.parametrize("args, message", [
    (["features.m=4,0,8"], "features.m=0: expected an integer >= 1"),
    (["task.repeats=1.5", "seed=0,1,2"], "task.repeats=1.5: expected an integer"),
    (["seed=range(-1,2)"], "seed=-1: expected an integer >= 0"),
    (["features=glob(*)", "features.m=8,1e3"], "features.m=1000.0: expected an integer"),
    (["task=uci,mlmm"], "unknown task 'mlmm'; did you mean mlm?"),
    (["attention=exact,favorpp", "features.m=4,8"], "attention=exact: does not use features.m=4"),
], ids=str)
def test_a_mistake_in_a_sweep_is_told_once_and_before_it_begins(args, message, typed, tmp_path):
    code, _, err = typed("-m", "logger=none", *args, f"hydra.sweep.dir={tmp_path}/s")
    assert code == 2 and err.startswith(f"crt_exp: error: {message}") and len(err.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_a_broken_file_in_a_sweep_is_named(typed, tmp_path):
    assert typed(*WINE, "features.m=4,8", f"hydra.sweep.dir={tmp_path}/s")[0] == 0
    path = tmp_path / "s" / "0" / "versions.json"
    path.write_text('{"command": "x",\n"overrides": [}\n')
    with pytest.raises(ConfigError, match=f"{path}.*: not valid JSON"):
        finished_runs(tmp_path / "s")


def test_the_table_holds_the_runs_of_this_sweep_alone(typed, tmp_path):
    """Also where the directory of an earlier, larger sweep is used again, and where its runs are refused."""
    sweep_dir = f"hydra.sweep.dir={tmp_path}/s"
    assert "sweep of 3 runs" in typed(*WINE, "features.m=4,6,8", sweep_dir)[1]
    code, out, _ = typed(*WINE, "features.m=4,6", "resume=auto", sweep_dir)
    assert code == 0 and "sweep of 2 runs" in out
    assert len((tmp_path / "s" / "sweep.csv").read_text().splitlines()) == 3
    code, out, err = typed(*WINE, "features.m=4,6", sweep_dir)
    assert code == 1 and "sweep of" not in out and "set resume=auto" in err


def done(settings, value, metric="loss", direction="minimize"):
    return {"run": "0", **settings, "metric": metric, "value": value, "direction": direction}


def test_table_of_losses():
    runs = DataFrame([done({"lr": f"{i}"}, value) for i, value in enumerate([0.5, None, 0.1, 0.3])])
    lines = table(runs).splitlines()
    # the smallest first, what is no number last
    assert [line.split()[0] for line in lines[2:]] == ["2", "3", "0", "1"] and lines[5].endswith("nan")
    assert "... and 10 more" in table(DataFrame([done({"lr": str(i)}, float(i)) for i in range(30)]))
    mixed = table(DataFrame([done({"task": "a"}, 0.5), done({"task": "b"}, 0.5, "accuracy", "maximize")]))
    assert "accuracy" in mixed and "loss" in mixed


def test_the_best_of_each_data_set_comes_first():
    values = {("wifi", "trig"): 0.9, ("wifi", "oprf"): 0.95, ("wine", "trig"): 0.6, ("wine", "oprf"): 0.5}
    runs = [done({"task.dataset": data, "features": features, "seed": "0"}, value, "accuracy", "maximize")
            for (data, features), value in values.items()]
    lines = table(DataFrame(runs)).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["wifi", "oprf"], ["wifi", "trig"], ["wine", "trig"],
                                                        ["wine", "oprf"]]


def test_a_sweeper_must_look_for_the_best():
    check_direction(UCI, "maximize")
    check_direction(ProjectionErrors, "minimize")
    check_direction(ProjectionErrors, None)  # sweepers that optimise nothing
    with pytest.raises(ConfigError, match="hydra.sweeper.direction=maximize: expected minimize"):
        check_direction(ProjectionErrors, "maximize")


PLUGGED = {"hydra/launcher=joblib": ("features.m=4,8",), "hydra/launcher=submitit_local": ("features.m=4,8",),
           "hydra/sweeper=optuna": ("features.m=int(interval(4,8))", "hydra.sweeper.n_trials=2",
                                    "hydra.sweeper.direction=maximize")}


@needs_plugins
@pytest.mark.slow
@pytest.mark.parametrize("option", PLUGGED)
def test_plugins(option, tmp_path):
    out = crt_exp(*WINE, option, *PLUGGED[option], f"hydra.sweep.dir={tmp_path}/s")
    assert out.returncode == 0, out.stderr
    optimised = (tmp_path / "s" / "optimization_results.yaml").exists()
    assert "sweep of 2 runs" in out.stdout or "optuna" in option and optimised
    assert len(list((tmp_path / "s").glob("*/metrics.jsonl"))) == 2


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """sbatch, srun and sacct of one machine without a queue: each task of an array starts at once. The folder keeps
    what was submitted as job.sh."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, lines in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\nfolder={folder}\n{lines}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


SLURM = {
    "sbatch": """cp "${@: -1}" $folder/job.sh
export SLURM_ARRAY_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_JOB_NODELIST=here
for i in 0 1; do
  SLURM_ARRAY_TASK_ID=$i SLURM_JOB_ID=$((8 + i)) SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 \\
    setsid bash $folder/job.sh </dev/null >$folder/out-$i 2>&1 &
done
echo "Submitted batch job 7"
""",
    "srun": """while [[ $1 == -* ]]; do
  [[ $1 == --output || $1 == --error ]] && shift
  shift
done
exec "$@"
""",
    "sacct": """echo "JobID|State|NodeList|"
for i in 0 1; do echo "7_$i|RUNNING|here|"; done
"""}


@needs_plugins
@pytest.mark.slow
def test_slurm_gets_a_job_for_each_run(fake_slurm, tmp_path):
    """Of one GPU, told before its time is over; the sweep waits for all and ends with its table."""
    out = crt_exp(*WINE, "hydra/launcher=slurm", "hydra.launcher.partition=gpu", "features.m=4,8",
                  f"hydra.sweep.dir={tmp_path}/s")
    assert out.returncode == 0 and "sweep of 2 runs" in out.stdout, out.stderr + out.stdout
    job = (fake_slurm / "job.sh").read_text()
    for line in ("--array=0-1", "--gpus-per-node=1", "--nodes=1", "--ntasks-per-node=1", "--partition=gpu",
                 "--signal=USR2@300", "--time=1440", "--job-name=crt_exp"):
        assert f"#SBATCH {line}" in job, job
    assert len(list((tmp_path / "s").glob("*/metrics.jsonl"))) == 2


@needs_plugins
@pytest.mark.slow
def test_submitit_queues_a_stopped_run_again(tmp_path):
    """SIGUSR2, by which SLURM's jobs are told that their time ends:
    the run checkpoints, is queued again, and goes on."""
    command = [sys.executable, "-m", "crt_exp", *TOY, "hydra/launcher=submitit_local", "seed=0", "task.pause=0.2",
               "resume=auto", "trainer.save_every=2", f"hydra.sweep.dir={tmp_path}/s"]
    env = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "s" / "0" / "checkpoints" / "step-2").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    controller, = (path.name for path in (tmp_path / "s" / ".submitit").iterdir() if path.name.isdigit())
    job = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()[0]
    os.kill(int(job), signal.SIGUSR2)
    _, err = process.communicate()
    log = (tmp_path / "s" / ".submitit" / controller / f"{controller}_0_log.out").read_text()
    assert process.returncode == 0, err
    assert "Requeued job" in log and "continuing from" in log and final(tmp_path / "s" / "0")["step"] == 12
