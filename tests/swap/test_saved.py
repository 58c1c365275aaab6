"""Saved is saved: a swapped model comes back as it was, also from a disk for each call, from a hub and in another
process; never silently with exact attention, and no file of anybody runs anything."""

import json
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from helpers import hostile
from helpers.swap_models import (
    BARE,
    alike,
    back,
    bert,
    build_model,
    gpt2,
    inputs,
    llama,
    run,
    swapped,
    vit,
)

import crt_exp
from crt_exp import calibrate_attention, swap_attention, unswap_attention
from crt_exp.attention import RandomFeatureAttention
from crt_exp.experiments.data import DataError
from crt_exp.experiments.models import encoders
from crt_exp.registry import ConfigError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning",
        "ignore:.*no statistics yet:UserWarning",
        "ignore::FutureWarning",
    ),
]
SMALL = {
    "nearfar": {"exact_until": 0, "block": 1, "heavy": 1, "cells": 2, "open": 1},
    "linformer": {},
    "favorpp": {"m": 8},
    "hrf_cluster": {"m": 4},
}


@pytest.mark.parametrize(
    "make, name",
    [
        (bert, "nearfar"),
        (gpt2, "nearfar"),
        (llama, "favorpp"),
        (vit, "favorpp"),
        (bert, "linformer"),
        (bert, "hrf_cluster"),
    ],
)
@torch.no_grad()
def test_saved_comes_back_bit_for_bit(make, name, tmp_path):
    model = swap_attention(build_model(make), name, **SMALL[name], seed=3)
    if name == "hrf_cluster" or make is llama:
        calibrate_attention(model, [inputs(make, seed=1)])
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = back(tmp_path, make)
    assert alike(model, again, make)
    assert again.config.crt_exp == model.config.crt_exp
    actual = set(model.state_dict())
    expected = set(again.state_dict())
    assert actual == expected
    unswap_attention(again)
    assert alike(build_model(make), again, make)
    assert not hasattr(again.config, "crt_exp")


def test_a_swap_that_refuses_causal_calls_still_does(tmp_path):
    swap_attention(build_model(gpt2), "favorpp", m=8, causal=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="causal call of a layer swapped as bidirectional"):
        back(tmp_path, gpt2)(**inputs(gpt2))


@torch.no_grad()
def test_layers_with_different_attention_and_a_bare_model(tmp_path):
    torch.manual_seed(0)
    model = swap_attention(
        transformers.BertForMaskedLM(bert().config).eval(), "favorpp", m=8, layers=[0], seed=1
    )
    swap_attention(model, "nearfar", layers=[1]).save_pretrained(tmp_path)
    saved = model.config.crt_exp
    actual = [mechanism["name"] for mechanism in saved["mechanisms"]]
    assert actual == ["favorpp", "nearfar"]
    actual = list(saved["layers"].values())
    assert actual == [0, 1]
    assert alike(model.bert, back(tmp_path), bert)
    one = swap_attention(build_model(bert), "uniform", layers=[1])
    one.save_pretrained(tmp_path / "one")
    actual = list(one.config.crt_exp["layers"].values())
    assert actual == [None, 0]
    assert alike(one, back(tmp_path / "one"), bert)


@torch.no_grad()
def test_half_precision_comes_back(tmp_path):
    half = swap_attention(build_model(llama), "favorp", m=8).bfloat16()
    half.save_pretrained(tmp_path)
    assert alike(
        half, back(tmp_path, llama, transformers.AutoModelForCausalLM, dtype="auto"), llama
    )


@torch.no_grad()
def test_a_swap_of_a_loaded_model_takes_the_saved_noise(tmp_path):
    model = swapped(bert, seed=3, redraw_every=1)
    for part in model.modules():
        if isinstance(part, RandomFeatureAttention):
            part.redraw()
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, attn_implementation="sdpa", **BARE[bert])
    loaded = swap_attention(plain, "favorpp", m=32).eval()
    assert alike(loaded, model, bert)
    with pytest.raises(ValueError, match="use m=32.*saved=False"):
        swap_attention(unswap_attention(loaded), "favorpp", m=16)
    swap_attention(loaded, "favorpp", m=16, saved=False)


