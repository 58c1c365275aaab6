"""task=glue and task=uci: metrics by their definitions, batches, splits, and files that do not fit together."""

import numpy as np
import pytest
import torch
from helpers.small_bert import VOCABULARY, sentence, write_glue, write_model
from helpers.task_options import options_of
from safetensors.torch import save_file

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.glue import TASKS, collate
from crt_exp.experiments.tasks.base import (
    METRICS,
    Plan,
    Reader,
    error_rates,
    jackknife_values,
)
from crt_exp.experiments.tasks.glue import GLUE
from crt_exp.experiments.tasks.uci import BASELINES, UCI
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

CLASSES = ([1, 1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 1, 0])
SCORES = ([0.1, 2.5, 2.5, 4.0, 3.9], [0.0, 2.0, 3.0, 5.0, 4.0])


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_their_definitions():
    accuracy = METRICS["accuracy"]
    f1 = METRICS["f1"]
    mcc = METRICS["mcc"]
    pearson = METRICS["pearson"]
    spearman = METRICS["spearman"]
    # three of four right in each class
    assert accuracy(*CLASSES) == 6 / 8
    assert f1(*CLASSES) == pytest.approx(3 / 4)
    assert f1([0, 0, 0, 1], [0, 0, 0, 0]) == 0
    assert f1([1, 1, 0], [1, 1, 1]) == pytest.approx(0.8)  # of class 1
    assert mcc(*CLASSES) == pytest.approx((3 * 3 - 1 * 1) / 4**2)
    assert mcc([0, 1, 2, 1], [0, 1, 2, 1]) == pytest.approx(1)  # more than two classes
    actual = pearson(*SCORES)
    expected = np.corrcoef(*SCORES)[0, 1]
    assert actual == pytest.approx(expected)
    # ties: the mean rank
    actual = spearman(*SCORES)
    expected = np.corrcoef([1, 2.5, 2.5, 5, 4], [1, 2, 3, 5, 4])[0, 1]
    assert actual == pytest.approx(expected)


def test_error_rates_count_each_kind_of_error():
    parts = ("substitutions", "deletions", "insertions")
    found = error_rates(["one two three four", "five"], ["one too three", "five six"])
    assert found["wer"] == pytest.approx(3 / 5)
    for part in parts:
        assert found[part] == 1 / 5
    actual = found["cer"]
    expected = sum(found[f"character_{part}"] for part in parts)
    assert actual == pytest.approx(expected)
    assert error_rates(["one two three"], ["one"])["deletions"] == pytest.approx(
        2 / 3
    )  # per word of the reference


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["mcc", "spearman", "pearson"])
def test_constant_vectors_have_no_correlation(name):
    pairs = [
        ([1, 1, 1], [0, 1, 1]),
        ([0, 1, 1], [1, 1, 1]),
        ([1, 1], [1, 1]),
        ([2], [2]),
    ]
    for pair in pairs:
        assert METRICS[name](*pair) == 0.0


def test_tasks_report_the_papers_metric_first():
    first = {name: task.metrics[0] for name, task in TASKS.items()}
    assert first.pop("cola") == "mcc"
    assert first.pop("mrpc") == "f1"
    assert first.pop("stsb") == "spearman"
    assert set(first.values()) == {"accuracy"}


def test_jackknife_values_give_the_interval_over_examples():
    """Of an accuracy they are those of the parts; of a correlation their interval is that of fresh samples."""
    right = [1, 0, 0, 1, 1, 0, 0, 1, 0]
    labels = [1] * 9
    actual = jackknife_values("accuracy", right, labels, 3)
    expected = [2 / 3, 2 / 3, 0]
    assert actual == pytest.approx(expected)
    generator = np.random.default_rng(0)
    means = []
    widths = []
    for _ in range(60):
        labels = generator.normal(size=480)
        parts = jackknife_values("pearson", labels + generator.normal(size=480), labels, 24)
        means.append(np.mean(parts))
        widths.append(np.std(parts, ddof=1) / 24**0.5)
    actual = np.mean(means)
    assert actual == pytest.approx(0.5**0.5, abs=0.02)
    actual = np.mean(widths)
    expected = np.std(means)
    assert actual == pytest.approx(expected, rel=0.3)


# ---- GLUE ------------------------------------------------------------------------------------------------------------

