"""Laws of the GLUE readers: the official layouts, what is said of files that are not so, and the batches."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.data import DataError
from crt_exp.data.glue import TASKS, Encoded, bucketed, collate, encode, load, task_of
from crt_exp.data.cache import stored
from crt_exp.data.text import bert_tokenizer
from crt_exp.tasks.base import Plan

official = pytest.mark.skipif(not os.environ.get("CRT_DATA"),
                              reason="CRT_DATA is not set: the official files are needed")

# task: columns of train (MNLI's dev files have more labels) and of test
HEADERS = {name: (train.split(","), test.split(",")) for name, train, test in (
    ("cola", "source,label,mark,sentence", "index,sentence"),
    ("sst2", "sentence,label", "index,sentence"),
    ("mrpc", "Quality,#1 ID,#2 ID,#1 String,#2 String", "index,#1 ID,#2 ID,#1 String,#2 String"),
    ("qqp", "id,qid1,qid2,question1,question2,is_duplicate", "id,question1,question2"),
    ("stsb", "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score",
     "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2"),
    ("mnli",
     "index,promptID,pairID,genre,sentence1_binary_parse,sentence2_binary_parse,sentence1_parse,sentence2_parse,"
     "sentence1,sentence2,label1,gold_label",
     "index,promptID,pairID,genre,sentence1_binary_parse,sentence2_binary_parse,sentence1_parse,sentence2_parse,"
     "sentence1,sentence2"),
    ("qnli", "index,question,sentence,label", "index,question,sentence"),
    ("rte", "index,sentence1,sentence2,label", "index,sentence1,sentence2"),
    ("wnli", "index,sentence1,sentence2,label", "index,sentence1,sentence2"))}
COUNTS = {"cola": (8551, 1043, 1063), "sst2": (67349, 872, 1821), "mrpc": (3668, 408, 1725), "rte": (2490, 277, 3000),
          "stsb": (5749, 1500, 1379), "qnli": (None, 5463, 5463), "wnli": (635, 71, 146)}
PARTS = [(name, split) for name, task in TASKS.items() for split in task.splits]


def spelling(name: str, i: int) -> str:
    spelled = TASKS[name].spelled
    return spelled[i % len(spelled)] if spelled else f"{i % 51 / 10:.3f}"


def rows_of(name: str, split: str = "train", n: int = 7) -> list[list[str]]:
    """Made-up rows in the official layout, the header among them where there is one. Text i of column c is 'c" i'."""
    task, test = TASKS[name], split.startswith("test")
    header = [*HEADERS[name][test]]
    if name == "mnli" and split.startswith("dev"):
        header = [*header[:-1], *(f"label{i}" for i in range(2, 6)), "gold_label"]
    rows = [[spelling(name, i) if column == task.label else f'{column}" {i}' for column in header] for i in range(n)]
    return rows if task.headless and not test else [header, *rows]


def write(folder: Path, name: str, split: str = "train", rows: list[list[str]] | None = None, end: str = "\n",
          start: bytes = b"") -> Path:
    path = folder / f"{TASKS[name].splits[split]}.tsv"
    text = "".join("\t".join(row) + end for row in (rows_of(name, split) if rows is None else rows))
    path.write_bytes(start + text.encode())
    return path


def refusal(*arguments, **options) -> str:
    """The message of the DataError that loading raises: one to three lines."""
    with pytest.raises(DataError) as caught:
        load(*arguments, **options)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message


# ------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(("name", "split"), PARTS)
def test_official_layout(name, split, tmp_path):
    path, task = write(tmp_path, name, split), TASKS[name]
    found = load(name, split, tmp_path)
    texts = [[f'{column}" {i}' for i in range(7)] for column in task.columns]
    assert [found.sentence1, found.sentence2] == [*texts, None][:2]
    assert len(found) == 7 and str(path) in found.source and found.names == task.names
    if split.startswith("test"):
        assert found.labels is None
    elif task.names:
        assert found.labels == [i % len(task.names) for i in range(7)]
    else:
        assert found.labels == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


@pytest.mark.parametrize("name", TASKS)
def test_line_ends_blank_lines_and_byte_order_mark_do_not_matter(name, tmp_path):
    write(tmp_path, name)
    plain = load(name, data_dir=tmp_path)
    for end, start in (("\r\n", b""), ("\n", b"\xef\xbb\xbf"), ("\n\n", b"")):
        write(tmp_path, name, end=end, start=start)
        other = load(name, data_dir=tmp_path)
        assert (other.sentence1, other.sentence2, other.labels) == (plain.sentence1, plain.sentence2, plain.labels)


def test_names_in_any_spelling():
    assert task_of("SST-2") is task_of("sst2") is TASKS["sst2"] and task_of("STS-B").outputs == 1
    assert [TASKS[name].outputs for name in ("mnli", "cola")] == [3, 2]


def test_source_says_which_part_of_the_published_file_it_is(tmp_path):
    write(tmp_path, "rte")
    assert load("rte", data_dir=tmp_path).source.endswith("train.tsv, 7 of 2490 published examples")
    for split, published in (("dev", 277), ("test", 3000)):
        write(tmp_path, "rte", split)
        found = load("rte", split, tmp_path)
        assert found.source.endswith(f"{split}.tsv, 7 of {published} published examples")
        assert found.described == f", 7 of {published} published examples"
    write(tmp_path, "qqp", rows=rows_of("qqp", n=2000) + [["97931", "cut"]])
    found = load("qqp", data_dir=tmp_path)               # broken rows are in the published file
    assert len(found) == 2000 and found.source.endswith("without 1 broken rows")
    assert found.described == ", 2000 examples, without 1 broken rows"


def test_subsample_is_deterministic_nested_and_stated(tmp_path):
    write(tmp_path, "sst2", rows=rows_of("sst2", n=400))
    whole = load("sst2", data_dir=tmp_path)
    small, large, other = (load("sst2", data_dir=tmp_path, n=n, seed=seed) for n, seed in ((50, 3), (90, 3), (50, 4)))
    assert small.sentence1 == load("sst2", data_dir=tmp_path, n=50, seed=3).sentence1 != other.sentence1
    assert set(small.sentence1) < set(large.sentence1) < set(whole.sentence1) and len(small) == len(small.labels) == 50
    places = [whole.sentence1.index(text) for text in small.sentence1]
    assert places == sorted(places) and small.labels == [whole.labels[i] for i in places]
    assert small.source.endswith("50 of 400 examples drawn with seed 3")
    assert whole.subsample(400) is whole and whole.subsample(None) is whole
    assert "none" in refusal("sst2", data_dir=tmp_path, n=0)
    assert whole.subsample(4).sentence1 == [f'sentence" {i}' for i in (40, 186, 225, 310)]   # the same on every machine


# --------------------------------------------------------------------------------------------------- bad input
def test_unknown_names():
    assert "Did you mean stsb?" in refusal("sstb") and "cola" in refusal("nothing-like-it")
    assert "it has train, dev, test" in refusal("rte", "dev_mm") and "dev_mm" in refusal("mnli", "validation")


@pytest.mark.parametrize(("name", "split"), PARTS)
def test_missing_file(name, split, tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    task, file = TASKS[name], f"{TASKS[name].splits[split]}.tsv"
    message = refusal(name, split, source="files")
    assert "CRT_DATA" in message and f"python -m crt_exp.data fetch glue/{task.folder}" in message and file in message
    assert "https://gluebenchmark.com" in message and "task.data_dir=" in message and "task.source=hub" in message
    assert str(tmp_path / file) in refusal(name, split, tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    assert str(tmp_path / "glue" / task.folder / file) in refusal(name, split, source="files")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("change", [lambda row: row[:-1], lambda row: [*row, "more"]])
def test_malformed_row(name, change, tmp_path):
    rows = rows_of(name)
    columns, rows[3] = len(rows[3]), change(rows[3])
    path = write(tmp_path, name, rows=rows)
    message = refusal(name, data_dir=tmp_path)
    assert f"{path}, line 4: {len(rows[3])} columns, {columns} expected" in message and "fetch glue/" in message


@pytest.mark.parametrize(("name", "bad"), [
    ("cola", "2"), ("mrpc", ""), ("rte", "1"), ("mnli", "-"), ("qnli", "Entailment"),
    ("stsb", "5.1"), ("stsb", "-0.1"), ("stsb", "nan"), ("stsb", "high"), ("wnli", "01")])
def test_label_out_of_range(name, bad, tmp_path):
    rows = rows_of(name)
    rows[4][HEADERS[name][0].index(TASKS[name].label)] = bad
    path = write(tmp_path, name, rows=rows)
    message = refusal(name, data_dir=tmp_path)
    assert f"{path}, line 5: " in message and repr(bad) in message and "fetch glue/" in message


@pytest.mark.parametrize("name", TASKS)
def test_empty_file(name, tmp_path):
    path = write(tmp_path, name, rows=[])
    assert f"{path}: the file is empty" in refusal(name, data_dir=tmp_path)
    if not TASKS[name].headless:
        write(tmp_path, name, rows=rows_of(name)[:1])
        assert f"{path}: there is no example" in refusal(name, data_dir=tmp_path)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"cola"}))
def test_header_without_a_column(name, tmp_path):
    for column in (TASKS[name].label, TASKS[name].columns[-1]):
        rows = rows_of(name)
        rows[0][rows[0].index(column)] = "other"
        write(tmp_path, name, rows=rows)
        message = refusal(name, data_dir=tmp_path)
        assert "line 1: the header line has no column" in message and repr(column) in message


def test_not_text(tmp_path):
    path = write(tmp_path, "rte")
    path.write_bytes(path.read_bytes() + b"7\t\xff\t\t\n")
    assert f"{path}, line 9: not UTF-8 text" in refusal("rte", data_dir=tmp_path)


# --------------------------------------------------------------------------------------------------------- hub
def hub_set(name: str, labels: list, names: tuple[str, ...] | None = None):
    import datasets

    task = TASKS[name]
    kind = datasets.ClassLabel(names=list(names or task.names)) if task.names else datasets.Value("float32")
    columns = task.hub_columns or task.columns
    features = datasets.Features({column: datasets.Value("string") for column in columns} | {"label": kind})
    rows = {column: [f"{column} {i}" for i in range(len(labels))] for column in columns}
    return datasets.Dataset.from_dict(rows | {"label": labels}, features=features)


def test_hub(monkeypatch):
    asked = []
    sets = {("mnli", "validation_mismatched"): hub_set("mnli", [2, 0]),
            ("stsb", "validation"): hub_set("stsb", [2.5, 5.0]), ("cola", "test"): hub_set("cola", [-1, -1]),
            ("rte", "train"): hub_set("rte", [0], ("not_entailment", "entailment"))}
    monkeypatch.setattr("datasets.load_dataset", lambda path, name, split: asked.append(path) or sets[name, split])
    mnli = load("mnli", "dev_mm", source="hub")
    assert mnli.sentence1 == ["premise 0", "premise 1"] and mnli.sentence2[1] == "hypothesis 1"
    assert mnli.labels == [2, 0]
    assert load("stsb", "dev", source="hub").labels == [2.5, 5.0] and asked[0] == "nyu-mll/glue"
    cola = load("cola", "test", source="hub", n=1)
    assert cola.labels is None and cola.sentence2 is None and "1 of 2 examples" in cola.source
    assert "other classes" in refusal("rte", source="hub")


def test_hub_without_network(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = refusal("rte", source="hub")
    assert "network" in message and "python -m crt_exp.data fetch glue/RTE" in message and "CRT_DATA" in message


# ---------------------------------------------------------------------------------------------------- encoding
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sentence", "question", '"', "##s"]
    path.write_text("\n".join([*words, *map(str, range(10)), *(f"##{i}" for i in range(10))]) + "\n")
    return bert_tokenizer(path)


@pytest.mark.parametrize("name", ["cola", "qnli", "stsb"])
def test_encoding_equals_the_tokenizers_own(name, tokenizer, tmp_path):
    write(tmp_path, name, rows=rows_of(name, n=25))
    examples = load(name, data_dir=tmp_path)
    for length in (6, 128):
        encoded = encode(examples, tokenizer, length)
        pairs = [examples.sentence1] if examples.sentence2 is None else [examples.sentence1, examples.sentence2]
        for i, texts in enumerate(zip(*pairs)):
            own = tokenizer(*texts, truncation=True, max_length=length)
            assert encoded[i]["input_ids"].tolist() == own["input_ids"]
            assert encoded[i]["token_type_ids"].tolist() == own["token_type_ids"]
            assert encoded[i]["labels"] == pytest.approx(examples.labels[i])
    assert encoded.input_ids.dtype == np.int32 and encoded.lengths.sum() == len(encoded.input_ids)
    assert encoded.labels.dtype == (np.float32 if name == "stsb" else np.int64)


def test_encoding_is_cached_by_content(tokenizer, tmp_path):
    write(tmp_path, "rte", rows=rows_of("rte", n=25))
    examples, cache = load("rte", data_dir=tmp_path), tmp_path / "cache"
    fresh = encode(examples, tokenizer, 20, cache)
    file, = cache.iterdir()
    content, stamp = file.read_bytes(), file.stat().st_mtime_ns
    # leaves traces in the tokenizer
    tokenizer("what comes between", truncation=True, max_length=3, padding="max_length")
    again = encode(examples, tokenizer, 20, cache)
    assert file.stat().st_mtime_ns == stamp and [*cache.iterdir()] == [file]
    for name in ("input_ids", "offsets", "token_type_ids", "labels"):
        assert (getattr(again, name) == getattr(fresh, name)).all()
    encode(examples, tokenizer, 21, cache)
    encode(examples.subsample(5), tokenizer, 20, cache)
    assert len([*cache.iterdir()]) == 3
    file.write_bytes(content[:100])                          # truncated by a crash of another program: made anew
    assert (encode(examples, tokenizer, 20, cache).input_ids == fresh.input_ids).all() and file.read_bytes() == content


def test_encoding_refuses(tokenizer, tmp_path):
    write(tmp_path, "rte")
    examples = load("rte", data_dir=tmp_path)
    with pytest.raises(DataError, match="max_length=3"):
        encode(examples, tokenizer, 3)


def test_a_cache_that_cannot_be_written_is_told_once(tokenizer, tmp_path, caplog):
    write(tmp_path, "rte")
    examples = load("rte", data_dir=tmp_path)
    (tmp_path / "file").write_text("")
    for _ in range(2):
        encoded = encode(examples, tokenizer, 20, tmp_path / "file" / "cache")
        assert (encoded.input_ids == encode(examples, tokenizer, 20).input_ids).all()
    assert len(caplog.records) == 1
    assert f"{tmp_path}/file/cache cannot be written (Not a directory)" in caplog.text
    assert "task.cache_dir" in caplog.text


def test_a_byte_that_changed_in_a_cache_is_noticed(tokenizer, tmp_path, caplog):
    """Wherever it is; one line, and the tokens are right."""
    write(tmp_path, "rte", rows=rows_of("rte", n=3))
    examples = load("rte", data_dir=tmp_path)
    fresh = encode(examples, tokenizer, 20, tmp_path / "cache")
    file, = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
        again = stored(file)
        assert again is None, place
    assert not caplog.records
    encoded = encode(examples, tokenizer, 20, tmp_path / "cache")
    assert (encoded.input_ids == fresh.input_ids).all() and file.read_bytes() == content
    assert len(caplog.records) == 1 and f"{file} is not as it was written: the tokens are made again" in caplog.text


# ----------------------------------------------------------------------------------------------------- batches
def encoded_of(lengths: list[int]) -> Encoded:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Encoded(np.arange(offsets[-1], dtype=np.int32) + 1, offsets, np.ones(offsets[-1], np.uint8),
                   np.arange(len(lengths)))


def test_collate_pads_to_the_longest():
    encoded = encoded_of([3, 1, 2])
    batch = collate([encoded[i] for i in range(3)], pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]] and batch["labels"].tolist() == [0, 1, 2]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]] == batch["token_type_ids"].tolist()
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    bare = Encoded(encoded.input_ids, encoded.offsets, None, None)
    assert set(collate([bare[0]], pad_id=0)) == {"input_ids", "attention_mask"}
    with pytest.raises(DataError, match="pad_token"):
        collate([bare[0]], pad_id=None)


LENGTHS = np.random.default_rng(0).integers(3, 100, 1003)


def test_bucketed_batches_hold_the_rows_of_the_plan():
    plan = Plan(batch=8, seed=1, epoch=2)
    batches = [*bucketed(LENGTHS, plan, pool=20)]
    assert {len(batch) for batch in batches} == {8} and len(batches) == 125
    assert sorted(np.concatenate(batches)) == sorted(np.concatenate([*plan.rows(1003, "train")]))
    assert np.array_equal(batches, [*bucketed(LENGTHS, plan, pool=20)])
    assert not np.array_equal(batches, [*bucketed(LENGTHS, replace(plan, epoch=3), pool=20)])
    assert np.array_equal(batches[77:], [*bucketed(LENGTHS, replace(plan, start=77), pool=20)])


def test_bucketed_batches_are_shared_by_processes_and_micro_batches():
    whole = [*bucketed(LENGTHS, Plan(batch=8))]
    parts = [[*bucketed(LENGTHS, Plan(batch=8, micro=2, rank=rank, world=2))] for rank in range(2)]
    assert np.array_equal(whole, np.concatenate([np.reshape(part, (-1, 4)) for part in parts], axis=1))


def test_bucketing_saves_padding():
    plan = Plan(batch=10)
    padded = [sum(10 * LENGTHS[rows].max() for rows in order)
              for order in (bucketed(LENGTHS, plan), plan.rows(1003, "train"))]
    assert padded[0] < 1.1 * LENGTHS.sum() < 1.5 * LENGTHS.sum() < padded[1]


# ---------------------------------------------------------------------------------------------- official files
@official
@pytest.mark.parametrize("name", COUNTS)
def test_published_counts(name):
    for split, count in zip(("train", "dev", "test"), COUNTS[name]):
        if count is None:
            continue
        found = load(name, split)
        assert len(found) == count and "published" not in found.source and found.described == f", {count} examples"
        assert (found.labels is None) == (split == "test") and all(found.sentence1)
        if found.labels and found.names:
            assert set(found.labels) == {*range(len(found.names))}
    if name == "cola":
        assert load(name).sentence1[0] == "Our friends won't buy this analysis, let alone the next one we propose."
        assert np.mean(load(name, "dev").labels) == pytest.approx(721 / 1043)


def test_a_folder_beside_the_hub_is_refused(tmp_path):
    with pytest.raises(DataError, match="task.data_dir=.* is not used by task.source=hub"):
        load("cola", "train", tmp_path, source="hub")
