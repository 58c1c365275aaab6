"""Folders, shards and single images: what is read, what is refused, and that nothing depends on who reads it."""

import os
import random
import shutil
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import ExifTags, Image
from small_images import add, picture, write_images, write_shards
from small_speech import TEXTS, tone, write_digits, write_librispeech

from crt_exp.config import ConfigError
from crt_exp.data import DataError, images
from crt_exp.data.__main__ import main
from crt_exp.data.endings import SYSTEM
from crt_exp.data.fasta import fasta_files
from crt_exp.data.image_stream import Streamed
from crt_exp.data.image_values import squared
from crt_exp.data.loading import Folders, Loader, Micro
from crt_exp.data.plan import Plan
from crt_exp.data.speech import Faults, official, recordings
from crt_exp.data.speech_table import audio_files
from crt_exp.data.text import text_files
from crt_exp.runner.trainer import read_ahead

real_data = pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: official files are needed")


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_by_class(tmp_path):
    write_images(tmp_path)
    found = images.load("mine", tmp_path)
    assert {split: len(part) for split, part in found.items()} == {"train": 24, "val": 12}
    train = found["train"]
    assert train.classes == ("class0", "class1", "class2") and train.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert np.array_equal(np.asarray(train.read(train.sources[9])), np.asarray(picture(1, 1)))


def test_the_original_tiny_imagenet_has_its_images_one_folder_down(tmp_path):
    write_images(tmp_path, inner="images")
    (tmp_path / "train" / "class0" / "class0_boxes.txt").write_text("0.JPEG 1 2 3 4\n")
    assert len(images.load("mine", tmp_path)["train"]) == 24


