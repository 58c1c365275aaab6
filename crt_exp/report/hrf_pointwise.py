"""make hrf-pointwise: Figures 2 and 5 of Hybrid Random Features, relative error over the angle of two vectors.

Measured and in closed form, for vectors of several lengths, with as many projections in all and with as many columns.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Verdict, judged, won_by
from crt_exp.report.kernel_arms import (
    NAMES,
    Arm,
    below,
    distinct,
    grid,
    line,
    mechanism_of,
    of_columns,
    spread,
    truly_below,
)
from crt_exp.report.writing import Cells, label_ends, markdown, write_report
from crt_exp.studies.pairs import angles_of
from crt_exp.studies.pointwise import Pointwise

WITHOUT = {**palette.DENSE, "smreg": "it estimates another kernel", "clustered": "one angle at a time has no clusters",
           **dict.fromkeys(("pois", "geom", "pois_coord", "pois_plus", "geom_plus"),
                           "the error of discrete maps depends on coordinates, not on angles alone")}
MAPS = palette.maps(WITHOUT)
HYBRIDS = ("angular", "gaussian")
N, M = 8, 8                         # projections of the coefficient and of the bases: "8 x 8"
COLUMNS = 4 * M * (N + 1)           # of the angular hybrid
BASES = {"projections": f"{N + M} projections in all", "columns": f"at most {COLUMNS} columns"}
D, ANGLES, GROUPS, SEED = 64, 25, 10, 0
SHOWN = (1.0, 1.5, 2.0)
FROM = 1.0                          # length, from which on the theorem on the largest error holds
SOURCES = ("features", "samplers", "studies/pairs.py", "studies/pointwise.py")


class Setting(NamedTuple):
    lengths: tuple[float, ...]
    draws: int                      # of each group


SETTINGS = {"small": Setting((0.5, 1.0, 1.5, 2.0), 200), "gpu": Setting((0.5, 1.0, 1.5, 2.0), 200),
            "full": Setting((0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), 1000)}
Found = dict[tuple[str, str, float], dict[str, Any]]   # basis, map, length -> record


def arm(basis: str, features: str) -> Arm:
    if basis == "columns":
        return of_columns(features, COLUMNS)
    return Arm(features, M if features in HYBRIDS else N + M)


def main(size: str) -> None:
    setting = SETTINGS[size]
    keys = {(basis, name): {**arm(basis, name).key, **setting._asdict(), "lengths": list(setting.lengths)}
            for basis in BASES for name in MAPS}
    cells = Cells("hrf-pointwise", SOURCES).fill(distinct(keys.values()), records, "errors")
    found = {(*place, r["length"]): r for place, key in keys.items() for r in cells[key]}
    verdicts = judged(claims(found, setting))
    write(size, setting, found, verdicts, cells.seconds())


def records(features: str, m: int, sampler: str, options: dict, lengths: list[float], draws: int) -> list[dict]:
    task = Pointwise(D, lengths, ANGLES, GROUPS, draws)
    return list(task.records(mechanism_of(features, m, sampler, options), SEED))


# ---- what it concludes


def largest(found: Found, basis: str, name: str, length: float) -> list[float]:
    """The largest relative error over angles, of each group."""
    return np.sqrt(np.max(found[basis, name, length]["squared_error"], 1)).tolist()


def over_lengths(found: Found, setting: Setting, basis: str, name: str) -> list[float]:
    """Of each group, the geometric mean over lengths from FROM on of the largest error."""
    of = [largest(found, basis, name, r) for r in setting.lengths if r >= FROM]
    return np.exp(np.mean(np.log(of), 0)).tolist()


def closed(found: Found, setting: Setting, basis: str, name: str) -> float:
    """The same by the closed forms."""
    of = [found[basis, name, r]["largest_closed_form"] for r in setting.lengths if r >= FROM]
    return float(np.exp(np.mean(np.log(of))))


def claims(found: Found, setting: Setting) -> list:
    """The paper's: the angular hybrid has the smallest largest error; the Gaussian one has more than it."""
    made = []
    for basis, what in BASES.items():
        of = {name: over_lengths(found, setting, basis, name) for name in MAPS}
        true = {name: closed(found, setting, basis, name) for name in MAPS}
        for name in (name for name in MAPS if name != "angular"):
            text = f"{what}: the largest error of the {NAMES['angular']} is below that of {NAMES[name]}"
            made.append(truly_below(text, true["angular"], true[name], below(text, of["angular"], of[name])))
    return made


def controls_that_win(found: Found, setting: Setting) -> str:
    """Lengths at which an estimate of zero, whose relative error is 1, or the mean of the kernel has a smaller largest
    error than an arm."""
    beaten = {f"length {r:g}, {what}": [NAMES[name] for name in MAPS if found[basis, name, r]["largest_closed_form"]
                                        > min(1, mean_of_kernel(r))]
              for basis, what in BASES.items() for r in setting.lengths}
    control = "the better of two constants, zero and the mean of the kernel, by the largest error over angles"
    return won_by(control, beaten, len(MAPS) * len(beaten))


