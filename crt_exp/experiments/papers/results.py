"""Write results.md and index.md from the rows of all pages.

results.md recommends an attention; index.md counts the verdicts on the claims of the papers.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from crt_exp.experiments import drawing
from crt_exp.experiments.drawing import new_figure, save_figure
from crt_exp.experiments.papers.swap import COMMON
from crt_exp.experiments.report import Rows, mean_ci, pages
from crt_exp.experiments.report.pages import claims_frame, to_markdown
from crt_exp.experiments.report.rows import (
    CONFLICT,
    NOT_MEASURED,
    UNDECIDED,
    WORDS,
    TestedClaim,
    read_rows,
)
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
        named = {**METHODS, "uniform": "uniform", **self.methods}
        costs = {}
        for family, method in named.items():
            found = loss(rows[self.page], self, method)
            if len(found):
                costs[family] = float(found.mean())
        uniform = costs.pop("uniform", 0.0)
        return (
            {family: cost / uniform for family, cost in costs.items()}
            if uniform >= self.least
            else {}
        )


def loss(rows: Rows, setting: Setting, method: str) -> pd.Series:
    """By how much a method is worse than exact attention, sample by sample."""
    if setting.above:
        return rows.values(setting.metric, method, **setting.where)
    return setting.sign * rows.paired(method, "exact", setting.metric, **setting.where)


SMALL = {
    "characters d=8": "nearfar block=4 heavy=2 cells=4 exact_until=0",
    "word pieces d=8": "nearfar block=8 heavy=8 cells=16 exact_until=0",
}
SMOLLM2 = {"model": "SmolLM2-135M", "length": 4096, **COMMON}
SWAPPED = [
    Setting(
        "swap",
        "above",
        {"sweep": "fidelity", "model": "BERT", "length": 512},
        {"window": "window block=32 first=16"},
        above=True,
    ),
    Setting(
        "swap",
        "above",
        {"sweep": "fidelity", "model": "causal", "length": 512},
        {"window": "window block=32 first=16"},
        above=True,
    ),
    *(
        Setting(
            "crt_glue", "loss", {"sweep": "encoders", "model": model, "step": 0}, {"near-far": near}
        )
        for model, near in SMALL.items()
    ),
    Setting("perf_redraw", "loss", {"sweep": "redraw/swap", "split": "test"}),
    Setting(
        "mixture",
        "above",
        {"sweep": "mixture", "model": "SmolLM2, 512 tokens, nats", "columns": [0, 256]},
        MIXTURE,
        above=True,
    ),
    Setting(
        "mixture",
        "cosine",
        {"sweep": "mixture", "model": "MiniLM, cosine", "columns": [0, 256]},
        MIXTURE,
        sign=-1,
        least=0.3,
    ),
    *(
        Setting(
            "swap",
            "above",
            {"sweep": "pretrained", **SMOLLM2, "text": text},
            {"near-far": "nearfar", "window": "window block=64 first=16"},
            above=True,
        )
        for text in ("new text", "repeated")
    ),
]
TUNED = [
    *(
        Setting(
            "crt_glue",
            "loss",
            {"sweep": "encoders", "model": model, "step": 300},
            {"near-far": near},
            least=0.2,
        )
        for model, near in SMALL.items()
    ),
    *(
        Setting(
            "adapt",
            "above",
            {"sweep": "adapt-smollm2", "text": text, "step": 140},
            LEARNED,
            above=True,
        )
        for text in ("new", "repeated")
    ),
    Setting(
        "crt_glue",
        "accuracy",
        {"sweep": "table2", "dataset": "sst2", "split": "parts"},
        {"near-far": "nearfar exact_until=0 block=8 heavy=4 cells=8"},
        sign=-1,
        least=0.02,
    ),
]


def write(folder: Path, tested: Mapping[str, Sequence[TestedClaim]]) -> None:
    """results.md, its picture, index.md and claims.csv."""
    rows = {name: read_rows(name, folder) for name in tested}
    swapped, tuned = (
        [each.costs(rows) for each in settings if each.page in rows]
        for settings in (SWAPPED, TUNED)
    )
    claims = pd.concat([claims_frame(name, each) for name, each in tested.items() if each])
    write_atomic(folder / "claims.csv", claims.to_csv(index=False, lineterminator="\n"))
    save_figure(
        loss_against_time(SWAPPED[-1].costs(rows), times(rows["perf_speed"], " causal")),
        folder / "results.png",
    )
    write_atomic(folder / "results.md", text(rows, swapped, tuned, tested))
    write_atomic(folder / "index.md", index(tested))
    print(f"written: {folder}/results.md, index.md, claims.csv")


def times(rows: Rows, direction: str = "") -> dict[str, dict[int, float]]:
    """family -> length -> time of a training step relative to exact attention."""
    return {
        family: {
            length: math.exp(found.mean())
            for length in LENGTHS
            if len(
                found := rows.ratio(
                    f"{method}{direction}",
                    f"exact{direction}",
                    "training",
                    what="attention",
                    length=length,
                )
            )
        }
        for family, method in SPEED.items()
    }


def text(
    rows: Mapping[str, Rows],
    swapped: Sequence[dict],
    tuned: Sequence[dict],
    tested: Mapping[str, Sequence[TestedClaim]],
) -> str:
    both, causal = times(rows["perf_speed"]), times(rows["perf_speed"], " causal")
    table = pd.DataFrame(
        [
            [
                _share(swapped, family),
                _share(tuned, family),
                *(
                    " / ".join(
                        f"{each[family][length]:.2g}"
                        for each in (both, causal)
                        if length in each.get(family, {})
                    )
                    for length in LENGTHS
                ),
            ]
            for family in METHODS
        ],
        index=pd.Index([*METHODS], name="method"),
        columns=[
            "loss without training",
            "loss after fine-tuning",
            *(f"time, {length // 1024}k tokens" for length in LENGTHS),
        ],
    )
    repeated = {
        family: mean_ci(loss(rows["swap"], SWAPPED[-1], method))
        for family, method in {
            "near-far": "nearfar",
            "window": "window block=64 first=16",
            "FAVOR++": "favorpp m=256",
        }.items()
    }
    mixed = {
        family: mean_ci(loss(rows["mixture"], SWAPPED[5], MIXTURE[family]))
        for family in ("mixture", "FAVOR#")
    }
    return (
        "\n\n".join(
            [
                "# Which attention to use",
                "**A pretrained model, without training: near-far attention.** Near-far attention "
                "increases the loss of "
                f"SmolLM2-135M on a repeated passage by {repeated['near-far']:.3f} nats per token. A window "
                "increases this "
                f"loss by {repeated['window']:.1f}, FAVOR++ by {repeated['FAVOR++']:.1f} (4096 tokens, 95% "
                "CI, n = 3 rows).",
                "**After fine-tuning: near-far attention.** Its loss increase is "
                f"{_share(tuned, 'near-far')} of that of "
                f"uniform attention. The loss increase of FAVOR++ is {_share(tuned, 'FAVOR++')} of it.",
                "**A causal model with a state of constant size: the mixture.** With 256 features, the "
                "loss of SmolLM2 "
                f"increases by {mixed['mixture']:.1f} nats, with FAVOR# by {mixed['FAVOR#']:.1f} (512 tokens, without "
                f"training).",
                "![Loss of SmolLM2 on a repeated passage, and time of attention](results.png)",
                to_markdown(table).rstrip(),
                "Loss: the method's loss increase over exact attention, as a share of that of uniform "
                "attention; median over "
                "settings (range, number of settings); lower is better. Time: a training step relative to "
                "exact attention, "
                "bidirectional / causal; lower is faster, above 1 exact attention is faster. Pages: [swap](swap.md), "
                "[mixture](mixture.md), [crt_glue](crt_glue.md), [perf_redraw](perf_redraw.md), "
                "[adapt](adapt.md), [perf_speed](perf_speed.md).",
                "## Claims of the papers\n\nAll cases: [claims.csv](claims.csv). Claims of our own are not counted.",
                to_markdown(counts(tested)).rstrip(),
                "## What would decide the rest",
                to_markdown(needs(tested)).rstrip(),
            ]
        )
        + "\n"
    )


def index(tested: Mapping[str, Sequence[TestedClaim]]) -> str:
    table = counts(tested)
    table["finding"] = [pages.load(name).page.finding for name in tested]
    return (
        "# Pages of results\n\n[Which attention to take](results.md), and one page for each experiment.\n\n"
        + to_markdown(table).rstrip()
        + "\n"
    )


def counts(tested: Mapping[str, Sequence[TestedClaim]]) -> pd.DataFrame:
    """One row a page: how many cases of the paper's claims have each verdict."""
    found = [[each.base_verdict for each in cases if each.paper] for cases in tested.values()]
    words = [word for word in WORDS if word != CONFLICT or any(word in each for each in found)]
    return pd.DataFrame(
        [[each.count(word) or "" for word in words] for each in found],
        columns=words,
        index=pd.Index(
            [f"[{pages.load(name).page.title}]({name}.md)" for name in tested], name="page"
        ),
    )


