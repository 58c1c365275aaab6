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
from crt_exp.experiments.papers.swap import COMMON
from crt_exp.experiments.report import Rows, mean_ci, pages
from crt_exp.experiments.report.claims import CONFLICT, NOT_MEASURED, UNDECIDED, WORDS, CaseResult
from crt_exp.experiments.report.rendering import claims_frame
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
SPEED = {
    "near-far": "nearfar",
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "window": "window",
}
LENGTHS = (1024, 4096, 16384)
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
MIXED = {"sweep": "mixture", "columns": [0, 256]}
MIXTURE_SMOLLM2 = Setting(
    "mixture", "above", {**MIXED, "model": "SmolLM2, 512 tokens, nats"}, MIXTURE, above=True
)
MIXTURE_MINILM = Setting(
    "mixture", "cosine", {**MIXED, "model": "MiniLM, cosine"}, MIXTURE, sign=-1, least=0.3
)
NEW_TEXT, REPEATED = [
    Setting(
        "swap",
        "above",
        {"sweep": "pretrained", "length": 4096, **COMMON, "text": text},
        {"near-far": "nearfar", "window": "window block=64 first=16"},
        above=True,
    )
    for text in ("new text", "repeated")
]


def encoder_settings(step: int, least: float) -> list[Setting]:
    """Small encoders of two kinds after some steps of fine-tuning."""
    settings = []
    for model, near in SMALL.items():
        where = {"sweep": "encoders", "model": model, "step": step}
        settings.append(Setting("crt_glue", "loss", where, {"near-far": near}, least=least))
    return settings


def adapted_setting(text: str) -> Setting:
    """SmolLM2 after attention transfer and adapters."""
    where = {"sweep": "adapt-smollm2", "text": text, "step": 140}
    return Setting("adapt", "above", where, LEARNED, above=True)


SWAPPED = [
    Setting("swap", "above", {**FIDELITY, "model": "BERT"}, WINDOW32, above=True),
    Setting("swap", "above", {**FIDELITY, "model": "causal"}, WINDOW32, above=True),
    *encoder_settings(step=0, least=0.5),
    Setting("perf_redraw", "loss", {"sweep": "redraw/swap", "split": "test"}),
    MIXTURE_SMOLLM2,
    MIXTURE_MINILM,
    NEW_TEXT,
    REPEATED,
]
TUNED = [
    *encoder_settings(step=300, least=0.2),
    adapted_setting("new"),
    adapted_setting("repeated"),
    Setting(
        "crt_glue",
        "accuracy",
        {"sweep": "table2", "dataset": "sst2", "split": "parts"},
        {"near-far": "nearfar exact_until=0 block=8 heavy=4 cells=8"},
        sign=-1,
        least=0.02,
    ),
]


def write(folder: Path, tested: Mapping[str, Sequence[CaseResult]]) -> None:
    """results.md, its picture, index.md and claims.csv."""
    rows = {name: read_rows(name, folder) for name in tested}
    frames = [claims_frame(name, cases) for name, cases in tested.items() if cases]
    claims = pd.concat(frames)
    write_atomic(folder / "claims.csv", claims.to_csv(index=False, lineterminator="\n"))
    figure = loss_against_time(REPEATED.costs(rows), times(rows["perf_speed"], " causal"))
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


def all_costs(settings: Sequence[Setting], rows: Mapping[str, Rows]) -> list[dict[str, float]]:
    return [setting.costs(rows) for setting in settings if setting.page in rows]


