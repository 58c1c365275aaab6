"""Write results.md and index.md from the rows of all pages.

results.md recommends an attention; index.md counts the verdicts on the claims of the papers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from crt_exp.experiments import drawing
from crt_exp.experiments.drawing import new_figure, save_figure
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

METHODS = {
    "near-far": "nearfar exact_until=0",
    "mixture": "",
    "FAVOR#": "favorsharp m=256",
    "FAVOR++": "favorpp m=256",
    "FAVOR+": "favorp m=256",
    "Hedgehog": "",
    "ReLU": "relu m=256",
    "window": "",
}
REFERENCE = "FAVOR++"  # measured in every setting, so that each method is compared with it on shared settings
SPEED = {
    "near-far": "nearfar",
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "window": "window",
}
LENGTHS = (1024, 4096, 16384)
RULES = """How claims are judged:

- Only fresh samples decide. If samples are added after a look at the first ones, the added samples decide alone.
- A case with a failed sanity check is inconclusive. Attention has to matter (the cost of uniform attention), and the
  method under test has to be trained (its gain over uniform attention).
- A verdict needs p < 0.05 after Holm's correction over the page. Without it the case is inconclusive.
- A comparison in a setting that the paper does not have is our own and is not counted.
- Intervals cover the samples that a page names. Where all samples use one checkpoint, other models are not covered."""
MIXTURE = {
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "near-far": "nearfar",
}
LEARNED = {
    "FAVOR++": "favorpp m=256 learn=projections",
    "Hedgehog": "hedgehog m=128",
    "mixture": "favormix m=256 learn=parameters",
    "FAVOR#": "favorsharp m=128 learn=parameters",
    "window": "window block=64 first=16",
}


class Setting(NamedTuple):
    """The rows of a page that compare attention methods in one model.

    methods: the method of a family, where it differs from METHODS.
    """

    name: str
    page: str
    metric: str
    where: Mapping[str, Any]
    methods: Mapping[str, str] = {}
    sign: int = 1  # -1 where higher is better
    least: float = 0.5  # what uniform attention must cost
    above: bool = False  # the metric is a difference from exact attention

    def costs(self, rows: Mapping[str, Rows]) -> dict[str, float]:
        """Return each family's loss increase, relative to that of uniform attention."""
        methods = {**METHODS, "uniform": "uniform", **self.methods}
        costs = {}
        for family, method in methods.items():
            increase = loss(rows[self.page], self, method)
            if len(increase):
                costs[family] = float(increase.mean())
        uniform = costs.pop("uniform", 0.0)
        if uniform < self.least:
            return {}
        return {family: cost / uniform for family, cost in costs.items()}


def loss(rows: Rows, setting: Setting, method: str) -> pd.Series:
    """By how much a method is worse than exact attention, sample by sample."""
    if setting.above:
        return rows.values(setting.metric, method, **setting.where)
    return setting.sign * rows.paired(method, "exact", setting.metric, **setting.where)


SMALL = {
    "characters d=8": "nearfar block=4 heavy=2 cells=4 exact_until=0",
    "word pieces d=8": "nearfar block=8 heavy=8 cells=16 exact_until=0",
}

WINDOW32 = {"window": "window block=32 first=16"}
FIDELITY = {"sweep": "fidelity", "length": 512}


def mixture_setting(name: str, model: str, **options) -> Setting:
    """256 columns of features in a pretrained model, without training."""
    where = {"sweep": "mixture", "columns": [0, 256], "model": model}
    metric = "cosine" if "cosine" in model else "above"
    return Setting(name, "mixture", metric, where, MIXTURE, above=metric == "above", **options)


def smollm2_setting(text: str) -> Setting:
    where = {"sweep": "pretrained", "text": text}
    methods = {"near-far": "nearfar", "window": "window block=64 first=16"}
    name = f"SmolLM2, 4096 tokens, {text}"
    return Setting(name, "swap", "above", where, methods, above=True)


MIXTURE_SMOLLM2 = mixture_setting("SmolLM2, 512 tokens", "SmolLM2, 512 tokens, nats")
NEW_TEXT, REPEATED = smollm2_setting("new text"), smollm2_setting("repeated")


def encoder_settings(step: int, least: float) -> list[Setting]:
    """Small encoders of two kinds after some steps of fine-tuning."""
    settings = []
    for model, near in SMALL.items():
        where = {"sweep": "encoders", "model": model, "step": step}
        name = f"encoder, {model.replace('d=', 'd = ')}"
        settings.append(Setting(name, "crt_glue", "loss", where, {"near-far": near}, least=least))
    return settings


def adapted_setting(text: str) -> Setting:
    """SmolLM2 after attention transfer and adapters."""
    where = {"sweep": "adapt-smollm2", "text": text, "step": 140}
    return Setting(f"SmolLM2, {text} text", "adapt", "above", where, LEARNED, above=True)


def glue_setting(name: str, dataset: str, metric: str) -> Setting:
    """MiniLM fine-tuned on a task of GLUE."""
    where = {"sweep": "table2", "dataset": dataset, "split": "parts"}
    methods = {"near-far": "nearfar exact_until=0 block=8 heavy=4 cells=8"}
    return Setting(name, "crt_glue", metric, where, methods, sign=-1, least=0.02)


def small_vit_setting(setting: str, step: int, m: int, least: float) -> Setting:
    methods = {
        "near-far": "nearfar block=8 heavy=8 cells=8 exact_until=0",
        "FAVOR++": f"favorpp m={m}",
        "FAVOR+": f"favorp m={m}",
    }
    where = {"sweep": "fig4-left", "setting": setting, "step": step}
    return Setting(f"small ViT, m = {m}", "crt_vit", "loss", where, methods, least=least)


def vit_setting(setting: str, step: int) -> Setting:
    methods = {"near-far": "nearfar exact_until=0 block=8 heavy=4 cells=8"}
    where = {"sweep": "fig4-left-vit", "setting": setting, "step": step}
    return Setting("ViT-S, Imagenette", "crt_vit", "loss", where, methods)


def digits_setting(setting: str, least: float) -> Setting:
    methods = {
        "near-far": "nearfar block=8 heavy=8 cells=8 exact_until=0",
        "FAVOR++": "favorpp m=16",
        "FAVOR+": "favorp m=16",
    }
    where = {"sweep": "fig3", "setting": setting}
    return Setting(
        "digits, m = 16, nats an utterance", "crt_speech", "loss", where, methods, least=least
    )


UNTRAINED, FINE_TUNED = "without training", "fine-tuned after the swap"
SWAPPED = [
    Setting("BERT", "swap", "above", {**FIDELITY, "model": "BERT"}, WINDOW32, above=True),
    Setting("causal model", "swap", "above", {**FIDELITY, "model": "causal"}, WINDOW32, above=True),
    *encoder_settings(step=0, least=0.5),
    Setting("proteins", "perf_redraw", "loss", {"sweep": "redraw/swap", "split": "test"}),
    MIXTURE_SMOLLM2,
    mixture_setting("SmolLM2, 2048 tokens", "SmolLM2, 2048 tokens, nats"),
    mixture_setting("MiniLM, cosine", "MiniLM, cosine", sign=-1, least=0.3),
    mixture_setting("ViT-S, cosine", "ViT-S, cosine", sign=-1, least=0.3),
    NEW_TEXT,
    REPEATED,
    small_vit_setting(UNTRAINED, 0, 256, least=0.3),
    vit_setting(UNTRAINED, 0),
    digits_setting(UNTRAINED, least=0.5),
    Setting(
        "Whisper",
        "crt_speech",
        "above",
        {"sweep": "fig3-whisper", "setting": UNTRAINED},
        {"near-far": "nearfar", "window": "window block=64 first=16"},
        above=True,
    ),
]
ADAPTED_NEW, ADAPTED_REPEATED = adapted_setting("new"), adapted_setting("repeated")
TUNED = [
    *encoder_settings(step=300, least=0.2),
    ADAPTED_NEW,
    ADAPTED_REPEATED,
    glue_setting("SST-2", "sst2", "accuracy"),
    glue_setting("QNLI", "qnli", "accuracy"),
    glue_setting("STS-B", "stsb", "spearman"),
    small_vit_setting(FINE_TUNED, 300, 64, least=0.2),
    vit_setting(FINE_TUNED, 47),
    digits_setting(FINE_TUNED, least=0.5),
    Setting(
        "proteins",
        "perf_redraw",
        "loss",
        {"sweep": "redraw", "split": "validation", "step": 200},
        least=0.2,
    ),
]


def write(folder: Path, tested: Mapping[str, Sequence[CaseResult]]) -> None:
    """results.md, its picture, index.md and claims.csv."""
    rows = {name: read_rows(name, folder) for name in tested}
    frames = [claims_frame(name, cases) for name, cases in tested.items() if cases]
    claims = pd.concat(frames)
    write_atomic(folder / "claims.csv", claims.to_csv(index=False, lineterminator="\n"))
    figure = loss_against_time(REPEATED.costs(rows), model_times(rows["whole_models"]))
    save_figure(figure, folder / "results.png")
    write_atomic(folder / "results.md", results_text(rows, tested))
    write_atomic(folder / "index.md", index_text(rows, tested))
    print(f"written: {folder}/results.md, index.md, claims.csv")


