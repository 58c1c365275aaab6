"""Positive features whose form is chosen for each head by the closed forms.

Legend as in base.py. OPRF is SDERF with one A, and SDERF with a diagonal A one with full matrices, so that each is a
value of the same parameters: heads that choose differently are still one map, with the engines of SDERF. Trigonometric
features are no candidate: the mean of |x - y|^2 over all pairs, |mean of x - mean of y|^2 more than the spreads of both
sides, is never below that of |s - h|^2, which is these spreads alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import FeatureMap
from crt_exp.features.dense import LARGEST_D, SDERF, Dense, SDERFParams, sizes_of_a
from crt_exp.features.exponential import OPRF, OPRFParams
from crt_exp.features.statistics import Statistics

VECTORS = 96  # of each side, over all pairs of which a candidate is judged


class AutoParams(NamedTuple):
    """Those of SDERF, all of them there, and the number of the candidate that they are of."""

    root: Tensor
    shift: Tensor
    balance: Tensor
    choice: Tensor  # (..., 1, 1)

    @property
    def A(self) -> Tensor:
        return sizes_of_a(self.root)


@dataclass(frozen=True)
class AutoRF(Dense):
    """For each batch entry, in attention for each head, the best of OPRF, SDERF(diagonal=True) and SDERF (d <= 256).

    The best has the least mean log second moment, in closed form over pairs of vectors. Each is judged on the second
    half of the vectors with the parameters of the first, which tells what full matrices make of too few vectors; what
    is taken is fitted to all. Unbiased for every choice that the noise has no part in. Raises ValueError in `fit` for
    statistics that hold no vectors.
    """

    antithetic: bool = True
    trainable = False
    on_vectors = True
    until_fitted = "no choice of maps yet, so it takes A = 0 (the features of FAVOR+, in pairs where it is antithetic)"

    @property
    def one_map(self) -> bool:
        return self.kernel != "softmax"

    def candidates(self, d: int) -> dict[str, FeatureMap]:
        """By name, for d dimensions."""
        options = {"kernel": self.kernel, "antithetic": self.antithetic}
        maps = {"oprf": OPRF(**options), "diagonal sderf": SDERF(**options, diagonal=True)}
        return maps | {"sderf": SDERF(**options)} if d <= LARGEST_D else maps

    def unfitted(self, d: int) -> AutoParams:
        one = OPRFParams(torch.zeros(1, 1, dtype=torch.float64))
        return AutoParams(*as_dense(one, d), torch.zeros(1, 1, dtype=torch.float64))

    def fit(self, stats: Statistics) -> AutoParams:
        (batch, xs), (_, ys) = stats.x.sets(), stats.y.sets()
        fitted = [self._chosen(x.double(), y.double()) for x, y in zip(xs, ys, strict=True)]
        return AutoParams(*(torch.stack(t).reshape(*batch, *t[0].shape) for t in zip(*fitted)))

    def _chosen(self, x: Tensor, y: Tensor) -> AutoParams:
        """Of one set of queries (L, d) and one of keys (S, d)."""
        candidates = list(self.candidates(x.shape[-1]).values())
        (x_half, x_judges), (y_half, y_judges) = _halves(x), _halves(y)
        half = Statistics.of(x_half, y_half)
        moments = [phi.log_relative_second_moment(x_judges[:, None], y_judges[None], phi.fit(half)).mean()
                   for phi in candidates]
        choice = torch.stack(moments).argmin()
        params = candidates[int(choice)].fit(Statistics.of(x, y))
        return AutoParams(*as_dense(params, x.shape[-1]), choice.double().view(1, 1))

    def names(self, params: AutoParams) -> list[str]:
        """What each batch entry chose, in order."""
        known = list(self.candidates(params.root.shape[-1]))
        return [known[int(i)] for i in params.choice.flatten()]


def as_dense(params: OPRFParams | SDERFParams, d: int) -> SDERFParams:
    """The same features with every parameter there: full matrices (d, d) where d allows them, else diagonals (1, d)."""
    if isinstance(params, OPRFParams):
        params = SDERFParams(torch.sqrt(1 - 4 * params.A).expand(1, d), None, None)
    shift = params.root.new_zeros(1, d) if params.shift is None else params.shift
    G = params.root.new_ones(1, d) if params.balance is None else params.balance
    return SDERFParams(_full(params.root), shift, _full(G))


def _full(M: Tensor) -> Tensor:
    return M if M.shape[-2] > 1 or M.shape[-1] > LARGEST_D else M[0].diag()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of the rows, and of the second at most VECTORS, evenly spread; of one row, itself twice.

    Rows side by side may be the same one: a layer that saw few vectors samples some of them twice.
    """
    middle = -(-len(x) // 2)
    first, second = x[:middle], x[middle:] if len(x) > 1 else x
    places = torch.arange(min(len(second), VECTORS), device=x.device) * len(second) // min(len(second), VECTORS)
    return first, second[places]
