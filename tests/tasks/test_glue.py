"""task=glue as a user types it, on small files in the official layout and small encoders."""

import json
import os

import numpy as np
import pytest
import torch
from small_bert import VOCABULARY, write_glue, write_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from crt_exp import swap_attention
from crt_exp.data.glue import TASKS, collate
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.glue import GLUE

OPTIONS = {"dataset": "rte", "data_dir": None, "source": "files", "model": None, "init": "uptrain", "max_length": 40,
           "examples": None, "bucketed": False}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every task's files under glue/, an exact encoder under bert/, one of another vocabulary under large/."""
    root = tmp_path_factory.mktemp("files")
    for name, task in TASKS.items():
        write_glue(root / "glue" / task.folder, name)
    write_model(root / "bert")
    return root


@pytest.fixture
def typed(typed, files, monkeypatch, tmp_path):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        monkeypatch.setenv("CRT_DATA", str(files))
        base = ["task=glue", f"task.model={files / 'bert'}", "task.max_length=40", "logger=none",
                "trainer.batch=8", "trainer.epochs=1", "trainer.lr=5e-3", "features.m=8"]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        own = [b for b in own if "attention=exact" not in args or not b.startswith("features")]
        return typed(*own, f"hydra.run.dir={tmp_path / directory}", *args)
    return run


def final(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", [n if n in ("cola", "stsb", "mnli") else pytest.param(n, marks=pytest.mark.slow)
                                  for n in TASKS])
def test_every_task(name, typed, tmp_path):
    """Eight tasks of the table and WNLI: the paper's metric, on the dev split; both dev splits of MNLI."""
    code, out, err = typed(f"task.dataset={name}", "attention=favorpp")
    assert code == 0 and err == "", err
    last, task = final(tmp_path / "run"), TASKS[name]
    assert last["split"] == "dev" and last["final"] and last["metric"] == task.metrics[0]
    assert {*task.metrics, "loss"} <= last.keys() and ("accuracy_mismatched" in last) == (name == "mnli")
    assert last["train_examples"] == 48 and f"{task.folder}: {task.metrics[0]} " in out


def test_parts_of_dev_are_those_of_its_metric(typed, tmp_path):
    """The jackknife's values: of an accuracy on parts of one size their mean is the accuracy. None where none is asked
    for, of one dev split alone, and no more than it has examples."""
    assert typed("task.dataset=mnli", "attention=favorpp", "task.parts=3")[0] == 0
    last = final(tmp_path / "run")
    parts = [last[f"accuracy_part{i}"] for i in range(3)]
    assert np.mean(parts) == pytest.approx(last["accuracy"]) and "accuracy_mismatched" in last
    assert not [key for key in last if "_part" in key and key not in {f"accuracy_part{i}" for i in range(3)}]
    code, _, err = typed("task.dataset=rte", "attention=exact", "task.parts=99", directory="many")
    assert code == 2 and "task.parts=99: expected 2 to 12" in err


def test_examples_that_are_held_out_stand_in_for_dev_until_the_end(typed, tmp_path):
    """Other rows than those of training, evaluated after each epoch; dev is read once, after the last one."""
    options = ("task.dataset=mnli", "attention=exact", "trainer.epochs=2", "task.parts=3")
    code, out, err = typed(*options, "task.held_out=16")
    assert code == 0 and err == "" and "trained on 32 of 48 examples" in out
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["split"] for record in records if record["split"] != "train"] == ["held_out", "held_out", "dev"]
    last, before = records[-1], records[-2]
    assert {"accuracy_mismatched", "accuracy_part0"} <= last.keys() and last["train_examples"] == 32
    assert "accuracy" in before and not {"accuracy_mismatched", "accuracy_part0"} & before.keys()
    code, _, err = typed(*options, "task.held_out=48", directory="all")
    assert code == 2 and "task.held_out=48: expected 1 to 47" in err


def test_no_example_that_is_held_out_is_trained_on(files):
    options = OPTIONS | {"dataset": "sst2", "data_dir": str(files / "glue/SST-2"), "model": str(files / "bert")}
    whole, task = GLUE(**options).texts["train"], GLUE(**options | {"held_out": 16})
    train, held_out = task.texts["train"], task.texts["held_out"]
    pairs = lambda texts: sorted(zip(texts.texts[0], texts.labels))
    assert (len(train), len(held_out)) == (32, 16) and pairs(whole) == sorted(pairs(train) + pairs(held_out))


@pytest.mark.slow
def test_learns(typed, tmp_path):
    """The label goes with the first word."""
    code, _, err = typed("task.dataset=sst2", "attention=favorpp", "trainer.epochs=12", "trainer.lr=2e-3")
    assert code == 0 and final(tmp_path / "run")["accuracy"] > 0.9, err


