"""curves.png: what a training run leaves to be looked at."""

import errno
import os

from crt_exp.runner import fit
from crt_exp.runner.trainer import Trainer
from crt_exp.runner.loggers import draw_curves


fit_whole = Trainer.fit


def record(step, split, **values):
    return {"step": step, "epoch": 0, "split": split, **values}


RECORDS = [record(1, "train", loss=2.0), record(2, "train", loss=None), record(3, "train", loss=1.0),
           record(3, "validation", accuracy=0.5), record(6, "validation", accuracy=0.7),
           record(6, "test", accuracy=0.6, final=True)]


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_is_not_done_without_its_picture(typed, tmp_path, monkeypatch, one_thread):
    run = ["task=recall", "attention=exact", "trainer.steps=2", "task.evaluated=8", "logger=none",
           f"hydra.run.dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", lambda self: (fit_whole(self), patch.setattr(fit, "draw_curves", refuse)))
        code, out, err = typed(*run)
    assert code == 2 and "No space left on device" in err, err
    code, out, err = typed(*run, "resume=auto")
    assert code == 0 and (tmp_path / "run" / "curves.png").is_file(), err


def test_curves_are_those_of_the_records(tmp_path):
    draw_curves(RECORDS, "accuracy", tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw_curves(RECORDS[-1:], "accuracy", tmp_path / "none")  # nothing to draw a line through
    assert not (tmp_path / "none").exists()
