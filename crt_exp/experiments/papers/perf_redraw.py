"""Performers Figures 5 and 15: swaps of exact models, and redrawn projections."""

from collections.abc import Sequence

import pandas as pd

from crt_exp.experiments.papers.perf_proteins import DIRECTIONS, FAMILIES, MODEL, training_runs
from crt_exp.experiments.report import (
    HOME,
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    dot_plot,
    label,
    line_plot,
    mean_ci,
    mean_table,
    panels,
    share,
    sweep,
)

GENERATED = "generated families"
FAVORP = "favorp m=256"
MANY = ["exact", FAVORP, f"{FAVORP} redraw_every=100", f"{FAVORP} redraw_every=1"]
MANY += ["favorpp m=256", "smreg m=256 redraw_every=1"]
MOST = ["exact", FAVORP]  # fine-tuned from 20 models
FEW = ["uniform", "favor m=256", "relu m=256"]  # fine-tuned from 3 models
FEW += ["favorpp m=256 redraw_every=100", "favorpp m=256 redraw_every=1"]
SWAPPED = ["favorp m=32", FAVORP, "favorpp m=32", "favorpp m=256", "relu m=256"]
SCRATCH = ["exact", "uniform", "favorp m=64", "favorp m=64 redraw_every=100"]
SCRATCH += ["favorp m=64 redraw_every=1", "favorpp m=64", "favorpp m=64 redraw_every=100"]
FROM_FRESH_SEEDS = [f"{name} m=64 redraw_every=100" for name in ("favorp", "smreg", "favor")]
MOVED = ["exact", "uniform", "favor m=32", "favorp m=32", "favorp m=32 redraw_every=20"]
MOVED += ["smreg m=32 redraw_every=20", "favorpp m=32 redraw_every=20"]
FIXED = "redraw_every=0"
REDRAWN = "redraw_every=1000"
TUNING = {"dataset": GENERATED, "split": "validation", "sweep": ("redraw", "redraw/swap")}
FROM_SCRATCH = {"sweep": ("redraw-scratch", "redraw-scratch/features"), "split": "test"}
WORDS = {"sweep": "books/moved", "split": "test"}

# ---- sweeps: a sample is an exact model that runs start from


def without_sizes(options: str) -> str:
    """Options of a run that starts from another one, whose sizes it takes."""
    return " ".join(option for option in options.split() if "sizes" not in option)


def runs_from_exact(
    options: str,
    key: str,
    methods: Sequence[str],
    models: Sequence[int],
    projections: int = 0,
    **axes,
) -> list[PlannedRun]:
    first_seed = 1000 if key == "task.init" else 0
    starts = {}
    for model in models:
        start = f"{key}={HOME}/redraw-exact/generated-families_U_exact_{model}"
        starts[model] = f"seed={first_seed + 8 * projections + model} {start}"
    return sweep(
        options,
        dataset=GENERATED,
        mode="U",
        attention=methods,
        projections={projections: ""},
        seed=starts,
        **axes,
    )


def tuning_runs(methods: Sequence[str], models: Sequence[int]) -> list[PlannedRun]:
    options = without_sizes(f"{MODEL} {DIRECTIONS['U']} {FAMILIES[GENERATED]}")
    options += " trainer.warmup=5 trainer.steps=200 trainer.eval_every=25"
    return runs_from_exact(options, "task.init", methods, models)


def validation_runs(methods: Sequence[str], models: Sequence[int]) -> list[PlannedRun]:
    options = "task=swap_loss task.splits=[validation] task.offset=1000"
    return runs_from_exact(options, "task.start", methods, models, split="validation")


def test_runs(methods: Sequence[str], projections: int) -> list[PlannedRun]:
    options = "task=swap_loss task.splits=[test] task.offset=1000"
    return runs_from_exact(options, "task.start", methods, range(8), projections)


SWAPS = [
    *test_runs(["exact", "uniform", "identity"], 0),
    *validation_runs([*MANY, *FEW], range(8)),
    *validation_runs(MOST, range(8, 20)),
]
for i in range(3):
    SWAPS += test_runs(SWAPPED, i)