def test_the_folder_of_a_name_lies_below_crt_data(tmp_path, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    write_images(tmp_path / "images" / "stripes")
    assert len(images.load("stripes")["val"]) == 12


def test_digits_need_no_file_and_are_split_once_and_for_all(monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    first, second = images.load("digits"), images.load("digits")
    assert len(first["train"]) == 1437 and len(first["val"]) == 360
    for split in first:
        assert np.array_equal(first[split].sources, second[split].sources)
        assert set(first[split].labels.tolist()) == set(range(10))
    assert first["train"].read(first["train"].sources[0]).size == (8, 8)


def test_held_out_images_are_of_all_classes_and_not_trained_on(tmp_path):
    train = images.load("mine", write_images(tmp_path))["train"]
    left, held_out = train.held_out(0.25)
    assert not set(left.sources.tolist()) & set(held_out.sources.tolist()) and len(left) + len(held_out) == 24
    assert np.bincount(held_out.labels).tolist() == [2, 2, 2]
    with pytest.raises(DataError, match="leaves none to hold out"):
        train.held_out(0.01)


def remove(path):
    for inner in path.iterdir():
        inner.unlink()


@pytest.mark.parametrize("harm, words", [
    (lambda root: (root / "val" / "class1").rename(root / "val" / "other"),
     ["different classes", "only train/ has class1", "only val/ has other"]),
    (lambda root: remove(root / "train" / "class2"), ["train/class2 holds no image", "remove it from train/ and val/"]),
    (lambda root: (root / "val").rename(root / "others"), ["holds others/, train/", "val is not there",
                                                           "train/<class>/ and val/<class>/"]),
    (lambda root: [path.rename(root / path.name) for path in [*(root / "train").iterdir()]], ["no class folders"]),
], ids=["other classes", "empty class", "no val", "no classes"])
def test_folders_of_another_layout_are_refused(harm, words, tmp_path):
    harm(write_images(tmp_path / "a"))
    with pytest.raises(DataError) as error:
        images.load("mine", tmp_path / "a")
    assert all(word in str(error.value) for word in words), error.value


def test_a_missing_folder_says_what_to_get_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises(DataError, match="CRT_DATA is not set(.|\n)*crt_exp.data fetch images/imagenette2-320"):
        images.load("imagenette2-320")
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    with pytest.raises(DataError) as error:
        images.load("mine")
    assert f"{tmp_path / 'images' / 'mine'} is not there" in str(error.value) and "task.data_dir" in str(error.value)


def moved(source, root, moves):
    """The folders of a set of images, below root and under other names."""
    write_images(source)
    for old, new in moves.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        (source / old).rename(root / new)
    return root


@pytest.mark.parametrize("train, val", [
    ("training_set", "test_set"), ("Train", "TEST"), ("seg_train", "seg_test"), ("train", "validation"),
    ("train_images", "val_images"), ("TrainingSet", "ValidationSet"), ("trainset", "testset"), ("train2017", "val2017"),
    ("training", "dev"), ("chest_train", "chest_valid"), ("train", "test")])
@pytest.mark.parametrize("nested", [False, True])
def test_folders_whose_names_mean_splits_are_splits(train, val, nested, tmp_path, caplog):
    places = {name: f"{name}/{name}" if nested else name for name in (train, val)}
    root = moved(tmp_path / "source", tmp_path / "a", {"train": places[train], "val": places[val]})
    found = images.load("mine", root)
    assert {split: len(part) for split, part in found.items()} == {"train": 24, "val": 12}
    assert found["train"].classes == ("class0", "class1", "class2")
    assert found["val"].read(found["val"].sources[0]).mode == "RGB"
    assert f"{train}/ is read as train and {val}/ as val" in caplog.text


@pytest.mark.parametrize("moves, words", [
    ({"train": "all/train", "val": "all/test"}, ["all/ would be a class, and test/, train/ in it name splits"]),
    ({"train": "cats/train", "val": "cats/val"}, ["cats/ would be a class, and train/, val/ in it name splits"]),
    ({"train": "train/train", "val": "train/val"}, ["holds train/: train/ names a split", "val is not there"]),
    ({"train/class0": "cats_train/0", "train/class1": "cats_test/0", "train/class2": "dogs_train/0",
      "val": "dogs_test"}, ["cats_train/, dogs_train/ mean the same split"]),
    ({"train": "train", "val": "train_2"}, ["train/, train_2/ mean the same split"]),
    ({"train": "train", "val": "bus"}, ["holds bus/, train/", "train/ names a split", "val is not there"]),
    ({"train": "bus", "val": "val"}, ["holds bus/, val/", "train is not there"]),
    ({"train": "freight_train", "val": "bullet_train"}, ["bullet_train/, freight_train/ mean the same split"]),
], ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "")
def test_names_of_splits_are_never_classes(moves, words, tmp_path):
    root = moved(tmp_path / "source", tmp_path / "a", moves)
    with pytest.raises(DataError) as error:
        images.load("mine", root)
    said = str(error.value)
    assert f"{root} holds" in said and "Put the images into train/<class>/ and val/<class>/" in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize("name", ["train_station", "bullet_train", "test_tube", "trainers", "valley", "invalid"])
def test_classes_may_have_such_words_in_their_names(name, tmp_path):
    root = write_images(tmp_path / "a") / "train"
    (root / "class1").rename(root / name)
    assert name in images.load("mine", root)["train"].classes


@pytest.mark.parametrize("ending", ["gif", "jfif", "GIF", "bmp", "tif", "WebP", "avif", "jpe", "ppm", "tga"])
def test_every_image_that_is_opened_is_taken(ending, tmp_path):
    root = write_images(tmp_path / "a")
    saved(root / "train" / "class0" / f"more.{ending}", "L", format=Image.registered_extensions()[f".{ending.lower()}"])
    train = images.load("mine", root)["train"]
    assert len(train) == 25
    assert all(train.read(source).mode == "RGB" for source in train.sources[:9])
    assert len(images.image_files(root)) == 37


def test_what_is_left_out_is_counted_by_its_endings(tmp_path, caplog):
    root = write_images(tmp_path / "a")
    for name in ("x.heic", "y.HEIC", "z.npy", "boxes", ".hidden"):
        (root / "train" / "class1" / name).write_bytes(b"")
    images.load("mine", root)
    assert f"{root / 'train'}: left out by their endings: 2 .heic, 1 without one, 1 .npy (taken are" in caplog.text
    assert "hidden" not in caplog.text and caplog.text.count("left out") == 1
    images.image_files(root / "train" / "class1")
    assert caplog.text.count("2 .heic, 1 without one, 1 .npy") == 2


def test_hidden_and_system_folders_are_no_classes_and_hold_no_data(tmp_path, caplog):
    """At any depth, for every reader of folders."""
    alone, root = write_images(tmp_path / "a", inner="x"), write_images(tmp_path / "b", inner="x")
    write_images(tmp_path / "c"), write_librispeech(tmp_path / "speech"), write_digits(tmp_path / "digits")
    for name in (".ipynb_checkpoints", *SYSTEM):
        for place in (root, root / "train", root / "val", root / "val/class0", root / "val/class0/x",
                      tmp_path / "speech/train-clean-100/7", tmp_path / "digits", tmp_path / "texts"):
            shutil.copytree(tmp_path / "c/train/class1", place / name)
            shutil.copy(tmp_path / "c/train/class1/0.png", place / f"._{name}.png")
            soundfile.write(place / name / "7-9-0000.wav", tone(300, 0.3), 8000)
            shutil.copy(place / name / "7-9-0000.wav", place / "._7-9-0000.wav")
            for file in ("7-9.trans.txt", "0.fasta", "1.txt"):
                (place / name / file).write_text("7-9-0000 OTHER\n")
    expected, found = images.load("mine", alone), images.load("mine", root)
    for split in expected:
        assert found[split].classes == expected[split].classes
        assert [*found[split].sources] == [*expected[split].sources]
    assert images.image_files(root) == images.image_files(alone)
    spoken = official(["train-clean-100"], str(tmp_path / "speech"), Faults("error", ""))
    assert [each.text for each in spoken] == [*TEXTS]
    assert len(recordings(str(tmp_path / "digits"), Faults("error", ""))) == 120
    assert len(audio_files(str(tmp_path / "digits"), "input")) == 120 and fasta_files(tmp_path / "texts") == []
    (tmp_path / "texts/1.txt").write_text("text")
    assert text_files(tmp_path / "texts") == [tmp_path / "texts/1.txt"] and "left out" not in caplog.text


# ---- single images -------------------------------------------------------------------------------------------------


def saved(path, mode, **options):
    grey = np.tile(np.arange(0, 256, 16, np.uint8), (16, 1))
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    image.save(path, **options)
    return grey, path


@pytest.mark.parametrize("mode, suffix", [
    ("L", "png"), ("1", "png"), ("P", "png"), ("LA", "png"), ("RGBA", "png"), ("I;16", "png"), ("CMYK", "jpg"),
    ("L", "jpg"), ("RGB", "webp")])
def test_every_kind_of_image_becomes_rgb(mode, suffix, tmp_path):
    options = {"quality": 100} if suffix != "png" else {}
    grey, path = saved(tmp_path / f"image.{suffix}", mode, **options)
    found = images.read(path)
    assert found.mode == "RGB" and found.size == (16, 16)
    tolerance = {"png": 0, "jpg": 8, "webp": 8}[suffix] if mode != "1" else 255   # black and white, dithered
    assert np.abs(np.asarray(found, int) - grey[..., None]).max() <= tolerance
    assert abs(np.asarray(found, float).mean() - grey.mean()) < 4


TURNED = [lambda x: x, np.fliplr, lambda x: np.rot90(x, 2), np.flipud, lambda x: x.swapaxes(0, 1), np.rot90,
          lambda x: np.rot90(x, 2).swapaxes(0, 1), lambda x: np.rot90(x, -1)]      # what is stored, by orientation - 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_reader_turns_an_image_upright(orientation, tmp_path):
    """As phones write photographs: the pixels as the sensor lies, and an EXIF tag."""
    upright = np.asarray(picture(0, 0, 20))[:, :12].copy()
    stored, exif = Image.fromarray(np.ascontiguousarray(TURNED[orientation - 1](upright))), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for ending in ("png", "tif", "webp"):
        stored.save(tmp_path / f"a.{ending}", exif=exif, **({"lossless": True} if ending == "webp" else {}))
        assert np.array_equal(np.asarray(images.read(tmp_path / f"a.{ending}")), upright), ending
    content = (tmp_path / "a.png").read_bytes()
    assert np.array_equal(np.asarray(images.read(content, "bytes")), upright)
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / "set" / split / label).mkdir(parents=True)
            shutil.copy(tmp_path / "a.png", tmp_path / "set" / split / label)
    found = images.load("mine", tmp_path / "set")["val"]
    assert np.array_equal(np.asarray(found.read(found.sources[0])), upright)
    assert np.array_equal(squared(found, 1, 12, 3), upright[4:16])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "a.png", content)
        add(tar, "a.cls", b"0")
    files = {split: str(tmp_path / "a.tar") for split in ("train", "validation")}
    source = Streamed(HUB | {"data_files": files, "validation_images": 1})
    (example,), = source.asked("val", Plan(1))
    assert np.array_equal(np.asarray(source.read(example.source)), upright)


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
                                  b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abcd\0\0\0\0"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_orientation_turns_nothing(exif, tmp_path):
    picture(0, 0).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(images.read(tmp_path / "a.png")), np.asarray(picture(0, 0)))


