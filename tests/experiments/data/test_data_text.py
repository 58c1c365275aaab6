"""Text: tokenizers, blocks, masks, order, resuming; corpora of words and documents; prepared files; cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crt_exp.experiments.data import DataError, corpora, glue, text, vocabularies
from crt_exp.experiments.data.corpora import Rows, TokenText, columns, word_corpus
from crt_exp.experiments.data.files import cached
from crt_exp.experiments.data.text import (
    IGNORED,
    HubText,
    Masking,
    bert_tokenizer,
    fingerprint,
    generator_of,
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
WORD_ENDS = np.array([0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], np.float32)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return bert_tokenizer(vocabulary)


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "a.txt"
    path.write_text("one two\n\nthree\n")
    return new_tokenizer("byte_pairs", path, 300)


def refused(call, *arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **options)
    return str(caught.value)


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


def test_sets_of_the_hub(tokenizer, tmp_path, monkeypatch):
    """Here files in one of its formats: the same blocks, and another key for other content."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join(SENTENCES))
    found = HubText.load("text", None, "train", "text", {"train": str(file)})
    assert [*lines_of(found)] == SENTENCES
    assert (
        running_blocks(found, tokenizer, 7, tmp_path / "cache")
        == running_blocks(file, tokenizer, 7)
    ).all()
    assert "task.hub.column=body: expected a column" in refused(
        HubText.load, "text", None, "train", "body", str(file)
    )
    file.write_text("another")
    assert HubText.load("text", None, "train", "text", {"train": str(file)}).key != found.key
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert "network" in refused(HubText.load, "someone/some-text", None, "train", "text")


# ----------------------------------------------------------------------------------------------------- masking
def hub_lines(file, kind, split="train"):
    return [*lines_of(HubText.load(kind, None, split, "text", str(file)))]


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
    labels = masked(Masking.from_tokenizer(tokenizer), np.array([[2, 7, 3]] * 300 + [[2, 1, 3]]))[1]
    assert (labels[:300, 1] == 7).all()
    assert (labels[300] == IGNORED).all()


def test_the_largest_random_number_gives_a_token(tokenizer):
    special = np.zeros(30522, bool)
    masking = replace(Masking.from_tokenizer(tokenizer), special=special)
    actual = masking(np.array([[7]]), np.full((3, 1, 1), 1 - 2.0**-53))["input_ids"].tolist()
    assert actual == [[30521]]


def test_a_vocabulary_without_a_mask_or_a_start_is_refused(vocabulary):
    bare = bert_tokenizer(vocabulary)
    bare.mask_token = bare.cls_token = None
    assert "mask token" in refused(Masking.from_tokenizer, bare)
    assert "[CLS]" in refused(local_blocks, vocabulary, bare, 7)


@pytest.mark.parametrize("kind", [generator_of, np.random.default_rng])
def test_uniforms_are_independent_by_row(kind):
    found = uniforms(map(kind, range(4)), 500)
    assert found.shape == (3, 4, 500)
    assert 0 <= found.min() < found.max() < 1
    assert (found == uniforms(map(kind, range(4)), 500)).all()
    assert abs(found.mean() - 0.5) < 0.03
    difference = abs(np.corrcoef(found.reshape(12, 500)) - np.eye(12)).max()
    assert difference < 0.2


# ------------------------------------------------------------------------------------------- corpora of words
def write_ptb(folder: Path, train="a b a\n c <unk> \n", valid="a z\n", test="b\n") -> Path:
    cases = [
        ("train", train),
        ("valid", valid),
        ("test", test),
    ]
    for split, lines in cases:
        (folder / f"ptb.{split}.txt").write_text(lines)
    return folder


def test_words_of_official_files(tmp_path):
    found = word_corpus("ptb", write_ptb(tmp_path))
    assert found.words == ("<eos>", "a", "<unk>", "b", "c")
    assert found.parts["train"].dtype == np.int32
    actual = [part.tolist() for part in found.parts.values()]
    assert actual == [
        [1, 3, 1, 0, 4, 2, 0],
        [1, 2, 0],
        [3, 0],
    ]
    actual = found.counts.tolist()
    assert actual == [2, 2, 1, 1, 1]
    assert found.eos == 0
    message = refused(word_corpus, "wikitext2", tmp_path)
    assert str(tmp_path / "wiki.train.tokens") in message
    assert "python -m crt_exp data fetch wikitext2" in message
    assert "'z' and <unk> are not" in refused(
        word_corpus, "ptb", write_ptb(tmp_path, train="a b\n")
    )
    assert "too few lines" in refused(word_corpus, "ptb", write_ptb(tmp_path, test=""))


