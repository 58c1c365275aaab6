"""Write results.md, which recommends an attention, and index.md from the rows of all pages."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from crt_exp.experiments.drawing import colour, label_ends, markdown, new_figure, save_figure
from crt_exp.experiments.intervals import Mean
from crt_exp.experiments.papers import whole_models
from crt_exp.experiments.report import Rows, mean_ci, pages
from crt_exp.experiments.report.claims import (
    CONFLICT,
    NOT_JUDGED,
    NOT_MEASURED,
    UNDECIDED,
    WORDS,
    CaseResult,
)
from crt_exp.experiments.report.rendering import claims_frame, details
from crt_exp.experiments.report.rows import read_rows
from crt_exp.experiments.report.tables import to_markdown
from crt_exp.experiments.runner.run import write_atomic

FAMILIES = {
    "near-far": "nearfar",
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "Hedgehog": "hedgehog",
    "ReLU": "relu",
    "window": "window",
}
REFERENCE = "FAVOR++"  # measured in every setting, so that each method is compared with it on shared settings
HIGHER = ("accuracy", "spearman", "cosine")  # metrics of which more is better


class Setting(NamedTuple):
    """The rows of a page that compare attention methods in one model.

    metric: "above" is a loss increase over exact attention; of other metrics, exact attention is subtracted. m: number
    of projections, where a family has several.
    """

    name: str
    page: str
    metric: str
    where: Mapping[str, Any]
    m: int = 256

    def increase(self, rows: Rows, method: str) -> pd.Series:
        """By how much a method is worse than exact attention, sample by sample."""
        if self.metric == "above":
            return rows.values(self.metric, method, **self.where)
        increase = rows.paired(method, "exact", self.metric, **self.where)
        return -increase if self.metric in HIGHER else increase

    def method(self, rows: Rows, name: str) -> str:
        """The method with this name, such as "favorpp m=256"; of several, that with m and the fewest options."""
        methods = rows.methods(self.metric, **self.where)
        methods = [method for method in methods if method.split()[0] == name]
        if len(methods) > 1:
            methods = [method for method in methods if f"m={self.m}" in method.split()]
        return min(methods, key=len, default="")

    def mean(self, pages: Mapping[str, Rows], family: str) -> Mean:
        """Return the mean loss increase of a family."""
        rows = pages[self.page]
        return mean_ci(self.increase(rows, self.method(rows, FAMILIES[family])))

    def costs(self, pages: Mapping[str, Rows]) -> pd.Series:
        """Return the loss increase of each family, relative to that of uniform attention."""
        rows = pages[self.page]
        means = {}
        for family, name in FAMILIES.items():
            means[family] = self.increase(rows, self.method(rows, name)).mean()
        title = f"[{self.name}]({self.page}.md)"
        return pd.Series(means, name=title) / self.increase(rows, "uniform").mean()


def costs_of(settings: Sequence[Setting], pages: Mapping[str, Rows]) -> pd.DataFrame:
    """Return the loss increases of all families (columns) in all settings (rows)."""
    return pd.DataFrame([setting.costs(pages) for setting in settings])


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


# ---- the settings

LENGTHS = (1024, 4096, 16384)
GLUE = {"sweep": "table2", "split": "parts"}
MIXED = {"sweep": "mixture", "columns": [0, 256]}
SMOLLM2 = "SmolLM2, 512 tokens, nats"
LONG = "SmolLM2, 2048 tokens, nats"


def encoder_settings(step: int) -> list[Setting]:
    """Small encoders of two kinds after some steps of fine-tuning."""
    settings = []
    for model in ("characters d=8", "word pieces d=8"):
        name = f"encoder, {model.replace('d=', 'd = ')}"
        where = {"sweep": "encoders", "model": model, "step": step}
        settings.append(Setting(name, "crt_glue", "loss", where))
    return settings


def vision_and_speech(setting: str, m: int, step: int, steps: int) -> list[Setting]:
    """Vision transformers after some steps of fine-tuning, and spoken digits."""
    small = {"sweep": "fig4-left", "setting": setting, "step": step}
    large = {"sweep": "fig4-left-vit", "setting": setting, "step": steps}
    digits = {"sweep": "fig3", "setting": setting}
    return [
        Setting(f"small ViT, m = {m}", "crt_vit", "loss", small, m),
        Setting("ViT-S, Imagenette", "crt_vit", "loss", large),
        Setting("digits, m = 16, nats an utterance", "crt_speech", "loss", digits, 16),
    ]


MIXTURE = Setting("SmolLM2, 512 tokens", "mixture", "above", {**MIXED, "model": SMOLLM2})
NEW = {"sweep": "pretrained", "text": "new text"}
TWICE = {"sweep": "pretrained", "text": "repeated"}
REPEATED = Setting("SmolLM2, 4096 tokens, repeated", "swap", "above", TWICE)
ADAPTED = []
for text in ("new", "repeated"):
    where = {"sweep": "adapt-smollm2", "text": text, "step": 140}
    ADAPTED.append(Setting(f"SmolLM2, {text} text", "adapt", "above", where))
SWAPPED = [
    Setting("BERT", "swap", "above", {"sweep": "fidelity", "model": "BERT"}),
    Setting("causal model", "swap", "above", {"sweep": "fidelity", "model": "causal"}),
    *encoder_settings(step=0),
    Setting("proteins", "perf_redraw", "loss", {"sweep": "redraw/swap", "split": "test"}),
    MIXTURE,
    Setting("SmolLM2, 2048 tokens", "mixture", "above", {**MIXED, "model": LONG}),
    Setting("MiniLM, cosine", "mixture", "cosine", {**MIXED, "model": "MiniLM, cosine"}),
    Setting("ViT-S, cosine", "mixture", "cosine", {**MIXED, "model": "ViT-S, cosine"}),
    Setting("SmolLM2, 4096 tokens, new text", "swap", "above", NEW),
    REPEATED,
    *vision_and_speech("without training", 256, 0, 0),
    Setting(
        "Whisper", "crt_speech", "above", {"sweep": "fig3-whisper", "setting": "without training"}
    ),
]
PROTEINS = {"sweep": "redraw", "split": "validation", "step": 200}
QNLI = Setting("QNLI", "crt_glue", "accuracy", {**GLUE, "dataset": "qnli"})
STSB = Setting("STS-B", "crt_glue", "spearman", {**GLUE, "dataset": "stsb"})
TUNED = [
    *encoder_settings(step=300),
    *ADAPTED,
    Setting("SST-2", "crt_glue", "accuracy", {**GLUE, "dataset": "sst2"}),
    QNLI,
    STSB,
    *vision_and_speech("fine-tuned after the swap", 64, 300, 47),
    Setting("proteins", "perf_redraw", "loss", PROTEINS),
]

Verdicts = Mapping[str, Sequence[CaseResult]]  # page -> cases of its claims
RULES = """How claims are judged:

- Only fresh samples decide. If samples are added after a look at the first ones, the added samples decide alone.
- A case with a failed sanity check is inconclusive. Attention has to matter (the cost of uniform attention), and the
  method under test has to be trained (its gain over uniform attention).
- A verdict needs p < 0.05 after Holm's correction over the page. Without it the case is inconclusive.
- A comparison in a setting that the paper does not have is our own and is not counted.
- Intervals cover the samples that a page names. Where all samples use one checkpoint, other models are not covered."""


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


# ---- verdicts of all pages


def index_text(rows: Mapping[str, Rows], verdicts: Verdicts) -> str:
    """Return index.md: each page with its counts of verdicts and its finding."""
    table = verdict_counts(verdicts)
    table["finding"] = [pages.load(name).finding_text(rows[name]) for name in verdicts]
    return (
        "# Pages of results\n\n[Which attention to take](results.md), and one page for each experiment.\n\n"
        + to_markdown(table).rstrip()
        + "\n"
    )


def verdict_counts(verdicts: Verdicts) -> pd.DataFrame:
    """One row a page: how many cases of the paper's claims have each verdict."""
    counts = {}
    for name, results in verdicts.items():
        title = f"[{pages.load(name).title}]({name}.md)"
        counts[title] = Counter(result.base_verdict for result in results if result.paper)
    table = pd.DataFrame(counts, index=[*WORDS]).T.astype(object).rename_axis("page")
    if table[CONFLICT].isna().all():
        table = table.drop(columns=CONFLICT)
    return table.map(lambda count: "" if pd.isna(count) else f"{count:.0f}")


def undecided_claims(verdicts: Verdicts) -> pd.DataFrame:
    """One row a claim that is not decided, with its cases and what it would take."""
    table = []
    for name, results in verdicts.items():
        for claim, group in groupby(results, lambda result: result.claim.text):
            undecided = []
            for result in group:
                if result.paper and result.base_verdict in (UNDECIDED, NOT_JUDGED, NOT_MEASURED):
                    undecided.append(result)
            if not undecided:
                continue
            cases = "; ".join(result.case for result in undecided)
            if len(undecided) > 3:
                cases = f"{len(undecided)} cases"
            needs = undecided[-1].claim.needs
            table.append([f"[{name}]({name}.md)", claim, cases, needs])
    return pd.DataFrame(table, columns=["page", "claim", "cases", "needs"])
