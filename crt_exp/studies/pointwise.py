"""Relative error of softmax estimates over the angle between two vectors of one length, measured and in closed form
(HRF 4.1, Figures 2 and 5)."""

from typing import Annotated, Any

from crt_exp.features import Statistics
from torch import Tensor

from crt_exp.mechanism import Mechanism
from crt_exp.schema import Count, Positive, Several, at_least, checked
from crt_exp.studies.base import Series
from crt_exp.studies.pairs import angles_of, at_angles, generator, log_relative_mse, squared_errors


@checked("task")
class Pointwise(Series):
    """task=pointwise: the root of the mean squared relative error at each angle, and the largest of them.

    A record for each length. Parameters are fitted to all pairs of a length together. `groups` are independent sets of
    draws, for intervals; the closed form is for iid projections.
    """

    metric, lower_is_better, over = "largest_error", True, "length"

    def __init__(self, d: Annotated[int, at_least(2)], lengths: Several[Positive], angles: Annotated[int, at_least(2)],
                 groups: Count, draws: Count):
        self.d, self.values, self.angles, self.groups, self.draws = d, list(lengths), angles, groups, draws

    def of(self, r: float, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """error, closed_form: one number an angle; largest_of_groups: of each group of draws; mean: the largest error
        of the constant that is the mean of SM over the angles."""
        theta, phi = angles_of(self.angles), mechanism.map("softmax")
        x, y = at_angles(theta, r, self.d, generator(seed, 0))
        params = phi.fit(Statistics.of(x, y))
        squared = squared_errors(phi, mechanism, x, y, params, self.groups, self.draws, seed)
        error = squared.mean(0).sqrt()
        closed = (log_relative_mse(phi, x, y, params, mechanism.m) / 2).exp()
        return {"theta": theta.tolist(), "error": error.tolist(), "closed_form": closed.tolist(),
                "largest_error": error.max().item(), "largest_closed_form": closed.max().item(),
                "columns": phi.rank(mechanism.m), "squared_error": squared.tolist(),
                "largest_of_groups": squared.amax(1).sqrt().tolist(), "mean": largest_of_mean(theta, r)}

    def summary(self, records: list[dict]) -> str:
        shown = (f"{r['largest_error']:.3g} (closed form {r['largest_closed_form']:.3g}) at length {r['length']}"
                for r in records)
        return f"largest relative error over angles: {', '.join(shown)}"


def largest_of_mean(theta: Tensor, r: float) -> float:
    exact = (r**2 * theta.cos()).exp()
    return float((exact.mean() / exact - 1).abs().max())
