"""trainer.adapt=lora on models of transformers: from a run, with peft's own loading, merged, and with a new head."""

import json

import pytest
import torch
from small_bert import write_text

from crt_exp import swap_attention
from crt_exp.runner import checkpoint

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 300)


@pytest.fixture
def decoder(typed, text, tmp_path):
    base = ["task=mlm", "task.causal=true", f"task.text={text}", "task.block=16", "trainer.batch=8", "logger=none",
            f"task.cache_dir={text.parent / 'cache'}", "trainer.cpu=true"]
    sizes = ["task.sizes.hidden_size=16", "task.sizes.intermediate_size=16", "task.vocabulary_size=300"]
    run = lambda *args, directory: typed(*base, *args, f"hydra.run.dir={tmp_path / directory}")
    code, _, err = run(*sizes, "attention=exact", "trainer.epochs=1", directory="exact")
    assert code == 0, err
    return run


def last(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_adapted_from_another(decoder, merge, tmp_path):
    """peft loads what it keeps onto the same swapped model; merged, the run is one to start from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    arm = ["attention=favorp", "features.m=8"]
    light = ["trainer.adapt=lora", "trainer.lora.rank=4", f"trainer.lora.merge={str(merge).lower()}", "trainer.lr=1e-2",
             "task.init=uptrain", f"task.model={tmp_path / 'exact'}", "trainer.steps=6"]
    code, _, err = decoder(*arm, *light, directory="light")
    assert code == 0, err
    loss = last(tmp_path / "light")["loss"]
    code, _, err = decoder(*arm, f"task.init={tmp_path / 'light'}", "trainer.steps=0", directory="on")
    if merge:
        assert code == 0 and last(tmp_path / "on")["loss"] == pytest.approx(loss, rel=1e-5), err
        return
    assert code == 2 and "only adapters are saved (adapter/); run it with trainer.lora.merge=true" in err
    model = swap_attention(AutoModelForCausalLM.from_pretrained(tmp_path / "exact" / "model"), "favorp", m=8).eval()
    ids = torch.arange(10)[None] + 20
    with torch.no_grad():
        before = model(ids).logits
        loaded = PeftModel.from_pretrained(model, tmp_path / "light" / "adapter").eval()
        assert not torch.allclose(loaded(ids).logits, before, atol=1e-4)
    kept = checkpoint.load_tensors(tmp_path / "light" / "adapter" / "adapter_model.safetensors")
    state = loaded.state_dict()
    assert all(torch.equal(state[name.replace(".weight", ".default.weight")], t) for name, t in kept.items())


def test_transfer_and_then_adapters(decoder, tmp_path):
    """LoLCATs' order: projections are learned first and then stay, adapters are trained, and merged into one model."""
    arm = ["attention=hedgehog", "features.m=8"]
    code, _, err = decoder("task=transfer", f"task.init={tmp_path / 'exact'}", *arm, "trainer.steps=4",
                           directory="transferred")
    assert code == 0, err
    light = ["trainer.adapt=lora", "trainer.lora.rank=4", "trainer.lora.merge=true", "trainer.steps=4",
             "trainer.lr=1e-2"]
    code, _, err = decoder(f"task.init={tmp_path / 'transferred'}", *arm, *light, directory="light")
    assert code == 0, err
    before, after = (checkpoint.load_tensors(tmp_path / run / "model" / "model.safetensors")
                     for run in ("transferred", "light"))
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {f"transformer.h.{i}.attn.{name}.weight" for i in range(2) for name in ("c_attn", "c_proj")}
    assert not [name for name in after if "lora" in name]


def test_a_new_head_is_trained_with_the_adapters():
    """The weights that a source lacks, here those of a classifier."""
    from swap_models import bert, made

    from crt_exp.runner.trainer_config import Adapters

    model = torch.nn.ModuleDict({"encoder": made(bert), "classifier": torch.nn.Linear(16, 2)})
    model.__dict__["made_anew"] = ["classifier.bias", "classifier.weight"]
    adapters = Adapters(model, {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["query"], "also": [],
                                "merge": False})
    assert {"classifier.weight", "classifier.bias"}.isdisjoint(adapters.stay)
    assert all(p.requires_grad for p in model["classifier"].parameters())
