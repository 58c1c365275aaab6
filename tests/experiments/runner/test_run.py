"""The command line as a user types it, and the files of a run directory."""

import errno
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from helpers.failing import failing
from helpers.refusals import check_error
from helpers.toy import records
from wandb.proto.wandb_internal_pb2 import MetricRecord, RunRecord

import crt_exp.experiments.drawing
from crt_exp.experiments import infer
from crt_exp.experiments.data.files import cached
from crt_exp.experiments.data.sources import data_root
from crt_exp.experiments.runner.loggers import draw_curves
from crt_exp.experiments.runner.run import LOCK, commit, read_records

SHORT = ["logger=none", "task.repeats=1", "task.sigmas=[0.3]"]


def test_a_run_whose_classes_have_moved_is_continued(typed, tmp_path):
    args = ["task=uci", *SHORT, f"hydra.run.dir={tmp_path}/run"]
    assert typed(*args)[0] == 0
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    assert "crt_exp.experiments.tasks.uci.UCI" in text
    config.write_text(text.replace("crt_exp.experiments.", "crt_exp."))
    before = records(tmp_path / "run")
    code, _, err = typed(*args, "resume=auto")
    assert code == 0, err
    assert records(tmp_path / "run") == before, err


def test_same_seed_same_numbers_and_resume(typed, tmp_path):
    args = [
        "task=uci",
        "features=geom",
        "seed=3",
        "logger=none",
        "task.repeats=3",
        "task.sigmas=[0.2,0.5]",
    ]
    code, out, err = typed(*args, f"hydra.run.dir={tmp_path}/a")
    assert code == 0
    assert "wine: accuracy 0." in out
    assert "approximate sampler" not in out
    assert err == ""
    whole = records(tmp_path / "a")
    actual = [r["split"] for r in whole]
    expected = ["split"] * 3 + ["test"]
    assert actual == expected
    assert whole[-1]["final"] is True
    actual = whole[-1]["accuracy"]
    expected = sum(r["accuracy"] for r in whole[:3]) / 3
    assert actual == pytest.approx(expected)
    versions = json.loads((tmp_path / "a" / "versions.json").read_text())
    assert versions["seed"] == 3
    assert versions["packages"]["torch"]
    assert "seed=3" in versions["overrides"]
    assert re.fullmatch(
        r"[0-9a-f]{40}(\+changes)?", versions["commit"] or 40 * "0"
    )  # None outside a checkout
    # a run cut off in the middle of its third line continues to the same numbers
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    (tmp_path / "b" / "config.yaml").write_text((tmp_path / "a" / "config.yaml").read_text())
    for _ in range(2):  # the second time there is nothing left to do
        assert typed(*args, f"hydra.run.dir={tmp_path}/b", "resume=auto")[0] == 0
        assert records(tmp_path / "b") == whole


def test_bias_of_approximate_samplers_is_printed(typed, tmp_path):
    code, out, _ = typed("sampler=hadamard", *SHORT, f"hydra.run.dir={tmp_path}/a")
    assert code == 0
    assert "approximate sampler: estimate / exact kernel" in out
    assert 0.5 < records(tmp_path / "a")[-1]["sampler_bias"] < 1.5


def test_names_of_the_papers_stand_for_their_files(typed):
    preset = typed("attention=favor++", "features=geom", "--cfg", "job")[1]
    assert "GeomRF" in preset
    assert "samplers.orthogonal" in preset
    assert preset == typed("attention=favorpp", "features=geom", "--cfg", "job")[1]


def test_help_is_of_what_stands_beside_it(typed):
    out = typed("task=mlm", "task.block=64", "attention=favorp", "--help")[1]
    groups = out.partition("Groups")[2].partition("Keys")[0]
    assert "features: angular" in groups
    assert "report" not in groups
    assert "base" not in groups
    assert (
        "\ntask.block=64                           tokens of a block, [CLS] and [SEP] among them\n"
        in out
    )
    assert "\ntask.hub.*                              a set of the Hugging Face hub" in out
    assert "\nattention.learn=none " in out
    assert "_target_" not in out
    assert max(map(len, out.splitlines())) <= 120


