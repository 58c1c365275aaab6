"""make fig2: Figure 2 of Chefs' Random Tables, log variance over sigma in four regimes,
positive and other maps apart, beside the error of the estimate 0."""

import os

import numpy as np
import torch

from crt_exp.data import DataError
from crt_exp.features import FeatureMap, Statistics
from crt_exp.features.discrete import MIN_RATE, P_RANGE, DiscreteRF
from crt_exp.mechanism import OF_MAP, Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Verdict, independent, judged, won_by
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies.variance import REGIMES, log_variances, log_variances_of_set

WITHOUT = {"smreg": "it estimates a kernel of its own, and its bias is no part of its variance", **palette.APART}
MAPS = palette.maps(WITHOUT)
INDEFINITE = tuple(name for name in MAPS if not palette.is_positive(name))
POSITIVE = tuple(name for name in MAPS if palette.is_positive(name))
DASHED = {"trig": "--", "pois_plus": "--"}  # they lie on other curves in some regimes
ZERO, ZERO_LABEL = "zero", "zero (control)"  # the estimate 0, a line beside the maps
SIGMAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
MARGINS = (0.1, 0.01, 0.001)                # of the shifted maps; conf/features has 0.01
SHIFTED = ("pois_plus", "geom_plus")
PAIRS, D, SEED = 1000, 64, 0
FITS = {"set": log_variances_of_set, "pair": log_variances}
CALLED = {"set": "fitted to the set", "pair": "fitted to each pair, an oracle"}
STATEMENTS = (  # CRT 5.1: (better, baseline, regime, exponent) at sigma = 1, by mean log variance
    ("gerf", "trig", "normal", 80), ("gerf", "trig", "heterogen", 125), ("gerf", "trig", "mnist", 10),
    ("oprf", "pos", "normal", 75), ("oprf", "pos", "heterogen", 125), ("oprf", "pos", "mnist", 7),
    ("geom_plus", "pos", "normal", 75), ("geom_plus", "pos", "heterogen", 125), ("geom_plus", "pos", "mnist", 7))
Curves = dict[tuple[str, str, str], dict]   # fit, regime, map


def main(size: str) -> None:
    images = image_regime()
    regimes = ("normal", "sphere", "heterogen", images)
    keys = {(fit, r, n): {"fit": fit, "regime": r, "name": n} for fit in FITS for r in regimes for n in (*MAPS, ZERO)}
    margins = {(fit, r, n): {"fit": fit, "regime": r, "name": n, "margins": list(MARGINS)}
               for fit in FITS for r in regimes for n in SHIFTED}
    cells = Cells("fig2").fill(list(keys.values()), curve, "Figure 2")
    cells.fill(list(margins.values()), by_margin, "margins")
    curves = {place: cells[key] for place, key in keys.items()}
    write(curves, {place: cells[key] for place, key in margins.items()}, regimes, cells.seconds())


