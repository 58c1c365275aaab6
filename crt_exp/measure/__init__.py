"""What the runner takes of a probe: a task that trains nothing."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from crt_exp.mechanism import Mechanism


class Probe(Protocol):
    """A task without training: it measures, and yields records for metrics.jsonl.

    It may have `uses` and `inputs()`, as tasks that train do; `keep(records, directory)`, which leaves tables and
    pictures in the run directory at the end; `directory`, which is set to the run directory, for a state that records
    go on from; and `of_rows`, true where it takes maps with a kernel of their own.
    """

    metric: str  # the key of the final record that a sweep optimises
    lower_is_better: bool = False

    def records(self, mechanism: Mechanism, seed: int, done: list[dict]) -> Iterator[dict[str, Any]]:
        """Yields the records that are not yet in `done`, in a fixed order; the last one has `"final": True`."""

    def summary(self, records: list[dict]) -> str:
        """One line for the terminal."""


class Measurement:
    """A task that only measures: `rows(mechanism, seed)` yields a dict for each line of metrics.jsonl.

    A continued run computes all rows again and logs those that are missing. The last row holds `metric`.
    """

    metric: str
    lower_is_better = True

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        if getattr(self, "start", "") is None:
            raise ValueError("task.start=null: expected the directory of a run")
        last: dict[str, Any] = {}
        for step, row in enumerate(self.rows(mechanism, seed)):
            if last and step > len(done):
                yield last
            last = {"step": step, "epoch": 0, "split": "test", **row}
        yield {**last, "final": True}

    def summary(self, records: list[dict]) -> str:
        value = records[-1][self.metric]
        return f"{self.metric} {value:.4g}" if isinstance(value, float) else f"{len(records)} rows"


class SwapMeasurement(Measurement):
    """A measurement of a model whose attention is swapped: of any attention, with a feature map or without."""

    measures_whole = staticmethod(lambda mechanism: True)


class Series(Probe):
    """A probe with a record for each of some `values` of what it is `over`, the key of records and their split."""

    over: str
    values: Sequence[Any]

    def of(self, value: Any, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """The numbers of one value."""

    def check(self, mechanism: Mechanism) -> None:
        check_estimates(mechanism)

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        self.check(mechanism)
        for step, value in list(enumerate(self.values))[len(done):]:
            last = {"split": "test", "final": True} if step == len(self.values) - 1 else {"split": self.over}
            yield {"step": step, "epoch": 0, self.over: value, **self.of(value, mechanism, seed), **last}

    def summary(self, records: list[dict]) -> str:
        shown = ((each[self.over], each[self.metric]) for each in records)
        return f"{self.metric} " + ", ".join(f"{value:.4g} at {self.over} = {place}" for place, value in shown
                                             if value is not None)


def check_estimates(mechanism: Mechanism) -> None:
    if mechanism.is_exact:
        raise ValueError("attention=exact has no error: choose features=...")


def planned(plan: Sequence[tuple], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records that `rows` lacks of a plan of (split, function, arguments), each added to the rows as it is made."""
    for step, (split, compute, arguments) in list(enumerate(plan))[len(rows):]:
        rows.append({"step": step, "epoch": 0, "split": split, **compute(*arguments)})
        yield rows[-1]
