"""task=fidelity: its errors are those of their definition, exact attention has none, and nothing is fitted to the text
that is judged."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.small_bert import VOCABULARY, write_text

from crt_exp import calibrate_attention, swap_attention
from crt_exp.attention import uniform_attention
from crt_exp.experiments.measure.fidelity import DocumentBench, Fidelity, SwapLoss
from crt_exp.experiments.runner.run import read_records
from crt_exp.mechanism import Mechanism

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 64,
}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": len(VOCABULARY),
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    ),
    "bare": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "albert": lambda: transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(embedding_size=8, **SIZES)
    ),
}
OPTIONS = {
    "calibration": None,
    "length": 24,
    "texts": 3,
    "calibration_texts": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, saved_models):
    """Tiny models of random weights, a tokenizer beside each, and texts."""
    root = tmp_path_factory.mktemp("models")
    write_text(root / "text.txt", 80)
    (root / "other.txt").write_text(
        "".join(reversed((root / "text.txt").read_text().splitlines(keepends=True)))
    )
    saved_models(root, MODELS, VOCABULARY)
    return root


def subject(folder, name, **options):
    return DocumentBench(str(folder / name), str(folder / "text.txt"), **OPTIONS | options)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bare", "albert"])
def test_exact_attention_has_no_error(folder, name):
    """And a window as wide as the text is exact; uniform attention is not."""
    source = subject(folder, name)
    expected = {"gpt2": "next", "llama": "next", "bare": None}.get(name, "masked")
    assert source.predicts == expected
    for calls in source.calls:
        assert len(calls) == 2
    for text, true in {"exact": True, "window block=32": True, "uniform": False}.items():
        found = source.errors(Mechanism.parse(text))
        assert found["hidden"].shape == found["attention"].shape == (3, 2)
        actual = (found["hidden"] < 1e-4).all() and (found["attention"] < 1e-4).all()
        assert (actual) == true
        assert ("above" in found) == (name != "bare")
        assert name == "bare" or np.allclose(found["above"], 0, atol=1e-4) == true
    assert not any("swapped" in path for path, _ in source.model.named_modules())


@torch.no_grad()
def test_errors_of_a_masked_model_are_those_of_their_definition(folder):
    source = subject(folder, "bert")
    found = source.errors(Mechanism.of("favorpp", m=8, seed=5))
    model = transformers.BertForMaskedLM.from_pretrained(folder / "bert").eval()
    ids = source.rows[1:2]
    inputs, labels = source.inputs_and_labels(1)
    assert (labels != -100).sum() >= 1
    actual = (inputs != ids)[labels == -100].sum()
    assert actual == 0
    exact = model(ids, output_hidden_states=True).hidden_states, model(inputs, labels=labels).loss
    swap_attention(model, "favorpp", m=8, seed=5, saved=False)
    now = model(ids, output_hidden_states=True).hidden_states, model(inputs, labels=labels).loss
    actual = found["above"][1]
    expected = float(now[1] - exact[1])
    assert actual == pytest.approx(expected, abs=1e-5)
    for layer in (1, 2):
        error = (now[0][layer] - exact[0][layer]).norm() / exact[0][layer].norm()
        actual = found["hidden"][1, layer - 1]
        assert actual == pytest.approx(float(error), rel=1e-4)


@torch.no_grad()
def test_causal_layers_are_fitted_to_the_training_text(folder):
    """As by calibrate_attention on it; without it they are refused, and so is the text itself."""
    source = subject(folder, "gpt2", calibration=str(folder / "other.txt"))
    found = source.errors(Mechanism.of("favorpp", m=8))
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    ids = source.rows[:1]
    exact = float(model(ids, labels=ids).loss)
    swap_attention(model, "favorpp", m=8, saved=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # layers beyond uniform attention
        calibrate_attention(model, list(source.training))
    actual = found["above"][0]
    expected = float(model(ids, labels=ids).loss) - exact
    assert actual == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="task.calibration"):
        subject(folder, "gpt2").errors(Mechanism.of("favorpp", m=8))
    assert "above" in subject(folder, "gpt2").errors(
        Mechanism.of("favorp", m=8)
    )  # has nothing to fit
    with pytest.raises(ValueError, match="task.calibration: .* expected disjoint"):
        subject(folder, "gpt2", calibration=str(folder / "text.txt"))


@torch.no_grad()
def test_the_error_of_a_layer_is_that_of_its_own_tensors(folder):
    """Those of the exact model: errors of earlier layers do not add up."""
    source = subject(folder, "llama")
    actual = source.errors(Mechanism.of("uniform"))
    for layer, call in enumerate(source.calls[2]):
        uniform = uniform_attention(call.q, call.k, call.v, causal=True)
        error = (uniform - call.recorded).norm() / call.recorded.norm()
        assert actual["attention"][2, layer] == pytest.approx(float(error), rel=1e-5)


def test_a_run_and_its_rows(folder, typed, tmp_path):
    code, out, err = typed(
        "task=fidelity",
        f"task.model={folder / 'gpt2'}",
        f"task.text={folder / 'text.txt'}",
        f"task.calibration={folder / 'other.txt'}",
        "task.length=24",
        "task.texts=3",
        "task.draws=2",
        "task.calibration_texts=2",
        "task.cache_dir=null",
        "attention=favorpp",
        "features.m=8",
        "logger=none",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert code == 0, err
    assert "hidden_error" in out, err
    texts, *layers, last = map(
        json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    assert len(texts["above"]) == 3
    assert [row["layer"] for row in layers] == [0, 1]
    actual = last["cost"]
    expected = np.mean(texts["above"])
    assert actual == pytest.approx(expected)
    source = subject(folder, "gpt2", calibration=str(folder / "other.txt"))
    both = []
    for seed in (0, 1):
        errors = source.errors(Mechanism.of("favorpp", m=8, seed=seed))
        both.append(errors["above"])
    actual = texts["above"]
    expected = np.mean(both, 0)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_what_is_refused(folder, tmp_path):
    for options, said in (
        ({"length": 65}, "length=65: expected 1 to 64 tokens"),
        ({"texts": 500}, "task.texts=500"),
    ):
        with pytest.raises(ValueError, match=said):
            subject(folder, "bert", **options)
    model = transformers.BertForMaskedLM.from_pretrained(folder / "bert")
    swap_attention(model, "favorp", m=8)
    model.save_pretrained(tmp_path / "linear")
    with pytest.raises(ValueError, match="expected exact attention"):
        DocumentBench(str(tmp_path / "linear"), str(folder / "text.txt"), **OPTIONS)


@pytest.mark.slow
def test_a_saved_run_on_its_own_text(typed, tmp_path, monkeypatch):
    """Rows of documents and of layers, and the model's own loss; parts of the text are those of the run's task."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    for part, lines in {"train": 300, "valid": 290, "test": 280}.items():
        write_text(tmp_path / "data/wikitext2" / f"wiki.{part}.tokens", lines)
    code, _, err = typed(
        "task=mlm",
        "attention=exact",
        "task.sizes.hidden_size=16",
        "task.sizes.num_attention_heads=2",
        "task.sizes.num_hidden_layers=2",
        "task.cache_dir=null",
        "task.vocabulary_size=300",
        "task.block=32",
        "trainer.batch=4",
        "trainer.steps=2",
        "logger=none",
        "hydra.run.dir=run",
    )
    assert code == 0, err
    probe = Fidelity("run", "test", "train", None, 3, 2, 0, None)
    for method, seed in (("exact", 0), ("favorpp m=8", 1)):
        texts, *layers, last = probe.rows(Mechanism.parse(method), seed)
        assert len(texts["above"]) == 3
        assert [row["layer"] for row in layers] == [0, 1]
        actual = last["cost"]
        expected = np.mean(texts["above"])
        assert actual == pytest.approx(expected)
        assert (max(texts["hidden_error"]) < 1e-6) == ("loss" in last) == (method == "exact")


# ---- task=swap_loss


def test_a_saved_run_with_another_attention(typed, one_thread):
    """Exact attention has the losses of the run itself, and projections are those of the seed beyond the offset."""
    code, _, errors = typed(
        "task=imagenet",
        "task.dataset=digits",
        "task.size=8",
        "task.workers=0",
        "attention=exact",
        "task.sizes.patch=2",
        "task.sizes.width=16",
        "task.sizes.depth=1",
        "task.sizes.heads=2",
        "trainer.steps=1",
        "logger=none",
        "hydra.run.dir=start",
    )
    assert code == 0, errors

    def found(name, offset, seed, **own):
        return [*SwapLoss("start", ["val"], offset).rows(Mechanism.of(name, **own), seed)][0]

    own = read_records(Path("start/metrics.jsonl"))[-1]
    exact = found("exact", 0, 0)
    swapped = found("favorpp", 2, 1, m=8)
    assert exact["accuracy"] == pytest.approx(own["accuracy"])
    assert exact["split"] == "val"
    assert exact["loss"] != pytest.approx(swapped["loss"])
    assert swapped == found("favorpp", 0, 3, m=8)
    assert swapped != found("favorpp", 0, 1, m=8)