def times(rows: Rows, direction: str = "") -> dict[str, dict[int, float]]:
    """family -> length -> time of a training step relative to exact attention."""
    times = {}
    for family, method in SPEED.items():
        times[family] = {}
        for length in LENGTHS:
            methods = f"{method}{direction}", f"exact{direction}"
            ratio = rows.ratio(*methods, "training", what="attention", length=length)
            if len(ratio):
                times[family][length] = math.exp(ratio.mean())
    return times


def model_times(rows: Rows) -> dict[str, dict[str, float]]:
    """family -> build -> time of SmolLM2's forward pass at 4096 tokens, relative to exact attention."""
    times: dict[str, dict[str, float]] = {}
    for family, method in SPEED.items():
        for build in whole_models.BUILDS:
            logs = whole_models.speedup(
                rows, method, "inference", whole_models.SMOLLM2, 4096, build
            )
            if len(logs):
                times.setdefault(family, {})[build] = math.exp(-logs.mean())
    return times


def all_costs(settings: Sequence[Setting], rows: Mapping[str, Rows]) -> list[dict[str, float]]:
    return [setting.costs(rows) for setting in settings if setting.page in rows]


def setting_table(settings: Sequence[Setting], rows: Mapping[str, Rows]) -> pd.DataFrame:
    """One row a setting: the loss increase of each family in percent of that of uniform attention."""
    table = {}
    for setting in settings:
        costs = setting.costs(rows)
        if costs:
            shares = {family: percentage(cost) for family, cost in costs.items()}
            table[f"[{setting.name}]({setting.page}.md)"] = shares
    frame = pd.DataFrame.from_dict(table, orient="index").reindex(columns=[*METHODS])
    return frame.dropna(axis=1, how="all").fillna("").rename_axis("setting")


def method_table(rows: Mapping[str, Rows]) -> pd.DataFrame:
    """One row a family: its loss against that of FAVOR++, and times of both directions by length."""
    swapped, tuned = all_costs(SWAPPED, rows), all_costs(TUNED, rows)
    bidirectional = times(rows["perf_speed"])
    causal = times(rows["perf_speed"], " causal")
    table = {}
    for family in METHODS:
        table[family] = [median_cell(swapped, family), median_cell(tuned, family)]
        for length in LENGTHS:
            measured = []
            for direction in (bidirectional, causal):
                if length in direction.get(family, {}):
                    measured.append(f"{direction[family][length]:.2g}")
            table[family].append(" / ".join(measured))
    columns = ["loss without training", "loss after fine-tuning"]
    columns += [f"time, {length // 1024}k tokens" for length in LENGTHS]
    return pd.DataFrame.from_dict(table, orient="index", columns=columns).rename_axis("method")


def results_text(rows: Mapping[str, Rows], tested: Mapping[str, Sequence[CaseResult]]) -> str:
    swapped, tuned = all_costs(SWAPPED, rows), all_costs(TUNED, rows)
    near = mean_ci(loss(rows["swap"], REPEATED, "nearfar"))
    window = mean_ci(loss(rows["swap"], REPEATED, "window block=64 first=16"))
    favorpp = mean_ci(loss(rows["swap"], REPEATED, "favorpp m=256"))
    mixture = mean_ci(loss(rows["mixture"], MIXTURE_SMOLLM2, MIXTURE["mixture"]))
    equal = {"sweep": "mixture-state", "columns": 256, "model": MIXTURE_SMOLLM2.where["model"]}
    small_window = mean_ci(rows["mixture"].values("above", "window", **equal))
    adapted = {}
    for family in ("window", "mixture"):
        increases = []
        for setting in (ADAPTED_NEW, ADAPTED_REPEATED):
            increases.append(f"{mean_ci(loss(rows['adapt'], setting, LEARNED[family])):.2f}")
        adapted[family] = " and ".join(increases)
    near_tuned, favorpp_tuned, n = shared_medians(tuned, "near-far")
    mixed = shared_medians(swapped, "mixture", "FAVOR#")
    fitted = shared_medians(tuned, "mixture", "FAVOR#")
    named = {setting.name: setting.costs(rows) for setting in TUNED}
    qnli, stsb = (percentage(named[task]["near-far"]) for task in ("QNLI", "STS-B"))
    paragraphs = [
        "# Which attention to use",
        "**A pretrained model, without training: near-far attention.** Near-far attention increases the loss "
        f"of SmolLM2-135M on a repeated passage by {near:.3f} nats per token. A window increases this loss by "
        f"{window:.1f}, FAVOR++ by {favorpp:.1f} (4096 tokens, 95% CI, n = 3 rows, one of which also "
        "served for tuning).",
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
        to_markdown(method_table(rows)).rstrip(),
        "Loss: the method's loss increase over exact attention, as a share of that of uniform attention; lower is "
        f"better. Median of the method against that of {REFERENCE} over the settings that both have (number of "
        "settings). The loss is a cosine in MiniLM and ViT-S. Settings with short inputs have exact_until=0. Other "
        "rows have other settings, so compare a method with FAVOR++ and not with another row. Time: a "
        "training step of one layer relative to exact attention, bidirectional / causal; below 1: faster than exact "
        "attention. Times: [perf_speed](perf_speed.md).",
        details("Loss without training, by setting", to_markdown(setting_table(SWAPPED, rows))),
        details("Loss after fine-tuning, by setting", to_markdown(setting_table(TUNED, rows))),
        "## Claims of the papers\n\nAll cases: [claims.csv](claims.csv). Claims of our own are not counted.",
        to_markdown(verdict_counts(tested)).rstrip(),
        RULES,
        "## Undecided claims and what they need",
        to_markdown(undecided_claims(tested)).rstrip(),
    ]
    return "\n\n".join(paragraphs) + "\n"


