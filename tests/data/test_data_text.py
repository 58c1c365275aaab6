"""Laws of text: tokenizers, vocabularies, blocks, masks, order and resuming."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.data import DataError, text, vocabularies
from crt_exp.data.text import (
    IGNORED,
    HubText,
    Masking,
    bert_tokenizer,
    check_vocabulary,
    fingerprint,
    generator_of,
    lines_of,
    local_blocks,
    official_file,
    running_blocks,
    text_files,
    uniforms,
)
from crt_exp.data.vocabularies import new_tokenizer
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
    assert str(path) in refused(bert_tokenizer, path)
    for content in ("", "a\nb\n", "\n".join([*SPECIALS, "a", "a"])):
        path.write_text(content)
        assert "expected a BERT vocabulary" in refused(bert_tokenizer, path)
    path.write_bytes(b"[PAD]\n\xff\n")
    assert "line 2" in refused(bert_tokenizer, path)


def test_tokenizer_and_model_must_agree(tokenizer):
    size = len(WORDS)
    check_vocabulary(tokenizer, size, pad_token_id=0)
    check_vocabulary(tokenizer, size + 10)
    message = refused(check_vocabulary, tokenizer, size - 1)
    assert f"up to {size - 1} ('.')" in message and f"ends at {size - 2}" in message
    assert "pads with id 0" in refused(check_vocabulary, tokenizer, size, pad_token_id=1)


def test_fingerprint_tells_tokenizers_apart_but_not_their_use(vocabulary, tokenizer, tmp_path):
    before = fingerprint(tokenizer)
    tokenizer(["a b c", "d"], truncation=True, max_length=3, padding="max_length")
    assert before == fingerprint(tokenizer) == fingerprint(bert_tokenizer(vocabulary))
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "!"]))
    others = fingerprint(bert_tokenizer(tmp_path)), fingerprint(bert_tokenizer(vocabulary, lowercase=False))
    assert len({before, *others}) == 3


@pytest.mark.parametrize("kind", ["byte_pairs", "sentencepiece"])
def test_vocabularies_give_texts_back(kind, tmp_path, monkeypatch):
    """Also blanks side by side, line ends, and letters that the text has not; made once."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{' '.join(SENTENCES[i % 5:])} the old tree {i % 7}\n" for i in range(200)))
    make = lambda size=310: new_tokenizer(kind, path, size, False, tmp_path / "cache")
    tokenizer = make()
    for line in ("who knows  the river\n", " by\n\nthe bird\n", "Über <unk> 1\n"):
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == line
    assert len(tokenizer.encode("the old tree\n", add_special_tokens=False)) < 12
    assert len(tokenizer) <= 310 and tokenizer.unk_token_id == 0
    message = refused(make, 200)
    assert "cannot build 200 pieces" in message or "expected at least 258" in message
    monkeypatch.setattr(vocabularies, "lines_of", None)
    assert make().get_vocab() == tokenizer.get_vocab()


