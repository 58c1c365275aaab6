"""Folders, hub sets and single images: what is read, what is refused, and that nothing depends on who reads it."""

import random
import shutil
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as HubImage
from helpers.small_images import picture, write_images, write_shards
from PIL import ExifTags, Image

from crt_exp.experiments.data import DataError, images
from crt_exp.experiments.data.files import IMAGES, SYSTEM, files_ending
from crt_exp.experiments.data.loading import by_workers, image_batch, listed_rows
from crt_exp.experiments.data.plan import Limit, Plan
from crt_exp.experiments.runner.trainer import read_ahead
from crt_exp.registry import ConfigError

# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "images"], ids=["flat", "as tiny-imagenet"])
def test_a_folder_is_read_by_class(inner, tmp_path, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    write_images(tmp_path / "images/stripes", inner=inner)
    found = images.load("stripes")
    actual = {split: len(part) for split, part in found.items()}
    assert actual == {"train": 24, "val": 12}
    train = found["train"]
    assert train.classes == ("class0", "class1", "class2")
    actual = train.labels.tolist()
    expected = [0] * 8 + [1] * 8 + [2] * 8
    assert actual == expected
    actual = np.asarray(train.read(train.sources[9]))
    expected = np.asarray(picture(1, 1))
    assert np.array_equal(actual, expected)


def test_held_out_images_are_of_all_classes_and_not_trained_on(tmp_path):
    train = images.load("mine", write_images(tmp_path))["train"]
    left, held_out = train.held_out(0.25)
    assert not set(left.sources.tolist()) & set(held_out.sources.tolist())
    assert len(left) + len(held_out) == 24
    actual = np.bincount(held_out.labels).tolist()
    assert actual == [2, 2, 2]
    with pytest.raises(DataError, match="task.held_out=0.01: no images left to hold out of 24"):
        train.held_out(0.01)


def test_a_fifth_of_a_folder_of_classes_is_held_out(tmp_path, caplog):
    root = write_images(tmp_path, train=10) / "train"
    (root / "class1").rename(root / "bullet_train")
    found = images.load("mine", root)
    actual = np.bincount(found["val"].labels).tolist()
    assert actual == [2, 2, 2]
    assert "bullet_train" in found["val"].classes
    assert f"{root}: no train/ and val/; using a fifth" in caplog.text


@pytest.mark.parametrize(
    "moves, words",
    [
        ({"val/class1": "val/other"}, "class1 is in only one of train/ and val/"),
        ({"train/class2/images": "images"}, "train/class2: no images"),
        *[
            (
                {"train": train, "val": val},
                "looks like a split; expected train/<class>/ and val/<class>/, or <class>/ only",
            )
            for train, val in (
                ("training", "test"),
                ("Train", "Valid"),
                ("bus", "val"),
            )
        ],
    ],
)
def test_folders_of_another_layout_are_refused(moves, words, tmp_path):
    source = write_images(tmp_path / "source", inner="images")
    root = tmp_path / "a"
    for old, new in moves.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        (source / old).rename(root / new)
    if "train" not in moves:
        root = source
    with pytest.raises(DataError, match=words):
        images.load("mine", root)


def test_a_missing_folder_is_named_with_its_source(monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises(
        DataError, match="CRT_DATA is not set.*crt_exp data fetch images/imagenette2-320"
    ):
        images.load("imagenette2-320")


def test_hidden_and_system_folders_are_no_classes_and_hold_no_data(tmp_path, caplog):
    """At any depth."""
    root = write_images(tmp_path / "b", inner="x")
    for name in (".ipynb_checkpoints", *SYSTEM[:2]):
        cases = [root, root / "train", root / "val/class0", root / "val/class0/x"]
        for place in cases:
            (place / name).mkdir()
            for file in (place / name / "0.png", place / f"._{name}.png"):
                shutil.copy(root / "train/class1/x/0.png", file)
    for name in ("x.heic", "y.HEIC", "boxes"):
        (root / "train/class1" / name).write_bytes(b"")
    found = images.load("mine", root)
    assert found["train"].classes == ("class0", "class1", "class2")
    actual = [len(found[split]) for split in ("train", "val")]
    assert actual == [24, 12]
    assert len(files_ending(root / "val", IMAGES)) == 12
    assert caplog.text.count("ignored 3 files") == 1


# ---- single images -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, suffix, tolerance",
    [
        ("1", "png", 255),
        ("P", "png", 0),
        ("LA", "png", 0),
        ("I;16", "png", 0),
        ("CMYK", "jpg", 8),
        ("RGB", "webp", 8),
    ],
)
def test_every_kind_of_image_becomes_rgb(mode, suffix, tolerance, tmp_path):
    """Black and white is dithered."""
    grey = np.tile(np.arange(0, 256, 16, np.uint8), (16, 1))
    path = tmp_path / f"image.{suffix}"
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        image = Image.fromarray(grey).convert(mode)
    options = {"quality": 100} if suffix in ("jpg", "webp") else {}
    image.save(path, **options)
    actual = images.read_image(path)
    assert actual.mode == "RGB"
    assert actual.size == (16, 16)
    difference = np.abs(np.asarray(actual, int) - grey[..., None]).max()
    assert difference <= tolerance
    difference = abs(np.asarray(actual, float).mean() - grey.mean())
    assert difference < 4


def drawing(mode, box, ink=0):
    """A square of one colour on a transparent ground of the same colour."""
    ground = {"1": 1 - ink, "P": 3, "L": 100, "RGB": (9, 100, 9)}.get(mode)
    if ground is None:
        ground = (ink,) * (len(mode) - 1) + (0,)
        ink = (*ground[:-1], 255)
    image = Image.new(mode, (32, 32), ground)
    if mode == "P":
        image.putpalette([9] * 768)
    if mode == "RGB":
        ink = (ink,) * 3
    image.paste(ink, box)
    options = {} if "A" in mode else {"transparency": ground}
    return image, options


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    "mode, suffix",
    [
        *((mode, "png") for mode in ("RGBA", "LA", "P", "L", "RGB", "1")),
        ("RGBA", "webp"),
        ("RGBA", "tiff"),
        ("P", "gif"),
    ],
)
def test_transparent_pixels_become_white(mode, suffix, by_name, tmp_path):
    path = tmp_path / f"a.{suffix}"
    cases = [(4, 4, 12, 12), (20, 8, 28, 30)]
    for box in cases:
        image, options = drawing(mode, box)
        if suffix == "webp":
            options["lossless"] = True
        image.save(path, **options)
        expected = np.full((32, 32), 255)
        expected[box[1] : box[3], box[0] : box[2]] = 9 if mode == "P" else 0
        source = path if by_name else (path.read_bytes(), "name")
        actual = images.read_image(source)
        assert actual.mode == "RGB"
        assert (np.asarray(actual) == expected[..., None]).all()


