"""Errors of softmax-kernel estimates, measured and in closed form.

Errors by angle, on tables, in clusters, and at equal FLOPs. Source: Hybrid Random Features (HRF).

Notation: n pairs x, y (n, d) float64; SM(x, y) = exp(x.y). The relative error of an estimate is estimate / SM - 1,
which does not overflow.
"""

import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from crt_exp.attention.partials import weighted_features
from crt_exp.experiments.data.tabular import file_of, load
from crt_exp.experiments.measure import (
    Measurement,
    Record,
    Records,
    Series,
    TensorPair,
    check_estimates,
    seeded,
)
from crt_exp.experiments.tasks.base import task_class
from crt_exp.experiments.tasks.uci import scaler
from crt_exp.features import FeatureMap, Features, Statistics
from crt_exp.features.base import Params
from crt_exp.features.blocks import Blocks
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.bias import bias_record, bias_sentence, estimate_ratios
from crt_exp.samplers.blocks import haar
from crt_exp.validation import Count, NotNegative, Positive, Several

AT_ONCE = 2**24  # maximum feature values in memory at once
SIDES = 2  # clusters of queries, and of keys (task=clusters)
TOKENS = 8  # FLOPs of 2 * TOKENS minus those of TOKENS exclude one-time work
MOST = 2**20  # maximum number of projections
Two = Annotated[int, Field(ge=2)]
# names of torch's operations
ELEMENTWISE = """add sub rsub mul div neg exp log cos sin sqrt rsqrt pow square abs reciprocal where
    lt eq"""
SUMS = "sum mean"


def generator(*key: int) -> torch.Generator:
    name = "/".join(map(str, key))
    return seeded(zlib.crc32(name.encode()))


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


