"""Saved is saved: a swapped model comes back as it was, and never silently with exact attention."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from swap_models import bert, each, gpt2, inputs, llama, made, run, swapped, vit

import crt_exp
from crt_exp import calibrate_attention, samplers, swap_attention, unswap_attention
from crt_exp.config import ConfigError
from crt_exp.nearfar.layer import NearFar

pytestmark = [pytest.mark.usefixtures("one_thread")]
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
def test_a_part_that_was_swapped_alone_comes_back_with_the_whole(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(bert().config).eval()
    swap_attention(model.bert, "favorpp", m=8)
    model.save_pretrained(tmp_path / "swapped")
    back = crt_exp.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path / "swapped").eval()
    assert torch.equal(model(**inputs(bert)).logits, back(**inputs(bert)).logits)
    unswap_attention(model.bert)
    model.save_pretrained(tmp_path / "own")
    assert not hasattr(transformers.AutoConfig.from_pretrained(tmp_path / "own"), "crt_exp")


@torch.no_grad()
def test_opened_keys_of_a_budget_and_another_number_format(tmp_path):
    model = swap_attention(made(llama), "nearfar", exact_until=0, block=1, heavy=1, cells=2)
    calibrate_attention(model, [inputs(llama)], budget=24)
    opens = [part.sizes.open for part in model.modules() if isinstance(part, NearFar)]
    model.bfloat16().save_pretrained(tmp_path)
    back = crt_exp.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, dtype="auto").eval()
    assert [part.sizes.open for part in back.modules() if isinstance(part, NearFar)] == opens != [128, 128]
    assert alike(model, back, llama)
    half = swap_attention(made(bert), "favorpp", m=8).bfloat16()
    half.save_pretrained(tmp_path / "half")
    again = crt_exp.from_pretrained(transformers.AutoModel, tmp_path / "half", dtype="auto", add_pooling_layer=False)
    assert alike(half, again.eval(), bert)


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.BertModel])
def test_a_plain_load_warns_by_name_and_forgets(auto, tmp_path):
    swapped(bert).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"favorpp in 2 of 2 layers, and this BertModel has exact attention") as caught:
        model = auto.from_pretrained(tmp_path)
    assert [each.filename for each in caught if "favorpp" in str(each.message)] == [__file__]
    assert not hasattr(model.config, "crt_exp")
    model.save_pretrained(tmp_path / "exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto.from_pretrained(tmp_path / "exact")


def test_noise_without_a_record_is_named_too(tmp_path):
    swapped(bert).save_pretrained(tmp_path)
    edit(tmp_path, lambda config: config.pop("crt_exp"))
    with pytest.warns(UserWarning, match="a model with swapped attention, and this BertModel has exact"):
        transformers.BertModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no crt_exp, so it holds no swapped model"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change, message", [
    (lambda saved: saved["mechanisms"][0].update(name="favour"), "unknown attention 'favour'"),
    (lambda saved: saved["mechanisms"][0]["described"].update(m=3), "is not what it was"),
    (lambda saved: saved.pop("layers"), "not what swap_attention writes"),
    (lambda saved: saved.update(layers={"other": 0}), "does not say which attention encoder.layer.0"),
    (lambda saved: saved["mechanisms"][0].update(rebuilds=False), "built of objects")])
def test_a_damaged_record_is_refused(change, message, tmp_path):
    swapped(bert).save_pretrained(tmp_path)
    edit(tmp_path, lambda config: change(config["crt_exp"]))
    with pytest.raises(ConfigError, match=message):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)


def test_missing_noise_and_objects_are_refused(tmp_path):
    model = swapped(bert)
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if ".swapped." not in k})
    with pytest.raises(ValueError, match="noise and statistics are not in the weights"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)
    swap_attention(model, "favorpp", m=8, sampler=samplers.iid).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="built of objects"):
        crt_exp.from_pretrained(transformers.BertModel, tmp_path)
    with pytest.raises(ValueError, match="give a class with from_pretrained"):
        crt_exp.from_pretrained(dict, tmp_path)


def test_two_models_of_one_configuration_stay_apart():
    first, second = (made(bert) for _ in range(2))
    second.config = first.config
    swap_attention(first, "uniform")
    assert not hasattr(second.config, "crt_exp")


def test_a_card_says_mechanism_fidelity_and_command(tmp_path):
    model = swapped(gpt2)
    text = crt_exp.card(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == text
    assert "| favorpp | 2 of 2 | m = 32" in text and "| transformer.h.1.attn | 0." in text
    assert "crt_exp.from_pretrained(GPT2LMHeadModel" in text and "from transformers import GPT2LMHeadModel" in text
    with pytest.raises(ValueError, match="is there already"):
        crt_exp.card(model, tmp_path)
    with pytest.raises(ValueError, match="no swapped attention"):
        crt_exp.card(made(bert))


def test_the_import_stays_light_and_waits_for_transformers():
    code = ("import sys, crt_exp\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
            "from transformers import PreTrainedModel\nassert PreTrainedModel.crt_exp_installed\n"
            "from transformers import AttentionInterface\nassert 'nearfar' in AttentionInterface().valid_keys()\n")
    subprocess.run([sys.executable, "-c", code], check=True)