def test_half_transparent_pixels_become_lighter(tmp_path):
    Image.new("LA", (8, 8), (100, 51)).save(tmp_path / "a.png")
    assert np.unique(images.read_image(tmp_path / "a.png")).tolist() == [
        224
    ]  # 0.2 * 100 + 0.8 * 255


TURNED = {
    3: lambda x: np.rot90(x, 2),
    5: lambda x: x.swapaxes(0, 1),
    6: np.rot90,
    8: lambda x: np.rot90(x, -1),
}


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_an_image_is_turned_upright(orientation, tmp_path):
    """As phones write photographs: the pixels as the sensor lies, and an EXIF tag."""
    upright = np.asarray(picture(0, 0, 20))[:, :12].copy()
    stored = Image.fromarray(np.ascontiguousarray(TURNED[orientation](upright)))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    cases = [tmp_path / "a.png", ((tmp_path / "a.png").read_bytes(), "name")]
    for source in cases:
        actual = np.asarray(images.read_image(source))
        assert np.array_equal(actual, upright)


def test_files_that_are_no_whole_image_are_named(tmp_path):
    picture(0, 0, 64).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("This is no image.")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "fractions.tiff")
    cases = [
        ("cut.jpg", "truncated"),
        ("text.jpg", "cannot identify"),
        ("empty.png", "cannot identify"),
        ("gone.jpg", "No such file"),
        ("fractions.tiff", "mode F"),
    ]
    for name, words in cases:
        with pytest.raises(DataError, match=f"{name}: not a readable image .*{words}"):
            images.read_image(tmp_path / name)


# ---- batches by workers --------------------------------------------------------------------------------------------


def noisy(image):
    """Draws from all the generators that augmentations use."""
    drawn = random.random() + np.random.rand() + torch.rand(())
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() + drawn


def together(pixels, labels, draws):
    return {
        "images": pixels,
        "labels": labels,
        "first": torch.tensor(draws[0].random()),
    }


def batches(part, plan, workers=0, repeats=1):
    make = partial(image_batch, part, plan.rng, noisy, together)
    return list(by_workers(make, listed_rows(len(part), "train", plan, repeats), workers))


