"""curves.png and run.log: what a training run leaves to be looked at."""

from crt_exp.runner.curves import draw, points


def record(step, split, **values):
    return {"step": step, "epoch": 0, "split": split, **values}


RECORDS = [record(1, "train", loss=2.0), record(2, "train", loss=None), record(3, "train", loss=1.0),
           record(3, "validation", accuracy=0.5), record(6, "validation", accuracy=0.7),
           record(6, "test", accuracy=0.6, final=True)]


def test_curves_are_those_of_the_records(tmp_path):
    assert points(RECORDS, "train", "loss") == [(1, 2.0), (3, 1.0)]
    draw(RECORDS, "accuracy", tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw(RECORDS[:1], "accuracy", tmp_path / "none")  # nothing to draw a line through
    assert not (tmp_path / "none").exists()
