"""Laws of text: tokenizers, blocks, masks, order and resuming, streams, and the word-level corpora."""

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data import DataError
from crt_exp.data.text import (
    IGNORED,
    Masking,
    bert_tokenizer,
    check_vocabulary,
    fingerprint,
    generator_of,
    hub_documents,
    local_blocks,
    masked_blocks,
    numbered_lines,
    official_file,
    pack,
    text_files,
    uniforms,
)
from crt_exp.data.text import stream as streamed
from crt_exp.tasks.base import Plan

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS), "-", ",", "."]
SENTENCES = ["a b cde f", "gh i jklm", "n", "opq r s t", "uv w xyz"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return bert_tokenizer(vocabulary)


def refused(call, *arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    assert 1 <= len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- tokenizers
def test_tokenizer_from_a_vocabulary(vocabulary, tokenizer):
    words = ["[CLS]", "a", "##b", "##c", "d", "[SEP]", "[UNK]", "e", "[SEP]"]
    assert tokenizer("Abc d", "[UNK] é")["input_ids"] == [WORDS.index(word) for word in words]
    assert bert_tokenizer(vocabulary.parent).get_vocab() == {word: i for i, word in enumerate(WORDS)}
    assert bert_tokenizer(vocabulary, lowercase=False).tokenize("A a") == ["[UNK]", "a"]


def test_vocabularies_that_are_none(tmp_path):
    path = tmp_path / "vocab.txt"
    assert str(path) in refused(bert_tokenizer, path) and "huggingface.co" in refused(bert_tokenizer, path)
    for text, problem in (("", "[PAD]"), ("a\nb\n", "[PAD]"),
                          ("\n".join([*SPECIALS, "a", "a"]), "'a' stands there twice")):
        path.write_text(text)
        assert problem in refused(bert_tokenizer, path)
    path.write_bytes(b"[PAD]\n\xff\n")
    assert "line 2" in refused(bert_tokenizer, path)


def test_tokenizer_and_model_must_agree(tokenizer):
    size = len(WORDS)
    check_vocabulary(tokenizer, size, pad_token_id=0)
    check_vocabulary(tokenizer, size + 10)
    message = refused(check_vocabulary, tokenizer, size - 1)
    assert f"up to {size - 1} ('.')" in message and f"ends at {size - 2}" in message and f"vocab_size={size}" in message
    assert "pads with id 0" in refused(check_vocabulary, tokenizer, size, pad_token_id=1)


def test_fingerprint_tells_tokenizers_apart_but_not_their_use(vocabulary, tokenizer, tmp_path):
    before = fingerprint(tokenizer)
    tokenizer(["a b c", "d"], truncation=True, max_length=3, padding="max_length")
    assert before == fingerprint(tokenizer) == fingerprint(bert_tokenizer(vocabulary))
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "!"]))
    others = fingerprint(bert_tokenizer(tmp_path)), fingerprint(bert_tokenizer(vocabulary, lowercase=False))
    assert len({before, *others}) == 3


