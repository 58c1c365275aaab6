"""Weights & Biases, the real one, offline: when it goes online, and what it is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import MetricRecord, RunRecord

import crt_exp

LOGIN = "machine {}\n  login user\n  password " + 40 * "a" + "\n"
SETTINGS = ".config/wandb/settings"
WAYS = [  # files of the home, variables, the mode; None: as wandb's own settings say
    ({}, {}, "offline"),
    ({}, {"WANDB_API_KEY": 40 * "a"}, "online"),
    ({".netrc": LOGIN.format("api.wandb.ai")}, {}, "online"),
    ({".netrc": LOGIN.format("example.org")}, {}, "offline"),
    ({".netrc": LOGIN.format("wandb.example.org")}, {"WANDB_BASE_URL": "https://wandb.example.org"}, "online"),
    ({".netrc": LOGIN.format("api.wandb.ai")}, {"WANDB_MODE": "offline"}, None),
    ({SETTINGS: "[default]\nmode = offline\n", ".netrc": LOGIN.format("api.wandb.ai")}, {}, None),
    ({SETTINGS: "[default]\napi_key = " + 40 * "a" + "\n"}, {}, "online"),
]
ASK = """
import json, os, sys, wandb
from crt_exp.runner.mirror import default_mode
for variables in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(variables)
        print(default_mode(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_online_where_wandb_has_a_key(tmp_path):
    """Of a variable, of its settings, or in a .netrc, where `wandb login` leaves it; its own mode comes first."""
    for home, (files, *_) in enumerate(WAYS):
        for name, text in files.items():
            path = tmp_path / str(home) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o600)
    asked = [{"HOME": str(tmp_path / str(home)), **variables} for home, (_, variables, _) in enumerate(WAYS)]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "NETRC"))}
    out = subprocess.run([sys.executable, "-c", ASK, json.dumps(asked)], cwd=tmp_path, capture_output=True, text=True,
                         env=env | {"PYTHONPATH": str(Path(crt_exp.__file__).parents[1])})
    assert out.stdout.split() == [str(mode) for *_, mode in WAYS], out.stderr


def told(directory):
    """What the runs in a folder noted for the server."""
    return b"".join(path.read_bytes() for path in directory.glob("**/wandb/offline-run-*/*.wandb"))


def test_wandb_gets_names_and_the_axis(typed, tmp_path):
    code, _, err = typed("logger=wandb", "logger.entity=some-team", "logger.group=some-group", "logger.name=some-name",
                         "logger.job_type=some-job", "logger.tags=[tag-one,tag-two]", "task.repeats=2",
                         "task.sigmas=[0.3]", f"hydra.run.dir={tmp_path}/a")
    assert code == 0 and "`wandb sync " in err, err
    assert (tmp_path / "a" / "wandb_id").read_text().strip()
    noted = told(tmp_path)
    for name in (b"some-team", b"some-group", b"some-name", b"some-job", b"tag-one", b"tag-two", b"test/accuracy"):
        assert name in noted
    assert MetricRecord(glob_name="*", step_metric="step").SerializeToString() in noted


def test_a_sweep_is_a_group(typed, tmp_path):
    args = ["-m", "logger=wandb", "task.repeats=1", "task.sigmas=[0.3]", "seed=0,1", "logger.mode=offline"]
    assert typed(*args, f"hydra.sweep.dir={tmp_path}/s/some-sweep")[0] == 0
    runs = [told(tmp_path / "s" / "some-sweep" / run) for run in "01"]
    assert all(RunRecord(run_group="some-sweep").SerializeToString() in run for run in runs)


def test_a_name_that_wandb_refuses(typed, tmp_path):
    code, _, err = typed("logger=wandb", "logger.project=a/b", "task.repeats=1", f"hydra.run.dir={tmp_path}/a")
    assert code == 2 and "logger=wandb: Invalid project name 'a/b'" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "a").exists()


def test_an_empty_mode_is_none_and_a_run_without_records_is_not_sent(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = typed("task=pointwise", "attention=exact", "logger=wandb")
    assert code == 2 and err.startswith("crt_exp: error: attention=exact has no error") and "wandb" not in err
