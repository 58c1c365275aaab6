"""GLUE readers: the official layouts, refusals of other files, and batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.glue import TASKS, collate, encode, load
from crt_exp.experiments.data.plan import Plan, bucketed
from crt_exp.experiments.data.text import bert_tokenizer

# columns of train; MNLI's dev files have more labels
HEADERS = {
    name: columns.split(",")
    for name, columns in (
        ("cola", "source,label,mark,sentence"),
        ("sst2", "sentence,label"),
        ("mrpc", "Quality,#1 ID,#2 ID,#1 String,#2 String"),
        ("qqp", "id,qid1,qid2,question1,question2,is_duplicate"),
        ("stsb", "index,genre,filename,year,old_index,source1,source2,sentence1,sentence2,score"),
        (
            "mnli",
            "index,promptID,pairID,genre,sentence1_parse,sentence2_parse,sentence1,sentence2,label1,gold_label",
        ),
        ("qnli", "index,question,sentence,label"),
        ("rte", "index,sentence1,sentence2,label"),
        ("wnli", "index,sentence1,sentence2,label"),
    )
}
PARTS = [(name, "train") for name in TASKS] + [("mnli", "dev_mm"), ("cola", "dev")]


def spelling(name, i):
    spelled = TASKS[name].spelled
    return spelled[i % len(spelled)] if spelled else f"{i % 51 / 10:.3f}"


def rows_of(name, split="train", n=7):
    """Made-up rows in the official layout, the header among them where there is one. Text i of column c is 'c" i'."""
    task = TASKS[name]
    header = HEADERS[name]
    if name == "mnli" and split.startswith("dev"):
        header = [*header[:-1], *(f"label{i}" for i in range(2, 6)), "gold_label"]
    rows = []
    for i in range(n):
        rows.append(
            [spelling(name, i) if column == task.label else f'{column}" {i}' for column in header]
        )
    return rows if task.headless else [header, *rows]


def write(folder, name, split="train", rows=None, end="\n", start=b""):
    path = folder / f"{TASKS[name].splits[split]}.tsv"
    text = "".join("\t".join(row) + end for row in (rows_of(name, split) if rows is None else rows))
    path.write_bytes(start + text.encode())
    return path


def refusal(*arguments, **options):
    with pytest.raises(DataError) as caught:
        load(*arguments, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(("name", "split"), PARTS)
def test_official_layout(name, split, tmp_path):
    write(tmp_path, name, split)
    actual = load(name, split, tmp_path)
    task = TASKS[name]
    expected = []
    for column in task.columns:
        expected.append([f'{column}" {i}' for i in range(7)])
    assert actual.texts == expected
    if task.names:
        classes = [i % len(task.names) for i in range(7)]
    else:
        classes = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert actual.labels == classes


@pytest.mark.parametrize("name", ["cola", "rte"])
def test_line_ends_blank_lines_and_byte_order_mark_do_not_matter(name, tmp_path):
    write(tmp_path, name)
    plain = load(name, data_dir=tmp_path)
    write(tmp_path, name, end="\r\n\n", start=b"\xef\xbb\xbf")
    assert load(name, data_dir=tmp_path) == plain


def test_broken_rows_that_are_published(tmp_path, caplog):
    rows = rows_of("qqp", n=2000) + [["97931", "cut"]]
    write(tmp_path, "qqp", rows=rows)
    assert len(load("qqp", data_dir=tmp_path).labels) == 2000
    assert "skipped 1 broken rows" in caplog.text


def test_subsample_is_deterministic_and_nested(tmp_path):
    rows = rows_of("sst2", n=400)
    write(tmp_path, "sst2", rows=rows)
    whole = load("sst2", data_dir=tmp_path)
    train, small = whole.sample(50)
    _, large = whole.sample(90)
    assert small == whole.sample(50)[1]
    assert {*small.texts[0]} < {*large.texts[0]} < {*whole.texts[0]}
    assert len(small.labels) == 50
    places = [whole.texts[0].index(text) for text in small.texts[0]]
    assert places == sorted(places)
    assert small.labels == [whole.labels[i] for i in places]
    assert whole.sample(4)[1].texts[0] == [
        f'sentence" {i}' for i in (40, 186, 225, 310)
    ]  # the same on every machine
    assert {*train.texts[0]}.isdisjoint(small.texts[0])
    assert len(train.labels) == 350


# --------------------------------------------------------------------------------------------------- bad input
def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    message = refusal("rte", "dev", source="files")
    assert "CRT_DATA" in message
    assert "python -m crt_exp data fetch glue/RTE" in message
    assert "dev.tsv" in message
    assert "task.source=hub" in message
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    assert str(tmp_path / "glue/MNLI/dev_mismatched.tsv") in refusal(
        "mnli", "dev_mm", source="files"
    )


@pytest.mark.parametrize("change", [lambda row: row[:-1], lambda row: [*row, "more"]])
def test_rows_of_another_width_are_refused(change, tmp_path):
    rows = rows_of("rte")
    rows[3] = change(rows[3])
    path = write(tmp_path, "rte", rows=rows)
    message = refusal("rte", data_dir=tmp_path)
    assert f"{path}, line 4: expected" in message
    assert "fetch glue/" in message


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("cola", "2"),
        ("mnli", "-"),
        ("stsb", "5.1"),
        ("stsb", "-0.1"),
        ("stsb", "nan"),
    ],
)
def test_other_labels_are_refused(name, bad, tmp_path):
    rows = rows_of(name)
    rows[4][HEADERS[name].index(TASKS[name].label)] = bad
    path = write(tmp_path, name, rows=rows)
    assert f"{path}, line 5: label {bad!r}" in refusal(name, data_dir=tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        rows_of("rte")[:1],
        [["other"] * 4, ["x"] * 4],
    ],
)
def test_files_without_examples_or_columns(rows, tmp_path):
    actual = str(write(tmp_path, "rte", rows=rows))
    assert actual in refusal("rte", data_dir=tmp_path)


# --------------------------------------------------------------------------------------------------------- hub
def hub_set(name, labels, names=None):
    import datasets

    task = TASKS[name]
    if task.names:
        kind = datasets.ClassLabel(names=list(names or task.names))
    else:
        kind = datasets.Value("float32")
    columns = task.hub_columns or task.columns
    features = datasets.Features(
        {column: datasets.Value("string") for column in columns} | {"label": kind}
    )
    rows = {}
    for column in columns:
        rows[column] = [f"{column} {i}" for i in range(len(labels))]
    return datasets.Dataset.from_dict(rows | {"label": labels}, features=features)


def test_the_copy_on_the_hub(monkeypatch):
    asked = []
    sets = {
        ("mnli", "validation_mismatched"): hub_set("mnli", [2, 0]),
        ("stsb", "validation"): hub_set("stsb", [2.5, 5.0]),
        ("rte", "train"): hub_set("rte", [0], ("not_entailment", "entailment")),
    }
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda path, name, split, **_: asked.append(path) or sets[name, split],
    )
    mnli = load("mnli", "dev_mm", source="hub")
    assert mnli.texts == [
        ["premise 0", "premise 1"],
        ["hypothesis 0", "hypothesis 1"],
    ]
    assert mnli.labels == [2, 0]
    actual = load("stsb", "dev", source="hub").labels
    assert actual == [2.5, 5.0]
    assert asked[0] == "nyu-mll/glue"
    assert "expected the classes" in refusal("rte", source="hub")
    monkeypatch.undo()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = refusal("rte", source="hub")
    assert "network" in message
    assert "python -m crt_exp data fetch glue/RTE" in message
    assert "CRT_DATA" in message


# ---------------------------------------------------------------------------------------------------- encoding
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sentence", "question", '"', "##s"]
    path.write_text(
        "\n".join([*words, *map(str, range(10)), *(f"##{i}" for i in range(10))]) + "\n"
    )
    return bert_tokenizer(path)


@pytest.mark.parametrize("name", ["cola", "stsb"])
def test_encoding_and_batches_equal_the_tokenizers_own(name, tokenizer, tmp_path):
    rows = rows_of(name, n=25)
    write(tmp_path, name, rows=rows)
    examples = load(name, data_dir=tmp_path)
    for length in (6, 128):
        batch = collate(encode(examples, tokenizer, length, name != "stsb"), tokenizer.pad_token_id)
        own = tokenizer(
            *examples.texts, truncation=True, max_length=length, padding=True, return_tensors="pt"
        )
        assert batch.keys() == {*own, "labels"}
        for key in own:
            assert torch.equal(batch[key], own[key])
        actual = batch["labels"].tolist()
        assert actual == pytest.approx(examples.labels)
        expected = torch.float32 if name == "stsb" else torch.int64
        assert batch["labels"].dtype == expected
    with pytest.raises(DataError, match="task.max_length=2: expected more than"):
        encode(examples, tokenizer, 2, True)


# ----------------------------------------------------------------------------------------------------- batches
LENGTHS = np.random.default_rng(0).integers(3, 100, 1003)


def test_bucketed_batches_hold_the_rows_of_the_plan():
    plan = Plan(batch=8, seed=1, epoch=2)
    batches = [*bucketed(LENGTHS, plan, pool=20)]
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) == 125
    actual = sorted(np.concatenate(batches))
    expected = sorted(np.concatenate([*plan.rows(1003, "train")]))
    assert actual == expected
    expected = [*bucketed(LENGTHS, plan, pool=20)]
    assert np.array_equal(batches, expected)
    expected = [*bucketed(LENGTHS, replace(plan, epoch=3), pool=20)]
    assert not np.array_equal(batches, expected)
    actual = batches[77:]
    expected = [*bucketed(LENGTHS, replace(plan, start=77), pool=20)]
    assert np.array_equal(actual, expected)


def test_bucketed_batches_are_shared_by_processes_and_micro_batches():
    whole = [*bucketed(LENGTHS, Plan(batch=8))]
    parts = []
    for rank in range(2):
        parts.append([*bucketed(LENGTHS, Plan(batch=8, micro=2, rank=rank, world=2))])
    expected = np.concatenate([np.reshape(part, (-1, 4)) for part in parts], axis=1)
    assert np.array_equal(whole, expected)