def needs(tested: Mapping[str, Sequence[TestedClaim]]) -> pd.DataFrame:
    """One row a claim that is not decided, with its cases and what it would take."""
    rest = [
        (name, each)
        for name, cases in tested.items()
        for each in cases
        if each.paper and each.base_verdict in (UNDECIDED, NOT_MEASURED)
    ]
    grouped = {(name, each.claim.text): each.claim.needs for name, each in rest}
    cases = [
        [each.case for of, each in rest if (of, each.claim.text) == claim] for claim in grouped
    ]
    cases = [f"{len(each)} cases" if len(each) > 3 else "; ".join(each) for each in cases]
    return pd.DataFrame(
        {"claim": [text for _, text in grouped], "cases": cases, "needs": grouped.values()},
        index=pd.Index([f"[{name}]({name}.md)" for name, _ in grouped], name="page"),
    )


def _share(settings: Sequence[dict[str, float]], family: str) -> str:
    found = [each[family] for each in settings if family in each]
    if not found:
        return ""
    middle, low, high = (
        f"{value:.0%}".replace("-0%", "0%") for value in (median(found), min(found), max(found))
    )
    return middle if len(found) == 1 else f"{middle} ({low} to {high}, {len(found)})"


def loss_against_time(shares: Mapping[str, float], spent: Mapping[str, Mapping[int, float]]):
    fig, ax = new_figure(1, 1, figsize=(4.0, 3.0), layout="constrained")
    for family, share in {**shares, "exact": 0.0}.items():
        x = 1.0 if family == "exact" else spent.get(family, {}).get(4096)
        shade = drawing.colour(
            "window" if family == "window" else SPEED.get(family, family).lower()
        )
        if x is None:
            ax.axhline(100 * share, color=shade, lw=1, ls=":")
            ax.annotate(
                f"{family} (not timed)",
                (0.02, 100 * share),
                color=shade,
                va="top",
                xycoords=("axes fraction", "data"),
            )
            continue
        ax.scatter([x], [100 * share], color=shade, s=45, zorder=3)
        ax.annotate(
            family,
            (x, 100 * share),
            color=shade,
            xytext=(0, 7),
            textcoords="offset points",
            ha="right" if x > 0.9 else "center",
        )
    ax.set(
        xlim=(0, 1.12),
        ylim=(-8, 118),
        title="SmolLM2, repeated passage of 4096 tokens",
        xlabel="time of a training step relative to exact attention",
        ylabel="loss increase, % of that of uniform attention",
    )
    return fig
