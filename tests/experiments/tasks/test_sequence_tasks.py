"""task=lra, task=pixels and task=recall: rows by worked cases, properties of the classifier, metrics, refusals."""

import numpy as np
import pytest
import torch
from helpers.covering import slow
from helpers.task_options import options_of
from PIL import Image
from torch.testing import assert_close

from crt_exp.experiments import infer
from crt_exp.experiments.data import DataError, arena
from crt_exp.experiments.data.arena import DOT, LINE
from crt_exp.experiments.data.images import crop_square
from crt_exp.experiments.models.language import Classifier, LanguageDescription
from crt_exp.experiments.tasks.base import Plan, Reader
from crt_exp.experiments.tasks.lra import LRA, Pixels
from crt_exp.experiments.tasks.sequences import NOISE, Recall
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
MODEL = {"sizes": SIZES, "dropout": 0.0}
ARENA = options_of("lra") | MODEL
ARENA |= {
    "cache_dir": None,
    "rules": {"train": 60, "validation": 20, "test": 20, "longest": 24},
}
IMAGES = options_of("pixels") | MODEL | {"evaluated": 20}
PAIRS = options_of("recall") | MODEL
PAIRS |= {"queries": 3, "symbols": 8, "rows": 64, "evaluated": 8}


def task_of(**options):
    return LRA(**ARENA | options)


def pixels_of(**options):
    return Pixels(**IMAGES | options)


def recall_of(**options):
    return Recall(**PAIRS | options)


# ---- ListOps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM 9 8 7 ]", 4),
        ("[MED 1 2 ]", 1),  # 1.5, rounded down
        ("[SM [MAX 1 2 ] [MED 8 8 9 ] [MIN 9 5 ] ]", 5),
    ],
)
def test_lists_are_worth_what_a_hand_finds(text, value):
    assert arena.listops_value(text.split()) == value


def test_generated_lists_keep_the_rules():
    rules = {
        "train": 300,
        "validation": 50,
        "test": 50,
        "shortest": 6,
        "longest": 30,
        "depth": 3,
        "arguments": 4,
    }
    found = arena.generate_splits("listops", rules, "small", None)
    every = []
    for split in found:
        for row in found[split].rows:
            every.append(tuple(arena.SYMBOLS[i] for i in row))
    labels = np.concatenate([part.labels for part in found.values()])
    actual = [len(found[split]) for split in found]
    assert actual == [300, 50, 50]
    assert len(set(every)) == 400
    for words, label in zip(every, labels):
        assert 6 < len(words) < 30
        assert 0 <= arena.listops_value(words) == label <= 9
        nesting = np.cumsum([(word in arena.OPERATORS) - (word == "]") for word in words])
        assert nesting.max() <= 2
        assert nesting[-1] == 0  # depth 3 holds digits alone
    actual = set()
    for words in every:
        for word in words:
            actual.add(word)
    expected = set(arena.SYMBOLS)
    assert actual == expected


# ---- Pathfinder ------------------------------------------------------------------------------------------------------


def joined(grey, gap):
    """The answer by the rules: whether steps over at most `gap` empty pixels lead from one dot to the other."""
    left = np.argwhere(grey > 0).tolist()
    first, last = np.argwhere(grey == DOT)
    going = [first]
    while going:
        here = going.pop()
        close = []
        for pixel in left:
            if np.abs(np.array(pixel) - here).max() <= gap + 1:
                close.append(pixel)
        left = [pixel for pixel in left if pixel not in close]
        going += map(np.array, close)
    return last.tolist() not in left


@pytest.mark.parametrize("scale, count", [("small", 20), slow("full", 40)])
def test_labels_are_what_a_walk_over_the_picture_finds(scale, count):
    changes = {"train": count, "validation": 1, "test": 1}
    size = arena.PRESETS["pathfinder"][scale]["size"]
    found = arena.generate_splits("pathfinder", changes, scale, None)["train"]
    pictures = np.stack(found.rows).reshape(count, size, size)
    assert found.labels.sum() == count // 2
    actual = {*np.unique(pictures)}
    assert actual == {0, LINE, DOT}
    for picture in pictures:
        assert (picture == DOT).sum() == 2
    actual = [joined(picture, gap=1) for picture in pictures]
    expected = found.labels.astype(bool).tolist()
    assert actual == expected
    assert len({picture.tobytes() for picture in pictures}) == count


# ---- the classifier --------------------------------------------------------------------------------------------------


def classifier(name="favorpp", together=1):
    torch.manual_seed(0)
    options = {"m": 16} if name == "favorpp" else {}
    description = LanguageDescription(12, 20, SIZES, causal=False)
    return (
        Classifier(description, 3, Mechanism.of(name, **options).layer, together=together)
        .double()
        .eval()
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["exact", "favorpp"])
def test_padding_is_truncation(name):
    model = classifier(name)
    tokens = torch.randint(11, (2, 20))
    keep = torch.arange(20) < torch.tensor([[13], [20]])
    found = model(torch.where(keep, tokens, 11), keep)
    actual = found[:1]
    expected = model(tokens[:1, :13])
    assert_close(actual, expected)
    actual = found[1:]
    expected = model(tokens[1:])
    assert_close(actual, expected)


