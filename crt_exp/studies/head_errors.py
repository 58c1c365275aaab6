"""What `make performers-fig4` measures: the error of attention against m, with every mechanism and sampler.

On heads of independent Gaussian queries and keys, as the paper's, and on heads that match positions, as trained ones
do. Errors are relative to that of uniform attention, the mean of V. Near-far attention and the window that it contains
have no projections: they stand at every m.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from crt_exp import drawing
from crt_exp.mechanism import Mechanism
from crt_exp.studies.approximation import Approximation
from crt_exp.studies.captured import Synthetic, relative_error
from crt_exp.studies.cells import Cells, Draw


class Heads(NamedTuple):
    """Where queries and keys come from; turn: as in `Synthetic`."""

    length: int
    turn: float | None


D, SEED = 16, 0
MS = (8, 16, 32, 64, 128, 256)
HEADS = {"Gaussian": Heads(4096, None), "matched": Heads(256, 0.3)}
SUMS = (1, 2, 4, 8, 16, 24)   # mean |x + y|^2; the paper says "appropriately normalized" and no more
EVERY = 8                     # of which all mechanisms and samplers are measured
WITHOUT = {"auto": drawing.APART["auto"]}
FEW = ("iid", "orthogonal")   # the samplers of hybrids, which have so many columns that all would take most of the time
FOLLOWED = tuple((features, sampler) for features in ("trig", "pos", "oprf") for sampler in FEW)  # at all SUMS
WHOLE = ("nearfar preset=cheap exact_until=0", "nearfar exact_until=0", "nearfar preset=quality exact_until=0",
         "window block=32 first=16")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metric mse, relative to uniform attention's, x: m, units: samples, at the largest m `judged` of them for maps
    that are followed and for the others; uniform and zero as arms."""
    cells, few, many = Cells(name, sources, keep), {"samples": size["samples"]}, {"samples": size["judged"]}
    keys = {place: {**named(place), "ms": list(ms_of(place[2]))} | few for place in places()}
    judged = {place: {**named(place), "ms": [MS[-1]]} | many for place in keys if place[2:] in FOLLOWED}
    others = {(heads, S, attention): {"heads": heads, "S": S, "attention": attention} | many
              for heads, S, attention in product(HEADS, SUMS, WHOLE)}
    cells.fill([*keys.values(), *judged.values()], errors, f"{name}: maps")
    cells.fill([*others.values()], whole_errors, f"{name}: near-far")
    for place, key in keys.items():
        arm = "{} x {}".format(*place[2:])
        for m, values in zip(ms_of(place[2]), cells[key]["mse"]):
            if m == MS[-1] and place in judged:
                key, values = judged[place], cells[judged[place]]["mse"][0]
            for sample, mse in enumerate(values):
                yield cells.draw(key, title(*place[:2]), arm, "mse", mse, sample, m)
    for (heads, S, attention), key in others.items():
        for m, sample in product(MS, range(many["samples"])):
            if m == MS[-1] or sample < few["samples"]:
                yield cells.draw(key, title(heads, S), attention, "mse", cells[key]["mse"][sample], sample, m)
        if attention == WHOLE[0]:
            for sample, error in enumerate(cells[key]["uniform"]):
                ms = MS if sample < few["samples"] else MS[-1:]
                yield cells.draw(key, title(heads, S), "uniform", "relative", error, sample)
                yield from (cells.draw(key, title(heads, S), "uniform", "mse", 1.0, sample, m) for m in ms)
                yield from (cells.draw(key, title(heads, S), "zero", "mse", error**-2, sample, m) for m in ms)


def named(place: tuple[str, int, str, str]) -> dict[str, Any]:
    return dict(zip(("heads", "S", "features", "sampler"), place))


def title(heads: str, S: int) -> str:
    return f"{heads} heads, mean |x + y|^2 = {S}"


def places() -> list[tuple[str, int, str, str]]:
    """Heads, mean |x + y|^2, features, sampler; those with the same queries and keys follow each other."""
    every = [(f, s) for f in drawing.maps(WITHOUT) for s in drawing.samplers() if goes(f, s)]
    return [(heads, S, *arm) for heads, S in product(HEADS, SUMS) for arm in (every if S == EVERY else FOLLOWED)]


def goes(features: str, sampler: str) -> bool:
    return sampler in FEW if features in drawing.HYBRIDS else drawing.go_together(features, sampler)


def ms_of(features: str) -> tuple[int, ...]:
    """A hybrid is measured at equal columns alone: at equal projections it has many times the columns."""
    return (MS[-1] // drawing.feature_map(features).width(1),) if features in drawing.HYBRIDS else MS


def errors(heads: str, S: int, features: str, sampler: str, ms: list[int], samples: int) -> dict[str, list]:
    """`mse` (m, samples): of the output, over that of uniform attention."""
    task = Approximation(ms, samples, rows=1, pairs=0, heads=1, d=D, scale=scale_of(S), depth=0,
                         length=HEADS[heads].length, turn=HEADS[heads].turn)
    mechanism = Mechanism.of(features=features, sampler=sampler)
    measured = [task.measure(mechanism.map(), mechanism, m, 0, SEED)[0] for m in ms]
    return {"mse": [(e["output_error"] / e["uniform_error"])[:, 0].square().tolist() for e in measured]}


@torch.no_grad()
def whole_errors(heads: str, S: int, attention: str, samples: int) -> dict[str, list[float]]:
    """`mse` of each sample, on the same queries, keys and values; `uniform`: its error relative to the exact output."""
    source = Synthetic(HEADS[heads].length, 1, D, scale_of(S), 0, HEADS[heads].turn)
    layer, uniform, mse = Mechanism.parse(attention).layer(1, D, scaling=1.0).eval(), [], []
    for sample in range(samples):
        given = source.layers(sample, SEED)[0]
        error = relative_error(layer(given.x, given.y, given.v), given.output).item()
        uniform.append(relative_error(given.uniform, given.output).item())
        mse.append((error / uniform[-1]) ** 2)
    return {"mse": mse, "uniform": uniform}


def scale_of(S: int) -> float:
    """The standard deviation of the entries of queries and keys."""
    return (S / (2 * D**0.5)) ** 0.5