# ------------------------------------------------------------------------------------------------------ blocks
def test_blocks_hold_the_text_in_order(tokenizer):
    blocks = pack(SENTENCES, tokenizer, 7)
    tokens = tokenizer(" ".join(SENTENCES), add_special_tokens=False)["input_ids"]
    assert blocks.dtype == np.int32 and blocks.shape == (len(tokens) // 5, 7)
    assert (blocks[:, 0] == WORDS.index("[CLS]")).all() and (blocks[:, -1] == WORDS.index("[SEP]")).all()
    assert blocks[:, 1:-1].ravel().tolist() == tokens[:len(tokens) // 5 * 5]


def test_files_of_every_kind(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\r\n   \nc")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.tokens").write_text(" = d = \n e @-@ f <unk> h @,@ i @.@ j \n")
    (tmp_path / "c.csv").write_text("z")
    assert [file.name for file in text_files(tmp_path)] == ["b.txt", "a.tokens"]
    words = tokenizer.convert_ids_to_tokens(local_blocks(tmp_path, tokenizer, 17)[0])   # [UNK]: =, = and <unk>
    assert " ".join(words) == "[CLS] a b c [UNK] d [UNK] e - f [UNK] h , i . j [SEP]"
    assert (local_blocks([tmp_path / "b.txt"], tokenizer, 5) == pack(["a b", "c"], tokenizer, 5)).all()


def test_blocks_are_cached_by_content(tokenizer, tmp_path):
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("\n".join(SENTENCES))
    blocks = local_blocks(file, tokenizer, 7, cache)
    stored, = cache.iterdir()
    stamp = stored.stat().st_mtime_ns
    assert (local_blocks(str(file), tokenizer, 7, str(cache)) == blocks).all() and stored.stat().st_mtime_ns == stamp
    file.write_text("\n".join(SENTENCES[::-1]))
    assert (local_blocks(file, tokenizer, 7, cache) != blocks).any() and len([*cache.iterdir()]) == 2


def test_bad_text(tokenizer, tmp_path):
    assert "is not there" in refused(local_blocks, tmp_path / "none.txt", tokenizer, 8)
    assert "no .txt" in refused(local_blocks, tmp_path, tokenizer, 8)
    file = tmp_path / "a.txt"
    file.write_text("a b\n")
    assert "has 2 tokens" in refused(local_blocks, file, tokenizer, 8)
    assert "length=2" in refused(local_blocks, file, tokenizer, 2)
    file.write_bytes(b"a\nb \xff\n")
    assert f"{file}, line 2" in refused(local_blocks, file, tokenizer, 8)
    file.write_text("")
    assert "0 tokens" in refused(local_blocks, file, tokenizer, 8)


# ----------------------------------------------------------------------------------------------------- masking
def random_ids(rows: int, length: int) -> np.ndarray:
    ids = np.random.default_rng(5).integers(len(SPECIALS), len(WORDS), (rows, length), np.int32)
    ids[:, 0], ids[:, -1], ids[:, 3] = 2, 3, 1               # [CLS], [SEP], [UNK]
    return ids


def masked(masking: Masking, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch = masking(ids, np.random.default_rng(1).random((3, *ids.shape)))
    return batch["input_ids"].numpy(), batch["labels"].numpy()


@pytest.mark.parametrize("whole_words", [False, True])
def test_masking_has_berts_shares(tokenizer, whole_words):
    masking, ids = Masking.of(tokenizer, whole_words=whole_words), random_ids(2000, 60)
    inputs, labels = masked(masking, ids)
    chosen, maskable = labels != IGNORED, ids >= len(SPECIALS)
    assert (labels[chosen] == ids[chosen]).all() and (inputs[~chosen] == ids[~chosen]).all()
    assert not (chosen & ~maskable).any() and chosen.any(1).all()

    def near(count, total, share):                           # words of several tokens widen the spread
        return abs(count / total - share) < 5 * (3 * share * (1 - share) / total) ** 0.5

    total = int(chosen.sum())
    assert near(total, int(maskable.sum()), 0.15)
    hidden, same = (inputs == masking.mask_id) & chosen, (inputs == ids) & chosen
    assert near(int(hidden.sum()), total, 0.8 + 0.1 / len(WORDS))
    assert near(int(same.sum()), total, 0.1 + 0.1 / len(WORDS))
    replaced = inputs[chosen & ~hidden & ~same]
    assert replaced.min() == 0 and replaced.max() == len(WORDS) - 1 and len(np.unique(replaced)) == len(WORDS) - 1


def test_whole_words_go_together(tokenizer):
    ids = random_ids(500, 60)
    pieces = np.array([word.startswith("##") for word in WORDS])[ids]
    pieces[:, 1] = pieces[:, 4] = False                      # after a special token a new word begins in any case
    for whole_words in (True, False):
        chosen = masked(Masking.of(tokenizer, whole_words=whole_words), ids)[1] != IGNORED
        inner = pieces[:, 1:] & (ids[:, 1:] >= len(SPECIALS)) & (ids[:, :-1] >= len(SPECIALS))
        split = (chosen[:, 1:] != chosen[:, :-1]) & inner
        assert bool(split.any()) != whole_words


def test_every_row_is_asked_something(tokenizer):
    labels = masked(Masking.of(tokenizer), np.array([[2, 7, 3]] * 300 + [[2, 1, 3]]))[1]
    assert (labels[:300, 1] == 7).all() and (labels[300] == IGNORED).all()


def test_the_largest_draw_is_still_a_token(tokenizer):
    for size in (len(WORDS), 30522):
        masking = replace(Masking.of(tokenizer), special=np.zeros(size, bool), continues=np.zeros(size, bool))
        assert masking(np.array([[7]]), np.full((3, 1, 1), 1 - 2.0**-53))["input_ids"].tolist() == [[size - 1]]


def test_uniforms_of_either_kind_of_generator():
    for generators in (lambda: map(generator_of, range(4)), lambda: map(np.random.default_rng, range(4))):
        found = uniforms(generators(), 500)
        assert found.shape == (3, 4, 500) and 0 <= found.min() < found.max() < 1
        assert (found == uniforms(generators(), 500)).all() and abs(found.mean() - 0.5) < 0.03
        assert abs(np.corrcoef(found.reshape(12, 500)) - np.eye(12)).max() < 0.2


def test_masking_refuses(tokenizer, vocabulary, tmp_path):
    assert "between 0 and 1" in refused(Masking.of, tokenizer, share=0)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "a"]))
    assert "WordPiece" in refused(Masking.of, bert_tokenizer(tmp_path), whole_words=True)
    bare = bert_tokenizer(vocabulary)
    bare.mask_token = bare.cls_token = None
    assert "mask token" in refused(Masking.of, bare) and "[CLS]" in refused(pack, SENTENCES, bare, 7)


