"""make hrf-qmc: Table 1 of Hybrid Random Features, the angular hybrid beside quasi-Monte Carlo samplers.

Mean squared error of the softmax kernel over pairs of rows of two tables, with as many projections in all and with as
many columns.
"""

from typing import Any, NamedTuple

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.tabular import load
from crt_exp.report import palette
from crt_exp.report.evidence import Verdict, independent, judged, won_by
from crt_exp.report.kernel_arms import NAMES, Arm, below, distinct, mechanism_of, of_columns, over, resolution, spread
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.qmc import QMC

WITHOUT = {**palette.DENSE, "smreg": "it estimates another kernel",
           "hyp": "the hybrid's positive base; see hrf-pointwise",
           "gaussian": "the paper's table has the angular hybrid", "clustered": "see hrf-clusters",
           **dict.fromkeys(("pois", "geom", "pois_coord", "pois_plus", "geom_plus"), "the paper compares samplers")}
WITHOUT_SAMPLERS = {"givens": "Hadamard rows stand for the approximate ones",
                    "stratified": "Halton and Sobol points stand for those that are placed"}
MAPS, SAMPLERS = palette.maps(WITHOUT), palette.samplers(WITHOUT_SAMPLERS)
ARMS = {"HRF-ort": ("angular", "orthogonal"), "HRF-iid": ("angular", "iid"),   # the paper's five, by its names
        "ORF-reg": ("trig", "orthogonal"), "ORF-Had": ("trig", "hadamard"), "Halton-R": ("trig", "halton"),
        "trig x iid": ("trig", "iid"), "trig x sobol": ("trig", "sobol"), "GERF x orthogonal": ("gerf", "orthogonal"),
        "FAVOR+ x orthogonal": ("pos", "orthogonal"), "FAVOR+ x simplex": ("pos", "simplex"),
        "OPRF x orthogonal": ("oprf", "orthogonal"), "OPRF x simplex": ("oprf", "simplex")}
OURS = "HRF-ort"
CONTROLS = (("mean", "mean of the kernel"), ("zero", "zero"))
N, M = 8, 8                         # projections of the coefficient and of the bases
COLUMNS = 4 * M * (N + 1)
BASES = {"projections": f"{N + M} projections in all", "columns": f"at most {COLUMNS} columns"}
LENGTHS = (0.5, 1.0)                # root mean squared length of the rows; at 1.5 a constant is better than most arms
SCALING, GROUPS, SEED = "standard", 10, 0
STAND_IN = "breast_cancer"          # in place of boston, where its file is not there
SOURCES = ("features", "samplers", "studies/pairs.py", "studies/qmc.py", "data/tabular.py")


class Setting(NamedTuple):
    pairs: int
    draws: int                      # of each group


SETTINGS = {"small": Setting(300, 20), "gpu": Setting(300, 20), "full": Setting(5000, 100)}
Found = dict[tuple[str, float, str, str], dict[str, Any]]   # table, length, basis, arm -> record


def arm(basis: str, name: str) -> Arm:
    features, sampler = ARMS[name]
    if basis == "columns":
        return of_columns(features, COLUMNS, sampler)
    return Arm(features, M if features == "angular" else N + M, sampler)


def tables() -> tuple[str, str]:
    """wine and boston; where the file of boston is not there, the one that stands in."""
    try:
        load("boston")
    except DataError:
        return "wine", STAND_IN
    return "wine", "boston"


def main(size: str) -> None:
    setting, names = SETTINGS[size], tables()
    keys = {(table, length, basis, name): {**arm(basis, name).key, **setting._asdict(), "table": table,
                                           "length": length}
            for table in names for length in LENGTHS for basis in BASES for name in ARMS}
    cells = Cells("hrf-qmc", SOURCES).fill(distinct(keys.values()), record, "errors")
    found = {place: cells[key] for place, key in keys.items()}
    write(size, setting, found, names, judged(claims(found, names)), cells.seconds())


def record(features: str, m: int, sampler: str, options: dict, pairs: int, draws: int, table: str,
           length: float) -> dict[str, Any]:
    task = QMC(table, SCALING, length, pairs, GROUPS, draws)
    return next(task.records(mechanism_of(features, m, sampler, options), SEED))


# ---- what it concludes


def errors(found: Found, table: str, basis: str, name: str) -> list[float]:
    """Of each group of draws, the geometric mean over lengths of the MSE."""
    return np.exp(np.mean([np.log(found[table, r, basis, name]["mse_of_groups"]) for r in LENGTHS], 0)).tolist()


def claims(found: Found, names: tuple[str, str]) -> list:
    """The paper's: HRF-ort has the least error of its five."""
    return [below(f"{table}, {what}: MSE of {OURS} below that of {other}", errors(found, table, basis, OURS),
                  errors(found, table, basis, other))
            for table in names for basis, what in BASES.items() for other in list(ARMS)[1:5]]


def controls_that_win(found: Found) -> str:
    beaten: dict[str, list[str]] = {}
    for (table, r, basis, name), one in found.items():
        if one["mse"] > min(one["zero"], one["mean"]):
            beaten.setdefault(f"{table}, length {r:g}, {BASES[basis]}", []).append(name)
    return won_by("a constant, zero or the mean of the kernel", beaten, len(found))


