"""Mean squared error of softmax estimates between vectors in clusters (HRF H.1 and H.3, Figure 6, Table 3).

The paper's construction, where its text says it: two vectors, turned by two random orthogonal matrices each, are the
centres of two clusters of queries and two of keys; signs of coordinates decide how well a real diagonal M can do; all
points get a norm. Sizes, spreads and signs are options.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.blocks import haar
from crt_exp.schema import Count, NotNegative, Positive, Several, at_most, checked
from crt_exp.studies.base import Series
from crt_exp.studies.pairs import generator, log_relative_mse, squared_errors

SIDES = 2  # clusters of queries, and of keys


@checked("task")
class Clusters(Series):
    """task=clusters: E (estimate - SM)^2 over random pairs of a query and a key, for each m and repetition.

    agreeing: the share of the coordinates in which centres of queries and keys have the same sign; 0 lets a real
    diagonal M have no loss (HRF (21)) at any pair of centres. spread: standard deviation of the points around a centre
    of length 1, times sqrt(d). length: of all points, in the end. points: of each cluster. The data are those of one
    seed; each repetition draws the noise again.
    """

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, d: Count, agreeing: Annotated[NotNegative, at_most(1)], spread: NotNegative, length: Positive,
                 points: Count, ms: Several[Count], pairs: Count, repeats: Count):
        self.d, self.agreeing, self.spread, self.length, self.points = d, agreeing, spread, length, points
        self.values, self.pairs, self.repeats = list(ms), pairs, repeats

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """`mse_of_repeats` has a number for each repetition, `zero` and `mean` are the controls: an estimate
        of 0, and the mean of SM."""
        phi, (xs, ys) = mechanism.map("softmax"), self.points_of(seed)
        params, (x, y) = phi.fit(Statistics.of(xs, ys)), self.random_pairs(xs, ys, seed)
        weight = (2 * (x * y).sum(-1)).exp()                                     # SM^2
        mse = (squared_errors(phi, replace(mechanism, m=m), x, y, params, self.repeats, 1, seed) * weight).mean(-1)
        closed = (log_relative_mse(phi, x, y, params, m).exp() * weight).mean()
        return {"mse": mse.mean().item(), "mse_of_repeats": mse.tolist(), "closed_form": closed.item(),
                "columns": phi.width(m), "zero": weight.mean().item(), "mean": weight.sqrt().var(correction=0).item()}

    def centres(self, seed: int) -> tuple[Tensor, Tensor]:
        """Of queries and keys, (2, d) each, of length 1, with the signs as asked."""
        g = generator(seed, 0)
        v = torch.nn.functional.normalize(torch.randn(2, 1, self.d, generator=g, dtype=torch.float64), dim=-1)
        turned = (v.unsqueeze(1) @ haar((2, SIDES, self.d, self.d), g)).squeeze(-2)          # (sides, 2, d)
        signs = torch.where(torch.rand(self.d, generator=g, dtype=torch.float64) < 0.5, -1.0, 1.0)
        same = torch.randperm(self.d, generator=g) < round(self.agreeing * self.d)
        queries, keys = turned.abs()
        return queries * signs, keys * torch.where(same, signs, -signs)

    def points_of(self, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys, (2 points, d) each, of the length asked for."""
        g = generator(seed, 1)
        sides = (torch.cat([self.around(centre, g) for centre in centres]) for centres in self.centres(seed))
        x, y = (self.length * torch.nn.functional.normalize(side, dim=-1) for side in sides)
        return x, y

    def around(self, centre: Tensor, g: torch.Generator) -> Tensor:
        return centre + self.spread / self.d**0.5 * torch.randn(self.points, self.d, generator=g, dtype=torch.float64)

    def random_pairs(self, xs: Tensor, ys: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        i, j = torch.randint(len(xs), (2, self.pairs), generator=generator(seed, 2))
        return xs[i], ys[j]

    def losses(self, seed: int) -> list[float]:
        """The least |M r + M^-T t|^2 of a real diagonal M at the centres, for the pairs of clusters in turn (HRF (21)):
        the sum of 4 r_l t_l over coordinates in which the signs agree, centres as long as the points."""
        queries, keys = (self.length * c for c in self.centres(seed))
        return (4 * (queries[:, None] * keys).clamp(min=0)).sum(-1).flatten().tolist()

    def summary(self, records: list[dict]) -> str:
        shown = (f"{r['mse']:.3g} (m = {r['m']}, closed form {r['closed_form']:.3g})" for r in records)
        return f"MSE {', '.join(shown)}; of zero {records[-1]['zero']:.3g}, of the mean {records[-1]['mean']:.3g}"
