"""What `make fig1` and `make fig2` measure: log variances by the closed forms, over |x + y|^2 and over sigma.

Parameters are fitted to all pairs together (CRT 3.2.3), as one has them in use, or to each pair alone, an oracle.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from crt_exp import drawing
from crt_exp.features import OPRF, FeatureMap, PosRF, Statistics
from crt_exp.features.discrete import MIN_RATE, P_RANGE, DiscreteRF
from crt_exp.mechanism import Mechanism
from crt_exp.presets import OF_MAP
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.variance import REGIMES, log_variances, log_variances_of_set

WITHOUT = {"smreg": "it estimates a kernel of its own, and its bias is no part of its variance", **drawing.APART}
ZERO = "zero"
SIGMAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
MARGINS, SHIFTED = (0.1, 0.01, 0.001), ("pois_plus", "geom_plus")   # conf/features has 0.01
D, SEED = 64, 0
FITS = {"fitted to the set": log_variances_of_set, "fitted to each pair": log_variances}
RESIZED = {"mnist, bilinear": {"mode": "bilinear"}, "mnist, nearest": {"mode": "nearest-exact"},
           "mnist, area": {"mode": "area"}, "mnist, bicubic": {"mode": "bicubic"}}
RANGES = (0.5, 1.0, 1.25, 1.5, 1.75, 2.0)               # of the pixels of mnist, which the paper does not state
COMPARED = ("trig", "gerf", "pos", "oprf", "geom_plus")  # on images that were resized otherwise


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings "<regime>, <fit>": log_variance, mean over pairs (x: sigma), and of pairs (sigma 1); of mnist by the
    range of its pixels too (table ranges).

    A map whose rates are at the ends of their range for most pairs shows the clamp and not its variance: metric
    clamped, and no other."""
    cells, pairs = Cells(name, sources, keep), size["pairs"]
    maps = (*drawing.maps(WITHOUT), ZERO)
    arms = {arm: {"features": arm} for arm in maps} | {f"{arm} margin={margin}": {"features": arm, "margin": margin}
                                                       for arm, margin in product(SHIFTED, MARGINS)}
    keys = {(regime, fit, arm): {"regime": regime, "fit": fit, "pairs": pairs, **options}
            for regime, fit, (arm, options) in product(size["regimes"], FITS, arms.items())}
    keys |= {(regime, "fitted to the set", arm): {"regime": regime, "fit": "fitted to the set", "pairs": pairs,
                                                  "features": arm}
             for regime, arm in product(RESIZED if "mnist" in size["regimes"] else (), COMPARED)}
    cells.fill([*keys.values()], curve, name)
    for (regime, fit, arm), key in keys.items():
        result, setting = cells[key], f"{regime}, {fit}"
        if result["clamped"]:
            yield cells.draw(key, setting, arm, "clamped", 1)
            continue
        for sigma, mean in zip(SIGMAS, result["mean"]):
            yield cells.draw(key, setting, arm, "log_variance", mean, x=sigma)
        for pair, value in enumerate(result["pairs"]):
            yield cells.draw(key, setting, arm, "log_variance", round(value, 6), pair, 1.0, "pairs")
    if "mnist" in size["regimes"]:
        yield from of_ranges(cells, pairs)


def of_ranges(cells: Cells, pairs: int) -> Iterator[Draw]:
    keys = {arm: {"ranges": list(RANGES), "pairs": pairs, "features": arm} for arm in COMPARED}
    cells.fill([*keys.values()], by_range, "ranges of pixels", workers=1)
    for arm, key in keys.items():
        for upper, values in zip(RANGES, cells[key]):
            for pair, value in enumerate(values):
                yield cells.draw(key, "mnist, fitted to the set", arm, "log_variance", round(value, 4), pair, upper,
                                 "ranges")


def by_range(ranges: list[float], pairs: int, features: str) -> list[list[float]]:
    """For each range [0, upper] of pixels the log variance of each pair."""
    x, y = REGIMES["mnist"](pairs, D, torch.Generator().manual_seed(SEED))
    phi = Mechanism.of(features=features).map("gaussian")
    return [log_variances_of_set(phi, upper * x, upper * y).tolist() for upper in ranges]


def curve(regime: str, fit: str, pairs: int, features: str, margin: float | None = None) -> dict[str, Any]:
    """Over SIGMAS the mean over pairs; at the last one the value of each pair, and whether most are the clamp's."""
    x, y = REGIMES[regime.split(",")[0]](pairs, D, torch.Generator().manual_seed(SEED), **RESIZED.get(regime, {}))
    own = {} if margin is None else {f"{OF_MAP}margin": margin}
    phi = None if features == ZERO else Mechanism.of(features=features, **own).map("gaussian")
    values = [FITS[fit](phi, s * x, s * y) if phi else log_square(s * x, s * y) for s in SIGMAS]
    return {"mean": [value.mean().item() for value in values], "pairs": values[-1].tolist(),
            "clamped": fit == "fitted to each pair" and clamped(phi, x, y) > 0.5}


def log_square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the Gaussian kernel: the squared error of the estimate 0."""
    return -(x - y).square().sum(-1)


def clamped(phi: FeatureMap | None, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of pairs of which a rate is at the end of its range."""
    if not isinstance(phi, DiscreteRF):
        return 0.0
    x, y = x.unsqueeze(-2), y.unsqueeze(-2)
    rate = phi.fit(Statistics.of(x, y)).rate.flatten(1)
    return ((rate <= MIN_RATE) | (rate == P_RANGE[0]) | (rate == P_RANGE[1])).any(-1).double().mean().item()


def measure_gain(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """What `make fig1` measures: log variances less that of FAVOR+ at |x + y|^2 = 1 to 100, by the closed forms."""
    cells = Cells(name, sources, keep)
    keys = [{"d": d} for d in size["dimensions"]]
    cells.fill(keys, gains, name, workers=1)
    for key in keys:
        for arm, values in cells[key].items():
            for total, value in enumerate(values, 1):
                yield cells.draw(key, f"d = {key['d']}", arm, "gain", value, x=total)


def gains(d: int) -> dict[str, list[float]]:
    """log Var OPRF - log Var PosRF at |x + y|^2 = 1 to 100, and the log squared error of zero less the same."""
    x = torch.zeros(100, d, dtype=torch.float64)
    x[:, 0] = torch.arange(1, 101).double().sqrt() / 2
    pos = log_variances(PosRF(), x, x)
    return {"oprf": (log_variances(OPRF(), x, x) - pos).tolist(), "zero": (2 * x.square().sum(-1) - pos).tolist()}
