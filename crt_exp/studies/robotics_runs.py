"""What `make hrf-robotics` measures: returns of trained policies, and what it costs to rank the patches of an image."""

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
from crt_exp.studies import grid
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.flops import TOKENS, columns, count
from crt_exp.studies.pairs import drawn, generator
from crt_exp.times import PROCESSOR, Watch, in_turns, threads

ROUNDS, CALLS = 5, 10  # of a time: how often all take their turn, and calls of one turn


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of the grid `runs` of training (return, tables "validation" and "test"); share: a return on test over
    the mean return of exact attention. Of ranking the patches (table cost, setting "d = 4", x: patches): flops,
    counted, and ms, of turns, one image at a time."""
    made = [*grid.measure(name, sources, {"runs": size["runs"]}, keep)]
    yield from made
    yield from shares(made)
    cells = Cells(name, sources, keep)
    keys = {d: {"d": d, "lengths": list(size["lengths"]), "arms": [[arm, dict(options)] for arm, options in
                                                                 size["ranked"].items()]} for d in size["ds"]}
    cells.fill([*keys.values()], costs, f"{name}: costs", workers=1)
    for d, key in keys.items():
        for arm, metric, length, turn, value in cells[key]:
            yield cells.draw(key, f"d = {d}", arm, metric, value, turn, length, "cost")


def shares(draws: Sequence[Draw]) -> Iterator[Draw]:
    """Of the seeds that all arms of a setting have."""
    test = [draw for draw in draws if draw.table == "test" and draw.metric == "return"]
    for setting in dict.fromkeys(draw.setting for draw in test):
        here = [draw for draw in test if draw.setting == setting]
        seeds = [{draw.unit for draw in here if draw.arm == arm} for arm in {draw.arm for draw in here}]
        ours = [draw for draw in here if draw.unit in set.intersection(*seeds)]
        exact = [draw.value for draw in ours if draw.arm == "exact"]
        for draw in ours:
            yield replace(draw, metric="share", value=draw.value * len(exact) / sum(exact), seconds="")


def costs(d: int, lengths: list[int], arms: list) -> list[tuple]:
    """(arm, metric, patches, turn, value): flops of each, and ms of every turn."""
    made = [(arm, Mechanism.of(**options)) for arm, options in arms]
    rows = [(arm, "flops", length, "", flops(mechanism, d, length))
             for (arm, mechanism), length in product(made, lengths)]
    layers = {arm: mechanism.layer(1, d, scaling=1.0).eval() for arm, mechanism in made}
    with threads(1):
        for length in lengths:
            spent = in_turns(layers, ROUNDS, partial(milliseconds, d=d, length=length), warm=0)
            rows += [(arm, "ms", length, turn, spent[arm][turn]) for turn, arm in product(range(ROUNDS), layers)]
    return rows


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
