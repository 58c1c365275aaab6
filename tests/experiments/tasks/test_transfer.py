"""Attention transfer and low-rank adapters: what a taught layer sees and learns, and the runs that go on from it."""

import warnings

import pytest
import torch
from helpers.refusals import check_error
from helpers.small_bert import write_text
from helpers.swap_models import bert, build_model, gpt2, inputs, vit
from helpers.task_options import composed_task
from helpers.toy import records
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from crt_exp import swap_attention
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.trainer_config import Adapters
from crt_exp.experiments.tasks.transfer import (
    TransferModel,
    layer_parameters,
    swapped_layers,
    transfer_attention,
)
from crt_exp.mechanism import Mechanism

ARMS = {
    "hedgehog": {},
    "favorpp": {"learn": "projections"},
    "favorsharp": {"learn": "parameters"},
}


# ---- any model


@pytest.mark.parametrize(
    "make, name",
    [
        (gpt2, "hedgehog"),
        (bert, "favorpp"),
        (gpt2, "favorsharp"),
    ],
)
def test_a_model_in_transfer_computes_exact_attention(make, name):
    """Its output, and with it every layer's input; its errors depend on no other layer; only the layers are trained."""
    plain = build_model(make)
    batch = inputs(make)
    with torch.no_grad():
        expected = plain(**batch)[0]
    model = swap_attention(build_model(make), name, m=8, **ARMS[name])
    taught = TransferModel(model).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no statistics yet.*")
        errors, out = taught(**batch)
        assert_close(out[0], expected, rtol=1e-4, atol=1e-5)
        errors.mean().backward()
        with torch.no_grad():
            for parameter in layer_parameters(swapped_layers(model)[:1]):
                parameter.mul_(1.5)
        again, _ = taught(**batch)
    assert errors.shape == (2,)
    assert (errors > 0).all()
    assert again[0] != errors[0]
    assert torch.equal(again[1], errors[1])
    ours = layer_parameters(swapped_layers(model))
    for p in ours:
        assert p.grad is not None
        assert p.requires_grad
    for p in model.parameters():
        if not any(p is own for own in ours):
            assert p.grad is None


@pytest.mark.parametrize("make", [gpt2, vit], ids=["gpt2", "vit"])
def test_transfer_brings_any_model_nearer_to_exact(make):
    model = swap_attention(build_model(make), "hedgehog", m=8)
    batches = [inputs(make, seed=seed) for seed in range(4)]
    passes = []
    wanted = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            wanted.append(name)
    with torch.no_grad():
        before = TransferModel(model)
        first = sum(before(**batch)[0] for batch in batches)
    for hook in before.hooks:
        hook.remove()
    for p in model.parameters():
        p.requires_grad_(True)
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    assert transfer_attention(model, batches, steps=24, lr=3e-2) is model
    hook.remove()
    assert len(passes) == 4  # each batch is read once
    with torch.no_grad():
        then = sum(TransferModel(model)(**batch)[0] for batch in batches)
    assert (then < 0.7 * first).all()
    assert not model.training
    assert wanted == [name for name, _ in model.named_parameters()]


def test_padding_does_not_enter_the_transfer_loss():
    model = swap_attention(build_model(bert), "hedgehog", m=4)
    batch = inputs(bert)
    keep = torch.ones(2, 9, dtype=torch.long)
    keep[:, 6:] = 0
    taught = TransferModel(model)
    one, _ = taught(**batch, attention_mask=keep)
    batch["input_ids"][:, 6:] = 5
    actual = taught(**batch, attention_mask=keep)[0]
    assert_close(actual, one)


def test_unswapped_models_and_bad_batches_are_refused():
    with pytest.raises(ValueError, match="BertModel: no swapped attention"):
        transfer_attention(build_model(bert), [inputs(bert)])
    with pytest.raises(ValueError, match="attention=window: .*; use hedgehog"):
        transfer_attention(swap_attention(build_model(bert), "window"), [inputs(bert)])
    with pytest.raises(ValueError, match="batches: empty"):
        transfer_attention(swap_attention(build_model(bert), "hedgehog", m=4), [])


# ---- runs

