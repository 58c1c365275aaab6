"""Write results.md, which recommends an attention, and index.md from the rows of all pages."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import colour, label_ends, markdown, new_figure, save_figure
from crt_exp.experiments.papers import whole_models
from crt_exp.experiments.papers.parts.settings import (
    ADAPTED,
    FAMILIES,
    MIXTURE,
    QNLI,
    REPEATED,
    SMOLLM2,
    STSB,
    SWAPPED,
    TUNED,
    costs_of,
)
from crt_exp.experiments.papers.parts.verdicts import (
    RULES,
    Verdicts,
    index_text,
    undecided_claims,
    verdict_counts,
)
from crt_exp.experiments.report import Rows, mean_ci
from crt_exp.experiments.report.rendering import claims_frame, details
from crt_exp.experiments.report.rows import read_rows
from crt_exp.experiments.report.tables import to_markdown
from crt_exp.experiments.runner.run import write_atomic

REFERENCE = "FAVOR++"  # measured in every setting, so that each method is compared with it on shared settings
LENGTHS = (1024, 4096, 16384)


def shared_medians(
    costs: pd.DataFrame, family: str, other: str = REFERENCE
) -> tuple[str, str, int]:
    """Medians of two families over the settings that both have, and the number of these settings."""
    shared = costs.dropna(subset=[family, other])
    medians = shared.median()
    return percentage(medians[family]), percentage(medians[other]), len(shared)


def median_cell(costs: pd.DataFrame, family: str) -> str:
    """Format the median of a family against that of FAVOR++, with the number of settings."""
    first, second, n = shared_medians(costs, family)
    if not n:
        return ""
    return f"{first} ({n})" if family == REFERENCE else f"{first} against {second} ({n})"


def percentage(share: float) -> str:
    return "" if np.isnan(share) else f"{share:.0%}".replace("-0%", "0%")


def setting_table(costs: pd.DataFrame) -> pd.DataFrame:
    """One row a setting: the loss increase of each family in percent of that of uniform attention."""
    return costs.dropna(axis=1, how="all").map(percentage).rename_axis("setting")


def loss_against_time(shares: pd.Series, times: Mapping[str, Mapping[str, float]]):
    """Plot the loss increase of each family against its time, one marker for each of two builds of the code."""
    builds = next(iter(times.values()))
    fig, ax = new_figure(1, 1, figsize=(4.2, 3.2), layout="constrained")
    ends = []
    for family, built in {"exact": dict.fromkeys(builds, 1.0), **times}.items():
        share = 0.0 if family == "exact" else shares[family]
        if np.isnan(share):
            continue
        shade = colour(FAMILIES.get(family, family).lower())
        y = 100 * share
        for x, filling in zip(built.values(), (shade, "none")):
            ax.scatter([x], [y], edgecolors=shade, facecolors=filling, s=40, zorder=3)
        ends.append((family, max(built.values()), y, shade))
    for build, filling in zip(builds, ("grey", "none")):
        ax.scatter([], [], edgecolors="grey", facecolors=filling, s=40, label=build)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    ax.set(ylim=(-8, 118), title="SmolLM2, repeated passage of 4096 tokens")
    ax.set_xlim(left=0)
    ax.set_xlabel("time of its forward pass relative to exact attention")
    ax.set_ylabel("loss increase, % of that of uniform attention")
    label_ends(ax, ends)
    return fig


def write(folder: Path, verdicts: Verdicts) -> None:
    """results.md, its picture, index.md and claims.csv."""
    rows = {name: read_rows(name, folder) for name in verdicts}
    claims = pd.concat([claims_frame(name, cases) for name, cases in verdicts.items() if cases])
    write_atomic(folder / "claims.csv", claims.to_csv(index=False, lineterminator="\n"))
    figure = loss_against_time(REPEATED.costs(rows), model_times(rows["whole_models"]))
    save_figure(figure, folder / "results.png")
    write_atomic(folder / "results.md", results_text(rows, verdicts))
    write_atomic(folder / "index.md", index_text(rows, verdicts))
    print(f"written: {folder}/results.md, index.md, claims.csv")


def layer_times(rows: Rows, method: str, length: int) -> str:
    """Times of a training step of one layer relative to exact attention: bidirectional / causal."""
    times = []
    for direction in ("", " causal"):
        methods = f"{method}{direction}", f"exact{direction}"
        ratio = rows.ratio(*methods, "training", what="attention", length=length)
        if len(ratio):
            times.append(f"{math.exp(ratio.mean()):.2g}")
    return " / ".join(times)


def model_times(rows: Rows) -> dict[str, dict[str, float]]:
    """family -> build -> time of SmolLM2's forward pass at 4096 tokens, relative to exact attention."""
    times: dict[str, dict[str, float]] = {}
    for family, method in FAMILIES.items():
        for build in whole_models.BUILDS:
            logs = rows.ratio(method, "exact", "inference", **whole_models.LONGEST, build=build)
            if len(logs):
                times.setdefault(family, {})[build] = math.exp(logs.mean())
    return times


