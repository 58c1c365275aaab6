"""Interfaces of tasks, evaluation reader, and task metrics."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, dataclass_transform

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from crt_exp.experiments.data.plan import Plan
from crt_exp.experiments.models.folder import Tensors
from crt_exp.experiments.predictions import Prediction
from crt_exp.mechanism import Mechanism
from crt_exp.validation import checked

PROGRESS = {"delay": 10, "mininterval": 10}  # seconds before and between lines of progress
Metrics = dict[str, float]
Record = dict[str, Any]  # a line of metrics.jsonl
Batch = Any  # tensors in dicts, lists or tuples; the trainer moves them to the device


class BaseTask(ABC):
    """What the runner reads of every task; see Task and Measurement."""

    # metric: key in the last record that is the result, and that sweeps optimise
    metric: str
    lower_is_better: bool = False
    # substitute data in use, and how to get the named data set; empty: the named data set is in use
    stand_in: str = ""
    # fields of the run's mechanism that affect this task; the runner rejects other choices
    uses: frozenset[str] = frozenset({"attention", "features", "sampler", "m"})
    # whether the task accepts feature maps with a kernel of their own
    accepts_own_kernel: bool = False

    def inputs(self) -> Iterable[Path | None]:
        """Data files and folders that the task reads.

        List the paths of task.data_dir and $CRT_DATA. The runner (runner/run.py) adds the files of options with the
        annotation `FileName` of crt_exp.validation, such as task.text. A resumed run must read the same inputs.
        """
        return ()

    @abstractmethod
    def summary(self, records: list[Record]) -> str:
        """One-line result for the terminal."""


class Measurement(BaseTask):
    """A task that measures: `rows(mechanism, seed)` yields lines of metrics.jsonl.

    The last row contains `metric`. A continued run computes all rows again and logs only missing ones.

    Attributes:
        directory: The run directory, set before `records`, for tasks that save a state of their own. Their `records`
            starts after the records in `done`.
    """

    lower_is_better = True
    directory: Path | None = None

    @classmethod
    def measures_whole(cls, mechanism: Mechanism) -> bool:
        """Whether the task accepts a mechanism without a feature map."""
        return False

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Record]:
        raise NotImplementedError

    def records(
        self, mechanism: Mechanism, seed: int, done: Sequence[Record] = ()
    ) -> Iterator[Record]:
        last: Record = {}
        for step, row in enumerate(self.rows(mechanism, seed)):
            if last and step > len(done):
                yield last
            last = {"step": step, "epoch": 0, "split": "test", **row}
        yield {**last, "final": True}

    def save_results(self, records: list[Record], directory: Path) -> None:
        """Write tables and figures to the run directory, before the final record."""

    def summary(self, records: list[Record]) -> str:
        value = records[-1][self.metric]
        if isinstance(value, float):
            return f"{self.metric} {value:.4g}"
        return f"{len(records)} rows"


class Task(BaseTask):
    """Interface of a trained task: data, model, loss and metrics.

    A task does not depend on the attention method, the device or the number of
    processes.

    The trainer wraps the model for several processes. `loss` may therefore only call the model as a whole,
    `model(**batch)`, never a submodule.
    """

    # metric: key in the result of `evaluate`; selects the best weights.
    # splits: the rows of each split
    # validation: split evaluated during training; None: no evaluation, the last weights are the result.
    # test: split evaluated at the end; None: the validation split.
    # predictions: whether the run writes the test predictions; then `evaluate` sets `predicted`.
    # predicted: predictions of the last evaluated split, see experiments/predictions.py
    splits: Mapping[str, Sized]
    validation: str | None = "validation"
    test: str | None = "test"
    predictions: bool = False
    predicted: Sequence[Prediction] = ()
    # further metrics of the summary
    reported: Sequence[str] = ()
    # batches of 8 rows that `calibrate` reads; an option of tasks that call it
    calibration: int

    def length(self, split: str) -> int:
        """Number of rows of a split."""
        return len(self.splits[split])

    @abstractmethod
    def build(self, mechanism: Mechanism) -> nn.Module:
        """Build the model; initial weights come from torch's global generator."""

    @abstractmethod
    def batches(self, split: str, plan: Plan) -> Iterable[Batch]:
        """Yield the micro-batches of `plan` as CPU tensors.

        Draw random numbers from `plan.rng`, never from global generators. The rows of `plan.rows` and `plan.by_cost`
        are those of the sample if an evaluation is limited; other orders are cut at the limit (`plan.limit`).
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch, a scalar."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str, reader: "Reader") -> Metrics:
        """Compute the metrics of a split; rates are fractions, not percentages.

        Each process reads its share with `reader.batches(split)`, of all rows or of a sample (trainer.evaluate).
        `reader.sum` and `reader.gather` combine the shares.
        """

    def weight(self, batch: Batch) -> Tensor | float | None:
        """Normaliser of the mean in `loss`, such as the number of masked tokens.

        None: the same in every micro-batch. If the weight is 0, the loss must still be finite.
        """
        return None

    def model_inputs(self, batch: Batch) -> Any:
        """Arguments of the model in a batch, without the targets and the row numbers."""
        if "images" in batch:
            return batch["images"]
        return {key: batch[key] for key in batch if key not in ("labels", "rows")}

    def calibrate(self, model: nn.Module) -> None:
        """Fit statistics of causal features to weights of another attention."""
        from crt_exp.swap.calibration import fill_statistics, learns

        if self.calibration and learns(model):
            batches = islice(self.batches("train", Plan(8)), self.calibration)
            fill_statistics(model, [self.model_inputs(batch) for batch in batches])

    def check_shards(self) -> None:
        """Raise ConfigError if a step needs unsharded weights (trainer=fsdp)."""

    def check_adapters(self) -> None:
        """Raise ConfigError if the task does not support frozen weights (trainer.adapt)."""

    def epoch_steps(self, plan: Plan) -> int:
        """Optimiser steps of an epoch.

        Return `plan.steps(costs, budget)` if `batches` reads `plan.by_cost(costs, budget, split)`.
        """
        return self.length("train") // plan.batch

    def updated(self, model: nn.Module, step: int) -> None:
        """Update state that follows the weights, such as a sampler's tables.

        Every process calls the hook after each optimiser step, without gradients. step: number of updates so far. With
        trainer=fsdp, parameters are sharded (DTensor).
        """

    def state_dict(self) -> dict[str, Tensor | float | int | bool | str | None]:
        """State of a resumed run, in addition to weights and optimiser.

        Examples are an LSTM's hidden state that carries over batches, or a sampler's tables. Each process has its own
        state; every checkpoint contains all of them.

        `loss` and `updated` may change the state. `batches` may not, because it reads ahead of the step. `evaluate` may
        use the state: the best weights are tested with the state of their step.
        """
        return {}

    def load_state_dict(self, state: dict[str, Tensor | float | int | bool | str | None]) -> None:
        """Restore `state_dict`; the tensors are on the CPU.

        A different number of processes can load the state only if all processes had the same state. Raises ValueError
        if a subclass defines `state_dict` alone.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__}: has state_dict but no load_state_dict; define both"
            )

    def lr_scale(self, name: str) -> float:
        """Learning-rate factor of a parameter; 0 freezes the parameter.

        Use it for layer-wise decay or a faster head.
        """
        return 1.0

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether trainer.weight_decay applies to a parameter.

        Default: to matrices, not to biases and norms.
        """
        return parameter.dim() >= 2

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        """Save the final weights in the run directory; the default saves nothing.

        tensors: the full state dict of `model`. Only the first process calls it, before the final record.
        """

    def summary(self, records: list[Record]) -> str:
        last = records[-1]
        metrics = []
        for key in (self.metric, *self.reported):
            value = math.nan if last[key] is None else last[key]
            metrics.append(f"{key} {value:.4f}")
        name = type(self).__name__.lower()
        return f"{name}: {', '.join(metrics)} ({last['split']}, step {last['step']})"


@dataclass_transform(eq_default=False)
def task_class(kind: type) -> type:
    """Class decorator: a data class that checks its arguments; errors name `task.<argument>`."""
    return checked("task", dataclass(eq=False)(kind))


def exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Frequencies of counted symbols (V,), with add-one smoothing."""
    return (counts + 1.0) / (counts + 1.0).sum()