def test_saved_noise_that_may_belong_to_two_layers_is_refused(tmp_path):
    """Names that match no layer, and numbers that two of them share: either might be the layer's own."""
    from safetensors.torch import load_file, save_file

    swapped(bert).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    noise = {}
    for name in list(tensors):
        if ".swapped." in name:
            noise[name] = tensors.pop(name)
    for place in ("old", "older"):
        tensors |= {
            f"{place}.{name.replace('encoder', 'stack')}": part.clone()
            for name, part in noise.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="ambiguous, candidates .*saved=False"):
        swap_attention(transformers.BertModel.from_pretrained(tmp_path), "favorpp", m=32)


@pytest.mark.parametrize("sharded", [False, True])
def test_noise_comes_from_the_files_of_the_weights(sharded, harmless, tmp_path):
    shutil.copy(harmless / "config.json", tmp_path)
    shutil.copy(harmless / "model.safetensors", tmp_path / "old.safetensors")
    model = swap_attention(build_model(bert), "favorpp", m=8, seed=3)
    size = "1GB"
    if sharded:
        size = "20KB"
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert alike(back(tmp_path), model, bert)
    if not sharded:
        nested = shutil.copytree(tmp_path, tmp_path / "parts/one").parent
        assert alike(back(nested, subfolder="one"), model, bert)


# ---- what does not come back


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmless")
    swap_attention(build_model(bert), "favorpp", m=8).save_pretrained(folder)
    return folder


def test_a_plain_load_is_refused_where_it_is_saved_again(harmless, tmp_path, caplog):
    """It has exact attention, and the record of a swap without the noise."""
    model = transformers.AutoModel.from_pretrained(harmless, attn_implementation="sdpa")
    assert alike(model.eval(), build_model(bert), bert)
    assert "swapped.omega" in caplog.text
    caplog.clear()
    back(harmless)
    assert "UNEXPECTED" not in caplog.text
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="random projections of encoder.layer.0"):
        back(tmp_path)


PARTS = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
SMALL_TEXT = PARTS | {"intermediate_size": 16, "vocab_size": 30}
SMALL_VISION = PARTS | {"intermediate_size": 16, "image_size": 16, "patch_size": 8}


def clip():
    config = transformers.CLIPConfig(text_config=SMALL_TEXT, vision_config=SMALL_VISION)
    return transformers.CLIPModel(config)


def llava():
    text = transformers.LlamaConfig(**SMALL_TEXT)
    vision = transformers.CLIPVisionConfig(**SMALL_VISION)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=5)
    )


def bert2bert():
    parts = [transformers.BertConfig(**SMALL_TEXT) for _ in range(2)]
    return transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    )


# model -> its class, and the parts that can be saved by themselves
FOLDERS = {
    bert: ("BertModel", ()),
    llama: ("AutoModelForCausalLM", ()),
    clip: ("AutoModel", ("text_model", "vision_model")),
    llava: ("AutoModelForImageTextToText", ("model.language_model",)),
    bert2bert: ("AutoModelForSeq2SeqLM", ("encoder",)),
}
PLAIN = """
import sys, transformers
for argument in sys.argv[1:]:
    folder, name = argument.split(":")
    auto = getattr(transformers, name)
    try:
        auto.from_pretrained(folder)
        print("loaded", folder)
    except ValueError as error:
        assert 'attn_implementation="crt_exp"' in str(error), error
    for implementation in ("sdpa", "eager"):
        model = auto.from_pretrained(folder, attn_implementation=implementation)
        assert {p.config._attn_implementation for p in model.modules() if hasattr(p, "config")} == {implementation}
"""


