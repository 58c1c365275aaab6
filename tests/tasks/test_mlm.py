"""task=mlm as a user types it: pretraining on local and streamed text, and what it leaves for other tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import check_refused
from small_bert import VOCABULARY, sentence, write_glue, write_model, write_text
from stopping import stopped_and_continued
from transformers import AutoModelForMaskedLM, AutoTokenizer

from crt_exp import swap_attention
from crt_exp.data.vocabularies import new_tokenizer
from crt_exp.mechanism import Mechanism
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.mlm import MLM, MaskedModel

HERE = Path(__file__).parents[1]
HUB = {"name": None, "config": None, "split": "train", "column": "text", "data_files": None}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
OPTIONS = {"text": None, "validation_text": None, "data_dir": None, "source": "files", "hub": HUB, "model": None,
           "init": "scratch", "sizes": SIZES, "vocabulary": None, "vocabulary_size": 150, "lowercase": True,
           "block": 16, "share": 0.15, "cache_dir": None}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_text(root / "text.txt", 300)
    write_model(root / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for part in ("train", "valid", "test"):
        write_text(root / "wikitext2" / f"wiki.{part}.tokens", 200 if part == "train" else 60)
    return root


@pytest.fixture
def typed(typed, files, monkeypatch, tmp_path):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        monkeypatch.delenv("CRT_DATA", raising=False)
        base = [f"task.text={files / 'text.txt'}", *[f"task.sizes.{k}={v}" for k, v in SIZES.items()],
                "task.vocabulary_size=150", "task.block=16", f"task.cache_dir={files / 'cache'}", "trainer.batch=8",
                "trainer.epochs=1", "features.m=8"]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        own = [b for b in own if "attention=exact" not in args or not b.startswith("features")]
        own = ["task=mlm", *own] if "task=glue" not in args else ["trainer.epochs=1", "features.m=8", "trainer.batch=8"]
        return typed("logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return run


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["favorpp", *[pytest.param(a, marks=pytest.mark.slow)
                                                    for a in ("exact", "relu")]])
def test_pretraining_learns_and_keeps_a_model(attention, typed, tmp_path):
    """A new BERT with a vocabulary of its own; <run>/model loads by from_pretrained and gives the recorded numbers."""
    code, out, err = typed(f"attention={attention}", "trainer.epochs=3", "trainer.lr=5e-3")
    assert code == 0 and err == "" and "mlm: perplexity" in out, err
    lines, folder = records(tmp_path / "run"), tmp_path / "run" / "model"
    validation = [r["perplexity"] for r in lines if r["split"] == "validation"]
    assert lines[-1]["final"] and lines[-1]["perplexity"] == min(validation) < 50
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if attention != "exact":
        swap_attention(model, attention, m=8, seed=7)  # the noise is the saved one
    task = task_of(tmp_path)
    assert tokenizer.get_vocab() == task.tokenizer.get_vocab() and len(tokenizer) <= 150
    with torch.no_grad():
        found = task.evaluate(MaskedModel(model.eval()), "validation", Reader(task, batch=8))
    assert found["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-5) and found["accuracy"] == lines[-1]["accuracy"]


def task_of(tmp_path, **options):
    text = write_text(tmp_path / "same.txt", 300)
    return MLM(**OPTIONS | {"text": str(text)} | options)


@pytest.mark.slow
def test_fine_tuning_goes_on_from_it(typed, tmp_path):
    """task.init=<run> takes weights and noise of that run; task.model=<run> the weights alone."""
    assert typed("attention=favorpp")[0] == 0
    saved = checkpoint.load_tensors(tmp_path / "run" / "model" / "model.safetensors")
    folder = write_glue(tmp_path / "RTE", "rte")
    glue = ["task=glue", "task.dataset=rte", f"task.data_dir={folder}", "task.max_length=40", "attention=favorpp",
            "trainer.lr=1e-9", "seed=3"]
    for directory, given in {"noise": "task.init", "weights": "task.model"}.items():
        code, _, err = typed(*glue, f"{given}={tmp_path / 'run'}", directory=directory)
        assert code == 0, err
        found = checkpoint.load_tensors(tmp_path / directory / "model" / "model.safetensors")
        omega = "bert.encoder.layer.0.attention.self.swapped.omega"
        assert torch.equal(found[omega], saved[omega]) == (directory == "noise")
        embedding = "bert.embeddings.word_embeddings.weight"
        torch.testing.assert_close(found[embedding], saved[embedding], atol=1e-6, rtol=0)


def test_wikitext_is_the_default(typed, tmp_path, files, monkeypatch):
    code, _, err = typed("task.text=null", f"task.data_dir={files / 'wikitext2'}", "attention=favorp")
    assert code == 0, err
    assert {r["split"] for r in records(tmp_path / "run")} == {"train", "validation", "test"}


@pytest.mark.slow
def test_uptraining_starts_from_the_pretrained_weights(typed, tmp_path, files):
    """No step: the perplexity of the exact model under the run's attention;
    with more features it is nearer to the exact one."""
    base = ["trainer.steps=0", f"task.model={files / 'bert'}", "task.init=uptrain"]
    found = {}
    for name, args in {"exact": ["attention=exact"], "4": ["attention=favorpp", "features.m=4"],
                       "512": ["attention=favorpp", "features.m=512"]}.items():
        code, _, err = typed(*base, *args, directory=name)
        assert code == 0, err
        found[name] = records(tmp_path / name)[-1]["loss"]
    assert abs(found["512"] - found["exact"]) < abs(found["4"] - found["exact"]) and found["512"] != found["exact"]


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Electra", "Albert"])
def test_logits_of_the_masked_tokens_alone(kind):
    """Equal to the whole model's at those places, with equal gradients."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
             "embedding_size": 16}
    if kind == "DistilBert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    ids, chosen = torch.randint(5, 50, (3, 9)), torch.rand(3, 9) < 0.3
    labels = torch.where(chosen, ids, -100)
    whole = model(input_ids=ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits, kept = MaskedModel(model)(ids, labels)
    torch.testing.assert_close(logits, whole.logits[chosen])
    torch.nn.functional.cross_entropy(logits, kept).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, msg=name)


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_numbers(typed, tmp_path, files, monkeypatch):
    args = ["trainer.steps=9", "trainer.save_every=3", "trainer.log_every=2", "attention=favorpp",
            f"task.model={files / 'bert'}"]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, MLM, 5, *args)
    assert records(tmp_path / "stopped") == records(tmp_path / "run")
    one, two = (checkpoint.load_tensors(tmp_path / d / "model" / "model.safetensors") for d in ("run", "stopped"))
    assert all(torch.equal(one[key], two[key]) for key in one)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_held_out_blocks_are_not_trained_on(tmp_path):
    task = task_of(tmp_path)
    train, validation = task.blocks["train"], task.blocks["validation"]
    assert len(validation) == -(-(len(train) + len(validation)) // 50) and task.test is None
    masks = [batch["labels"] for batch in task.batches("validation", Plan(4))]
    again = [batch["labels"] for batch in task.batches("validation", Plan(4))]
    assert all(map(torch.equal, masks, again))  # the same places at every evaluation
    epochs = [next(iter(task.batches("train", Plan(4, epoch=e))))["labels"] for e in (0, 1)]
    assert not torch.equal(*epochs)


@pytest.mark.slow
def test_vocabulary_is_the_same_in_every_process(tmp_path):
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text("\n".join(sentence(i) + " " + "".join(rng.choice(list("abcdefgh"), 5)) for i in range(200)))
    code = ("from crt_exp.data.vocabularies import new_tokenizer\n"
            f"print(new_tokenizer('wordpiece', {str(text)!r}, 220).get_vocab())")
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env=os.environ | {"PYTHONPATH": str(HERE.parent)}).stdout for _ in range(2)]
    own = new_tokenizer("wordpiece", text, 220, cache_dir=tmp_path / "cache").get_vocab()
    assert found[0] == found[1] == f"{own}\n"


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.text=/nowhere.txt"], ["/nowhere.txt: expected a UTF-8 text file"]),
    (["task.text=null", "task.source=files"], ["wiki.train.tokens", "CRT_DATA is not set", "fetch wikitext2"]),
    (["task.init=uptrain"], ["task.init=uptrain", "task.model=..."]),
    (["task.block=2"], ["task.block=2", "expected an integer >= 3"]),
    (["task.block=600", "+task.sizes.max_position_embeddings=512"], ["task.block=600", "512"]),
    (["task.share=1.5"], ["task.share=1.5"]),
    (["task.vocabulary_size=20"], ["task.vocabulary_size=20: expected at least"]),
    (["+task.sizes.hidden_sise=3"], ["hidden_sise", "did you mean task.sizes.hidden_size?"]),
    (["task.sizes.hidden_size=abc"], ["task.sizes", "hidden_size"]),
    (["task.sizes.num_attention_heads=0"], ["task.sizes", "'num_attention_heads': 0"]),
    (["+task.sizes.hidden_dropout_prob=2.0"], ["task.sizes", "'hidden_dropout_prob': 2.0", "between 0 and 1"]),
    (["+task.sizes.hidden_act=abc"], ["'hidden_act': 'abc'", "transformers cannot build the model"]),
    (["+task.sizes.id2label=5"], ["'id2label': 5", "transformers cannot build the model"]),
    (["trainer.epochs=0.001"], ["trainer.epochs=0.001: no step"]),
    (["task.sizes.hidden_size=33"], ["hidden_size=33", "num_attention_heads=2"]),
    (["task.vocabulary=/nowhere/vocab.txt"], ["/nowhere/vocab.txt", "No such file"]),
    (["task.hub.name=text"], ["task.text, task.hub.name: expected only one"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_a_run_that_has_not_ended_is_no_start(typed, tmp_path, files):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_text("seed: 0\n")
    code, _, err = typed(f"task.init={tmp_path / 'half'}")
    assert code == 2 and "no config.json" in err and "resume=auto" in err


def test_init_from_a_run_with_another_attention(typed, tmp_path):
    """The keys that differ are named, and the way out works: weights alone, with new noise."""
    assert typed("attention=favorp", "trainer.steps=0", directory="mlm")[0] == 0
    run = tmp_path / "mlm"
    glue = ["task=glue", f"task.data_dir={write_glue(tmp_path / 'RTE', 'rte')}", "task.dataset=rte",
            "task.max_length=40", "trainer.steps=0"]
    code, _, err = typed(*glue, f"task.init={run}", "attention=favorpp", "features.m=16")
    assert code == 2 and "features.m (it was 8, now 16)" in err and f"task.init=uptrain task.model={run}/model" in err
    assert "features (it was crt_exp.features.PosRF, now crt_exp.features.OPRF)" in err and len(err.splitlines()) == 1
    assert typed(*glue, f"task.init={run}", "attention=exact")[0] == 2
    code, _, err = typed(*glue, "task.init=uptrain", f"task.model={run}", "attention=favorpp", "features.m=16")
    assert code == 0, err


def test_kept_with_what_the_attention_was(files):
    task = MLM(**OPTIONS | {"text": str(files / "text.txt"), "model": str(files / "bert")})
    model = task.build(Mechanism.of("favorpp", m=8))
    assert model.model.config.crt_exp["mechanisms"][0]["m"] == 8 and len(task.tokenizer) == len(VOCABULARY)
