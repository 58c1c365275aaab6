"""Performers Figures 5 and 15: swaps of exact models, and redrawn projections."""

import pandas as pd

from crt_exp.experiments.papers.parts.redraw_runs import (
    FAVORP,
    FRESH,
    FULL,
    GENERATED,
    MANY,
    MODELS,
    REDRAWN,
    SMALL,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    added,
    dot_plot,
    line_plot,
    mean_ci,
    mean_table,
    panels,
    share,
)

TUNING = {"dataset": GENERATED, "split": "validation", "sweep": ("redraw", "redraw/swap")}
PG19_NEEDS = "PG-19 from scratch: experiment=performers_pg19"
EARLY = f"{GENERATED}, fine-tuned for 25 steps"
LATE = f"{GENERATED}, fine-tuned for 200 steps"
WIKITEXT2 = "WikiText-2, fine-tuned for 80 steps"
SCRATCHED = f"{GENERATED}, from scratch"
PG19 = "PG-19, both directions"
CASES = {
    EARLY: {**TUNING, "step": 25},
    LATE: {**TUNING, "step": 200},
    WIKITEXT2: {"sweep": "books/moved", "split": "test"},
    PG19: {"dataset": "PG-19", "split": "test"},
    SCRATCHED: {"sweep": ("redraw-scratch", "redraw-scratch/features"), "split": "test"},
}
LOOKS = (3, 8)  # exact models after which results were seen; then more were added
FROM_THE_START = [SCRATCHED, PG19]  # the paper's setting: trained from scratch
REDRAWS = {
    LATE: (FAVORP, f"{FAVORP} redraw_every=100"),
    WIKITEXT2: ("favorp m=32", "favorp m=32 redraw_every=20"),
    PG19: ("favorp redraw_every=0", f"favorp {REDRAWN}"),
    SCRATCHED: ("favorp m=64", "favorp m=64 redraw_every=100"),
}
COMPARISONS = {  # claim -> the paper's result, methods by case
    "FAVOR+ without redraws ends with a higher loss than exact attention": (
        "without redrawing, they plateau (PG-19)",
        {LATE: (FAVORP, "exact"), SCRATCHED: ("favorp m=64", "exact")},
    ),
    "redraws reduce the loss of FAVOR+": (
        "redrawing is necessary to match the Transformer (PG-19)",
        REDRAWS,
    ),
    "SMREG has a lower loss than FAVOR+, both with redraws": (
        "SMREG allows faster convergence (PG-19)",
        {
            EARLY: (f"{FAVORP} redraw_every=1", "smreg m=256 redraw_every=1"),
            WIKITEXT2: ("favorp m=32 redraw_every=20", "smreg m=32 redraw_every=20"),
            PG19: (f"favorp {REDRAWN}", f"smreg {REDRAWN}"),
            SCRATCHED: (f"favorp {FRESH}", f"smreg {FRESH}"),
        },
    ),
    "FAVOR+ has a lower loss than trigonometric features": (
        "below trigonometric features, which become unstable (PG-19)",
        {
            LATE: ("favor m=256", FAVORP),
            WIKITEXT2: ("favor m=32", "favorp m=32"),
            PG19: (f"favor {REDRAWN}", f"favorp {REDRAWN}"),
            SCRATCHED: (f"favor {FRESH}", f"favorp {FRESH}"),
        },
    ),
}
ADAPTED = "short fine-tuning adapts the weights to fixed projections: more redraws cost more, see the table"


def finding(rows: Rows) -> str:
    cost = mean_ci(rows.paired(FAVORP, "exact", "loss", **CASES[LATE]))
    tuned = mean_ci(-redraw_gain(rows, LATE))
    scratch = mean_ci(redraw_gain(rows, SCRATCHED))
    return (
        "Fine-tuned from exact weights, FAVOR+ has a higher loss than exact attention by "
        f"{cost} nats (95% CI, n = {cost.n} models), and redraws every 100 steps add {tuned} "
        f"(n = {tuned.n}). In training from scratch, redraws reduce the loss by {scratch} nats "
        f"(n = {scratch.n})."
    )


def redraw_gain(rows: Rows, case: str) -> pd.Series:
    """Loss without redraws minus loss with redraws, by sample."""
    return rows.paired(*REDRAWS[case], "loss", **CASES[case])


