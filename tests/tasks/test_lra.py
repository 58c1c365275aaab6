"""task=lra: generators against worked cases, readers against bad files, the classifier's laws, and runs as typed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import check_refused

from crt_exp.data import DataError, labelled, listops, pathfinder
from crt_exp.data.pathfinder import DOT, LINE
from crt_exp.mechanism import Mechanism
from crt_exp.models.classifier import Classifier
from crt_exp.models.language import LanguageDescription
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.lra import LRA

DATA = Path(os.environ.get("CRT_DATA", "none"))
SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
OPTIONS = {"dataset": "listops", "data_dir": None, "scale": "small", "data_seed": 0, "held_out": 0.1,
           "rules": {"train": 60, "validation": 20, "test": 20, "longest": 24}, "evaluated": None, "max_length": None,
           "bucketed": True, "cache_dir": None,
           "preset": None, "sizes": SIZES, "positions": None, "dropout": 0.0, "checkpointing": False}


def task_of(**options):
    return LRA(**OPTIONS | options)


# ---- ListOps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [
    ("7", 7), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9), ("[MIN 5 3 8 ]", 3), ("[SM 9 8 7 ]", 4), ("[MED 1 9 4 ]", 4),
    ("[MED 1 2 ]", 1),                                       # 1.5, rounded down
    ("[MED 3 6 4 9 ]", 5), ("( ( ( [SM 1 ) 2 ) ] )", 3),     # as the published files write it
    ("[SM [MAX 1 2 ] [MED 8 8 9 ] [MIN 9 5 ] ]", 5),
])
def test_lists_are_worth_what_a_hand_finds(text, value):
    symbols, found = listops.parse(text)
    assert found == value and len(symbols) == len(text.replace("(", "").replace(")", "").split())


@pytest.mark.parametrize("text, words", [
    ("[MAX 2", "1 of its lists are not closed"), ("2 ]", "closes no list"), ("[MAX ]", "is empty"),
    ("1 2", "2 lists or digits side by side"), ("[AVG 1 2 ]", "'[AVG' is no symbol"), ("", "0 lists or digits"),
])
def test_what_is_no_list_is_refused(text, words):
    with pytest.raises(ValueError) as error:
        listops.parse(text)
    assert words in str(error.value)


def test_drawn_lists_keep_the_rules():
    rules = listops.ListOpsRules(300, 50, 50, 6, 30, 3, 4)
    found = listops.drawn(rules, 0)
    every = [tuple(words) for split in ("train", "validation", "test") for words in found[split]]
    assert [len(found[split]) for split in found] == [300, 50, 50] and len(set(every)) == 400
    assert found == listops.drawn(rules, 0) != listops.drawn(rules, 1)
    for words in every:
        assert 6 < len(words) < 30 and 0 <= listops.worth(words) <= 9
        nesting = np.cumsum([(word in listops.OPERATORS) - (word == listops.END) for word in words])
        assert nesting.max() <= 2 and nesting[-1] == 0       # depth 3 holds digits alone
    assert {word for words in every for word in words} == set(listops.SYMBOLS)


def test_published_lengths():
    rules = listops.PRESETS["full"]._replace(train=3, validation=1, test=1)
    lengths = [len(words) for rows in listops.drawn(rules, 0).values() for words in rows]
    assert min(lengths) > 500 and max(lengths) < 2000
    with pytest.raises(DataError, match="different sequences"):
        listops.drawn(rules._replace(depth=2), 0)


# ---- Pathfinder ------------------------------------------------------------------------------------------------------


def test_a_picture_drawn_by_hand():
    """Two curves of two dashes, side by side."""
    one, two = (np.array([[row, column] for column in (0, 1, 3, 4)]) for row in (0, 4))
    grey = pathfinder.painted(5, [one, two], (one[0], one[-1]))
    assert grey[0].tolist() == [DOT, LINE, 0, LINE, DOT] and grey[4].tolist() == [LINE, LINE, 0, LINE, LINE]
    assert not grey[1:4].any() and pathfinder.joined(grey, gap=1) and not pathfinder.joined(grey, gap=0)
    assert not pathfinder.joined(pathfinder.painted(5, [one, two], (one[0], two[0])), gap=1)


@pytest.mark.parametrize("scale, count", [("small", 40), pytest.param("full", 40, marks=pytest.mark.slow)])
def test_labels_are_what_a_walk_over_the_picture_finds(scale, count):
    rules = pathfinder.PRESETS[scale]._replace(train=count, validation=1, test=1)
    pictures, labels = pathfinder.drawn(rules, 0)["train"]
    assert labels.sum() == count // 2 and pictures.shape == (count, rules.size, rules.size)
    assert all((picture == DOT).sum() == 2 for picture in pictures)
    assert [pathfinder.joined(picture, rules.gap) for picture in pictures] == labels.astype(bool).tolist()
    again, _ = pathfinder.drawn(rules, 0)["train"]
    assert (again == pictures).all() and len({picture.tobytes() for picture in pictures}) == count


def test_curves_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="do not fit into pictures of 5 x 5"):
        pathfinder.drawn(pathfinder.PRESETS["small"]._replace(size=5), 0)


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
    task = task_of(bucketed=False)
    batch = next(iter(task.batches("train", Plan(8))))
    for row, label, keep in zip(batch["tokens"], batch["labels"], batch["key_mask"]):
        assert listops.worth([listops.SYMBOLS[i] for i in row[keep]]) == label
        assert (row[~keep] == len(listops.SYMBOLS)).all()
    assert task_of(max_length=9).row_length == 9 == next(iter(task_of(max_length=9).batches("test", Plan(20))))[
        "tokens"].shape[1]


def test_majority_stands_beside_the_accuracy():
    task = task_of()
    found = task.evaluate(task.build(Mechanism.of("exact")).eval(), "test", Reader(task, batch=7))
    often = np.bincount(task.arena.splits["train"].labels).argmax()
    assert found["examples"] == 20
    assert found["majority_accuracy"] == pytest.approx((task.arena.splits["test"].labels == often).mean())


# ---- files -----------------------------------------------------------------------------------------------------------


def test_published_lists(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n[SM 6 6 ]\t2\n")
    task = task_of(data_dir=str(tmp_path), rules={})
    assert task.length("train") == 2 and task.arena.splits["test"].labels.tolist() == [9, 2]
    for line, words in {"[MAX 2\t2": "not closed", "[SM 6 6 ]\t3": "it is worth 2", "5": "1 columns"}.items():
        (tmp_path / "basic_val.tsv").write_text(f"Source\tTarget\n7\t7\n{line}\n")
        with pytest.raises(DataError) as error:
            task_of(data_dir=str(tmp_path), rules={})
        assert f"{tmp_path / 'basic_val.tsv'}, line 3: " in str(error.value) and words in str(error.value)
    for content in ("", "Source\tTarget\n"):
        (tmp_path / "basic_val.tsv").write_text(content)
        with pytest.raises(DataError, match="basic_val.tsv: the file holds no text"):
            labelled.read_listops(tmp_path)


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
    with pytest.raises(DataError, match="0_7.txt: the text is empty"):
        task_of(dataset="text", data_dir=str(tmp_path / "imdb"), rules={})
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("1.0\ta\tb\tone\ttwo!\n0.0\ta\tc\tone\tx\n" * 3)
    task = task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})
    batch = next(iter(task.batches("test", Plan(4))))
    assert batch["tokens"].shape == (8, 4) and batch["labels"].shape == (4,) and task.length("train") == 6
    assert torch.isfinite(task.loss(task.build(Mechanism.of("favorpp", m=8)), batch))
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("2\ta\tb\tone\ttwo\n")
    with pytest.raises(DataError, match="eval.tsv, line 1: a line is a label"):
        task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})


def test_passages_of_one_article_or_of_two(tmp_path, monkeypatch):
    monkeypatch.setattr(labelled, "PASSAGE", 8)
    text = "".join(f" = {name} = \n \n {name * 9} \n = = Life = = \n {name * 9} \n\n" for name in ("Abc", "Def", "Ghi"))
    (tmp_path / "wiki.txt").write_text(text + " = Short = \n x \n")
    found = labelled.articles(tmp_path / "wiki.txt")
    assert len(found) == 3 and all(len(row) == 8 for article in found for row in article)
    assert all(b"A" in bytes(row) and not set(b"=LDG") & set(bytes(row)) for row in found[0])
    rows, labels = labelled.drawn_passages(found, 30, np.random.default_rng(0))
    same = [set(bytes(one)) & set(b"ADG") == set(bytes(two)) & set(b"ADG") for one, two in zip(rows[::2], rows[1::2])]
    assert same == labels.astype(bool).tolist() and labels.sum() == 15


def test_evaluated_examples_are_the_same_in_every_run():
    task, whole = task_of(evaluated=7), task_of()
    assert [task.length(split) for split in ("train", "validation", "test")] == [60, 7, 7]
    few, every = ({bytes(row) for row in each.arena.splits["test"].rows} for each in (task, whole))
    assert few < every
    assert task.row_length == whole.row_length


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "glue").is_dir(), reason="CRT_DATA is not set: GLUE and CIFAR-10 are needed")
def test_official_files():
    task = task_of(dataset="text", rules={})
    assert task.length("test") == 872 and task.length("train") + task.length("validation") == 67349
    task = task_of(dataset="retrieval", rules={})
    assert task.length("train") == 8000 and task.row_length == 256 and task.arena.together == 2
    task = task_of(dataset="image", rules={})
    assert task.row_length == 1024 and task.arena.classes == 10


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
    assert code == 0 and "lra, listops: accuracy" in out, err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["accuracy"] > records[-1]["majority_accuracy"] + 0.1
    assert [r["loss"] for r in records if r["split"] == "train"][-1] < 1.8


@pytest.mark.parametrize("args, words", [
    (["+task.rules.depht=3"], ["did you mean task.rules.depth?"]),
    (["+task.rules.arguments=1"], ["task.rules.arguments = 1", "at least 2"]),
    (["+task.rules.shortest=60", "+task.rules.depth=1"], ["0 different sequences", "task.rules.shortest"]),
    (["task.dataset=image"], ["task.rules are those of listops and pathfinder"]),
    (["task.dataset=pathfinder", "task.data_dir=/nowhere"], ["is not used by task.dataset=pathfinder"]),
    (["task.data_dir=/nowhere"], ["/nowhere/basic_train.tsv, which is not there"]),
    (["task.dataset=lists"], ["task.dataset = lists", "retrieval"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


