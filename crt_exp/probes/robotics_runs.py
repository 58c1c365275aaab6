"""Shares of the return of exact attention, and what it costs to rank the patches of an image."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.models.implicit_policy import column_sums
from crt_exp.probes import grid
from crt_exp.probes.cells import Draw
from crt_exp.probes.flops import TOKENS, columns, count
from crt_exp.probes.kernel import drawn, generator
from crt_exp.times import PROCESSOR, Watch, in_turns, threads

CALLS = 10  # of one turn of a time


def shares(draws: Sequence[Draw], metric: str, of: str, table: str) -> Iterator[Draw]:
    """A metric `of` each arm over its mean of exact attention, of the seeds that all arms of a setting have."""
    test = [draw for draw in draws if draw.table == table and draw.metric == of]
    for setting in dict.fromkeys(draw.setting for draw in test):
        here = [draw for draw in test if draw.setting == setting]
        seeds = [{draw.unit for draw in here if draw.arm == arm} for arm in {draw.arm for draw in here}]
        ours = [draw for draw in here if draw.unit in set.intersection(*seeds)]
        exact = [draw.value for draw in ours if draw.arm == "exact"]
        for draw in ours if exact else ():
            yield replace(draw, metric=metric, value=draw.value * len(exact) / sum(exact), seconds="")


def costs(arm: Mapping[str, Any], d: int, lengths: Sequence[int], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of ranking so many patches: `flops` of each arm, counted, and `ms` of every turn, one image at a time."""
    made = {name: grid.arm_of(each) for name, each in arm.items()}
    for (name, mechanism), length in product(made.items(), lengths):
        yield {"arm": name, "patches": length, "flops": flops(mechanism, d, length)}
    layers = {name: mechanism.layer(1, d, scaling=1.0).eval() for name, mechanism in made.items()}
    with threads(1):
        for length in lengths:
            spent = in_turns(layers, rounds, partial(milliseconds, d=d, length=length), warm=0)
            yield from ({"arm": name, "patches": length, "ms": spent[name]} for name in layers)


def on_sphere(rows: int, d: int) -> Tensor:
    return F.normalize(torch.randn(rows, d, generator=generator(rows, d)), dim=-1)


def milliseconds(layer: torch.nn.Module, d: int, length: int) -> float:
    """Of processor time, which other work on the machine hardly changes: of ranking the patches of one image, the mean
    of some calls."""
    q, k = on_sphere(2 * length, d).view(2, 1, 1, length, d)
    column_sums(layer, q, k)
    with Watch(PROCESSOR) as watch:
        for _ in range(CALLS):
            column_sums(layer, q, k)
    return watch.ms / CALLS


def flops(mechanism: Mechanism, d: int, length: int) -> int:
    """Of ranking the patches of one image from their queries and keys, counted as in task=flops: with features in time
    linear in the patches, what is done once for a noise left out; with exact attention by its matrix."""
    if not mechanism.estimates:
        return length**2 * (2 * d + 4) if mechanism.is_exact else 0  # products, exp, two sums, one division
    phi, x = mechanism.map(), on_sphere(2 * TOKENS, d)
    params = phi.fit(Statistics.of(x, x))
    bound = phi.bind(drawn(phi, mechanism, mechanism.m, d, generator(0), ()), params)
    ranked(bound, x)
    first, both = (count(lambda rows=rows: ranked(bound, rows)) for rows in (x[:TOKENS], x))
    return round((both - first) / TOKENS * length)


def ranked(bound: Any, x: Tensor) -> Tensor:
    """Column sums of normalised linear attention of x to itself."""
    f, g = columns(bound.phi_q(x)), columns(bound.phi_k(x))
    return g @ ((1 / (f @ g.sum(0))) @ f)
