"""What a fit is worth on rows that were held out, beside the best constant: errors, coverage, with 95% intervals.

Legend: n rows held out, w their weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from crt_exp.ridge import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.ridge.batches import Batch

Z = 1.959964           # of a 95% interval
LEAST = 1e-12          # probability of a label that never came before
Numbers = dict[str, float]


def scores(model: RandomFeatureRidge | RandomFeatureClassifier, X: np.ndarray, held: Batch) -> Numbers:
    """Of rows X as the model takes them."""
    return (of_classes if isinstance(model, RandomFeatureClassifier) else of_numbers)(model, X, held)


def of_numbers(model: RandomFeatureRidge, X: np.ndarray, held: Batch) -> Numbers:
    mean, std = model.predict(X, return_std=True)
    y, w = held.y[:, 0], held.weight
    constant = float(model.sums_.targets[0] / model.sums_.weight + model.sums_.origin[0])
    error, trivial = (y - mean) ** 2, np.average((y - constant) ** 2, weights=w)
    mse, width = spread(error, w)
    covered, cover = spread(np.abs(y - mean) < Z * std, w)
    root = mse**0.5
    return {"rmse": root, "rmse_ci95": width / (2 * max(root, 1e-300)), "r2": 1 - mse / max(trivial, 1e-300),
            "r2_ci95": width / max(trivial, 1e-300), "coverage": covered, "coverage_ci95": cover,
            "constant_rmse": trivial**0.5}


def of_classes(model: RandomFeatureClassifier, X: np.ndarray, held: Batch) -> Numbers:
    P, w, classes = model.predict_proba(X), held.weight, model.classes_
    place = np.searchsorted(classes, held.y).clip(max=len(classes) - 1)
    known = classes[place] == held.y
    likely = np.where(known, P[np.arange(len(P)), place], 0).clip(min=LEAST)
    shares = (model.sums_.targets / model.sums_.weight).numpy()
    frequent = np.where(known, shares[place], 0).clip(min=LEAST)
    (right, width), (loss, wide) = spread(known & (P.argmax(1) == place), w), spread(-np.log(likely), w)
    return {"accuracy": right, "accuracy_ci95": width, "log_loss": loss, "log_loss_ci95": wide,
            "confidence": float(np.average(P.max(1), weights=w)),
            "constant_accuracy": float(np.average(known & (place == shares.argmax()), weights=w)),
            "constant_log_loss": float(np.average(-np.log(frequent), weights=w))}


def spread(values: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """The mean, and half the width of its interval."""
    mean = np.average(values, weights=w)
    variance = np.average((values - mean) ** 2, weights=w) * (w**2).sum() / w.sum() ** 2
    return float(mean), float(Z * variance**0.5)


def compared(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of a run: a header, then the fit and the constant."""
    def shown(name: str) -> str:
        return f"{record[name]:.4g} +- {record[f'{name}_ci95']:.2g}"

    if "rmse" in record:
        header, fit = ["", "RMSE", "R2", "95% intervals cover"], [shown("rmse"), shown("r2"), shown("coverage")]
        constant = ["the mean", f"{record['constant_rmse']:.4g}", "0", ""]
    else:
        header, fit = ["", "accuracy", "log loss", "mean confidence"], [
            shown("accuracy"), shown("log_loss"), f"{record['confidence']:.4g}"]
        constant = ["the most frequent class", f"{record['constant_accuracy']:.4g}",
                    f"{record['constant_log_loss']:.4g}", ""]
    memory, gib = ("memory beyond data, GiB", record["anonymous_gib"]) if "anonymous_gib" in record else (
        "memory, GiB", record["memory_gib"])
    told = [f"{record['rows']:,}", f"{record['seconds']:.3g}", f"{gib:.2f}"]
    return ([*header, "rows", "seconds", memory], [["kernel machine", *fit, *told], [*constant, "", "", ""]])
