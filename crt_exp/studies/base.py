"""What a study gives the runner: a task that trains nothing."""

from collections.abc import Iterator
from typing import Any, Protocol

from crt_exp.mechanism import Mechanism


class Study(Protocol):
    """A task without training: it measures, and yields records for metrics.jsonl.

    It may have `uses`, as tasks that train do; `keep(records, directory)`, which leaves tables and pictures in the run
    directory at the end; and `directory`, which is set to the run directory, for a state that records go on from.
    """

    metric: str  # the key of the final record that a sweep optimises
    lower_is_better: bool = False

    def records(self, mechanism: Mechanism, seed: int, done: list[dict]) -> Iterator[dict[str, Any]]:
        """Yields the records that are not yet in `done`, in a fixed order; the last one has `"final": True`."""

    def summary(self, records: list[dict]) -> str:
        """One line for the terminal."""
