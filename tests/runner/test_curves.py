"""curves.png and run.log: what a training run leaves to be looked at."""

import errno
import os

from crt_exp import drawing
from crt_exp.runner.curves import draw, points


def record(step, split, **values):
    return {"step": step, "epoch": 0, "split": split, **values}


RECORDS = [record(1, "train", loss=2.0), record(2, "train", loss=None), record(3, "train", loss=1.0),
           record(3, "validation", accuracy=0.5), record(6, "validation", accuracy=0.7),
           record(6, "test", accuracy=0.6, final=True)]


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_is_not_done_without_its_picture(typed, tmp_path, monkeypatch, one_thread):
    run = ["task=lra", "attention=exact", "task.dataset=listops", "trainer.steps=4", "trainer.log_every=1",
           "trainer.batch=4", "task.preset=small", "logger=none", f"hydra.run.dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "save_figure", refuse)
        code, out, err = typed(*run)
    assert code == 2 and f"{tmp_path / 'run'} cannot be written: No space left on device" in err, err
    code, out, err = typed(*run, "resume=auto")
    assert code == 0 and (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG"), err
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_curves_are_those_of_the_records(tmp_path):
    assert points(RECORDS, "train", "loss") == [(1, 2.0), (3, 1.0)]
    draw(RECORDS, "accuracy", tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw(RECORDS[:1], "accuracy", tmp_path / "none")  # nothing to draw a line through
    assert not (tmp_path / "none").exists()
