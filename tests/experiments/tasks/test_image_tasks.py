"""task=imagenet and task=mae: where weights come from, parts of the recipe, masks, images that cannot be read."""

import json
from dataclasses import replace

import pytest
import timm
import torch
from helpers.small_images import picture, write_images
from helpers.task_options import options_of
from omegaconf import OmegaConf
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import ViTMAEModel

from crt_exp import describe_attention
from crt_exp.experiments.data import DataError
from crt_exp.experiments.models import vision
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.runner.configuration import check_plain, plain_config
from crt_exp.experiments.tasks.base import Plan
from crt_exp.experiments.tasks.imagenet import ImageNet
from crt_exp.experiments.tasks.mae import MAE
from crt_exp.mechanism import Mechanism
from crt_exp.registry import CONF, ConfigError

SIZES = {"patch": 4, "width": 32, "depth": 2, "heads": 2}
AUGMENT = options_of("imagenet")["augment"] | {"scale": [0.5, 1.0], "flip": 0.5}
BOTH = {"dataset": "mine", "source": "files", "workers": 0}
CLASSIFIER = options_of("imagenet") | BOTH | {"sizes": SIZES, "size": 12, "augment": AUGMENT}
ENCODER = options_of("mae") | BOTH
ENCODER |= {
    "sizes": SIZES | {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2},
    "size": 16,
    "augment": {"scale": [0.5, 1.0], "flip": 0.5},
}
LOADED = {"sizes": dict.fromkeys(SIZES), "size": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), size=16)


@pytest.fixture(autouse=True)
def alone(one_thread, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)


def task_of(folder, **options):
    return ImageNet(**CLASSIFIER | {"data_dir": str(folder)} | options)


def mae_of(folder, **options):
    return MAE(**ENCODER | {"data_dir": str(folder)} | options)


def equal(one, other):
    if one.keys() != other.keys():
        return False
    return all(torch.equal(one[key], other[key]) for key in one)


# ---- where weights come from -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory, folder):
    root = tmp_path_factory.mktemp("exact")
    task = task_of(folder)
    model = task.build(Mechanism.of("exact"))
    task.export(model, model.state_dict(), root)
    return root


def test_kept_weights_load_in_timm_with_classes_and_transform(folder, tmp_path):
    """timm has exact attention; `load` also gives the mechanism."""
    task = task_of(folder)
    model = task.build(Mechanism.of("favorpp", m=8))
    task.export(model, model.state_dict(), tmp_path)
    kept = vision.load(tmp_path)
    assert kept.classes == ("class0", "class1", "class2")
    assert not kept.model.training
    actual = kept.model(kept.transform(picture(1, 1))[None]).shape
    assert actual == (1, 3)
    actual = set(describe_attention(kept.model)["mechanism"].str.split(" ").str[0])
    assert actual == {"favorpp"}
    plain = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert equal(
        dict(plain.state_dict()), checkpoint.load_tensors(tmp_path / "model" / "model.safetensors")
    )
    assert plain.pretrained_cfg["label_names"] == ["class0", "class1", "class2"]


def test_positions_are_interpolated_to_other_sizes(folder, exact_run):
    old = checkpoint.load_tensors(exact_run / "model" / "model.safetensors")
    new = (
        task_of(folder, **LOADED | {"size": 24}, init=str(exact_run))
        .build(Mechanism.of("favorpp", m=4))
        .state_dict()
    )
    assert old["pos_embed"].shape == (1, 1 + 9, 32)
    assert new["pos_embed"].shape == (1, 1 + 36, 32)
    actual = old["pos_embed"][:, 0]
    expected = new["pos_embed"][:, 0]
    assert torch.equal(actual, expected)


