"""Text: tokenizers, blocks, masks, order, resuming; corpora of words and documents; prepared files; cache."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.refusals import refused

from crt_exp.experiments.data import DataError, text, vocabularies
from crt_exp.experiments.data.text import (
    IGNORED,
    Masking,
    bert_tokenizer,
    fingerprint,
    generator_of,
    hub_text,
    lines_of,
    local_blocks,
    running_blocks,
    text_files,
    uniforms,
)
from crt_exp.experiments.data.vocabularies import new_tokenizer

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


# -------------------------------------------------------------------------------------------------- tokenizers
def test_tokenizer_from_a_vocabulary(vocabulary, tokenizer):
    words = ["[CLS]", "a", "##b", "##c", "d", "[SEP]", "[UNK]", "e", "[SEP]"]
    actual = tokenizer("Abc d", "[UNK] é")["input_ids"]
    expected = [WORDS.index(word) for word in words]
    assert actual == expected
    actual = bert_tokenizer(vocabulary.parent).get_vocab()
    expected = {word: i for i, word in enumerate(WORDS)}
    assert actual == expected
    actual = bert_tokenizer(vocabulary, lowercase=False).tokenize("A a")
    assert actual == ["[UNK]", "a"]


def test_fingerprint_tells_tokenizers_apart_but_not_their_use(vocabulary, tokenizer, tmp_path):
    before = fingerprint(tokenizer)
    tokenizer(["a b c", "d"], truncation=True, max_length=3, padding="max_length")
    assert fingerprint(tokenizer) == before
    assert fingerprint(bert_tokenizer(vocabulary)) == before
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "!"]))
    others = (
        fingerprint(bert_tokenizer(tmp_path)),
        fingerprint(bert_tokenizer(vocabulary, lowercase=False)),
    )
    assert len({before, *others}) == 3


@pytest.mark.parametrize("kind", ["byte_pairs", "sentencepiece"])
def test_decoding_inverts_encoding(kind, tmp_path, monkeypatch):
    """Also of adjacent blanks, line ends, and letters that the text lacks; the vocabulary is made once."""
    path = tmp_path / "a.txt"
    path.write_text(
        "".join(f"{' '.join(SENTENCES[i % 5 :])} the old tree {i % 7}\n" for i in range(200))
    )

    def make(size=310):
        return new_tokenizer(kind, path, size, False, tmp_path / "cache")

    tokenizer = make()
    for line in ("who knows  the river\n", " by\n\nthe bird\n", "Über <unk> 1\n"):
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == line
    assert len(tokenizer.encode("the old tree\n", add_special_tokens=False)) < 12
    assert len(tokenizer) <= 310
    assert tokenizer.unk_token_id == 0
    message = refused(make, 200)
    assert "cannot build 200 pieces" in message or "expected at least 258" in message
    monkeypatch.setattr(vocabularies, "lines_of", None)
    assert make().get_vocab() == tokenizer.get_vocab()


# ------------------------------------------------------------------------------------------------------ blocks
def test_blocks_hold_the_text_in_order(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(SENTENCES))
    blocks = local_blocks(tmp_path / "a.txt", tokenizer, 7)
    tokens = tokenizer(" ".join(SENTENCES), add_special_tokens=False)["input_ids"]
    assert blocks.dtype == np.int32
    assert blocks.shape == (len(tokens) // 5, 7)
    assert (blocks[:, 0] == WORDS.index("[CLS]")).all()
    assert (blocks[:, -1] == WORDS.index("[SEP]")).all()
    actual = blocks[:, 1:-1].ravel().tolist()
    expected = tokens[: len(tokens) // 5 * 5]
    assert actual == expected


def test_files_of_every_kind(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa b\r\n\r\n   \nc")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.tokens").write_text(" = d = \n e @-@ f <unk> h @,@ i @.@ j \n")
    (tmp_path / "c.csv").write_text("z")
    (tmp_path / ".d.txt").write_text("z")
    actual = [file.name for file in text_files(tmp_path)]
    assert actual == ["b.txt", "a.tokens"]
    words = tokenizer.convert_ids_to_tokens(
        local_blocks(tmp_path, tokenizer, 17)[0]
    )  # [UNK]: =, = and <unk>
    assert " ".join(words) == "[CLS] a b c [UNK] d [UNK] e - f [UNK] h , i . j [SEP]"


def test_blocks_are_cached_by_content(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    cache = tmp_path / "cache"
    file.write_text("\n".join(SENTENCES))
    blocks = local_blocks(file, tokenizer, 7, cache)
    with monkeypatch.context() as patch:
        patch.setattr(text, "token_lists", None)
        tokenizer(
            "what comes between", truncation=True, max_length=3, padding="max_length"
        )  # leaves traces in it
        assert (local_blocks(str(file), tokenizer, 7, str(cache)) == blocks).all()
    file.write_text("\n".join(SENTENCES[::-1]))
    assert (local_blocks(file, tokenizer, 7, cache) != blocks).any()
    assert len([*cache.iterdir()]) == 2
    running_blocks(file, tokenizer, 7, cache)
    assert len([*cache.iterdir()]) == 3


def test_bad_text_is_refused(tokenizer, tmp_path):
    assert f"{tmp_path}: expected a UTF-8 text file" in refused(
        local_blocks, tmp_path, tokenizer, 8
    )
    file = tmp_path / "a.txt"
    assert f"{file}: no such file; expected" in refused(local_blocks, file, tokenizer, 8)
    file.write_text("a b\n")
    assert "2 tokens, fewer than a block" in refused(local_blocks, file, tokenizer, 8)
    assert "length=2" in refused(local_blocks, file, tokenizer, 2)
    file.write_bytes(b"a\nb \xff\n")
    assert f"{file}, line 2" in refused(local_blocks, file, tokenizer, 8)


def hub_options(file, kind="text", split="train"):
    """A text column of a file in a format of the hub."""
    options = {"name": kind, "config": None, "split": split, "column": "text"}
    return options | {"data_files": file and str(file)}


def test_sets_of_the_hub(tokenizer, tmp_path, monkeypatch):
    """Here files in one of its formats: the same blocks, and another key for other content."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(SENTENCES))
    actual = hub_text(hub_options(file))
    assert [*lines_of(actual)] == SENTENCES
    assert (
        running_blocks(actual, tokenizer, 7, tmp_path / "cache")
        == running_blocks(file, tokenizer, 7)
    ).all()
    assert "task.hub.column=body: expected a column" in refused(
        hub_text, hub_options(file) | {"column": "body"}
    )
    file.write_text("another")
    assert hub_text(hub_options(file)) != actual
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert "network" in refused(hub_text, hub_options(None) | {"name": "someone/some-text"})


