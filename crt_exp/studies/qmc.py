"""Mean squared error of softmax estimates over pairs of rows of a table, for one map and sampler (HRF 4.1, Table 1)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from crt_exp.data.tabular import file_of, load
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.bias import bias_record, bias_sentence
from crt_exp.schema import Count, Positive, at_least, checked
from crt_exp.studies.base import check_estimates
from crt_exp.studies.pairs import generator, log_relative_mse, squared_errors
from crt_exp.studies.uci import scaler


@checked("task")
class QMC:
    """task=qmc: E (estimate - SM)^2, the mean over pairs of different rows.

    scaling: of the columns, over the whole table, as task=uci has it; then all rows are divided by one number, so that
    the root of their mean squared length is `length`. Controls: `zero`, an estimate of 0, and `mean`, the mean of SM
    over the pairs. Parameters are fitted to all rows, on both sides.
    """

    metric, lower_is_better = "mse", True

    def __init__(self, dataset: str, scaling: Literal["standard", "minmax", "none"], length: Positive,
                 pairs: Annotated[int, at_least(2)], groups: Count, draws: Count, data_dir: str | None = None):
        self.name, self.scaling, self.length = dataset, scaling, length
        self.pairs, self.groups, self.draws = pairs, groups, draws
        table = load(dataset, data_dir).encode("ordinal")
        self.file = file_of(dataset, data_dir)
        rows = torch.from_numpy(scaler(table, scaling)(table)).double()
        self.rows = length * rows / rows.square().sum(-1).mean().sqrt()          # (rows, d)

    def inputs(self) -> list[Path | None]:
        return [self.file]

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        if not done:
            yield {"step": 0, "epoch": 0, "split": "test", **self.measure(mechanism, seed), "final": True}

    def measure(self, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """mse_of_groups: a number for each group of draws; closed_form: with iid rows."""
        phi, (x, y) = mechanism.map("softmax"), self.pairs_of_rows(generator(seed, 0))
        params = phi.fit(Statistics.of(self.rows, self.rows))
        weight = (2 * (x * y).sum(-1)).exp()                                     # SM^2
        squared = squared_errors(phi, mechanism, x, y, params, self.groups, self.draws, seed)
        mse, closed = (squared * weight).mean(-1), log_relative_mse(phi, x, y, params, mechanism.m).exp() * weight
        return {"mse": mse.mean().item(), "mse_of_groups": mse.tolist(), "closed_form": closed.mean().item(),
                "columns": phi.width(mechanism.m), "zero": weight.mean().item(),
                "mean": weight.sqrt().var(correction=0).item(),
                **bias_record(phi, mechanism.sampler, self.rows, self.rows, params)}

    def pairs_of_rows(self, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """x and y (pairs, d): different rows, each pair drawn at random."""
        n = len(self.rows)
        i = torch.randint(n, (self.pairs,), generator=g)
        j = (i + torch.randint(1, n, (self.pairs,), generator=g)) % n
        return self.rows[i], self.rows[j]

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (f"{self.name}: MSE {last['mse']:.3g} (closed form, iid: {last['closed_form']:.3g}), of zero "
                f"{last['zero']:.3g}, of the mean of the kernel {last['mean']:.3g}{bias_sentence(last)}")
