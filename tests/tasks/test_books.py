"""task=books: rows of texts, perplexity per word, texts read on beyond a row, and text written by `infer`."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import check_refused
from torch.utils.flop_counter import FlopCounterMode

from crt_exp import infer
from crt_exp.attention.baselines import Exact
from crt_exp.config import instantiate
from crt_exp.data import DataError, books, sentence_pieces
from crt_exp.data.books import Apart, PackedRows, TokenText
from crt_exp.data.text import IGNORED
from crt_exp.mechanism import Mechanism
from crt_exp.models.carried import carried_losses
from crt_exp.models.language import LanguageDescription, LanguageModel
from crt_exp.runner.command_line import compose
from crt_exp.swap.calibration import fill_statistics
from crt_exp.tasks.base import Plan

DATA = Path(os.environ.get("CRT_DATA", "none"))
WORD_ENDS = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], np.float32)
SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
WORDS = ["a", "bird", "that", "sings", "in", "the", "old", "tree", "by", "a", "river", "does", "not", "know", "who"]


def text_file(path, lines=150, seed=0):
    """Lines that go on from any of the words as the sentence does."""
    rng = np.random.default_rng(seed)
    lengths, starts = rng.integers(3, 12, lines), rng.integers(0, len(WORDS), lines)
    path.write_text("".join(" ".join((2 * WORDS)[at:at + n]) + "\n" for at, n in zip(starts, lengths)))
    return path


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_of_a_text():
    """Every token is predicted once, from the one before it."""
    text = TokenText(np.arange(1, 12, dtype=np.int32), np.array([4, 11]), WORD_ENDS)
    packed, apart = PackedRows(text, 4, end=0), Apart(text, 5, end=0)
    rows, lines = ([data[i] for i in range(len(data))] for data in (packed, apart))
    assert [row.labels.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [row.labels.tolist() for row in lines] == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [row.tokens.tolist() for row in lines] == [[0, 1, 2, 3], [0, 5, 6, 7, 8]]
    assert apart.lengths.tolist() == [4, 5]
    assert PackedRows(text, 4, 0, whole=True).lengths.tolist() == [4, 4, 3]
    assert [row.labels.tolist() for row in map(PackedRows(text, 4, 0, whole=True).__getitem__, [2])] == [[9, 10, 11]]
    assert books.tokens_per_word(PackedRows(text, 4, 0, whole=True), [1, 2]) == 7 / 3


def test_parts_that_are_held_out():
    text = TokenText(np.arange(100, dtype=np.int32), np.array([30, 60, 80, 90, 100]), np.full(100, 0.5, np.float32))
    found = text.held_out(0.1, apart=False)
    assert [len(found[split].tokens) for split in ("train", "validation", "test")] == [80, 10, 10]
    assert found["test"].tokens[0] == 90 and found["test"].words.sum() == 5
    found = text.held_out(0.2, apart=True)
    assert [found[split].ends.tolist() for split in found] == [[30, 60, 80], [10], [10]]
    with pytest.raises(DataError, match="leaves none for"):
        text.held_out(0.001, apart=False)


def test_words_of_a_file(tmp_path):
    from crt_exp.data.byte_pairs import byte_pairs

    path = tmp_path / "a.txt"
    path.write_text("one two\n\nthree\n")
    tokenizer = byte_pairs([path], 300)
    found = books.read(books.files_of(str(path)), tokenizer, 7, apart=False)
    assert found.words.sum() == 5 and found.ends.tolist() == [len(found.tokens)] and found.tokens[-1] == 7
    assert tokenizer.decode(found.tokens[:-1]) == "one two\nthree\n"
    assert books.read(books.files_of(str(path)), tokenizer, 7, apart=True).ends.shape == (2,)
    for part in (found.part(0, 4), found.part(4, len(found.tokens) - 1)):      # words count where they end
        text = tokenizer.decode(part.tokens)
        assert part.words.sum() == len(text.split()) + text.count("\n"), text
    path.write_text("\n \n")
    with pytest.raises(DataError, match=r"a\.txt: the text is empty"):
        books.read(books.files_of(str(path)), tokenizer, 7, apart=False)


def test_sentence_pieces_give_texts_back(tmp_path, monkeypatch):
    """Also blanks side by side, line ends, and letters that the text has not; made once."""
    path = text_file(tmp_path / "a.txt", 200)
    make = lambda size=300: sentence_pieces.sentence_pieces([path], size, False, tmp_path / "cache")
    tokenizer = make()
    for text in ("who knows  the river\n", " by\n\nthe bird\n", "Über <unk> 1\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("that sings in the old tree\n", add_special_tokens=False)) < 14  # of 27 letters
    assert len(tokenizer) <= 300 and tokenizer.unk_token_id == 0
    with pytest.raises(DataError, match="sentencepiece makes no 200 pieces.*task.vocabulary=byte_pairs"):
        make(200)
    monkeypatch.setattr(sentence_pieces, "scored", None)
    assert make().get_vocab() == tokenizer.get_vocab()


# ---- carried on ------------------------------------------------------------------------------------------------------


def model_of(name="favorpp", length=32):
    torch.manual_seed(0)
    options = {"favorpp": {"m": 16}, "nearfar": {"block": 8, "heavy": 4, "cells": 4}}.get(name, {})
    described = LanguageDescription(11, length, SIZES, True, "rotary")
    model = LanguageModel(described, Mechanism.of(name, **options).layer).eval()
    if options:
        fill_statistics(model, [{"tokens": torch.randint(11, (4, 32))}])
    return model


def parallel_losses(model, tokens, labels):
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("name", ["favorpp", "nearfar", "exact", "uniform", "window"])
def test_chunk_by_chunk_is_the_parallel_pass(name):
    model, ids = model_of(name), torch.randint(11, (2, 301))
    found = torch.cat(list(carried_losses(model, ids[:, :-1], ids[:, 1:], 37)), 1)
    torch.testing.assert_close(found, parallel_losses(model, ids[:, :-1], ids[:, 1:]), rtol=1e-4, atol=1e-4)


def test_a_sliding_window_forgets_what_is_before_it():
    layer = Exact(2, 4, causal=True)
    q, k, v = torch.randn(3, 1, 2, 20, 4)
    past, found = layer.past(), []
    past.window = 8
    for at in range(0, 20, 4):
        found.append(past.step(*(t[:, :, at:at + 4] for t in (q, k, v))))
    for at, out in zip(range(0, 20, 4), found):              # of a chunk of 4 the first sees 5 keys, the last 8
        first = max(0, at + 4 - 8)
        expected = layer(*(t[:, :, first:at + 4] for t in (q, k, v)))[:, :, -4:]
        torch.testing.assert_close(out, expected)
    assert past.length == 20 and past.held == 8 and past.buffers[0].tensor.shape[2] <= 64
    with pytest.raises(ValueError, match="9 tokens at once and a window of 8"):
        past.step(*torch.randn(3, 1, 2, 9, 4))


@pytest.mark.slow
def test_a_document_of_100000_tokens():
    """With the losses of the parallel pass; the last tokens take as many operations and as large a state as early
    ones."""
    model = model_of()
    ids = torch.randint(11, (1, 100_001))
    found = torch.cat(list(carried_losses(model, ids[:, :-1], ids[:, 1:], 250)), 1)
    whole = parallel_losses(model, ids[:, :-1], ids[:, 1:])
    assert (found - whole).abs().max() < 1e-4 and abs(found.mean() - whole.mean()) < 1e-4
    pasts, spent = model.begin(), []
    for at in range(0, 100_000, 250):
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            model(ids[:, at:at + 250], pasts=pasts)
        spent.append((counted.get_total_flops(), pasts[0].state.kept.sums.numel()))
    assert len(set(spent[1:])) == 1 and min(spent) > (0, 0)  # the first has no state behind it


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(run_task, tmp_path):
    def run(*args, directory="run"):
        path = tmp_path / "book.txt"
        if not path.exists():
            text_file(path, 400)
        options = [f"task.text={path}", "trainer.steps=4", "features.m=8", "attention=favorpp",
                   "task.vocabulary_size=300", "task.max_length=16", "task.carried.times=4", "task.carried.pieces=2",
                   "task.cache_dir=null", "trainer.batch=8",
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
    assert all(0 < last[f"loss_at_{i}"] < 8 for i in range(1, 5))
    code = infer.main([f"run={tmp_path / 'run'}", "prompt=a bird", "n=2", "length=12"])
    out = capsys.readouterr().out
    assert code == 0 and out.count("a bird") >= 2


def test_masked_tokens_of_both_sides(typed, tmp_path, capsys):
    """A bidirectional model predicts the masked tokens, of which the end of a text is none; it writes no text."""
    both = ["task.direction=bidirectional", "task.carried.times=0", "task.share=0.3"]
    code, _, err = typed(*both)
    assert code == 0, err
    last = final(tmp_path / "run")
    assert last["tokens"] > 0 and np.isfinite(last["word_perplexity"]) and "loss_at_1" not in last
    kept = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert not kept["causal"] and kept["symbols"] == kept["vocabulary"]["mask"] + 1
    assert infer.main([f"run={tmp_path / 'run'}", "prompt=a bird", "n=1", "length=2"]) == 2
    code, _, err = typed(f"task.init={tmp_path / 'run'}", "trainer.steps=0", directory="more")
    assert code == 2 and "was trained on other symbols" in err, err


def test_which_tokens_are_masked(tmp_path):
    cfg = compose(["task=books", f"task.text={text_file(tmp_path / 'book.txt')}", "task.vocabulary_size=300",
                   "task.direction=bidirectional", "task.carried.times=0", "task.cache_dir=null", "task.rows=apart"])
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


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["of a run", "byte_pairs", "sentencepiece"])
def test_sets_of_the_hub(vocabulary, typed, tmp_path):
    """Streamed, here in one of its formats, lines of files: those that are blank are no documents."""
    assert typed()[0] == 0
    files = [text_file(tmp_path / f"{name}.txt", 60, seed) for seed, name in enumerate(("one", "two", "three"))]
    given = ",".join(f"{split}:{path}" for split, path in zip(("train", "validation", "test"), files))
    (tmp_path / "one.txt").write_text("\n" + (tmp_path / "one.txt").read_text())
    made = [f"task.init={tmp_path / 'run'}", "trainer.steps=0"] if vocabulary == "of a run" else [
        f"task.vocabulary={vocabulary}", "trainer.steps=2"]
    args = ["task.text=null", "task.hub.name=text", f"task.hub.data_files={{{given}}}", *made, "task.hub.documents=50"]
    code, _, err = typed(*args, directory="hub")
    assert code == 0, err
    assert 0 < final(tmp_path / "hub")["tokens"] < 3000


def test_a_tokenizer_of_another_vocabulary(typed, tmp_path):
    from crt_exp.data.byte_pairs import byte_pairs

    assert typed()[0] == 0
    byte_pairs([tmp_path / "book.txt"], 280).save_pretrained(tmp_path / "tokenizer")
    code, _, err = typed(f"task.init={tmp_path / 'run'}", f"task.tokenizer={tmp_path / 'tokenizer'}", directory="more")
    assert code == 2 and "was trained on other symbols" in err and "task.tokenizer=null" in err, err


@pytest.mark.parametrize("args, words", [
    (["task.text=/nowhere.txt"], ["/nowhere.txt is not there"]),
    (["task.text=null"], ["CRT_DATA is not set", "fetch wikitext2"]),
    (["task.validation_text=x"], ["go together"]),
    (["task.hub.name=a/b"], ["both name a text"]),
    (["task.direction=bidirectional"], ["reads no text on beyond a row", "task.carried.times=0"]),
    (["task.positions=learned"], ["reads beyond task.max_length", "task.positions=rotary"]),
    (["task.max_length=20000", "task.carried.times=0"], ["fill no row of task.max_length = 20000"]),
    (["task.held_out=1e-6"], ["leaves none for validation"]),
    (["task.vocabulary_size=100"], ["has no room for the 256 bytes"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_an_empty_text(typed, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    code, _, err = typed(f"task.text={tmp_path / 'empty.txt'}")
    assert code == 2 and "empty" in err, err