def test_files_that_are_no_whole_image_are_named(tmp_path):
    whole = tmp_path / "whole.jpg"
    picture(0, 0, 64).save(whole)
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:whole.stat().st_size // 2])
    (tmp_path / "text.jpg").write_text("This is no image.")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "fractions.tiff")
    for name, words in (("cut.jpg", "truncated"), ("text.jpg", "no image"), ("empty.png", "the file is empty"),
                        ("gone.jpg", "No such file"), ("fractions.tiff", "mode F")):
        with pytest.raises(images.Unreadable, match=f"{name} cannot be read as an image: .*{words}"):
            images.read(tmp_path / name)


# ---- batches by workers --------------------------------------------------------------------------------------------


def noisy(image):
    """Draws from all the generators that augmentations use."""
    drawn = random.random() + np.random.rand() + torch.rand(())
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() + drawn


def together(pixels, labels, draws):
    return {"images": pixels, "labels": labels, "first": torch.tensor(draws[0].random())}


def batches(source, plan, workers=0, skip=False, split="train", repeats=1):
    micro = Micro(source.read, noisy, together, plan.rng)
    return list(Loader(workers, skip)(source.asked(split, plan, repeats), micro))


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a[key], b[key]) for a, b in zip(one, other) for key in a)


@pytest.fixture
def folder(tmp_path):
    return Folders(images.load("mine", write_images(tmp_path / "folder")))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_batches_do_not_depend_on_the_number_of_workers(folder):
    alone = batches(folder, Plan(6, seed=3))
    assert len(alone) == 4 and not torch.equal(alone[0]["images"], alone[1]["images"])
    for workers in (1, 3):
        assert same(batches(folder, Plan(6, seed=3), workers), alone)
    assert not same(batches(folder, Plan(6, seed=3, epoch=1)), alone)


