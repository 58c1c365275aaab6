"""task=mae as a user types it, and what task=imagenet takes of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import check_refused
from small_images import write_images
from stopping import stopped_and_continued
from transformers import AutoModelForPreTraining, ViTMAEForPreTraining, ViTMAEModel

from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.mae import MAE

SIZES = {"patch": 4, "width": 32, "depth": 2, "heads": 2, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
HUB = {"name": None, "config": None, "split": "train", "validation": "validation", "image": "image", "label": "label",
       "classes": None, "data_files": None, "buffer": 0, "validation_images": 4}
OPTIONS = {"dataset": "mine", "data_dir": None, "source": "files", "hub": HUB, "held_out": 0.0,
           "unreadable": "error", "workers": 0, "model": None, "sizes": SIZES, "size": 16, "init": "scratch",
           "mask_share": 0.75, "normalised": True,
           "augment": {"scale": [0.5, 1.0], "flip": 0.5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), size=16)


@pytest.fixture
def typed(typed, folder, monkeypatch, tmp_path, one_thread):
    """Runs a command line in this process on the folder: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        monkeypatch.delenv("CRT_DATA", raising=False)
        base = [f"task.data_dir={folder}", "task.size=16", *[f"task.sizes.{k}={v}" for k, v in SIZES.items()],
                "task.workers=0", "trainer.batch=8", "trainer.epochs=2", "attention=exact"]
        given = {a.split("=")[0] for a in args}
        own = [b for b in base if b.split("=")[0] not in given]
        return typed("task=mae", "logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return run


def task_of(folder, **options):
    return MAE(**OPTIONS | {"data_dir": str(folder)} | options)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def test_digits_need_no_data_and_their_patches_are_predicted(typed, tmp_path):
    """Better than a patch's own mean colour, which has a loss of 1."""
    code, out, err = typed("task.data_dir=null", "task.size=null", "task.sizes.patch=null", "trainer.lr=3e-3",
                           "trainer.batch=64")
    progress = [line for line in err.splitlines() if line.startswith("step ")]      # where it takes 10 s or more
    assert code == 0 and err.splitlines() == progress, err
    assert "mae: loss" in out
    last = records(tmp_path / "run")[-1]
    assert last["final"] and last["split"] == "val" and last["loss"] < 0.9


def test_what_is_kept_is_a_model_of_transformers(typed, tmp_path, folder):
    assert typed("attention=exact")[0] == 0
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "run" / "model").eval()
    assert isinstance(model, ViTMAEForPreTraining)
    task = task_of(folder)
    with torch.no_grad():
        found = task.evaluate(model, "val", Reader(task, batch=8))
    assert found["loss"] == pytest.approx(records(tmp_path / "run")[-1]["loss"], rel=1e-5)


def test_a_new_model_knows_where_its_patches_are(folder):
    """Encoder and decoder have positions, so that predictions of two masked patches differ."""
    model = task_of(folder).build(Mechanism.of("exact")).eval()
    noise = torch.arange(16.).flip(0)[None]                  # the last four patches are seen
    predicted = model(torch.zeros(1, 3, 16, 16), noise=noise).logits[0]
    assert (predicted[0] - predicted[1]).abs().max() > 1e-3
    state = model.vit(torch.zeros(1, 3, 16, 16), noise=noise).last_hidden_state[0]
    assert (state[1] - state[2]).abs().max() > 1e-3


def test_masks_belong_to_the_row(folder):
    """Whatever batch it is in; the same at every evaluation, others in every epoch."""
    task = task_of(folder)
    four, six = (torch.cat([b["noise"] for b in task.batches("val", Plan(n))]) for n in (4, 6))
    assert torch.equal(four, six) and four.shape == (12, 16) and not torch.equal(four[0], four[1])
    train = [torch.cat([b["noise"] for b in task.batches("train", Plan(8, epoch=e))]) for e in (0, 0, 1)]
    assert torch.equal(train[0], train[1]) and not torch.equal(train[0], train[2])


def test_a_classifier_begins_with_the_encoder(typed, tmp_path, folder, monkeypatch):
    """timm's model of a run of task=mae has the outputs of transformers' encoder."""
    assert typed()[0] == 0
    theirs = ViTMAEModel.from_pretrained(tmp_path / "run" / "model", mask_ratio=0.0).eval()
    description = vision.checkpoint_of(str(tmp_path / "run")).description
    assert (description.size, description.options["patch_size"]) == (16, 4)
    with_classes = replace(description, classes=("a", "b", "c"))
    ours = vision.build(with_classes, Mechanism.of("exact"), str(tmp_path / "run")).eval()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        wanted = theirs(images, noise=torch.arange(16.).expand(3, 16)).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_numbers(typed, tmp_path, monkeypatch):
    args = ["attention=favorpp", "task.workers=2", "trainer.steps=7", "trainer.log_every=2"]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, MAE, 5, *args)
    assert records(tmp_path / "stopped") == records(tmp_path / "run")
    one, two = (checkpoint.load_tensors(tmp_path / d / "model" / "model.safetensors") for d in ("run", "stopped"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_a_run_goes_on_with_its_noise(typed, tmp_path):
    assert typed("attention=favorpp", "features.m=8")[0] == 0
    code, _, err = typed("attention=favorpp", "features.m=8", f"task.init={tmp_path / 'run'}", "task.size=null",
                         "seed=4", "trainer.steps=0", directory="next")
    assert code == 0, err
    one, two = (checkpoint.load_tensors(tmp_path / d / "model" / "model.safetensors") for d in ("run", "next"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    code, _, err = typed("attention=exact", f"task.init={tmp_path / 'run'}", "task.size=null", directory="other")
    assert code == 2 and "trained with another attention" in err


@pytest.mark.parametrize("args, words", [
    (["task.size=18"], ["task.size=18: expected a multiple of the patch size, 4"]),
    (["task.sizes.width=33"], ["task.sizes.width=33: expected a multiple of 4 and heads=2"]),
    (["task.sizes.decoder_width=18"], ["task.sizes.decoder_width=18"]),
    (["task.mask_share=0.99"], ["no visible patch of 16"]),
    (["task.init=uptrain"], ["set task.model=..."]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_the_loss_of_left_out_images_is_a_mean_over_the_others(folder, tmp_path):
    root = write_images(tmp_path, size=16)
    (root / "val" / "class0" / "0.png").write_bytes(b"no image")
    task = task_of(root, unreadable="skip")
    model = task.build(Mechanism.of("exact")).eval()
    with pytest.warns(UserWarning, match="0.png: .* Skipped"), torch.no_grad():
        found = [task.evaluate(model, "val", Reader(task, batch=batch))["loss"] for batch in (5, 12)]
    assert np.isclose(*found)
    assert task.weight({"pixel_values": torch.zeros(5, 3, 16, 16)}) == 5.0