def best(found: Found, names: tuple[str, str]) -> str:
    """The least error of all arms, also those that the paper has not."""
    told = []
    for table in names:
        for basis, what in BASES.items():
            of = {name: errors(found, table, basis, name) for name in ARMS}
            first = min(of, key=lambda name: np.mean(np.log(of[name])))
            told.append(f"{table}, {what}: {first}; {OURS} has {over(of[OURS], of[first])} of its MSE")
    return f"The least of all arms, the ratio with its 95% interval: {'. '.join(told)}."


# ---- the page


def write(size: str, setting: Setting, found: Found, names: tuple[str, str], verdicts: list[Verdict],
          seconds: float) -> None:
    said = "\n".join([controls_that_win(found), "", *map(str, verdicts), "", best(found, names)])
    first = (errors(found, names[0], "projections", name) for name in (OURS, "ORF-reg"))
    apart = resolution(f"the MSE of {OURS} and ORF-reg ({names[0]}, {BASES['projections']})", *first)
    parts = [said, "", apart, "",
             "Means over draws with 95% intervals over groups of them; behind the semicolon the closed form "
             "for iid rows. The bias of Hadamard rows is in the error.\n"]
    parts += [f"## {table}: MSE, root mean squared length {r:g}\n\n{table_of(found, table, r)}"
              for table in names for r in LENGTHS]
    rows = [{"table": table, "length": r, "basis": basis, "arm": name,
             **{key: value for key, value in each.items() if key in ("mse", "closed_form", "columns", "zero", "mean")}}
            for (table, r, basis, name), each in found.items()]
    path = write_report("hrf-qmc", "HRF Table 1: the angular hybrid beside quasi-Monte Carlo samplers",
                        "\n".join(parts), [*rows, *(v.row() for v in verdicts)], figure(found, names),
                        facts(size, setting, names), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def table_of(found: Found, table: str, r: float) -> str:
    rows = []
    for name, (features, sampler) in ARMS.items():
        each = [found[table, r, basis, name] for basis in BASES]
        cells = [f"{spread(e['mse_of_groups'])}; {e['closed_form']:.3g} ({e['columns']})" for e in each]
        rows.append([name, f"{NAMES[features]} x {sampler}", *cells])
    control = found[table, r, "projections", OURS]
    rows += [[label, "", *[f"{control[key]:.3g}"] * 2] for key, label in CONTROLS]
    return markdown(["", "map x sampler", *(f"{what}: MSE; closed form (columns)" for what in BASES.values())], rows)


def facts(size: str, setting: Setting, names: tuple[str, str]) -> str:
    away = (f" The file of boston is not there (CRT_DATA/uci), so {STAND_IN}, which scikit-learn carries, stands in."
            if STAND_IN in names else "")
    return (f"SIZE={size}. {setting.pairs} random pairs of different rows (seed {SEED}), {GROUPS} groups of "
            f"{setting.draws} draws. Columns standardised over the table, then all rows divided by one number that "
            f"gives them a root mean squared length of {' and '.join(f'{r:g}' for r in LENGTHS)}; the paper does not "
            f"say how it scaled them, and its numbers are not compared here: it finds HRF best.{away} Hybrid: "
            f"{N} projections of the coefficient, {M} of both bases, which share theirs. Verdicts: logarithm of the "
            "MSE, mean over lengths, paired by group of draws; p by Holm over all."
            f"{palette.left_out(WITHOUT | WITHOUT_SAMPLERS)}")


def figure(found: Found, names: tuple[str, str]):
    panels = [(table, r) for table in names for r in LENGTHS]
    fig, axes = new_figure(1, len(panels), figsize=(15, 4.4), sharey=True)
    for ax, (table, r) in zip(axes, panels):
        draw(ax, found, table, r)
    names = [*ARMS, *(label for _, label in CONTROLS)]
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=2, fontsize=8)
    fig.tight_layout()
    return fig


def draw(ax, found: Found, table: str, r: float) -> None:
    """A row for each arm: MSE with its interval, as many projections above, as many columns below."""
    for place, (name, (features, _)) in enumerate(ARMS.items()):
        for (basis, what), shift, marker in zip(BASES.items(), (-0.14, 0.14), "os"):
            groups = np.array(found[table, r, basis, name]["mse_of_groups"])
            half = min(independent(groups).half, 0.95 * groups.mean())  # the axis is logarithmic
            ax.errorbar(groups.mean(), place + shift, xerr=half, marker=marker, ms=4, ls="",
                        color=palette.colour(features), mfc=None if basis == "columns" else "white", capsize=2,
                        label=what if not place else None)
    for place, (key, _) in enumerate(CONTROLS, len(ARMS)):
        value = found[table, r, "projections", OURS][key]
        ax.axvline(value, color=palette.CONTROL, ls=":", lw=1)
        ax.plot(value, place, marker="D", ms=4, color=palette.CONTROL)
    ax.set(xscale="log", xlabel="MSE", title=f"{table}, length {r:g}")