# ------------------------------------------------------------------------------------------------------ blocks
def test_blocks_hold_the_text_in_order(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(SENTENCES))
    blocks = local_blocks(tmp_path / "a.txt", tokenizer, 7)
    tokens = tokenizer(" ".join(SENTENCES), add_special_tokens=False)["input_ids"]
    assert blocks.dtype == np.int32 and blocks.shape == (len(tokens) // 5, 7)
    assert (blocks[:, 0] == WORDS.index("[CLS]")).all() and (blocks[:, -1] == WORDS.index("[SEP]")).all()
    assert blocks[:, 1:-1].ravel().tolist() == tokens[:len(tokens) // 5 * 5]


def test_files_of_every_kind(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\r\n   \nc")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.tokens").write_text(" = d = \n e @-@ f <unk> h @,@ i @.@ j \n")
    (tmp_path / "c.csv").write_text("z")
    (tmp_path / ".d.txt").write_text("z")
    assert [file.name for file in text_files(tmp_path)] == ["b.txt", "a.tokens"]
    words = tokenizer.convert_ids_to_tokens(local_blocks(tmp_path, tokenizer, 17)[0])   # [UNK]: =, = and <unk>
    assert " ".join(words) == "[CLS] a b c [UNK] d [UNK] e - f [UNK] h , i . j [SEP]"


def test_blocks_are_cached_by_content(tokenizer, tmp_path, monkeypatch):
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("\n".join(SENTENCES))
    blocks = local_blocks(file, tokenizer, 7, cache)
    with monkeypatch.context() as patch:
        patch.setattr(text, "token_lists", None)
        tokenizer("what comes between", truncation=True, max_length=3, padding="max_length")   # leaves traces in it
        assert (local_blocks(str(file), tokenizer, 7, str(cache)) == blocks).all()
    file.write_text("\n".join(SENTENCES[::-1]))
    assert (local_blocks(file, tokenizer, 7, cache) != blocks).any() and len([*cache.iterdir()]) == 2
    running_blocks(file, tokenizer, 7, cache)
    assert len([*cache.iterdir()]) == 3


def test_bad_text(tokenizer, tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        assert f"{path}: expected a UTF-8 text file" in refused(local_blocks, path, tokenizer, 8)
    file = tmp_path / "a.txt"
    file.write_text("a b\n")
    assert "2 tokens, fewer than a block" in refused(local_blocks, file, tokenizer, 8)
    assert "length=2" in refused(local_blocks, file, tokenizer, 2)
    file.write_bytes(b"a\nb \xff\n")
    assert f"{file}, line 2" in refused(local_blocks, file, tokenizer, 8)
    file.write_text("")
    assert "0 tokens" in refused(local_blocks, file, tokenizer, 8)


def test_sets_of_the_hub(tokenizer, tmp_path, monkeypatch):
    """Here files in one of its formats: the same blocks, and another key for other content."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(SENTENCES))
    found = HubText.load("text", None, "train", "text", {"train": str(file)})
    assert [*lines_of(found)] == SENTENCES
    assert (running_blocks(found, tokenizer, 7, tmp_path / "cache") == running_blocks(file, tokenizer, 7)).all()
    assert "task.hub.column=body: expected a column" in refused(HubText.load, "text", None, "train", "body", str(file))
    file.write_text("another")
    assert HubText.load("text", None, "train", "text", {"train": str(file)}).key != found.key


def test_hub_without_network(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = refused(HubText.load, "someone/some-text", None, "train", "text")
    assert "someone/some-text" in message and "network" in message


def test_wordnet_is_the_same_plain_text_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (path,) = text_files("wordnet")
    assert path == tmp_path / "cache/crt_exp/wordnet.txt" and path.read_bytes().isascii()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == text.WORDNET_DIGEST
    path.write_text("cut")
    assert "remove this file" in refused(text_files, "wordnet")
    (tmp_path / "wordnet").write_text("mine\n")
    assert text_files("wordnet")[0].read_text() == "mine\n"


# ----------------------------------------------------------------------------------------------------- masking
def random_ids(rows: int, length: int) -> np.ndarray:
    ids = np.random.default_rng(5).integers(len(SPECIALS), len(WORDS), (rows, length), np.int32)
    ids[:, 0], ids[:, -1], ids[:, 3] = 2, 3, 1               # [CLS], [SEP], [UNK]
    return ids


def masked(masking: Masking, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch = masking(ids, np.random.default_rng(1).random((3, *ids.shape)))
    return batch["input_ids"].numpy(), batch["labels"].numpy()


def test_masking_has_berts_shares(tokenizer):
    masking, ids = Masking.of(tokenizer), random_ids(2000, 60)
    inputs, labels = masked(masking, ids)
    chosen, maskable = labels != IGNORED, ids >= len(SPECIALS)
    assert (labels[chosen] == ids[chosen]).all() and (inputs[~chosen] == ids[~chosen]).all()
    assert not (chosen & ~maskable).any() and chosen.any(1).all()

    def near(count, total, share):
        return abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5

    total = int(chosen.sum())
    assert near(total, int(maskable.sum()), 0.15)
    hidden, same = (inputs == masking.mask_id) & chosen, (inputs == ids) & chosen
    assert near(int(hidden.sum()), total, 0.8 + 0.1 / len(WORDS))
    assert near(int(same.sum()), total, 0.1 + 0.1 / len(WORDS))
    replaced = inputs[chosen & ~hidden & ~same]
    assert replaced.min() == 0 and replaced.max() == len(WORDS) - 1 and len(np.unique(replaced)) == len(WORDS) - 1


def test_every_row_is_asked_something(tokenizer):
    labels = masked(Masking.of(tokenizer), np.array([[2, 7, 3]] * 300 + [[2, 1, 3]]))[1]
    assert (labels[:300, 1] == 7).all() and (labels[300] == IGNORED).all()


def test_the_largest_draw_is_still_a_token(tokenizer):
    for size in (len(WORDS), 30522):
        masking = replace(Masking.of(tokenizer), special=np.zeros(size, bool))
        assert masking(np.array([[7]]), np.full((3, 1, 1), 1 - 2.0**-53))["input_ids"].tolist() == [[size - 1]]


def test_uniforms_of_either_kind_of_generator():
    for generators in (lambda: map(generator_of, range(4)), lambda: map(np.random.default_rng, range(4))):
        found = uniforms(generators(), 500)
        assert found.shape == (3, 4, 500) and 0 <= found.min() < found.max() < 1
        assert (found == uniforms(generators(), 500)).all() and abs(found.mean() - 0.5) < 0.03
        assert abs(np.corrcoef(found.reshape(12, 500)) - np.eye(12)).max() < 0.2


def test_masking_refuses(tokenizer, vocabulary, tmp_path):
    bare = bert_tokenizer(vocabulary)
    bare.mask_token = bare.cls_token = None
    assert "mask token" in refused(Masking.of, bare) and "[CLS]" in refused(local_blocks, vocabulary, bare, 7)


# ----------------------------------------------------------------------------------------------------- batches
def equal(a: list[dict], b: list[dict]) -> bool:
    return len(a) == len(b) and all(x.keys() == y.keys() and all((x[k] == y[k]).all() for k in x) for x, y in zip(a, b))


@pytest.fixture
def blocks():
    return random_ids(50, 12)


def batches_of(tokenizer, blocks, split="train", **plan) -> list[dict]:
    masking, plan = Masking.of(tokenizer), Plan(**{"batch": 6, **plan})
    return [masking(blocks[rows], uniforms(map(plan.rng, rows), blocks.shape[1]))
            for rows in plan.rows(len(blocks), split)]


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