def test_batches_do_not_depend_on_where_reading_starts_or_on_the_processes(folder):
    alone = batches(folder, Plan(6))
    assert same(batches(folder, Plan(6, start=2), workers=1), alone[2:])
    parts = [batches(folder, Plan(6, rank=rank, world=2)) for rank in (0, 1)]
    assert torch.equal(torch.cat([parts[0][1]["images"], parts[1][1]["images"]]), alone[1]["images"])


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_draws_nothing_from_the_generators_of_training(folder, workers):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batches(folder, Plan(6), workers)
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_without_workers_nothing_is_augmented_beside_training(folder):
    micro = Micro(folder.read, noisy, together, Plan(6).rng)
    with pytest.raises(ConfigError, match="trainer.prefetch=0, or task.workers=1"):
        list(read_ahead(Loader(0, False)(folder.asked("train", Plan(6)), micro), 2))
    assert len(list(read_ahead(Loader(1, False)(folder.asked("train", Plan(6)), micro), 2))) == 4


def test_an_image_comes_as_often_as_asked_with_other_draws(folder):
    found = batches(folder, Plan(6), repeats=3)
    assert len(found) == 4                                   # the epoch keeps its length
    first = found[0]
    assert first["labels"].tolist() == [label for label in first["labels"][::3].tolist() for _ in range(3)]
    shifts = first["images"][0] - first["images"][1]         # the same image, another draw added to it
    assert shifts.std() < 1e-5 and shifts.mean() != 0


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_end_a_run_or_are_left_out_named_and_counted(workers, tmp_path):
    root = write_images(tmp_path)
    bad = root / "train" / "class1" / "3.png"
    bad.write_text("This is no image.")
    source = Folders(images.load("mine", root))
    with pytest.raises(DataError) as error:
        batches(source, Plan(6), workers)
    assert str(bad) in str(error.value) and "task.unreadable=skip" in str(error.value)
    assert "Traceback" not in str(error.value) and type(error.value) is DataError
    loader, plan = Loader(workers, True), Plan(6)
    with pytest.warns(UserWarning, match=f"{bad.name} cannot be read as an image: no image. It is left out"):
        found = list(loader(source.asked("train", plan), Micro(source.read, noisy, together, plan.rng)))
    assert sum(len(batch["labels"]) for batch in found) == 23 and len(loader.unreadable) == 1 == loader.left_out
    list(loader(source.asked("train", plan), Micro(source.read, noisy, together, plan.rng)))   # warns no more
    assert len(loader.unreadable) == 1 and loader.left_out == 2