@dataclass
class Reader:
    """Read a split for `Task.evaluate`, and reduce over all processes.

    The reader yields this process's share of the split on the device. The default is one process on the CPU:
    `task.evaluate(model, "validation", Reader(task, Plan(32)))`.

    Args:
        plan: rows of this process. Its `limit` states afterwards whether rows were left unread.
        progress: print the number of micro-batches read.
    """

    task: Task
    plan: Plan = Plan(32)
    device: torch.device | str = "cpu"
    progress: bool = False

    def batches(self, split: str) -> Iterator[Batch]:
        """Yield micro-batches of at most `batch` rows, in row order."""
        from accelerate.utils import send_to_device

        batches = tqdm(
            self.task.batches(split, self.plan),
            f"evaluating {split}",
            unit=" batches",
            leave=False,
            disable=not self.progress,
            **PROGRESS,
        )
        limit = self.plan.limit
        for read, item in enumerate(batches):
            if limit is not None and read == limit.batches:
                limit.partial = True
                return
            yield send_to_device(item, self.device, non_blocking=True)

    def sum(self, *values: Any) -> list[float]:
        """Sum each value (number or scalar tensor) over all processes, in float64."""
        scalars = [torch.as_tensor(value).detach().to("cpu", torch.float64) for value in values]
        return torch.stack(self._all(torch.stack(scalars))).sum(0).tolist()

    @torch.no_grad()
    def means(
        self, split: str, measure: Callable[[Batch], dict[str, Any]], counted: str = ""
    ) -> Metrics:
        """Means over a split, and their number under the name `counted`.

        measure: sums over a micro-batch, and their `count`, as integers or scalar tensors.
        """
        totals: Counter[str] = Counter()
        for batch in self.batches(split):
            for name, value in measure(batch).items():
                totals[name] += torch.as_tensor(value).item()
        names = dict.fromkeys(self.gather([*totals]))  # a process without rows has none
        sums = dict(zip(names, self.sum(*[totals[name] for name in names])))
        count = sums.pop("count")
        means = {name: total / count for name, total in sums.items()}
        if counted:
            means[counted] = count
        return means

    def gather(self, rows: list) -> list:
        """Concatenate the rows of all processes, in the order of the split."""
        return list(chain.from_iterable(self._all(rows)))

    def _all(self, mine: Any) -> list:
        if self.plan.world == 1:
            return [mine]
        parts = [None] * self.plan.world
        torch.distributed.all_gather_object(parts, mine)
        return parts