HEDGEHOG = ["attention=hedgehog", "features.m=8"]
TEXT = ["task.causal=true", "task.block=16", "task.cache_dir=null"]
LORA = ["trainer.adapt=lora", "trainer.lora.rank=4", "trainer.lr=1e-2"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """<root>/text: a model with exact attention; <root>/text.txt."""
    root = tmp_path_factory.mktemp("exact")
    write_text(root / "text.txt", 300)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    words = [f"task.sizes.{key}={size}" for key, size in sizes.items()]
    text = ["task=mlm", f"task.text={root / 'text.txt'}", "task.vocabulary_size=300", *TEXT]
    task = composed_task([*text, *words])
    model = task.build(Mechanism.of("exact"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # sharp enough for attention to matter
    task.export(model, model.state_dict(), root / "text")
    return root


@pytest.fixture
def run(typed, exact, tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)

    def go(task, *args, directory="run"):
        return typed(
            f"task={task}",
            f"task.text={exact / 'text.txt'}",
            *TEXT,
            "logger=none",
            "trainer.batch=8",
            "trainer.cpu=true",
            *args,
            f"hydra.run.dir={tmp_path / directory}",
        )

    return go


def test_a_transferred_model_goes_on_with_adapters(run, exact, tmp_path):
    """LoLCATs' order: projections are learned first and then stay; adapters are trained and merged into one model."""
    code, out, err = run(
        "transfer",
        f"task.init={exact / 'text'}",
        *HEDGEHOG,
        "trainer.steps=12",
        "trainer.lr=3e-2",
        "trainer.eval_every=6",
    )
    assert code == 0, err
    assert err == "", err
    assert "transfer: error 0." in out, err
    found = records(tmp_path / "run")
    errors = []
    for line in found:
        if line["split"] == "validation" and not line.get("final"):
            errors.append(line["error"])
    assert errors[1] < errors[0] <= 1.5
    code, _, err = run(
        "mlm",
        f"task.init={exact / 'text'}",
        "attention=exact",
        "trainer.steps=0",
        directory="exact",
    )
    assert code == 0
    actual = found[-1]["exact_loss"]
    expected = records(tmp_path / "exact")[-1]["loss"]
    assert actual == pytest.approx(expected, rel=1e-5)
    code, _, err = run(
        "mlm", f"task.init={tmp_path / 'run'}", *HEDGEHOG, "trainer.steps=0", directory="on"
    )
    assert code == 0, err
    actual = records(tmp_path / "on")[-1]["loss"]
    assert actual == pytest.approx(found[-1]["loss"], rel=1e-5), err
    pytest.importorskip("peft")
    code, _, err = run(
        "mlm",
        f"task.init={tmp_path / 'run'}",
        *HEDGEHOG,
        *LORA,
        "trainer.lora.merge=true",
        "trainer.steps=4",
        directory="light",
    )
    assert code == 0, err
    before, after = (
        checkpoint.load_tensors(tmp_path / directory / "model" / "model.safetensors")
        for directory in ("run", "light")
    )
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    expected = set()
    for i in range(2):
        for name in ("c_attn", "c_proj"):
            expected.add(f"transformer.h.{i}.attn.{name}.weight")
    assert moved == expected


def test_peft_loads_the_adapters_onto_the_swapped_model(run, exact, tmp_path):
    peft = pytest.importorskip("peft")
    favorp = ["attention=favorp", "features.m=8"]
    code, _, err = run(
        "mlm",
        "task.init=uptrain",
        f"task.model={exact / 'text'}",
        *favorp,
        *LORA,
        "trainer.steps=6",
    )
    assert code == 0, err
    model = swap_attention(
        AutoModelForCausalLM.from_pretrained(exact / "text" / "model"), "favorp", m=8
    ).eval()
    ids = torch.arange(10)[None] + 20
    with torch.no_grad():
        before = model(ids).logits
        loaded = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "adapter").eval()
        assert not torch.allclose(loaded(ids).logits, before, atol=1e-4)
    kept = checkpoint.load_tensors(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    state = loaded.state_dict()
    for name, t in kept.items():
        actual = state[name.replace(".weight", ".default.weight")]
        assert torch.equal(actual, t)
    check_error(
        run("mlm", f"task.init={tmp_path / 'run'}", *favorp, directory="on"),
        "only adapters are saved (adapter/); run it with trainer.lora.merge=true",
    )


def test_a_new_head_is_trained_with_the_adapters():
    """The weights that a source lacks, here those of a classifier."""
    pytest.importorskip("peft")
    model = torch.nn.ModuleDict(
        {"encoder": build_model(bert), "classifier": torch.nn.Linear(16, 2)}
    )
    model.__dict__["made_anew"] = ["classifier.bias", "classifier.weight"]
    adapters = Adapters(
        model,
        {
            "rank": 2,
            "alpha": 4.0,
            "dropout": 0.0,
            "targets": ["query"],
            "also": [],
            "merge": False,
        },
    )
    assert {"classifier.weight", "classifier.bias"}.isdisjoint(adapters.stay)
    for p in model["classifier"].parameters():
        assert p.requires_grad


@pytest.mark.parametrize(
    "task, args, words",
    [
        (
            "transfer",
            ["task.init=scratch", *HEDGEHOG],
            "task.init=scratch: expected a model trained with exact attention",
        ),
        ("transfer", ["attention=favorpp", "features.m=8"], "trainer.steps=0 to evaluate"),
        ("transfer", ["attention=window"], "attention=window: has nothing to train; use"),
    ],
    ids=str,
)
def test_what_is_refused(task, args, words, run, exact, tmp_path):
    start = f"task.init={exact / 'text'}"  # the last one counts
    code, _, err = run(task, start, *args, "trainer.steps=1")
    assert code == 2, err
    assert words in err, err
    assert len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "run").exists()