@torch.no_grad()
def test_pairs_are_read_one_by_one_and_compared():
    model = classifier(together=2)
    tokens = torch.randint(11, (4, 20))
    assert model(tokens).shape == (2, 3)
    actual = model(tokens)[1:]
    expected = model(tokens[2:])
    assert_close(actual, expected)
    expected = model(tokens[[1, 0, 3, 2]])
    assert not torch.allclose(model(tokens), expected)


def test_rows_of_a_batch_and_their_labels():
    task = task_of()
    batch = next(iter(task.batches("train", Plan(8))))
    for row, label, keep in zip(batch["tokens"], batch["labels"], batch["key_mask"]):
        actual = arena.listops_value([arena.SYMBOLS[i] for i in row[keep]])
        assert actual == label
        assert (row[~keep] == len(arena.SYMBOLS)).all()
    short = task_of(max_length=9)
    assert short.row_length == 9
    actual = next(iter(short.batches("test", Plan(20))))["tokens"].shape[1]
    assert actual == short.row_length
    rules = {"size": 128, "train": 2, "validation": 2, "test": 2}
    assert task_of(dataset="pathfinder", rules=rules).row_length == 128**2  # Path-X, whole


def test_majority_is_that_of_the_training_split():
    """The accuracy of its answer on a split in which another class is the most frequent one."""
    task = task_of()
    train = task.arena.splits["train"].labels
    test = task.arena.splits["test"].labels
    often = np.bincount(train).argmax()
    test[:] = np.where(np.arange(len(test)) < 5, often, (often + 1) % 10)
    actual = task.evaluate(task.build(Mechanism.of("exact")).eval(), "test", Reader(task, Plan(7)))
    assert actual["examples"] == 20
    assert actual["majority_accuracy"] == pytest.approx(5 / 20)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_reviews_and_pairs(tmp_path):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            folder = tmp_path / "imdb" / split / label
            folder.mkdir(parents=True)
            for i in range(5):
                (folder / f"{i}_7.txt").write_text(f"{label} {i}")
    data_dir = str(tmp_path / "imdb")
    task = task_of(dataset="text", data_dir=data_dir, rules={})
    actual = [task.length(split) for split in ("train", "validation", "test")]
    assert actual == [9, 1, 10]
    actual = bytes(task.arena.splits["test"].rows[7].tolist())
    assert actual == b"pos 2"
    (tmp_path / "imdb" / "test" / "pos" / "0_7.txt").write_text("")
    with pytest.raises(DataError, match="expected folders neg and pos"):
        task_of(dataset="text", data_dir=str(tmp_path / "imdb"), rules={})
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text(
            "1.0\ta\tb\tone\ttwo!\n0.0\ta\tc\tone\tx\n" * 3
        )
    task = task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})
    batch = next(iter(task.batches("test", Plan(4))))
    assert batch["tokens"].shape == (8, 4)
    assert batch["labels"].shape == (4,)
    assert task.length("train") == 6
    assert torch.isfinite(task.loss(task.build(Mechanism.of("favorpp", m=8)), batch))
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("2\ta\tb\tone\ttwo\n")
    with pytest.raises(DataError, match="eval.tsv, line 1: expected a label"):
        task_of(dataset="retrieval", data_dir=str(tmp_path), rules={})


def test_evaluated_examples_are_the_same_in_every_run():
    task = task_of(evaluated=7)
    whole = task_of()
    actual = [task.length(split) for split in ("train", "validation", "test")]
    assert actual == [60, 7, 7]
    both = []
    for variant in (task, whole):
        both.append({bytes(row) for row in variant.arena.splits["test"].rows})
    few, every = both
    assert few < every
    assert task.row_length == whole.row_length


# ---- task=pixels -----------------------------------------------------------------------------------------------------


def folder_of(tmp_path, side=12, count=4):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                values = rng.integers(0, 256, (side, side + 2, 3), np.uint8)
                Image.fromarray(values).save(folder / f"{i}.png")
    return tmp_path / "images"