def method_table(rows: Mapping[str, Rows]) -> pd.DataFrame:
    """One row a family: median losses, times of both directions by length."""
    swapped, tuned = all_costs(SWAPPED, rows), all_costs(TUNED, rows)
    bidirectional = times(rows["perf_speed"])
    causal = times(rows["perf_speed"], " causal")
    table = {}
    for family in METHODS:
        table[family] = [median_and_range(swapped, family), median_and_range(tuned, family)]
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
    tuned = all_costs(TUNED, rows)
    near = mean_ci(loss(rows["swap"], REPEATED, "nearfar"))
    window = mean_ci(loss(rows["swap"], REPEATED, "window block=64 first=16"))
    favorpp = mean_ci(loss(rows["swap"], REPEATED, "favorpp m=256"))
    mixture = mean_ci(loss(rows["mixture"], MIXTURE_SMOLLM2, MIXTURE["mixture"]))
    favorsharp = mean_ci(loss(rows["mixture"], MIXTURE_SMOLLM2, MIXTURE["FAVOR#"]))
    paragraphs = [
        "# Which attention to use",
        "**A pretrained model, without training: near-far attention.** Near-far attention increases the loss "
        f"of SmolLM2-135M on a repeated passage by {near:.3f} nats per token. A window increases this loss by "
        f"{window:.1f}, FAVOR++ by {favorpp:.1f} (4096 tokens, 95% CI, n = 3 rows).",
        "**After fine-tuning: near-far attention.** Its loss increase is "
        f"{median_and_range(tuned, 'near-far')} of that of uniform attention. The loss increase of FAVOR++ is "
        f"{median_and_range(tuned, 'FAVOR++')} of it.",
        "**A causal model with a state of constant size: the mixture.** With 256 features, the loss of SmolLM2 "
        f"increases by {mixture:.1f} nats, with FAVOR# by {favorsharp:.1f} (512 tokens, without training).",
        "![Loss of SmolLM2 on a repeated passage, and time of attention](results.png)",
        to_markdown(method_table(rows)).rstrip(),
        "Loss: the method's loss increase over exact attention, as a share of that of uniform attention; "
        "median over settings (range, number of settings); lower is better. Time: a training step relative to "
        "exact attention, bidirectional / causal; lower is faster, above 1 exact attention is faster. Pages: "
        "[swap](swap.md), [mixture](mixture.md), [crt_glue](crt_glue.md), [perf_redraw](perf_redraw.md), "
        "[adapt](adapt.md), [perf_speed](perf_speed.md).",
        "## Claims of the papers\n\nAll cases: [claims.csv](claims.csv). Claims of our own are not counted.",
        to_markdown(verdict_counts(tested)).rstrip(),
        "## What would decide the rest",
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
                if result.paper and result.base_verdict in (UNDECIDED, NOT_MEASURED):
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


def median_and_range(settings: Sequence[dict[str, float]], family: str) -> str:
    shares = [costs[family] for costs in settings if family in costs]
    if not shares:
        return ""
    middle = percentage(median(shares))
    if len(shares) == 1:
        return middle
    return f"{middle} ({percentage(min(shares))} to {percentage(max(shares))}, {len(shares)})"


def percentage(share: float) -> str:
    return f"{share:.0%}".replace("-0%", "0%")


def loss_against_time(shares: Mapping[str, float], times: Mapping[str, Mapping[int, float]]):
    """Plot the loss increase of each family against its time at 4096 tokens; a line if it is not timed."""
    fig, ax = new_figure(1, 1, figsize=(4.0, 3.0), layout="constrained")
    for family, share in {**shares, "exact": 0.0}.items():
        x = 1.0 if family == "exact" else times.get(family, {}).get(4096)
        y = 100 * share
        shade = drawing.colour(SPEED.get(family, family).lower())
        if x is None:
            ax.axhline(y, color=shade, lw=1, ls=":")
            place = {"xy": (0.02, y), "xycoords": ("axes fraction", "data"), "va": "top"}
            ax.annotate(f"{family} (not timed)", color=shade, **place)
            continue
        ax.scatter([x], [y], color=shade, s=45, zorder=3)
        alignment = "right" if x > 0.9 else "center"
        place = {"xytext": (0, 7), "textcoords": "offset points", "ha": alignment}
        ax.annotate(family, (x, y), color=shade, **place)
    ax.set(xlim=(0, 1.12), ylim=(-8, 118), title="SmolLM2, repeated passage of 4096 tokens")
    ax.set_xlabel("time of a training step relative to exact attention")
    ax.set_ylabel("loss increase, % of that of uniform attention")
    return fig
