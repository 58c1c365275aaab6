"""Saved is saved: a swapped model comes back as it was, and never silently with exact attention."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import hostile
import pytest
import torch
import transformers
from swap_models import bert, each, gpt2, inputs, llama, made, run, swapped, vit

import crt_exp
from crt_exp import calibrate_attention, samplers, swap_attention, unswap_attention
from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.models import encoders
from crt_exp.nearfar.layer import NearFar

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")]
SMALL = {"nearfar": {"exact_until": 0, "block": 1, "heavy": 1, "cells": 2, "open": 1}, "linformer": {},
         "favorpp": {"m": 8}, "hrf_cluster": {"m": 4}}


def alike(model, other, make):
    return torch.equal(run(model, **inputs(make)), run(other, **inputs(make)))


@each({"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit})
@pytest.mark.parametrize("name", ["favorpp", "nearfar"])
@torch.no_grad()
def test_saved_comes_back_bit_for_bit(make, name, tmp_path):
    model = swap_attention(made(make), name, **SMALL[name], seed=3)
    if name == "favorpp" and make in (gpt2, llama):
        calibrate_attention(model, [inputs(make, seed=1)])
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = {"add_pooling_layer": False} if make in (bert, vit) else {}
        back = crt_exp.from_pretrained(type(model), tmp_path, **plain).eval()
    assert alike(model, back, make) and back.config.crt_exp == model.config.crt_exp
    assert set(model.state_dict()) == set(back.state_dict())
    unswap_attention(back)
    assert alike(made(make), back, make) and not hasattr(back.config, "crt_exp")


@torch.no_grad()
@pytest.mark.parametrize("name", ["linformer", "hrf_cluster"])
def test_other_buffers_and_parameters_come_back_too(name, tmp_path):
    model = swap_attention(made(bert), name, **SMALL[name])
    for p in model.parameters():
        p.add_(0.01)
    if name == "hrf_cluster":
        calibrate_attention(model, [inputs(bert, seed=1)])
    model.save_pretrained(tmp_path)
    assert alike(model, crt_exp.from_pretrained(transformers.AutoModel, tmp_path, add_pooling_layer=False).eval(), bert)


@torch.no_grad()
def test_layers_with_different_attention_and_a_bare_model(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(bert().config).eval()
    swap_attention(model, "favorpp", m=8, layers=[0], seed=1)
    swap_attention(model, "window", layers=[1])
    swap_attention(model, "nearfar", layers=[1])
    saved = model.config.crt_exp
    assert [each["name"] for each in saved["mechanisms"]] == ["favorpp", "nearfar"]
    assert list(saved["layers"].values()) == [0, 1]
    model.save_pretrained(tmp_path)
    assert alike(model.bert, crt_exp.from_pretrained(transformers.BertModel, tmp_path).eval(), bert)
    one = swap_attention(made(bert), "uniform", layers=[1])
    one.save_pretrained(tmp_path / "one")
    assert list(one.config.crt_exp["layers"].values()) == [None, 0]
    assert alike(one, crt_exp.from_pretrained(transformers.BertModel, tmp_path / "one", add_pooling_layer=False), bert)


@torch.no_grad()
def test_near_far_attention_and_another_number_format(tmp_path):
    model = swap_attention(made(llama), "nearfar", exact_until=0, block=1, heavy=1, cells=2, open=12)
    model.bfloat16().save_pretrained(tmp_path)
    back = crt_exp.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, dtype="auto").eval()
    assert [part.sizes.open for part in back.modules() if isinstance(part, NearFar)] == [12, 12]
    assert alike(model, back, llama)
    half = swap_attention(made(bert), "favorpp", m=8).bfloat16()
    half.save_pretrained(tmp_path / "half")
    again = crt_exp.from_pretrained(transformers.AutoModel, tmp_path / "half", dtype="auto", add_pooling_layer=False)
    assert alike(half, again.eval(), bert)


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.BertModel])
def test_a_plain_load_is_refused_where_it_is_saved_again(auto, tmp_path):
    """It has exact attention, and the record of a swap without the noise."""
    swapped(bert).save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path)
    assert alike(model.eval(), made(bert), bert)
    model.save_pretrained(tmp_path / "exact")
    with pytest.raises(ValueError, match="random projections of encoder.layer.0"):
        crt_exp.from_pretrained(auto, tmp_path / "exact")


def test_noise_without_a_record_is_refused(tmp_path):
    swapped(bert).save_pretrained(tmp_path)
    edit(tmp_path, lambda config: config.pop("crt_exp"))
    with pytest.raises(ValueError, match="no swapped model"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)


@pytest.mark.parametrize("auto", [transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel])
def test_a_load_does_not_list_the_noise_as_unknown_weights(auto, tmp_path, caplog):
    swapped(gpt2).save_pretrained(tmp_path)
    crt_exp.from_pretrained(auto, tmp_path)
    assert "UNEXPECTED" not in caplog.text
    auto.from_pretrained(tmp_path)
    assert "swapped.omega" in caplog.text


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change, message", [
    (lambda saved: saved["mechanisms"][0].update(name="favour"), "unknown attention 'favour'"),
    (lambda saved: saved["mechanisms"][0]["described"].update(m=3), "other options in conf/"),
    (lambda saved: saved.pop("layers"), "is invalid"),
    (lambda saved: saved.update(layers={"other": 0}), "has no entry for encoder.layer.0"),
    (lambda saved: saved["mechanisms"][0].update(rebuilds=False), "built from Python objects")])
def test_a_damaged_record_is_refused(change, message, tmp_path):
    swapped(bert).save_pretrained(tmp_path)
    edit(tmp_path, lambda config: change(config["crt_exp"]))
    with pytest.raises(ConfigError, match=message):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)


def test_missing_noise_and_objects_are_refused(tmp_path):
    model = swapped(bert)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if ".swapped." not in k})
    with pytest.raises(ValueError, match="random projections of encoder.layer.0"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)
    swap_attention(model, "favorpp", m=8, sampler=samplers.iid).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="built from Python objects"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)


def test_two_models_of_one_configuration_stay_apart():
    first, second = (made(bert) for _ in range(2))
    second.config = first.config
    swap_attention(first, "uniform")
    assert not hasattr(second.config, "crt_exp")


def test_the_import_stays_light():
    code = "import sys, crt_exp\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- files of anybody

def doors(folder):
    """The ways in which a saved swap is brought back."""
    yield lambda: crt_exp.from_pretrained(transformers.BertModel, folder)
    yield lambda: crt_exp.from_pretrained(transformers.AutoModel, folder)


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmless")
    swap_attention(made(bert), "favorpp", m=8).save_pretrained(folder)
    return folder


def copied(harmless, tmp_path):
    return shutil.copytree(harmless, tmp_path / "model")


@pytest.mark.parametrize("name", [name for name, _ in hostile.changes(Path("/"))])
def test_a_hostile_attention_runs_nothing(name, harmless, tmp_path, monkeypatch):
    sprung, folder = hostile.set_trap(tmp_path, monkeypatch), copied(harmless, tmp_path)
    edit(folder, lambda config: dict(hostile.changes(tmp_path))[name](config["crt_exp"]["mechanisms"][0]))
    for door in doors(folder):
        with pytest.raises(ConfigError) as caught:
            door()
        assert not sprung.exists()
        hostile.check_one_line(caught.value)


LAYER = "encoder.layer.0.attention.self"
RECORDS = {
    "a number": lambda config: config.update(crt_exp=5), "zero": lambda config: config.update(crt_exp=0),
    "a list": lambda config: config.update(crt_exp=[1]), "a word": lambda config: config.update(crt_exp="favorpp"),
    "empty": lambda config: config.update(crt_exp={}), "deep": lambda config: config.update(crt_exp=hostile.deep(200)),
    "mechanisms": lambda config: config["crt_exp"].update(mechanisms=[5]),
    "mechanisms in a dictionary": lambda config: config["crt_exp"].update(mechanisms={"0": {}}),
    "causal": lambda config: config["crt_exp"]["mechanisms"][0].update(causal="yes"),
    "more rows than the weights have": lambda config: enlarge(config["crt_exp"]["mechanisms"][0], 4096),
    "none swapped": lambda config: config["crt_exp"].update(layers=dict.fromkeys(config["crt_exp"]["layers"]))} | {
    f"layer {number!r}": lambda config, number=number: config["crt_exp"]["layers"].update({LAYER: number})
    for number in (99, 1, -1, "0", True, False, 0.0, 0.5, [0], {"0": 0})}


def enlarge(saved, m):
    saved["m"] = saved["described"]["m"] = m


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_another_form_is_one_line_at_every_door(name, harmless, tmp_path):
    folder = copied(harmless, tmp_path)
    edit(folder, RECORDS[name])
    for door in doors(folder):
        with pytest.raises(ConfigError, match="crt_exp|cannot be restored|levels deep|use m=8") as caught:
            door()
        hostile.check_one_line(caught.value)
    transformers.BertModel.from_pretrained(folder).save_pretrained(tmp_path / "again")


def test_code_of_a_folder_is_refused_without_a_question(harmless, tmp_path, monkeypatch):
    folder = copied(harmless, tmp_path)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    asks = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    edit(folder, lambda config: config.update(asks))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        crt_exp.from_pretrained(transformers.AutoModel, folder)
    origin = encoders.Origin(str(folder), "task.model", True, False)
    for load in (lambda: encoders.load_config(origin),
                 lambda: encoders.load_model("AutoModel", None, origin, crt_exp.Mechanism.of("exact"))):
        with pytest.raises(DataError, match="task.model=.* needs the code of its repository"):
            load()
    edit(folder, lambda config: config.update(model_type="bert"))  # a class that transformers has
    assert crt_exp.from_pretrained(transformers.AutoModel, folder).config.crt_exp
    assert not (tmp_path / "sprung").exists()


# ---- which file the noise is taken from

def noise(model):
    return model.encoder.layer[0].attention.self.swapped.omega


@pytest.mark.parametrize("sharded", [False, True])
def test_noise_comes_from_the_files_of_the_weights(sharded, harmless, tmp_path):
    shutil.copy(harmless / "config.json", tmp_path)
    shutil.copy(harmless / "model.safetensors", tmp_path / "old.safetensors")
    model = swap_attention(made(bert), "favorpp", m=8, seed=3)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    back = crt_exp.from_pretrained(transformers.BertModel, tmp_path, add_pooling_layer=False)
    assert torch.equal(noise(back), noise(model))
    if not sharded:
        nested = shutil.copytree(tmp_path, tmp_path / "parts/one").parent
        back = crt_exp.from_pretrained(transformers.BertModel, nested, subfolder="one", add_pooling_layer=False)
        assert torch.equal(noise(back), noise(model))


# ---- another process

PICKLED = """
import sys, torch
assert not {'crt_exp', 'transformers'} & set(sys.modules)
import crt_exp.swap.swap
for model, given, expected in torch.load(sys.argv[1], weights_only=False):
    with torch.no_grad():
        assert torch.equal(model(**given)[0], expected)
        if model.can_generate():
            model.generate(**given, max_new_tokens=2, do_sample=False)
print('equal')
"""


@torch.no_grad()
def test_a_pickled_model_works_in_another_process(tmp_path):
    """In which this package is imported before transformers."""
    models = [(swap_attention(made(bert), "favorpp", m=8), bert), (swap_attention(made(llama), "nearfar"), llama)]
    torch.save([(model, inputs(make), run(model, **inputs(make))) for model, make in models], tmp_path / "models.pt")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PICKLED, tmp_path / "models.pt"], capture_output=True,
                          text=True)
    assert done.stdout == "equal\n", done.stderr