def write(curves: Curves, margins: dict[tuple[str, str, str], list[float]], regimes: tuple[str, ...],
          seconds: float) -> None:
    """The last regime is that of images."""
    images, verdicts = regimes[-1], judged(claims(curves, regimes[-1]))
    rows = [{"fit": fit, "regime": r, "mechanism": n, "sigma": s, "mean_log_variance": mean, "std_log_variance": std,
             "clamped": found["clamped"]}
            for (fit, r, n), found in curves.items() for s, mean, std in zip(SIGMAS, found["mean"], found["std"])]
    said = f"{where_zero_wins(curves, regimes)}\n\n{statements(curves, verdicts, images)}"
    parts = [said, resizing() if images == "mnist" else "", *(at_one(curves, regimes, fit) for fit in FITS),
             margin_table(margins, regimes)]
    path = write_report("fig2", "CRT Figure 2: log variance of the mechanisms", "\n".join(parts),
                        [*rows, *(v.row() for v in verdicts)], figure(curves, regimes), facts(images), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def image_regime() -> str:
    """mnist where its files are, else scikit-learn's digits."""
    try:
        REGIMES["mnist"](1, D, torch.Generator())
        return "mnist"
    except DataError:
        if "CRT_DATA" in os.environ and os.path.isdir(os.path.join(os.environ["CRT_DATA"], "mnist")):
            raise  # files that are there but unreadable
        return "digits"


def facts(images: str) -> str:
    return (f"Log variance of one projection, Gaussian kernel, d = {D}, mean and standard deviation over {PAIRS} "
            f"pairs (seed {SEED}), by the closed forms. Zero: the log squared error of the estimate 0, which is the "
            "kernel itself; m projections lower the variance of every map by log m, and not this. Parameters are "
            "fitted to all pairs together (CRT 3.2.3), as one has them in use, and beside that to each pair alone, "
            "which nobody has: an oracle. A rate that is 0 is "
            f"set to {MIN_RATE:g}: where that is so for most pairs, the variance is that of the clamp, which the table "
            f"says and the picture leaves out. Verdicts: Student over pairs, p by Holm over all. {image_facts(images)}"
            f"{palette.left_out(WITHOUT)}")


def image_facts(images: str) -> str:
    if images == "mnist":
        return "mnist: the 10,000 test images resized to 8 x 8 (bilinear, antialiased), pixels in [0, sigma]."
    return ("MNIST was not found (CRT_DATA/mnist), so scikit-learn's 1,797 digits of 8 x 8 stand in, pixels in "
            "[0, sigma]; the paper's statements on mnist are checked on them.")


def curve(fit: str, regime: str, name: str) -> dict:
    """Over SIGMAS: mean and standard deviation over pairs; at the last one the value of each pair, and whether most of
    them are what a clamp makes of a variance of 0."""
    x, y = REGIMES[regime](PAIRS, D, torch.Generator().manual_seed(SEED))
    phi = None if name == ZERO else Mechanism.of(features=name).map("gaussian")
    of_zero = lambda x, y: -(x - y).square().sum(-1)   # log of K^2
    found = [FITS[fit](phi, s * x, s * y) if phi else of_zero(s * x, s * y) for s in SIGMAS]
    return {"mean": [f.mean().item() for f in found], "std": [f.std().item() for f in found],
            "pairs": found[-1].tolist(), "clamped": fit == "pair" and clamped(phi, x, y) > 0.5}


def clamped(phi: FeatureMap | None, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of pairs of which a rate is at the end of its range."""
    if not isinstance(phi, DiscreteRF):
        return 0.0
    x, y = x.unsqueeze(-2), y.unsqueeze(-2)
    rate = phi.fit(Statistics.of(x, y)).rate.flatten(1)
    return ((rate <= MIN_RATE) | (rate == P_RANGE[0]) | (rate == P_RANGE[1])).any(-1).double().mean().item()


def by_margin(fit: str, regime: str, name: str, margins: list[float]) -> list[float]:
    """Mean log variance at sigma = 1 of a shifted map, for each margin."""
    x, y = REGIMES[regime](PAIRS, D, torch.Generator().manual_seed(SEED))
    maps = (Mechanism.of(features=name, **{f"{OF_MAP}margin": margin}).map("gaussian") for margin in margins)
    return [FITS[fit](phi, x, y).mean().item() for phi in maps]


# ---- what it concludes


def where_zero_wins(curves: Curves, regimes: tuple[str, ...]) -> str:
    """At sigma = 1, by the means of parameters that one has in use."""
    level = lambda name, r: curves["set", r, name]["mean"][-1]
    beaten = {r: [n for n in MAPS if level(n, r) > level(ZERO, r)] for r in regimes}
    return won_by("the estimate 0 beside one projection at sigma = 1, with parameters fitted to the set", beaten,
                  len(MAPS) * len(regimes))


def claims(curves: Curves, images: str) -> list[Claim]:
    made = []
    for better, base, regime, exponent in STATEMENTS:
        r = images if regime == "mnist" else regime
        for fit in FITS:
            gains = np.subtract(curves[fit, r, base]["pairs"], curves[fit, r, better]["pairs"])
            made.append(Claim(f"{r}, {CALLED[fit]}: the variance of {better} is more than e^{exponent} below that of "
                              f"{base}", independent(gains - exponent), "nats"))
    return made


def statements(curves: Curves, verdicts: list[Verdict], images: str) -> str:
    judged_as, rows = iter(verdicts), []
    for better, base, regime, exponent in STATEMENTS:
        r, cells = images if regime == "mnist" else regime, []
        for fit in FITS:
            gain = independent(np.subtract(curves[fit, r, base]["pairs"], curves[fit, r, better]["pairs"]))
            cells.append(f"e^({gain:.1f}), **{next(judged_as).word}**")
        rows.append([f"{better} below {base}, {r}", f"e^{exponent}", *cells])
    return ("The paper's statements at sigma = 1, difference of the mean log variances with its 95% interval:\n\n"
            + markdown(["statement", "paper: more than", *CALLED.values()], rows))


def resizing() -> str:
    """The gains on images depend on how they were made small, which the paper does not say."""
    variants = {"bilinear, antialiased (above)": {}, "bilinear": {"mode": "bilinear"},
                "nearest": {"mode": "nearest-exact"}, "area": {"mode": "area"}, "bicubic": {"mode": "bicubic"}}
    rows = []
    for label, options in variants.items():
        x, y = REGIMES["mnist"](PAIRS, D, torch.Generator().manual_seed(SEED), **options)
        mean = {n: log_variances_of_set(Mechanism.of(features=n).map("gaussian"), x, y).mean()
                for n in ("trig", "gerf", "pos", "oprf", "geom_plus")}
        gains = (mean[b] - mean[n] for n, b in (("gerf", "trig"), ("oprf", "pos"), ("geom_plus", "pos")))
        rows.append([label, f"{(x + y).square().sum(-1).mean():.1f}", *(f"e^{gain:.1f}" for gain in gains)])
    columns = ["resizing", "mean of \\|x + y\\|^2", "gerf below trig", "oprf below pos", "geom_plus below pos"]
    return ("The paper does not say how MNIST was resized, nor the range of its pixels before sigma; both decide the "
            "gains (pixels in [0, 1], sigma = 1, parameters fitted to the set):\n\n" + markdown(columns, rows))


def at_one(curves: Curves, regimes: tuple[str, ...], fit: str) -> str:
    rows = [[ZERO_LABEL if n == ZERO else n, *(shown(curves[fit, r, n]) for r in regimes)] for n in (*MAPS, ZERO)]
    return (f"## Mean log variance at sigma = 1, nats, parameters {CALLED[fit]} (± standard deviation over pairs)\n\n"
            + markdown(["mechanism", *regimes], rows))


def shown(found: dict) -> str:
    return "the clamp" if found["clamped"] else f"{found['mean'][-1]:.1f} ± {found['std'][-1]:.1f}"


def margin_table(found: dict[tuple[str, str, str], list[float]], regimes: tuple[str, ...]) -> str:
    rows = [[n, CALLED[fit], *(", ".join(f"{v:.1f}" for v in found[fit, r, n]) for r in regimes)]
            for n in SHIFTED for fit in FITS]
    return (f"## Shifted maps by their margin, {', '.join(map(str, MARGINS))} standard deviations: mean log variance "
            "at sigma = 1\n\n" + markdown(["mechanism", "parameters", *regimes], rows))


def figure(curves: Curves, regimes: tuple[str, ...]):
    """Lines: parameters of the set; dotted: of each pair."""
    fig, axes = new_figure(2, len(regimes), figsize=(16, 7), sharex=True)
    for row, names in zip(axes, (INDEFINITE, POSITIVE)):
        for ax, regime in zip(row, regimes):
            draw(ax, curves, regime, names)
    for ax, regime in zip(axes[0], regimes):
        ax.set_title(regime)
    for ax in axes[1]:
        ax.set_xlabel("sigma; dotted: fitted to each pair (oracle)")
    for row, title in zip(axes, ("indefinite", "positive")):
        row[0].set_ylabel(f"log variance ({title}), nats")
    fig.tight_layout(w_pad=4)
    return fig


def draw(ax, curves: Curves, regime: str, names: tuple[str, ...]) -> None:
    ends = []
    for name in names:
        of_set, of_pair = (curves[fit, regime, name] for fit in FITS)
        ax.plot(SIGMAS, of_set["mean"], color=palette.colour(name), lw=1.6, ls=DASHED.get(name, "-"),
                zorder=3 if name in DASHED else 2)
        if not of_pair["clamped"]:
            ax.plot(SIGMAS, of_pair["mean"], color=palette.colour(name), lw=1, ls=":")
        ends.append((name, SIGMAS[-1], of_set["mean"][-1], palette.colour(name)))
    zero = curves["set", regime, ZERO]["mean"]
    ax.plot(SIGMAS, zero, color=palette.CONTROL, lw=1.5)
    label_ends(ax, [*ends, (ZERO, SIGMAS[-1], zero[-1], palette.CONTROL)])
