"""Attention transfer: what a taught layer sees and learns, by the command line and for any model; what is refused."""

import json
import warnings

import pytest
import torch
from small_bert import write_text
from swap_models import bert, gpt2, inputs, made, vit
from torch.testing import assert_close

from crt_exp import swap_attention
from crt_exp.tasks.transfer import TransferModel, layer_parameters, swapped_layers, transfer_attention

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ARMS = {"hedgehog": {}, "favorpp": {"learn": "projections"}, "favorsharp": {"learn": "parameters"}}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 300)


@pytest.fixture
def typed(typed, text, tmp_path):
    def run(*args, directory="run"):
        base = ["task=transfer", "task.causal=true", f"task.text={text}", "task.block=16", "trainer.batch=8",
                f"task.init={tmp_path / 'exact'}", f"task.cache_dir={text.parent / 'cache'}", "logger=none",
                "trainer.cpu=true"]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        return typed(*own, f"hydra.run.dir={tmp_path / directory}", *args)
    return run


@pytest.fixture
def exact(typed, tmp_path):
    sizes = [f"task.sizes.{key}={value}" for key, value in SIZES.items()]
    code, _, err = typed("task=mlm", "task.init=scratch", "task.vocabulary_size=300", *sizes, "attention=exact",
                         "trainer.epochs=1", "trainer.lr=5e-3", directory="exact")
    assert code == 0, err


def last(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


# ---- any model


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_a_taught_model_is_the_exact_one(make, name):
    """Its output, and with it every layer's input; its errors depend on no other layer; only the layers are trained."""
    plain, batch = made(make), inputs(make)
    with torch.no_grad():
        expected = plain(**batch)[0]
    model = swap_attention(made(make), name, m=8, **ARMS[name])
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
    assert errors.shape == (2,) and (errors > 0).all()
    assert again[0] != errors[0] and torch.equal(again[1], errors[1])
    ours = layer_parameters(swapped_layers(model))
    assert all(p.grad is not None and p.requires_grad for p in ours)
    assert all(p.grad is None for p in model.parameters() if not any(p is own for own in ours))


@pytest.mark.parametrize("make", [gpt2, vit], ids=["gpt2", "vit"])
def test_transfer_brings_any_model_nearer_to_exact(make):
    model, batches = swap_attention(made(make), "hedgehog", m=8), [inputs(make, seed=seed) for seed in range(4)]
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        before = TransferModel(model)
        first = sum(before(**batch)[0] for batch in batches)
    for hook in before.hooks:
        hook.remove()
    for p in model.parameters():
        p.requires_grad_(True)
    assert transfer_attention(model, batches, steps=24, lr=3e-2) is model
    with torch.no_grad():
        then = sum(TransferModel(model)(**batch)[0] for batch in batches)
    assert (then < 0.7 * first).all() and not model.training
    assert wanted == [name for name, _ in model.named_parameters()]


def test_the_model_reads_each_batch_once():
    model, passes = swap_attention(made(gpt2), "hedgehog", m=4), []
    model.register_forward_hook(lambda *_: passes.append(1))
    transfer_attention(model, [inputs(gpt2, seed=seed) for seed in range(2)], steps=5)
    assert len(passes) == 2


def test_padding_teaches_nothing():
    model = swap_attention(made(bert), "hedgehog", m=4)
    batch, keep = inputs(bert), torch.ones(2, 9, dtype=torch.long)
    keep[:, 6:] = 0
    taught = TransferModel(model)
    one, _ = taught(**batch, attention_mask=keep)
    batch["input_ids"][:, 6:] = 5
    assert_close(taught(**batch, attention_mask=keep)[0], one)


@pytest.mark.parametrize("name", ["window", "nearfar"])
def test_nothing_to_learn_is_said(name):
    with pytest.raises(ValueError, match=f"attention={name}: .*; use hedgehog"):
        transfer_attention(swap_attention(made(bert), name), [inputs(bert)])


def test_what_is_no_swapped_model_or_no_batch_is_refused():
    with pytest.raises(ValueError, match="BertModel: no swapped attention"):
        transfer_attention(made(bert), [inputs(bert)])
    with pytest.raises(ValueError, match="batches: empty"):
        transfer_attention(swap_attention(made(bert), "hedgehog", m=4), [])


# ---- the command line


def test_a_run_of_transfer_and_what_goes_on_from_it(exact, typed, tmp_path):
    """Nearer to exact with every record; the model it keeps has the swapped loss that was recorded."""
    arm = ["attention=hedgehog", "features.m=8", "trainer.steps=12", "trainer.lr=3e-2"]
    code, out, err = typed(*arm, "trainer.eval_every=6")
    assert code == 0 and err == "" and "of exact attention, worst layer" in out, err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [line["error"] for line in lines if line["split"] == "validation" and not line.get("final")]
    assert errors[1] < errors[0] <= 1.5
    code, _, err = typed("task=mlm", "attention=hedgehog", "features.m=8", f"task.init={tmp_path / 'run'}",
                         "trainer.steps=0", directory="on")
    assert code == 0, err
    assert last(tmp_path / "on")["loss"] == pytest.approx(last(tmp_path / "run")["loss"], rel=1e-5)
    code, _, err = typed("task=mlm", f"task.init={tmp_path / 'exact'}", "attention=exact", "trainer.steps=0",
                         directory="base")
    assert last(tmp_path / "run")["exact_loss"] == pytest.approx(last(tmp_path / "base")["loss"], rel=1e-5)


def test_bad_input_is_told_and_leaves_nothing(exact, typed, tmp_path):
    arm = ["attention=hedgehog", "features.m=8"]
    assert typed(*arm, "trainer.steps=1")[0] == 0
    cases = [([*arm, "task.init=scratch"], "task.init=scratch: expected a model trained with exact attention; set"),
             ([*arm, "task.init=uptrain"], "task.init=uptrain: expected a model trained with exact attention; set"),
             ([*arm, f"task.init={tmp_path / 'run'}"], f"task.init={tmp_path / 'run/model'}: expected exact attention"),
             (["attention=exact"], "attention=exact: expected an approximate method"),
             (["attention=window"], "attention=window: has nothing to train; use"),
             (["attention=favorpp", "features.m=8"], "trainer.steps=0 to evaluate"),
             ([*arm, "trainer.adapt=lora"], "not supported with trainer.adapt")]
    for i, (args, words) in enumerate(cases):
        code, _, err = typed(*args, directory=f"bad-{i}")
        assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
        assert not (tmp_path / f"bad-{i}").exists()
