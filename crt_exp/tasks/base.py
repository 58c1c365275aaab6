"""What a task gets from the runner and what it gives back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from crt_exp.features import FeatureMap


@dataclass(frozen=True)
class Mechanism:
    """A feature map (its name and constructor options, the kernel left to the task), a sampler and m projections."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)  # with _target_
    sampler_name: str = ""
    sampler: Any = None
    m: int = 0

    def map(self, kernel: str) -> FeatureMap:
        from hydra.utils import instantiate

        return instantiate(self.options | {"kernel": kernel})

    def __str__(self):
        return f"{self.name} x {self.sampler_name}, m = {self.m}" if self.m else f"{self.name} kernel"


EXACT = Mechanism("exact")


class Study(Protocol):
    """A task without training: it measures, and yields records for metrics.jsonl."""

    metric: str  # the key of the final record that a sweep optimises

    def records(self, mechanism: Mechanism, seed: int, done: list[dict]) -> Iterator[dict[str, Any]]:
        """Yields the records that are not yet in `done`, in a fixed order; the last one has `"final": True`."""

    def summary(self, records: list[dict]) -> str:
        """One line for the terminal."""