def test_weights_of_timm_in_a_folder_and_in_a_file(tmp_path, folder):
    """As `hf download timm/...` leaves them, and as training scripts save them."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "pretrained_cfg": {
            "input_size": [3, 224, 224],
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": 3,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "saved.pth")
    cases = [
        {"init": str(tmp_path)},
        {"init": str(tmp_path / "saved.pth"), "model": "vit_tiny_patch16_224"},
    ]
    for options in cases:
        task = task_of(folder, **LOADED, **options)
        actual = task.build(Mechanism.of("exact")).state_dict()
        assert equal(actual, model.state_dict())
    actual = task_of(folder, **LOADED, init=str(tmp_path)).description.preprocessing["mean"]
    assert [*actual] == [0.5, 0.5, 0.5]
    del config["pretrained_cfg"]["input_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="not a configuration of timm: KeyError: 'input_size'"):
        task_of(folder, **LOADED, init=str(tmp_path))


def test_a_new_head_stands_on_the_same_encoder(tmp_path, exact_run):
    root = write_images(tmp_path, classes=4)
    model = task_of(root, **LOADED, init=str(exact_run), new_head=True).build(Mechanism.of("exact"))
    old = checkpoint.load_tensors(exact_run / "model" / "model.safetensors")
    assert model.head.weight.shape == (4, 32)
    for key, tensor in model.state_dict().items():
        if "head." not in key:
            assert torch.equal(tensor, old[key])
    with pytest.raises(ConfigError, match="other classes .3, expected 4.; task.new_head=true"):
        task_of(root, **LOADED, init=str(exact_run)).build(Mechanism.of("exact"))


@pytest.mark.parametrize(
    "changes, words", [({"width": 64}, "size mismatch.* 32"), ({"depth": 3}, "blocks.2")], ids=str
)
def test_checkpoints_that_do_not_fit(changes, words, folder, exact_run):
    with pytest.raises(DataError, match=f"does not match task.model .*{words}"):
        task_of(
            folder, init=str(exact_run / "model" / "model.safetensors"), sizes=SIZES | changes
        ).build(Mechanism.of("exact"))


def test_weights_of_the_hub_that_are_not_here(folder):
    task = task_of(
        folder,
        **LOADED,
        model="vit_tiny_patch16_224.augreg_in21k",
        init="pretrained",
        new_head=True,
    )
    with pytest.raises(
        DataError, match="not readable .*hf download timm/vit_tiny_patch16_224.augreg_in21k"
    ):
        task.build(Mechanism.of("exact"))
    with pytest.raises(ConfigError, match="other classes .21843, expected 3.; task.new_head=true"):
        replace(task, new_head=False).build(Mechanism.of("exact"))


@torch.no_grad()
def test_a_classifier_begins_with_the_encoder_of_mae(tmp_path, folder):
    """timm's model of a run of task=mae has the outputs of transformers' encoder."""
    task = mae_of(folder)
    model = task.build(Mechanism.of("exact"))
    task.export(model, model.state_dict(), tmp_path)
    theirs = ViTMAEModel.from_pretrained(tmp_path / "model", mask_ratio=0.0).eval()
    description = vision.checkpoint_of(str(tmp_path)).description
    assert description.size == 16
    assert description.options["patch_size"] == 4
    ours = vision.build(
        replace(description, classes=("a", "b")), Mechanism.of("exact"), str(tmp_path)
    ).eval()
    images = torch.randn(3, 3, 16, 16)
    noise = torch.arange(16.0).expand(3, 16)
    wanted = theirs(images, noise=noise).last_hidden_state
    actual = ours.forward_features(images)
    assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


# ---- parts of the recipe ---------------------------------------------------------------------------------------------


def test_layer_wise_rates_are_those_of_timm(folder):
    """Positions, tokens and biases do not decay; stochastic depth reaches the last block."""
    task = task_of(folder, layer_decay=0.65, drop_path=0.3)
    model = task.build(Mechanism.of("favorpp", m=4))
    groups = param_groups_layer_decay(model, layer_decay=0.65)
    theirs = {}
    for group in groups:
        for p in group["params"]:
            theirs[id(p)] = group["lr_scale"]
    ours = {}
    for name, p in model.named_parameters():
        ours[id(p)] = task.lr_scale(name)
    assert ours == pytest.approx(theirs)
    assert len(set(ours.values())) == 4
    assert max(ours.values()) == 1
    for name, parameter in model.named_parameters():
        actual = task.decays(name, parameter)
        expected = name.endswith("weight") and parameter.dim() > 1
        assert actual == (expected)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)


@pytest.mark.parametrize("rows", [6, 1])
def test_mixed_targets_are_distributions_and_smoothed_once(rows, folder):
    augment = AUGMENT | {"mixup": 0.8, "cutmix": 1.0}
    task = task_of(folder, augment=augment)
    batch = next(iter(task.batches("train", Plan(rows, seed=2))))
    again = next(iter(task.batches("train", Plan(rows, seed=2))))
    targets = batch["targets"]
    model = task.build(Mechanism.of("exact")).eval()
    assert targets.shape == (rows, 3)
    assert torch.allclose(targets.sum(1), torch.ones(rows))
    assert_close(targets.amin(1), torch.full((rows,), 0.1 / 3))  # one class of three is in no image
    expected = -(targets * model(batch["images"]).log_softmax(-1)).sum(1).mean()
    actual = task.loss(model, batch)
    assert_close(actual, expected)
    assert torch.equal(batch["images"], again["images"])


def test_labels_are_smoothed(folder):
    task = task_of(folder)
    batch = next(iter(task.batches("train", Plan(6))))
    model = task.build(Mechanism.of("exact")).eval()
    logs = model(batch["images"]).log_softmax(-1)
    labels = batch["targets"]
    actual = task.loss(model, batch)
    expected = 0.9 * F.nll_loss(logs, labels) - 0.1 * logs.mean()
    assert_close(actual, expected)


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in sorted((CONF / "experiment").glob("*.yaml"))
        if "override /task: imagenet" in path.read_text()
    ],
)
def test_experiments_fit_their_models(name, folder):
    """Each recipe composes, and describes a model that timm makes; its images are ours."""
    cfg = compose([f"experiment={name}", "attention=favorpp"])
    check_plain(plain_config(cfg))
    given = OmegaConf.to_container(cfg.task, resolve=True)
    task = ImageNet(
        **{key: value for key, value in given.items() if key[0] != "_"} | {"data_dir": str(folder)}
    )
    expected = {"vit_1024": 1024, "crt_vit_steps": 1024}.get(name, 224)
    assert task.description.size == expected


# ---- task=mae --------------------------------------------------------------------------------------------------------


def test_a_new_model_knows_where_its_patches_are(folder):
    """Encoder and decoder have positions, so that predictions of two masked patches differ."""
    model = mae_of(folder).build(Mechanism.of("exact")).eval()
    noise = torch.arange(16.0).flip(0)[None]  # the last four patches are seen
    predicted = model(torch.zeros(1, 3, 16, 16), noise=noise).logits[0]
    difference = (predicted[0] - predicted[1]).abs().max()
    assert difference > 1e-3
    state = model.vit(torch.zeros(1, 3, 16, 16), noise=noise).last_hidden_state[0]
    difference = (state[1] - state[2]).abs().max()
    assert difference > 1e-3


def test_masks_belong_to_the_row(folder):
    """Whatever batch it is in; the same at every evaluation, others in every epoch."""
    task = mae_of(folder)
    both = []
    for n in (4, 6):
        both.append(torch.cat([b["noise"] for b in task.batches("val", Plan(n))]))
    four, six = both
    assert torch.equal(four, six)
    assert four.shape == (12, 16)
    assert not torch.equal(four[0], four[1])
    train = []
    for e in (0, 0, 1):
        batches = task.batches("train", Plan(8, epoch=e))
        train.append(torch.cat([batch["noise"] for batch in batches]))
    assert torch.equal(train[0], train[1])
    assert not torch.equal(train[0], train[2])


# ---- images and options that do not fit ------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("make", [task_of, mae_of])
def test_unreadable_images_are_refused(make, tmp_path):
    root = write_images(tmp_path, size=16)
    (root / "val" / "class0" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="class0/0.png: not a readable image"):
        list(make(root).batches("val", Plan(4)))


@pytest.mark.parametrize(
    "make, options, words",
    [
        (
            task_of,
            {"data_dir": None, "dataset": "imagenet"},
            "(?s)CRT_DATA is not set.*image-net.org",
        ),
        (task_of, {"sizes": SIZES | {"width": 33}}, "'embed_dim': 33.*timm cannot build the model"),
        (
            task_of,
            {"model": "vit_base_patch16_22", **LOADED},
            "task.model=vit_base_patch16_22.*vit_base_patch16_224",
        ),
        (
            task_of,
            {"augment": AUGMENT | {"policy": "nonsense"}},
            "task.augment.policy=nonsense.*rand-m9-mstd0.5-inc1",
        ),
        (
            mae_of,
            {"sizes": ENCODER["sizes"] | {"width": 33}},
            "task.sizes.width=33: expected a multiple of 4 and heads=2",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_that_do_not_fit(make, options, words, folder):
    with pytest.raises((ConfigError, DataError), match=words):
        make(folder, **options).build(Mechanism.of("exact"))
