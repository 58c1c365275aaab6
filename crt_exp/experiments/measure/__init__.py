"""Base classes of tasks that measure without training."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crt_exp.experiments.data.sources import missing_file, task_folder
from crt_exp.experiments.tasks.base import Measurement
from crt_exp.mechanism import Mechanism

Record = dict[str, Any]  # one row of metrics.jsonl
Records = Iterator[Record]
TensorPair = tuple[Tensor, Tensor]


class SwapMeasurement(Measurement):
    """A measurement after a swap, with any attention (with or without feature map)."""

    @classmethod
    def measures_whole(cls, mechanism: Mechanism) -> bool:
        return True


class Series(Measurement):
    """A measurement with one row for each value of a quantity.

    `over` is the name of the quantity, and the key and the split of the rows. The option with the plural of the name,
    such as `ms` for "m", holds the values.
    """

    over: str

    @abstractmethod
    def measure(self, value: Any, mechanism: Mechanism, seed: int) -> Record:
        """Return the results for one value."""

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        check_estimates(mechanism)
        values = getattr(self, f"{self.over}s")
        for i, value in enumerate(values, 1):
            split = self.over if i < len(values) else "test"
            yield {"split": split, self.over: value, **self.measure(value, mechanism, seed)}

    def summary(self, records: list[dict]) -> str:
        values = []
        for record in records:
            if record[self.metric] is not None:
                values.append(f"{record[self.metric]:.4g} at {self.over} = {record[self.over]}")
        return f"{self.metric} {', '.join(values)}"


def check_estimates(mechanism: Mechanism) -> None:
    if mechanism.is_exact:
        raise ValueError(
            "attention=exact: expected an approximation, such as features=pos or attention=favorpp"
        )


def data_file(dataset: str, name: str) -> Path:
    """Return a file of $CRT_DATA/<dataset>. Raises DataError if it is missing."""
    folder = task_folder(dataset, None)
    path = folder and folder / name
    if path is None or not path.is_file():
        raise missing_file(dataset, path)
    return path


def seeded(seed: int) -> torch.Generator:
    """Return a new CPU generator."""
    return torch.Generator().manual_seed(seed)
