"""task=lra: generators against worked cases, readers against bad files, the classifier's laws, and runs as typed."""

import json

import numpy as np
import pytest
import torch
from refusals import check_refused

from crt_exp.data import DataError, arena
from crt_exp.data.arena import DOT, LINE
from crt_exp.mechanism import Mechanism
from crt_exp.models.language import Classifier, LanguageDescription
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.lra import LRA

SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
OPTIONS = {"dataset": "listops", "data_dir": None, "scale": "small",
           "rules": {"train": 60, "validation": 20, "test": 20, "longest": 24},
           "evaluated": None, "max_length": None, "cache_dir": None,
           "preset": None, "sizes": SIZES, "positions": None, "dropout": 0.0, "checkpointing": False}


def task_of(**options):
    return LRA(**OPTIONS | options)


# ---- ListOps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("7", 7), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9), ("[MIN 5 3 8 ]", 3), ("[SM 9 8 7 ]", 4), ("[MED 1 9 4 ]", 4),
    ("[MED 1 2 ]", 1),                                       # 1.5, rounded down
    ("[MED 3 6 4 9 ]", 5), ("[SM [MAX 1 2 ] [MED 8 8 9 ] [MIN 9 5 ] ]", 5),
])
def test_lists_are_worth_what_a_hand_finds(text, value):
    assert arena.listops_value(text.split()) == value


def test_generated_lists_keep_the_rules():
    rules = {"train": 300, "validation": 50, "test": 50, "shortest": 6, "longest": 30, "depth": 3, "arguments": 4}
    found = arena.generated("listops", rules, "small", None)
    every = [tuple(arena.SYMBOLS[i] for i in row) for split in found for row in found[split].rows]
    labels = np.concatenate([part.labels for part in found.values()])
    assert [len(found[split]) for split in found] == [300, 50, 50] and len(set(every)) == 400
    for words, label in zip(every, labels):
        assert 6 < len(words) < 30 and 0 <= arena.listops_value(words) == label <= 9
        nesting = np.cumsum([(word in arena.OPERATORS) - (word == "]") for word in words])
        assert nesting.max() <= 2 and nesting[-1] == 0       # depth 3 holds digits alone
    assert {word for words in every for word in words} == set(arena.SYMBOLS)


def test_published_lengths():
    few = {"train": 3, "validation": 1, "test": 1}
    found = arena.generated("listops", few, "full", None)
    lengths = [len(row) for part in found.values() for row in part.rows]
    assert min(lengths) > 500 and max(lengths) < 2000
    with pytest.raises(DataError, match="different sequences"):
        arena.generated("listops", few | {"depth": 2}, "full", None)


# ---- Pathfinder ------------------------------------------------------------------------------------------------------


def joined(grey, gap):
    """The answer by the rules: whether steps over at most `gap` empty pixels lead from one dot to the other."""
    left, (first, last) = np.argwhere(grey > 0).tolist(), np.argwhere(grey == DOT)
    going = [first]
    while going:
        here = going.pop()
        close = [pixel for pixel in left if np.abs(np.array(pixel) - here).max() <= gap + 1]
        left = [pixel for pixel in left if pixel not in close]
        going += map(np.array, close)
    return last.tolist() not in left


@pytest.mark.parametrize("scale, count", [("small", 40), pytest.param("full", 40, marks=pytest.mark.slow)])
def test_labels_are_what_a_walk_over_the_picture_finds(scale, count):
    changes, size = {"train": count, "validation": 1, "test": 1}, arena.PRESETS["pathfinder"][scale]["size"]
    found = arena.generated("pathfinder", changes, scale, None)["train"]
    pictures = np.stack(found.rows).reshape(count, size, size)
    assert found.labels.sum() == count // 2 and {*np.unique(pictures)} == {0, LINE, DOT}
    assert all((picture == DOT).sum() == 2 for picture in pictures)
    assert [joined(picture, gap=1) for picture in pictures] == found.labels.astype(bool).tolist()
    assert len({picture.tobytes() for picture in pictures}) == count


def test_curves_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="task.rules: .* set a larger size"):
        arena.generated("pathfinder", {"size": 5}, "small", None)


# ---- the classifier --------------------------------------------------------------------------------------------------


def classifier(name="favorpp", together=1):
    torch.manual_seed(0)
    options = {"m": 16} if name == "favorpp" else {}
    description = LanguageDescription(12, 20, SIZES, causal=False)
    return Classifier(description, 3, Mechanism.of(name, **options).layer, together=together).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["exact", "favorpp", "uniform"])
def test_padding_is_truncation(name):
    model, tokens = classifier(name), torch.randint(11, (2, 20))
    keep = torch.arange(20) < torch.tensor([[13], [20]])
    found = model(torch.where(keep, tokens, 11), keep)
    torch.testing.assert_close(found[:1], model(tokens[:1, :13]))
    torch.testing.assert_close(found[1:], model(tokens[1:]))