def test_transformers_refuses_a_plain_load_by_name_in_another_process(tmp_path):
    """Whole models, in one file and in several; models of parts, and their parts; a base of an adapter."""
    peft = pytest.importorskip("peft")
    asked = []
    for make, (name, parts) in FOLDERS.items():
        folder = tmp_path / make.__name__
        model = swap_attention(make(), "favorp", m=4)
        size = "20KB"
        if make is bert:
            size = "1GB"
        model.save_pretrained(folder, max_shard_size=size)
        asked.append(f"{folder}:{name}")
        for part in parts:
            inner = model.get_submodule(part)
            inner.save_pretrained(folder / part)
            asked.append(f"{folder / part}:{type(inner).__name__}")
        again = crt_exp.from_pretrained(getattr(transformers, name), folder)
        assert again.config.crt_exp == model.config.crt_exp
        config = unswap_attention(again).config
        assert "crt_exp" not in config.to_json_string()
    base = crt_exp.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "llama")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    asked.append(f"{tmp_path / 'adapter'}:AutoModelForCausalLM")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN, *asked], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout, done.stdout + done.stderr


def test_a_plain_load_in_this_process_is_refused_at_its_first_call(harmless):
    model = transformers.AutoModel.from_pretrained(harmless).eval()
    with pytest.raises(ValueError, match="is not swapped; .*crt_exp.from_pretrained"):
        run(model, **inputs(bert))
    assert alike(back(harmless, attn_implementation="eager"), back(harmless), bert)


LAYER = "encoder.layer.0.attention.self"


def first(config):
    return config["crt_exp"]["mechanisms"][0]


RECORDS = {
    "none": (lambda config: config.pop("crt_exp"), "no swapped model"),
    "deep": (lambda config: config.update(crt_exp=hostile.deep(200)), "crt_exp"),
    "causal": (lambda config: first(config).update(causal="yes"), "crt_exp|cannot be restored"),
    "more rows than the weights have": (lambda config: enlarge(first(config), 4096), "use m=8"),
    "rows of other options": (
        lambda config: first(config)["described"].update(m=3),
        "other options",
    ),
    "name": (lambda config: first(config).update(name="favour"), "unknown attention 'favour'"),
    "layers of another model": (
        lambda config: config["crt_exp"].update(layers={"other": 0}),
        f"no entry for {LAYER}",
    ),
    "objects": (lambda config: first(config).update(rebuilds=False), "built from Python objects"),
    "none swapped": (
        lambda config: config["crt_exp"].update(layers=dict.fromkeys(config["crt_exp"]["layers"])),
        "no layer is swapped",
    ),
} | {
    f"layer {number!r}": (
        lambda config, number=number: config["crt_exp"]["layers"].update({LAYER: number}),
        "crt_exp",
    )
    for number in (1, -1, True)
}


def enlarge(saved, m):
    saved["m"] = saved["described"]["m"] = m


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_another_form_is_one_line(name, harmless, tmp_path):
    folder = shutil.copytree(harmless, tmp_path / "model")
    change, message = RECORDS[name]
    edit(folder, change)
    with pytest.raises(ConfigError, match=message) as caught:
        back(folder)
    hostile.check_one_line(caught.value)


def test_a_hostile_attention_runs_nothing(harmless, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    folder = shutil.copytree(harmless, tmp_path / "model")
    edit(folder, lambda config: dict(hostile.changes(tmp_path))["imported"](first(config)))
    with pytest.raises(ConfigError) as caught:
        back(folder)
    hostile.check_one_line(caught.value)
    assert not sprung.exists()


def test_code_of_a_folder_is_refused_without_a_question(harmless, tmp_path, monkeypatch):
    folder = shutil.copytree(harmless, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    asks = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    edit(folder, lambda config: config.update(asks))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        crt_exp.from_pretrained(transformers.AutoModel, folder)
    with pytest.raises(DataError, match="task.model=.* needs the code of its repository"):
        encoders.load_config(encoders.Origin(str(folder), "task.model", True, False))
    edit(folder, lambda config: config.update(model_type="bert"))  # a class that transformers has
    assert crt_exp.from_pretrained(transformers.AutoModel, folder).config.crt_exp
    assert not (tmp_path / "sprung").exists()


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
    models = [
        (swap_attention(build_model(bert), "favorpp", m=8), bert),
        (swap_attention(build_model(llama), "nearfar"), llama),
    ]
    torch.save(
        [(model, inputs(make), run(model, **inputs(make))) for model, make in models],
        tmp_path / "models.pt",
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PICKLED, tmp_path / "models.pt"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr
