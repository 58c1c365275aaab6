"""The map of least error for each head, chosen among several by their closed forms.

Legend as in base.py. Positive features are best where x + y is small, trigonometric ones where x - y is, and dense ones
where s = x + y varies in few directions: which it is differs from head to head of one layer.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import ONE, Bound, FeatureMap, Features, align
from crt_exp.features.dense import LARGEST_D, SDERF
from crt_exp.features.exponential import GERF, OPRF
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.nested import leaves, mapped
from crt_exp.samplers.noise import Noise, precise, transforming

VECTORS = 96  # of each side, all pairs of which the closed forms are averaged over


class AutoParams(NamedTuple):
    choice: Tensor          # (..., 1, 1), the number of the map that is taken
    parts: tuple[Any, ...]  # the parameters of each map


@dataclass(frozen=True)
class AutoRF(FeatureMap):
    """For each batch entry, which in attention is a head, the map with the least mean log second moment.

    The mean is that of the closed form over pairs of the vectors that it is fitted to; each map has its own best
    parameters. It chooses among OPRF and SDERF (diagonal, and full up to d = 256) in antithetic pairs, and GERF with
    s = -1 (trigonometric features, reweighted); `positive`: without the last, which has negative features. All make
    M = 2m features of one noise, so a choice costs no columns; where heads of a layer differ, each map that some head
    chose is computed for all. Unbiased for every choice that the noise has no part in. Raises ValueError in `fit` for
    statistics that hold no vectors.
    """

    positive: bool = False
    until_fitted = "no choice of maps yet, so all its heads have antithetic positive features (A = 0)"

    @property
    def fitted(self) -> bool:
        return True

    @property
    def on_vectors(self) -> bool:
        return True

    @property
    def one_map(self) -> bool:
        return False

    def width(self, m: int) -> int:
        return 2 * m

    def parts(self, d: int) -> dict[str, FeatureMap]:
        """What there is to choose from for d dimensions, by name; the first is that of before a fit."""
        found = {"oprf": OPRF(self.kernel, antithetic=True),
                 "diagonal sderf": SDERF(self.kernel, antithetic=True, diagonal=True)}
        if d <= LARGEST_D:
            found["sderf"] = SDERF(self.kernel, antithetic=True)
        return found if self.positive else found | {"gerf": GERF(self.kernel, s=-1)}

    # ---- the choice

    def unfitted(self, d: int) -> AutoParams:
        zeros = torch.zeros(d, dtype=torch.float64)
        moments = Moments.known(mean=zeros, mean_sq=zeros, second=zeros.diag())
        parts = tuple(phi.fit(Statistics(moments, moments)) for phi in self.parts(d).values())
        return AutoParams(torch.zeros(1, 1, dtype=torch.float64), parts)

    def fit(self, stats: Statistics) -> AutoParams:
        (batch, xs), (_, ys) = stats.x.sets(), stats.y.sets()
        found = [self._chosen(x.double(), y.double()) for x, y in zip(xs, ys, strict=True)]
        columns = zip(*map(leaves, found), strict=True)
        stacked = iter([torch.stack(t).reshape(*batch, *t[0].shape) for t in columns])
        return mapped(lambda _: next(stacked), found[0])

    def _chosen(self, x: Tensor, y: Tensor) -> AutoParams:
        """Of one set of queries (L, d) and one of keys (S, d)."""
        maps, stats = self.parts(x.shape[-1]).values(), Statistics.of(x, y)
        params = tuple(phi.fit(stats) for phi in maps)
        x, y = _spread(x)[:, None], _spread(y)[None]
        moments = [phi.log_relative_second_moment(x, y, p).mean() for phi, p in zip(maps, params)]
        return AutoParams(torch.stack(moments).argmin().double().view(1, 1), params)

    def names(self, params: AutoParams) -> list[str]:
        """What each batch entry chose, in order."""
        d = params.parts[1].root.shape[-1]
        known = list(self.parts(d))
        return [known[int(i)] for i in params.choice.flatten()]

    # ---- features

    def phi_q(self, x, noise, params) -> Features:
        return self.bind(precise(noise, x.dtype), params).phi_q(x)

    def phi_k(self, y, noise, params) -> Features:
        return self.bind(precise(noise, y.dtype), params).phi_k(y)

    def bind(self, noise: Noise, params: AutoParams) -> Bound:
        parts = list(self.parts(noise.d).values())
        bound = {i: parts[i].bind(noise, params.parts[i]) for i in _used(params.choice, len(parts))}
        return Bound(lambda x: _selected({i: b.phi_q(x) for i, b in bound.items()}, params.choice),
                     lambda y: _selected({i: b.phi_k(y) for i, b in bound.items()}, params.choice))

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        choice, parts = align(params.choice, x, y)[..., 0], self.parts(x.shape[-1]).values()
        moments = [phi.log_relative_second_moment(x, y, p) for phi, p in zip(parts, params.parts)]
        return sum(torch.where(choice == i, moment, 0.0) for i, moment in enumerate(moments))


def _used(choice: Tensor, count: int) -> list[int]:
    """The maps that some entry chose; all of them where numbers are not to be looked at."""
    if torch.compiler.is_compiling() or transforming():
        return list(range(count))
    return choice.long().unique().tolist()


def _selected(features: dict[int, Features], choice: Tensor) -> Features:
    """Of each batch entry those of its map, all of one width."""
    if len(features) == 1:
        return next(iter(features.values()))
    log = sum(torch.where(choice == i, f.log_scale, 0.0) for i, f in features.items())
    if all(f.value is ONE for f in features.values()):
        return Features(ONE, log)
    return Features(sum(torch.where(choice == i, f.value.to(log), 0.0) for i, f in features.items()), log)


def _spread(x: Tensor) -> Tensor:
    """At most VECTORS rows, evenly spread."""
    count = len(x)
    return x if count <= VECTORS else x[torch.arange(VECTORS, device=x.device) * count // VECTORS]
