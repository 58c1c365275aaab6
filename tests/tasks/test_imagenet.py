"""task=imagenet as a user types it: training, what it keeps, where its weights come from, and what is refused."""

import json
import os
from dataclasses import replace

import pytest
import timm
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from small_images import picture, write_images
from stopping import stopped_and_continued
from test_composed import composed
from timm.optim import param_groups_layer_decay

from crt_exp import describe_attention
from crt_exp.config import CONF, ConfigError
from crt_exp.data import DataError
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.runner import checkpoint
from crt_exp.runner.configuration import check_composed
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.imagenet import ImageNet

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: official files are needed")
SIZES = {"patch": 4, "width": 32, "depth": 2, "heads": 2}
AUGMENT = {"scale": [0.5, 1.0], "flip": 0.5, "policy": None, "erase": 0.0, "repeats": 1, "mixup": 0.0, "cutmix": 0.0}
HUB = {"name": None, "config": None, "split": "train", "validation": "validation", "image": "png", "label": "cls",
       "classes": 3, "data_files": None, "buffer": 0, "validation_images": 12}
OPTIONS = {"dataset": "mine", "data_dir": None, "source": "files", "hub": HUB, "held_out": 0.0,
           "unreadable": "error", "workers": 0, "model": None, "sizes": SIZES, "size": 12, "pool": None,
           "init": "scratch", "new_head": False, "crop": 1.0,
           "augment": AUGMENT, "smoothing": 0.1, "drop_path": 0.0, "layer_decay": 1.0}
RICH = ["task.augment.policy=rand-m9-mstd0.5-inc1", "task.augment.erase=0.5", "task.augment.mixup=0.8",
        "task.augment.cutmix=1.0", "task.augment.flip=0.5", "task.drop_path=0.2",
        "task.layer_decay=0.7"]