def method_table(
    rows: Mapping[str, Rows], swapped: pd.DataFrame, tuned: pd.DataFrame
) -> pd.DataFrame:
    """One row a family: its loss against that of FAVOR++, and times of both directions by length."""
    table = {}
    for family, name in FAMILIES.items():
        times = [layer_times(rows["perf_speed"], name, length) for length in LENGTHS]
        table[family] = [median_cell(swapped, family), median_cell(tuned, family), *times]
    columns = ["loss without training", "loss after fine-tuning"]
    columns += [f"time, {length // 1024}k tokens" for length in LENGTHS]
    return pd.DataFrame.from_dict(table, orient="index", columns=columns).rename_axis("method")


def results_text(rows: Mapping[str, Rows], verdicts: Verdicts) -> str:
    swapped = costs_of(SWAPPED, rows)
    tuned = costs_of(TUNED, rows)
    repeated = {family: REPEATED.mean(rows, family) for family in FAMILIES}
    mixture = MIXTURE.mean(rows, "mixture")
    equal = {"sweep": "mixture-state", "columns": 256, "model": SMOLLM2}
    small_window = mean_ci(rows["mixture"].values("above", "window", **equal))
    adapted = {}
    for family in ("window", "mixture"):
        increases = [f"{setting.mean(rows, family):.2f}" for setting in ADAPTED]
        adapted[family] = " and ".join(increases)
    near_tuned, favorpp_tuned, n = shared_medians(tuned, "near-far")
    mixed = shared_medians(swapped, "mixture", "FAVOR#")
    fitted = shared_medians(tuned, "mixture", "FAVOR#")
    qnli, stsb = [percentage(task.costs(rows)["near-far"]) for task in (QNLI, STSB)]
    paragraphs = [
        "# Which attention to use",
        "**A pretrained model, without training: near-far attention.** Near-far attention increases the loss "
        f"of SmolLM2-135M on a repeated passage by {repeated['near-far']:.3f} nats per token. A window increases this "
        f"loss by {repeated['window']:.1f}, FAVOR++ by {repeated['FAVOR++']:.1f} (4096 tokens, 95% CI, n = 3 rows, one "
        "of which also served for tuning).",
        "**After fine-tuning: near-far attention, after a test on your task.** Its median loss increase is "
        f"{near_tuned} of that of uniform attention, that of FAVOR++ {favorpp_tuned} ({n} settings). The share of "
        f"near-far attention is {stsb} on STS-B. On QNLI it is no better than uniform attention ({qnli}).",
        "**A causal model with a state of constant size: a window with the first tokens.** At equal bytes of state, "
        f"a window increases the loss of SmolLM2 by {small_window:.2f} nats, the mixture by {mixture:.2f} (512 tokens, "
        f"without training). After training adapters, the loss increases on new and repeated text by "
        f"{adapted['window']} nats with a window, and by {adapted['mixture']} with the mixture (95% CI, windows "
        "of 144 keys).",
        f"**Features in a pretrained model: the mixture.** On the {mixed[2]} settings that both have, without "
        f"training, its median share is {mixed[0]}, that of FAVOR# {mixed[1]}. After fine-tuning ({fitted[2]} "
        f"settings) the shares are {fitted[0]} and {fitted[1]}.",
        f"**Time of a whole model.** {whole_models.finding(rows['whole_models'])} [All models](whole_models.md).",
        "![Loss of SmolLM2 on a repeated passage, and time of its forward pass](results.png)",
        to_markdown(method_table(rows, swapped, tuned)).rstrip(),
        "Loss: the method's loss increase over exact attention, as a share of that of uniform attention; lower is "
        f"better. Median of the method against that of {REFERENCE} over the settings that both have (number of "
        "settings). The loss is a cosine in MiniLM and ViT-S. Settings with short inputs have exact_until=0. Other "
        "rows have other settings, so compare a method with FAVOR++ and not with another row. Time: a "
        "training step of one layer relative to exact attention, bidirectional / causal; below 1: faster than exact "
        "attention. Times: [perf_speed](perf_speed.md).",
        details("Loss without training, by setting", to_markdown(setting_table(swapped))),
        details("Loss after fine-tuning, by setting", to_markdown(setting_table(tuned))),
        "## Claims of the papers\n\nAll cases: [claims.csv](claims.csv). Claims of our own are not counted.",
        to_markdown(verdict_counts(verdicts)).rstrip(),
        RULES,
        "## Undecided claims and what they need",
        markdown(undecided_claims(verdicts)).rstrip(),
    ]
    return "\n\n".join(paragraphs) + "\n"
