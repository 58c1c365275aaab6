"""Errors of softmax-kernel estimates: measured, in closed form, and tasks at angles, on tables and in clusters.

Source: Hybrid Random Features (HRF). Notation: n pairs x, y (n, d) float64; SM(x, y) = exp(x.y). The relative error
of an estimate is estimate / SM - 1, which does not overflow.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from crt_exp.data.tabular import file_of, load
from crt_exp.features import FeatureMap, Statistics
from crt_exp.features.base import Params
from crt_exp.options import Count, NotNegative, Positive, Several, checked
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.noise import Nested
from crt_exp.samplers.bias import bias_record, bias_sentence, estimate_ratios
from crt_exp.samplers.blocks import haar
from crt_exp.measure.base import Measurement, Series, check_estimates
from crt_exp.tasks.uci import scaler

AT_ONCE = 2**24     # feature values held for a block of random projections
SIDES = 2           # clusters of queries, and of keys


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))


def drawn(phi: FeatureMap, mechanism: Mechanism, m: int, d: int, g: torch.Generator, batch: tuple[int, ...]) -> Nested:
    """Random projections for the map, from the sampler of the mechanism."""
    return phi.noise(m, lambda p: mechanism.sampler(p.m, d, g, batch=batch))


def drawn_ratios(phi: FeatureMap, mechanism: Mechanism, m: int, x: Tensor, y: Tensor, params: Params, draws: int,
                 g: torch.Generator) -> Tensor:
    """Estimate / SM for `draws` samples: (draws, n), or (draws, *heads, n) of x and y (1, *heads, n, d)."""
    bias = torch.exp(phi.log_kernel(x, y) - (x * y).sum(-1))  # 1 but for SMREG
    block, ratios = max(1, AT_ONCE // (x[..., 0].numel() * phi.width(m))), []
    for start in range(0, draws, block):
        batch = (min(block, draws - start), *[1] * max(0, x.ndim - 3))
        noise = drawn(phi, mechanism, m, x.shape[-1], g, batch)
        ratios.append(bias * estimate_ratios(phi, x, y, noise, params))
    return torch.cat(ratios)


def squared_errors(phi: FeatureMap, mechanism: Mechanism, x: Tensor, y: Tensor, params: Params, groups: int,
                   draws: int, seed: int) -> Tensor:
    """Mean squared relative errors over `draws` samples, for each of `groups` independent groups: (groups, n).

    Maps with equal numbers of projections share them for a given seed.
    """
    ratios = drawn_ratios(phi, mechanism, mechanism.m, x, y, params, groups * draws, generator(seed))
    return (ratios - 1).square().unflatten(0, (groups, draws)).mean(1)


def log_relative_mse(phi: FeatureMap, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
    """log E (estimate / SM - 1)^2 for m iid projections and each pair, in closed form; includes the bias of SMREG."""
    logits = (x * y).sum(-1)
    log_bias = phi.log_kernel(x, y) - logits  # 0 but for SMREG
    variance = phi.log_mse(x, y, params, m) - 2 * logits
    return torch.logaddexp(variance, 2 * torch.expm1(log_bias).abs().log())


def mse_record(phi: FeatureMap, mechanism: Mechanism, x: Tensor, y: Tensor, params: Params, groups: int, draws: int,
               seed: int) -> tuple[dict[str, float], list[float]]:
    """E (estimate - SM)^2 over pairs, measured and for iid projections in closed form; and of each group."""
    weight = (2 * (x * y).sum(-1)).exp()                                         # SM^2
    mse = (squared_errors(phi, mechanism, x, y, params, groups, draws, seed) * weight).mean(-1)
    closed = log_relative_mse(phi, x, y, params, mechanism.m).exp() * weight
    return {"mse": mse.mean().item(), "closed_form": closed.mean().item()}, mse.tolist()


# ---- pairs of vectors


def at_angles(theta: Tensor, r: float, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """x and y (n, d) of length r at angles theta (n,), each pair in a random plane."""
    u, v = torch.randn(2, len(theta), d, generator=g, dtype=torch.float64)
    u = F.normalize(u, dim=-1)
    v = F.normalize(v - (v * u).sum(-1, keepdim=True) * u, dim=-1)
    return r * u, r * (theta.cos()[:, None] * u + theta.sin()[:, None] * v)


def angles_of(n: int) -> Tensor:
    """n angles from 0 to pi, both included."""
    return torch.linspace(0.0, math.pi, n, dtype=torch.float64)


# ---- by angle


@checked("task")
class Pointwise(Series):
    """task=pointwise: root mean squared relative error at each angle, and the largest (HRF 4.1, Figures 2 and 5).

    One record per length. Parameters are fitted to all pairs of a length. `groups` are independent, for intervals; the
    closed form is for iid projections.
    """

    metric, lower_is_better, over = "largest_error", True, "length"

    def __init__(self, d: Annotated[int, Field(ge=2)], lengths: Several[Positive], angles: Annotated[int, Field(ge=2)],
                 groups: Count, draws: Count):
        self.d, self.values, self.angles, self.groups, self.draws = d, list(lengths), angles, groups, draws

    def of(self, r: float, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """error, closed_form: one number per angle; largest_of_groups: one per group."""
        theta, phi = angles_of(self.angles), mechanism.map("softmax")
        x, y = at_angles(theta, r, self.d, generator(seed, 0))
        params = phi.fit(Statistics.of(x, y))
        squared = squared_errors(phi, mechanism, x, y, params, self.groups, self.draws, seed)
        error = squared.mean(0).sqrt()
        closed = (log_relative_mse(phi, x, y, params, mechanism.m) / 2).exp()
        return {"theta": theta.tolist(), "error": error.tolist(), "closed_form": closed.tolist(),
                "largest_error": error.max().item(), "largest_closed_form": closed.max().item(),
                "largest_of_groups": squared.amax(1).sqrt().tolist()}


# ---- on rows of tables


@checked("task")
class QMC(Measurement):
    """task=qmc: E (estimate - SM)^2, the mean over pairs of different rows of a table (HRF 4.1, Table 1).

    scaling: of the columns, as in task=uci; one factor then gives the rows the root mean squared length `length`.
    Parameters are fitted to all rows, on both sides. closed_form: for iid projections.
    """

    metric = "mse"

    def __init__(self, dataset: str, scaling: Literal["standard", "minmax", "none"], length: Positive,
                 pairs: Annotated[int, Field(ge=2)], groups: Count, draws: Count, data_dir: str | None = None):
        self.pairs, self.groups, self.draws = pairs, groups, draws
        self.file, table = file_of(dataset, data_dir), load(dataset, data_dir).encode("ordinal")
        rows = torch.from_numpy(scaler(table, scaling)(table)).double()
        self.data = length * rows / rows.square().sum(-1).mean().sqrt()          # (rows, d)

    def inputs(self) -> list[Path | None]:
        return [self.file]

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        phi, (x, y) = mechanism.map("softmax"), self.random_pairs(generator(seed, 0))
        params = phi.fit(Statistics.of(self.data, self.data))
        record, of_groups = mse_record(phi, mechanism, x, y, params, self.groups, self.draws, seed)
        yield {**record, "mse_of_groups": of_groups,
               **bias_record(phi, mechanism.sampler, self.data, self.data, params)}

    def random_pairs(self, g: torch.Generator) -> tuple[Tensor, Tensor]:
        """x and y (pairs, d): random pairs of different rows."""
        n = len(self.data)
        i = torch.randint(n, (self.pairs,), generator=g)
        return self.data[i], self.data[(i + torch.randint(1, n, (self.pairs,), generator=g)) % n]

    def summary(self, records: list[dict]) -> str:
        return f"{super().summary(records)}{bias_sentence(records[-1])}"


# ---- in clusters


@checked("task")
class Clusters(Series):
    """task=clusters: E (estimate - SM)^2 over random pairs, for each m and repetition (HRF H.3, Table 3).

    Two vectors, each rotated by two random orthogonal matrices, are the centres of two clusters of queries and two of
    keys. All points have one norm.

    agreeing: share of the coordinates in which centres of queries and keys have the same sign; at 0 a real diagonal M
    has no loss (HRF (21)) at the centres. spread: standard deviation of the points around a centre of length 1, times
    sqrt(d). length: of all points. points: per cluster. A seed fixes the data; projections differ between repetitions.
    """

    metric, lower_is_better, over = "mse", True, "m"

    def __init__(self, d: Count, agreeing: Annotated[NotNegative, Field(le=1)], spread: NotNegative, length: Positive,
                 points: Count, ms: Several[Count], pairs: Count, repeats: Count):
        self.d, self.agreeing, self.spread, self.length, self.points = d, agreeing, spread, length, points
        self.values, self.pairs, self.repeats = list(ms), pairs, repeats

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """`mse_of_repeats` has one number per repetition."""
        phi, (xs, ys) = mechanism.map("softmax"), self.points_of(seed)
        i, j = torch.randint(len(xs), (2, self.pairs), generator=generator(seed, 2))
        record, of_repeats = mse_record(phi, replace(mechanism, m=m), xs[i], ys[j], phi.fit(Statistics.of(xs, ys)),
                                        self.repeats, 1, seed)
        return {**record, "mse_of_repeats": of_repeats}

    def centres(self, seed: int) -> tuple[Tensor, Tensor]:
        """Centres of queries and keys, (2, d) each, of length 1."""
        g = generator(seed, 0)
        v = F.normalize(torch.randn(2, 1, self.d, generator=g, dtype=torch.float64), dim=-1)
        turned = (v.unsqueeze(1) @ haar((2, SIDES, self.d, self.d), g)).squeeze(-2)          # (sides, 2, d)
        signs = torch.where(torch.rand(self.d, generator=g, dtype=torch.float64) < 0.5, -1.0, 1.0)
        same = torch.randperm(self.d, generator=g) < round(self.agreeing * self.d)
        queries, keys = turned.abs()
        return queries * signs, keys * torch.where(same, signs, -signs)

    def points_of(self, seed: int) -> tuple[Tensor, Tensor]:
        """Queries and keys, (2 points, d) each, of length `length`."""
        g, size = generator(seed, 1), (self.points, self.d)
        sides = [torch.cat([centre + self.spread / self.d**0.5 * torch.randn(size, generator=g, dtype=torch.float64)
                            for centre in centres]) for centres in self.centres(seed)]
        x, y = (self.length * F.normalize(side, dim=-1) for side in sides)
        return x, y