BOOKS = (
    f"{MODEL} task=books task.vocabulary_size=300 task.evaluated=1000 task.max_length=64 "
    "trainer.eval_batch=64"
)
BOOK_MODELS = {}
for seed in range(5):
    BOOK_MODELS[seed] = f"seed={seed} task.init={HOME}/books/WikiText-2_U_exact_{seed}"
SMALL = {
    "redraw": [
        *tuning_runs(MANY, range(8)),
        *tuning_runs(FEW, range(3)),
        *tuning_runs(MOST, range(8, 20)),
    ],
    "redraw/swap": SWAPS,
    "redraw-scratch": training_runs(
        MODEL, {GENERATED: f"{FAMILIES[GENERATED]} trainer.eval_every=500"}, "U", SCRATCH, 3
    ),
    "redraw-scratch/features": sweep(
        MODEL,
        dataset={GENERATED: f"{FAMILIES[GENERATED]} trainer.eval_every=500"},
        mode={"U": DIRECTIONS["U"]},
        attention=FROM_FRESH_SEEDS,
        seed=range(3, 11),
    ),
    "books/moved": sweep(
        without_sizes(f"{BOOKS} trainer.steps=80 trainer.eval_every=40"),
        dataset="WikiText-2",
        mode="U",
        attention=MOVED,
        seed=BOOK_MODELS,
    ),
}
PG19 = ["exact", f"favorp {FIXED}", f"favorp {REDRAWN}", f"favor {REDRAWN}", f"smreg {REDRAWN}"]
LM1B = f"experiment=performers_lm1b trainer.steps=50000 task.init={HOME}/lm1b/LM1B_U_exact_0"
FULL = {
    "books": sweep(
        "experiment=performers_pg19",
        dataset="PG-19",
        mode=DIRECTIONS,
        attention=PG19,
        seed=range(1),
    ),
    "books/moved": sweep(LM1B, dataset="LM1B", mode="U", attention=["favorp", "favor"], seed=[0]),
}
MODELS = {
    "redraw-exact": training_runs(MODEL, FAMILIES, "U", ["exact"], 20),
    "books": sweep(
        f"{BOOKS} trainer.steps=800 trainer.eval_every=200",
        dataset="WikiText-2",
        mode="U",
        attention=["exact"],
        seed=range(5),
    ),
    "lm1b": sweep(
        "experiment=performers_lm1b", dataset="LM1B", mode="U", attention=["exact"], seed=[0]
    ),
}


def finding(rows: Rows) -> str:
    cost = mean_ci(rows.paired(FAVORP, "exact", "loss", step=200, **TUNING))
    redraws = redraw_effects(rows)
    tuned = mean_ci(redraws["FAVOR+, redrawn every 100 steps: fine-tuned"])
    scratch = mean_ci(-redraws["FAVOR+, redrawn every 100 steps: from scratch"])
    return (
        "Fine-tuned from exact weights, FAVOR+ has a higher loss than exact attention by "
        f"{cost} nats (95% CI, n = {cost.n} models), and redraws every 100 steps add {tuned} "
        f"(n = {tuned.n}). In training from scratch, redraws reduce the loss by {scratch} nats "
        f"(n = {scratch.n})."
    )


