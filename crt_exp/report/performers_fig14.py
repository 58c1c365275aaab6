"""make performers-fig14: Figure 14 of Performers, the error of attention on its way through the
layers of a Transformer."""

import math

import torch

from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.captured import Synthetic
from crt_exp.studies.uci import interval

L, HEADS, D, DEPTH, SEED = 512, 8, 64, 12, 0
SAMPLES = {"small": 5, "gpu": 15, "full": 15}
MS, M = (64, 128, 256), 256
SCALES = (1.0, 0.5)              # standard deviation of queries and keys in the first layer
WITHOUT = palette.APART
MAPS = palette.maps(WITHOUT)
SWEPT = ("trig", "pos", "oprf")  # over m, and with iid rows too
SHOWN = (1, 2, 4, 6, 8, 10, 12)
STYLES = dict(zip(MS, (":", "--", "-")))


def main(size: str) -> None:
    cases = [(f, "orthogonal", M) for f in MAPS] + [(f, "orthogonal", m) for f in SWEPT for m in MS if m != M]
    cases += [(f, "iid", M) for f in SWEPT]
    keys = [{"features": f, "sampler": s, "m": m, "samples": SAMPLES[size]} for f, s, m in cases]
    keys += [{"features": f, "sampler": "orthogonal", "m": M, "samples": SAMPLES[size], "scale": SCALES[1]}
             for f in MAPS]
    sources = ("features", "samplers", "attention", "models/transformer.py", "studies/captured.py",
               "report/performers_fig14.py")
    cells = Cells("performers-fig14", sources).fill(keys, errors, "Figure 14")
    found = {(k["features"], k["sampler"], k["m"], k.get("scale", SCALES[0])): torch.tensor(cells[k]) for k in keys}
    rows = [{"features": f, "sampler": s, "m": m, "scale": scale, "layers": i + 1, "error_mean": e.mean().item(),
             "error_std": e.std().item(), "log_error_mean": e.log().mean().item(),
             "log_error_std": e.log().std().item()}
            for (f, s, m, scale), errors in found.items() for i, e in enumerate(errors.T)]
    body = "\n".join([statements(found), table(found)])
    facts = ("Relative error |approximate - exact| / |exact| (Frobenius) of the hidden states behind each layer, all "
             "attention up to it approximated; geometric mean (shaded: standard deviation of the log) over "
             f"{SAMPLES[size]} samples of tokens and noise (seed {SEED}; the same tokens for all). A pre-norm "
             f"Transformer with {HEADS} heads of d = {D}, FFN {4 * HEADS * D}, random weights (torch's, those of "
             "queries and keys scaled to give them the standard deviation `scale` in the first layer, 1 where none is "
             f"given), L = {L} tokens ~ N(0, 1), bidirectional; no training, no pretrained weights. Features fitted to "
             "each head and sequence. The paper's figure is about orthogonal features; it states no sizes."
             f"{palette.left_out(WITHOUT)}")
    path = write_report("performers-fig14", "Performers Figure 14: the error of attention behind 1 to 12 layers", body,
                        rows, figure(found), facts, cells.seconds())
    print(f"{statements(found)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def errors(features: str, sampler: str, m: int, samples: int, scale: float = SCALES[0]) -> list[list[float]]:
    """(samples, layers)."""
    make = Mechanism.of(features=features, sampler=sampler, m=m, seed=SEED).layer
    return Synthetic(L, HEADS, D, scale, DEPTH).hidden_errors(make, samples, SEED).tolist()


def statements(found) -> str:
    """Performers D.1: error grows on its way through the layers;
    met where the whole interval of the ratio is above 1."""
    lines = []
    for (f, s, m, scale), e in found.items():
        if s == "orthogonal" and m == M:
            log = interval((e[:, -1] / e[:, 0]).log().tolist(), "log")
            low, mid, high = (math.exp(log["log"] + sign * log["log_ci95"]) for sign in (-1, 0, 1))
            verdict = "met" if low > 1 else "not met" if high < 1 else "open"
            ends = (middle(e[:, i - 1]) for i in (1, DEPTH))
            lines.append([f, scale, *ends, f"{mid:.2f} ({low:.2f} to {high:.2f})", verdict])
    return ("The paper's finding, small errors grow on their way through the layers: error behind layer "
            f"{DEPTH} over error behind layer 1, orthogonal, m = {M}, geometric means and 95% interval over samples; "
            "open where it holds 1. An error of 1 is no approximation at all; beyond, denominators near 0 have blown "
            "it up.\n\n"
            + markdown(["mechanism", "scale", "behind layer 1", f"behind layer {DEPTH}", "growth", ""], lines))


def middle(errors: torch.Tensor) -> str:
    return f"{errors.log().mean().exp():.3g}"


def table(found) -> str:
    lines = [[f"{f} x {s}, m = {m}, scale {scale}", *(middle(e[:, i - 1]) for i in SHOWN)]
             for (f, s, m, scale), e in found.items()]
    return "## Relative error of the hidden states\n\n" + markdown(["", *(f"layer {i}" for i in SHOWN)], lines)


def figure(found):
    fig, axes = new_figure(1, 3, figsize=(13, 3.9))
    for (f, s, m, scale), e in found.items():
        if s == "orthogonal" and m == M:
            style = "--" if f == "gerf" else "-"  # it lies on oprf where it takes s = 1
            curve(axes[SCALES.index(scale)], e, palette.colour(f), f, style)
        if s == "orthogonal" and f in SWEPT[1:] and scale == SCALES[0]:
            curve(axes[2], e, palette.colour(f), f"{f}, m = {m}", STYLES[m])
        if s == "iid" and f in SWEPT[1:]:
            curve(axes[2], e, "#999999" if f == "pos" else "#000000", f"{f}, m = {m}, iid", "-.")
    titles = (f"all mechanisms, orthogonal, m = {M}, scale {s:g}" for s in SCALES)
    for ax, title in zip(axes, (*titles, "number of projections, scale 1")):
        ax.set(title=title, xlabel="layers", yscale="log")
        ax.set_xticks(range(1, DEPTH + 1))
        ax.legend(fontsize=6.5, ncols=2)
    axes[0].set_ylabel("relative error of the hidden states")
    fig.tight_layout()
    return fig


def curve(ax, errors: torch.Tensor, colour: str, label: str, style: str = "-") -> None:
    layers, mean, std = range(1, DEPTH + 1), errors.log().mean(0), errors.log().std(0)
    ax.plot(layers, mean.exp(), color=colour, ls=style, label=label, lw=1.5)
    ax.fill_between(layers, (mean - std).exp(), (mean + std).exp(), color=colour, alpha=0.1, lw=0)