BAD = [
    ("task=ucii", "unknown task 'ucii'; did you mean uci?"),
    ("features.mm=3", "unknown key 'features.mm'; did you mean features.m?"),
    ("sed=1", "did you mean seed?"),
    ("features.m=0", "features.m=0: expected an integer >= 1"),
    ("features.m=1,2", "add --multirun"),
    ("features.A=0.125", "features.A=0.125: expected a number < 0.125"),
    ("task.split=[0.00001,0.99998,0.00001]", "a part of the 178 rows is empty"),
    ("attention=exact features.m=64", "does not use features.m=64"),
    ("attention=relu", "has no feature map"),
    (
        "task=uci trainer.batch=4 trainer.steps=3",
        "task=uci: does not use trainer.batch=4 trainer.steps=3",
    ),
    ("task=mlm task.text=absent.txt", "absent.txt: no such file; expected a UTF-8 text file"),
    ("task=glue task.csv=absent.csv", "task.csv=absent.csv: no such file"),
    ("task=mlm trainer.precision=float16", "expected no, bf16 or fp16; did you mean fp16?"),
    ("hydra.run.dir=/proc/nowhere", "hydra.run.dir=/proc/nowhere: No such file"),
    (
        "features=pois sampler=orthogonal sampler.lengths=sqrt_d",
        "sampler: PoisRF needs exactly Gaussian projections; use iid, orthogonal with lengths=chi",
    ),
    ("task.csv=a#b", """special characters twice, 'task.csv="..."'"""),
    ("~name", "Could not delete from config. 'name' does not exist."),
    ("features=null", "Config group override must be a string"),
    ("--nonsense", "unrecognized arguments: --nonsense"),
    ("task=projections task.length=1000000000000 task.samples=1", "out of memory: "),
]


@pytest.mark.parametrize("args, message", BAD, ids=[a for a, _ in BAD])
def test_mistakes_are_refused_and_leave_nothing(args, message, typed, tmp_path, monkeypatch):
    """One clear message of a few lines, a non-zero exit, no traceback, nothing half-written."""
    monkeypatch.delenv("CRT_DATA", raising=False)
    check_error(typed(*args.split(), "logger=none"), message, lines=5)
    assert not list(tmp_path.rglob("*.*"))
    assert not list(tmp_path.rglob("uci/*"))


