"""make performers-fig14: Figure 14 of Performers, the error of attention on its way through the
layers of a Transformer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Verdict, judged, won_by
from crt_exp.report.kernel_arms import below, over, resolution
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies.captured import Synthetic


class Arm(NamedTuple):
    """A map with m projections, or a control of conf/attention, which has neither."""

    name: str
    sampler: str = ""
    m: int = 0


L, HEADS, D, DEPTH, SEED = 512, 8, 64, 12, 0
SAMPLES = {"small": 8, "gpu": 15, "full": 15}
MS, M = (64, 128, 256), 256
SUMS = (16, 4)                   # mean |x + y|^2 in the first layer
WITHOUT = palette.APART
MAPS = palette.maps(WITHOUT)
SWEPT = ("trig", "pos", "oprf")  # over m, and with iid rows too
UNIFORM = Arm("uniform")
KINDS = ("accumulated", "propagated")
SHOWN = (1, 2, 4, 6, 8, 10, 12)
STYLES = dict(zip(MS, (":", "--", "-")))
Found = dict[tuple[int, Arm], dict[str, list[list[float]]]]  # mean |x + y|^2, arm -> kind -> (samples, layers)


def arms(S: int) -> list[Arm]:
    every = [*(Arm(f, "orthogonal", M) for f in MAPS), UNIFORM]
    if S in SUMS[1:]:
        return every
    return [*every, *(Arm(f, "orthogonal", m) for f in SWEPT for m in MS if m != M), *(Arm(f, "iid", M) for f in SWEPT)]


def main(size: str) -> None:
    samples = range(SAMPLES[size])  # those of the same weights follow each other
    keys = {(S, arm, i): {"S": S, **arm._asdict(), "sample": i} for S in SUMS for i in samples for arm in arms(S)}
    cells = Cells("performers-fig14").fill(list(keys.values()), errors, "Figure 14")
    found = {(S, arm): {kind: [cells[keys[S, arm, i]][kind] for i in samples] for kind in KINDS}
             for S in SUMS for arm in arms(S)}
    write(size, found, judged(claims(found)), cells.seconds())


def errors(S: int, name: str, sampler: str, m: int, sample: int) -> dict[str, list[float]]:
    """Of each kind and layer."""
    chosen = Mechanism.of(features=name, sampler=sampler, m=m, seed=SEED) if m else Mechanism.of(name)
    return Synthetic(L, HEADS, D, (S / (2 * D**0.5)) ** 0.5, DEPTH).branch_errors(chosen.layer, sample, SEED)


# ---- what it concludes


def behind(found: Found, S: int, arm: Arm, layer: int, kind: str = "accumulated") -> list[float]:
    """Of each sample."""
    return [each[layer - 1] for each in found[S, arm][kind]]


def middle(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def claims(found: Found) -> list[Claim]:
    """Performers D.1: small errors grow on their way through the layers. Where the error is made anew in each layer,
    and where only that of the first one travels; and orthogonal rows end below iid ones."""
    made = []
    for S in SUMS:
        for f in MAPS:
            arm = Arm(f, "orthogonal", M)
            made.append(below(f"mean |x + y|^2 = {S}: the error of {f} grows from layer 1 to {DEPTH}, all attention "
                              "approximated", behind(found, S, arm, 1), behind(found, S, arm, DEPTH)))
            made.append(below(f"mean |x + y|^2 = {S}: the error of {f} in layer 1 alone grows from layer 2 to {DEPTH}",
                              *(behind(found, S, arm, layer, "propagated") for layer in (2, DEPTH))))
    made += [below(f"mean |x + y|^2 = {SUMS[0]}: {f} with orthogonal rows ends below {f} with iid rows",
                   *(behind(found, SUMS[0], Arm(f, rows, M), DEPTH) for rows in ("orthogonal", "iid"))) for f in SWEPT]
    return made


def controls_that_win(found: Found) -> str:
    beaten: dict[str, list[str]] = {}
    for S in SUMS:
        for layer in (1, DEPTH):
            least = middle(behind(found, S, UNIFORM, layer))
            beaten[f"mean |x + y|^2 = {S}, layer {layer}"] = [
                named(arm) for arm in arms(S) if arm != UNIFORM and middle(behind(found, S, arm, layer)) > least]
    return won_by("uniform attention (the mean of V in every layer)", beaten, 2 * sum(len(arms(S)) - 1 for S in SUMS))


def named(arm: Arm) -> str:
    return f"{arm.name} x {arm.sampler}, m = {arm.m}" if arm.m else f"{arm.name} (control)"


# ---- the page


def write(size: str, found: Found, verdicts: list[Verdict], seconds: float) -> None:
    said = f"{controls_that_win(found)}\n\n{statements(found, verdicts)}"
    parts = [said, power(found), "", *(table(found, S, kind) for S in SUMS for kind in KINDS)]
    rows = [{"S": S, **arm._asdict(), "kind": kind, "layer": layer, "error": middle(values),
             "log_std": float(np.std(np.log(values), ddof=1))}
            for (S, arm), kinds in found.items() for kind in KINDS for layer, values in layers(kinds[kind])]
    path = write_report("performers-fig14", "Performers Figure 14: the error of attention through 12 layers",
                        "\n".join(parts), [*rows, *(v.row() for v in verdicts)], figure(found), facts(size), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def layers(errors: Sequence[Sequence[float]]) -> list[tuple[int, list[float]]]:
    """(layer, its error in each sample); the first layer's own is the same for both kinds. A layer that an error does
    not reach is left out: there is none."""
    return [(i + 1, list(values)) for i, values in enumerate(zip(*errors)) if min(values) > 0]


def statements(found: Found, verdicts: list[Verdict]) -> str:
    judged_as, lines = iter(verdicts), []
    for S in SUMS:
        for f in MAPS:
            arm = Arm(f, "orthogonal", M)
            grown = over(behind(found, S, arm, DEPTH), behind(found, S, arm, 1))
            travelled = over(*(behind(found, S, arm, layer, "propagated") for layer in (DEPTH, 2)))
            lines.append([f, S, f"{middle(behind(found, S, arm, 1)):.3g}", f"{grown}, **{next(judged_as).word}**",
                          f"{travelled}, **{next(judged_as).word}**"])
    rest = "\n".join(map(str, judged_as))
    return ("The paper's finding, small errors grow on their way through the layers, as ratios with their 95% interval "
            f"(orthogonal, m = {M}), judged with Holm's correction over all. An error of 1 is no approximation at "
            "all.\n\n"
            + markdown(["map", "mean \\|x + y\\|^2", "error in layer 1", f"layer {DEPTH} over layer 1, all "
                        "approximated", f"layer {DEPTH} over layer 2, the first alone"], lines) + f"\n{rest}\n")


def power(found: Found) -> str:
    pair = (behind(found, SUMS[0], Arm("pos", rows, M), DEPTH) for rows in ("orthogonal", "iid"))
    return resolution(f"the error in layer {DEPTH} of pos with orthogonal and iid rows", *pair)


def table(found: Found, S: int, kind: str) -> str:
    what = "all attention approximated" if kind == "accumulated" else "attention of the first layer alone approximated"
    lines = [[named(arm), *(f"{middle(behind(found, S, arm, layer, kind)):.3g}" for layer in SHOWN)] for arm in arms(S)]
    return (f"## Relative error of the attention branch, mean \\|x + y\\|^2 = {S}, {what}\n\n"
            + markdown(["", *(f"layer {i}" for i in SHOWN)], lines))


def facts(size: str) -> str:
    return ("Relative error |approximate - exact| / |exact| (Frobenius) of what attention adds to the hidden states in "
            "each layer, its projection included, not of the hidden states, in which the tokens themselves hide the "
            f"error; geometric means over {SAMPLES[size]} samples of weights, tokens and noise (seed {SEED}; weights "
            f"and tokens the same for all arms). A pre-norm Transformer with {HEADS} heads of d = {D}, FFN "
            f"{4 * HEADS * D}, random weights (torch's, those of queries and keys scaled to give the first layer the "
            f"mean |x + y|^2 named), L = {L} tokens ~ N(0, 1), bidirectional; no training, no pretrained weights. "
            "Features fitted to each head and sequence. The paper's figure is about orthogonal features; it states no "
            f"sizes.{palette.left_out(WITHOUT)}")


def figure(found: Found):
    fig, axes = new_figure(2, len(SUMS) + 1, figsize=(16, 8.4))
    for line, kind in zip(axes, KINDS):
        what = "all approximated" if kind == "accumulated" else "the first alone"
        for ax, S in zip(line, SUMS):
            curves(ax, {(f, "-"): found[S, Arm(f, "orthogonal", M)][kind] for f in MAPS}, found[S, UNIFORM][kind])
            ax.set_title(f"{what}; m = {M}, mean $|x + y|^2$ = {S}")
        swept = {(f, STYLES[m]): found[SUMS[0], Arm(f, "orthogonal", m)][kind] for f in SWEPT[1:] for m in MS}
        curves(line[-1], swept, found[SUMS[0], UNIFORM][kind])
        line[-1].set_title(f"{what}; m = {MS[0]} (dotted) to {M}, mean $|x + y|^2$ = {SUMS[0]}")
        line[0].set_ylabel("relative error of the attention branch")
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    fig.tight_layout(w_pad=4)
    return fig


def curves(ax, of: dict[tuple[str, str], list[list[float]]], uniform: list[list[float]]) -> None:
    """Geometric means over samples; the control in grey."""
    ax.set(yscale="log")
    ax.set_xticks(range(1, DEPTH + 1))
    ends = []
    for (name, style), errors in [*of.items(), (("uniform", "-"), uniform)]:
        x, y = zip(*((layer, middle(values)) for layer, values in layers(errors)))
        ax.plot(x, y, color=palette.colour(name), ls=style, lw=2.5 if name == "uniform" else 1.4)
        ends += [(name, x[-1], y[-1], palette.colour(name))] if style == "-" else []
    label_ends(ax, ends, size=7)
