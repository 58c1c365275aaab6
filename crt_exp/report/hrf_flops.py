"""make hrf-flops: Appendix L of Hybrid Random Features, columns for a FLOP, and the error at equal FLOPs.

FLOPs of a token are counted by torch.utils.flop_counter: of its features alone, as the paper does, and of attention,
where every column is also multiplied by the values.
"""

from typing import Any, NamedTuple

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Verdict, judged, won_by
from crt_exp.report.kernel_arms import NAMES, Arm, below, grid, line, mechanism_of, spread, truly_below
from crt_exp.report.writing import Cells, label_ends, markdown, write_report
from crt_exp.studies.flops import Flops

WITHOUT = {**palette.DENSE, "smreg": "it estimates another kernel", "gerf": "trig and oprf stand for it",
           "clustered": "these vectors have no clusters; see hrf-clusters",
           **dict.fromkeys(("pois", "geom", "pois_coord", "pois_plus", "geom_plus"),
                           "the error of discrete maps depends on coordinates")}
MAPS = palette.maps(WITHOUT)
PLAIN = tuple(name for name in MAPS if name not in ("angular", "gaussian"))
KINDS = {**{NAMES[name]: (name, (), "-") for name in PLAIN},         # map, options, line
         "angular hybrid, n = 8": ("angular", (), "-"), "angular hybrid, n = m": ("angular", (("n", None),), "--"),
         "Gaussian hybrid, n = 8": ("gaussian", (), "-")}
HYBRIDS = tuple(name for name, (features, *_) in KINDS.items() if features not in PLAIN)
BUDGETS = {"features": (1000, 2000, 4000, 8000, 16000, 32000),
           "attention": (16000, 32000, 64000, 128000, 256000, 512000)}
WHAT = {"features": "the features of a token", "attention": "attention, a token"}
LENGTHS = (1.0, 1.5)
D, ANGLES, GROUPS, SEED = 64, 17, 10, 0
SOURCES = ("features", "samplers", "attention/blocked.py", "studies/pairs.py", "studies/flops.py")


class Setting(NamedTuple):
    draws: int                      # of each group
    budgets: dict[str, tuple[int, ...]] = BUDGETS


SETTINGS = {"small": Setting(20), "gpu": Setting(20), "full": Setting(500)}
COLUMNS = ("budget", "m", "columns", "flops", "columns_per_flop", "error", "closed_form")   # of the csv
Found = dict[tuple[str, float, str], list[dict[str, Any]]]   # counted, length, arm -> a record a budget


def main(size: str) -> None:
    setting = SETTINGS[size]
    keys = {(counted, r, name): {**Arm(features, 1, options=options).key, "counted": counted, "length": r,
                                 "budgets": list(budgets), "draws": setting.draws}
            for counted, budgets in setting.budgets.items() for r in LENGTHS
            for name, (features, options, _) in KINDS.items()}
    cells = Cells("hrf-flops", SOURCES).fill(list(keys.values()), records, "errors")
    found = {place: cells[key] for place, key in keys.items()}
    write(size, setting, found, judged(claims(found)), cells.seconds())


def records(features: str, m: int, sampler: str, options: dict, counted: str, length: float, budgets: list[int],
            draws: int) -> list[dict]:
    task = Flops(counted, budgets, D, length, ANGLES, GROUPS, draws)
    return list(task.records(mechanism_of(features, m, sampler, options), SEED))


# ---- what it concludes


def both(found: Found, counted: str, r: float, *names: str) -> list[list[float]]:
    """Of each group of draws, the geometric mean of the mean squared error over the budgets that all these can keep."""
    kept = shared(found, counted, r, *names)
    return [np.exp(np.mean([np.log(found[counted, r, name][i]["squared_error"]) for i in kept], 0)).tolist()
            for name in names]


def closed(found: Found, counted: str, r: float, *names: str) -> list[float]:
    """The same by the closed forms."""
    kept = shared(found, counted, r, *names)
    return [float(np.exp(np.mean([2 * np.log(found[counted, r, name][i]["closed_form"]) for i in kept])))
            for name in names]


def shared(found: Found, counted: str, r: float, *names: str) -> list[int]:
    """The budgets that all these can keep."""
    return [i for i in range(len(found[counted, r, names[0]]))
            if all(found[counted, r, name][i]["m"] for name in names)]


def claims(found: Found) -> list[Claim]:
    """The paper's: for as many FLOPs a hybrid has the smaller error; of attention the same is asked."""
    hybrid, made = HYBRIDS[0], []
    for counted, what in WHAT.items():
        for r in LENGTHS:
            told = f"{what}, length {r:g}: at equal FLOPs the MSE of the {hybrid} is below that of"
            for name in map(NAMES.get, PLAIN):
                measured = below(told, *both(found, counted, r, hybrid, name))
                made.append(truly_below(f"{told} {name}", *closed(found, counted, r, hybrid, name), measured))
    return made