NO_SIZES = dict.fromkeys(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def typed(typed, folder, monkeypatch, tmp_path, one_thread):
    """Runs a command line in this process on the folder: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        monkeypatch.delenv("CRT_DATA", raising=False)
        base = [f"task.data_dir={folder}", "task.size=12", *[f"task.sizes.{k}={v}" for k, v in SIZES.items()],
                "task.workers=0", "trainer.batch=8", "trainer.epochs=2", "trainer.lr=2e-3", "features.m=8"]
        given = {a.split("=")[0] for a in args}
        own = [b for b in base if b.split("=")[0] not in given]
        if {"attention=exact", "attention=uniform"} & set(args):
            own.remove("features.m=8")
        if "task.model" in given or "task.init" in given:
            own = [b for b in own if not b.startswith("task.sizes")]
        return typed("task=imagenet", "logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return run


def task_of(folder, **options):
    return ImageNet(**OPTIONS | {"data_dir": str(folder)} | options)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def weights(directory, name="model"):
    return checkpoint.load_tensors(directory / "model" / f"{name}.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_the_default_needs_no_data_and_learns(typed, tmp_path, monkeypatch):
    """Digits: ten classes, so a tenth is what guessing gives."""
    sizes = [f"task.sizes.{key}=null" for key in SIZES]
    code, out, err = typed("task.data_dir=null", "task.size=null", "attention=favorpp", "features.m=16",
                           "trainer.epochs=2", "trainer.batch=32", "trainer.lr=5e-3", *sizes)
    progress = [line for line in err.splitlines() if line.startswith("step ")]      # where it takes 10 s or more
    assert code == 0 and err.splitlines() == progress, err
    assert "imagenet: accuracy" in out and "val, step 88" in out
    last = records(tmp_path / "run")[-1]
    assert last["final"] and last["split"] == "val" and 0.25 < last["accuracy"] < last["accuracy_top5"]


def test_what_is_kept_gives_the_recorded_numbers(typed, tmp_path, folder):
    """`load` takes weights, noise and classes; the weights load in timm alone, with exact attention."""
    assert typed("attention=favorpp")[0] == 0
    kept = vision.load(tmp_path / "run")
    assert kept.classes == ("class0", "class1", "class2") and not kept.model.training
    task = task_of(folder)
    with torch.no_grad():
        found = task.evaluate(kept.model, "val", Reader(task, batch=5))
        logits = kept.model(kept.transform(picture(1, 1))[None])
    last = records(tmp_path / "run")[-1]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-5) and found["accuracy"] == last["accuracy"]
    assert logits.shape == (1, 3)
    assert set(describe_attention(kept.model)["mechanism"].str.split(" ").str[0]) == {"favorpp"}
    plain = timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True)
    assert equal(dict(plain.state_dict()), weights(tmp_path / "run"))
    assert plain.pretrained_cfg["label_names"] == ["class0", "class1", "class2"]


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_numbers(typed, tmp_path, monkeypatch):
    args = [*RICH, "attention=favorpp", "task.workers=2", "trainer.steps=9", "trainer.log_every=2"]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, ImageNet, 5, *args)
    assert records(tmp_path / "stopped") == records(tmp_path / "run")
    for name in ("model", "attention"):
        assert equal(weights(tmp_path / "run", name), weights(tmp_path / "stopped", name))


def test_held_out_images_choose_the_weights(typed, tmp_path, folder):
    code, out, err = typed("attention=exact", "task.held_out=0.25", "trainer.select=best")
    assert code == 0 and "imagenet: accuracy" in out, err
    found = records(tmp_path / "run")
    assert [r["split"] for r in found if r["split"] != "train"] == ["held_out", "held_out", "val"]
    best = max((r for r in found if r["split"] == "held_out"), key=lambda r: r["accuracy"])
    assert found[-1]["best_step"] == best["step"]


def test_unreadable_images_are_left_out_and_counted(typed, tmp_path):
    root = write_images(tmp_path / "own")
    (root / "val" / "class1" / "0.png").write_text("This is no image.")
    (root / "train" / "class1" / "0.png").write_text("This is no image.")
    code, _, err = typed(f"task.data_dir={root}", "attention=exact")
    assert code == 2 and "class1/0.png: not a readable image" in err and "task.unreadable=skip" in err
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="class1/0.png: .* Skipped"):
        code, _, err = typed(f"task.data_dir={root}", "attention=exact", "task.unreadable=skip")
    assert code == 0, err
    assert records(tmp_path / "run")[-1]["unreadable_images"] == 1


# ---- where weights come from ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory, folder):
    """A run with exact attention, made without the command line."""
    root, task = tmp_path_factory.mktemp("exact"), task_of(folder)
    torch.manual_seed(1)
    model = task.build(Mechanism.of("exact"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.01)                   # sharp enough for attention to matter
    vision.save_model(task.description, task.mechanism, model.state_dict(), root)
    return root


@pytest.mark.slow
def test_a_run_of_the_same_attention_gives_its_noise(typed, tmp_path):
    assert typed("attention=favorpp", "trainer.steps=2")[0] == 0
    init = f"task.init={tmp_path / 'run'}"
    code, _, err = typed("attention=favorpp", init, "seed=5", "trainer.steps=0", directory="next")
    assert code == 0, err
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "next"))
    assert equal(weights(tmp_path / "run", "attention"), weights(tmp_path / "next", "attention"))
    code, _, err = typed("attention=favorp", init, directory="other")
    assert code == 2 and f"task.init={tmp_path / 'run' / 'model' / 'model.safetensors'}" in err, err


def test_positions_are_interpolated_to_other_sizes(typed, tmp_path, exact_run):
    code, _, err = typed("attention=favorpp", f"task.init={exact_run}", "task.size=24", "trainer.steps=0")
    assert code == 0, err
    old, new = weights(exact_run), weights(tmp_path / "run")
    assert old["pos_embed"].shape == (1, 1 + 9, 32) and new["pos_embed"].shape == (1, 1 + 36, 32)
    assert torch.equal(old["pos_embed"][:, 0], new["pos_embed"][:, 0])


def test_weights_of_timm_in_a_folder_and_in_a_file(tmp_path, folder):
    """As `hf download timm/...` leaves them, and as training scripts save them."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    (tmp_path / "config.json").write_text(json.dumps({
        "architecture": "vit_tiny_patch16_224", "num_classes": 3, "pretrained_cfg": {
            "input_size": [3, 224, 224], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "num_classes": 3}}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "saved.pth")
    for options in ({"init": str(tmp_path)}, {"init": str(tmp_path / "saved.pth"), "model": "vit_tiny_patch16_224"}):
        task = task_of(folder, sizes=NO_SIZES, size=None, **options)
        assert equal(task.build(Mechanism.of("exact")).state_dict(), model.state_dict())
    assert task_of(folder, init=str(tmp_path), sizes=NO_SIZES, size=None).description.mean == (0.5, 0.5, 0.5)


