"""The command line as a user types it: real run directories; real processes where that matters."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from refusals import check_refused

from crt_exp.runner.run import LOCK, commit, read_records

ROOT = Path(__file__).parents[2]
MISSING = "CRT_DATA is not set: the official files are needed"


def crt_exp(*args, cwd=ROOT, **env):
    return subprocess.run([sys.executable, "-m", "crt_exp", *args], capture_output=True, text=True, cwd=cwd,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | env)


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def untimed(lines):
    return [{k: v for k, v in line.items() if k != "time_s"} for line in lines]


def test_uci_run(tmp_path):
    out = crt_exp("task=uci", "features=oprf", "sampler=orthogonal", "features.m=32", "seed=0", "logger=none",
                  f"hydra.run.dir={tmp_path}/a")
    assert out.returncode == 0, out.stderr
    assert "wine: accuracy 0." in out.stdout and out.stderr == ""
    lines = records(tmp_path / "a")
    assert [r["split"] for r in lines] == ["split"] * 5 + ["test"] and lines[-1]["final"] is True
    assert lines[-1]["accuracy"] == pytest.approx(sum(r["accuracy"] for r in lines[:5]) / 5)
    versions = json.loads((tmp_path / "a" / "versions.json").read_text())
    assert versions["seed"] == 0 and versions["packages"]["torch"]
    files = ["config.yaml", "inputs.json", "metrics.jsonl", "versions.json"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == files


def test_same_seed_same_numbers_and_resume(typed, tmp_path):
    args = ["features=geom", "seed=3", "logger=none", "task.repeats=3", "task.sigmas=[0.2,0.5]"]
    assert typed(*args, f"hydra.run.dir={tmp_path}/a")[0] == 0
    whole = records(tmp_path / "a")
    # a run cut off in the middle of its third line continues to the same numbers
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    (tmp_path / "b" / "config.yaml").write_text((tmp_path / "a" / "config.yaml").read_text())
    code, _, err = typed(*args, f"hydra.run.dir={tmp_path}/b")
    assert code == 2 and "resume=auto" in err
    code, _, err = typed(*args, f"hydra.run.dir={tmp_path}/b", "resume=auto", "features.m=64")
    assert code == 2 and "these keys differ: features.m" in err
    for _ in range(2):  # the second time there is nothing left to do
        assert typed(*args, f"hydra.run.dir={tmp_path}/b", "resume=auto")[0] == 0
        assert untimed(records(tmp_path / "b")) == untimed(whole)


def test_exact_kernel_and_presets(typed, tmp_path):
    assert typed("attention=exact", "logger=none", f"hydra.run.dir={tmp_path}/a")[0] == 0
    assert records(tmp_path / "a")[-1]["accuracy"] > 0.9
    _, preset, _ = typed("attention=favorpp", "--cfg", "job")
    assert preset == typed("attention=favor++", "--cfg", "job")[1]
    assert "OPRF" in preset and "samplers.orthogonal" in preset
    assert "GeomRF" in typed("attention=favorpp", "features=geom", "--cfg", "job")[1]


def test_bias_of_approximate_samplers_is_printed(typed, tmp_path):
    code, out, _ = typed("sampler=hadamard", "logger=none", "task.repeats=1", f"hydra.run.dir={tmp_path}/a")
    assert code == 0 and "approximate sampler: estimate / exact kernel" in out
    assert 0.5 < records(tmp_path / "a")[-1]["sampler_bias"] < 1.5
    _, out, _ = typed("sampler=simplex", "logger=none", "task.repeats=1", f"hydra.run.dir={tmp_path}/b")
    assert "approximate sampler" not in out


def test_help_teaches(typed):
    code, out, _ = typed("--help")
    assert code == 0
    for part in ("usage:", "features: ", "oprf", "Examples:", "resume=auto", "crt_exp.data"):
        assert part in out


def test_help_lists_what_the_command_line_takes(typed):
    groups = typed("--help")[1].partition("Groups")[2].partition("Keys")[0]
    assert "features: angular" in groups and "report" not in groups and "base" not in groups
    assert max(map(len, groups.splitlines())) <= 120


def test_help_is_of_what_stands_beside_it(typed):
    out = typed("task=mlm", "task.block=64", "attention=favorp", "--help")[1]
    assert "\ntask.block=64                           tokens of a block, [CLS] and [SEP] among them\n" in out
    assert "\ntask.hub.*                              a set of the Hugging Face hub" in out
    assert "\nattention.learn=none " in out and "_target_" not in out
    assert "unknown key 'task.blok'; did you mean task.block?" in typed("task=mlm", "task.blok=64", "--help")[2]


def test_help_and_import_stay_light():
    """Neither imports torch: that alone takes seconds."""
    code = "import sys; sys.argv = ['crt_exp', '--help']; import crt_exp, crt_exp.train as t\ntry: t.main()\n" \
           "except SystemExit: pass\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "False"


BAD = [
    ("task=ucii", "unknown task 'ucii'; did you mean uci?"),
    ("features=opfr", "unknown features 'opfr'; did you mean oprf?"),
    ("sampler=ortho", "unknown sampler 'ortho'; did you mean orthogonal?"),
    ("attention=performers", "unknown attention 'performers'; did you mean performer?"),
    ("attention=favorp+", "unknown attention 'favorp+'; did you mean favorp"),
    ("features.mm=3", "unknown key 'features.mm'; did you mean features.m?"),
    ("task.datset=wine", "did you mean task.dataset?"),
    ("sed=1", "did you mean seed?"),
    ("foo", "foo: expected key=value"),
    ("features.m=0", "features.m=0: expected an integer >= 1"),
    ("features.m=many", "features.m=many: expected an integer >= 1"),
    ("features.m=1,2", "add --multirun"),
    ("features.A=0.125", "features.A=0.125: expected a number < 0.125"),
    ("features=geom features.p=1", "features.p=1: expected a number > 0 and < 1"),
    ("features=pois features.rate=-1", "features.rate=-1: expected a number > 0"),
    ("task.sigmas=[0.0,1.0]", "task.sigmas=[0.0,1.0]: expected a list"),
    ("task.sigmas=[1e300]", "each a number > 0 and < 1e+150"),
    ("task.split=[0.00001,0.99998,0.00001]", "a part of the 178 rows is empty"),
    ("task.sigmas=[]", "task.sigmas=[]: expected a list of length >= 1"),
    ("task.split=[0.9,0.2,0.1]", "with sum 1"),
    ("task.repeats=0", "task.repeats=0: expected an integer >= 1"),
    ("task.scaling=log", "task.scaling=log: expected standard, minmax or none"),
    ("task.coding=binary", "expected ordinal or onehot"),
    ("task.dataset=wein", "did you mean wine?"),
    ("task.dataset=abalone", "archive.ics.uci.edu"),
    ("task.dataset=car task.data_dir=/nonexistent", "/nonexistent/car.data is not there"),
    ("attention=exact features.m=64", "does not use features.m=64"),
    ("attention=exact sampler=iid", "does not use sampler=iid"),
    ("attention=linformer features.m=64 task=mlm", "does not use features.m=64"),
    ("attention=elu features.m=64 task=mlm", "does not use features.m=64"),
    ("attention=relu features=trig task=mlm", "does not use features=trig"),
    ("attention=relu", "has no feature map"),
    ("attention=linformer", "has no feature map"),
    ("hydra.run.dir=/proc/nowhere", "hydra.run.dir=/proc/nowhere: No such file"),
    ("+task.extra=1", "unknown key 'task.extra'"),
    ("features=pois sampler=orthogonal sampler.lengths=sqrt_d",
     "sampler: PoisRF needs exactly Gaussian projections; use iid, orthogonal with lengths=chi"),
    ("sampler.lengths=two", "expected chi or sqrt_d"),
    *[(f"task.csv={name}", """special characters twice, 'task.csv="..."'""") for name in ("a#b", "a=b", "ü", "~x")],
    ("~name", "Could not delete from config. 'name' does not exist."),
    ("features=null", "Config group override must be a string"),
    ("-m attention=exact,favorpp features.m=4,8", "attention=exact: does not use features.m=4"),
    ("--nonsense", "unrecognized arguments: --nonsense"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[a for a, _ in BAD])
def test_bad_input(args, message, typed, tmp_path, monkeypatch):
    """One clear message of a few lines, a non-zero exit, no traceback, nothing half-written."""
    monkeypatch.delenv("CRT_DATA", raising=False)
    code, _, err = typed(*args.split(), "logger=none")
    assert code == 2 and message in err
    assert "Traceback" not in err and len(err.splitlines()) <= 5
    assert not list(tmp_path.rglob("*.*")) and not list(tmp_path.rglob("uci/*"))


def test_no_reading_of_a_broken_run(typed, tmp_path):
    """The file is named, with the line; nothing in it is changed."""
    args = ["features=geom", "logger=none", "task.repeats=1", "task.sigmas=[0.2]", f"hydra.run.dir={tmp_path}/a"]
    assert typed(*args)[0] == 0
    whole = {name: (tmp_path / "a" / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    broken = [("config.yaml", b"seed: 0\ntask: [1,\n", "config.yaml: not valid YAML"),
              ("config.yaml", b"- 1\n", "config.yaml: expected keys with values"),
              ("config.yaml", b"seed: \xff\n", "config.yaml"),
              ("config.yaml", b"seed: ${nowhere}\n", "seed (it was ${nowhere}, now 0)"),
              ("metrics.jsonl", whole["metrics.jsonl"] + b"{\"step\": 1,}\n", "metrics.jsonl, from line 3 on: not"),
              ("metrics.jsonl", b"[]\n", "metrics.jsonl, line 1: expected a JSON object"),
              ("metrics.jsonl", b"{}\n\xff\n{", "metrics.jsonl, from line 2 on: not valid JSON")]
    for name, content, message in broken:
        (tmp_path / "a" / name).write_bytes(content)
        code, _, err = typed(*args, "resume=auto")
        assert code == 2 and f"{message}" in err and len(err.splitlines()) == 1, err
        assert (tmp_path / "a" / name).read_bytes() == content
        (tmp_path / "a" / name).write_bytes(whole[name])


def test_nothing_saved_is_ever_built(typed, tmp_path):
    """A run directory may come from anybody: what its config.yaml names is compared, never called."""
    args = ["logger=none", "task.repeats=1", "task.sigmas=[0.2]", f"hydra.run.dir={tmp_path}/a"]
    assert typed(*args)[0] == 0
    config = tmp_path / "a" / "config.yaml"
    for trap in (f"os.mkdir\n  path: {tmp_path}/sprung", f"pathlib.Path.touch\n  self: {tmp_path}/sprung"):
        config.write_text(f"task:\n  _target_: {trap}\n")
        code, _, err = typed(*args, "resume=auto")
        assert code == 2 and "these keys differ" in err and not (tmp_path / "sprung").exists()


def test_bad_input_in_a_process(tmp_path):
    out = crt_exp("features.mm=3", cwd=tmp_path)
    assert out.returncode == 2 and "Traceback" not in out.stderr
    assert out.stderr.startswith("crt_exp: error: unknown key 'features.mm'")


def test_malformed_file_writes_nothing(typed, tmp_path):
    (tmp_path / "car.data").write_text("vhigh,vhigh,2,2,small,low,unacc\nvhigh,vhigh,2,2,small,unacc\n")
    code, _, err = typed("task.dataset=car", f"task.data_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run",
                         "logger=none")
    assert code == 2 and "car.data" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options, words", [
    (["task=uci", "trainer.lr=1"], ["task=uci", "does not use trainer.lr=1"]),
    (["task=uci", "trainer.batch=4", "trainer.steps=3"], ["does not use trainer.batch=4 trainer.steps=3"]),
    (["task=speed", "trainer.adapt=lora"], ["task=speed", "trainer.adapt=lora"]),
    (["task=sweep", "attention=exact", "trainer.lr=1"], ["task=sweep", "does not use trainer.lr=1"]),
    (["task=imagenet", "attention=exact", "trainer.steps=1", "trainer.lora.rank=4"],
     ["does not use trainer.lora.rank=4", "set trainer.adapt=lora"])])
def test_choices_of_a_trainer_that_are_not_used_are_refused(options, words, typed, tmp_path):
    check_refused(typed(*options, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"), words, tmp_path / "run")


def test_sweep_inside_torchrun_is_refused(typed, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    code, _, err = typed("-m", "seed=0,1")
    assert code == 2 and "not supported inside torchrun" in err


def test_version_is_the_products_and_quick():
    out = crt_exp("--version")
    assert out.returncode == 0 and out.stderr == ""
    assert out.stdout == f"crt_exp {version('crt_exp')}, torch {version('torch')}\n"
    loaded = subprocess.run([sys.executable, "-X", "importtime", "-m", "crt_exp", "--version"], capture_output=True,
                            text=True, cwd=ROOT)
    assert not {line.split("|")[-1].strip() for line in loaded.stderr.splitlines()} & {"torch", "hydra", "omegaconf"}


# ---- one run at a time in a directory --------------------------------------------------------------------------------


def test_a_second_run_in_a_directory_is_refused(typed, tmp_path):
    """Until the process that holds the lock ends, here by kill -9, whose file is no obstacle."""
    hold = ("import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire()\n"
            "print('held', flush=True); input()")
    (tmp_path / "run").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", hold, tmp_path / "run" / LOCK], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    args = ["logger=none", "task.repeats=1", "task.sigmas=[0.3]", "resume=auto", f"hydra.run.dir={tmp_path}/run"]
    code, _, err = typed(*args)
    assert code == 2 and f"{tmp_path}/run: in use by another run" in err and len(err.splitlines()) == 1
    holder.kill()
    holder.communicate()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    assert typed(*args)[0] == 0 and not (tmp_path / "run" / LOCK).exists()
    assert typed(*args)[0] == 0  # the lock was let go of within a process, too


def test_a_run_that_fails_lets_go_of_its_directory(typed, tmp_path):
    args = ["logger=none", "task.repeats=1", "task.sigmas=[0.3]", f"hydra.run.dir={tmp_path}/run"]
    assert typed(*args)[0] == 0
    assert typed(*args)[0] == 2 and typed(*args, "resume=auto", "seed=1")[0] == 2  # not empty; another configuration
    assert typed(*args, "resume=auto")[0] == 0


@pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason=MISSING)
@pytest.mark.parametrize("name", ["abalone", "banknote", "car", "yeast", "cmc", "nursery", "wifi", "wine", "boston"])
def test_official_sets(name, typed, tmp_path):
    """Every official file classifies (boston: regresses)."""
    code, _, err = typed(f"task.dataset={name}", f"task.data_dir={os.environ['CRT_DATA']}/uci", "logger=none",
                         "task.repeats=1", "task.sigmas=[0.1,0.3]", f"hydra.run.dir={tmp_path}/a")
    assert code == 0, err
    last = records(tmp_path / "a")[-1]
    assert last["final"] and (last.get("accuracy", 0) > 0.1 or last.get("r2", 0) > 0.1)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_run_notes_the_commit():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert commit().removesuffix("+changes") == head


def test_records_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"note": "a\u2028b\x85c"}\n{"step": 1}\n{"st', encoding="utf-8")
    assert read_records(path) == [{"note": "a\u2028b\x85c"}, {"step": 1}]