EARLY = f"{GENERATED}, fine-tuned for 25 steps"
LATE = f"{GENERATED}, fine-tuned for 200 steps"
WIKITEXT2 = "WikiText-2, fine-tuned for 80 steps"
SCRATCHED = f"{GENERATED}, from scratch"
CASES = {
    EARLY: {**TUNING, "step": 25},
    LATE: {**TUNING, "step": 200},
    WIKITEXT2: WORDS,
    "PG-19, U": {"dataset": "PG-19", "mode": "U", "split": "test"},
    "PG-19, B": {"dataset": "PG-19", "mode": "B", "split": "test"},
    SCRATCHED: FROM_SCRATCH,
}
BOOKS_REDRAWN = {"PG-19, U": REDRAWN, "PG-19, B": REDRAWN}
REDRAWS = {
    LATE: (FAVORP, f"{FAVORP} redraw_every=100"),
    WIKITEXT2: ("favorp m=32", "favorp m=32 redraw_every=20"),
    **dict.fromkeys(BOOKS_REDRAWN, (f"favorp {FIXED}", f"favorp {REDRAWN}")),
    SCRATCHED: ("favorp m=64", "favorp m=64 redraw_every=100"),
}
SMREG, TRIGONOMETRIC = {}, {}
both = {EARLY: "m=256 redraw_every=1", WIKITEXT2: "m=32 redraw_every=20", **BOOKS_REDRAWN}
for case, options in both.items():
    SMREG[case] = f"favorp {options}", f"smreg {options}"
for case, options in {LATE: "m=256", WIKITEXT2: "m=32", **BOOKS_REDRAWN}.items():
    TRIGONOMETRIC[case] = f"favor {options}", f"favorp {options}"
favorp, smreg, favor = FROM_FRESH_SEEDS
SMREG[SCRATCHED] = favorp, smreg
TRIGONOMETRIC[SCRATCHED] = favor, favorp
EXACT = {LATE: (FAVORP, "exact"), SCRATCHED: ("favorp m=64", "exact")}
FROM_THE_START = [SCRATCHED, "PG-19, U", "PG-19, B"]  # the paper's setting: trained from scratch
PG19_NEEDS = "PG-19 from scratch: experiment=performers_pg19"
COMPARISONS = {  # claim -> methods, the paper's result, explanation
    "FAVOR+ without redraws ends with a higher loss than exact attention": (
        EXACT,
        "without redrawing, they plateau (PG-19)",
        "",
    ),
    "redraws reduce the loss of FAVOR+": (
        REDRAWS,
        "redrawing is necessary to match the Transformer (PG-19)",
        "short fine-tuning adapts the weights to fixed projections: more redraws cost more, see the table",
    ),
    "SMREG has a lower loss than FAVOR+, both with redraws": (
        SMREG,
        "SMREG allows faster convergence (PG-19)",
        "",
    ),
    "FAVOR+ has a lower loss than trigonometric features": (
        TRIGONOMETRIC,
        "below trigonometric features, which become unstable (PG-19)",
        "",
    ),
}
BATCHES = [range(3), range(3, 8), range(8, 20)]  # exact models, as they were added


def last_batch(samples: pd.Series) -> pd.Series:
    """Samples of the models that were added last; results of earlier ones had been seen."""
    for batch in reversed(BATCHES):
        added = samples[samples.index.isin([str(model) for model in batch])]
        if len(added):
            return added
    return samples


def claims(rows: Rows) -> list[Claim]:
    exact = rows.values("accuracy", "exact", step=0, **TUNING)
    start = rows.values("accuracy", FAVORP, step=0, **TUNING)
    end = rows.values("accuracy", FAVORP, step=100, **TUNING)
    recovered = last_batch(end - start)
    claims = [
        Claim(
            "right after the transfer, FAVOR+ is less accurate than the exact model",
            {GENERATED: 100 * last_batch(exact - start)},
            unit="points",
            paper="accuracy 0.07 right after the transfer (LM1B)",
        ),
        Claim(
            "FAVOR+ recovers 90% of the lost accuracy in a tenth of the exact model's steps",
            {GENERATED: share(recovered, exact - start)},
            above=0.9,
            unit="of the lost accuracy",
            paper="recovers in a small fraction of the original steps",
            needs="more exact models",
        ),
    ]
    for text, (pairs, paper, reason) in COMPARISONS.items():
        gains = {}
        for case, methods in pairs.items():
            gain = rows.paired(*methods, "loss", **CASES[case])
            gains[case] = last_batch(gain) if case in (EARLY, LATE) else gain
        papers = dict.fromkeys(FROM_THE_START, paper)
        claims.append(Claim(text, gains, unit="nats", paper=papers, reason=reason))
        if not any(len(gains.get(case, [])) for case in FROM_THE_START):
            reason = "these features were not trained from scratch"
            text = f"from scratch, {text}"
            claims.append(Claim(text, paper=paper, not_measured=reason, needs=PG19_NEEDS))
    trained = len(rows.values("loss", TRIGONOMETRIC[SCRATCHED][0], **FROM_SCRATCH))
    claims.append(
        Claim(
            "training with trigonometric features reaches NaN",
            paper="even NaN values in training (Appendix D.3)",
            not_judged=f"{trained} of {trained} runs from scratch ended with a finite loss, in 1000 steps",
            needs=PG19_NEEDS,
        )
    )
    claims.append(
        Claim(
            "Linformer plateaus as positive features without redraws do",
            paper="at the same perplexity",
            not_measured="Linformer mixes positions and cannot be causal, as these models are",
            needs="the paper's causal Linformer",
        )
    )
    return claims


