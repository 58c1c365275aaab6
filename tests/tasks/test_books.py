"""task=books: rows of texts, perplexity per word, texts read on beyond a row, and text written by `infer`."""

import json

import numpy as np
import pytest
import torch
from refusals import check_refused

from crt_exp import infer
from crt_exp.config import instantiate
from crt_exp.data.text import IGNORED
from crt_exp.runner.command_line import compose
from crt_exp.tasks.base import Plan

SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
WORDS = ["a", "bird", "that", "sings", "in", "the", "old", "tree", "by", "a", "river", "does", "not", "know", "who"]


def text_file(path, lines=150, seed=0):
    """Lines that go on from any of the words as the sentence does."""
    rng = np.random.default_rng(seed)
    lengths, starts = rng.integers(3, 12, lines), rng.integers(0, len(WORDS), lines)
    path.write_text("".join(" ".join((2 * WORDS)[at:at + n]) + "\n" for at, n in zip(starts, lengths)))
    return path


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(run_task, tmp_path):
    def run(*args, directory="run"):
        path = tmp_path / "book.txt"
        if not path.exists():
            text_file(path, 400)
        options = [f"task.text={path}", "trainer.steps=4", "features.m=8", "attention=favorpp",
                   "task.vocabulary_size=300", "task.max_length=16", "task.cache_dir=null", "trainer.batch=8",
                   *[f"+task.sizes.{key}={value}" for key, value in SIZES.items()]]
        return run_task("books", options, args, directory)
    return run


def final(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("rows, attention", [("packed", "favorpp"),
                                             pytest.param("apart", "exact", marks=pytest.mark.slow)])
def test_it_learns_and_writes(rows, attention, typed, tmp_path, capsys):
    code, out, err = typed("trainer.steps=80", "trainer.lr=1e-2", "task.dropout=0", f"task.rows={rows}",
                           f"attention={attention}", "task.evaluated=8")
    assert code == 0 and "per word" in out, err
    last = final(tmp_path / "run")
    assert last["loss"] < np.log(last["unigram_perplexity"]) - 0.3
    assert last["word_perplexity"] == pytest.approx(np.exp(last["loss"] * last["tokens_per_word"]), rel=1e-6)
    assert 7 * 16 < last["tokens"] <= 8 * 16 or rows == "apart"              # the last row is a part of one
    code = infer.main([f"run={tmp_path / 'run'}", "prompt=a bird", "n=2", "length=12"])
    out = capsys.readouterr().out
    assert code == 0 and out.count("a bird") >= 2


def test_masked_tokens_of_both_sides(typed, tmp_path, capsys):
    """A bidirectional model predicts the masked tokens, of which the end of a text is none; it writes no text."""
    both = ["task.direction=bidirectional", "task.share=0.3"]
    code, _, err = typed(*both)
    assert code == 0, err
    last = final(tmp_path / "run")
    assert last["tokens"] > 0 and np.isfinite(last["word_perplexity"])
    kept = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert not kept["causal"] and kept["symbols"] == kept["vocabulary"]["mask"] + 1
    assert infer.main([f"run={tmp_path / 'run'}", "prompt=a bird", "n=1", "length=2"]) == 2
    code, _, err = typed(f"task.init={tmp_path / 'run'}", "trainer.steps=0", directory="more")
    assert code == 2 and f"task.init={tmp_path / 'run'}: trained with other symbols; expected" in err, err


def test_which_tokens_are_masked(tmp_path):
    cfg = compose(["task=books", f"task.text={text_file(tmp_path / 'book.txt')}", "task.vocabulary_size=300",
                   "task.direction=bidirectional", "task.cache_dir=null", "task.rows=apart"])
    task = instantiate(cfg.task)
    batches = [next(iter(task.batches(split, Plan(64, seed=1)))) for split in ("train", "train", "test")]
    for batch in batches:
        chosen = batch["labels"] != IGNORED
        assert 0.1 < chosen[batch.get("key_mask", chosen | True)].float().mean() < 0.25
        assert (batch["tokens"][chosen] == task.predictable).float().mean() > 0.6
        assert not (batch["labels"] == task.end).any() and (batch["tokens"][~chosen] < task.predictable).all()
    assert torch.equal(batches[0]["labels"], batches[1]["labels"])


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer(typed, tmp_path):
    assert typed()[0] == 0
    text_file(tmp_path / "other.txt", 400, seed=1)
    code, _, err = typed(f"task.init={tmp_path / 'run'}", f"task.text={tmp_path / 'other.txt'}", "trainer.steps=0",
                         directory="more")
    assert code == 0, err
    kept, more = (json.loads((tmp_path / d / "model" / "config.json").read_text()) for d in ("run", "more"))
    assert kept["vocabulary"] == more["vocabulary"]


@pytest.mark.parametrize("args, words", [
    (["task.text=/nowhere.txt"], ["/nowhere.txt: expected a UTF-8 text file"]),
    (["task.text=null"], ["set CRT_DATA=DIR", "fetch wikitext2"]),
    (["task.validation_text=x"], ["set both or neither"]),
    (["task.max_length=20000"], ["task.max_length=20000", "has only"]),
    (["task.vocabulary_size=100"], ["task.vocabulary_size=100: expected at least 258"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_an_empty_text(typed, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    code, _, err = typed(f"task.text={tmp_path / 'empty.txt'}")
    assert code == 2 and "empty" in err, err
