"""Errors of estimates of the softmax kernel, pair by pair: the one place that measures them, their closed form, and
the tasks that do so at angles, on rows of tables and in clusters (Hybrid Random Features, HRF).

Legend: n pairs x, y (n, d) float64; D draws of the noise; SM(x, y) = exp(x.y). Errors are relative to SM, so that
nothing overflows: that of an estimate is estimate / SM - 1.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from crt_exp.data.tabular import file_of, load
from crt_exp.features import FeatureMap, Statistics
from crt_exp.features.base import Params
from crt_exp.hints import Count, NotNegative, Positive, Several, at_least, at_most
from crt_exp.mechanism import Mechanism
from crt_exp.nested import Nested
from crt_exp.samplers.bias import bias_record, bias_sentence, estimate_ratios
from crt_exp.samplers.blocks import haar
from crt_exp.schema import checked
from crt_exp.measure.base import Measurement, Series, check_estimates
from crt_exp.tasks.uci import scaler

AT_ONCE = 2**24     # numbers of features that are held for a block of draws
SIDES = 2           # clusters of queries, and of keys


def generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, key)).encode()))


def drawn(phi: FeatureMap, mechanism: Mechanism, m: int, d: int, g: torch.Generator, batch: tuple[int, ...]) -> Nested:
    """Noise for the map, of the mechanism's sampler."""
    return phi.noise(m, lambda p: mechanism.sampler(p.m, d, g, batch=batch))


