"""Kernel regression on UCI tables: Table 1 of Chefs' Random Tables (CRT).

The target is a class or a number. For each random split, the validation part selects the bandwidth sigma. The test part
is read once, with the selected sigma.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from sklearn.base import ClassifierMixin
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.impute import SimpleImputer
from sklearn.metrics import accuracy_score, r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from tqdm import tqdm

from crt_exp.estimators.kernel_regression import (
    KernelRegressionClassifier,
    KernelRegressionRegressor,
)
from crt_exp.experiments.data import tabular
from crt_exp.experiments.data.sources import refuse_data_dir
from crt_exp.experiments.intervals import (
    binomial_interval,
    interval_record,
    interval_text,
    student_interval,
)
from crt_exp.experiments.predictions import Prediction, write_predictions
from crt_exp.experiments.tasks.base import Measurement, Metrics, Record, task_class
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.registry import unknown
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.validation import Count, FileName, Positive, Several, split_words


@task_class
class UCI(Measurement):
    """Kernel regression on one table, with the Gaussian kernel.

    A feature map with its own kernel replaces the Gaussian kernel. The metric is accuracy, or R^2 for a numeric target
    (boston). The final record also has the mean of each split in percent.

    Args:
        scaling: see `conf/task/uci.yaml`.
        split: fractions of training, validation and test rows.
        sigmas: candidate bandwidths; the kernel is exp(-sigma^2 |x - y|^2 / 2).
        draws: sets of random projections for each split.
    """

    lower_is_better = False
    accepts_own_kernel = True

    dataset: str
    scaling: Literal["standard", "minmax", "none"]
    split: tuple[Positive, Positive, Positive]
    repeats: Count
    sigmas: Several[Annotated[float, Field(gt=0, lt=1e150)]]  # squares stay finite
    draws: Count = 1
    data_dir: str | None = None
    csv: FileName | None = None
    target: str | None = None
    kind: tabular.Kind | None = None
    baseline: str | None = None

    def __post_init__(self):
        if abs(sum(self.split) - 1) > 1e-9:
            raise ValueError(f"task.split={list(self.split)}: expected three fractions with sum 1")
        self.note = ""
        self.file = None
        if self.csv:
            refuse_data_dir(self.data_dir, "task.csv")
            self.table, self.note = tabular.read_own(self.csv, self.target, self.kind)
        elif self.target or self.kind:
            raise ValueError("task.target, task.kind: only for task.csv=FILE")
        else:
            self.table = tabular.load(self.dataset, self.data_dir)
            self.file = tabular.file_of(self.dataset, self.data_dir)
        # float64, because float32 rounds a date of 12 digits before scaling
        self.features = self.table.encode()
        if self.scaling == "none" and np.isnan(self.features).any():
            raise ValueError(
                f"task.scaling=none: values are missing ({self.note}); set standard or minmax"
            )
        self.metric = "r2" if self.table.classes is None else "accuracy"
        self.method, self.options = split_words(self.baseline) if self.baseline else (None, {})
        if self.method and (self.method not in BASELINES or self.metric == "r2"):
            raise unknown("task.baseline (classification only)", self.method, [*BASELINES])
        if not 1 <= round(self.split[0] * len(self.table)) <= len(self.table) - 2:
            raise ValueError(
                f"task.split={list(self.split)}: a part of the {len(self.table)} rows is empty"
            )

    def inputs(self) -> list[Path | None]:
        return [self.file]

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Record]:
        """Yield a row for each split and projection set, then the mean and its CI.

        The 95% CI is over splits.
        """
        draws = 1 if mechanism.is_exact and not self.baseline else self.draws
        scores = []
        predicted: list[Prediction] = []
        steps = tqdm(
            range(self.repeats * draws),
            desc=f"{self.table.name}: {mechanism}",
            disable=None,
            leave=False,
        )
        for step in steps:
            repeat, draw = divmod(step, draws)
            noise_seed = int(np.random.SeedSequence([seed, repeat, draw]).generate_state(1)[0])
            row, answers = self.evaluate(mechanism, *self.divide(seed, repeat), noise_seed)
            for number, answer in zip(self.divided_rows(seed, repeat)[2], answers):
                label = self.table.target[number]
                if self.table.classes is None:
                    answer = float(answer)
                else:
                    label = self.table.classes[label]
                    answer = self.table.classes[answer]
                key = {"repeat": repeat, "draw": draw, "example": number}
                predicted.append(key | {"label": label, "prediction": answer})
            scores.append(row[self.metric])
            yield {"split": "split", "repeat": repeat, "draw": draw, **row}
        if self.directory:
            write_predictions(predicted, self.directory)
        scores = np.reshape(scores, (self.repeats, draws))
        means = scores.mean(1)
        yield {
            self.metric: float(means.mean()),
            f"{self.metric}_std": float(means.std(ddof=1)) if self.repeats > 1 else None,
            **self.interval(means),
            "repeats": self.repeats,
            "draws": draws,
            f"{self.metric}_percent": (100 * scores).mean(1).tolist(),
            "rows": len(self.table),
            "columns": self.features.shape[1],
            **self.bias(mechanism, seed, row["sigma"]),
        }

    def interval(self, means: np.ndarray) -> dict[str, float | str | None]:
        """95% interval of the mean over splits, within the scale of the metric."""
        train, _, test = map(len, self.divided_rows(0, 0))
        over = f"{self.repeats} splits of {test} test rows"
        if self.repeats == 1:
            over = f"{test} test rows"
        if self.metric == "accuracy":
            ends = binomial_interval(means, test, overlap=test / train)
        else:
            ends = student_interval(means, self.metric, overlap=test / train)
        return interval_record(self.metric, ends, over)

    def bias(self, mechanism: Mechanism, seed: int, sigma: float) -> Metrics:
        """Bias of an approximate sampler on training rows, at the last selected sigma."""
        if mechanism.sampler is None:
            return {}
        x = torch.tensor(self.divide(seed, 0)[0][0]) * sigma
        phi = mechanism.map("gaussian", own_kernel=True)
        return bias_record(phi, mechanism.sampler, x, x, phi.fit(Statistics.of(x, x)))

    def summary(self, records: list[Record]) -> str:
        last = records[-1]
        metric = self.metric
        lines = [
            f"{self.table.name}: {metric} {last[metric]:.4f}{interval_text(last, metric)}{bias_sentence(last)}",
            self.note,
        ]
        splits = [
            (record[metric], record["constant"]) for record in records if "constant" in record
        ]
        fit, constant = np.mean(splits, axis=0) if splits else (0, 0)
        if fit < constant:
            name = "the most frequent class" if metric == "accuracy" else "the mean"
            lines.append(
                f"worse than {name} of the training part, which has {metric} {constant:.4f}"
            )
        return "\n".join(filter(None, lines))

    def divide(self, seed: int, repeat: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Training, validation and test part of random split `repeat`.

        Returns features (n, d) float32 and targets of each part. The split is the same for every method. The training
        part determines the scaling.
        """
        parts = self.divided_rows(seed, repeat)
        scale = scaler(self.features[parts[0]], self.scaling)
        return [scale(self.features[p]) for p in parts], [self.table.target[p] for p in parts]

    def divided_rows(self, seed: int, repeat: int) -> list[np.ndarray]:
        """Row numbers of the training, validation and test part of random split `repeat`."""
        order = np.random.default_rng([seed, repeat]).permutation(len(self.table))
        first = round(self.split[0] * len(order))
        second = first + max(1, round(self.split[1] * len(order)))
        return np.split(order, [first, min(second, len(order) - 1)])

    def evaluate(
        self, mechanism: Mechanism, x: list[np.ndarray], y: list[np.ndarray], seed: int
    ) -> tuple[Metrics, np.ndarray]:
        """Select sigma on validation and score the test part; ties take the first sigma.

        Returns the scores, and the predictions of the test part.
        """
        constant = DummyClassifier() if self.metric == "accuracy" else DummyRegressor()
        constant.fit(x[0], y[0])
        fitted = [self.estimator(mechanism, sigma, seed).fit(x[0], y[0]) for sigma in self.sigmas]
        validation = [model.score(x[1], y[1]) for model in fitted]
        best = int(np.argmax(validation))
        answers = fitted[best].predict(x[2])
        score = accuracy_score if self.metric == "accuracy" else r2_score
        scores = {
            "sigma": self.sigmas[best],
            f"validation_{self.metric}": validation[best],
            self.metric: float(score(y[2], answers)),
            "constant": float(constant.score(x[2], y[2])),
        }
        return scores, answers

    def estimator(self, mechanism: Mechanism, sigma: float, seed: int):
        kind = (
            KernelRegressionClassifier if self.metric == "accuracy" else KernelRegressionRegressor
        )
        gamma = sigma**2 / 2
        if self.method:
            return BASELINES[self.method](
                gamma=gamma, n_components=self.options.get("m"), random_state=seed
            )
        if not mechanism.estimates:
            return kind("exact", gamma=gamma)
        phi = mechanism.map("gaussian", own_kernel=True)
        scale = {"length_scale": 1 / sigma} if phi.own_kernel else {"gamma": gamma}
        return kind(phi, mechanism.sampler, phi.width(mechanism.m), random_state=seed, **scale)


