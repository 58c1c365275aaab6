"""make performers-fig14: Figure 14 of Performers, the error of attention on its way through the layers of Transformers
of random weights, and of the encoder of characters that `table2` trains."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.report import palette, table2_encoders, table2_runs
from crt_exp.report.evidence import Claim, Verdict, judged, won_by
from crt_exp.report.kernel_arms import below, over, resolution
from crt_exp.report.table2 import SETTINGS as OF_TABLE2
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies.captured import Synthetic, relative_error
from crt_exp.studies.fidelity import of_heads
from crt_exp.studies.subject import Subject
from crt_exp.swap.swap import unswap_attention


class Arm(NamedTuple):
    """A map with m projections, or a control of conf/attention, which has neither."""

    name: str
    sampler: str = ""
    m: int = 0


class Model(NamedTuple):
    """What attends. S: mean |x + y|^2 in the first layer, which random weights are made for; 0: the trained encoder."""

    S: int

    def __str__(self):
        return f"mean |x + y|^2 = {self.S}" if self.S else "the trained encoder"


L, HEADS, D, DEPTH, SEED = 512, 8, 64, 12, 0
SAMPLES = {"small": 8, "gpu": 15, "full": 15}
MS, M = (64, 128, 256), 256
STRONG, WEAK, TRAINED = MODELS = Model(16), Model(4), Model(0)
WITHOUT = palette.APART
MAPS = palette.maps(WITHOUT)
SWEPT = ("trig", "pos", "oprf")  # over m, and with iid rows too
UNIFORM = Arm("uniform")
KINDS = ("accumulated", "propagated")
STYLES = dict(zip(MS, (":", "--", "-")))
Found = dict[tuple[Model, Arm], dict[str, list[list[float]]]]  # -> kind -> (samples, layers)


def arms(model: Model) -> list[Arm]:
    every = [*(Arm(f, "orthogonal", M) for f in MAPS), UNIFORM]
    if model != STRONG:
        return every
    return [*every, *(Arm(f, "orthogonal", m) for f in SWEPT for m in MS if m != M), *(Arm(f, "iid", M) for f in SWEPT)]


def main(size: str) -> None:
    samples, cells = range(SAMPLES[size]), Cells("performers-fig14")
    keys = {(model, arm, i): {"S": model.S, **arm._asdict(), "sample": i}  # those of the same weights follow each other
            for model in (STRONG, WEAK) for i in samples for arm in arms(model)}
    cells.fill(list(keys.values()), errors, "Figure 14")
    models, encoder = trained(size)
    of_trained = {(TRAINED, arm, i): encoder | {"texts": len(samples), **arm._asdict(), "sample": i}
                  for i in samples for arm in arms(TRAINED)}
    cells.fill(list(of_trained.values()), trained_errors, "the trained encoder")
    about = encoder | {"texts": len(samples)}
    cells.fill([about], sums, "its queries and keys")
    keys |= of_trained
    found = {(model, arm): {kind: [cells[keys[model, arm, i]][kind] for i in samples] for kind in KINDS}
             for model in MODELS for arm in arms(model)}
    write(size, found, judged(claims(found)), cells[about], models.seconds() + cells.seconds())


def errors(S: int, name: str, sampler: str, m: int, sample: int) -> dict[str, list[float]]:
    """Of each kind and layer."""
    chosen = Mechanism.of(features=name, sampler=sampler, m=m, seed=SEED) if m else Mechanism.of(name)
    return Synthetic(L, HEADS, D, (S / (2 * D**0.5)) ** 0.5, DEPTH).branch_errors(chosen.layer, sample, SEED)


# ---- the trained encoder


def trained(size: str) -> tuple[Cells, dict[str, Any]]:
    """The cells of `table2` with its first encoder of characters, trained if it is not there, and where it lies."""
    kind, models = OF_TABLE2[size].kind(table2_runs.CHARACTERS), Cells("table2-models", table2_runs.SOURCES)
    for stage in range(len(kind.stages)):
        models.fill([kind.key(SEED, stage)], table2_encoders.train, "training an encoder", workers=1)
    table2_encoders.there(kind.key(SEED))
    return models, {"start": kind.start(SEED), "length": kind.block}


@lru_cache(maxsize=1)
def subject(start: str, length: int, texts: int) -> Subject:
    """That encoder on texts of the validation split."""
    text = str(official_file("wikitext2", "valid"))
    return Subject(start, text, None, None, length, texts, 1, SEED, cache_dir=Path("outputs/performers-fig14/tokens"))


def trained_errors(start: str, length: int, texts: int, name: str, sampler: str, m: int,
                   sample: int) -> dict[str, list[float]]:
    """As `errors`, of one of the texts."""
    seed = 1000 * SEED + sample
    chosen = Mechanism.of(features=name, sampler=sampler, m=m, seed=seed) if m else Mechanism.of(name)
    model, ids = subject(start, length, texts).model, subject(start, length, texts).texts[sample:sample + 1]
    exact, found = added(model, ids), {}
    for kind, layers in zip(KINDS, (None, 0)):
        chosen.swap(model, layers, saved=False)
        found[kind] = [float(relative_error(now, before)) for now, before in zip(added(model, ids), exact)]
        unswap_attention(model)
    return found


@torch.no_grad()
def added(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """What attention adds to the hidden states in each layer of a BERT, its projection included: (1, L, width)."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        for layer in model.bert.encoder.layer:
            hook = layer.attention.output.dense.register_forward_hook(lambda module, given, out: found.append(out))
            stack.callback(hook.remove)
        model(input_ids=ids)
    return found