def test_a_sweep_inside_torchrun_is_refused(typed, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_error(typed("-m", "seed=0,1"), "not supported inside torchrun")


# ---- the run directory -----------------------------------------------------------------------------------------------


def test_broken_files_are_named_and_stay_and_nothing_in_them_is_built(typed, tmp_path):
    """A run directory may come from anybody: what its config.yaml names is compared, never called."""
    args = ["features=geom", *SHORT, f"hydra.run.dir={tmp_path}/a"]
    assert typed(*args)[0] == 0
    whole = {}
    for name in ("config.yaml", "metrics.jsonl"):
        whole[name] = (tmp_path / "a" / name).read_bytes()
    trap = f"task:\n  _target_: os.mkdir\n  path: {tmp_path}/sprung\n".encode()
    broken = [
        ("config.yaml", b"seed: 0\ntask: [1,\n", "config.yaml: not valid YAML"),
        ("config.yaml", b"seed: ${nowhere}\n", "seed (it was ${nowhere}, now 0)"),
        ("config.yaml", trap, "these keys differ"),
        (
            "metrics.jsonl",
            whole["metrics.jsonl"] + b'{"step": 1,}\n',
            "metrics.jsonl, from line 3 on: not",
        ),
        ("metrics.jsonl", b"[]\n", "metrics.jsonl, line 1: expected a JSON object"),
    ]
    for name, content, message in broken:
        (tmp_path / "a" / name).write_bytes(content)
        check_error(typed(*args, "resume=auto"), f"{message}")
        assert (tmp_path / "a" / name).read_bytes() == content
        assert not (tmp_path / "sprung").exists()
        (tmp_path / "a" / name).write_bytes(whole[name])


def test_records_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"note": "a\u2028b\x85c"}\n{"step": 1}\n{"st', encoding="utf-8")
    assert read_records(path) == [{"note": "a\u2028b\x85c"}, {"step": 1}]


def test_records_that_cannot_be_read_are_not_absent(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert read_records(tmp_path / "absent" / "metrics.jsonl") == []
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
        patch.setattr(Path, "read_bytes", failing(errno.ESTALE))
        read_records(tmp_path / "metrics.jsonl")


def test_a_second_run_in_a_directory_is_refused(typed, tmp_path):
    """While another holds its lock; the file of a process that was killed is no obstacle."""
    run = tmp_path / "run"
    run.mkdir()
    args = [*SHORT, f"hydra.run.dir={run}"]
    with FileLock(run / LOCK):
        check_error(typed(*args), f"{run}: in use by another run")
    (run / LOCK).touch()
    assert typed(*args)[0] == 0
    assert not (run / LOCK).exists()
    assert typed(*args)[0] == 2  # not empty; a run that fails lets go of it, too
    assert typed(*args, "resume=auto")[0] == 0


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_without_locks_is_named_and_used(code, typed, tmp_path, monkeypatch):
    """Other errors of a lock end the run."""
    args = [*SHORT, f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(FileLock, "acquire", failing(errno.EIO))
    assert typed(*args)[0] == 2
    monkeypatch.setattr(FileLock, "acquire", failing(code))
    actual, _, err = typed(*args)
    assert actual == 0, err
    assert f"hydra.run.dir={tmp_path}/run: not locked" in err
    assert len(err.splitlines()) == 1, err


# ---- the commit in versions.json ------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one commit, in place of that of the package."""
    if shutil.which("git") is None:
        pytest.skip("git is missing")
    root = tmp_path / "checkout"
    (root / "crt_exp").mkdir(parents=True)
    (root / "crt_exp" / "__init__.py").touch()
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    cases = [
        ["init", "-q"],
        ["add", "."],
        [*own, "commit", "-qm", "a"],
    ]
    for words in cases:
        subprocess.run(["git", "-C", root, *words], check=True)
    monkeypatch.setattr("crt_exp.__file__", str(root / "crt_exp" / "__init__.py"))
    return root


def fake_git(folder, script):
    folder.mkdir()
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    return str(folder)


BROKEN = {
    "missing": None,
    "dubious ownership": "#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n",
    "half an answer": "#!/bin/sh\necho 48f8ed\nexit 1\n",
    "nothing": "#!/bin/sh\nexit 0\n",
    "not a program": "\x00\x01",
}


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
def test_without_a_working_git_there_is_no_commit(script, checkout, tmp_path, monkeypatch):
    path = str(tmp_path / "none") if script is None else fake_git(tmp_path / "bin", script)
    monkeypatch.setenv("PATH", path)
    assert commit() is None


def test_the_commit_is_that_of_the_package(checkout, tmp_path, monkeypatch):
    found = commit()
    assert re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "other").mkdir()
    subprocess.run(["git", "init", "-q", tmp_path / "other"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert commit() == found
    (checkout / "crt_exp" / "__init__.py").write_text("1")
    assert commit() == f"{found}+changes"
    monkeypatch.delenv("GIT_DIR")
    shutil.rmtree(checkout / ".git")
    assert commit() is None
    subprocess.run(["git", "init", "-q", checkout], check=True)  # a checkout without a commit
    assert commit() is None


# ---- ~ in paths: no folder of that name -------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, and another folder as the current directory."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not [*tmp_path.rglob("~*")]


@pytest.mark.parametrize("place", ["~/x", "~", "~nosuch/x"])
@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_tilde_in_a_folder_of_hydra_is_refused(key, place, typed, home):
    sweep = ["-m", "seed=0,1"] if "sweep" in key else []
    check_error(
        typed(*sweep, *SHORT, f'{key}="{place}"'),
        f"{key}={place}: ~ is not expanded here; write $HOME",
    )
    check_error(typed(*sweep, *SHORT, f"{key}={place}"), "write $HOME for ~")


def test_a_tilde_in_the_folder_of_own_names_is_refused(typed, home):
    (home / "conf").mkdir()
    check_error(
        typed("--config-dir=~/conf", *SHORT),
        "--config-dir=~/conf: ~ is not expanded here; write $HOME",
    )


def test_a_tilde_in_a_path_of_a_task_is_the_home_folder(typed, home):
    (home / "t.csv").write_text("x,y\n" + "1,a\n2,b\n" * 20)
    args = [*SHORT, "task.target=y", "hydra.run.dir=run"]
    assert typed(*args, 'task.csv="~/t.csv"')[0] == 0
    check_error(
        typed(*args, 'task.csv="~nosuch/t.csv"', "resume=auto"), "~NAME of a path names no user"
    )


def test_a_tilde_in_a_folder_that_is_written(home, capsys):
    assert data_root("~/x") == home / "x"
    cached("~/cache", lambda: {"a": np.ones(1)}, "key")
    assert [*home.glob("cache/*/a.npy")]
    assert infer.main(["run=~nosuch/x", "input=a"]) == 2
    assert "names no user" in capsys.readouterr().err


# ---- curves.png, and Weights & Biases, the real one, offline ---------------------------------------------------------


def test_curves_are_those_of_the_records(tmp_path, monkeypatch):
    def record(step, split, **values):
        return {"step": step, "epoch": 0, "split": split, **values}

    lines = [
        record(1, "train", loss=2.0),
        record(2, "train", loss=None),
        record(3, "train", loss=1.0),
        record(3, "validation", accuracy=0.5),
        record(6, "validation", accuracy=0.7),
        record(6, "test", accuracy=0.6, final=True),
    ]
    figures = []
    save = crt_exp.experiments.drawing.save_figure
    monkeypatch.setattr(
        crt_exp.experiments.drawing,
        "save_figure",
        lambda figure, path: (figures.append(figure), save(figure, path)),
    )
    draw_curves(lines, "accuracy", tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    actual = []
    for axes in figures[0].axes:
        actual.append(axes.lines[0].get_xydata().tolist())
    assert actual == [
        [[1, 2], [3, 1]],
        [[3, 0.5], [6, 0.7]],
    ]
    draw_curves(lines, "loss", tmp_path)  # the metric of task=mae
    draw_curves(lines[-1:], "accuracy", tmp_path / "none")  # nothing to draw a line through
    assert not (tmp_path / "none").exists()


def noted_by_wandb(directory):
    """What the runs in a folder noted for the server."""
    for _ in range(300):  # another process writes the file, up to the record of the run's end
        noted = b"".join(
            path.read_bytes() for path in directory.glob("**/wandb/offline-run-*/*.wandb")
        )
        if b"test/accuracy" in noted:
            break
        time.sleep(0.1)
    return noted


def test_wandb_gets_names_the_axis_and_the_group_of_a_sweep(typed, tmp_path):
    args = [
        "-m",
        "logger=wandb",
        "logger.entity=some-team",
        "logger.name=some-name",
        "logger.job_type=some-job",
        "logger.tags=[tag-one,tag-two]",
        "task.repeats=1",
        "task.sigmas=[0.3]",
        f"hydra.sweep.dir={tmp_path}/some-sweep",
    ]
    code, _, err = typed(*args)
    assert code == 0, err
    assert "`wandb sync " in err, err
    noted = noted_by_wandb(tmp_path)
    for name in (b"some-team", b"some-name", b"some-job", b"tag-one", b"tag-two", b"test/accuracy"):
        assert name in noted
    assert MetricRecord(glob_name="*", step_metric="step").SerializeToString() in noted
    assert RunRecord(run_group="some-sweep").SerializeToString() in noted
    run = tmp_path / "some-sweep" / "0"
    own = (run / "wandb_id").read_text()
    assert typed(*args, "resume=auto")[0] == 0
    assert (run / "wandb_id").read_text() == own  # a run keeps its id
    actual = {path.name.rpartition("-")[2] for path in run.glob("wandb/offline-run-*")}
    expected = {own.strip()}
    assert actual == expected


def test_a_name_that_wandb_refuses_is_an_error(typed, tmp_path):
    check_error(
        typed(
            "logger=wandb", "logger.project=a/b", "task.repeats=1", f"hydra.run.dir={tmp_path}/a"
        ),
        "logger=wandb: Invalid project name 'a/b'",
    )
    assert not (tmp_path / "a").exists()