def test_metrics_are_those_of_the_kept_model(typed, tmp_path, files):
    """<run>/model loads by from_pretrained; swapped with its own noise it gives the recorded accuracy and loss."""
    assert typed("task.dataset=qnli", "attention=favorp", "features.m=16", "trainer.epochs=2")[0] == 0
    folder, last = tmp_path / "run" / "model", final(tmp_path / "run")
    model = swap_attention(AutoModelForSequenceClassification.from_pretrained(folder), "favorp", m=16, seed=5).eval()
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}
    task = GLUE(**OPTIONS | {"dataset": "qnli", "data_dir": str(files / "glue/QNLI"), "model": str(files / "bert")})
    texts = task.texts["dev"]
    batch = AutoTokenizer.from_pretrained(folder)(*texts.texts, return_tensors="pt", padding=True,
                                                  truncation=True, max_length=40)
    with torch.no_grad():
        logits = model(**batch).logits
    labels = torch.tensor(texts.labels)
    assert (logits.argmax(-1) == labels).float().mean().item() == pytest.approx(last["accuracy"])
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(last["loss"], abs=1e-5)


def test_uptrain_takes_the_weights_and_scratch_does_not(files):
    from crt_exp.mechanism import Mechanism

    options = OPTIONS | {"data_dir": str(files / "glue/RTE"), "model": str(files / "bert")}
    embedding = "bert.embeddings.word_embeddings.weight"
    own = AutoModelForSequenceClassification.from_pretrained(files / "bert").state_dict()[embedding]
    for init, same in {"uptrain": True, "scratch": False}.items():
        model = GLUE(**options | {"init": init}).build(Mechanism.of("favorpp", m=8))
        found = model.state_dict()
        assert torch.equal(found[embedding], own) == same
        assert found["bert.encoder.layer.0.attention.self.swapped.omega"].shape == (2, 8, 16)
    assert not any("swapped" in name for name in GLUE(**options).build(Mechanism.of("exact")).state_dict())


def test_batches(files):
    """Padded to the longest of a batch; evaluation sees every example once;
    like lengths together where it is asked for."""
    options = OPTIONS | {"dataset": "sst2", "data_dir": str(files / "glue/SST-2"), "model": str(files / "bert")}
    task = GLUE(**options)
    data, plan = task.encoded["train"], Plan(8, seed=3)
    for batch, rows in zip(task.batches("train", plan), plan.rows(48, "train")):
        expected = collate([data[i] for i in rows], 0)
        assert all(torch.equal(batch[key], expected[key]) for key in expected) and batch["attention_mask"].any(0).all()
    seen = [label for batch in task.batches("dev", Plan(5)) for label in batch["labels"].tolist()]
    assert sorted(seen) == sorted(task.texts["dev"].labels)
    size = lambda task: sum(batch["input_ids"].numel() for batch in task.batches("train", plan))
    assert size(GLUE(**options | {"bucketed": True})) < size(task)


def test_answers_are_in_the_order_of_the_file(files, monkeypatch):
    """Evaluation reads by length; of scores each stands where its example does."""
    from crt_exp.mechanism import Mechanism

    task = GLUE(**OPTIONS | {"dataset": "stsb", "data_dir": str(files / "glue/STS-B"), "model": str(files / "bert")})
    model, texts = task.build(Mechanism.of("exact")).eval(), task.texts["dev"].texts
    lengths = [len(row["input_ids"]) for row in task.encoded["dev"]]
    assert np.any(np.diff(lengths) < 0)
    with torch.no_grad():
        answers = []
        monkeypatch.setattr("crt_exp.tasks.glue.glue_metrics", lambda name, found, labels: answers.extend(found) or {})
        task.evaluate_part(model, "dev", Reader(task))
        order = np.argsort(lengths, kind="stable")
        found = [answers[place] for place in np.argsort(order)]
        alone = [model(**task.tokenizer(a, b, return_tensors="pt", truncation=True, max_length=40)).logits.item()
                 for a, b in zip(*texts)]
    assert found == pytest.approx(alone, abs=1e-5)


def test_subsample_is_stated(typed, tmp_path):
    code, out, _ = typed("task.dataset=sst2", "task.examples=16", "attention=exact")
    last = final(tmp_path / "run")
    assert code == 0 and "trained on 16 of 48 examples" in out
    assert (last["train_examples"], last["train_examples_available"], last["step"]) == (16, 48, 2)




@pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: the official files are needed")
def test_official_files(files):
    task = GLUE(**OPTIONS | {"dataset": "rte", "model": str(files / "bert")})
    assert (task.length("train"), task.length("dev")) == (2490, 277)
    lengths = next(iter(task.batches("dev", Plan(4))))["attention_mask"].sum(1)
    assert lengths.max() <= 40 and np.all(np.diff(lengths.numpy()) >= 0)


