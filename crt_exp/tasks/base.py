"""What a task that trains a model gives the runner, and what it gets from it; and the metrics of tasks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.data.plan import Plan
from crt_exp.mechanism import Mechanism

Batch = Any  # tensors in dicts, lists or tuples; moved to the device by the trainer


class Task(Protocol):
    """Data, model, loss and metrics; subclass it for the defaults.
    It knows nothing of attention, devices and processes.

    The trainer wraps the model for several processes, so `loss` may only call it: `model(**batch)`, never a part of it.
    """

    # metric: key of `evaluate`'s answer by which the best weights are chosen and sweeps optimise. validation: the split
    # evaluated while training; None: none, and the last weights are the result. test: the split evaluated at the end;
    # None: the validation split stands for it
    metric: str
    lower_is_better: bool = False
    validation: str | None = "validation"
    test: str | None = "test"
    # what is read in place of the data that the task is named for, and how to get those; empty: those are read
    stand_in: str = ""
    # parts of the run's mechanism that decide anything in this task; choices of others are refused
    uses: frozenset[str] = frozenset({"attention", "features", "sampler", "m"})

    def length(self, split: str) -> int | None:
        """Rows of a split; None where it is streamed: then `trainer.steps` must say when training ends."""

    def build(self, mechanism: Mechanism) -> nn.Module:
        """The model, its initial weights drawn from torch's global generator."""

    def batches(self, split: str, plan: Plan) -> Iterable[Batch]:
        """The micro-batches that `plan` names, as CPU tensors. Draw from `plan.rng`, never from global generators."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch, a scalar."""

    def evaluate(self, model: nn.Module, split: str, reader: "Reader") -> dict[str, float]:
        """Metrics as fractions. Each process reads its share by `reader.batches(split)`;
        `reader.sum` and `gather` join them."""

    def weight(self, batch: Batch) -> Tensor | float | None:
        """What the mean in `loss` runs over, such as the number of masked tokens; None: the same in every micro-batch.

        Where it is 0 the loss must still be finite.
        """
        return None

    def inputs(self) -> Iterable[Path | None]:
        """Files and folders of data that it reads: those of task.data_dir and of $CRT_DATA. What options such as
        task.text and task.init name is known without (runner/run.py). A run that goes on must read the same."""
        return ()

    def check_shards(self) -> None:
        """Raises ConfigError where a step needs whole weights and cannot have them split (trainer=fsdp)."""

    def check_adapters(self) -> None:
        """Raises ConfigError where the task does not go with weights that stay as they are (trainer.adapt)."""

    def epoch_steps(self, plan: Plan) -> int | None:
        """Optimiser steps of an epoch where micro-batches are not a fixed number of rows: `plan.steps(costs, budget)`
        where `batches` reads `plan.by_cost(costs, budget, split)`. None: rows of the training split // trainer.batch.
        """
        return None

    def updated(self, model: nn.Module, step: int) -> None:
        """Called on every process after each update of the weights, `step` of them so far: for what follows the
        optimiser, such as a sampler's tables. No gradient is recorded.
        With trainer=fsdp parameters are sharded (DTensor).
        """

    def state_dict(self) -> dict[str, Tensor | float | int | bool | str | None]:
        """What a resumed run needs besides weights and optimiser: an LSTM's hidden state carried over batches, a
        sampler's tables. Each process has its own; all are saved with every checkpoint.

        It may change in `loss` and `updated`, and not in `batches`, which reads ahead of the step. `evaluate` may use
        it: the best weights are tested with the state of their step.
        """
        return {}

    def load_state_dict(self, state: dict[str, Tensor | float | int | bool | str | None]) -> None:
        """The reverse of state_dict; tensors come on the CPU.
        Another number of processes takes it where all had the same."""
        if state:
            raise ValueError(f"{type(self).__name__} has a state_dict and no load_state_dict: "
                             "a resumed run would lose it")

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of the parameter of that name: layer-wise decay, faster heads; 0 freezes it."""
        return 1.0

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether trainer.weight_decay is for this parameter; default: for matrices, not for biases and norms."""
        return parameter.dim() >= 2

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        """Keeps the final weights (`tensors`, the whole state of `model`) in the run directory for other uses;
        default: not.

        Called on the first process alone, before the final record.
        """

    def summary(self, records: list[dict]) -> str:
        """One line for the terminal."""
        last = records[-1]
        value = math.nan if last[self.metric] is None else last[self.metric]
        return f"{type(self).__name__.lower()}: {self.metric} {value:.4f} ({last['split']}, step {last['step']})"


def exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


class Reader:
    """What `Task.evaluate` reads: this process's share of a split on the device, and sums over all processes.

    The default is one process on the CPU: `task.evaluate(model, "validation", Reader(task, batch=32))`. told: is called
    before each micro-batch with the split, how many were read, and of how many (None: of an unknown number). limit:
    micro-batches that are read at most of a split; `partial` is then whether some were left unread.
    """

    def __init__(self, task: Task, batch: int = 32, seed: int = 0, device: torch.device | str = "cpu", rank: int = 0,
                 world: int = 1, told: Callable[[str, int, int | None], None] | None = None, limit: int | None = None):
        self.task, self.device, self.told, self.limit, self.partial = task, torch.device(device), told, limit, False
        self.plan = Plan(batch, seed=seed, rank=rank, world=world)

    def batches(self, split: str, batch: int | None = None) -> Iterator[Batch]:
        """Micro-batches of at most `batch` rows (null: the trainer's choice), in the order of rows."""
        from accelerate.utils import send_to_device

        plan = self.plan if batch is None else replace(self.plan, batch=batch)
        whole = self._whole(split, plan) if self.told else None
        for read, item in enumerate(self.task.batches(split, plan)):
            if read == self.limit:
                self.partial = True
                return
            if self.told:
                self.told(split, read, whole)
            yield send_to_device(item, self.device, non_blocking=True)

    def _whole(self, split: str, plan: Plan) -> int | None:
        """Micro-batches of this process, or of the limit; None where they are no fixed number of rows."""
        rows = self.task.length(split)
        if rows is None or self.task.epoch_steps(plan) is not None:
            return self.limit
        share = rows * (plan.rank + 1) // plan.world - rows * plan.rank // plan.world
        return min(-(-share // plan.batch), self.limit or share)

    def sum(self, *values: Any) -> list[float]:
        """Each value (number or scalar tensor) summed over all processes, in float64."""
        total = torch.stack([torch.as_tensor(v).detach().to("cpu", torch.float64) for v in values])
        return torch.stack(self._all(total)).sum(0).tolist()

    def gather(self, rows: list) -> list:
        """The rows of all processes, joined in the order of the split."""
        return [row for part in self._all(rows) for row in part]

    def _all(self, mine: Any) -> list:
        if self.plan.world == 1:
            return [mine]
        parts = [None] * self.plan.world
        torch.distributed.all_gather_object(parts, mine)
        return parts


# ---- metrics
#
# Each is a fraction, and defined for degenerate inputs too: constant predictions or labels carry no information, so a
# correlation with them is 0. `predictions` and `labels` have one length n > 0 and finite values, else ValueError: a
# model that diverged must not look like one that scored 0.


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
    """Jackknife values of a metric, one for each part of the examples (every `parts`-th one):
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
