"""make performers-fig4: Figure 4 of Performers, MSE of attention against m, with every mechanism and sampler added."""

import torch

from crt_exp.config import build, choices
from crt_exp.report.writing import COLOURS, Cells, markdown, new_figure, write_report
from crt_exp.tasks.approximation import Approximation
from crt_exp.tasks.base import Mechanism
from crt_exp.tasks.uci import interval

L, D, SAMPLES, ROWS, SEED = 4096, 16, 15, 128, 0
MS = (8, 16, 32, 64, 128, 256)
SAMPLERS = ("iid", "orthogonal", "simplex", "sobol", "halton", "stratified", "hadamard", "givens")
APPROXIMATE = ("hadamard", "givens")
DISCRETE = ("pois", "geom", "pois_plus", "geom_plus", "pois_coord")  # they need exactly Gaussian rows
PAPER = (("trig", "iid"), ("trig", "orthogonal"), ("pos", "iid"), ("pos", "orthogonal"))
STATEMENTS = (  # (better, baseline), each (mechanism, sampler): Performers Fig. 4
    (("pos", "orthogonal"), ("pos", "iid")), (("trig", "orthogonal"), ("trig", "iid")),
    (("pos", "iid"), ("trig", "iid")), (("pos", "orthogonal"), ("trig", "orthogonal")))
KINDS = {"output_mse": "output", "matrix_mse": "matrix"}
SOURCES = ("features", "samplers", "attention", "tasks/approximation.py", "tasks/captured.py", "report/performers_fig4.py")
SAMPLER_COLOURS = dict(zip(SAMPLERS, ("#999999", "#D55E00", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#000000")))


def main(size: str) -> None:
    names = [n for n in COLOURS if n in choices("features")]
    keys = [{"features": f, "sampler": s} for f in names for s in SAMPLERS if not (f in DISCRETE and s in APPROXIMATE)]
    cells = Cells("performers-fig4", SOURCES).fill(keys, errors, "Figure 4")
    found = {(k["features"], k["sampler"]): {kind: torch.tensor(v) for kind, v in cells[k].items()} for k in keys}
    rows = [{"features": f, "sampler": s, "m": m, "of": KINDS[kind], "mse_mean": v.mean().item(), "mse_std": v.std().item(),
             "log_mse_mean": v.log().mean().item(), "log_mse_std": v.log().std().item()}
            for (f, s), kinds in found.items() for kind, values in kinds.items() for m, v in zip(MS, values)]
    body = "\n".join([statements(found), paper_table(found), *(all_table(found, names, kind) for kind in KINDS)])
    facts = (f"q, k, v ~ N(0, 1), L = {L}, d = {D}, one head, {SAMPLES} samples of data and noise (seed {SEED}; the same data for every "
             "mechanism and sampler), scaled dot products; parameters fitted to each sample. MSE against exact softmax attention over all "
             f"entries of the output, and over {ROWS} random rows of the attention matrix with rows of sum 1. Means are geometric over "
             "samples (with few features the arithmetic mean of signed features is that of a few denominators near 0; it is in the "
             "csv); shaded: standard deviation of log MSE. Equal numbers of projections m (trig, hyp and gerf make 2m features of them). The "
             "paper does not state how its data were normalised.")
    path = write_report("performers-fig4", "Performers Figure 4: MSE of attention against m", body, rows, figure(found, names), facts,
                        cells.seconds())
    print(f"{statements(found)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def errors(features: str, sampler: str) -> dict[str, list[list[float]]]:
    """MSE of output and matrix for each m and sample."""
    task = Approximation(MS, SAMPLES, ROWS, pairs=0, heads=1, d=D, scale=1.0, depth=0, length=L)
    phi, mechanism = build("features", features, kernel="softmax"), Mechanism(features, sampler=build("sampler", sampler))
    found = [task.measure(phi, mechanism, m, 0, SEED)[0] for m in MS]
    return {kind: [e[kind][:, 0].tolist() for e in found] for kind in KINDS}


def log_ratio(found, better, baseline, kind: str) -> dict[str, float]:
    """Mean over m of log MSE ratio, with its 95% interval over samples."""
    ratio = (found[better][kind].log() - found[baseline][kind].log()).mean(0)
    return interval(ratio.tolist(), "log")


def statements(found) -> str:
    """The paper's two findings; met where the whole interval is below 1."""
    lines = []
    for better, baseline in STATEMENTS:
        for kind, what in KINDS.items():
            r = log_ratio(found, better, baseline, kind)
            low, mid, high = (torch.tensor(r["log"] + sign * r["log_ci95"]).exp().item() for sign in (-1, 0, 1))
            verdict = "met" if high < 1 else "not met" if low > 1 else "open: the interval holds 1"
            lines.append([f"{' x '.join(better)} below {' x '.join(baseline)}", what, f"{mid:.2g} ({low:.2g} to {high:.2g})", verdict])
    return ("The paper's findings, orthogonal below iid and positive below trigonometric: ratio of MSEs, geometric mean over m = "
            f"{MS[0]} to {MS[-1]} and samples, 95% interval over samples:\n\n" + markdown(["finding", "of the", "ratio", ""], lines))


def paper_table(found) -> str:
    cell = lambda values: f"{values.log().mean().exp():.2e}"
    lines = [[f"{f} x {s}, {what}", *(cell(v) for v in found[f, s][kind])] for kind, what in KINDS.items() for f, s in PAPER]
    return "## MSE of the paper's four\n\n" + markdown(["", *(f"m = {m}" for m in MS)], lines)


def all_table(found, names, kind: str) -> str:
    cell = lambda f, s: f"{found[f, s][kind][-1].log().mean().exp():.2e}" if (f, s) in found else ""
    best = min(found, key=lambda k: found[k][kind][-1].log().mean())
    return (f"## MSE of the {KINDS[kind]}, m = {MS[-1]}, every mechanism and sampler\n\nThe least: {best[0]} x {best[1]}. Empty: discrete "
            "mechanisms need exactly Gaussian rows.\n\n" + markdown(["", *SAMPLERS], [[f, *(cell(f, s) for s in SAMPLERS)] for f in names]))


def figure(found, names):
    fig, axes = new_figure(1, 4, figsize=(16, 3.9))
    for ax, kind in zip(axes, KINDS):
        for f, s in PAPER:
            curve(ax, found[f, s][kind], COLOURS[f], f"{f}, {s}", "-" if s == "orthogonal" else "--", shaded=True)
        ax.set_title(f"the paper's four, {KINDS[kind]}")
    for name in names:
        curve(axes[2], found[name, "orthogonal"]["output_mse"], COLOURS[name], name)
    axes[2].set_title("all mechanisms, orthogonal, output")
    for s in SAMPLERS:
        curve(axes[3], found["oprf", s]["output_mse"], SAMPLER_COLOURS[s], s)
    axes[3].set_title("all samplers, oprf, output")
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="m")
        ax.set_xticks(MS, MS)
        ax.minorticks_off()
        ax.legend(fontsize=7)
    axes[0].set_ylabel("MSE")
    fig.tight_layout()
    return fig


def curve(ax, values: torch.Tensor, colour: str, label: str, style: str = "-", shaded: bool = False) -> None:
    mean, std = values.log().mean(1), values.log().std(1)
    ax.plot(MS, mean.exp(), color=colour, ls=style, label=label, lw=1.5)
    if shaded:
        ax.fill_between(MS, (mean - std).exp(), (mean + std).exp(), color=colour, alpha=0.12, lw=0)