OPTIONS = options_of("glue") | {"dataset": "rte", "source": "files", "max_length": 40}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every task's files under glue/, an exact encoder under bert/."""
    root = tmp_path_factory.mktemp("files")
    for name, task in TASKS.items():
        write_glue(root / "glue" / task.folder, name)
    write_model(root / "bert")
    return root


@pytest.fixture
def task_of(files, monkeypatch):
    monkeypatch.setenv("CRT_DATA", str(files))
    return lambda **options: GLUE(**OPTIONS | {"model": str(files / "bert")} | options)


@torch.no_grad()
@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_its_metrics_on_dev(name, task_of):
    """Both dev splits of MNLI; parts of dev alone, whose mean is its accuracy."""
    task = task_of(dataset=name, parts=3)
    found = task.evaluate(task.build(Mechanism.of("favorpp", m=8)).eval(), "dev", Reader(task))
    metrics = TASKS[name].metrics
    parts = [key for key in found if "_part" in key]
    assert {*metrics, "loss"} <= found.keys()
    assert ("accuracy_mismatched" in found) == (name == "mnli")
    assert task.metric == metrics[0]
    assert parts == [f"{metrics[0]}_part{i}" for i in range(3)]
    if metrics[0] == "accuracy":
        actual = np.mean([found[key] for key in parts])
        assert actual == pytest.approx(found["accuracy"])


def test_no_example_that_is_held_out_is_trained_on(task_of):
    """It stands in for dev until the end, without parts and without the second dev split."""
    whole = task_of(dataset="mnli").texts["train"]
    task = task_of(dataset="mnli", held_out=16, parts=3)
    train = task.texts["train"]
    held_out = task.texts["held_out"]

    def pairs(texts):
        return sorted(zip(*texts.texts, texts.labels))

    actual = (len(train), len(held_out))
    assert actual == (32, 16)
    actual = pairs(whole)
    expected = sorted(pairs(train) + pairs(held_out))
    assert actual == expected
    assert (task.validation, task.test) == ("held_out", "dev")
    with torch.no_grad():
        found = task.evaluate(task.build(Mechanism.of("exact")).eval(), "held_out", Reader(task))
    assert "accuracy" in found
    assert not {"accuracy_mismatched", "accuracy_part0"} & found.keys()
    assert task_of(examples=16).length("train") == 16


@pytest.fixture
def mine(tmp_path):
    rows = [f"{sentence(i)},{('red', 'green', 'old')[i % 3]}" for i in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]))
    return str(tmp_path / "mine.csv")


@torch.no_grad()
def test_text_of_ones_own_has_validation_and_test(mine, task_of):
    """Classes have names in the configuration of the model; parts are those of the test part."""
    task = task_of(csv=mine, parts=2)
    assert (task.validation, task.test, task.metric) == ("validation", "test", "accuracy")
    model = task.build(Mechanism.of("favorpp", m=8)).eval()
    assert model.config.id2label == {0: "green", 1: "old", 2: "red"}
    assert model.config.text_columns == ["text"]
    actual = task.evaluate(model, "test", Reader(task))
    assert {"accuracy", "mcc", "loss", "accuracy_part1"} <= actual.keys()
    assert "accuracy_part0" not in task.evaluate(model, "validation", Reader(task))
    assert task_of(csv=mine, examples=9).length("train") == 9


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kind": "regression"}, "task.kind: only for task.csv=FILE or task.hub.name=NAME"),
        ({"test_csv": "a.csv"}, "task.test_csv: only for task.csv"),
        ({"csv": "{mine}", "held_out": 3}, "task.held_out=3: not used by task.csv; set task.split"),
        ({"csv": "{mine}", "data_dir": "/x"}, "task.data_dir=/x: not used by task.csv"),
        ({"csv": "{mine}", "split": [0.8, 0.1, 0.2]}, "task.split=.*: expected three fractions"),
        ({"csv": "{mine}", "columns": ["a", "b", "c"]}, "task.columns=.*: expected a list"),
    ],
    ids=str,
)
def test_options_of_ones_own_text_that_do_not_fit(options, words, mine, task_of):
    if "csv" in options:
        options = options | {"csv": mine}
    with pytest.raises((ConfigError, DataError), match=words):
        task_of(**options)


