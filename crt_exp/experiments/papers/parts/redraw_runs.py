"""Runs with redrawn projections: from models trained with exact attention, and from scratch."""

from collections.abc import Sequence

from crt_exp.experiments.papers.parts.protein_models import (
    DIRECTIONS,
    FAMILIES,
    MODEL,
    training_runs,
)
from crt_exp.experiments.report import HOME, PlannedRun, seeds_from, sweep

GENERATED = "generated families"
FAVORP = "favorp m=256"
MOST = ["exact", FAVORP]  # fine-tuned from 20 models
MANY = [*MOST, f"{FAVORP} redraw_every=100", f"{FAVORP} redraw_every=1"]  # from 8 models
MANY += ["favorpp m=256", "smreg m=256 redraw_every=1"]
FEW = ["uniform", "favor m=256", "relu m=256"]  # from 3 models
SCRATCH = ["exact", "favorp m=64", "favorp m=64 redraw_every=100"]
FRESH = "m=64 redraw_every=100"
MOVED = ["favor m=32", "favorp m=32", "favorp m=32 redraw_every=20", "smreg m=32 redraw_every=20"]
REDRAWN = "redraw_every=1000"


def without_sizes(options: str) -> str:
    """Options of a run that starts from another one, whose sizes it takes."""
    return " ".join(option for option in options.split() if "sizes" not in option)


def runs_from_exact(
    options: str, methods: Sequence[str], models: Sequence[int], projections: int = 0, **axes
) -> list[PlannedRun]:
    """Runs that start from exact models; one seed of projections for each model."""
    first_seed, key = 1000, "task.init"
    if "swap_loss" in options:
        first_seed, key = 8 * projections, "task.start"
    start = f"{key}={HOME}/redraw-exact/generated-families_U_exact"
    return sweep(
        options,
        dataset=GENERATED,
        mode="U",
        attention=methods,
        projections={projections: ""},
        seed=seeds_from(start, models, first_seed),
        **axes,
    )


TUNE = without_sizes(f"{MODEL} {DIRECTIONS['U']} {FAMILIES[GENERATED]}")
TUNE += " trainer.warmup=5 trainer.steps=200 trainer.eval_every=25"
VALIDATE = "task=swap_loss task.splits=[validation] task.offset=1000"
TEST = "task=swap_loss task.splits=[test] task.offset=1000"
SWAPS = [
    *runs_from_exact(VALIDATE, [*MANY, *FEW], range(8), split="validation"),
    *runs_from_exact(VALIDATE, MOST, range(8, 20), split="validation"),
    *runs_from_exact(TEST, ["exact", "uniform"], range(8)),
]
for i in range(3):
    SWAPS += runs_from_exact(TEST, [FAVORP, "favorpp m=256", "relu m=256"], range(8), i)
BOOKS = (
    f"{MODEL} task=books task.vocabulary_size=300 task.evaluated=1000 task.max_length=64 "
    "trainer.eval_batch=64"
)
BOOK_MODELS = seeds_from(f"task.init={HOME}/books/WikiText-2_U_exact", range(5))
WORDS = {"dataset": "WikiText-2", "mode": "U"}
SCRATCH_DATA = {GENERATED: f"{FAMILIES[GENERATED]} trainer.eval_every=500"}
FRESH_SEEDS = {
    "mode": {"U": DIRECTIONS["U"]},
    "attention": [f"{name} {FRESH}" for name in ("favorp", "smreg", "favor")],
    "seed": range(3, 11),
}
MOVE = without_sizes(f"{BOOKS} trainer.steps=80 trainer.eval_every=40")
SMALL = {
    "redraw": [
        *runs_from_exact(TUNE, MANY, range(8)),
        *runs_from_exact(TUNE, FEW, range(3)),
        *runs_from_exact(TUNE, MOST, range(8, 20)),
    ],
    "redraw/swap": SWAPS,
    "redraw-scratch": training_runs(MODEL, SCRATCH_DATA, "U", SCRATCH, 3),
    "redraw-scratch/features": sweep(MODEL, dataset=SCRATCH_DATA, **FRESH_SEEDS),
    "books/moved": sweep(MOVE, **WORDS, attention=MOVED, seed=BOOK_MODELS),
}
PG19_METHODS = ["exact", "favorp redraw_every=0"]
PG19_METHODS += [f"{name} {REDRAWN}" for name in ("favorp", "favor", "smreg")]
LM1B = {"dataset": "LM1B", "mode": "U"}
MOVE_LM1B = f"experiment=performers_lm1b trainer.steps=50000 task.init={HOME}/lm1b/LM1B_U_exact_0"
FULL = {
    "books": sweep(
        "experiment=performers_pg19",
        dataset="PG-19",
        mode=DIRECTIONS,
        attention=PG19_METHODS,
        seed=[0],
    ),
    "books/moved": sweep(MOVE_LM1B, **LM1B, attention=["favorp", "favor"], seed=[0]),
}
BOOKS_TRAINED = f"{BOOKS} trainer.steps=800 trainer.eval_every=200"
MODELS = {
    "redraw-exact": training_runs(MODEL, FAMILIES, "U", ["exact"], 20),
    "books": sweep(BOOKS_TRAINED, **WORDS, attention=["exact"], seed=range(5)),
    "lm1b": sweep("experiment=performers_lm1b", **LM1B, attention=["exact"], seed=[0]),
}
