"""Tasks that only measure: what the runner takes of them. The modules beside it hold the tasks, and their timer."""

from collections.abc import Iterator, Sequence
from typing import Any

from crt_exp.mechanism import Mechanism


class Measurement:
    """A task that trains nothing: `rows(mechanism, seed)` yields a dict for each line of metrics.jsonl.

    The last row holds `metric`. A continued run computes all rows again and logs those that are missing.

    It may have `uses` and `inputs()`, as tasks that train do; `measures_whole`, whether it takes a mechanism without a
    feature map; `of_rows`, true where it takes maps with a kernel of their own; and `keep(records, directory)`, which
    leaves tables and pictures in the run directory at the end. A `directory` is set to the run directory, for a state
    that the task itself goes on from: its `records` then starts behind those that are `done`.
    """

    metric: str  # the key of the final record that a sweep optimises
    lower_is_better = True

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def records(self, mechanism: Mechanism, seed: int, done: Sequence[dict] = ()) -> Iterator[dict[str, Any]]:
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


class Series(Measurement):
    """A measurement with a row for each of some `values` of what it is `over`, the key of rows and their split."""

    over: str
    values: Sequence[Any]

    def of(self, value: Any, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """The numbers of one value."""
        raise NotImplementedError

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        for i, value in enumerate(self.values, 1):
            split = self.over if i < len(self.values) else "test"
            yield {"split": split, self.over: value, **self.of(value, mechanism, seed)}

    def summary(self, records: list[dict]) -> str:
        shown = ((each[self.over], each[self.metric]) for each in records)
        return f"{self.metric} " + ", ".join(f"{value:.4g} at {self.over} = {place}" for place, value in shown
                                             if value is not None)


def check_estimates(mechanism: Mechanism) -> None:
    if mechanism.is_exact:
        raise ValueError("attention=exact has no error: choose features=...")
