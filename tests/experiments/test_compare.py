"""Compare: paired differences over seeds, splits and examples; what cannot be compared, and why."""

import json

import numpy as np
import pytest
from scipy import stats

from crt_exp.experiments import compare
from crt_exp.experiments.predictions import write_predictions


def write_run(folder, values, metric="accuracy", seed=0, predictions=None, method="trig", **keys):
    """A finished run with one record for each split."""
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "features": {"_target_": method},
        "task": {},
    } | keys.pop("config", {})
    config["task"] = {
        "_target_": "uci",
        "dataset": "wine",
        "split": [0.9, 0.05, 0.05],
    } | keys
    (folder / "config.yaml").write_text(json.dumps(config))
    overrides = [f"features={method}", f"seed={seed}"]
    (folder / "versions.json").write_text(json.dumps({"overrides": overrides}))
    records = []
    for repeat, value in enumerate(values):
        records.append({"split": "split", "repeat": repeat, "draw": 0, metric: value})
    direction = "minimize" if metric == "wer" else "maximize"
    final = {
        metric: float(np.mean(values)),
        "metric": metric,
        "direction": direction,
    }
    records.append({"split": "test", **final, "final": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if predictions is not None:
        write_predictions(predictions, folder)
    return str(folder)


def answers(labels, predictions):
    rows = []
    for i, (label, prediction) in enumerate(zip(labels, predictions)):
        rows.append({"example": i, "label": label, "prediction": prediction})
    return rows


def compared(*places):
    comparisons, reasons = compare.compare(*compare.load_results(places))
    return {comparison.unit: comparison for comparison in comparisons}, reasons


def test_seeds_are_paired(tmp_path):
    one = [0.5, 0.6, 0.7]
    two = [0.55, 0.7, 0.72]
    for method, values in (("trig", one), ("oprf", two)):
        for seed, value in enumerate(values):
            write_run(tmp_path / method / str(seed), [value], seed=seed, method=method)
    actual, _ = compared(str(tmp_path / "trig"), str(tmp_path / "oprf"))
    expected = stats.ttest_rel(two, one)
    assert actual["seeds"].p == pytest.approx(expected.pvalue)
    assert actual["seeds"].interval == pytest.approx(expected.confidence_interval())
    assert (actual["seeds"].n, actual["seeds"].wins) == (3, 3)


def test_overlapping_splits_have_a_wider_interval(tmp_path):
    one = [0.5, 0.6, 0.7, 0.9]
    two = [0.55, 0.7, 0.72, 0.8]
    places = [
        write_run(tmp_path / "a", one),
        write_run(tmp_path / "b", two, method="oprf"),
    ]
    actual, reasons = compared(*places)
    low, high = stats.ttest_rel(two, one).confidence_interval()
    width = (high - low) * np.sqrt(1 + 4 * 0.05 / 0.9)
    assert np.ptp(actual["splits"].interval) == pytest.approx(width)
    assert reasons == [
        "seeds: one common seed (0); expected two or more",
        f"examples: {tmp_path / 'a'} has no predictions.csv.gz",
    ]


def test_right_and_wrong_examples_have_the_exact_test(tmp_path):
    labels = ["a"] * 30
    one = ["a"] * 20 + ["b"] * 10
    two = ["b"] * 2 + ["a"] * 27 + ["b"]
    places = [
        write_run(tmp_path / "a", [0.5], predictions=answers(labels, one)),
        write_run(tmp_path / "b", [0.5], predictions=answers(labels, two), method="oprf"),
    ]
    actual, _ = compared(*places)
    examples = actual["examples"]
    assert examples.p == pytest.approx(stats.binomtest(9, 11).pvalue)
    assert examples.difference == pytest.approx(7 / 30)
    assert (examples.n, examples.wins, examples.losses) == (30, 9, 2)
    other = write_run(tmp_path / "c", [0.5], predictions=answers(["b"] * 30, two), method="geom")
    _, reasons = compared(places[0], other)
    assert "30 of 30 common examples have other labels" in reasons[-1]


def test_word_error_rate_is_that_of_all_words(tmp_path):
    """The mean difference of the jackknife values is close to the difference of the rates."""
    rng = np.random.default_rng(0)
    labels = []
    for n in rng.integers(2, 9, 40):
        labels.append(" ".join(rng.choice(["one", "two", "six"], n)))
    wrong = [label.replace("one", "two") for label in labels[:20]] + labels[20:]
    rows = [answers(labels, labels), answers(labels, wrong)]
    places = [
        write_run(tmp_path / "a", [0.0], "wer", predictions=rows[0]),
        write_run(tmp_path / "b", [0.2], "wer", predictions=rows[1], method="oprf"),
    ]
    actual, _ = compared(*places)
    words = " ".join(labels).split()
    rate = " ".join(labels[:20]).split().count("one") / len(words)
    assert actual["examples"].difference == pytest.approx(rate, rel=0.05)
    assert actual["examples"].wins < actual["examples"].losses
    assert actual["examples"].p < 0.05


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dataset": "digits"}, "task.dataset: wine and digits"),
        ({"_target_": "glue"}, "task._target_: uci and glue"),
    ],
    ids=str,
)
def test_other_data_are_not_compared(change, reason, tmp_path, capsys):
    places = [
        write_run(tmp_path / "a", [0.5]),
        write_run(tmp_path / "b", [0.5], method="oprf", **change),
    ]
    assert compared(*places) == ({}, [reason])
    assert compare.main(places) == 2
    assert f"not compared, {reason}" in capsys.readouterr().err


def test_refusals_are_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "a", [0.5])
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metrics.jsonl").write_text('{"split": "split"}\n')
    for places, words in (
        ([run, run], "one result"),
        ([run, str(tmp_path / "b")], "no run; expected a directory with metrics.jsonl"),
        ([run, str(tmp_path / "c")], "unfinished; continue the run with resume=auto"),
    ):
        assert compare.main(places) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("crt_exp compare: error: ")
        assert words in line


def test_two_runs_of_wine_compare_over_splits_and_examples(typed, tmp_path, capsys):
    """A resumed run has the predictions of all its splits."""
    for method in ("trig", "oprf"):
        args = ["task=uci", "task.repeats=3", "task.sigmas=[0.3]", "features.m=4", "logger=none"]
        code, _, err = typed(*args, f"features={method}", f"hydra.run.dir={tmp_path / method}")
        assert code == 0, err
    assert compare.main([str(tmp_path / "trig"), str(tmp_path / "oprf")]) == 0
    out = capsys.readouterr().out
    assert "t test for overlapping splits (Nadeau and Bengio)" in out
    assert "not compared, seeds: one common seed (0)" in out
    whole = (tmp_path / "trig" / "predictions.csv.gz").read_bytes()
    metrics = tmp_path / "trig" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:1]))
    code, _, err = typed(
        *args, "features=trig", f"hydra.run.dir={tmp_path / 'trig'}", "resume=auto"
    )
    assert code == 0, err
    assert (tmp_path / "trig" / "predictions.csv.gz").read_bytes() == whole