def scaler(train: np.ndarray, kind: str):
    """Function that scales float64 columns by training statistics, to float32.

    A constant column becomes 0. A missing value becomes the mean of the training part.
    """
    if kind == "none":
        return lambda x: x.astype(np.float32)
    scale = StandardScaler() if kind == "standard" else MinMaxScaler()  # ignore missing values
    scale = make_pipeline(scale, SimpleImputer(keep_empty_features=True)).fit(train)
    return lambda x: scale.transform(x).astype(np.float32)


class SklearnKernelClassifier(ClassifierMixin):
    """Class of the largest kernel sum, on features of a scikit-learn transformer."""

    def __init__(self, kind: str, **options: Any):
        from sklearn import kernel_approximation  # this import takes half a second

        self.transformer = getattr(kernel_approximation, kind)(**options)
        self.selects_rows = kind == "Nystroem"

    def fit(self, X, y):
        if self.selects_rows:  # more components than rows are a warning, and all rows
            self.transformer.n_components = min(self.transformer.n_components, len(X))
        self.classes = np.unique(y)
        one_hot = (y[:, None] == self.classes).astype(X.dtype)
        self.state = self.transformer.fit_transform(X).T @ one_hot
        return self

    def predict(self, X) -> np.ndarray:
        best = (self.transformer.transform(X) @ self.state).argmax(1)
        return self.classes[best]


BASELINES = {
    "RBFSampler": partial(SklearnKernelClassifier, "RBFSampler"),
    "Nystroem": partial(SklearnKernelClassifier, "Nystroem"),
    "majority": lambda **_: DummyClassifier(),
}