# ---- shards --------------------------------------------------------------------------------------------------------


HUB = {"name": "webdataset", "config": None, "split": "train", "validation": "validation", "image": "png",
       "label": "cls", "classes": 3, "data_files": None, "buffer": 0, "validation_images": 12}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


def taken(source, plan, count, workers=0):
    micro = Micro(source.read, noisy, together, plan.rng)
    stream = Loader(workers, False)(source.asked("train", plan), micro)
    found = [next(stream) for _ in range(count)]
    stream.close()
    return found


@pytest.mark.parametrize("buffer", [0, 5])
def test_shards_are_streamed_shared_and_resumed(buffer, shards):
    source = Streamed(HUB | {"data_files": shards, "buffer": buffer})
    assert source.length("train") is None and source.length("val") == 12 and source.classes == ("0", "1", "2")
    alone = taken(source, Plan(4), 7)                        # 12 images: the third pass has begun
    assert same(taken(source, Plan(4), 7, workers=2), alone) and same(taken(source, Plan(4, start=4), 3), alone[4:])
    ranks = [list(zip(range(3), source.asked("train", Plan(4, rank=rank, world=2)))) for rank in (0, 1)]
    keys = [{example.source[1] for _, batch in part for example in batch} for part in ranks]
    assert len(keys[0]) == len(keys[1]) == 6 and not keys[0] & keys[1]
    rows = [{example.row for _, batch in part for example in batch} for part in ranks]
    assert not rows[0] & rows[1]


def test_streamed_validation_is_read_in_order_by_all(shards):
    source = Streamed(HUB | {"data_files": shards, "validation_images": 9})
    keys = lambda plan: [example.source[1] for batch in source.asked("val", plan) for example in batch]
    alone, both = keys(Plan(4)), [key for rank in (0, 1) for key in keys(Plan(4, rank=rank, world=2))]
    assert len(alone) == 9 and both == alone


def test_mistakes_in_shards_are_named(shards, tmp_path):
    with pytest.raises(ConfigError, match="set task.hub.classes"):
        Streamed(HUB | {"data_files": shards, "classes": None})
    with pytest.raises(DataError, match="cls = 2 is none of the 2 classes"):
        list(Streamed(HUB | {"data_files": shards, "classes": 2}).asked("val", Plan(12)))
    with pytest.raises(ConfigError, match="no column 'jpg'; it has .*png"):
        list(Streamed(HUB | {"data_files": shards, "image": "jpg"}).asked("val", Plan(12)))
    cut = tmp_path / "cut-0.tar"
    cut.write_bytes(Path(shards["train"].replace("*", "0")).read_bytes()[:5000])
    with pytest.raises(DataError, match="cut-0.tar: damaged behind its 3 examples .unexpected end of data.*unreadable"):
        Streamed(HUB | {"data_files": {"train": str(cut)}})
    with pytest.raises(DataError, match="no file fits '.*none-..tar'"):
        Streamed(HUB | {"data_files": shards | {"train": str(tmp_path / "none-*.tar")}})
    with pytest.raises(DataError, match="names train but not 'validation'"):
        Streamed(HUB | {"data_files": {"train": shards["train"]}})
    with pytest.raises(DataError, match="validation_images = 13, but validation holds 12 images"):
        Streamed(HUB | {"data_files": shards, "validation_images": 13})
    with pytest.raises(DataError, match="someone/no-such-images cannot be read from the Hugging Face hub"):
        Streamed(HUB | {"name": "someone/no-such-images"})


def damage(content, headers):
    """Each a shard that readers of tar files take for one of 5 of its 6 examples."""
    at = headers[10]
    yield "a byte of a header", content[:at + 100] + bytes([content[at + 100] ^ 4]) + content[at + 101:]
    yield "a header of zeros", content[:at] + bytes(512) + content[at + 512:]
    yield "cut before a header", content[:at]
    yield "cut in a header", content[:at + 200]
    yield "cut in an image", content[:at + 600]


