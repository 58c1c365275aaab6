"""Saved runs with another attention and without training: losses."""

import pytest

from crt_exp.runner.run import read_records

MODEL = ["task.dataset=digits", "task.size=8", "task.workers=0", "task.sizes.patch=2", "task.sizes.width=32",
         "task.sizes.depth=2", "task.sizes.heads=2"]


# ---- a kept run with other attention


@pytest.fixture
def measured(typed, tmp_path, one_thread):
    """measured(task, options...): records of a measuring task that starts from a run of task=imagenet on digits."""
    def run(name, *options):
        code, _, errors = typed(*options, "logger=none", f"hydra.run.dir={name}")
        assert code == 0, errors
        return read_records(tmp_path / name / "metrics.jsonl")
    run("start", "task=imagenet", *MODEL, "attention=exact", "trainer.steps=3")
    return run


def test_a_kept_run_with_other_attention(measured):
    """Its losses are those of a run of no steps that starts from it, with the same projections."""
    ours = ["attention=favorpp", "features.m=8"]
    swap, = measured("loss", "task=swap_loss", "task.start=start", "task.splits=[val]", *ours, "task.offset=2",
                     "seed=1")
    *_, run = measured("run", "task=imagenet", *MODEL[:3], "task.init=start", *ours, "seed=3", "trainer.steps=0")
    assert swap["accuracy"] == pytest.approx(run["accuracy"])
    exact, = measured("exact", "task=swap_loss", "task.start=start", "task.splits=[val]", "attention=exact")
    assert exact["loss"] != pytest.approx(swap["loss"]) and exact["split"] == "val" and exact["final"]
