"""python -m crt_exp.predict and the rollout that it draws: its numbers are the model's, its mistakes are named."""

import json
import shutil

import hostile
import numpy as np
import pytest
import torch
from PIL import Image

from crt_exp import swap_attention
from crt_exp.data import images
from crt_exp.models import vision
from crt_exp.predict import looked_at, main
from crt_exp.probes import runs
from crt_exp.swap.rollout import attention_matrices, rollout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two steps on the embedded digits, by attention, and a folder with three of the digits."""
    root = tmp_path_factory.mktemp("predict")
    for name, more in {"exact": [], "favorpp": ["features.m=16"]}.items():
        runs.run(["task=imagenet", f"attention={name}", *more, "trainer.steps=2", "task.sizes.depth=2",
                  "task.sizes.width=32"], root / name)
    (root / "digits").mkdir()
    found = images.load()["val"]
    for i in range(3):
        found.read(found.sources[i]).save(root / f"digits/{i}.png")
    return root


@pytest.mark.parametrize("name", ["exact", "favorpp"])
def test_table_holds_the_probabilities_of_the_model(name, trained, capsys, one_thread):
    assert main([f"run={trained / name}", f"input={trained / 'digits'}"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    kept = vision.load(trained / name)
    shown = torch.stack([kept.transform(images.read(trained / f"digits/{i}.png")) for i in range(3)])
    expected = kept.model(shown).softmax(-1)
    for i, (first, *cells) in enumerate(rows):
        assert first == f"| {trained / f'digits/{i}.png'}" and len(cells) == 5
        told = {label: float(share) for label, share in (cell.strip(" |").split() for cell in cells)}
        best = expected[i].topk(5)
        assert told == {kept.classes[j]: round(p, 3) for j, p in zip(best.indices.tolist(), best.values.tolist())}


@pytest.mark.parametrize("name, asked", [("exact", []), ("exact", ["attention=favorp", "m=8"]), ("favorpp", [])])
def test_maps_are_drawn(name, asked, trained, tmp_path, capsys, one_thread):
    place = tmp_path / "new/maps.png"
    arguments = [f"run={trained / name}", f"input={trained / 'digits/0.png'}", *asked]
    assert main([*arguments, "--maps", str(place)]) == 0
    assert f"attention rollout of 1 of 1 images: {place}" in capsys.readouterr().out
    with Image.open(place) as drawn:
        assert np.asarray(drawn).std() > 10
    assert main([*arguments, f"maps={place}"]) == 0


@pytest.mark.parametrize("name", ["sampler", "imported", "phi", "m huge", "cells", "deep", "whole"])
def test_a_hostile_run_runs_nothing(name, trained, tmp_path, capsys, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    refused(lambda config: dict(hostile.changes(tmp_path))[name](config["crt_exp"]), trained, tmp_path, capsys)
    assert not sprung.exists()


@pytest.mark.parametrize("change", [
    {"crt_exp": 5}, {"architecture": "local-dir:/"}, {"architecture": {"_target_": "os.system"}},
    {"model_args": {"depth": 10**12}}, {"model_args": {"embed_dim": 10**9}}, {"model_args": {"attn_layer": {"a": 1}}},
    {"model_args": {"embed_dim": 8192, "num_heads": 4, "depth": 100}}, {"model_args": 5}, {"num_classes": 10**12},
    {"pretrained_cfg": {}}, {"pretrained_cfg": 5}], ids=str)
def test_a_run_of_another_form_is_one_line_and_takes_no_memory(change, trained, tmp_path, capsys):
    refused(lambda config: config.update(change), trained, tmp_path, capsys)


@pytest.mark.parametrize("text", ["task: 5\n", "task:\n  _target_: ${b}${b}\nb: ${oc.env:HOME}\n", "a: &a [1]\nb: *a\n",
                                  "[" * 10**5], ids=["no keys", "interpolation", "alias", "deep"])
def test_a_hostile_config_yaml_is_one_line(text, trained, tmp_path, capsys):
    folder = shutil.copytree(trained / "exact", tmp_path / "run")
    (folder / "config.yaml").write_text(text)
    assert main([f"run={folder}", f"input={trained / 'digits'}"]) == 2
    hostile.check_one_line(capsys.readouterr().err)


def refused(change, trained, tmp_path, capsys):
    folder = shutil.copytree(trained / "favorpp", tmp_path / "run")
    config = json.loads((folder / "model/config.json").read_text())
    change(config)
    (folder / "model/config.json").write_text(json.dumps(config))
    assert main([f"run={folder}", f"input={trained / 'digits'}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    hostile.check_one_line(err)


def test_matrices_are_those_of_the_attention(trained, one_thread):
    """Rows sum to 1, exact ones are the softmax, linear ones approach them; that of uniform attention is known."""
    kept = vision.load(trained / "exact")
    shown = kept.transform(images.read(trained / "digits/0.png"))[None]
    with pytest.raises(ValueError, match="no attention of this VisionTransformer is swapped"):
        rollout(kept.model, shown)
    exact = attention_matrices(swap_attention(kept.model, "exact"), shown)
    block = kept.model.blocks[0]
    tokens = kept.model._pos_embed(kept.model.patch_embed(shown))
    q, k, _ = block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    assert len(exact) == 2 and torch.allclose(exact[0], (q @ k.mT / 8**0.5).softmax(-1), atol=1e-6)
    linear = attention_matrices(swap_attention(kept.model, "favorpp", m=4096), shown)
    assert torch.allclose(linear[0].sum(-1), torch.ones(1, 4, 17), atol=1e-5)
    assert (linear[0] - exact[0]).abs().max() < 0.1 * exact[0].max()
    uniform = rollout(swap_attention(kept.model, "uniform"), shown)
    assert torch.allclose(uniform, 0.25 * torch.eye(17) + 0.75 / 17, atol=1e-6)
    assert torch.allclose(looked_at(kept.model, shown), torch.full((1, 4, 4), 0.75 / 17), atol=1e-6)


def test_a_folder_with_a_file_that_is_no_image(trained, tmp_path, capsys, one_thread):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes((trained / f"digits/{i}.png").read_bytes())
    (tmp_path / "1.png").write_text("no image")
    assert main([f"run={trained / 'exact'}", f"input={tmp_path}"]) == 0
    told = capsys.readouterr()
    assert told.out.count(".png") == 2 and f"left out: {tmp_path / '1.png'} cannot be read" in told.err


@pytest.mark.parametrize("arguments, told", [
    (["run=nowhere", "input=x.png"], "run=nowhere: there is no such directory"),
    (["run={exact}", "input=x.png"], "input=x.png: there is no such file or folder"),
    (["run={exact}", "input={text}"], "cannot be read as an image"),
    (["run={exact}", "input={empty}"], "this folder holds no image"),
    (["run={uci}", "input={digit}"], "is a run of crt_exp.probes.uci.UCI, which classifies no images"),
    (["run={empty}", "input={digit}"], "task=imagenet"),
    (["run={exact}"], "input=... is missing"),
    (["run={exact}", "inptu={digit}"], "did you mean input?"),
    (["run={exact}", "input={digit}", "input={digit}"], "input=... comes twice"),
    (["run={exact}", "input={digit}", "maps=m.jpg"], "ends in .png"),
    (["run={exact}", "input={digit}", "size=9"], "task.size = 9 is no multiple of the patch"),
    (["run={exact}", "input={digit}", "size=x"], "size = x: it takes a whole number"),
    (["run={favorpp}", "input={digit}", "maps=m.png", "attention=favorp"], "this run was trained with favorpp"),
    (["run={exact}", "input={digit}", "attention=favorp", "m=8"], "attention=... and m=...: what exact attention is"),
    (["run={exact}", "input={digit}", "maps=m.png", "m=100000000"], "of at least 1 and at most 65536, or null"),
])
def test_mistakes_are_told(arguments, told, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"exact": trained / "exact", "favorpp": trained / "favorpp", "digit": trained / "digits/0.png",
              "text": tmp_path / "text.png", "empty": tmp_path / "empty", "uci": tmp_path / "uci"}
    places["empty"].mkdir()
    places["text"].write_text("no image")
    if any("{uci}" in word for word in arguments):
        runs.run(["task=uci", "features=oprf", "task.repeats=1", "task.sigmas=[0.3]"], places["uci"])
    assert main([word.format(**places) for word in arguments]) == 2
    said = capsys.readouterr()
    assert told in said.err and "Traceback" not in said.err and not said.out