def test_batches_are_the_rows_of_the_plan(task_of):
    """Padded to the longest; evaluation sees every example once; like lengths together where it is asked for."""
    task = task_of(dataset="sst2")
    data = task.encoded["train"]
    plan = Plan(8, seed=3)
    for batch, rows in zip(task.batches("train", plan), plan.rows(48, "train")):
        expected = collate([data[i] for i in rows], 0)
        for key in expected:
            assert torch.equal(batch[key], expected[key])
        assert batch["attention_mask"].any(0).all()
    seen = []
    for batch in task.batches("dev", Plan(5)):
        for label in batch["labels"].tolist():
            seen.append(label)
    assert sorted(seen) == sorted(task.texts["dev"].labels)

    def size(task):
        return sum(batch["input_ids"].numel() for batch in task.batches("train", plan))

    assert size(task_of(dataset="sst2", bucketed=True)) < size(task)


@torch.no_grad()
def test_answers_belong_to_their_examples(task_of):
    """Evaluation reads by length, padded; each score is that of its example alone."""
    task = task_of(dataset="stsb")
    model = task.build(Mechanism.of("exact")).eval()
    texts = task.texts["dev"].texts
    lengths = [len(row["input_ids"]) for row in task.encoded["dev"]]
    assert np.any(np.diff(lengths) < 0)
    task.evaluate(model, "dev", Reader(task))
    actual = [row["prediction"] for row in task.predicted]
    alone = [
        model(
            **task.tokenizer(a, b, return_tensors="pt", truncation=True, max_length=40)
        ).logits.item()
        for a, b in zip(*texts)
    ]
    assert actual == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"init": "/nowhere/run"},
            "task.init=/nowhere/run: expected scratch, uptrain, or the directory",
        ),
        ({"max_length": 41}, "task.max_length=41.*40 tokens"),
        ({"held_out": 48}, "task.held_out=48: expected 1 to 47"),
        ({"parts": 99}, "task.parts=99: expected 2 to 12"),
        ({"data_dir": "/nowhere"}, "(?s)train.tsv.*python -m crt_exp data fetch glue/RTE"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, words, task_of):
    with pytest.raises((ConfigError, DataError), match=words):
        task_of(**options)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocabulary": [*VOCABULARY, "zebra"]}, "tokenizer: does not fit the model.*'zebra'"),
        ({"pad_token_id": 3}, "tokenizer: does not fit the model.*pads with id 0"),
    ],
    ids=["vocabulary", "padding"],
)
def test_the_tokenizer_must_fit_the_model(change, words, task_of, tmp_path):
    with pytest.raises(DataError, match=words):
        task_of(model=str(write_model(tmp_path, **change)))


def test_incomplete_folders_and_weights_of_another_architecture(task_of, tmp_path):
    folder = write_model(tmp_path / "bert")
    save_file({"something.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    for gone, words in (
        (None, "wrong weights for BertFor"),
        ("model.safetensors", "its weights: not readable"),
        ("vocab.txt", "/bert: no tokenizer; expected tokenizer.json"),
        ("config.json", "config.json"),
    ):
        if gone:
            (folder / gone).unlink()
        with pytest.raises((ConfigError, DataError), match=words):
            task_of(model=str(folder)).build(Mechanism.of("exact"))


# ---- UCI -------------------------------------------------------------------------------------------------------------

GIVEN = {
    "dataset": "wine",
    "scaling": "standard",
    "split": (0.6, 0.15, 0.25),
    "repeats": 2,
    "sigmas": [0.1, 0.3],
}


@pytest.mark.parametrize(
    "baseline, draws",
    [
        ("Nystroem m=16", 2),
        ("RBFSampler m=128", 2),
        ("majority", 2),
        (None, 1),
    ],
)
def test_the_last_record_has_each_split_in_percent(baseline, draws):
    records = [*UCI(**GIVEN, draws=2, baseline=baseline).records(Mechanism.parse("exact"), 0)]
    splits = np.reshape([100 * record["accuracy"] for record in records[:-1]], (2, draws))
    actual = records[-1]["accuracy_percent"]
    expected = splits.mean(1)
    assert actual == pytest.approx(expected)
    actual = 100 * records[-1]["accuracy"]
    assert actual == pytest.approx(splits.mean())
    assert (splits > 50).all() == (baseline != "majority")


@pytest.mark.filterwarnings("error")
def test_nystroem_with_more_components_than_rows_takes_all_rows():
    rows = np.random.default_rng(0).normal(size=(50, 3))
    labels = (rows[:, 0] > 0).astype(int)
    scores = []
    for components in (50, 128):
        baseline = BASELINES["Nystroem"](n_components=components, random_state=0)
        scores.append(baseline.fit(rows, labels).score(rows, labels))
    assert scores[0] == scores[1] > 0.9
