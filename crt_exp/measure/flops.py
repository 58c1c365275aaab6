"""FLOPs of features and attention, and errors at equal FLOPs (HRF Appendix L).

torch.utils.flop_counter counts two FLOPs per multiply-add of a matrix product. This module adds one per value of an
elementwise operation and one per term of a sum.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from crt_exp.attention.partials import together
from crt_exp.features import FeatureMap, Features, Statistics
from crt_exp.features.base import Params
from crt_exp.features.blocks import Blocks
from crt_exp.options import Count, Positive, Several, checked
from crt_exp.mechanism import Mechanism
from crt_exp.models.implicit_policy import column_sums
from crt_exp.measure.base import Measurement, Series
from crt_exp.measure.kernel import angles_of, at_angles, drawn, generator, log_relative_mse, squared_errors
from crt_exp.measure.times import PROCESSOR, Watch, in_turns, threads

aten = torch.ops.aten
ELEMENTWISE = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.exp, aten.log, aten.cos, aten.sin,
               aten.sqrt, aten.rsqrt, aten.pow, aten.square, aten.abs, aten.reciprocal, aten.where, aten.lt, aten.eq)
SUMS = (aten.sum, aten.mean)
TOKENS = 8          # the count of 2 * TOKENS minus that of TOKENS leaves out what is computed once
MOST = 2**20        # projections


@checked("task")
class Flops(Series):
    """task=flops: for each budget in FLOPs per token, the largest number of projections within it, and their error.

    The error is the root mean squared relative error over pairs of one length at angles from 0 to pi, as in
    task=pointwise. counted: "features" of a token, or its "attention", with the products of a query and a key with
    values of width d. If one projection exceeds the budget, m = 0 and there is no error.
    """

    metric, lower_is_better, over = "error", True, "budget"

    def __init__(self, counted: Literal["features", "attention"], budgets: Several[Positive],
                 d: Annotated[int, Field(ge=2)], length: Positive, angles: Annotated[int, Field(ge=2)], groups: Count,
                 draws: Count):
        self.counted, self.values, self.d, self.length = counted, list(budgets), d, length
        self.angles, self.groups, self.draws = angles, groups, draws

    def of(self, budget: float, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """m, columns, FLOPs and errors of the most projections within the budget."""
        phi = mechanism.map("softmax")
        x, y = at_angles(angles_of(self.angles), self.length, self.d, generator(seed, 0))
        params = phi.fit(Statistics.of(x, y))

        def cost(m: int) -> float:
            return flops(phi, replace(mechanism, m=m), params, self.d, self.counted)

        m = most_within(cost, budget)
        if not m:
            return {"m": 0, "columns": 0, "flops": cost(1), "error": None}
        squared = squared_errors(phi, replace(mechanism, m=m), x, y, params, self.groups, self.draws, seed).mean(-1)
        closed = log_relative_mse(phi, x, y, params, m).exp().mean().sqrt()
        return {"m": m, "columns": phi.width(m), "flops": cost(m), "error": squared.mean().sqrt().item(),
                "closed_form": closed.item(), "squared_error": squared.tolist()}


def flops(phi: FeatureMap, mechanism: Mechanism, params: Params, d: int, counted: str) -> int:
    """FLOPs per token. Attention: features of a query and a key, and their products with values and with ones."""
    bound = phi.bind(drawn(phi, mechanism, mechanism.m, d, generator(0), ()), params)

    def run(x: Tensor) -> Tensor:
        queries = columns(bound.phi_q(x))
        return queries if counted == "features" else queries @ (columns(bound.phi_k(x)).mT @ torch.ones(len(x), d + 1))
    return round(per_token(run, torch.randn(2 * TOKENS, d, generator=generator(1))))


def per_token(run: Callable[[Tensor], Any], x: Tensor) -> float:
    """FLOPs of run(x) per row of x (2 * TOKENS, d), without what is computed once."""
    run(x)  # the projections compute some tables once and store them
    return (count(partial(run, x)) - count(partial(run, x[:TOKENS]))) / TOKENS


def columns(f: Features | Blocks) -> Tensor:
    """The features, (L, M); those of hybrids are combined after the exponential, as in attention."""
    return together(f.parts, [part.base.exp() for part in f.parts]) if isinstance(f, Blocks) else f.exp()


@torch.no_grad()
def count(run: Callable[[], Any]) -> int:
    """FLOPs of a call."""
    of_numbers, of_terms = (lambda *shapes, out_shape=None, **_: prod(out_shape)), (lambda shape, *_, **__: prod(shape))
    formulas = dict.fromkeys(ELEMENTWISE, of_numbers) | dict.fromkeys(SUMS, of_terms)
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return counter.get_total_flops()


def most_within(cost: Callable[[int], float], budget: float) -> int:
    """The largest m that costs at most the budget; 0 if there is none."""
    high = 1
    while high <= MOST and cost(high) <= budget:
        high *= 2
    return bisect_right(range(1, high), budget, key=cost)


# ---- ranking the patches of an image by their attention (HRF 4.4)


@checked("task")
class RankingCost(Measurement):
    """task=ranking_cost: FLOPs and processor time (ms, one thread, each round) of ranking the patches of one image.

    Queries and keys lie on the unit sphere. Exact attention forms its matrix. Methods take turns.
    """

    metric = "flops"

    def __init__(self, d: Annotated[int, Field(ge=2)], lengths: Several[Count], rounds: Count,
                 methods: Several[str] | None = None):
        self.d, self.lengths, self.rounds = d, lengths, rounds
        self.mechanisms = {name: Mechanism.parse(name) for name in methods or ()}

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        mechanisms = self.mechanisms or {str(mechanism): mechanism}
        layers = {name: each.layer(1, self.d, scaling=1.0).eval() for name, each in mechanisms.items()}
        for length in self.lengths:
            with threads(1):
                spent = in_turns(layers, self.rounds, partial(ranking_ms, d=self.d, length=length), warm=0)
            for name, each in mechanisms.items():
                yield {"patches": length, "method": name, "ms": spent[name],
                       "flops": ranking_flops(each, self.d, length)}


def on_sphere(rows: int, d: int) -> Tensor:
    return F.normalize(torch.randn(rows, d, generator=generator(rows, d)), dim=-1)


def ranking_ms(layer: nn.Module, d: int, length: int, calls: int = 10) -> float:
    """Mean time of `calls` calls."""
    q, k = on_sphere(2 * length, d).view(2, 1, 1, length, d)
    column_sums(layer, q, k)
    with Watch(PROCESSOR) as watch:
        for _ in range(calls):
            column_sums(layer, q, k)
    return watch.ms / calls


def ranking_flops(mechanism: Mechanism, d: int, length: int) -> int:
    """FLOPs, linear in the patches with features; what is computed once is left out."""
    if not mechanism.estimates:
        return length**2 * (2 * d + 4) if mechanism.is_exact else 0  # products, exp, two sums, one division
    phi, x = mechanism.map(), on_sphere(2 * TOKENS, d)
    params = phi.fit(Statistics.of(x, x))
    bound = phi.bind(drawn(phi, mechanism, mechanism.m, d, generator(0), ()), params)

    def ranked(x: Tensor) -> Tensor:  # column sums of normalised linear attention of x to itself
        f, g = columns(bound.phi_q(x)), columns(bound.phi_k(x))
        return g @ ((1 / (f @ g.sum(0))) @ f)
    return round(per_token(ranked, x) * length)