# ----------------------------------------------------------------------------------------------------- masking
def hub_lines(file, kind, split="train"):
    return [*lines_of(hub_text(hub_options(file, kind, split)))]


@pytest.mark.parametrize(
    "first, second, row",
    [
        ('"a"', "null", 2),
        ("null", "null", 1),
        ("1", "2", 1),
        ('"a"', "1.5", 2),
        ("true", "false", 1),
        ('"2011-01-01"', '"2012-01-01"', 1),
        ('{"a": 1}', '{"a": 2}', 1),
        ('["a"]', '["b"]', 1),
    ],
)
def test_values_of_json_that_are_no_text_are_named(first, second, row, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    file = tmp_path / "a.json"
    file.write_text(f'{{"text": {first}}}\n{{"text": {second}}}\n')
    with pytest.raises(DataError, match=f"a.json, row {row}: column text is .*expected text"):
        hub_lines(file, "json")


@pytest.mark.parametrize(
    "kind, content, reason",
    [
        ("text", b"h\xe9llo\n", "'utf-8' codec can't decode"),
        ("csv", b"id,text\n1,h\xe9llo\n", "'utf-8' codec can't decode"),
        ("csv", b"id,text\n1,a\n2,b,c\n", "Expected 2 fields in line 3, saw 3"),
        ("json", b'{"text": "a"\n', "JSON"),
        ("parquet", b"no parquet", "Parquet"),
        ("text", None, "Unable to find"),
    ],
)
def test_a_local_file_that_cannot_be_read_is_named(kind, content, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    file = tmp_path / "a.data"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"not readable from .*a.data: .*{reason}") as caught:
        hub_lines(file, kind)
    assert "Hugging Face" not in str(caught.value)


def random_ids(rows: int, length: int) -> np.ndarray:
    ids = np.random.default_rng(5).integers(len(SPECIALS), len(WORDS), (rows, length), np.int32)
    # [CLS], [SEP], [UNK]
    ids[:, 0] = 2
    ids[:, -1] = 3
    ids[:, 3] = 1
    return ids


def masked(masking: Masking, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch = masking(ids, np.random.default_rng(1).random((3, *ids.shape)))
    return batch["input_ids"].numpy(), batch["labels"].numpy()


def test_masking_has_berts_shares(tokenizer):
    masking = Masking.from_tokenizer(tokenizer)
    ids = random_ids(2000, 60)
    inputs, labels = masked(masking, ids)
    chosen = labels != IGNORED
    maskable = ids >= len(SPECIALS)
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert not (chosen & ~maskable).any()
    assert chosen.any(1).all()

    def near(count, total, share):
        return abs(count / total - share) < 5 * (share * (1 - share) / total) ** 0.5

    total = int(chosen.sum())
    assert near(total, int(maskable.sum()), 0.15)
    hidden = (inputs == masking.mask_id) & chosen
    same = (inputs == ids) & chosen
    assert near(int(hidden.sum()), total, 0.8 + 0.1 / len(WORDS))
    assert near(int(same.sum()), total, 0.1 + 0.1 / len(WORDS))
    replaced = inputs[chosen & ~hidden & ~same]
    assert replaced.min() == 0
    assert replaced.max() == len(WORDS) - 1
    assert len(np.unique(replaced)) == len(WORDS) - 1


def test_every_row_has_a_masked_token(tokenizer):
    ids = np.array([[2, 7, 3]] * 300 + [[2, 1, 3]])
    labels = masked(Masking.from_tokenizer(tokenizer), ids)[1]
    assert (labels[:300, 1] == 7).all()
    assert (labels[300] == IGNORED).all()


def test_the_largest_random_number_gives_a_token(tokenizer):
    special = np.zeros(30522, bool)
    masking = replace(Masking.from_tokenizer(tokenizer), special=special, drawn=30522)
    largest = np.full((3, 1, 1), 1 - 2.0**-53)
    actual = masking(np.array([[7]]), largest)["input_ids"].tolist()
    assert actual == [[30521]]


def test_a_vocabulary_without_a_mask_or_a_start_is_refused(vocabulary):
    bare = bert_tokenizer(vocabulary)
    bare.mask_token = bare.cls_token = None
    assert "mask token" in refused(Masking.from_tokenizer, bare)
    assert "[CLS]" in refused(local_blocks, vocabulary, bare, 7)


@pytest.mark.parametrize("kind", [generator_of, np.random.default_rng])
def test_uniforms_are_independent_by_row(kind):
    actual = uniforms(map(kind, range(4)), 500)
    assert actual.shape == (3, 4, 500)
    assert 0 <= actual.min() < actual.max() < 1
    assert (actual == uniforms(map(kind, range(4)), 500)).all()
    assert abs(actual.mean() - 0.5) < 0.03
    difference = abs(np.corrcoef(actual.reshape(12, 500)) - np.eye(12)).max()
    assert difference < 0.2
