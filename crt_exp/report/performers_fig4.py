"""make performers-fig4: Figure 4 of Performers, error of attention against m, with every mechanism and sampler added.

On heads of independent Gaussian queries and keys, as the paper's, and on heads that match positions, as trained ones
do. Errors are relative to that of uniform attention, the mean of V: where that is nearer, a mechanism shows nothing.
Near-far attention, which is more than a feature map, stands beside them, with the window that it contains as control.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from crt_exp.attention.nearfar import PRESETS
from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Verdict, independent, judged, won_by
from crt_exp.report.kernel_arms import below, least, over, resolution
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies.approximation import Approximation, estimates_softmax
from crt_exp.studies.captured import Synthetic, relative_error
from crt_exp.studies.fidelity import parsed


class Heads(NamedTuple):
    """Where queries and keys come from; turn: as in `Synthetic`."""

    length: int
    turn: float | None


D, SAMPLES, SEED = 16, 15, 0
MS = (8, 16, 32, 64, 128, 256)
COLUMNS = MS[-1]
HEADS = {"Gaussian": Heads(4096, None), "matched": Heads(256, 0.3)}
SUMS = (1, 2, 4, 8, 16, 24)  # mean |x + y|^2; the paper says "appropriately normalized" and no more
EVERY = 8                    # of which all mechanisms and samplers are measured
WITHOUT = {"auto": palette.APART["auto"]}
WITHOUT_SAMPLERS = palette.NONE
MAPS, SAMPLERS = palette.maps(WITHOUT), palette.samplers(WITHOUT_SAMPLERS)
FEW = ("iid", "orthogonal")  # the samplers of hybrids, which have so many columns that all would take most of the time
PAPER = tuple((features, sampler) for features in ("trig", "pos") for sampler in FEW)
FOLLOWED = (*PAPER, ("oprf", "iid"), ("oprf", "orthogonal"))  # at all SUMS
NEAR_FAR, WINDOW = "nearfar", "window block=32 first=16"
WHOLE = {"nearfar preset=cheap": "near-far, cheap", NEAR_FAR: "near-far", "nearfar preset=quality": "near-far, quality",
         WINDOW: "window and first tokens"}  # attention that is more than a feature map: no m, and no sampler
CONTROL = "the window with first tokens (blocks of 32 with their neighbours, 16 first tokens)"
STATEMENTS = (  # (better, worse): Performers Fig. 4, and of CRT the last one
    (("pos", "orthogonal"), ("pos", "iid")), (("trig", "orthogonal"), ("trig", "iid")),
    (("pos", "iid"), ("trig", "iid")), (("pos", "orthogonal"), ("trig", "orthogonal")),
    (("oprf", "orthogonal"), ("pos", "orthogonal")))
STYLES = {"iid": ":", "orthogonal": "-", "": "--"}
OURS = tuple(((NEAR_FAR, ""), worse) for worse in (("oprf", "orthogonal"), (WINDOW, "")))  # at the largest m
Place = tuple[str, int, str, str]                 # heads, mean |x + y|^2, features (or of WHOLE), sampler (or "")
Found = dict[Place, dict[str, list[list[float]]]]


def main(size: str) -> None:
    keys = {place: {"heads": place[0], "S": place[1], "features": place[2], "sampler": place[3],
                    "ms": list(ms_of(place[2]))} for place in places()}
    others = {(heads, S, name, ""): {"heads": heads, "S": S, "attention": name}
              for heads in HEADS for S in SUMS for name in WHOLE}
    cells = Cells("performers-fig4").fill(list(keys.values()), errors, "Figure 4")
    cells.fill(list(others.values()), whole_errors, "Figure 4: near-far attention")
    found = {place: cells[key] for place, key in (keys | others).items()}
    write(found, judged(claims(found)), cells.seconds())


def places() -> list[Place]:
    """Those with the same queries and keys follow each other."""
    every = [(f, s) for f in MAPS for s in SAMPLERS if goes(f, s)]
    return [(heads, S, *arm) for heads in HEADS for S in SUMS for arm in (every if S == EVERY else FOLLOWED)]


def goes(features: str, sampler: str) -> bool:
    return sampler in FEW if features in palette.HYBRIDS else palette.go_together(features, sampler)


def ms_of(features: str) -> tuple[int, ...]:
    """A hybrid is measured at equal columns alone: at equal projections it has many times the columns."""
    return (of_columns(features),) if features in palette.HYBRIDS else MS


@cache
def of_columns(features: str) -> int:
    """Projections that make at most COLUMNS columns."""
    return COLUMNS // palette.feature_map(features).width(1)


def errors(heads: str, S: int, features: str, sampler: str, ms: list[int]) -> dict[str, list[list[float]]]:
    """`mse` (m, samples): of the output, over that of uniform attention; `uniform` (1, samples): the error of that
    relative to the exact output."""
    task = Approximation(ms, SAMPLES, rows=1, pairs=0, heads=1, d=D, scale=scale_of(S), depth=0,
                         length=HEADS[heads].length, turn=HEADS[heads].turn)
    mechanism = Mechanism.of(features=features, sampler=sampler)
    measured = [task.measure(mechanism.map(), mechanism, m, 0, SEED)[0] for m in ms]
    mse = [(e["output_error"] / e["uniform_error"])[:, 0].square().tolist() for e in measured]
    return {"mse": mse, "uniform": [measured[0]["uniform_error"][:, 0].tolist()]}


@torch.no_grad()
def whole_errors(heads: str, S: int, attention: str) -> dict[str, list[list[float]]]:
    """As `errors` with one m, on the same queries, keys and values."""
    source = Synthetic(HEADS[heads].length, 1, D, scale_of(S), 0, HEADS[heads].turn)
    layer, uniform, mse = parsed(attention).layer(1, D, scaling=1.0).eval(), [], []
    for sample in range(SAMPLES):
        given = source.layers(sample, SEED)[0]
        error = relative_error(layer(given.x, given.y, given.v), given.output).item()
        uniform.append(relative_error(given.uniform, given.output).item())
        mse.append((error / uniform[-1]) ** 2)
    return {"mse": [mse], "uniform": [uniform]}


def scale_of(S: int) -> float:
    """The standard deviation of the entries of queries and keys."""
    return (S / (2 * D**0.5)) ** 0.5


# ---- what it concludes


def at(found: Found, place: Place, m: int) -> list[float]:
    """Of each sample."""
    return found[place]["mse"][ms_of(place[2]).index(m)]


def over_ms(found: Found, place: Place) -> list[float]:
    """Of each sample, the geometric mean over m."""
    return np.exp(np.mean(np.log(found[place]["mse"]), 0)).tolist()


def middle(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def at_most(found: Found, place: Place) -> list[float]:
    """Of each sample, at the largest m that was measured."""
    return found[place]["mse"][-1]


def named(features: str, sampler: str) -> str:
    return WHOLE.get(features) or f"{features} x {sampler}"


def compared(found: Found) -> dict[tuple, list[tuple[list[float], list[float]]]]:
    """Statement, heads -> for each of SUMS the errors of both arms: over all m of maps, beside near-far attention at
    the largest."""
    return {(better, worse, heads): [tuple(values(found, (heads, S, *arm)) for arm in (better, worse)) for S in SUMS]
            for statements, values in ((STATEMENTS, over_ms), (OURS, at_most))
            for better, worse in statements for heads in HEADS}


def claims(found: Found) -> list[Claim]:
    return [below(f"{heads} heads, mean |x + y|^2 = {S}: MSE of {named(*better)} below that of {named(*worse)}",
                  *errors)
            for (better, worse, heads), of_sums in compared(found).items() for S, errors in zip(SUMS, of_sums)]


def controls_that_win(found: Found) -> str:
    """By the geometric mean over samples, at the largest m that was measured."""
    uniform: dict[str, list[str]] = {}
    window: dict[str, list[str]] = {}
    for place, cell in found.items():
        heads, S, *arm = place
        for beaten, control in ((uniform, 1.0), (window, middle(found[heads, S, WINDOW, ""]["mse"][-1]))):
            if middle(cell["mse"][-1]) > control:
                beaten.setdefault(f"{heads} heads, mean |x + y|^2 = {S}", []).append(named(*arm))
    windows = len(HEADS) * len(SUMS)
    return (f"{won_by('uniform attention (the mean of V)', uniform, len(found))}\n\n"
            f"{won_by(CONTROL, window, len(found) - windows)}")


def least_of_all(found: Found, heads: str) -> str:
    """With as many projections, and with as many columns; of all arms, and of those that estimate softmax itself."""
    told, unbiased = [], {f for f in MAPS if estimates_softmax(palette.feature_map(f))}
    for basis, m_of, names in (("projections", lambda features: COLUMNS, set(MAPS) - set(palette.HYBRIDS)),
                               ("columns", of_columns, set(MAPS))):
        arms = {(f, s): at(found, (h, S, f, s), m_of(f)) for h, S, f, s in found
                if (h, S) == (heads, EVERY) and f in names}
        fair = {named(*arm): values for arm, values in arms.items() if arm[0] in unbiased}
        told += [f"- {COLUMNS} {basis} each: {least({named(*arm): values for arm, values in arms.items()})}.",
                 f"- of these, unbiased ones: {least(fair)}."]
    return "\n".join(told)


# ---- the page


def write(found: Found, verdicts: list[Verdict], seconds: float) -> None:
    said = f"{controls_that_win(found)}\n\n{statements(found, verdicts)}"
    parts = [said, "\n", *(section(found, heads) for heads in HEADS)]
    rows = [{"heads": h, "S": S, "features": f, "sampler": s, "m": m, "mse_over_uniform": middle(values),
             "log_std": float(np.std(np.log(values), ddof=1))}
            for (h, S, f, s), cell in found.items()
            for m, values in zip(("",) if f in WHOLE else ms_of(f), cell["mse"])]
    path = write_report("performers-fig4", "Performers Figure 4: error of attention against m", "\n".join(parts),
                        [*rows, *(v.row() for v in verdicts)], figure(found), facts(), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def statements(found: Found, verdicts: list[Verdict]) -> str:
    """The orderings of Performers (orthogonal below iid, positive below trigonometric), of CRT, and of near-far
    attention."""
    judged_as = iter(verdicts)
    lines = [[f"{named(*better)} below {named(*worse)}", f"{heads} heads",
              *(f"{over(*errors)}, **{next(judged_as).word}**" for errors in of_sums)]
             for (better, worse, heads), of_sums in compared(found).items()]
    some = [over_ms(found, ("matched", EVERY, *arm)) for arm in STATEMENTS[0]]
    return ("The papers' orderings: ratio of MSEs, geometric mean over m and samples, with its 95% interval; of "
            f"near-far attention: over samples, beside m = {COLUMNS}. Judged with Holm's correction over all of them, "
            "by mean |x + y|^2.\n\n"
            + markdown(["ordering", "", *map(str, SUMS)], lines) + "\n"
            + resolution(f"the MSE of pos x orthogonal and pos x iid (matched heads, {EVERY})", *some))


def section(found: Found, heads: str) -> str:
    return (f"## {heads} heads, L = {HEADS[heads].length}\n\n{table(found, heads)}\n"
            f"All mechanisms and samplers, mean |x + y|^2 = {EVERY}, {COLUMNS} projections (hybrids: {COLUMNS} "
            f"columns):\n\n{every_table(found, heads)}\nThe least:\n\n{least_of_all(found, heads)}\n")


def table(found: Found, heads: str) -> str:
    arms = (*FOLLOWED, *((name, "") for name in WHOLE))
    lines = [[named(*arm), *(interval_of(at_most(found, (heads, S, *arm))) for S in SUMS)] for arm in arms]
    uniform = [np.array(found[heads, S, *FOLLOWED[0]]["uniform"][0]) for S in SUMS]
    lines += [["uniform (control)", *("1" for _ in SUMS)],
              ["zero (control)", *(f"{middle(u**-2):.3g}" for u in uniform)],
              ["error of uniform over \\|exact\\|", *(f"{independent(u):.3f}" for u in uniform)]]
    return (f"MSE over that of uniform attention, m = {MS[-1]}, geometric mean over samples with its 95% interval, by "
            "mean |x + y|^2:\n\n" + markdown(["", *map(str, SUMS)], lines))


def interval_of(values: Sequence[float]) -> str:
    log = independent(np.log(values))
    return f"{math.exp(log.mean):.2g} ({math.exp(log.low):.2g} to {math.exp(log.high):.2g})"


def every_table(found: Found, heads: str) -> str:
    cell = lambda f, s: f"{middle(found[heads, EVERY, f, s]['mse'][-1]):.2e}" if (heads, EVERY, f, s) in found else ""
    return markdown(["", *SAMPLERS], [[f, *(cell(f, s) for s in SAMPLERS)] for f in MAPS])


def facts() -> str:
    return (f"One head of d = {D}, {SAMPLES} samples of data and noise (seed {SEED}; the same data for all arms): v ~ "
            "N(0, 1), k ~ N(0, s^2), scaled dot products, s by the mean |x + y|^2 = 2 sqrt(d) s^2 of scaled queries "
            "and keys. Gaussian heads: q ~ N(0, s^2) independent of k. Matched heads: the query of a position is its "
            f"key turned by {HEADS['matched'].turn:g} radians in a random plane. The paper states L = 4096, d and the "
            "samples, no normalisation. Parameters are fitted to each sample. MSE of the output over that of uniform "
            "attention, pair by pair. Near-far attention has no projections: a query sees 3 blocks and the heavy keys "
            f"exactly and the other keys by cells, of the presets {sizes()}, so of {HEADS['matched'].length} matched "
            "keys most exactly. Empty: discrete mechanisms need exactly Gaussian rows, and hybrids are measured "
            f"with two samplers. Projections m: trig, hyp and gerf make 2m columns of them."
            f"{palette.left_out({**WITHOUT, **WITHOUT_SAMPLERS})}")


def sizes() -> str:
    return ", ".join(f"{name} 3 x {preset.block} + {preset.heavy} keys and {preset.cells} cells"
                     for name, preset in PRESETS.items())


def figure(found: Found):
    shown, beside = (2, EVERY, SUMS[-1]), ((NEAR_FAR, ""), (WINDOW, ""))
    fig, axes = new_figure(len(HEADS), len(shown) + 1, figsize=(17, 7.6))
    for line, heads in zip(axes, HEADS):
        for ax, S in zip(line, shown):
            curves(ax, MS, {arm: found[heads, S, *arm]["mse"] for arm in FOLLOWED}
                   | {arm: found[heads, S, *arm]["mse"] * len(MS) for arm in beside})
            ax.set(title=f"{heads} heads, mean $|x + y|^2$ = {S}", xlabel="m")
        curves(line[-1], SUMS, {arm: [at_most(found, (heads, S, *arm)) for S in SUMS] for arm in (*FOLLOWED, *beside)})
        line[-1].set(title=f"{heads} heads, m = {MS[-1]}", xlabel="mean $|x + y|^2$")
        line[0].set_ylabel("MSE over that of uniform attention")
    fig.tight_layout(w_pad=5)
    return fig


def curves(ax, x: Sequence[int], of: dict[tuple[str, str], list[list[float]]]) -> None:
    """Geometric means over samples; the interval as bars."""
    ax.set(xscale="log", yscale="log", xlim=(x[0], x[-1]))
    ax.set_xticks(x, x)
    ax.xaxis.minorticks_off()
    ax.axhline(1, color=palette.CONTROL, lw=1.5)
    ends = [("uniform", x[-1], 1.0, palette.CONTROL)]
    for (features, sampler), values in of.items():
        logs = [independent(np.log(each)) for each in values]
        low, mid, high = (np.exp([getattr(log, end) for log in logs]) for end in ("low", "mean", "high"))
        colour = palette.CONTROL if features == WINDOW else palette.colour(features)
        ax.errorbar(x, mid, yerr=(mid - low, high - mid), color=colour, lw=1.5, elinewidth=0.7, ls=STYLES[sampler])
        ends.append((named(features, sampler), x[-1], mid[-1], colour))
    label_ends(ax, ends, size=7)