def index_text(rows: Mapping[str, Rows], tested: Mapping[str, Sequence[CaseResult]]) -> str:
    table = verdict_counts(tested)
    table["finding"] = [pages.load(name).finding_text(rows[name]) for name in tested]
    return (
        "# Pages of results\n\n[Which attention to take](results.md), and one page for each experiment.\n\n"
        + to_markdown(table).rstrip()
        + "\n"
    )


def verdict_counts(verdicts: Mapping[str, Sequence[CaseResult]]) -> pd.DataFrame:
    """One row a page: how many cases of the paper's claims have each verdict."""
    counts = {}
    for name, results in verdicts.items():
        title = f"[{pages.load(name).title}]({name}.md)"
        counts[title] = Counter(result.base_verdict for result in results if result.paper)
    table = pd.DataFrame(counts, index=[*WORDS]).T.astype(object).rename_axis("page")
    if table[CONFLICT].isna().all():
        table = table.drop(columns=CONFLICT)
    return table.map(lambda count: "" if pd.isna(count) else f"{count:.0f}")


def undecided_claims(verdicts: Mapping[str, Sequence[CaseResult]]) -> pd.DataFrame:
    """One row a claim that is not decided, with its cases and what it would take."""
    table, links = [], []
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
            table.append([claim, cases, undecided[-1].claim.needs])
            links.append(f"[{name}]({name}.md)")
    index = pd.Index(links, name="page")
    return pd.DataFrame(table, columns=["claim", "cases", "needs"], index=index)


def shared_medians(
    settings: Sequence[dict[str, float]], family: str, other: str = REFERENCE
) -> tuple[str, str, int]:
    """Medians of two families over the settings that both have, and the number of these settings."""
    shared = [costs for costs in settings if family in costs and other in costs]
    if not shared:
        return "", "", 0
    first, second = (median(costs[name] for costs in shared) for name in (family, other))
    return percentage(first), percentage(second), len(shared)


def median_cell(settings: Sequence[dict[str, float]], family: str) -> str:
    first, second, n = shared_medians(settings, family)
    if not n:
        return ""
    return f"{first} ({n})" if family == REFERENCE else f"{first} against {second} ({n})"


def percentage(share: float) -> str:
    return f"{share:.0%}".replace("-0%", "0%")


def loss_against_time(shares: Mapping[str, float], times: Mapping[str, Mapping[str, float]]):
    """Plot the loss increase of each family against its time, one marker for each build of the code."""
    fig, ax = new_figure(1, 1, figsize=(4.2, 3.2), layout="constrained")
    ends = []
    for family, builds in {"exact": dict.fromkeys(whole_models.BUILDS, 1.0), **times}.items():
        share = 0.0 if family == "exact" else shares.get(family)
        if share is None:
            continue
        shade = drawing.colour(SPEED.get(family, family).lower())
        y = 100 * share
        for x, filling in zip(builds.values(), (shade, "none")):
            ax.scatter([x], [y], edgecolors=shade, facecolors=filling, s=40, zorder=3)
        ends.append((family, max(builds.values()), y, shade))
    for build, filling in zip(whole_models.BUILDS, ("grey", "none")):
        ax.scatter([], [], edgecolors="grey", facecolors=filling, s=40, label=build)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    ax.set(ylim=(-8, 118), title="SmolLM2, repeated passage of 4096 tokens")
    ax.set_xlim(left=0)
    ax.set_xlabel("time of its forward pass relative to exact attention")
    ax.set_ylabel("loss increase, % of that of uniform attention")
    drawing.label_ends(ax, ends)
    return fig
