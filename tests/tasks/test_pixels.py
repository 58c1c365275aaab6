"""task=pixels: images as rows of values, bits per dimension, and images drawn and completed by `infer`."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import check_refused

from crt_exp import infer
from crt_exp.data.images import crop_square
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.lra import Pixels

SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
OPTIONS = {"dataset": "digits", "data_dir": None, "size": None, "channels": None, "held_out": 0.05, "evaluated": 20,
           "preset": None, "sizes": SIZES, "positions": None, "tied": None, "dropout": 0.0, "checkpointing": False,
           "init": "scratch", "calibration": 2}


def task_of(**options):
    return Pixels(**OPTIONS | options)


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


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_values_come_row_by_row_with_the_channels_of_a_pixel_together(tmp_path):
    root = folder_of(tmp_path, side=8)
    task = task_of(data_dir=str(root), size=8, held_out=0.25)
    batch = next(iter(task.batches("test", Plan(8))))
    values = np.asarray(Image.open(root / "val" / "a" / "0.png"))[:, 1:9]  # the middle square
    assert task.row_length == 192 and batch["labels"].shape == (8, 192)
    assert batch["labels"][0].tolist() == values.reshape(-1).tolist()
    assert batch["tokens"][0].tolist() == [256, *values.reshape(-1)[:-1]]
    grey = task_of(data_dir=str(root), size=8, channels=1, held_out=0.25)
    assert grey.row_length == 64 and grey.vocabulary["channels"] == 1


def test_smaller_images_are_means_of_the_pixels():
    values = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
    found = crop_square(Image.fromarray(values), 8, 1, "x")[..., 0]
    assert np.abs(found - values.reshape(8, 2, 8, 2).mean((1, 3))).max() <= 0.5


def test_bits_are_those_of_the_values():
    task = task_of()
    model = task.build(Mechanism.of("uniform")).eval()
    found = task.evaluate(model, "test", Reader(task, batch=7))
    with torch.no_grad():
        bits = [torch.nn.functional.cross_entropy(model(batch["tokens"])[0], batch["labels"][0]) / np.log(2)
                for batch in task.batches("test", Plan(1))]
    assert found["dimensions"] == 20 * 64
    assert found["bits_per_dim"] == pytest.approx(np.mean(bits), rel=1e-5)
    seen = np.concatenate([task.values("test", i) for i in range(20)])
    assert found["unigram_bits_per_dim"] == pytest.approx(-np.log2(task.unigram[seen]).mean(), rel=1e-6)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(run_task):
    def run(*args, directory="run"):
        options = ["trainer.steps=4", "features.m=8", "attention=favorpp", "task.evaluated=10",
                   *[f"+task.sizes.{key}={value}" for key, value in SIZES.items()]]
        return run_task("pixels", options, args, directory)
    return run


def test_it_learns_and_images_are_drawn_and_completed(typed, tmp_path, capsys):
    code, out, err = typed("trainer.steps=40", "trainer.lr=1e-2")
    assert code == 0 and "pixels: bits_per_dim" in out, err
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["bits_per_dim"] < last["unigram_bits_per_dim"] - 0.1 and last["metric"] == "bits_per_dim"
    values = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(values).save(tmp_path / "half.png")
    words = [f"run={tmp_path / 'run'}", f"output={tmp_path / 'out.png'}", "n=3"]
    assert infer.main(words) == 0
    assert np.asarray(Image.open(tmp_path / "out.png")).shape[:2] == (100, 3 * 98 + 2)  # a value: 12 x 12 pixels
    assert infer.main([*words, f"prompt={tmp_path / 'half.png'}", "seed=5"]) == 0
    found = np.asarray(Image.open(tmp_path / "out.png"))
    first, *drawn = (found[2:98:12, left:left + 96:12, 0] for left in range(2, 4 * 98, 98))
    assert (first == values).all() and (found[2:14, 2:14] == values[0, 0]).all()
    for image in drawn:                                      # the upper half is the image's, the lower one is drawn
        assert (image[:4] == values[:4]).all() and (image[4:] != values[4:]).any()
    capsys.readouterr()
    assert infer.main(words[:1]) == 2 and "output=None: expected FILE.png" in capsys.readouterr().err
    assert infer.main([*words, "length=10"]) == 2 and "length=10: expected 64" in capsys.readouterr().err


@pytest.mark.parametrize("args, words", [
    (["task.size=16"], ["task.size=16: image 0 has 8 x 8 pixels"]),
    (["task.dataset=photos"], ["task.dataset=photos: ", "train/<class>/"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_a_folder_of_small_images(typed, tmp_path):
    folder = folder_of(tmp_path, side=8)
    code, _, err = typed(f"task.data_dir={folder}", "task.held_out=0.25")
    assert code == 2 and "train/a/0.png has 10 x 8 pixels" in err