def test_a_config_that_says_too_little(tmp_path, folder):
    (tmp_path / "config.json").write_text(json.dumps({
        "architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}))
    with pytest.raises(DataError, match="not a configuration of timm: KeyError: 'input_size'"):
        task_of(folder, init=str(tmp_path), sizes=NO_SIZES, size=None)


def test_weights_of_the_hub_that_are_not_here(folder):
    task = task_of(folder, model="vit_tiny_patch16_224.augreg_in21k", init="pretrained", sizes=NO_SIZES, size=None,
                   new_head=True)
    with pytest.raises(DataError, match="no weights .*hf download timm/vit_tiny_patch16_224.augreg_in21k"):
        task.build(Mechanism.of("exact"))
    with pytest.raises(ConfigError, match="other classes .21843, expected 3.; task.new_head=true"):
        replace(task, new_head=False).build(Mechanism.of("exact"))


@pytest.mark.parametrize("change, options, words", [
    ({"classes": 4}, {}, "other classes .3, expected 4.; task.new_head=true"),
    ({"names": True}, {}, "other classes .class0, expected other0.; task.new_head=true"),
    ({}, {"sizes": SIZES | {"width": 64}}, "task.sizes: only for a new model"),
    ({}, {"file": True, "sizes": SIZES | {"width": 64}}, "does not match task.model .*size mismatch.* 32"),
    ({}, {"file": True, "sizes": SIZES | {"depth": 1}}, "does not match task.model .*blocks.1"),
    ({}, {"file": True, "sizes": SIZES | {"depth": 3}}, "does not match task.model .*blocks.2"),
], ids=["number of classes", "names of classes", "width of a run", "width of a file", "less deep", "deeper"])
def test_checkpoints_that_do_not_fit(change, options, words, tmp_path, exact_run):
    root = write_images(tmp_path / "own", classes=change.get("classes", 3))
    if "names" in change:
        for path in [*(root / "train").iterdir(), *(root / "val").iterdir()]:
            path.rename(path.with_name(path.name.replace("class", "other")))
    options = {"sizes": NO_SIZES} | options
    init = exact_run / "model" / "model.safetensors" if options.pop("file", False) else exact_run
    with pytest.raises((ConfigError, DataError), match=words):
        task_of(root, init=str(init), **options).build(Mechanism.of("exact"))


def test_a_new_head_stands_on_the_same_encoder(tmp_path, exact_run):
    task = task_of(write_images(tmp_path / "own", classes=4), init=str(exact_run), sizes=NO_SIZES, new_head=True)
    model, old = task.build(Mechanism.of("exact")), weights(exact_run)
    assert model.head.weight.shape == (4, 32)
    encoder = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    assert all(torch.equal(tensor, old[name]) for name, tensor in encoder.items())


# ---- the recipe's parts --------------------------------------------------------------------------------------------


def test_layer_wise_rates_are_those_of_timm(folder):
    task = task_of(folder, layer_decay=0.65)
    model = task.build(Mechanism.of("favorpp", m=4))
    groups = param_groups_layer_decay(model, layer_decay=0.65)
    theirs = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    ours = {id(p): task.lr_scale(name) for name, p in model.named_parameters()}
    assert ours == pytest.approx(theirs) and len(set(ours.values())) == 4 and max(ours.values()) == 1


def test_positions_and_tokens_do_not_decay(folder):
    task = task_of(folder)
    for name, parameter in task.build(Mechanism.of("exact")).named_parameters():
        assert task.decays(name, parameter) == (name.endswith("weight") and parameter.dim() > 1)


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_mixed_targets_are_distributions(rows, folder):
    task = task_of(folder, augment=AUGMENT | {"mixup": 0.8, "cutmix": 1.0})
    batch = next(iter(task.batches("train", Plan(rows, seed=2))))
    assert batch["targets"].shape == (rows, 3) and torch.allclose(batch["targets"].sum(1), torch.ones(rows))
    model = task.build(Mechanism.of("exact"))
    assert task.loss(model, batch).isfinite()
    again = next(iter(task.batches("train", Plan(rows, seed=2))))
    assert torch.equal(batch["images"], again["images"])


def test_stochastic_depth_reaches_the_last_block(folder):
    model = task_of(folder, drop_path=0.3).build(Mechanism.of("favorpp", m=4))
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONF / "experiment").glob("*.yaml"))
                                  if "override /task: imagenet" in path.read_text()])