# ----------------------------------------------------------------------------------------------------- batches
def equal(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(x.keys() == y.keys() and all((x[k] == y[k]).all() for k in x) for x, y in zip(a, b))


@pytest.fixture
def blocks():
    return random_ids(50, 12)


def batches_of(tokenizer, blocks, split="train", **plan) -> list[dict]:
    masking, plan = Masking.of(tokenizer), Plan(**{"batch": 6, **plan})
    return [masked_blocks(blocks, rows, masking, plan.rng) for rows in plan.rows(len(blocks), split)]


def original(batches: list[dict]) -> torch.Tensor:
    return torch.cat([torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
                      for batch in batches])


def test_an_epoch_shows_every_block_once_and_is_masked_anew(tokenizer, blocks):
    first, second = (batches_of(tokenizer, blocks, batch=5, epoch=epoch) for epoch in range(2))
    for epoch in first, second:
        assert sorted(original(epoch).tolist()) == sorted(blocks.tolist())
        assert all(tensor.dtype == torch.int64 for batch in epoch for tensor in batch.values())
    assert equal(first, batches_of(tokenizer, blocks, batch=5)) and not equal(first, second)
    labels = [dict(zip(map(tuple, original(epoch).tolist()), torch.cat([b["labels"] for b in epoch]).tolist()))
              for epoch in (first, second)]
    assert sum(labels[0][key] == labels[1][key] for key in labels[0]) < 25


def test_resuming_and_sharing_leave_every_bit_in_place(tokenizer, blocks):
    whole = batches_of(tokenizer, blocks)
    assert equal(whole[5:], batches_of(tokenizer, blocks, start=5))
    for rank in range(2):
        part = batches_of(tokenizer, blocks, rank=rank, world=2)
        assert equal(part, [{key: value[3 * rank:3 * rank + 3] for key, value in batch.items()} for batch in whole])
    assert (original(batches_of(tokenizer, blocks, split="validation")).numpy() == blocks).all()


# ----------------------------------------------------------------------------------------------------- streams
def passes(epoch: int) -> list[str]:
    order = np.random.default_rng(epoch).permutation(len(SENTENCES))
    return ["", *(SENTENCES[i] for i in order), " "]


def stream(tokenizer, documents=passes, **options):
    return streamed(documents, tokenizer, 8, Masking.of(tokenizer), **{"batch": 2, **options})


def test_a_stream_goes_on_over_passes(tokenizer):
    batches = [*islice(stream(tokenizer), 9)]
    seen = original(batches)
    text = " ".join(text for epoch in range(9) for text in passes(epoch))
    assert seen[:, 1:-1].reshape(-1).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"][:9 * 12]
    assert (seen[:, 0] == 2).all() and (seen[:, -1] == 3).all()


def test_a_stream_resumes_bit_for_bit(tokenizer):
    whole = [*islice(stream(tokenizer), 12)]
    for start in range(12):
        assert equal([*islice(stream(tokenizer, start=start), 12 - start)], whole[start:])
    assert not equal(whole[:3], [*islice(stream(tokenizer, seed=1), 3)])
    assert not equal(whole[:3], [*islice(stream(tokenizer, rank=1), 3)])


def test_a_stream_without_text(tokenizer):
    with pytest.raises(DataError, match="no document"):
        next(stream(tokenizer, lambda epoch: ["", " "]))


def hub(name, data_files=None):
    return {"name": name, "config": None, "data_files": data_files}


def test_streams_of_datasets(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("\n".join(SENTENCES * 4))
    open_ = lambda **options: hub_documents(hub("text", str(file)), "train", **options)
    assert [*open_(buffer=0)(0)] == SENTENCES * 4
    documents = open_(buffer=10, seed=1)
    assert [*documents(0)] != [*documents(1)]
    parts = [[*open_(buffer=10, rank=rank, world=2)(0)] for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(SENTENCES * 4) and len(parts[0]) == 10
    assert len(next(stream(tokenizer, documents))["labels"]) == 2
    assert "no column 'body'; it has text" in refused(lambda: [*open_(column="body")(0)])


def test_hub_without_network(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = refused(hub_documents, hub("someone/some-text"), "train")
    assert "someone/some-text" in message and "network" in message and "text files" in message


# ---------------------------------------------------------------------------------------------- official files
@official
def test_wikitext2_with_berts_vocabulary(tmp_path):
    path = Path(os.environ["CRT_DATA"]) / "checkpoints" / "bert-uncased-vocab"
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    tokenizer = bert_tokenizer(path)
    assert len(tokenizer) == 30522 and tokenizer("unaffable")["input_ids"] == [101, 14477, 20961, 3468, 102]
    check_vocabulary(tokenizer, 30522, pad_token_id=0)
    blocks = local_blocks(official_file("wikitext2", "test"), tokenizer, 128)
    assert blocks.shape[1] == 128 and blocks.max() < 30522 and 0.8 * 245569 < blocks.size < 1.3 * 245569
    text = tokenizer.decode(blocks[:50].ravel())
    assert "@" not in text and "< unk" not in text and "[UNK]" in text


def test_a_word_without_end_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words\n" + "x" * 100_001 + " and more\n")
    with pytest.raises(DataError, match="a.txt, line 2: a word of 100001 characters, and at most 100000 are taken"):
        byte_pairs([path], 300)


@pytest.mark.parametrize("inside", [False, True], ids=["the text", "in a folder"])
def test_a_pipe_is_no_text(inside, tmp_path):
    os.mkfifo(tmp_path / "t.txt")
    with pytest.raises(DataError, match="t.txt is a pipe, socket or device, not a file"):
        text_files(tmp_path if inside else tmp_path / "t.txt")
    with pytest.raises(DataError, match="t.txt is a pipe, socket or device, not a file"):
        list(numbered_lines(tmp_path / "t.txt"))