def claims(rows: Rows) -> list[Claim]:
    exact = rows.values("accuracy", "exact", step=0, **TUNING)
    start = rows.values("accuracy", FAVORP, step=0, **TUNING)
    end = rows.values("accuracy", FAVORP, step=100, **TUNING)
    lost = exact - start
    text = "right after the transfer, FAVOR+ is less accurate than the exact model"
    points = {GENERATED: 100 * added(lost, *LOOKS)}
    paper = "accuracy 0.07 right after the transfer (LM1B)"
    claims = [Claim(text, points, paper, unit="points")]
    text = "FAVOR+ recovers 90% of the lost accuracy in a tenth of the exact model's steps"
    recovered = {GENERATED: share(added(end - start, *LOOKS), lost)}
    paper = "recovers in a small fraction of the original steps"
    options = {"above": 0.9, "unit": "of the lost accuracy", "needs": "more exact models"}
    claims.append(Claim(text, recovered, paper, **options))
    for text, (paper, pairs) in COMPARISONS.items():
        gains = {}
        for case, methods in pairs.items():
            gain = rows.paired(*methods, "loss", **CASES[case])
            gains[case] = added(gain, *LOOKS) if case in (EARLY, LATE) else gain
        papers = dict.fromkeys(FROM_THE_START, paper)
        reason = ADAPTED if pairs is REDRAWS else ""
        claims.append(Claim(text, gains, papers, unit="nats", reason=reason))
        if not any(len(gains.get(case, [])) for case in FROM_THE_START):
            reason = "these features were not trained from scratch"
            text = f"from scratch, {text}"
            claims.append(Claim(text, paper=paper, not_measured=reason, needs=PG19_NEEDS))
    trained = len(rows.values("loss", f"favor {FRESH}", **CASES[SCRATCHED]))
    text = "training with trigonometric features reaches NaN"
    paper = "even NaN values in training (Appendix D.3)"
    ended = f"{trained} of {trained} runs from scratch ended with a finite loss, in 1000 steps"
    claims.append(Claim(text, paper=paper, not_judged=ended, needs=PG19_NEEDS))
    text = "Linformer plateaus as positive features without redraws do"
    reason = "Linformer mixes positions and cannot be causal, as these models are"
    needs = "the paper's causal Linformer"
    claims.append(Claim(text, paper="at the same perplexity", not_measured=reason, needs=needs))
    return claims


def tables(rows: Rows) -> Tables:
    increases = {}
    for step in (0, 25, 100, 200):
        increases[f"{step} steps"] = {"metric": "loss", "step": step, **TUNING}
    methods = rows.methods("loss", **TUNING)
    title = "Loss increase over exact attention after fine-tuning, nats: generated families"
    return {title: mean_table(rows, increases, methods, spec="+.3f", less="exact")}


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "step", "loss", MANY, less="exact", **TUNING)
    left.set(title="Generated families, fine-tuned from exact weights", xlabel="steps")
    left.set_ylabel("loss increase over exact attention, nats")
    effects = {case: -redraw_gain(rows, case) for case in REDRAWS}
    dot_plot(right, effects, zero=True)
    right.set(title="Effect of redraws", xlabel="loss with minus loss without redraws, nats")
    return fig


page = Page(
    "perf_redraw",
    title="Performers Figures 5 and 15: random features in models trained with exact attention",
    finding=finding,
    small=SMALL,
    full=FULL,
    models=MODELS,
    stand_in=GENERATED,
    columns=["dataset", "mode", "split", "step", "method"],
    metrics=["loss", "accuracy"],
    measured=[
        "Exact models: 2 layers, d = 64, 1000 steps on generated families of proteins. The paper has 36 layers "
        "(proteins) or 6 (PG-19, LM1B).",
        "Fine-tuning: a new optimizer, losses on validation. A sample is an exact model: three for uniform, "
        "trigonometric and ReLU, 20 for exact and FAVOR+, else eight. Five and then twelve were added after results "
        "were seen: claims use the models added last.",
        "The paper trains from scratch on PG-19; claims on fine-tuned models are ours. From scratch, SMREG and "
        "trigonometric features have eight fresh seeds of their own, with FAVOR+ beside them.",
        "WikiText-2: 300 byte pairs, d = 64, 800 steps, then 80 steps with m = 32; five seeds. These sizes and m = 256 "
        "were chosen after first results of several methods.",
    ],
    claims=claims,
    tables=tables,
    figure=figure,
)