def test_experiments_fit_their_models(name, tmp_path):
    """Each recipe composes, and describes a model that timm makes; its images are ours."""
    cfg = composed(f"experiment={name}", "attention=favorpp")
    check_composed(cfg)
    given = OmegaConf.to_container(cfg.task, resolve=True)
    options = {key: value for key, value in given.items() if not key.startswith("_")}
    task = ImageNet(**options | {"data_dir": str(write_images(tmp_path, classes=2, train=2, val=1))})
    assert task.description.size == {"vit_1024": 1024, "crt_vit_steps": 1024}.get(name, 224)


# ---- what a user can get wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.data_dir=/nowhere"], ["/nowhere is not there"]),
    (["task.data_dir=null", "task.dataset=imagenet", "task.source=files"], ["CRT_DATA is not set", "image-net.org"]),
    (["task.size=13"], ["error: task.size=13: expected a multiple", "4 pixels"]),
    (["task.sizes.width=33"], ["'embed_dim': 33", "timm cannot build the model", "divisible by num_heads"]),
    (["task.model=vit_base_patch16_22"], ["task.model=vit_base_patch16_22", "vit_base_patch16_224"]),
    (["task.model=vit_base_patch16_224.nonsense"],
     ["task.model=vit_base_patch16_224.nonsense: unknown", "did you mean vit_base_patch16_224."]),
    (["task.model=resnet18"], ["task.model"]),
    (["task.model=vit_tiny_patch16_224", "+task.sizes.width=3"], ["task.sizes: only for a new model"]),
    (["task.init=pretrained"], ["expected task.model="]),
    (["task.init=scrach"], ["did you mean scratch?"]),
    (["task.augment.policy=nonsense"], ["task.augment.policy=nonsense", "rand-m9-mstd0.5-inc1"]),
    (["task.held_out=0.001"], ["no images left to hold out"]),
    (["task.hub.name=webdataset"], ["expected no task.data_dir"]),
    (["trainer.prefetch=2"], ["trainer.prefetch=0"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    code, _, err = typed(*args, "attention=exact")
    assert code == 2 and err.count("crt_exp: error:") == 1 and len(err.splitlines()) <= 4, err
    assert all(word in err for word in words) and not (tmp_path / "run").exists(), err


def test_a_run_that_has_not_ended_is_no_start(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(DataError, match="unfinished run.*resume=auto"):
        vision.checkpoint_of(str(tmp_path))
