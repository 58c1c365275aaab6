"""make performers-fig4: Figure 4 of Performers, MSE of attention against m, with every mechanism and sampler added."""

import math

import torch

from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.approximation import Approximation, estimates_softmax
from crt_exp.studies.uci import interval

L, D, SAMPLES, ROWS, SEED = 4096, 16, 15, 128, 0
MS = (8, 16, 32, 64, 128, 256)
# standard deviation of queries and keys: the paper says "appropriately normalized" and no more
SCALES = (0.5, 0.75, 1.0)
WITHOUT = {"auto": palette.APART["auto"]}
WITHOUT_SAMPLERS = palette.NONE
MAPS, SAMPLERS = palette.maps(WITHOUT), palette.samplers(WITHOUT_SAMPLERS)
HYBRID_SAMPLERS = ("iid", "orthogonal")  # hybrids have so many columns that eight samplers would take most of the time
PAPER = (("trig", "iid"), ("trig", "orthogonal"), ("pos", "iid"), ("pos", "orthogonal"))
STATEMENTS = (  # (better, baseline), each (mechanism, sampler): Performers Fig. 4
    (("pos", "orthogonal"), ("pos", "iid")), (("trig", "orthogonal"), ("trig", "iid")),
    (("pos", "iid"), ("trig", "iid")), (("pos", "orthogonal"), ("trig", "orthogonal")))
KINDS = {"output_mse": "output", "matrix_mse": "matrix"}
SOURCES = ("features", "samplers", "attention", "studies/approximation.py", "studies/captured.py",
           "report/performers_fig4.py")