def same_batch(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def same(one, other):
    return len(one) == len(other) and all(same_batch(a, b) for a, b in zip(one, other))


@pytest.fixture
def part(tmp_path):
    return images.load("mine", write_images(tmp_path / "folder"))["train"]


def test_batches_depend_on_neither_workers_nor_processes_nor_where_reading_starts(part):
    alone = batches(part, Plan(6, seed=3))
    assert len(alone) == 4
    assert not torch.equal(alone[0]["images"], alone[1]["images"])
    actual = batches(part, Plan(6, seed=3), 2)
    assert same(actual, alone)
    actual = batches(part, Plan(6, seed=3, epoch=1))
    assert not same(actual, alone)
    actual = batches(part, Plan(6, seed=3, start=2))
    assert same(actual, alone[2:])
    parts = [batches(part, Plan(6, seed=3, rank=rank, world=2)) for rank in (0, 1)]
    actual = torch.cat([parts[0][1]["images"], parts[1][1]["images"]])
    assert torch.equal(actual, alone[1]["images"])


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_draws_nothing_from_the_generators_of_training(part, workers):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batches(part, Plan(12), workers)
    assert random.getstate() == before[0]
    actual = np.random.get_state()[1].tolist()
    assert actual == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_without_workers_nothing_is_augmented_beside_training(part):
    make = partial(image_batch, part, Plan(6).rng, noisy, together)
    with pytest.raises(ConfigError, match="trainer.prefetch=0"):
        list(read_ahead(by_workers(make, listed_rows(len(part), "train", Plan(6)), 0), 2))


def test_an_image_comes_as_often_as_asked_with_other_draws(part):
    found = batches(part, Plan(6), repeats=3)
    assert len(found) == 4  # the epoch keeps its length
    actual = found[0]["labels"].tolist()
    expected = []
    for label in found[0]["labels"][::3].tolist():
        for _ in range(3):
            expected.append(label)
    assert actual == expected
    shifts = (
        found[0]["images"][0] - found[0]["images"][1]
    )  # the same image, another draw added to it
    assert shifts.std() < 1e-5
    assert shifts.mean() != 0


@pytest.mark.parametrize("batches, size", [(1, 20), (2, 10), (1, 40)])
def test_the_first_batches_of_an_evaluation_have_images_of_all_classes(batches, size):
    labels = np.repeat(np.arange(5), 20)
    whole = np.concatenate([*listed_rows(100, "val", Plan(size))])
    actual = sorted(whole.tolist())
    expected = [*range(100)]
    assert actual == expected
    actual = set(labels[whole[: batches * size]])
    expected = {*range(5)}
    assert actual == expected
    limited = [*listed_rows(100, "val", Plan(size, limit=Limit(batches)))]
    assert len(limited) == batches
    actual = set(labels[np.concatenate(limited)])
    expected = {*range(5)}
    assert actual == expected


# ---- sets of the hub -----------------------------------------------------------------------------------------------


HUB = {
    "name": "webdataset",
    "config": None,
    "split": "train",
    "validation": "validation",
    "image": "png",
    "label": "cls",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return {"data_files": write_shards(tmp_path_factory.mktemp("shards"))}


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_a_set_of_the_hub_has_the_images_of_its_files(kind, shards, tmp_path):
    """The classes are numbers, or have the names that the set gives them."""
    hub = HUB | shards
    names = ("0", "1", "2")
    if kind == "parquet":
        names = ("a", "b", "c")
        features = Features({"png": HubImage(), "cls": ClassLabel(names=names)})
        files = {}
        for split in ("train", "validation"):
            stored = [{"bytes": png_of(i % 3, i), "path": None} for i in range(12)]
            rows = Dataset.from_dict({"png": stored, "cls": [0, 1, 2] * 4}, features)
            files[split] = str(tmp_path / f"{split}.parquet")
            rows.to_parquet(files[split])
        hub = HUB | {"name": "parquet", "data_files": files}
    actual = images.load_hub(hub)
    for part in actual.values():
        assert len(part) == 12
        assert part.classes == names
        for i, label in enumerate(part.labels):
            image = np.asarray(part.read(part.sources[i]))
            numbers = [np.asarray(picture(label, number)) for number in range(60)]
            assert any(np.array_equal(image, number) for number in numbers)
    alone = batches(actual["train"], Plan(4, seed=3))
    assert same(batches(actual["train"], Plan(4, seed=3, start=1), 2), alone[1:])


def png_of(label, number):
    content = BytesIO()
    picture(label, number).save(content, "PNG")
    return content.getvalue()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"image": "jpg"}, "task.hub.image=jpg: expected a column of webdataset: .*png"),
        ({"validation": "none"}, "webdataset: not readable"),
    ],
)
def test_mistakes_in_sets_of_the_hub_are_named(options, words, shards):
    with pytest.raises(DataError, match=words):
        images.load_hub(HUB | shards | options)
