"""Classification (or regression) by kernel regression on UCI tables: Table 1 of Chefs' Random Tables.

For each random split the bandwidth sigma is tuned on the validation part; the test part is read once, with the best
one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import Nystroem, RBFSampler
from tqdm import tqdm

from crt_exp.options import Count, Positive, Several, checked, split_words
from crt_exp.config import unknown
from crt_exp.data import own_table
from crt_exp.data.own_table import Kind
from crt_exp.data.tabular import file_of, load
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.metrics import interval
from crt_exp.estimators.kernel_regression import KernelRegressionClassifier, KernelRegressionRegressor
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.samplers.noise import Noise

CONSTANT = "constant"  # the key of records for the score without a fit
Sigma = Annotated[float, Field(gt=0, lt=1e150)]  # its square is a number too


class Split(NamedTuple):
    """One random split, encoded and scaled by the training part."""

    x: tuple[np.ndarray, np.ndarray, np.ndarray]  # training, validation, test: (n, d) float32
    y: tuple[np.ndarray, np.ndarray, np.ndarray]


@checked("task")
class UCI:
    """Kernel regression on one table, with the Gaussian kernel, or that of a map with one of its own.

    coding, scaling: see `conf/task/uci.yaml`; split: fractions of training, validation and test rows; sigmas: the
    bandwidths tried, kernel exp(-sigma^2 |x - y|^2 / 2); draws: sets of projections for each split. Metric: accuracy,
    or R^2 where the target is a number (boston). The final record also has the mean of each split in percent.
    """

    of_rows = True  # kernels of rows: maps with a kernel of their own too

    def __init__(self, dataset: str, coding: Literal["ordinal", "onehot"],
                 scaling: Literal["standard", "minmax", "none"], split: tuple[Positive, Positive, Positive],
                 repeats: Count, sigmas: Several[Sigma], draws: Count = 1, data_dir: str | None = None,
                 csv: str | None = None, target: str | None = None, kind: Kind | None = None,
                 baseline: str | None = None):
        if abs(sum(split) - 1) > 1e-9:
            raise ValueError(f"task.split={list(split)}: the three fractions must sum to 1")
        if csv is None and (target, kind) != (None, None):
            raise ValueError("task.target and task.kind are of a table of your own: give task.csv=FILE")
        if csv is not None and data_dir is not None:
            raise ValueError("task.data_dir is the folder of official files; task.csv is read by itself")
        self.table, self.note = own_table.read(csv, target, kind) if csv is not None else (load(dataset, data_dir), "")
        dataset = self.table.name
        self.features = self.table.encode(coding)  # float64: a date of 12 digits is no float32 before it is scaled
        if scaling == "none" and np.isnan(self.features).any():
            raise ValueError(f"task.scaling = none: values are missing ({self.note}), and become the mean only where "
                             "columns are scaled")
        self.file = None if csv is not None else file_of(dataset, data_dir)
        self.scaling, self.split, self.repeats, self.draws = scaling, tuple(split), repeats, draws
        self.sigmas = list(sigmas)
        self.drawn = DrawnOnce()
        self.metric = "accuracy" if self.table.classes is not None else "r2"
        self.baseline, options = split_words(baseline) if baseline else (None, {})
        self.columns = options.get("m")
        if baseline and (self.baseline not in BASELINES or self.metric == "r2"):
            raise unknown("task.baseline, of a table with classes,", self.baseline, [*BASELINES])
        if len(self.table) < 20:
            raise ValueError(f"{dataset} has {len(self.table)} rows: too few to split")
        if not 1 <= round(split[0] * len(self.table)) <= len(self.table) - 2:
            raise ValueError(f"task.split = {list(split)}: a part of the {len(self.table)} rows of {dataset} is empty")

    def inputs(self) -> list[Path | None]:
        return [self.file]

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        """One record for each split and set of projections, then the mean with its 95% interval over splits."""
        tests = [r for r in done if r["split"] == "split"]
        draws = 1 if mechanism.is_exact and not self.baseline else self.draws
        steps = range(len(tests), self.repeats * draws)
        for step in tqdm(steps, desc=f"{self.table.name}: {mechanism}", disable=None, leave=False):
            repeat, draw = divmod(step, draws)
            noise_seed = int(np.random.SeedSequence([seed, repeat, draw]).generate_state(1)[0])
            scores = self.evaluate(mechanism, self.divide(seed, repeat), noise_seed)
            tests.append({"step": step, "epoch": 0, "split": "split", "repeat": repeat, "draw": draw, **scores})
            yield tests[-1]
        scores = np.reshape([record[self.metric] for record in tests], (self.repeats, draws))
        yield {"step": len(tests), "epoch": 0, "split": "test", **interval(scores.mean(1), self.metric), "draws": draws,
               f"{self.metric}_percent": (100 * scores).mean(1).tolist(), "rows": len(self.table),
               "columns": self.features.shape[1], **self.bias(mechanism, seed, tests[-1]["sigma"]), "final": True}

    def bias(self, mechanism: Mechanism, seed: int, sigma: float) -> dict[str, float]:
        """The bias of an approximate sampler on training rows, at the bandwidth that was chosen last."""
        if mechanism.sampler is None:
            return {}
        x = torch.from_numpy(self.divide(seed, 0).x[0]) * sigma
        phi = mechanism.kernel_map()
        return bias_record(phi, mechanism.sampler, x, x, phi.fit(Statistics.of(x, x)))

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        width = last[f"{self.metric}_ci95"]
        spread = "" if width is None else f" +- {width:.4f}"
        return (f"{self.table.name}: {self.metric} {last[self.metric]:.4f}{spread} (mean of {self.repeats} splits, "
                "95% interval)" + bias_sentence(last) + (f"\n{self.note}" if self.note else "") + self.worse(records))

    def worse(self, records: list[dict]) -> str:
        """A line where the fit is no better than no fit at all."""
        splits = [record for record in records if record["split"] == "split" and CONSTANT in record]
        if not splits:
            return ""
        fit, constant = (float(np.mean([record[key] for record in splits])) for key in (self.metric, CONSTANT))
        named = "the most frequent class" if self.metric == "accuracy" else "the mean"
        return "" if fit >= constant else (f"\nworse than {named} of the training part, which has {self.metric} "
                                           f"{constant:.4f}")

    def divide(self, seed: int, repeat: int) -> Split:
        """Random split number `repeat`: the same for every mechanism."""
        order = np.random.default_rng([seed, repeat]).permutation(len(self.table))
        first = round(self.split[0] * len(order))
        second = first + max(1, round(self.split[1] * len(order)))
        parts = np.split(order, [first, min(second, len(order) - 1)])
        scale = scaler(self.features[parts[0]], self.scaling)
        return Split(tuple(scale(self.features[p]) for p in parts), tuple(self.table.target[p] for p in parts))

    def evaluate(self, mechanism: Mechanism, split: Split, seed: int) -> dict[str, float]:
        """Tunes sigma on validation and scores the test part once; ties go to the smaller sigma."""
        self.drawn = DrawnOnce()
        constant = (DummyClassifier if self.metric == "accuracy" else DummyRegressor)().fit(split.x[0], split.y[0])
        fitted = [self.estimator(mechanism, sigma, seed).fit(split.x[0], split.y[0]) for sigma in self.sigmas]
        validation = [model.score(split.x[1], split.y[1]) for model in fitted]
        best = int(np.argmax(validation))
        tested, untrained = (float(model.score(split.x[2], split.y[2])) for model in (fitted[best], constant))
        return {"sigma": self.sigmas[best], f"validation_{self.metric}": validation[best], self.metric: tested,
                CONSTANT: untrained}

    def estimator(self, mechanism: Mechanism, sigma: float, seed: int):
        kind = KernelRegressionClassifier if self.metric == "accuracy" else KernelRegressionRegressor
        gamma = sigma**2 / 2
        if self.baseline:
            return BASELINES[self.baseline](gamma=gamma, n_components=self.columns, random_state=seed)
        if not mechanism.estimates:
            return kind("exact", gamma=gamma)
        sampler = partial(self.drawn, mechanism.sampler)
        return kind(mechanism.kernel_map(), sampler, mechanism.m, gamma=gamma, random_state=seed)


class DrawnOnce:
    """Answers a generator in the same state with the same rows of a sampler: all bandwidths have them, and those of
    5000 columns take 20 seconds."""

    def __init__(self):
        self.kept: dict[tuple, tuple[Noise, torch.Tensor]] = {}

    def __call__(self, sampler: Callable[..., Noise], m: int, d: int, generator: torch.Generator,
                 **options: Any) -> Noise:
        key = m, d, generator.get_state().numpy().tobytes(), str(options)
        if key not in self.kept:
            self.kept[key] = sampler(m, d, generator, **options), generator.get_state()
        noise, after = self.kept[key]
        generator.set_state(after)
        return noise


def scaler(train: np.ndarray, kind: str):
    """A function that scales float64 columns by their training statistics, to float32; a constant column becomes 0, and
    a missing value the mean of the training part."""
    if kind == "none":
        return lambda x: x.astype(np.float32)
    mean = SimpleImputer(keep_empty_features=True).fit(train)
    train = mean.transform(train)
    if kind == "standard":
        centre, width = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    else:
        centre, width = train.min(0), np.ptp(train, axis=0)
    width = np.where(np.ptp(train, axis=0) > 0, width, 1)  # the mean of equal numbers may be off by a rounding
    return lambda x: ((mean.transform(x) - centre) / width).astype(np.float32)


class PeerClassifier:
    """The largest kernel sum, as KernelRegressionClassifier, with features of a transformer of scikit-learn."""

    def __init__(self, kind: type, **options: Any):
        self.transformer = kind(**options)

    def fit(self, X, y):
        self.classes = np.unique(y)
        if isinstance(self.transformer, Nystroem):               # of fewer rows these, without a warning
            self.transformer.set_params(n_components=min(self.transformer.n_components, len(X)))
        self.state = self.transformer.fit_transform(X).T @ (y[:, None] == self.classes).astype(X.dtype)
        return self

    def score(self, X, y) -> float:
        best = (self.transformer.transform(X) @ self.state).argmax(1)
        return float((self.classes[best] == y).mean())


BASELINES = {"RBFSampler": partial(PeerClassifier, RBFSampler), "Nystroem": partial(PeerClassifier, Nystroem),
         "majority": lambda **_: DummyClassifier()}