# ---- metrics
#
# Every metric is a fraction. Correlation with constant predictions or labels is 0.


def accuracy(predictions: Any, labels: Any) -> float:
    """Share of predictions equal to the label, in [0, 1]."""
    return float(np.equal(predictions, labels).mean())


def f1(predictions: Any, labels: Any) -> float:
    """F1 score of class 1, in [0, 1]; 0 if class 1 is neither predicted nor present."""
    from sklearn.metrics import f1_score

    return float(f1_score(np.equal(labels, 1), np.equal(predictions, 1), zero_division=0.0))


def mcc(predictions: Any, labels: Any) -> float:
    """Matthews correlation coefficient of the classes, in [-1, 1]."""
    from sklearn.metrics import matthews_corrcoef

    return 0.0 if constant(predictions, labels) else float(matthews_corrcoef(labels, predictions))


def correlation(kind: str, predictions: Any, labels: Any) -> float:
    """Correlation of scores, in [-1, 1]. kind: function of scipy.stats."""
    from scipy import stats

    if constant(predictions, labels):
        return 0.0
    return float(getattr(stats, kind)(predictions, labels).statistic)


def constant(*vectors: Any) -> bool:
    return any(np.ptp(values) == 0 for values in vectors)


pearson = partial(correlation, "pearsonr")
spearman = partial(correlation, "spearmanr")  # ties get their mean rank
# of predictions, classes (n,) or scores (n,), and labels
METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "mcc": mcc,
    "spearman": spearman,
    "pearson": pearson,
}


def jackknife_values(metric: str, predictions: Any, labels: Any, parts: int) -> list[float]:
    """Jackknife pseudo-values of a metric, one for each part of the examples.

    Part i holds every `parts`-th example. Its pseudo-value is parts * metric(all) - (parts - 1) * metric(all but part
    i). For accuracy and parts of equal size, the pseudo-value is the accuracy of the part.

    The mean of the pseudo-values is the bias-corrected metric, with Student's interval over examples. Pseudo-values of
    two models on the same examples are paired.
    """
    predictions = np.asarray(predictions)
    labels = np.asarray(labels)
    score = METRICS[metric]
    whole = score(predictions, labels)
    part = np.arange(len(labels)) % parts
    values = []
    for i in range(parts):
        without = score(predictions[part != i], labels[part != i])
        values.append(parts * whole - (parts - 1) * without)
    return values


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> Metrics:
    """Word and character error rates over all utterances.

    `wer` is the sum of substitutions, deletions and insertions, each as a fraction of the reference words. `cer` and
    `character_...` count characters, including spaces.
    """
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
