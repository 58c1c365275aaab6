"""Low-rank adapters and weights that stay: what is trained, kept, continued and merged, and what is refused."""

import importlib.util
import json
import signal

import pytest
import torch
import toy
from swap_models import bert, gpt2, inputs, made
from toy_runs import assert_same, at_call, records, send
from torch import nn
from torch.testing import assert_close

from crt_exp import swap_attention
from crt_exp.config import ConfigError
from crt_exp.runner import checkpoint
from crt_exp.runner.trainer_config import Adapters, freeze, linear_layers

pytest.importorskip("peft")
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": None, "also": [], "merge": False}
TOY = ["trainer.adapt=lora", "trainer.lora.rank=2", "trainer.lora.targets=[inner.0]", "trainer.lora.also=[outer]"]
SHORT = ["trainer.epochs=1", "trainer.save_every=5", "trainer.log_every=4", "trainer.keep=5", "trainer.lr=1e-2"]


def model_of(run, step):
    return checkpoint.load_tensors(run / "checkpoints" / f"step-{step}" / "model.safetensors")


# ---- any model


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_adapters_begin_as_nothing_and_merge_into_what_they_were(make):
    """On the projections of swapped attention; only they are trained, and every other weight stays."""
    model, batch = swap_attention(made(make), "favorp", m=8), inputs(make)
    names = list(model.state_dict())
    with torch.no_grad():
        before = model(**batch)[0]
        adapters = Adapters(model, LORA)
        assert_close(model(**batch)[0], before)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained and all(".lora_" in name for name in trained)
        assert adapters.stay == {name for name, _ in model.named_parameters() if name not in trained} | (
            {"lm_head.weight"} if make is gpt2 else set())
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p)) if name in trained else None
        moved = model(**batch)[0]
        adapters.merge()
        assert_close(model(**batch)[0], moved, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(moved, before, atol=1e-3) and list(model.state_dict()) == names


def test_targets_are_the_projections_of_attention_unless_they_are_named():
    model = swap_attention(made(bert), "hedgehog", m=4)
    assert {name.rpartition(".")[2] for name in linear_layers(model, None)} == {"query", "key", "value"}
    assert len(linear_layers(model, ["attention.output.dense"])) == 2 and len(linear_layers(model, ["dense"])) == 6
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 1, enable_nested_tensor=False)
    assert linear_layers(encoder, ["linear1"]) == ["layers.0.linear1"]
    with pytest.raises(ConfigError, match="unknown name in trainer.lora.targets 'out_proj'"):  # whose weights are read
        linear_layers(encoder, ["out_proj"])


def test_names_must_be_there():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="no projections found; set names such as 0, 1"):
        Adapters(model, LORA)
    with pytest.raises(ConfigError, match="unknown name in trainer.lora.targets 'quary'; did you mean query"):
        Adapters(made(bert), LORA | {"targets": ["quary"]})
    with pytest.raises(ConfigError, match="unknown name in trainer.lora.also 'classifier'"):
        Adapters(made(bert), LORA | {"also": ["classifier"]})
    with pytest.raises(ConfigError, match="unknown name in trainer.freeze 'embedding'"):
        freeze(model, ["embedding"])
    freeze(model, ["0"])
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


# ---- runs


def test_checkpoints_hold_what_is_trained_alone(typed, tmp_path):
    assert typed(*TOY, *SHORT)[0] == 0
    first, then = model_of(tmp_path / "run", 5), model_of(tmp_path / "run", 10)
    assert sorted(first) == ["inner.0.lora_A.default.weight", "inner.0.lora_B.default.weight", "outer.bias",
                             "outer.weight"]
    assert not any(torch.equal(first[name], then[name]) for name in first)
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 2
    kept = checkpoint.load_tensors(adapter / "adapter_model.safetensors")
    assert sorted(kept) == [f"base_model.model.inner.0.lora_{side}.weight" for side in "AB"]
    assert sorted(checkpoint.load_tensors(adapter / "trained.safetensors")) == ["outer.bias", "outer.weight"]


def test_a_stopped_run_goes_on_to_the_same_numbers(typed, tmp_path, monkeypatch, interruptible):
    assert typed(*TOY, *SHORT, directory="whole")[0] == 0
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signal.SIGTERM))
        assert typed(*TOY, *SHORT)[0] == 143
    code, out, err = typed(*TOY, *SHORT, "resume=auto")
    assert code == 0 and "step-7" in out, err
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    (tmp_path / "run" / "checkpoints" / "step-7").rename(tmp_path / "aside")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_other_weights_underneath_are_refused(typed, tmp_path, monkeypatch, interruptible):
    with monkeypatch.context() as patch:
        at_call(patch, 7, send(signal.SIGTERM))
        assert typed(*TOY, *SHORT)[0] == 143
    build = toy.Toy.build
    monkeypatch.setattr(toy.Toy, "build", lambda self, mechanism: torch.manual_seed(5) and build(self, mechanism))
    code, _, err = typed(*TOY, *SHORT, "resume=auto")
    assert code == 2 and "adapters of a different base model" in err, err


@pytest.mark.parametrize("args, words", [
    (["trainer.lora.targets=[innner]"], "unknown name in trainer.lora.targets"),
    (["trainer.lora.targets=null"], "trainer.lora.targets=null: no projections found"),
    (["trainer.lora.rank=0"], "trainer.lora.rank=0: expected an integer >= 1"),
    (["trainer.lora.dropout=1"], "trainer.lora.dropout=1"),
    (["trainer.adapt=lara"], "trainer.adapt=lara: expected lora"),
    (["trainer.freeze=[middle]"], "unknown name in trainer.freeze"),
    (["trainer.strategy=fsdp"], "trainer.adapt=lora: not supported with trainer=fsdp")], ids=str)
def test_bad_input_is_told_and_leaves_nothing(args, words, typed, tmp_path):
    given = [each for each in TOY if each.split("=")[0] not in [arg.split("=")[0] for arg in args]]
    code, _, err = typed(*given, *args)
    assert code == 2 and words in err and not (tmp_path / "run").exists(), err


def test_without_the_library_a_line_says_what_to_install(typed, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    code, _, err = typed(*TOY)
    assert code == 2 and "pip install 'crt_exp[adapt]'" in err and len(err.strip().splitlines()) == 1


def test_frozen_weights_stay(typed, tmp_path):
    assert typed("trainer.freeze=[inner]", *SHORT)[0] == 0
    first, then = model_of(tmp_path / "run", 5), model_of(tmp_path / "run", 10)
    same = {name for name in first if torch.equal(first[name], then[name])}
    assert same == {name for name in first if name.startswith("inner")} and len(first) > len(same) > 0
