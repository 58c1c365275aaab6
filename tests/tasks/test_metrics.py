"""Laws of the metrics: known values, the same under every kind of input, and defined where a formula is not."""

import warnings

import numpy as np
import pytest
import torch

from crt_exp.data.glue import TASKS
from crt_exp.tasks.base import METRICS, accuracy, f1, glue_metrics, jackknife_values, mcc, pearson, spearman

CLASSES = ([1, 1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 1, 0])
SCORES = ([0.1, 2.5, 2.5, 4.0, 3.9], [0.0, 2.0, 3.0, 5.0, 4.0])


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_values_from_the_definitions():
    tp, fp, fn, tn = 3, 1, 1, 3
    assert accuracy(*CLASSES) == (tp + tn) / 8
    assert f1(*CLASSES) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert mcc(*CLASSES) == pytest.approx((tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert pearson(*SCORES) == pytest.approx(np.corrcoef(*SCORES)[0, 1])
    # ties: the mean rank
    assert spearman(*SCORES) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 5, 4], [1, 2, 3, 5, 4])[0, 1])


def test_parts_of_an_accuracy_are_the_parts_own():
    """Every third example, of nine."""
    right, labels = [1, 0, 0, 1, 1, 0, 0, 1, 0], [1] * 9
    assert jackknife_values("accuracy", right, labels, 3) == pytest.approx([2 / 3, 2 / 3, 0])


def test_parts_give_the_interval_over_examples():
    """Of a correlation: Student's over 24 parts has the width that fresh samples say, as McNemar's test has for the
    difference of two models on the same examples."""
    generator, means, widths = np.random.default_rng(0), [], []
    for _ in range(60):
        labels = generator.normal(size=480)
        parts = jackknife_values("pearson", labels + generator.normal(size=480), labels, 24)
        means.append(np.mean(parts))
        widths.append(np.std(parts, ddof=1) / 24 ** 0.5)
    assert np.mean(means) == pytest.approx(0.5 ** 0.5, abs=0.02)
    assert np.mean(widths) == pytest.approx(np.std(means), rel=0.3)


def test_f1_is_of_class_one():
    assert f1([0, 0, 0, 1], [0, 0, 0, 0]) == 0 and f1([1, 1, 0], [1, 1, 1]) == pytest.approx(0.8)
    assert f1([0, 0], [0, 0]) == 0


def test_correlations_see_order_and_scale_as_they_should():
    x = np.random.default_rng(0).normal(size=50)
    assert spearman(np.exp(x), x) == pytest.approx(1) and pearson(np.exp(x), x) < 0.95
    assert pearson(-3 * x + 7, x) == pytest.approx(-1)
    assert mcc([1, 0, 1, 0], [0, 1, 0, 1]) == pytest.approx(-1)
    assert mcc([0, 1, 2, 1], [0, 1, 2, 1]) == pytest.approx(1)       # more than two classes


@pytest.mark.parametrize("name", ["mcc", "spearman", "pearson"])
def test_constant_vectors_have_no_correlation(name):
    for pair in (([1, 1, 1], [0, 1, 1]), ([0, 1, 1], [1, 1, 1]), ([1, 1], [1, 1]), ([2], [2])):
        assert METRICS[name](*pair) == 0.0


def test_a_large_offset_does_not_drown_pearson():
    assert pearson([1e9, 1e9 + 1e-6, 1e9 + 2e-6], [0, 1, 2]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_every_kind_of_input_counts_alike(kind):
    for name, metric in METRICS.items():
        assert metric(kind(CLASSES[0]), kind(CLASSES[1])) == metric(*CLASSES), name


@pytest.mark.parametrize("name", METRICS)
def test_bad_input_is_refused(name):
    for predictions, labels in (([], []), ([1, 0], [1]), ([[1, 0]], [[1, 0]])):
        with pytest.raises(ValueError, match="one length"):
            METRICS[name](predictions, labels)
    with pytest.raises(ValueError, match="predictions, labels: expected finite"):
        METRICS[name]([0, float("nan")], [0, 1])
    with pytest.raises(ValueError, match="predictions, labels: expected finite"):
        METRICS[name]([0, 1], [float("inf"), 1])


def test_glue_tasks_report_the_papers_metric_first():
    first = {name: next(iter(glue_metrics(name, *CLASSES))) for name in TASKS}
    assert first.pop("cola") == "mcc" and first.pop("mrpc") == "f1" and first.pop("stsb") == "spearman"
    assert set(first.values()) == {"accuracy"}
    assert glue_metrics("stsb", *SCORES) == {"spearman": spearman(*SCORES), "pearson": pearson(*SCORES)}
    assert set(glue_metrics("qqp", *CLASSES)) == set(glue_metrics("mrpc", *CLASSES)) == {"accuracy", "f1"}