@torch.no_grad()
def test_pairs_are_read_one_by_one_and_compared():
    model, tokens = classifier(together=2), torch.randint(11, (4, 20))
    assert model(tokens).shape == (2, 3)
    torch.testing.assert_close(model(tokens)[1:], model(tokens[2:]))
    assert not torch.allclose(model(tokens), model(tokens[[1, 0, 3, 2]]))


def test_rows_of_a_batch_and_their_labels():
    task = task_of()
    batch = next(iter(task.batches("train", Plan(8))))
    for row, label, keep in zip(batch["tokens"], batch["labels"], batch["key_mask"]):
        assert arena.listops_value([arena.SYMBOLS[i] for i in row[keep]]) == label
        assert (row[~keep] == len(arena.SYMBOLS)).all()
    assert task_of(max_length=9).row_length == 9 == next(iter(task_of(max_length=9).batches("test", Plan(20))))[
        "tokens"].shape[1]
    rules = {"size": 128, "train": 2, "validation": 2, "test": 2}
    assert task_of(dataset="pathfinder", rules=rules).row_length == 128**2   # Path-X, whole


def test_majority_stands_beside_the_accuracy():
    task = task_of()
    found = task.evaluate(task.build(Mechanism.of("exact")).eval(), "test", Reader(task, batch=7))
    often = np.bincount(task.arena.splits["train"].labels).argmax()
    assert found["examples"] == 20
    assert found["majority_accuracy"] == pytest.approx((task.arena.splits["test"].labels == often).mean())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_reviews_and_pairs(tmp_path):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            folder = tmp_path / "imdb" / split / label
            folder.mkdir(parents=True)
            for i in range(5):
                (folder / f"{i}_7.txt").write_text(f"{label} {i}")
    task = task_of(dataset="text", data_dir=str(tmp_path / "imdb"), rules={})
    assert [task.length(split) for split in ("train", "validation", "test")] == [9, 1, 10]
    assert bytes(task.arena.splits["test"].rows[7].tolist()) == b"pos 2"
    (tmp_path / "imdb" / "test" / "pos" / "0_7.txt").write_text("")
    with pytest.raises(DataError, match="expected folders neg and pos"):
        task_of(dataset="text", data_dir=str(tmp_path / "imdb"), rules={})
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("1.0\ta\tb\tone\ttwo!\n0.0\ta\tc\tone\tx\n" * 3)
    task = task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})
    batch = next(iter(task.batches("test", Plan(4))))
    assert batch["tokens"].shape == (8, 4) and batch["labels"].shape == (4,) and task.length("train") == 6
    assert torch.isfinite(task.loss(task.build(Mechanism.of("favorpp", m=8)), batch))
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("2\ta\tb\tone\ttwo\n")
    with pytest.raises(DataError, match="eval.tsv, line 1: expected a label"):
        task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})


def test_evaluated_examples_are_the_same_in_every_run():
    task, whole = task_of(evaluated=7), task_of()
    assert [task.length(split) for split in ("train", "validation", "test")] == [60, 7, 7]
    few, every = ({bytes(row) for row in each.arena.splits["test"].rows} for each in (task, whole))
    assert few < every
    assert task.row_length == whole.row_length


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(typed, tmp_path, monkeypatch):
    def run(*args, directory="run"):
        monkeypatch.delenv("CRT_DATA", raising=False)
        base = ["trainer.batch=20", "trainer.steps=4", "task.cache_dir=null", "+task.rules.train=60",
                "+task.rules.validation=20", "+task.rules.test=20", *[f"+task.sizes.{k}={v}" for k, v in SIZES.items()]]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        return typed("task=lra", "logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return run


def test_it_learns(typed, tmp_path):
    """Lists of two digits under an operator."""
    code, out, err = typed("attention=favorpp", "features.m=16", "trainer.steps=100", "trainer.lr=1e-2",
                           "task.dropout=0", "+task.rules.longest=5", "+task.rules.shortest=3", "+task.rules.depth=2",
                           "+task.rules.train=300", "+task.rules.test=60")
    assert code == 0 and "lra: accuracy" in out, err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["accuracy"] > records[-1]["majority_accuracy"] + 0.1
    assert [r["loss"] for r in records if r["split"] == "train"][-1] < 1.8


@pytest.mark.parametrize("args, words", [
    (["+task.rules.depht=3"], ["task.rules.depht=3", "depth"]),
    (["+task.rules.arguments=1"], ["task.rules.arguments=1: expected int >= 2"]),
    (["+task.rules.shortest=60", "+task.rules.depth=1"], ["task.rules: 0 different sequences"]),
    (["task.dataset=image"], ["task.rules: only for the generated task.dataset=listops or pathfinder"]),
    (["task.dataset=pathfinder", "task.data_dir=/nowhere"], [": not used by task.dataset=pathfinder"]),
    (["task.data_dir=/nowhere"], [": not used by task.dataset=listops"]),
    (["task.dataset=lists"], ["task.dataset=lists", "retrieval"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