def saved(found: Found) -> str:
    """The paper's robots have the same quality for a third of the FLOPs: what each needs for the same error."""
    told = []
    for counted, what in WHAT.items():
        for r in LENGTHS:
            each = [f"{NAMES[name]} {ratio:.1f}" for name in PLAIN
                    if (ratio := flops_ratio(found, counted, r, HYBRIDS[0], NAMES[name])) is not None]
            told += [f"{what}, length {r:g}: {', '.join(each)}"] if each else []
    return (f"FLOPs for the same error over those of the {HYBRIDS[0]}, by the closed forms, at its middle budget (an "
            f"error falls with the root of m): {'; '.join(told)}. The paper's robots need a third of the FLOPs.")


def flops_ratio(found: Found, counted: str, r: float, hybrid: str, other: str) -> float | None:
    """What the other would spend for the hybrid's error, from its largest budget, over what that spends."""
    own, last = (found[counted, r, name] for name in (hybrid, other))
    own, last = own[len(own) // 2], last[-1]
    if not own["m"] or not last["m"]:
        return None
    return last["flops"] * (last["closed_form"] / own["closed_form"]) ** 2 / own["flops"]


def controls_that_win(found: Found) -> str:
    """An estimate of zero, whose relative error is 1, beside each arm at each budget that it can keep."""
    kept = {(*place, one["budget"]): one["closed_form"] for place, each in found.items() for one in each if one["m"]}
    beaten: dict[str, list[str]] = {}
    for (counted, r, name, budget), error in kept.items():
        if error > 1:
            beaten.setdefault(f"{WHAT[counted]}, length {r:g}", []).append(f"{name} with {budget:,} FLOPs")
    return won_by("an estimate of zero, by the closed forms", beaten, len(kept))


# ---- the page


def write(size: str, setting: Setting, found: Found, verdicts: list[Verdict], seconds: float) -> None:
    said = "\n".join([controls_that_win(found), "", *map(str, verdicts), "", saved(found)])
    parts = [said, "",
             "Below, at each budget: the relative error measured; by the closed form; m; columns for a FLOP. "
             "Empty: one projection costs more.\n"]
    parts += [f"## FLOPs of {what}, vectors of length {r:g}\n\n{table(found, setting, counted, r)}"
              for counted, what in WHAT.items() for r in LENGTHS]
    rows = [{"counted": counted, "length": r, "arm": name,
             **{key: value for key, value in each.items() if key in COLUMNS}}
            for (counted, r, name), every in found.items() for each in every]
    path = write_report("hrf-flops", "HRF Appendix L: error at equal FLOPs", "\n".join(parts),
                        [*rows, *(v.row() for v in verdicts)], figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def table(found: Found, setting: Setting, counted: str, r: float) -> str:
    rows = [[name, *(cell(each) for each in found[counted, r, name])] for name in KINDS]
    return markdown(["", *(f"{budget:,} FLOPs" for budget in setting.budgets[counted])], rows)


def cell(each: dict[str, Any]) -> str:
    if not each["m"]:
        return ""
    error = spread(np.sqrt(each["squared_error"]).tolist())
    return f"{error}; {each['closed_form']:.3g}; {each['m']}; {each['columns_per_flop']:.2g}"


def facts(size: str, setting: Setting) -> str:
    return (f"SIZE={size}. FLOPs of one token at d = {D}: multiply-adds of products count two, each number of an "
            "elementwise operation (exp, cos, multiply, add) and each term of a sum one; what is done once for all "
            "tokens none. Attention: the features of a query and of a key, and the products with values of width d and "
            "with ones, as many columns as there are. Error: root of the mean square of estimate / exp(x.y) - 1 over "
            f"pairs of vectors of one length at {ANGLES} angles from 0 to pi, {GROUPS} groups of {setting.draws} draws "
            f"of iid rows (seed {SEED}). Parameters are fitted to all pairs of a length. n: projections of the "
            "coefficient. Verdicts: logarithm of the mean squared error, mean over the budgets that both can keep, by "
            f"the closed forms; measured: paired by group, with Student's interval.{palette.left_out(WITHOUT)}")


def figure(found: Found):
    return grid(LENGTHS, WHAT, lambda ax, r, counted: draw(ax, found, counted, r),
                lambda r, counted: f"{WHAT[counted]}, length {r:g}", "FLOPs", figsize=(13, 7.6))


def draw(ax, found: Found, counted: str, r: float) -> None:
    ends = []
    ax.set(xscale="log", yscale="log")
    for name, (features, _, style) in KINDS.items():
        kept = [each for each in found[counted, r, name] if each["m"]]
        if not kept:
            continue
        at = [each["flops"] for each in kept]
        line(ax, at, [each["closed_form"] for each in kept], features, style)
        line(ax, at, [each["error"] for each in kept], features, points=True)
        ends.append((name, at[-1], kept[-1]["closed_form"], palette.colour(features)))
    low, high = ax.get_xlim()
    ax.plot((low, high), (1, 1), color=palette.CONTROL, ls=":", lw=1.2)
    ends.append(("zero", high, 1.0, palette.CONTROL))
    ax.set_xlim(low, high)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, min(top, 1e3))
    label_ends(ax, ends)