def in_closed_form(found: Found, setting: Setting) -> str:
    """The arm with the least largest error at each length, which no draw disturbs."""
    told = []
    for basis, what in BASES.items():
        each = []
        for r in setting.lengths:
            of = {name: found[basis, name, r]["largest_closed_form"] for name in MAPS}
            best = min(of, key=of.get)
            each.append(f"{NAMES[best]} at length {r:g} ({of[best]:.3g}; the angular hybrid {of['angular']:.3g})")
        told.append(f"{what}: {', '.join(each)}")
    return f"The least largest error by the closed forms. {'. '.join(told)}."


def agreement(found: Found) -> str:
    """How measured errors stand to the closed form: within the spread of the groups, or below it by heavy tails."""
    inside, low, count = 0, 0, 0
    for record in found.values():
        groups, closed = np.array(record["squared_error"]), np.array(record["closed_form"]) ** 2
        error = 5 * groups.std(0, ddof=1) / math.sqrt(len(groups)) + 1e-10
        inside += int((abs(groups.mean(0) - closed) <= error).sum())
        low += int((closed - groups.mean(0) > error).sum())
        count += closed.size
    return (f"Of {count} measured mean squares {inside} lie within 5 standard errors of the closed form, {low} below "
            f"and {count - inside - low} above. Where x and y are long and near each other, the squares of positive "
            "features have tails that so many draws seldom see: there the closed form is the truth, and what is "
            "measured, here as in the paper, flatters them.")


# ---- the page


def write(size: str, setting: Setting, found: Found, verdicts: list[Verdict], seconds: float) -> None:
    said = "\n".join([controls_that_win(found, setting), "", *map(str, verdicts)])
    parts = [said, "", in_closed_form(found, setting), "", agreement(found)]
    parts += [f"\n## The largest relative error over angles, {what}\n\n{table(found, setting, basis)}"
              for basis, what in BASES.items()]
    rows = [{"basis": basis, "features": name, "length": r, "theta": t, "error": e, "closed_form": c}
            for (basis, name, r), record in found.items()
            for t, e, c in zip(record["theta"], record["error"], record["closed_form"])]
    path = write_report("hrf-pointwise", "HRF Figures 2 and 5: relative error over angles", "\n".join(parts),
                        [*rows, *(v.row() for v in verdicts)], figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def table(found: Found, setting: Setting, basis: str) -> str:
    rows = []
    for name in MAPS:
        cells = [f"{spread(largest(found, basis, name, r))}; {found[basis, name, r]['largest_closed_form']:.3g}"
                 for r in setting.lengths]
        own = arm(basis, name)
        size = f"({N}, {own.m})" if name in HYBRIDS else own.m
        rows.append([NAMES[name], size, found[basis, name, setting.lengths[0]]["columns"], *cells])
    rows.append(["zero", "", "", *("1" for _ in setting.lengths)])
    rows.append(["mean of the kernel", "", "", *(f"{mean_of_kernel(r):.3g}" for r in setting.lengths)])
    return markdown(["", "m, or (n, m)", "columns", *(f"length {r:g}: measured; closed form" for r in setting.lengths)],
                    rows)


def mean_of_kernel(r: float) -> float:
    """The largest relative error of the constant that is the mean of SM over the angles."""
    exact = (r**2 * angles_of(ANGLES).cos()).exp()
    return float((exact.mean() / exact - 1).abs().max())


def facts(size: str, setting: Setting) -> str:
    return (f"SIZE={size}. Pairs of vectors of one length, d = {D}, {ANGLES} angles from 0 to pi, each in a random "
            f"plane (seed {SEED}); {GROUPS} groups of {setting.draws} draws, iid Gaussian rows, the same for all arms "
            "with as many of them. Error: root of the mean square of estimate / exp(x.y) - 1; parameters are fitted to "
            f"the pairs of a length together. Hybrids: {N} projections of the coefficient and {M} of both bases, which "
            "share theirs; the paper's sizes were not available to us, and 8 x 8 is that of its robots. Verdicts: "
            f"the logarithm of the largest error over angles, mean over lengths from {FROM:g} on, by the closed forms; "
            f"measured: paired by group, with Student's interval.{palette.left_out(WITHOUT)}")


def figure(found: Found):
    return grid(BASES, SHOWN, lambda ax, basis, r: draw(ax, found, basis, r),
                lambda basis, r: f"length {r:g}, {BASES[basis]}", "angle", figsize=(15, 7.4), sharex=True)


def draw(ax, found: Found, basis: str, r: float) -> None:
    ends = [("zero", math.pi, 1.0, palette.CONTROL)]
    ax.axhline(1, color=palette.CONTROL, ls=":", lw=1.2)
    ax.set(yscale="log", xlim=(0, math.pi), ylim=limits(found, r))
    ax.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
    for name in MAPS:
        record = found[basis, name, r]
        line(ax, record["theta"], record["closed_form"], name)
        line(ax, record["theta"], record["error"], name, points=True)
        height = next(c for c in reversed(record["closed_form"]) if c > ax.get_ylim()[0])
        ends.append((NAMES[name], math.pi, height, palette.colour(name)))
    label_ends(ax, ends)


def limits(found: Found, r: float) -> tuple[float, float]:
    """The same for both rows: from below the smallest error inside the range of angles to above the largest."""
    every = np.array([record["closed_form"] for (_, _, length), record in found.items() if length == r])
    return float(np.median(every, 1).min() / 8), float(min(every.max(), 1e4) * 2)
