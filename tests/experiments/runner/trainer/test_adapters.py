"""Low-rank adapters and frozen weights."""

import importlib.util
import json

import pytest
import torch
import transformers
from helpers import toy
from helpers.stopping import stop_signal
from helpers.swap_models import bert, build_model, gpt2, inputs
from helpers.toy import assert_same
from torch import nn

from crt_exp import from_pretrained, swap_attention
from crt_exp.experiments.models.language import LanguageDescription, LanguageModel
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.trainer_config import (
    Adapters,
    TrainerConfig,
    freeze,
    linear_layers,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

LOW_RANK = {
    "rank": 2,
    "alpha": 4.0,
    "dropout": 0.0,
    "targets": None,
    "also": [],
    "merge": False,
}


ADAPTED = [
    "trainer.adapt=lora",
    "trainer.lora.rank=2",
    "trainer.lora.targets=[inner.0]",
    "trainer.lora.also=[outer]",
]


SHORT = [
    "trainer.epochs=1",
    "trainer.save_every=5",
    "trainer.log_every=4",
    "trainer.keep=5",
    "trainer.lr=1e-2",
]


needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


def model_of(run, step):
    return checkpoint.load_tensors(run / "checkpoints" / f"step-{step}" / "model.safetensors")


@needs_peft
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_adapters_begin_as_nothing_and_merge_into_what_they_were(make):
    """On the projections of swapped attention; only they are trained, and every other weight stays."""
    model = swap_attention(build_model(make), "favorp", m=8)
    batch = inputs(make)
    names = list(model.state_dict())
    with torch.no_grad():
        before = model(**batch)[0]
        adapters = Adapters(model, LOW_RANK)
        actual = model(**batch)[0]
        torch.testing.assert_close(actual, before)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        for name in trained:
            assert ".lora_" in name
        expected = {name for name, _ in model.named_parameters() if name not in trained} | (
            {"lm_head.weight"} if make is gpt2 else set()
        )
        assert adapters.stay == expected
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p)) if name in trained else None
        moved = model(**batch)[0]
        adapters.merge()
        actual = model(**batch)[0]
        torch.testing.assert_close(actual, moved, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved, before, atol=1e-3)
    assert list(model.state_dict()) == names


def masked_bert():
    return transformers.BertForMaskedLM(bert().config).eval()


@needs_peft
@pytest.mark.parametrize("make, target", [(gpt2, "c_attn"), (masked_bert, "query")])
@torch.no_grad()
def test_merged_adapters_are_what_was_evaluated(make, target, tmp_path):
    """In the model and in its folder."""
    model = swap_attention(make(), "favorp", m=8)
    batch = {"input_ids": torch.arange(3, 9)[None]}
    adapters = Adapters(model, LOW_RANK | {"targets": [target], "merge": True})
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    evaluated = model(**batch)[0]
    words = model.get_input_embeddings().weight.clone()
    adapters.merge()
    actual = model(**batch)[0]
    torch.testing.assert_close(actual, evaluated, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.get_input_embeddings().weight, words)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    again = from_pretrained(type(model), tmp_path).eval()
    actual = again(**batch)[0]
    torch.testing.assert_close(actual, evaluated, rtol=1e-4, atol=1e-5)


@needs_peft
def test_merging_into_a_tied_head_is_refused():
    sizes = {"d": 8, "heads": 2, "layers": 1, "d_ff": 8}
    model = LanguageModel(LanguageDescription(9, 8, sizes, True), Mechanism.of("exact").layer)
    with pytest.raises(ConfigError, match="trainer.lora.merge=true: head is tied.*trainer.lora"):
        Adapters(model, LOW_RANK | {"targets": ["head"], "merge": True})
    Adapters(model, LOW_RANK | {"targets": ["head"]})


def test_targets_are_the_projections_of_attention_unless_they_are_named():
    model = swap_attention(build_model(bert), "hedgehog", m=4)
    actual = {name.rpartition(".")[2] for name in linear_layers(model, None)}
    assert actual == {
        "query",
        "key",
        "value",
    }
    assert len(linear_layers(model, ["attention.output.dense"])) == 2
    assert len(linear_layers(model, ["dense"])) == 6
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 1, enable_nested_tensor=False
    )
    assert linear_layers(encoder, ["linear1"]) == ["layers.0.linear1"]
    with pytest.raises(
        ConfigError, match="unknown name in trainer.lora.targets 'out_proj'"
    ):  # whose weights are read
        linear_layers(encoder, ["out_proj"])


@needs_peft
def test_adapted_runs_keep_what_is_trained_and_continue_on_the_same_base_alone(
    typed, tmp_path, monkeypatch
):
    actual = typed(*ADAPTED, *SHORT, directory="whole")[0]
    assert actual == 0
    first = model_of(tmp_path / "whole", 5)
    then = model_of(tmp_path / "whole", 10)
    assert sorted(first) == [
        "inner.0.lora_A.default.weight",
        "inner.0.lora_B.default.weight",
        "outer.bias",
        "outer.weight",
    ]
    assert not any(torch.equal(first[name], then[name]) for name in first)
    adapter = tmp_path / "whole" / "adapter"
    actual = json.loads((adapter / "adapter_config.json").read_text())["r"]
    assert actual == 2
    kept = checkpoint.load_tensors(adapter / "adapter_model.safetensors")
    assert sorted(kept) == [f"base_model.model.inner.0.lora_{side}.weight" for side in "AB"]
    actual = sorted(checkpoint.load_tensors(adapter / "trained.safetensors"))
    assert actual == [
        "outer.bias",
        "outer.weight",
    ]
    with stop_signal(toy.Toy, 7):
        assert typed(*ADAPTED, *SHORT)[0] == 143
    build = toy.Toy.build
    with monkeypatch.context() as patch:
        patch.setattr(
            toy.Toy,
            "build",
            lambda self, mechanism: torch.manual_seed(5) and build(self, mechanism),
        )
        code, _, err = typed(*ADAPTED, *SHORT, "resume=auto")
    assert code == 2, err
    assert "adapters of a different base model" in err, err
    assert typed(*ADAPTED, *SHORT, "resume=auto")[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_adapters_without_their_library_are_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "peft" else find(name, *rest),
    )
    with pytest.raises(ConfigError, match=r"pip install 'crt_exp\[adapt\]'"):
        TrainerConfig(**toy.TRAINER | {"adapt": "lora"})


def test_frozen_weights_stay():
    model = toy.Network(6, 16, 0.0)
    freeze(model, ["inner"])
    actual = {name for name, p in model.named_parameters() if p.requires_grad}
    assert actual == {
        "outer.weight",
        "outer.bias",
    }
