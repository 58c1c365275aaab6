"""Sweeps: their table, a run that fails among others, Hydra's plugins."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.covering import slow
from helpers.torchrun import ENVIRONMENT
from hydra.core.hydra_config import HydraConfig
from pandas import DataFrame

from crt_exp.experiments.measure.attention_errors import ProjectionErrors
from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.runner.configuration import check_plain, plain_config
from crt_exp.experiments.runner.sweep import PLUGINS, check_direction, without_unused
from crt_exp.experiments.runner.sweep_table import draw, finished_runs, settings_of, table
from crt_exp.experiments.tasks.uci import UCI
from crt_exp.registry import ConfigError

HERE = Path(__file__).parents[2]
WINE = ("-m", "task=uci", "task.repeats=1", "task.sigmas=[0.3]", "logger=none")
TOY = (
    "-m",
    "--config-dir",
    str(HERE / "helpers" / "toy_conf"),
    "task=toy",
    "logger=none",
    "trainer.epochs=1",
)
needs_plugins = pytest.mark.skipif(
    find_spec("hydra_plugins") is None, reason="the extra `sweep` is not installed"
)


def final(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_sweep_ends_with_the_table_of_its_own_runs(typed, tmp_path):
    """Also where the directory of an earlier, larger sweep is used again, and where its runs are refused."""
    folder = tmp_path / "s"
    args = ["seed=0,1", "features.m=4", f"hydra.sweep.dir={folder}"]
    code, out, err = typed(*WINE, "features=trig,oprf", *args)
    assert code == 0, err
    values = {}
    for i, feature in enumerate(("trig", "oprf")):
        values[feature] = [final(folder / str(2 * i + seed))["accuracy"] for seed in (0, 1)]
    means = {feature: sum(v) / 2 for feature, v in values.items()}
    lines = out.splitlines()
    first = (
        next(
            i for i, line in enumerate(lines) if line.startswith("sweep of 4 runs, mean over seeds")
        )
        + 2
    )
    columns = {"trig": "8", "oprf": "4"}
    for feature, line in zip(sorted(means, key=means.get, reverse=True), lines[first:]):
        actual = line.split()[:5]
        assert actual == [feature, columns[feature], "2", "accuracy", f"{means[feature]:.4f}"]
        assert line.endswith("2 seeds")
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    actual = [(r["run"], r["features"], r["seed"], float(r["value"])) for r in rows]
    expected = []
    for i, feature in enumerate(values):
        for seed in (0, 1):
            expected.append((str(2 * i + seed), feature, str(seed), values[feature][seed]))
    assert actual == expected
    code, out, _ = typed(*WINE, "features=trig", *args, "resume=auto")
    assert code == 0
    assert "sweep of 2 runs" in out
    actual = len((folder / "sweep.csv").read_text().splitlines())
    assert actual == 3
    code, out, err = typed(*WINE, "features=trig", *args)
    assert code == 1
    assert "sweep of" not in out
    assert "set resume=auto" in err
    path = folder / "0" / "versions.json"
    path.write_text('{"command": "x",\n"overrides": [}\n')
    with pytest.raises(ConfigError, match=f"{path}.*: not valid JSON"):
        finished_runs(folder)


def test_a_failed_run_does_not_stop_the_sweep(typed, tmp_path):
    code, out, err = typed(
        *WINE,
        "features=gerf",
        "features.A=0.1,null",
        "features.m=4,8",
        f"hydra.sweep.dir={tmp_path}/s",
    )
    assert code == 1
    assert "Traceback" not in err
    assert "sweep of 2 runs" in out
    for i in (0, 1):
        assert f"the run in {tmp_path}/s/{i} failed: features=gerf: A=" in err
    assert err.splitlines()[-3] == "crt_exp: 2 runs of the sweep failed:"
    assert err.splitlines()[-2].startswith(f"  features.A=0.1 features.m=4: the run in {tmp_path}")
    actual = sorted(p.name for p in (tmp_path / "s").iterdir() if p.is_dir())
    assert actual == ["2", "3"]


def test_a_launcher_that_fails_is_named_in_one_line(typed, tmp_path, monkeypatch):
    """As on a computer without Slurm."""

    def launch(*arguments, **options):
        raise RuntimeError('a trace\nCould not detect "srun"')

    launcher = PLUGINS["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    monkeypatch.setattr(launcher, "launch", launch)
    code, _, err = typed(*WINE, "seed=0,1", f"hydra.sweep.dir={tmp_path}/s")
    assert code == 2
    assert err == 'crt_exp: error: hydra/launcher=basic: Could not detect "srun"\n'


@pytest.mark.parametrize(
    "args, message",
    [
        (["features=glob(p*)", "features.m=8,1e3"], "features.m=1000.0: expected an integer"),
        (["task=uci,mlmm"], "unknown task 'mlmm'; did you mean mlm?"),
        (["attention=exact", "features.m=4,8"], "attention=exact: does not use features.m=4"),
        (["attention=exact,uniform", "features.m=4,8"], "attention=exact: does not use features.m"),
        (["attention=exact,favorpp", "features.mm=4,8"], "unknown key 'features.mm'"),
        (["attention=exact,favorppp", "features.m=4"], "unknown attention 'favorppp'"),
    ],
    ids=str,
)
def test_a_mistake_in_a_sweep_is_printed_once_and_before_it_begins(args, message, typed, tmp_path):
    code, _, err = typed("-m", "logger=none", *args, f"hydra.sweep.dir={tmp_path}/s")
    assert code == 2
    assert err.startswith(f"crt_exp: error: {message}")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_a_sweep_with_exact_attention_runs_it_once_and_continues(typed, tmp_path):
    folder = tmp_path / "s"
    args = ["attention=exact,favorp", "features.m=4,8", f"hydra.sweep.dir={folder}"]
    code, out, err = typed(*WINE, *args)
    assert code == 0, err
    assert out.splitlines().count("attention=exact does not use features.m: run without") == 1
    assert "sweep of 3 runs" in out
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    actual = [(row["run"], row["attention"], row["features.m"]) for row in rows]
    assert actual == [("0", "exact", ""), ("1", "favorp", "4"), ("2", "favorp", "8")]
    before = (folder / "0" / "metrics.jsonl").read_text()
    code, out, err = typed(*WINE, *args, "resume=auto", "hydra/sweeper=basic")
    assert code == 0, err
    assert "sweep of 3 runs" in out, err
    assert (folder / "0" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "args, count, notes",
    [
        (
            ["attention=identity,favorpp", "features.m=4,8", "seed=0,1"],
            2 + 4,
            ["attention=identity does not use features.m: run without"],
        ),
        slow(
            ["features=pos,oprf", "sampler=iid,orthogonal", "attention=window,uniform,favorpp"],
            1 + 1 + 4,
            [
                "attention=window does not use features: run without",
                "attention=window does not use sampler: run without",
                "attention=uniform does not use features: run without",
                "attention=uniform does not use sampler: run without",
            ],
        ),
        (
            ["attention=exact,favorpp", "features.m=64"],
            2,
            ["attention=exact does not use features.m: run without"],
        ),
        (
            ["attention=window,favorpp", "attention.redraw_every=0,10"],
            1 + 2,
            ["attention=window does not use attention.redraw_every: run without"],
        ),
        slow(
            ["attention=relu,favorpp", "features=pos,oprf", "features.m=4,8"],
            2 + 4,
            ["attention=relu does not use features: run without"],
        ),
        (
            ["features=trig,gerf", "features.A=0.1,null"],
            1 + 2,
            ["features=trig does not use features.A: run without"],
        ),
        (["attention=favorp,favorpp", "features.m=4,8", "seed=0,0"], 8, []),
    ],
    ids=str,
)
def test_runs_of_a_sweep_have_the_options_that_they_use(args, count, notes):
    choices = []
    for arg in args:
        key, _, values = arg.partition("=")
        choices.append([f"{key}={value}" for value in values.split(",")])
    runs, actual = without_unused([*itertools.product(*choices)], compose)
    assert actual == notes
    assert len(runs) == count
    for run in {tuple(run) for run in runs}:
        cfg = compose(list(run))
        HydraConfig.instance().set_config(cfg)
        check_plain(plain_config(cfg))


def done(settings, value, metric="loss", direction="minimize"):
    return {"run": "0", **settings, "metric": metric, "value": value, "direction": direction}


def lines_of(runs):
    return table(runs, settings_of(runs)).splitlines()


def test_one_seed_has_the_interval_of_its_run_and_seeds_that_over_seeds():
    own = {"low": 0.8, "high": 0.95, "over": "5 splits of 9 test rows"}
    runs = [
        done({"features": "trig", "seed": "0"}, 0.9, "accuracy", "maximize") | own,
        *[
            done({"features": "oprf", "seed": str(i)}, value, "accuracy", "maximize") | own
            for i, value in enumerate([0.7, 1.0, 0.9])
        ],
    ]
    first, second = lines_of(DataFrame(runs))[2:]
    assert first.endswith("0.8000 to 0.9500 5 splits of 9 test rows")
    assert second.endswith("to 1.0000                 3 seeds")


def test_the_picture_has_a_line_for_each_method_if_a_number_was_varied(tmp_path):
    runs = [
        done({"features": features, "features.m": m, "M": m}, 0.5)
        for features, m in itertools.product(["trig", "oprf"], ["8", "16"])
    ]
    runs.append(done({"features": "exact", "features.m": "", "M": ""}, 0.4))
    assert draw(settings_of(DataFrame(runs)), tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").is_file()
    named = DataFrame(runs).drop(columns=["features.m", "M"])
    assert not draw(settings_of(named), tmp_path / "none.png")


def test_table_of_losses():
    values = [0.5, None, 0.1, 0.3]
    runs = DataFrame([done({"lr": f"{i}"}, value) for i, value in enumerate(values)])
    lines = lines_of(runs)
    # the smallest first, what is no number last
    actual = [line.split()[0] for line in lines[2:]]
    assert actual == ["2", "3", "0", "1"]
    assert lines[5].endswith("nan")
    many = lines_of(DataFrame([done({"lr": str(i)}, float(i)) for i in range(30)]))
    assert any("... and 10 more" in line for line in many)
    runs = [done({"task": "a"}, 0.5), done({"task": "b"}, 0.5, "accuracy", "maximize")]
    mixed = "\n".join(lines_of(DataFrame(runs)))
    assert "accuracy" in mixed
    assert "loss" in mixed


def test_the_best_of_each_data_set_comes_first():
    values = {
        ("wifi", "trig"): 0.9,
        ("wifi", "oprf"): 0.95,
        ("wine", "trig"): 0.6,
        ("wine", "oprf"): 0.5,
    }
    runs = [
        done(
            {"task.dataset": data, "features": features, "seed": "0"}, value, "accuracy", "maximize"
        )
        for (data, features), value in values.items()
    ]
    lines = lines_of(DataFrame(runs))
    actual = [line.split()[:2] for line in lines[2:]]
    assert actual == [
        ["wifi", "oprf"],
        ["wifi", "trig"],
        ["wine", "trig"],
        ["wine", "oprf"],
    ]


def test_a_sweeper_must_look_for_the_best():
    check_direction(UCI, "maximize")
    check_direction(ProjectionErrors, "minimize")
    check_direction(ProjectionErrors, None)  # sweepers that optimise nothing
    with pytest.raises(ConfigError, match="hydra.sweeper.direction=maximize: expected minimize"):
        check_direction(ProjectionErrors, "maximize")


# ---- plugins ---------------------------------------------------------------------------------------------------------


@needs_plugins
@pytest.mark.slow
def test_optuna_looks_for_the_best(typed, tmp_path):
    code, _, err = typed(
        *WINE,
        "hydra/sweeper=optuna",
        "features.m=int(interval(4,8))",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.direction=maximize",
        f"hydra.sweep.dir={tmp_path}/s",
    )
    assert code == 0, err
    assert (tmp_path / "s" / "optimization_results.yaml").exists()
    actual = len(list((tmp_path / "s").glob("*/metrics.jsonl")))
    assert actual == 2


@needs_plugins
@pytest.mark.slow
def test_submitit_queues_a_stopped_run_again(tmp_path):
    """SLURM sends SIGUSR2 to a job whose time ends:
    the run checkpoints, is queued again, and goes on."""
    command = [
        sys.executable,
        "-m",
        "crt_exp",
        *TOY,
        "hydra/launcher=submitit_local",
        "seed=0",
        "task.pause=0.2",
        "resume=auto",
        "trainer.save_every=2",
        f"hydra.sweep.dir={tmp_path}/s",
    ]
    process = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "s" / "0" / "checkpoints" / "step-2").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    (controller,) = (
        path.name for path in (tmp_path / "s" / ".submitit").iterdir() if path.name.isdigit()
    )
    job = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()[0]
    os.kill(int(job), signal.SIGUSR2)
    _, err = process.communicate()
    log = (tmp_path / "s" / ".submitit" / controller / f"{controller}_0_log.out").read_text()
    assert process.returncode == 0, err
    assert "Requeued job" in log
    assert "continuing from" in log
    assert final(tmp_path / "s" / "0")["step"] == 12