def main(size: str) -> None:
    keys = [{"features": f, "sampler": s} for f in MAPS for s in SAMPLERS if goes(f, s)]
    keys += [{"features": f, "sampler": s, "scale": scale} for scale in SCALES if scale != 1 for f, s in PAPER]
    cells = Cells("performers-fig4", SOURCES).fill(keys, errors, "Figure 4")
    found = {(k["features"], k["sampler"], k.get("scale", 1.0)): {kind: torch.tensor(v) for kind, v in cells[k].items()}
             for k in keys}
    rows = [{"features": f, "sampler": s, "scale": scale, "m": m, "of": KINDS[kind], "mse_mean": v.mean().item(),
             "mse_std": v.std().item(), "log_mse_mean": v.log().mean().item(), "log_mse_std": v.log().std().item()}
            for (f, s, scale), kinds in found.items() for kind, values in kinds.items() for m, v in zip(MS, values)]
    body = "\n".join([statements(found), paper_table(found), *(all_table(found, kind) for kind in KINDS)])
    facts = (f"L = {L}, d = {D}, one head, {SAMPLES} samples of data and noise (seed {SEED}; the same data for every "
             "mechanism and sampler): v ~ N(0, 1), q, k ~ N(0, scale^2), scaled dot products, parameters fitted to "
             "each sample; scale 1 where none is given. The paper states L, d, the samples and no normalisation. MSE "
             f"against exact softmax attention over all entries of the output, and over {ROWS} random rows of the "
             "attention matrix with rows of sum 1. Means are geometric over samples (with few features the arithmetic "
             "mean of signed features is that of a few denominators near 0; it is in the csv); shaded: standard "
             "deviation of log MSE. Equal numbers of projections m (trig, hyp and gerf make 2m features of them; "
             "hybrids have m of their bases and 8 of a coefficient, of which angular makes 36m features, gaussian 68m "
             "and clustered 4m)."
             f"{palette.left_out({**WITHOUT, **WITHOUT_SAMPLERS})}")
    path = write_report("performers-fig4", "Performers Figure 4: MSE of attention against m", body, rows, figure(found),
                        facts, cells.seconds())
    print(f"{statements(found)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def goes(features: str, sampler: str) -> bool:
    hybrid = features in palette.HYBRIDS
    return sampler in HYBRID_SAMPLERS if hybrid else palette.go_together(features, sampler)


def errors(features: str, sampler: str, scale: float = 1.0) -> dict[str, list[list[float]]]:
    """MSE of output and matrix for each m and sample."""
    task = Approximation(MS, SAMPLES, ROWS, pairs=0, heads=1, d=D, scale=scale, depth=0, length=L)
    mechanism = Mechanism.of(features=features, sampler=sampler)
    found = [task.measure(mechanism.map(), mechanism, m, 0, SEED)[0] for m in MS]
    return {kind: [e[kind][:, 0].tolist() for e in found] for kind in KINDS}


def verdict(found, better, baseline, scale: float, kind: str) -> str:
    """Ratio of MSEs, mean over m and samples of its logarithm, with the 95% interval over samples;
    met where that is below 1."""
    log = interval((found[*better, scale][kind].log() - found[*baseline, scale][kind].log()).mean(0).tolist(), "log")
    low, mid, high = (math.exp(log["log"] + sign * log["log_ci95"]) for sign in (-1, 0, 1))
    return f"{mid:.2g} ({low:.2g} to {high:.2g}) {'met' if high < 1 else 'not met' if low > 1 else 'open'}"


def statements(found) -> str:
    """The paper's two findings."""
    lines = [[f"{' x '.join(better)} below {' x '.join(baseline)}", what,
              *(verdict(found, better, baseline, s, kind) for s in SCALES)]
             for better, baseline in STATEMENTS for kind, what in KINDS.items()]
    return ("The paper's findings, orthogonal below iid and positive below trigonometric: ratio of MSEs, geometric "
            f"mean over m = {MS[0]} to {MS[-1]} and samples, with its 95% interval over samples; met where the whole "
            "interval is below 1, open where it holds 1.\n\n"
            + markdown(["finding", "of the", *(f"scale {s}" for s in SCALES)], lines))


def paper_table(found) -> str:
    cell = lambda values: f"{values.log().mean().exp():.2e}"
    lines = [[f"{f} x {s}, scale {scale}, {what}", *(cell(v) for v in found[f, s, scale][kind])]
             for kind, what in KINDS.items() for scale in SCALES for f, s in PAPER]
    return "## MSE of the paper's four\n\n" + markdown(["", *(f"m = {m}" for m in MS)], lines)


def all_table(found, kind: str) -> str:
    last = {(f, s): kinds[kind][-1].log().mean().exp().item() for (f, s, scale), kinds in found.items() if scale == 1}
    cell = lambda f, s: f"{last[f, s]:.2e}" if (f, s) in last else ""
    fair = [(f, s) for f, s in last if estimates_softmax(palette.feature_map(f))]
    best, unbiased = min(last, key=last.get), min(fair, key=last.get)
    return (f"## MSE of the {KINDS[kind]}, m = {MS[-1]}, scale 1, every mechanism and sampler\n\nThe least: "
            f"{' x '.join(best)}; of unbiased mechanisms {' x '.join(unbiased)}. Empty: discrete mechanisms need "
            "exactly Gaussian rows, and hybrids are measured with two samplers alone.\n\n"
            + markdown(["", *SAMPLERS], [[f, *(cell(f, s) for s in SAMPLERS)] for f in MAPS]))


def figure(found):
    fig, axes = new_figure(2, 3, figsize=(13, 7.2))
    panels = [(scale, "output_mse") for scale in SCALES] + [(1.0, "matrix_mse")]
    for ax, (scale, kind) in zip(axes.flat, panels):
        for f, s in PAPER:
            style = "-" if s == "orthogonal" else "--"
            curve(ax, found[f, s, scale][kind], palette.colour(f), f"{f}, {s}", style, shaded=True)
        ax.set_title(f"the paper's four, {KINDS[kind]}, scale {scale}")
    for name in MAPS:
        curve(axes[1, 1], found[name, "orthogonal", 1.0]["output_mse"], palette.colour(name), name)
    for s in SAMPLERS:
        curve(axes[1, 2], found["oprf", s, 1.0]["output_mse"], palette.sampler_colour(s), s)
    axes[1, 1].set_title("all mechanisms, orthogonal, output, scale 1")
    axes[1, 2].set_title("all samplers, oprf, output, scale 1")
    for ax in axes.flat:
        ax.set(xscale="log", yscale="log", xlabel="m")
        ax.set_xticks(MS, MS)
        ax.xaxis.minorticks_off()
        ax.legend(fontsize=6.5, ncols=2)
    for ax in axes[:, 0]:
        ax.set_ylabel("MSE")
    fig.tight_layout()
    return fig


def curve(ax, values: torch.Tensor, colour: str, label: str, style: str = "-", shaded: bool = False) -> None:
    mean, std = values.log().mean(1), values.log().std(1)
    ax.plot(MS, mean.exp(), color=colour, ls=style, label=label, lw=1.5)
    if shaded:
        ax.fill_between(MS, (mean - std).exp(), (mean + std).exp(), color=colour, alpha=0.12, lw=0)
