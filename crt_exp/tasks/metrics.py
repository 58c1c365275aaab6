"""Metrics of classification and regression, each a fraction, defined for degenerate inputs too.

`predictions` and `labels` are sequences or arrays of equal length n > 0. Constant predictions (or labels)
carry no information, so a correlation with them counts as 0. Each function raises ValueError for lengths that differ,
for no examples, and for values that are not finite: a model that diverged must not look like one that scored 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def accuracy(predictions: Any, labels: Any) -> float:
    """Share of predictions equal to the label, in [0, 1]."""
    predictions, labels = checked(predictions, labels)
    return float((predictions == labels).mean())


def f1(predictions: Any, labels: Any) -> float:
    """Harmonic mean of precision and recall of class 1, in [0, 1]; 0 where class 1 is neither predicted nor there."""
    from sklearn.metrics import f1_score

    predictions, labels = checked(predictions, labels)
    return float(f1_score(labels == 1, predictions == 1, zero_division=0.0))


def mcc(predictions: Any, labels: Any) -> float:
    """Matthews' correlation of the classes, in [-1, 1]."""
    from sklearn.metrics import matthews_corrcoef

    predictions, labels = checked(predictions, labels)
    return 0.0 if constant(predictions, labels) else float(matthews_corrcoef(labels, predictions))


def pearson(predictions: Any, labels: Any) -> float:
    """Linear correlation, in [-1, 1]."""
    from scipy.stats import pearsonr

    predictions, labels = checked(predictions, labels)
    return 0.0 if constant(predictions, labels) else float(pearsonr(unit(predictions), unit(labels)).statistic)


def spearman(predictions: Any, labels: Any) -> float:
    """Correlation of the ranks (ties share their mean rank), in [-1, 1]."""
    from scipy.stats import spearmanr

    predictions, labels = checked(predictions, labels)
    return 0.0 if constant(predictions, labels) else float(spearmanr(predictions, labels).statistic)


METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": accuracy, "f1": f1, "mcc": mcc, "spearman": spearman, "pearson": pearson}


def glue_metrics(task: str, predictions: Any, labels: Any) -> dict[str, float]:
    """The metrics of a GLUE task, the one that the paper's table reports first.

    predictions: classes (n,), or scores (n,) for STS-B.
    """
    from crt_exp.data.glue import TASKS

    return {name: METRICS[name](predictions, labels) for name in TASKS[task].metrics}


def of_parts(metric: str, predictions: Any, labels: Any, parts: int) -> list[float]:
    """What each of so many parts of the examples (every `parts`-th one) says of a metric: the values of the jackknife,
    parts * whole - (parts - 1) * without that part.

    Of an accuracy on parts of one size they are the parts' accuracies. Their mean is the metric, but for its bias, with
    Student's interval over examples; those of two models on the same examples are pairs.
    """
    predictions, labels = checked(predictions, labels)
    whole, part = METRICS[metric](predictions, labels), np.arange(len(labels)) % parts
    left = [METRICS[metric](predictions[part != i], labels[part != i]) for i in range(parts)]
    return [parts * whole - (parts - 1) * without for without in left]


def checked(predictions: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    predictions, labels = np.asarray(predictions, np.float64), np.asarray(labels, np.float64)
    if predictions.shape != labels.shape or predictions.ndim != 1 or not len(labels):
        raise ValueError(f"predictions {predictions.shape} and labels {labels.shape} must be two vectors of one length "
                         "n > 0")
    if not (np.isfinite(predictions).all() and np.isfinite(labels).all()):
        raise ValueError("predictions and labels must be finite")
    return predictions, labels


def constant(*vectors: np.ndarray) -> bool:
    return any((values == values[0]).all() for values in vectors)


def unit(values: np.ndarray) -> np.ndarray:
    """Shifted and scaled to [0, 1]: no correlation then drowns in a large offset."""
    return (values - values.min()) / np.ptp(values)


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Word and character error rates, all utterances together: wer = substitutions + deletions + insertions, each as a
    fraction of the words that were said; the same of characters, spaces among them, as `character_...`."""
    import jiwer

    words = jiwer.process_words(list(references), list(hypotheses))
    characters = jiwer.process_characters(list(references), list(hypotheses))
    rates = {}
    for name, prefix, result in (("wer", "", words), ("cer", "character_", characters)):
        count = result.hits + result.substitutions + result.deletions
        rates[name] = getattr(result, name)
        for part in ("substitutions", "deletions", "insertions"):
            rates[f"{prefix}{part}"] = getattr(result, part) / count
    return rates


def interval(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Mean, standard deviation and half-width of the 95% Student interval (None for one value)."""
    from scipy.special import stdtrit  # of a sweep's table alone: metrics load without scipy

    n = len(values)
    std = float(np.std(values, ddof=1)) if n > 1 else None
    half = float(stdtrit(n - 1, 0.975)) * std / n**0.5 if n > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": std, f"{name}_ci95": half, "repeats": n}