def method_label(method: str) -> str:
    """Format a method without its number of projections."""
    words = method.replace("favor ", "trigonometric ").split(" ")
    return label(" ".join(word for word in words if not word.startswith("m=")))


def redraw_effects(rows: Rows) -> dict[str, pd.Series]:
    """Loss with redraws minus loss without, by method and setting."""
    effects = {}
    for setting, methods, where in [
        ("fine-tuned", [*MANY, *FEW], CASES[LATE]),
        ("from scratch", SCRATCH, FROM_SCRATCH),
        ("WikiText-2", MOVED, WORDS),
    ]:
        for method in methods:
            fixed, redraw, _ = method.partition(" redraw")
            if redraw:
                name = f"{method_label(method)}: {setting}"
                effects[name] = rows.paired(method, fixed, "loss", **where)
    return effects


def tables(rows: Rows) -> Tables:
    methods = rows.methods("loss", **TUNING)
    increases = {}
    for step in (0, 25, 100, 200):
        increases[f"{step} steps"] = {"metric": "loss", "step": step, **TUNING}
    losses = {
        "generated families, without training": {"sweep": "redraw/swap"},
        "from scratch": {"sweep": FROM_SCRATCH["sweep"]},
        "WikiText-2, fine-tuned": {"sweep": "books/moved"},
    }
    for where in losses.values():
        where |= {"metric": "loss", "split": "test"}
    sweeps = ["redraw/swap", *FROM_SCRATCH["sweep"], "books/moved"]
    tested = rows.methods("loss", split="test", sweep=sweeps)
    title = (
        "Loss increase over exact attention after fine-tuning, nats: generated families, m = 256"
    )
    labels = {method: method_label(method) for method in methods}
    return {
        title: mean_table(rows, increases, labels, spec="+.3f", less="exact"),
        "Loss on test, nats": mean_table(rows, losses, tested, spec=".3f"),
    }


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(
        left,
        rows,
        "step",
        "loss",
        {method: method_label(method) for method in MANY},
        less="exact",
        dotted=[f"{FAVORP} redraw_every=100"],
        **TUNING,
    )
    left.set(
        title="Generated families, fine-tuned from exact weights",
        xlabel="steps",
        ylabel="loss increase over exact attention, nats",
    )
    dot_plot(right, redraw_effects(rows), zero=True)
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
        "trigonometric, ReLU and FAVOR++ with redraws, 20 for exact and FAVOR+, else eight. Five and then twelve were "
        "added after results were seen: claims use the models added last.",
        "The paper compares redraws, SMREG and trigonometric features in training from scratch on PG-19. Claims on "
        "fine-tuned models are ours.",
        "From scratch, SMREG and trigonometric features have eight fresh seeds of their own, with FAVOR+ beside them.",
        "WikiText-2: 300 byte pairs, d = 64, 800 steps, then 80 steps with m = 32; five seeds.",
        "These sizes and m = 256 were chosen after first results of several methods.",
    ],
    claims=claims,
    tables=tables,
    figure=figure,
)