def drawn_ratios(phi: FeatureMap, mechanism: Mechanism, m: int, x: Tensor, y: Tensor, params: Params, draws: int,
                 g: torch.Generator) -> Tensor:
    """Estimates over SM of so many draws of the noise: (draws, n); of x and y (1, *heads, n, d): (draws, *heads, n)."""
    bias = torch.exp(phi.log_kernel(x, y) - (x * y).sum(-1))  # 1 but for SMREG
    block, ratios = max(1, AT_ONCE // (x[..., 0].numel() * phi.width(m))), []
    for start in range(0, draws, block):
        batch = (min(block, draws - start), *[1] * max(0, x.ndim - 3))
        noise = drawn(phi, mechanism, m, x.shape[-1], g, batch)
        ratios.append(bias * estimate_ratios(phi, x, y, noise, params))
    return torch.cat(ratios)


def squared_errors(phi: FeatureMap, mechanism: Mechanism, x: Tensor, y: Tensor, params: Params, groups: int,
                   draws: int, seed: int) -> Tensor:
    """Mean squared relative errors over `draws` draws, for each of `groups` groups of them: (groups, n).

    Groups are independent; one seed gives the same rows to all maps that take as many of them.
    """
    ratios = drawn_ratios(phi, mechanism, mechanism.m, x, y, params, groups * draws, generator(seed))
    return (ratios - 1).square().unflatten(0, (groups, draws)).mean(1)


def log_relative_mse(phi: FeatureMap, x: Tensor, y: Tensor, params: Params, m: int) -> Tensor:
    """log E (estimate / SM - 1)^2 with m iid projections, pair by pair, by the closed forms; of maps that estimate
    another kernel (SMREG) with the bias."""
    logits = (x * y).sum(-1)
    log_bias = phi.log_kernel(x, y) - logits  # 0 but for SMREG
    variance = phi.log_mse(x, y, params, m) - 2 * logits
    return torch.logaddexp(variance, 2 * torch.expm1(log_bias).abs().log())


def mse_record(phi: FeatureMap, mechanism: Mechanism, x: Tensor, y: Tensor, params: Params, groups: int, draws: int,
               seed: int) -> tuple[dict[str, float], list[float]]:
    """E (estimate - SM)^2 over pairs, by its closed form too, of an estimate of 0 and of the mean of SM; and that of
    each group of draws."""
    weight = (2 * (x * y).sum(-1)).exp()                                         # SM^2
    mse = (squared_errors(phi, mechanism, x, y, params, groups, draws, seed) * weight).mean(-1)
    closed = log_relative_mse(phi, x, y, params, mechanism.m).exp() * weight
    return {"mse": mse.mean().item(), "closed_form": closed.mean().item(), "columns": phi.width(mechanism.m),
            "zero": weight.mean().item(), "mean": weight.sqrt().var(correction=0).item()}, mse.tolist()


# ---- pairs of vectors


def at_angles(theta: Tensor, r: float, d: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """x and y (n, d) of length r at angles theta (n,), each pair in a random plane. Raises ValueError for d < 2."""
    if d < 2:
        raise ValueError(f"d = {d}: vectors at an angle need at least two dimensions")
    u, v = torch.randn(2, len(theta), d, generator=g, dtype=torch.float64)
    u = u / u.norm(dim=-1, keepdim=True)
    v = v - (v * u).sum(-1, keepdim=True) * u
    v = v / v.norm(dim=-1, keepdim=True)
    return r * u, r * (theta.cos()[:, None] * u + theta.sin()[:, None] * v)


def angles_of(n: int) -> Tensor:
    """n angles from 0 to pi, both included."""
    return torch.linspace(0.0, math.pi, n, dtype=torch.float64)


# ---- by angle


@checked("task")
class Pointwise(Series):
    """task=pointwise: the root of the mean squared relative error at each angle, and the largest of them (HRF 4.1,
    Figures 2 and 5).

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
        exact = (r**2 * theta.cos()).exp()
        return {"theta": theta.tolist(), "error": error.tolist(), "closed_form": closed.tolist(),
                "largest_error": error.max().item(), "largest_closed_form": closed.max().item(),
                "columns": phi.rank(mechanism.m), "largest_of_groups": squared.amax(1).sqrt().tolist(),
                "mean": float((exact.mean() / exact - 1).abs().max())}


# ---- on rows of tables


@checked("task")
class QMC(Measurement):
    """task=qmc: E (estimate - SM)^2, the mean over pairs of different rows of a table (HRF 4.1, Table 1).

    scaling: of the columns, over the whole table, as task=uci has it; then all rows are divided by one number, so that
    the root of their mean squared length is `length`. Controls: `zero`, an estimate of 0, and `mean`, the mean of SM
    over the pairs. Parameters are fitted to all rows, on both sides. closed_form: with iid rows.
    """

    metric = "mse"

    def __init__(self, dataset: str, scaling: Literal["standard", "minmax", "none"], length: Positive,
                 pairs: Annotated[int, at_least(2)], groups: Count, draws: Count, data_dir: str | None = None):
        self.name, self.pairs, self.groups, self.draws = dataset, pairs, groups, draws
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
        """x and y (pairs, d): different rows, each pair drawn at random."""
        n = len(self.data)
        i = torch.randint(n, (self.pairs,), generator=g)
        return self.data[i], self.data[(i + torch.randint(1, n, (self.pairs,), generator=g)) % n]

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (f"{self.name}: MSE {last['mse']:.3g} (closed form, iid: {last['closed_form']:.3g}), of zero "
                f"{last['zero']:.3g}, of the mean of the kernel {last['mean']:.3g}{bias_sentence(last)}")


# ---- in clusters


@checked("task")
class Clusters(Series):
    """task=clusters: E (estimate - SM)^2 over random pairs of a query and a key, for each m and repetition (HRF H.1 and
    H.3, Figure 6, Table 3).

    The paper's construction, where its text says it: two vectors, turned by two random orthogonal matrices each, are
    the centres of two clusters of queries and two of keys; signs of coordinates decide how well a real diagonal M can
    do; all points get a norm. Sizes, spreads and signs are options.

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
        """`mse_of_repeats` has a number for each repetition; `zero` and `mean` as in task=qmc."""
        phi, (xs, ys) = mechanism.map("softmax"), self.points_of(seed)
        i, j = torch.randint(len(xs), (2, self.pairs), generator=generator(seed, 2))
        record, of_repeats = mse_record(phi, replace(mechanism, m=m), xs[i], ys[j], phi.fit(Statistics.of(xs, ys)),
                                        self.repeats, 1, seed)
        return {**record, "mse_of_repeats": of_repeats}

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
        g, size = generator(seed, 1), (self.points, self.d)
        sides = [torch.cat([centre + self.spread / self.d**0.5 * torch.randn(size, generator=g, dtype=torch.float64)
                            for centre in centres]) for centres in self.centres(seed)]
        x, y = (self.length * torch.nn.functional.normalize(side, dim=-1) for side in sides)
        return x, y
