"""What `make hadamard` measures: structured projections, after the report of Adda and Allen (2021).

Their open question is k = 3 blocks. Error of attention, bias of the kernel, and time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from crt_exp import drawing, samplers
from crt_exp.attention import DenominatorCount, attention, exact_attention
from crt_exp.features import FeatureMap, PosRF, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.projections import Projections
from crt_exp.times import Call, in_turns, milliseconds

MAPS = ("trig", "pos", "oprf")      # they stand for the exponential maps; discrete ones need exactly Gaussian rows
WITHOUT = dict.fromkeys(("sobol", "halton", "stratified"), "they place points, the report compares matrices")
BLOCKS = (1, 2, 3)
MS, L, D, SEED = (16, 32, 64, 128, 256, 512), 1024, 16, 0
SCALES = (0.25, 0.5, 0.75, 1.0)     # the source's is 1, where zeros are nearer to attention than its arms are
LENGTHS, TIMED_M = (256, 1024, 4096, 16384), 300
PROCESSES, ROUNDS = 5, 3            # of attention that is timed; rounds of each process
EXACT_UP_TO = 4096                  # exact attention is timed on no more tokens
TIMED = ("trig", "pos")             # the source's Figures 3 and 4
BIAS_D = (16, 64)


def kinds(sampler: str) -> dict[str, Callable]:
    """What stands for a sampler: itself, or Hadamard matrices with 1, 2 and 3 blocks."""
    made = Mechanism.of(features="pos", sampler=sampler, m=1).sampler
    if sampler != "hadamard":
        return {sampler: made}
    return {f"hadamard k={k}": partial(made, blocks=k) for k in BLOCKS}


KINDS = {kind: made for sampler in drawing.samplers(WITHOUT) for kind, made in kinds(sampler).items()}


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings "<map>, scale <s>" (metric mse, x: m, units: samples), "bias, d = <d>" and "time, <map>" (x: tokens)."""
    cells, samples = Cells(name, sources, keep), size["samples"]
    keys = {place: {"scale": place[1], "features": place[0], "kind": place[2], "samples": samples}
            for place in product(MAPS, SCALES, KINDS)}
    scaled = {scale: {"scale": scale, "samples": samples} for scale in SCALES}
    cells.fill([*keys.values()], errors, f"{name}: MSE").fill([*scaled.values()], controls, f"{name}: controls")
    for (features, scale, kind), key in keys.items():
        for m, sample in product(range(len(MS)), range(samples)):
            value = cells[key][m][sample]
            yield cells.draw(key, f"{features}, scale {scale:g}", kind, "mse", value, sample, MS[m])
    for (scale, key), features, m in product(scaled.items(), MAPS, MS):
        for arm, values in cells[key].items():
            for sample, mse in enumerate(values):
                yield cells.draw(key, f"{features}, scale {scale:g}", arm, "mse", mse, sample, m)
    yield from biases(cells, name)
    yield from times(cells, name)


def biases(cells: Cells, name: str) -> Iterator[Draw]:
    keys = {(kind, d): {"kind": kind, "d": d} for kind in KINDS for d in BIAS_D}
    cells.fill([*keys.values()], bias, f"{name}: bias")
    for (kind, d), key in keys.items():
        for metric, value in zip(("at_unit", "at_unit_error", "at_spread", "at_spread_error"), cells[key]):
            yield cells.draw(key, f"bias, d = {d}", kind, metric, value)


def times(cells: Cells, name: str) -> Iterator[Draw]:
    keys = {(length, process): {"length": length, "rounds": ROUNDS, "process": process}
            for process in range(PROCESSES) for length in LENGTHS}
    cells.fill([*keys.values()], attention_times, f"{name}: times", apart=True)
    for (length, process), key in keys.items():
        for arm, seconds in cells[key].items():
            for features, kind in [arm.split(", ")] if ", " in arm else [(features, arm) for features in TIMED]:
                ms = 1000 * float(np.exp(np.mean(np.log(seconds))))   # the rounds of a process are not independent
                yield cells.draw(key, f"time, {features}", kind, "ms", ms, process, length)


def errors(scale: float, features: str, kind: str, samples: int) -> list[list[float]]:
    """MSE for each m and sample; the samples are the same for all maps, kinds and m."""
    task, phi = Projections(L, D, MS, samples, scale), Mechanism.of(features=features).map("softmax")
    return [task.errors(phi, KINDS[kind], m, SEED) for m in MS]


def controls(scale: float, samples: int) -> dict[str, list[float]]:
    return Projections(L, D, MS, samples, scale).controls(SEED)


def bias(kind: str, d: int) -> list[float]:
    """Mean estimate over exact kernel and its standard error, PosRF, at x = y = e_1 and at a spread x = y
    of the same length."""
    x = torch.zeros(2, d, dtype=torch.float64)
    x[0, 0], x[1] = 1, d**-0.5
    generator = torch.Generator().manual_seed(0)
    measured = samplers.measured_bias(PosRF(), KINDS[kind], x, x, draws=20_000, generator=generator)
    return [measured.ratio[0].item(), measured.error[0].item(), measured.ratio[1].item(), measured.error[1].item()]


def attention_times(length: int, rounds: int, process: int = 0) -> dict[str, list[float]]:
    """Seconds of attention, forward, of each map and kind, "trig, orthogonal", and "exact", in interleaved rounds.

    A new draw in each round, itself not counted. Denominators of trig that are not positive are no matter of time.
    """
    x, y, v = Projections(length, D, [TIMED_M], 1).tensors(SEED, 0)
    g = torch.Generator().manual_seed(SEED)
    arms = {f"{f}, {kind}": (Mechanism.of(features=f).map(), sampler) for f in TIMED for kind, sampler in KINDS.items()}

    def drawn(phi: FeatureMap, sampler: Callable[..., Any]) -> Call:
        noise, params = sampler(TIMED_M, D, g), phi.fit(Statistics.of(x[0, 0], y[0, 0]))
        return partial(attention, x, y, v, phi, noise, params, counter=DenominatorCount())

    draws = {name: partial(drawn, *arm) for name, arm in arms.items()}
    if length <= EXACT_UP_TO:
        draws["exact"] = lambda: partial(exact_attention, x, y, v)
    with torch.no_grad():
        times = in_turns(draws, rounds, lambda draw: milliseconds(draw()))
    return {name: [ms / 1e3 for ms in each] for name, each in times.items()}
