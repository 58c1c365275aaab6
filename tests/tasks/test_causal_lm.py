"""task=mlm task.causal=true as a user types it: decoders that predict the next token, and longer blocks from a run."""

import json

import numpy as np
import pytest
import torch
from refusals import check_refused
from small_bert import write_text
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from crt_exp.config import ConfigError
from crt_exp.data.text import IGNORED, running_blocks
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.mlm import MLM, MaskedModel, following

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
HUB = {"name": None, "config": None, "split": "train", "column": "text", "data_files": None}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 300)


@pytest.fixture
def typed(typed, text, tmp_path):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        base = ["task=mlm", "task.causal=true", f"task.text={text}", "task.vocabulary_size=300", "task.block=16",
                *[f"task.sizes.{k}={v}" for k, v in SIZES.items()], f"task.cache_dir={text.parent / 'cache'}",
                "trainer.batch=8", "trainer.epochs=1", "attention=exact", "logger=none"]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        return typed(*own, f"hydra.run.dir={tmp_path / directory}", *args)
    return run


def task_of(text, **options):
    given = {"text": str(text), "validation_text": None, "data_dir": None, "source": "files", "hub": HUB, "model": None,
             "init": "scratch", "sizes": SIZES, "vocabulary": None, "vocabulary_size": 300, "lowercase": True,
             "block": 16, "share": 0.15, "cache_dir": None, "causal": True}
    return MLM(**given | options)


def last(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


def test_training_learns_and_keeps_a_model(typed, tmp_path, text):
    """<run>/model loads by from_pretrained, and its loss is the mean over all next tokens of the blocks."""
    code, out, err = typed("trainer.epochs=3", "trainer.lr=5e-3")
    assert code == 0 and err == "" and "of the next tokens right" in out, err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    blocks = torch.from_numpy(task_of(text).blocks["validation"].astype(np.int64))
    with torch.no_grad():
        loss = float(model(blocks, labels=blocks).loss)
    found = last(tmp_path / "run")
    assert found["loss"] == pytest.approx(loss, rel=1e-5) and found["perplexity"] < 40
    assert found["predicted_tokens"] == blocks[:, 1:].numel()
    assert model.config.n_inner == 48 and model.config.n_positions == 512


def test_a_longer_block_goes_on_from_a_run(typed, tmp_path, text):
    """The weights are those of the run: with no step, the loss of its model on the longer blocks."""
    assert typed("trainer.epochs=2", "trainer.lr=5e-3")[0] == 0
    code, _, err = typed(f"task.init={tmp_path / 'run'}", "task.block=40", "trainer.steps=0", directory="longer")
    assert code == 0, err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    blocks = task_of(text, block=40).blocks["validation"]
    assert (running_blocks(text, tokenizer, 40)[-len(blocks):] == blocks).all()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ids = torch.from_numpy(blocks.astype(np.int64))
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert last(tmp_path / "longer")["loss"] == pytest.approx(loss, rel=1e-5)
    code, _, err = typed(f"task.init={tmp_path / 'run'}", "task.block=600", directory="too-long")
    assert code == 2 and "expected at most 512" in err


@pytest.mark.slow
def test_an_encoder_goes_on_with_longer_blocks(typed, tmp_path):
    encoder = ["task.causal=false", "task.vocabulary_size=150"]
    assert typed(*encoder, "trainer.steps=2")[0] == 0
    longer = [f"task.init={tmp_path / 'run'}", "task.block=32", "trainer.steps=1"]
    code, _, err = typed(*encoder, *longer, directory="longer")
    assert code == 0, err
    assert last(tmp_path / "longer")["final"]


def test_a_llama_of_a_folder(tmp_path, text):
    """Architecture and tokenizer of task.model, random weights: logits at the predicted tokens alone, all gradients."""
    task_of(text).tokenizer.save_pretrained(tmp_path / "llama")
    LlamaConfig(vocab_size=300, num_key_value_heads=1, pad_token_id=None, **SIZES).save_pretrained(tmp_path / "llama")
    task = task_of(text, model=str(tmp_path / "llama"))
    model = task.build(Mechanism.of("exact")).eval()
    batch = next(iter(Reader(task, batch=4).batches("validation")))
    logits, labels = model(**batch)
    whole = model.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(logits, whole)
    assert type(model.model).__name__ == "LlamaForCausalLM" and torch.equal(labels, batch["input_ids"][:, 1:].flatten())
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert all(p.grad is not None for p in model.parameters()) and isinstance(model, MaskedModel)


def test_uptraining_fits_causal_layers_to_training_text(tmp_path, text):
    """At the swap, and not after the first steps: none of them is as it would be without."""
    task_of(text).build(Mechanism.of("exact")).model.save_pretrained(tmp_path / "exact")
    task_of(text).tokenizer.save_pretrained(tmp_path / "exact")
    given = {"model": str(tmp_path / "exact"), "init": "uptrain"}
    made = [task_of(text, calibration=count, **given).build(Mechanism.of("favorpp", m=8)) for count in (0, 2)]
    weights = [[float(part.running_weight) for part in model.modules() if hasattr(part, "running_weight")]
               for model in made]
    assert weights[0] == [0.0, 0.0] and min(weights[1]) > 0


def test_following_is_the_next_token():
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert following(ids).tolist() == [[4, 5, IGNORED], [7, 8, IGNORED]]


@pytest.mark.parametrize("args, words", [
    (["task.vocabulary=vocab.txt"], ["task.vocabulary: expected null with task.causal=true"]),
    (["task.vocabulary_size=100"], ["task.vocabulary_size=100: expected at least 258"]),
    (["+task.sizes.n_embed=3"], ["n_embed", "did you mean task.sizes.n_embd?"]),
    (["task.sizes.hidden_size=33"], ["hidden_size=33", "num_attention_heads=2"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_repeated_rows_say_the_first_half_again(text):
    """With repeat = 1 each row's second half is its first one from some place on; which ones depends on the seed."""
    task = task_of(text, repeat=1.0, block=15)
    batch = next(task.batches("train", Plan(40)))
    ids, whole = batch["input_ids"], next(task_of(text, block=15).batches("train", Plan(40)))["input_ids"]
    starts = {int(next(s for s in range(7) if torch.equal(row[7:], row[:7].roll(-s).repeat(2)[:8]))) for row in ids}
    assert len(starts) > 3 and torch.equal(batch["labels"][:, :-1], ids[:, 1:])
    assert torch.equal(ids[:, :7], whole[:, :7])
    some = next(task_of(text, repeat=0.3, block=15).batches("train", Plan(40)))["input_ids"]
    assert 20 <= (some == whole).all(1).sum() <= 36
    with pytest.raises(ConfigError, match="task.repeat"):
        task_of(text, repeat=0.5, causal=False)