def test_rare_words_of_a_split_file_are_unknown(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("once a b\n" + "a b\n\n" * 18 + "a\n" + "b zebra\n")
    found = word_corpus(str(path))
    assert found.words == ("<eos>", "a", "b", "<unk>")
    actual = found.parts["train"].tolist()[:4]
    assert actual == [
        3,
        1,
        2,
        0,
    ]
    actual = found.parts["validation"].tolist()
    assert actual == [1, 2, 0, 1, 2, 0]
    actual = found.parts["test"].tolist()
    assert actual == [1, 0, 2, 3, 0]


@pytest.mark.parametrize(
    "n, count, whole",
    [
        (11, 3, True),
        (11, 3, False),
        (12, 3, True),
        (2, 5, True),
    ],
)
def test_columns_hold_every_word_after_the_one_before_it(n, count, whole):
    words = np.arange(1, n + 1)
    tokens, labels = columns(words, count, eos=0, whole=whole).reshape(2, -1)
    predicted = labels[labels != IGNORED]
    actual = predicted.tolist()
    expected = (words if whole else words[: n // count * count]).tolist()
    assert actual == expected
    actual = tokens[labels != IGNORED].tolist()
    expected = [0, *predicted][: len(predicted)]
    assert actual == expected


# --------------------------------------------------------------------------------------------------- documents
def test_every_token_of_a_row_is_predicted_from_the_one_before_it():
    document = TokenText(np.arange(1, 12, dtype=np.int32), np.array([4, 11]), WORD_ENDS)
    packed = Rows.packed(document, 4, 0, whole=False)
    apart = Rows.of_lines(document, 5, 0)
    both = []
    for data in (packed, apart):
        both.append([data[i] for i in range(len(data))])
    rows, lines = both
    actual = [row.labels.tolist() for row in rows]
    assert actual == [[1, 2, 3, 4], [5, 6, 7, 8]]
    actual = [row.tokens.tolist() for row in rows]
    assert actual == [[0, 1, 2, 3], [4, 5, 6, 7]]
    actual = [row.labels.tolist() for row in lines]
    assert actual == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    actual = [row.tokens.tolist() for row in lines]
    assert actual == [[0, 1, 2, 3], [0, 5, 6, 7, 8]]
    whole = Rows.packed(document, 4, 0, whole=True)
    assert apart.lengths.tolist() == [4, 5]
    assert whole.lengths.tolist() == [4, 4, 3]
    actual = whole[2].labels.tolist()
    assert actual == [9, 10, 11]
    assert whole.tokens_per_word([1, 2]) == 7 / 3


def test_held_out_parts_of_a_document():
    document = TokenText(
        np.arange(100, dtype=np.int32),
        np.array([30, 60, 80, 90, 100]),
        np.full(100, 0.5, np.float32),
    )
    found = document.held_out(0.1, apart=False)
    actual = [len(found[split].tokens) for split in ("train", "validation", "test")]
    assert actual == [80, 10, 10]
    assert found["test"].tokens[0] == 90
    assert found["test"].words.sum() == 5
    found = document.held_out(0.2, apart=True)
    actual = [found[split].ends.tolist() for split in found]
    assert actual == [[30, 60, 80], [10], [10]]
    assert "no tokens of 100 left" in refused(document.held_out, 0.001, False)


@pytest.mark.parametrize("apart", [False, True])
def test_tokens_and_words_of_files(apart, byte_pairs, tmp_path, monkeypatch):
    """Words count where they end, and a line end is one; the tokens are made once."""
    path = tmp_path / "a.txt"
    path.write_text("one two\n\nthree\n")
    found = TokenText.read([path], byte_pairs, 7, apart, tmp_path / "cache")
    assert found.words.sum() == 5
    assert found.tokens.dtype == np.uint16
    assert len(found.ends) == 1 + apart
    parts = [byte_pairs.decode(part[:-1]) for part in np.split(found.tokens, found.ends)[:-1]]
    assert parts == (["one two\n", "three\n"] if apart else ["one two\nthree\n"])
    cases = [found.part(0, 4), found.part(4, len(found.tokens) - 1)]
    for part in cases:
        words = byte_pairs.decode([token for token in part.tokens if token != 7])
        actual = part.words.sum()
        expected = len(words.split()) + words.count("\n")
        assert actual == expected, words
    monkeypatch.setattr(corpora, "token_lists", None)
    again = TokenText.read([path], byte_pairs, 7, apart, tmp_path / "cache")
    for name in ("tokens", "ends", "words"):
        assert np.array_equal(getattr(again, name), getattr(found, name))
    actual = found.counts(300).tolist()
    expected = np.bincount(found.tokens, minlength=300).tolist()
    assert actual == expected


def test_ids_beyond_16_bits_and_empty_files(byte_pairs, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two\n")
    actual = TokenText.read([path], byte_pairs, 70_000, False).tokens[-1]
    assert actual == 70_000
    path.write_text("\n \n")
    assert "a.txt: empty" in refused(
        TokenText.read, [path], byte_pairs, 7, False, tmp_path / "cache"
    )
    assert [*(tmp_path / "cache").iterdir()] == []


# ----------------------------------------------------------------------- files of result pages, made on demand
@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_parts_of_qnli_share_no_question(data):
    """They are made of dev alone."""
    option = f"task.data_dir={corpora.FOLDER}/qnli-2"
    assert "glue/QNLI needs dev.tsv" in refused(corpora.prepare, [option])
    lines = [f"{i}\tWho is {i % 5}?\tIt is {i}.\t{'not_' * (i % 2)}entailment\n" for i in range(13)]
    (data / "glue/QNLI").mkdir(parents=True)
    (data / "glue/QNLI/dev.tsv").write_text("index\tquestion\tsentence\tlabel\n" + "".join(lines))
    corpora.prepare([option])
    train = glue.load("qnli", "train", corpora.FOLDER / "qnli-2")
    dev = glue.load("qnli", "dev", corpora.FOLDER / "qnli-2")
    assert {*dev.texts[0]} == {"Who is 0?", "Who is 2?", "Who is 4?"}
    assert {*train.texts[0]}.isdisjoint(dev.texts[0])
    actual = sorted(train.texts[1] + dev.texts[1])
    expected = sorted(glue.load("qnli", "dev").texts[1])
    assert actual == expected


def test_no_row_of_a_part_of_sst2_is_a_phrase_of_the_other_part(data):
    words = [f"a{i} b{i} c{i} good film" for i in range(9)]
    rows = [
        *words,
        *(line[:8] for line in words),
        "good film",
        "film",
        *(line[-11:] for line in words),
    ]
    (data / "glue/SST-2").mkdir(parents=True)
    (data / "glue/SST-2/train.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{line}\t{i % 2}\n" for i, line in enumerate(rows))
    )
    folder = corpora.FOLDER / "sst2-9"
    corpora.prepare([f"task.data_dir={folder}"])
    train = glue.load("sst2", "train", folder).texts[0]
    dev = glue.load("sst2", "dev", folder).texts[0]
    assert 9 <= len(dev) <= 11
    assert len(train) == 27 - len(dev)
    padded = []
    for lines in (train, dev):
        padded.append([f" {line} " for line in lines])
    for one in padded[0]:
        for other in padded[1]:
            assert one not in other
            assert other not in one


# ------------------------------------------------------------------------------------------------------- cache
def some_arrays():
    return {"tokens": np.arange(5)}


def test_a_stopped_process_leaves_no_half_written_array(tmp_path, monkeypatch):
    save = np.save

    def stop(*arguments):
        save(*arguments)
        assert not (tmp_path / "cache/key").exists()  # what kill -9 would leave
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", stop)
        cached(tmp_path / "cache", "key", some_arrays)
    found = cached(tmp_path / "cache", "key", some_arrays)["tokens"]
    assert found.tolist() == [*range(5)]
    assert isinstance(found, np.memmap)


def test_damage_and_folders_that_cannot_be_written_are_refused(tmp_path):
    cached(tmp_path / "cache", "key", some_arrays)
    file = tmp_path / "cache/key/tokens.npy"
    file.write_bytes(file.read_bytes()[:-1])
    assert "remove this folder" in refused(cached, tmp_path / "cache", "key", some_arrays)
    (tmp_path / "file").write_text("")
    assert "expected a writable folder, or null" in refused(
        cached, tmp_path / "file", "key", some_arrays
    )