def sums(start: str, length: int, texts: int) -> list[float]:
    """Mean |x + y|^2 of each layer."""
    read = subject(start, length, texts)
    return [float(np.mean(of_heads(read, i)["mean_sq_sum"])) for i in range(len(read.calls[0]))]


# ---- what it concludes


def behind(found: Found, model: Model, arm: Arm, layer: int, kind: str = "accumulated") -> list[float]:
    """Of each sample; layer -1 is the last."""
    return [each[layer if layer < 0 else layer - 1] for each in found[model, arm][kind]]


def depth(found: Found, model: Model) -> int:
    return len(found[model, UNIFORM][KINDS[0]][0])


def middle(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def claims(found: Found) -> list[Claim]:
    """Performers D.1: small errors grow on their way through the layers. Where the error is made anew in each layer,
    and where only that of the first one travels; and orthogonal rows end below iid ones."""
    made = []
    for model in MODELS:
        for f in MAPS:
            arm, last = Arm(f, "orthogonal", M), depth(found, model)
            made.append(below(f"{model}: the error of {f} grows from layer 1 to {last}, all attention approximated",
                              behind(found, model, arm, 1), behind(found, model, arm, -1)))
            made.append(below(f"{model}: the error of {f} in layer 1 alone grows from layer 2 to {last}",
                              *(behind(found, model, arm, layer, "propagated") for layer in (2, -1))))
    made += [below(f"{STRONG}: {f} with orthogonal rows ends below {f} with iid rows",
                   *(behind(found, STRONG, Arm(f, rows, M), -1) for rows in ("orthogonal", "iid"))) for f in SWEPT]
    return made


def controls_that_win(found: Found) -> str:
    beaten: dict[str, list[str]] = {}
    for model in MODELS:
        for layer in (1, depth(found, model)):
            least = middle(behind(found, model, UNIFORM, layer))
            others = [arm for arm in arms(model) if arm != UNIFORM]
            beaten[f"{model}, layer {layer}"] = [named(arm) for arm in others
                                                 if middle(behind(found, model, arm, layer)) > least]
    return won_by("uniform attention (the mean of V in every layer)", beaten,
                  2 * sum(len(arms(model)) - 1 for model in MODELS))


def named(arm: Arm) -> str:
    return f"{arm.name} x {arm.sampler}, m = {arm.m}" if arm.m else f"{arm.name} (control)"


# ---- the page


def write(size: str, found: Found, verdicts: list[Verdict], of_trained: list[float], seconds: float) -> None:
    said = f"{controls_that_win(found)}\n\n{statements(found, verdicts)}"
    parts = [said, power(found), "", *(table(found, model, kind) for model in MODELS for kind in KINDS)]
    rows = [{"model": str(model), **arm._asdict(), "kind": kind, "layer": layer, "error": middle(values),
             "log_std": float(np.std(np.log(values), ddof=1))}
            for (model, arm), kinds in found.items() for kind in KINDS for layer, values in layers(kinds[kind])]
    path = write_report("performers-fig14", "Performers Figure 14: the error of attention on its way through layers",
                        "\n".join(parts), [*rows, *(v.row() for v in verdicts)], figure(found),
                        facts(size, of_trained), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def layers(errors: Sequence[Sequence[float]]) -> list[tuple[int, list[float]]]:
    """(layer, its error in each sample); the first layer's own is the same for both kinds. A layer that an error does
    not reach is left out: there is none."""
    return [(i + 1, list(values)) for i, values in enumerate(zip(*errors)) if min(values) > 0]


def statements(found: Found, verdicts: list[Verdict]) -> str:
    judged_as, lines = iter(verdicts), []
    for model in MODELS:
        for arm in [Arm(f, "orthogonal", M) for f in MAPS]:
            words = [f"**{next(judged_as).word}**" for _ in KINDS]
            lines.append(growth(found, model, arm, [f", {word}" for word in words]))
        lines.append(growth(found, model, UNIFORM, ["", ""]))
    rest = "\n".join(map(str, judged_as))
    return ("The paper's finding, small errors grow on their way through the layers, as ratios with their 95% interval "
            f"(orthogonal, m = {M}), judged with Holm's correction over all. An error of 1 is no approximation at "
            f"all. The last layer is the {DEPTH}th, of the trained encoder number {depth(found, TRAINED)}. Uniform "
            "attention, which has no features, says what the layers themselves do to an error: only what a map does "
            "beyond it is the map's.\n\n"
            + markdown(["map", "model", "error in layer 1", "last layer over layer 1, all approximated",
                        "last layer over layer 2, the first alone"], lines) + f"\n{rest}\n")


def growth(found: Found, model: Model, arm: Arm, words: Sequence[str]) -> list[str]:
    """A row: what the error is in the first layer, and what becomes of it."""
    grown = over(behind(found, model, arm, -1), behind(found, model, arm, 1))
    travelled = over(*(behind(found, model, arm, layer, "propagated") for layer in (-1, 2)))
    return [arm.name if arm.m else named(arm), escaped(model), f"{middle(behind(found, model, arm, 1)):.3g}",
            *(text + word for text, word in zip((grown, travelled), words))]


def escaped(model: Model) -> str:
    return str(model).replace("|", "\\|")


def power(found: Found) -> str:
    pair = (behind(found, STRONG, Arm("pos", rows, M), -1) for rows in ("orthogonal", "iid"))
    return resolution(f"the error in layer {DEPTH} of pos with orthogonal and iid rows, {STRONG},", *pair)


def table(found: Found, model: Model, kind: str) -> str:
    what = "all attention approximated" if kind == "accumulated" else "attention of the first layer alone approximated"
    shown = sorted({1, *range(2, depth(found, model) + 1, 2), depth(found, model)})
    lines = [[named(arm), *(f"{middle(behind(found, model, arm, layer, kind)):.3g}" for layer in shown)]
             for arm in arms(model)]
    return (f"## Relative error of the attention branch, {escaped(model)}, {what}\n\n"
            + markdown(["", *(f"layer {i}" for i in shown)], lines))


def facts(size: str, of_trained: list[float]) -> str:
    kind = OF_TABLE2[size].kind(table2_runs.CHARACTERS)
    return ("Relative error |approximate - exact| / |exact| (Frobenius) of what attention adds to the hidden states in "
            "each layer, its projection included, not of the hidden states, in which the tokens themselves hide the "
            f"error; geometric means over {SAMPLES[size]} samples of weights, tokens and noise (seed {SEED}; weights "
            f"and tokens the same for all arms). A pre-norm Transformer with {HEADS} heads of d = {D}, FFN "
            f"{4 * HEADS * D}, random weights (torch's, those of queries and keys scaled to give the first layer the "
            f"mean |x + y|^2 named), L = {L} tokens ~ N(0, 1), bidirectional; no training, no pretrained weights. "
            "The trained encoder is a BERT of characters with heads of d = 16, trained with exact attention on "
            f"WikiText-2 (`{' '.join(kind.stages[-1])}`), mean |x + y|^2 by layer "
            f"{', '.join(f'{value:.1f}' for value in of_trained)}; its samples are {SAMPLES[size]} texts of "
            f"{kind.block} tokens of the validation split, each with noise of its own. Features fitted to each head "
            "and sequence. The paper's figure is about orthogonal features; it states no "
            f"sizes.{palette.left_out(WITHOUT)}")


def figure(found: Found):
    fig, axes = new_figure(2, len(MODELS) + 1, figsize=(21, 8.4))
    for line, kind in zip(axes, KINDS):
        what = "all approximated" if kind == "accumulated" else "the first alone"
        for ax, model in zip(line, MODELS):
            of = {(f, "-"): found[model, Arm(f, "orthogonal", M)][kind] for f in MAPS}
            curves(ax, of, found[model, UNIFORM][kind])
            ax.set_title(f"{what}; m = {M}, {drawn(model)}")
        swept = {(f, STYLES[m]): found[STRONG, Arm(f, "orthogonal", m)][kind] for f in SWEPT[1:] for m in MS}
        curves(line[-1], swept, found[STRONG, UNIFORM][kind])
        line[-1].set_title(f"{what}; m = {MS[0]} (dotted) to {M}, {drawn(STRONG)}")
        line[0].set_ylabel("relative error of the attention branch")
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    fig.tight_layout(w_pad=4)
    return fig


def drawn(model: Model) -> str:
    return f"mean $|x + y|^2$ = {model.S}" if model.S else str(model)


def curves(ax, of: dict[tuple[str, str], list[list[float]]], uniform: list[list[float]]) -> None:
    """Geometric means over samples; the control in grey."""
    ax.set(yscale="log")
    ax.set_xticks(range(1, len(uniform[0]) + 1))
    ends = []
    for (name, style), errors in [*of.items(), (("uniform", "-"), uniform)]:
        x, y = zip(*((layer, middle(values)) for layer, values in layers(errors)))
        ax.plot(x, y, color=palette.colour(name), ls=style, lw=2.5 if name == "uniform" else 1.4)
        ends += [(name, x[-1], y[-1], palette.colour(name))] if style == "-" else []
    label_ends(ax, ends, size=7)
