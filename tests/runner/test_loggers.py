"""Weights & Biases, the real one, offline."""

import time

from wandb.proto.wandb_internal_pb2 import MetricRecord, RunRecord


def told(directory):
    """What the runs in a folder noted for the server."""
    for _ in range(300):  # another process writes the file, up to the record of the run's end
        noted = b"".join(path.read_bytes() for path in directory.glob("**/wandb/offline-run-*/*.wandb"))
        if b"test/accuracy" in noted:
            break
        time.sleep(0.1)
    return noted


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
