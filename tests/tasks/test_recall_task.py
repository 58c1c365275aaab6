"""task=recall: pairs that are said once and asked for, learned by the sequence model with any attention."""

import numpy as np
import pytest
from refusals import check_refused

from crt_exp.mechanism import Mechanism
from crt_exp.measure.recall import SwapRecall
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.sequences import NOISE, Recall, recall_row

OPTIONS = {"block": 16, "pairs": 2, "queries": 3, "symbols": 8, "rows": 64, "evaluated": 8, "preset": None,
           "sizes": {"heads": 2, "layers": 1, "d_ff": 16, "d": 16}, "positions": "rotary", "tied": None, "dropout": 0.0,
           "checkpointing": False, "init": "scratch", "calibration": 2}


@pytest.mark.parametrize("length, pairs, queries", [(16, 2, 3), (40, 5, 5), (64, 1, 1), (24, 4, 8)])
def test_what_is_asked_was_said_before(length, pairs, queries):
    for i in range(20):
        tokens, labels = recall_row("train", i, length, 8, pairs, queries)
        asked = np.flatnonzero(labels >= 0)
        assert len(tokens) == length and len(asked) == queries and tokens.max() < 16 + NOISE
        said = np.flatnonzero((tokens >= 8) & (tokens < 16) & (labels < 0))
        value = {tokens[at]: tokens[at + 1] for at in said}
        assert len(said) == len(value) == pairs and said.max() < asked.min()
        assert all(value[tokens[at]] == labels[at] == tokens[at + 1] < 8 for at in asked)
    assert not np.array_equal(recall_row("train", 0, length, 8, pairs, queries)[0],
                              recall_row("test", 0, length, 8, pairs, queries)[0])


def test_a_model_that_knows_nothing_is_at_chance():
    task = Recall(**OPTIONS)
    assert not task.description.tied and task.predictable == 8
    found = task.evaluate(task.build(Mechanism.of("uniform")).eval(), "test", Reader(task, batch=3))
    assert found["queries"] == 24 and found["unigram_loss"] == pytest.approx(np.log(8))
    assert {"tokens", "labels"} == set(next(iter(task.batches("train", Plan(4)))))


def test_a_run_and_its_other_attention(typed, tmp_path):
    run = ["task=recall", "attention=exact", "logger=none", "trainer.cpu=true", "task.block=16", "task.symbols=8",
           "+task.sizes.heads=2", "+task.sizes.d=16", "trainer.steps=6", "trainer.batch=8", "task.evaluated=8"]
    code, out, err = typed(*run, f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0 and "recall: " in out, err
    code, out, err = typed("task=recall", "logger=none", "trainer.cpu=true", f"task.init={tmp_path / 'run'}",
                           "trainer.steps=0", "attention=nearfar", "task.block=40", "task.pairs=4", "task.symbols=8",
                           "task.evaluated=8", f"hydra.run.dir={tmp_path / 'other'}")
    assert code == 0, err
    found = [next(SwapRecall(str(tmp_path / "run"), 64, 3, 2).rows(Mechanism.parse(name), 0))
             for name in ("exact", "nearfar", "favorpp m=8")]
    assert found[0]["accuracy"] == found[1]["accuracy"]


@pytest.mark.parametrize("options, words", [
    (["task.pairs=300"], ["task.pairs=300: expected at most task.symbols=256"]),
    (["task.block=8", "task.queries=6"], ["task.block=8: expected at least 16"]),
    (["task.queries=0"], ["queries"])])
def test_what_is_refused(typed, tmp_path, options, words):
    check_refused(typed("task=recall", *options, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"), words,
                  tmp_path / "run")