@dataclass(frozen=True)
class KernelEstimate:
    """Estimates of SM(x, y) for pairs x, y (n, d), by a mechanism.

    params: fitted parameters of the feature map.
    """

    mechanism: Mechanism
    x: Tensor
    y: Tensor
    params: Params

    @cached_property
    def phi(self) -> FeatureMap:
        return self.mechanism.map()

    @cached_property
    def logits(self) -> Tensor:
        return (self.x * self.y).sum(-1)

    @cached_property
    def log_bias(self) -> Tensor:
        """log E estimate / SM of each pair; 0 except for SMREG."""
        return self.phi.log_kernel(self.x, self.y) - self.logits

    def ratios(self, draws: int, g: torch.Generator) -> Tensor:
        """Return estimate / SM for `draws` samples of the projections, (draws, n)."""
        n, d = self.x.shape
        block = max(1, AT_ONCE // (n * self.phi.width(self.mechanism.m)))
        ratios = []
        for start in range(0, draws, block):
            noise = self.mechanism.noise(d, g, (min(block, draws - start),))
            ratios.append(estimate_ratios(self.phi, self.x, self.y, noise, self.params))
        return self.log_bias.exp() * torch.cat(ratios)

    def squared_errors(self, groups: int, draws: int, seed: int) -> Tensor:
        """Return mean squared relative errors (groups, n) over `draws` samples each.

        For a given seed, maps with equal numbers of projections share them.
        """
        ratios = self.ratios(groups * draws, generator(seed))
        errors = (ratios - 1).square()
        return errors.unflatten(0, (groups, draws)).mean(1)

    @cached_property
    def log_relative_mse(self) -> Tensor:
        """log E (estimate / SM - 1)^2 of each pair, in closed form for iid projections.

        Includes the bias of SMREG.
        """
        mse = self.phi.log_mse(self.x, self.y, self.params, self.mechanism.m)
        bias = torch.expm1(self.log_bias).abs()
        return torch.logaddexp(mse - 2 * self.logits, 2 * bias.log())

    def mse(self, groups: int, draws: int, seed: int) -> tuple[Record, list[float]]:
        """Return E (estimate - SM)^2 over pairs, and its value in each group.

        The first is measured, and for iid projections also in closed form.
        """
        weight = (2 * self.logits).exp()  # SM^2
        mse = (self.squared_errors(groups, draws, seed) * weight).mean(-1)
        closed = (self.log_relative_mse.exp() * weight).mean()
        record = {"mse": mse.mean().item(), "closed_form": closed.item()}
        return record, mse.tolist()


def fit_map(mechanism: Mechanism, x: Tensor, y: Tensor) -> Params:
    """Fit the mechanism's feature map to queries and keys (n, d)."""
    return mechanism.map().fit(Statistics.of(x, y))


def at_angles(theta: Tensor, r: float, d: int, g: torch.Generator) -> TensorPair:
    """Return x and y (n, d) of norm r at angles theta (n,), in random planes."""
    u, v = normal(g, 2, len(theta), d)
    u = F.normalize(u, dim=-1)
    along = (v * u).sum(-1, keepdim=True)
    v = F.normalize(v - along * u, dim=-1)
    theta = theta.unsqueeze(-1)
    return r * u, r * (theta.cos() * u + theta.sin() * v)


def estimate_at_angles(
    mechanism: Mechanism, angles: int, r: float, d: int, g: torch.Generator
) -> tuple[Tensor, KernelEstimate]:
    """Return angles from 0 to pi, both included, and estimates for a pair of norm r at each."""
    theta = torch.linspace(0.0, math.pi, angles, dtype=torch.float64)
    x, y = at_angles(theta, r, d, g)
    return theta, KernelEstimate(mechanism, x, y, fit_map(mechanism, x, y))


@task_class
class Pointwise(Series):
    """task=pointwise: relative RMSE at each angle, and the largest (HRF Figs. 2, 5).

    One record per length (HRF 4.1). Parameters are fitted to all pairs of a length. Groups are independent, for
    intervals. The closed form assumes iid projections.
    """

    metric = "largest_error"
    over = "length"

    d: Two
    lengths: Several[Positive]
    angles: Two
    groups: Count
    draws: Count

    def measure(self, r: float, mechanism: Mechanism, seed: int) -> Record:
        """Return `error` and `closed_form` by angle, and `largest_of_groups` by group."""
        g = generator(seed, 0)
        theta, estimate = estimate_at_angles(mechanism, self.angles, r, self.d, g)
        squared = estimate.squared_errors(self.groups, self.draws, seed)
        error = squared.mean(0).sqrt()
        closed = (estimate.log_relative_mse / 2).exp()
        return {
            "theta": theta.tolist(),
            "error": error.tolist(),
            "closed_form": closed.tolist(),
            "largest_error": error.max().item(),
            "largest_closed_form": closed.max().item(),
            "largest_of_groups": squared.amax(1).sqrt().tolist(),
        }


# ---- on rows of tables


@task_class
class QMC(Measurement):
    """task=qmc: E (estimate - SM)^2 over pairs of table rows (HRF 4.1, Table 1).

    Columns are scaled as in task=uci; one factor then gives the rows the root mean squared norm `length`. Parameters
    are fitted to all rows, as queries and keys. The closed form assumes iid projections.
    """

    metric = "mse"

    dataset: str
    scaling: Literal["standard", "minmax", "none"]
    length: Positive
    pairs: Two
    groups: Count
    draws: Count
    data_dir: str | None = None

    def __post_init__(self):
        self.file = file_of(self.dataset, self.data_dir)
        table = load(self.dataset, self.data_dir).encode()
        rows = torch.from_numpy(scaler(table, self.scaling)(table)).double()
        norm = rows.square().sum(-1).mean().sqrt()
        self.data = self.length * rows / norm  # (rows, d)

    def inputs(self) -> list[Path | None]:
        return [self.file]

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        check_estimates(mechanism)
        params = fit_map(mechanism, self.data, self.data)
        x, y = self.random_pairs(generator(seed, 0))
        estimate = KernelEstimate(mechanism, x, y, params)
        record, groups = estimate.mse(self.groups, self.draws, seed)
        bias = bias_record(estimate.phi, mechanism.sampler, self.data, self.data, params)
        yield {**record, "mse_of_groups": groups, **bias}

    def random_pairs(self, g: torch.Generator) -> TensorPair:
        """Return x and y (pairs, d): random pairs of different rows."""
        n = len(self.data)
        i = torch.randint(n, (self.pairs,), generator=g)
        distance = torch.randint(1, n, (self.pairs,), generator=g)
        return self.data[i], self.data[(i + distance) % n]

    def summary(self, records: list[dict]) -> str:
        return f"{super().summary(records)}{bias_sentence(records[-1])}"


@task_class
class Clusters(Series):
    """task=clusters: E (estimate - SM)^2 for clustered data (HRF H.3, Table 3).

    One record per m. Two random vectors, each rotated by two random orthogonal matrices, are the centres of two
    clusters of queries and two of keys. The seed fixes the data; projections differ between repetitions.

    Args:
        agreeing: Share of the coordinates in which centres of queries and keys have equal sign. At 0 a real diagonal M
            is optimal at the centres (HRF (21)).
        spread: Standard deviation of the points around a centre of norm 1, times sqrt(d).
        length: Norm of all points.
        points: Points of each cluster.
    """

    metric = "mse"
    over = "m"

    d: Count
    agreeing: Annotated[NotNegative, Field(le=1)]
    spread: NotNegative
    length: Positive
    points: Count
    ms: Several[Count]
    pairs: Count
    repeats: Count

    def measure(self, m: int, mechanism: Mechanism, seed: int) -> Record:
        """Return the mean MSE, and `mse_of_repeats` with one value per repetition."""
        g = generator(seed, 1)
        xs, ys = [self.points_near(centres, g) for centres in self.centres(seed)]
        g = generator(seed, 2)
        i, j = torch.randint(len(xs), (2, self.pairs), generator=g)
        params = fit_map(mechanism, xs, ys)
        estimate = KernelEstimate(replace(mechanism, m=m), xs[i], ys[j], params)
        record, repeats = estimate.mse(self.repeats, 1, seed)
        return {**record, "mse_of_repeats": repeats}

    def centres(self, seed: int) -> TensorPair:
        """Return centres of queries and keys, (2, d) each, of norm 1."""
        g = generator(seed, 0)
        v = F.normalize(normal(g, 2, 1, self.d), dim=-1)
        rotations = haar((2, SIDES, self.d, self.d), g)
        turned = (v.unsqueeze(1) @ rotations).squeeze(-2)  # (sides, 2, d)
        uniform = torch.rand(self.d, generator=g, dtype=torch.float64)
        signs = torch.where(uniform < 0.5, -1.0, 1.0)
        agreeing = round(self.agreeing * self.d)
        same = torch.randperm(self.d, generator=g) < agreeing
        queries, keys = turned.abs()
        return queries * signs, keys * torch.where(same, signs, -signs)

    def points_near(self, centres: Tensor, g: torch.Generator) -> Tensor:
        """Return points (2 points, d) of norm `length`."""
        sigma = self.spread / self.d**0.5
        points = [centre + sigma * normal(g, self.points, self.d) for centre in centres]
        return self.length * F.normalize(torch.cat(points), dim=-1)


# ---- at equal FLOPs (HRF Appendix L): 2 for a multiply-add, 1 for an elementwise value and for a term of a sum


@task_class
class Flops(Series):
    """task=flops: error of the most projections within a budget of FLOPs per token.

    The error is the relative RMSE over pairs of one norm at angles from 0 to pi, as in task=pointwise. If one
    projection exceeds the budget, m = 0 and the error is None.

    counted: "features" of a token, or "attention": features of a query and a key, and their products with values of
    width d.
    """

    metric = "error"
    over = "budget"

    counted: Literal["features", "attention"]
    budgets: Several[Positive]
    d: Two
    length: Positive
    angles: Two
    groups: Count
    draws: Count

    def measure(self, budget: float, mechanism: Mechanism, seed: int) -> Record:
        """Return m, columns, FLOPs and errors of the most projections within the budget."""
        g = generator(seed, 0)
        _, estimate = estimate_at_angles(mechanism, self.angles, self.length, self.d, g)

        def cost(m: int) -> int:
            return flops(replace(mechanism, m=m), estimate.params, self.d, self.counted)

        m = most_within(cost, budget)
        if not m:
            return {"m": 0, "columns": 0, "flops": cost(1), "error": None}
        estimate = replace(estimate, mechanism=replace(mechanism, m=m))
        squared = estimate.squared_errors(self.groups, self.draws, seed).mean(-1)
        return {
            "m": m,
            "columns": estimate.phi.width(m),
            "flops": cost(m),
            "error": squared.mean().sqrt().item(),
            "closed_form": estimate.log_relative_mse.exp().mean().sqrt().item(),
            "squared_error": squared.tolist(),
        }


def flops(mechanism: Mechanism, params: Params, d: int, counted: str) -> int:
    """Return FLOPs per token.

    "attention" counts the features of a query and a key, and their products with values and ones.
    """
    bound = bind_map(mechanism, params, d)

    def run(x: Tensor) -> Tensor:
        queries = columns(bound.phi_q(x))
        if counted == "features":
            return queries
        keys = columns(bound.phi_k(x))
        return queries @ (keys.mT @ torch.ones(len(x), d + 1))

    x = torch.randn(2 * TOKENS, d, generator=generator(1))
    return round(per_token(run, x))


def bind_map(mechanism: Mechanism, params: Params, d: int):
    """Return the mechanism's feature map with one sample of its projections."""
    noise = mechanism.noise(d, generator(0))
    return mechanism.map().bind(noise, params)


def per_token(run: Callable[[Tensor], Any], x: Tensor) -> float:
    """Return FLOPs of run(x) per row of x (2 * TOKENS, d), without one-time work."""
    run(x)  # warm-up: the projections cache some tables
    return (count(run, x) - count(run, x[:TOKENS])) / TOKENS


def columns(f: Features | Blocks) -> Tensor:
    """Return the features (L, M); those of hybrids are combined after the exponential."""
    if isinstance(f, Blocks):
        return weighted_features(f.parts, [part.base.exp() for part in f.parts])
    return f.exp()


@torch.no_grad()
def count(run: Callable[..., Any], *arguments: Tensor) -> int:
    """Return the FLOPs of a call."""
    formulas = {}
    for names, formula in ((ELEMENTWISE, output_size), (SUMS, input_size)):
        for name in names.split():
            formulas[getattr(torch.ops.aten, name)] = formula
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run(*arguments)
    return counter.get_total_flops()


def output_size(*shapes: Any, out_shape: Sequence[int], **options: Any) -> int:
    return prod(out_shape)


def input_size(shape: Sequence[int], *shapes: Any, **options: Any) -> int:
    return prod(shape)


def most_within(cost: Callable[[int], float], budget: float) -> int:
    """Return the largest m whose cost is within the budget; 0 if there is none."""
    high = 1
    while high <= MOST and cost(high) <= budget:
        high *= 2
    return bisect_right(range(1, high), budget, key=cost)


# ---- ranking the patches of an image by their attention (HRF 4.4)


@task_class
class RankingCost(Measurement):
    """task=ranking_cost: FLOPs of ranking the patches of an image.

    Queries and keys are on the unit sphere. Exact attention forms its matrix.
    """

    metric = "flops"

    d: Two
    lengths: Several[Count]
    methods: Several[str] | None = None

    def __post_init__(self):
        self.mechanisms = {name: Mechanism.parse(name) for name in self.methods or ()}

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        mechanisms = self.mechanisms or {str(mechanism): mechanism}
        for length in self.lengths:
            for name, method in mechanisms.items():
                flops = ranking_flops(method, self.d, length)
                yield {"patches": length, "method": name, "flops": flops}


def on_sphere(rows: int, d: int) -> Tensor:
    x = torch.randn(rows, d, generator=generator(rows, d))
    return F.normalize(x, dim=-1)


def ranking_flops(mechanism: Mechanism, d: int, length: int) -> int:
    """Return FLOPs, without one-time work; linear in the patches with features."""
    if mechanism.is_exact:
        return length**2 * (2 * d + 4)  # products, exp, two sums, one division
    if not mechanism.estimates:
        return 0
    x = on_sphere(2 * TOKENS, d)
    bound = bind_map(mechanism, fit_map(mechanism, x, x), d)

    def rank(x: Tensor) -> Tensor:  # column sums of normalised linear self-attention
        queries = columns(bound.phi_q(x))
        keys = columns(bound.phi_k(x))
        return keys @ ((1 / (queries @ keys.sum(0))) @ queries)

    return round(per_token(rank, x) * length)
