"""Base classes of tasks that measure without training."""

from collections.abc import Iterator, Sequence
from typing import Any

from crt_exp.mechanism import Mechanism


class Measurement:
    """A task that measures: `rows(mechanism, seed)` yields lines of metrics.jsonl.

    The last row contains `metric`. A continued run computes all rows again and logs only missing ones. All attributes
    except `metric` are optional.

    Attributes:
        metric: Key of the result in the final record, which a sweep optimises.
        lower_is_better: Direction of the metric.
        uses, inputs: As in tasks that train.
        measures_whole: Function of a mechanism; true if the task accepts attention without a feature map.
        of_rows: True if the task accepts feature maps with a kernel of their own.
        keep: Method (records, directory) that writes tables and figures to the run directory at the end.
        directory: Set to the run directory, for tasks that save a state of their own. Their `records` starts after the
            records in `done`.
    """

    metric: str
    lower_is_better = True

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def records(
        self, mechanism: Mechanism, seed: int, done: Sequence[dict] = ()
    ) -> Iterator[dict[str, Any]]:
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
    """A measurement after a swap, with any attention (with or without feature map)."""

    measures_whole = staticmethod(lambda mechanism: True)


class Series(Measurement):
    """A measurement with one row for each of `values` of the quantity `over`.

    `over` is also the key and the split of the rows.
    """

    over: str
    values: Sequence[Any]

    def of(self, value: Any, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """Return the results for one value."""
        raise NotImplementedError

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        for i, value in enumerate(self.values, 1):
            split = self.over if i < len(self.values) else "test"
            yield {"split": split, self.over: value, **self.of(value, mechanism, seed)}

    def summary(self, records: list[dict]) -> str:
        shown = ((each[self.over], each[self.metric]) for each in records)
        return f"{self.metric} " + ", ".join(
            f"{value:.4g} at {self.over} = {place}" for place, value in shown if value is not None
        )


def check_estimates(mechanism: Mechanism) -> None:
    if mechanism.is_exact:
        raise ValueError(
            "attention=exact: expected an approximation, such as features=pos or attention=favorpp"
        )
