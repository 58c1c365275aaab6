"""make performers-fig14: Figure 14 of Performers, the error of attention on its way through the layers of a Transformer."""

from functools import partial

import torch

from crt_exp.attention import RandomFeatureAttention
from crt_exp.config import build, choices
from crt_exp.report.writing import COLOURS, Cells, markdown, new_figure, write_report
from crt_exp.tasks.captured import Synthetic
from crt_exp.tasks.uci import interval

L, HEADS, D, DEPTH, SEED = 512, 8, 64, 12, 0
SAMPLES = {"small": 5, "gpu": 15, "full": 15}
MS, M = (64, 128, 256), 256
SWEPT = ("trig", "pos", "oprf")  # over m, and with iid rows too
SHOWN = (1, 2, 4, 6, 8, 10, 12)
STYLES = dict(zip(MS, (":", "--", "-")))


def main(size: str) -> None:
    names = [n for n in COLOURS if n in choices("features")]
    cases = [(f, "orthogonal", M) for f in names] + [(f, "orthogonal", m) for f in SWEPT for m in MS if m != M]
    cases += [(f, "iid", M) for f in SWEPT]
    keys = [{"features": f, "sampler": s, "m": m, "samples": SAMPLES[size]} for f, s, m in cases]
    cells = Cells("performers-fig14", ("features", "samplers", "attention", "models/transformer.py", "tasks/captured.py",
                                       "report/performers_fig14.py")).fill(keys, errors, "Figure 14")
    found = {case: torch.tensor(cells[key]) for case, key in zip(cases, keys)}
    rows = [{"features": f, "sampler": s, "m": m, "layers": i + 1, "error_mean": e.mean().item(), "error_std": e.std().item()}
            for (f, s, m), errors in found.items() for i, e in enumerate(errors.T)]
    body = "\n".join([statements(found), table(found)])
    facts = (f"Relative error |approximate - exact| / |exact| (Frobenius) of the hidden states behind each layer, all attention up to it "
             f"approximated, mean and standard deviation over {SAMPLES[size]} samples of tokens and noise (seed {SEED}; the same tokens for all). "
             f"A pre-norm Transformer with {HEADS} heads of d = {D}, FFN {4 * HEADS * D}, random weights (torch's, those of queries and keys scaled "
             f"to give them variance 1 in the first layer), L = {L} tokens ~ N(0, 1), bidirectional; no training, no pretrained weights. Features "
             "fitted to each head and sequence. The paper's figure is about orthogonal features; it states no sizes.")
    path = write_report("performers-fig14", "Performers Figure 14: the error of attention behind 1 to 12 layers", body, rows, figure(found),
                        facts, cells.seconds())
    print(f"{statements(found)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def errors(features: str, sampler: str, m: int, samples: int) -> list[list[float]]:
    """(samples, layers)."""
    phi, draw = build("features", features, kernel="softmax"), build("sampler", sampler)
    make = partial(RandomFeatureAttention, phi, draw, m, seed=SEED)
    return Synthetic(L, HEADS, D, 1.0, DEPTH).hidden_errors(make, samples, SEED).tolist()


def statements(found) -> str:
    """Performers D.1: the error grows with the number of layers; and what holds of the mechanisms here."""
    lines = []
    for (f, s, m), e in found.items():
        if s == "orthogonal" and m == M:
            growth = interval((e[:, -1] / e[:, 0]).tolist(), "growth")
            low, high = growth["growth"] - growth["growth_ci95"], growth["growth"] + growth["growth_ci95"]
            verdict = "met" if low > 1 else "not met" if high < 1 else "open: the interval holds 1"
            lines.append([f, *(f"{e[:, i - 1].mean():.3g}" for i in (1, DEPTH)), f"{growth['growth']:.2f} ({low:.2f} to {high:.2f})", verdict])
    return (f"The paper's finding, error grows on its way through the layers: error behind layer {DEPTH} over error behind layer 1, orthogonal, "
            f"m = {M}, mean and 95% interval over samples:\n\n"
            + markdown(["mechanism", "behind layer 1", f"behind layer {DEPTH}", "growth", "finding"], lines))


def table(found) -> str:
    lines = [[f"{f} x {s}, m = {m}", *(f"{e[:, i - 1].mean():.3g} ± {e[:, i - 1].std():.1g}" for i in SHOWN)] for (f, s, m), e in found.items()]
    return "## Relative error of the hidden states\n\n" + markdown(["", *(f"layer {i}" for i in SHOWN)], lines)


def figure(found):
    fig, axes = new_figure(1, 3, figsize=(13, 3.8))
    for (f, s, m), e in found.items():
        if s == "orthogonal" and m == M:
            curve(axes[0], e, COLOURS[f], f)
        if s == "orthogonal" and f in SWEPT:
            curve(axes[1], e, COLOURS[f], f"{f}, m = {m}", STYLES[m])
        if f in SWEPT and m == M:
            curve(axes[2], e, COLOURS[f], f"{f}, {s}", "-" if s == "orthogonal" else "--")
    for ax, title in zip(axes, (f"all mechanisms, orthogonal, m = {M}", "numbers of projections, orthogonal", f"samplers, m = {M}")):
        ax.set(title=title, xlabel="layers", yscale="log")
        ax.set_xticks(range(1, DEPTH + 1))
        ax.legend(fontsize=6.5, ncols=2)
    axes[0].set_ylabel("relative error of the hidden states")
    fig.tight_layout()
    return fig


def curve(ax, errors: torch.Tensor, colour: str, label: str, style: str = "-") -> None:
    layers, mean, std = range(1, DEPTH + 1), errors.mean(0), errors.std(0)
    ax.plot(layers, mean, color=colour, ls=style, label=label, lw=1.5)
    ax.fill_between(layers, (mean - std).clamp(min=1e-3), mean + std, color=colour, alpha=0.12, lw=0)
