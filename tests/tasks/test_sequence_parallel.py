"""trainer.sequence_parallel: rows whose tokens are split over processes train to the numbers of one process."""

import json

import numpy as np
import pytest
import torch

from crt_exp.data.text import IGNORED
from crt_exp.tasks.sequences import SequenceTask

SIZES = [f"+task.sizes.{key}={value}" for key, value in {"heads": 2, "layers": 2, "d_ff": 32, "d": 16}.items()]
SMALL = {"books": ["task.text=book.txt", "task.vocabulary_size=300", "task.max_length=16", "task.carried.times=4",
                   "task.carried.pieces=2", "task.cache_dir=null", "trainer.batch=8"],
         "pixels": ["task.evaluated=10"], "trembl": ["task.generated.sequences=200", "task.cache_dir=null"],
         "lra": ["+task.rules.train=60", "+task.rules.validation=20", "+task.rules.test=20", "task.cache_dir=null",
                 "trainer.batch=20"]}
COUNTED = {"loss", "accuracy", "grad_norm", "examples", "tokens", "letters", "dimensions", "loss_at_4"}


def test_parts_of_a_batch_are_its_tokens():
    labels = torch.tensor([[1, 2, 3, 4, IGNORED], [5, 6, IGNORED, IGNORED, IGNORED]])
    batch = {"tokens": labels.clamp(min=0), "labels": labels}
    first, second = (SequenceTask.part(None, batch, place, 2) for place in range(2))
    assert first["start"] == 0 and second["start"] == 3 and first["tokens"].shape == second["tokens"].shape == (2, 3)
    assert second["labels"].tolist() == [[4, IGNORED, IGNORED], [IGNORED] * 3]
    assert second["key_mask"].tolist() == [[True, True, False]] * 2 and first["key_mask"].all()
    whole = SequenceTask.part(None, {"tokens": labels, "labels": torch.tensor([3, 4])}, 1, 5)
    assert whole["labels"].tolist() == [3, 4] and "key_mask" not in whole


@pytest.mark.slow
@pytest.mark.parametrize("task, more", [
    ("books", ["task.rows=packed"]), ("books", ["task.rows=apart", "task.checkpointing=true"]),
    ("pixels", ["attention=relu"]), ("trembl", ["task.max_length=96"]), ("lra", ["+task.rules.longest=17"]),
], ids=str)
def test_two_processes_that_share_every_row_equal_one(task, more, typed, tmp_path):
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(["a", "bird", "sings", "in", "the", "tree"], rng.integers(3, 9))) for _ in range(400)]
    (tmp_path / "book.txt").write_text("\n".join(lines))
    attention = [] if any(word.startswith("attention=") for word in more) else ["attention=favorpp"]
    words = [f"task={task}", *SMALL[task], *SIZES, *attention, *more, "features.m=8", "task.dropout=0", "logger=none",
             "trainer.steps=6", "trainer.log_every=1", "trainer.eval_every=3"]
    code, _, err = typed(*words, "hydra.run.dir=one")
    assert code == 0, err
    code, _, err = typed(*words, "trainer.processes=2", "trainer.sequence_parallel=2", "hydra.run.dir=two")
    assert code == 0, err
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
                for name in ("one", "two"))
    assert [record["split"] for record in one] == [record["split"] for record in two]
    for a, b in zip(one, two):
        for key in a.keys() & COUNTED:
            assert b[key] == pytest.approx(a[key], rel=2e-4), (key, a, b)