def test_values_come_row_by_row_with_the_channels_of_a_pixel_together(tmp_path):
    root = folder_of(tmp_path, side=8)
    task = pixels_of(data_dir=str(root), size=8, held_out=0.25)
    batch = next(iter(task.batches("test", Plan(8))))
    values = np.asarray(Image.open(root / "val" / "a" / "0.png"))[:, 1:9]  # the middle square
    assert task.row_length == 192
    assert batch["labels"].shape == (8, 192)
    actual = batch["labels"][0].tolist()
    expected = values.reshape(-1).tolist()
    assert actual == expected
    actual = batch["tokens"][0].tolist()
    expected = [256, *values.reshape(-1)[:-1]]
    assert actual == expected
    grey = pixels_of(data_dir=str(root), size=8, channels=1, held_out=0.25)
    assert grey.row_length == 64
    assert grey.vocabulary["channels"] == 1
    grid = np.arange(256, dtype=np.uint8).reshape(16, 16)  # smaller images are means of the pixels
    means = grid.reshape(8, 2, 8, 2).mean((1, 3))
    actual = crop_square(Image.fromarray(grid), 8, 1, "")[..., 0]
    assert actual == pytest.approx(means, abs=0.5)
    with pytest.raises(DataError, match="train/a/0.png has 10 x 8 pixels"):
        pixels_of(data_dir=str(root), held_out=0.25)


def test_bits_are_those_of_the_values():
    task = pixels_of()
    model = task.build(Mechanism.of("uniform")).eval()
    found = task.evaluate(model, "test", Reader(task, Plan(7)))
    with torch.no_grad():
        bits = []
        for batch in task.batches("test", Plan(1)):
            bits.append(
                torch.nn.functional.cross_entropy(model(batch["tokens"])[0], batch["labels"][0])
                / np.log(2)
            )
    assert found["dimensions"] == 20 * 64
    actual = found["bits_per_dim"]
    expected = np.mean(bits)
    assert actual == pytest.approx(expected, rel=1e-5)
    seen = np.concatenate([task.values("test", i) for i in range(20)])
    actual = found["unigram_bits_per_dim"]
    expected = -np.log2(task.unigram[seen]).mean()
    assert actual == pytest.approx(expected, rel=1e-6)


def test_images_are_drawn_and_completed(tmp_path):
    task = pixels_of()
    model = task.build(Mechanism.of("favorp", m=8))
    task.export(model, model.state_dict(), tmp_path)
    values = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(values).save(tmp_path / "half.png")
    words = [f"run={tmp_path}", f"output={tmp_path / 'out.png'}", "n=3"]
    assert infer.main(words) == 0
    assert np.asarray(Image.open(tmp_path / "out.png")).shape[:2] == (
        100,
        3 * 98 + 2,
    )  # a value: 12 x 12 pixels
    assert infer.main([*words, f"prompt={tmp_path / 'half.png'}", "seed=5"]) == 0
    actual = np.asarray(Image.open(tmp_path / "out.png"))
    first, *drawn = (actual[2:98:12, left : left + 96 : 12, 0] for left in range(2, 4 * 98, 98))
    assert (first == values).all()
    assert (actual[2:14, 2:14] == values[0, 0]).all()
    for image in drawn:  # the upper half is the image's, the lower one is drawn
        assert (image[:4] == values[:4]).all()
        assert (image[4:] != values[4:]).any()


# ---- task=recall -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, pairs, queries", [(16, 2, 3), (40, 5, 5), (24, 4, 8)])
def test_queries_of_recall_ask_for_earlier_pairs(length, pairs, queries):
    task = recall_of(block=length, symbols=8, pairs=pairs, queries=queries)
    for i in range(20):
        tokens, labels = task.row("train", i)
        asked = np.flatnonzero(labels >= 0)
        assert len(tokens) == length
        assert len(asked) == queries
        assert tokens.max() < 16 + NOISE
        said = np.flatnonzero((tokens >= 8) & (tokens < 16) & (labels < 0))
        value = {tokens[at]: tokens[at + 1] for at in said}
        assert len(said) == len(value) == pairs
        assert said.max() < asked.min()
        for at in asked:
            assert value[tokens[at]] == labels[at] == tokens[at + 1] < 8
    actual, _ = task.row("train", 0)
    expected, _ = task.row("test", 0)
    assert not np.array_equal(actual, expected)


def test_a_model_that_knows_nothing_is_at_chance():
    task = recall_of()
    assert not task.description.tied
    assert task.predictable == 8
    found = task.evaluate(task.build(Mechanism.of("uniform")).eval(), "test", Reader(task, Plan(3)))
    assert found["queries"] == 24
    assert found["unigram_loss"] == pytest.approx(np.log(8))
    actual = {"tokens", "labels"}
    expected = set(next(iter(task.batches("train", Plan(4)))))
    assert actual == expected


@pytest.mark.parametrize(
    "make, options, words",
    [
        (task_of, {"rules": {"shortest": 60, "depth": 1}}, "task.rules: 0 different sequences"),
        (
            task_of,
            {"dataset": "pathfinder", "rules": {"size": 5}},
            "task.rules: .* set a larger size",
        ),
        (
            task_of,
            {"dataset": "image"},
            "task.rules: only for the generated task.dataset=listops or pathfinder",
        ),
        (pixels_of, {"dataset": "photos"}, "task.dataset=photos: .*train/<class>/"),
        (recall_of, {"block": 8, "queries": 6}, "task.block=8: expected at least 16"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_that_do_not_fit(make, options, words, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises((ConfigError, DataError), match=words):
        make(**options)