def test_damaged_shards_are_refused_or_left_out_and_counted(shards, tmp_path):
    whole = Path(shards["validation"].replace("*", "0"))
    with tarfile.open(whole) as tar:
        headers = [member.offset for member in tar]
    for what, content in damage(whole.read_bytes(), headers):
        (tmp_path / "bad.tar").write_bytes(content)
        files = shards | {"validation": [str(tmp_path / "bad.tar"), str(whole)]}
        with pytest.raises(DataError, match="bad.tar: .*(damaged|cut at byte)"):
            Streamed(HUB | {"data_files": files, "validation_images": 6})
        with pytest.warns(UserWarning, match="1 of 2 shards are damaged and left out: .*bad.tar"):
            source = Streamed(HUB | {"data_files": files, "validation_images": 6}, skip=True)
        assert sum(map(len, source.asked("val", Plan(4)))) == 6, what
    (tmp_path / "val-0.tar").write_bytes(whole.read_bytes())
    (tmp_path / "index.json").write_text('{"shardlist": [{"url": "val-0.tar", "nsamples": 7}]}')
    with pytest.raises(DataError, match="it holds 6 examples, but index.json says 7"):
        Streamed(HUB | {"data_files": shards | {"validation": str(tmp_path / "val-0.tar")}})


@pytest.mark.parametrize("members, message", [
    ({"cls": b"1"}, "there is no png"),
    ({"png": b"image", "cls": b"dog"}, "a label is not a whole number .b'dog'"),
    ({"png": b"image", "cls": b"1.5"}, "a label is not a whole number .b'1.5'"),
    ({"png": b"image", "cls": b"1", "pth": b""}, "z.pth is pickled"),
])
def test_odd_examples_of_shards_are_named(members, message, tmp_path):
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for key in map(str, range(6)):
            add(tar, f"{key}.png", b"image")
            add(tar, f"{key}.cls", b"1")
        for kind, content in members.items():
            add(tar, f"z.{kind}", content)
    files = dict.fromkeys(("train", "validation"), str(tmp_path / "odd.tar"))
    with pytest.raises(DataError, match=message):
        list(Streamed(HUB | {"data_files": files, "validation_images": 7}).asked("val", Plan(4)))


def test_odd_folders_are_named(tmp_path):
    root = write_images(tmp_path / "images", train=1, val=1)
    (root / "train" / "class0" / "again").symlink_to(root / "train")
    with pytest.raises(DataError, match="class0/again/class0 is, or lies behind, a link to a folder above it"):
        images.load("images", root)
    (root / "train" / "class0" / "again").unlink()
    os.mkfifo(root / "train" / "class0" / "pipe.png")
    found = images.load("images", root)["train"]
    with pytest.raises(images.Unreadable, match="pipe.png cannot be read as an image: a pipe, socket or device"):
        [found.read(source) for source in found.sources]
    os.mkdir(os.fsencode(root / "train") + b"/\xff")
    with pytest.raises(DataError, match="the class folder .* is not UTF-8"):
        images.load("images", root)


# ---- real images and the data command ------------------------------------------------------------------------------


@real_data
@pytest.mark.parametrize("name, classes, train, val", [
    ("imagenette2-224", 10, 1500, 500), ("tiny-imagenet-200", 20, 2000, 1000), ("cifar10", 10, 3000, 600)])
def test_real_folders(name, classes, train, val):
    if not (Path(os.environ["CRT_DATA"]) / "images" / name).is_dir():
        pytest.skip(f"images/{name} is not in CRT_DATA")
    found = images.load(name)
    assert len(found["train"].classes) == classes and len(found["train"]) == train and len(found["val"]) == val
    assert all(part.read(part.sources[i]).mode == "RGB" for part in found.values() for i in range(0, len(part), 50))


def test_the_data_command_knows_own_folders(tmp_path, capsys):
    root = write_images(tmp_path / "images" / "stripes", train=2, val=1)
    assert main(["list", "--dir", str(tmp_path)]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("images/stripes")]
    assert len(listed) == 1 and "present" in listed[0] and "your own" in listed[0]
    run = partial(main, ["verify", "images/stripes", "--dir", str(tmp_path)])
    assert run() == 0 and "9 files" in capsys.readouterr().out
    (root / "val" / "class0" / "0.png").write_bytes(b"no image")
    assert run() == 1
    assert "val/class0/0.png cannot be read as an image" in capsys.readouterr().out