@pytest.mark.parametrize("args, place", [
    (["attention=favorpp"],
     "step 2: no loss; first not finite: bert.encoder.layer.0.attention.self.swapped (RandomFeature"),
    (["attention=favorp"],
     "step 2: no loss; first not finite: bert.encoder.layer.0.attention.self.swapped (RandomFeature"),
    (["attention=favorpp", "trainer.steps=1", "trainer.warmup=0"],
     "step 1: evaluation on dev; first not finite: bert.encoder.layer.0.attention.self.swapped (RandomFeature"),
    (["attention=exact", "task.dataset=stsb", "trainer.steps=1", "trainer.warmup=0"],
     "step 1: checkpoint; first not"),
], ids=str)
def test_divergence_that_a_fit_or_a_metric_meets_first(args, place, typed):
    """Exit code 3, step and layer, as where the loss shows it."""
    code, _, err = typed("trainer.lr=1e38" if "attention=exact" in args else "trainer.lr=1e12", *args)
    assert code == 3 and place in err and len(err.splitlines()) == 1, err
    assert "checkpoint" in err


# ---- what a user can get wrong: one message --------------------------------------------------------------------------


def refusal(found):
    code, _, err = found
    assert code == 2 and err.count("crt_exp: error:") == 1 and "Traceback" not in err, err
    assert len(err.splitlines()) <= 4
    return err


def test_missing_data(typed, tmp_path):
    err = refusal(typed("task.dataset=rte", f"task.data_dir={tmp_path}/none"))
    assert "train.tsv" in err and "python -m crt_exp.data fetch glue/RTE" in err and "task.data_dir=" in err
    assert not (tmp_path / "run").exists()


def test_missing_checkpoint_offline(typed):
    err = refusal(typed("task.model=google-bert/bert-base-uncased"))
    assert "hf download google-bert/bert-base-uncased --local-dir DIR" in err and "task.model=DIR" in err


@pytest.mark.parametrize("args, words", [
    (["task.dataset=rta"], ["task.dataset=rta", "rte"]),
    (["task.source=hubb"], ["task.source=hubb", "files or hub"]),
    (["task.init=uptrian"], ["task.init=uptrian", "did you mean uptrain?"]),
    (["task.init=/nowhere/run"], ["task.init=/nowhere/run: expected scratch, uptrain, or the directory"]),
    (["task.model=/nowhere/bert"], ["task.model=/nowhere/bert", "no such directory"]),
    (["task.max_length=41"], ["task.max_length=41", "40 tokens"]),
    (["task.max_length=2"], ["task.max_length=2: expected more than the 2 special tokens"]),
    (["task.examples=0"], ["task.examples=0"]),
    (["trainer.batch=64"], ["trainer.batch=64", "no step with 48 training rows"]),
], ids=str)
def test_bad_options(args, words, typed):
    err = refusal(typed(*args))
    assert all(word in err for word in words), err


@pytest.mark.parametrize("bad, words", [("a cat\tdog", ["line 4", "3 columns"]),
                                        ("a\tb\tmaybe", ["line 4", "label 'maybe'", "entailment"])])
def test_malformed_row(bad, words, typed, tmp_path):
    folder = write_glue(tmp_path / "RTE", "rte")
    lines = (folder / "train.tsv").read_text().splitlines()
    (folder / "train.tsv").write_text("\n".join([*lines[:3], bad, *lines[4:]]) + "\n")
    err = refusal(typed("task.dataset=rte", f"task.data_dir={folder}"))
    assert f"{folder}/train.tsv" in err and all(word in err for word in words)


@pytest.mark.parametrize("change, words", [
    ({"vocabulary": [*VOCABULARY, "zebra"]}, ["tokenizer: does not fit the model", "'zebra'"]),
    ({"pad_token_id": 3}, ["tokenizer: does not fit the model", "pads with id 0"]),
    ({"kind": "AlbertForMaskedLM"}, ["wrong weights for BertFor"]),
])
def test_tokenizer_model_and_weights_must_fit(change, words, typed, tmp_path):
    if "kind" in change:  # the weights of another architecture under this configuration
        from safetensors.torch import save_file

        weights = write_model(tmp_path / "bert") / "model.safetensors"
        save_file({"something.weight": torch.zeros(2)}, weights, {"format": "pt"})
    else:
        write_model(tmp_path / "bert", **change)
    err = refusal(typed(f"task.model={tmp_path / 'bert'}"))
    assert all(word in err for word in words), err


@pytest.mark.parametrize("gone, words", [("vocab.txt", ["/bert: no tokenizer; expected tokenizer.json"]),
                                         ("config.json", ["no config.json"]),
                                         ("model.safetensors", ["its weights is not readable"])])
def test_incomplete_folder(gone, words, typed, tmp_path):
    (write_model(tmp_path / "bert") / gone).unlink()
    err = refusal(typed(f"task.model={tmp_path / 'bert'}"))
    assert all(word in err for word in words) and "task.model" in err, err


def test_resume_with_another_m(typed):
    assert typed("attention=favorpp")[0] == 0
    err = refusal(typed("attention=favorpp", "features.m=16", "resume=auto"))
    assert "features.m (it was 8, now 16)" in err
