"""Runs of Performers Figures 5 and 15: models that start from exact ones, and training from scratch."""

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


def without_sizes(options: str) -> str:
    """Options of a run that starts from another one, whose sizes it takes."""
    return " ".join(option for option in options.split() if "sizes" not in option)


def runs_from_exact(
    options: str, key: str, methods: list[str], models: range, first_seed: int = 0, **axes
) -> list[PlannedRun]:
    """Runs that start from exact models, with one seed of projections for each model.

    key: the option for the exact model.
    """
    starts = seeds_from(f"{key}={HOME}/redraw-exact/generated-families_U_exact", models, first_seed)
    axes = {"projections": {0: ""}, "seed": starts} | axes
    return sweep(options, dataset=GENERATED, mode="U", attention=methods, **axes)


TUNE = without_sizes(f"{MODEL} {DIRECTIONS['U']} {FAMILIES[GENERATED]}")
TUNE += " trainer.warmup=5 trainer.steps=200 trainer.eval_every=25"
TUNED = [
    *runs_from_exact(TUNE, "task.init", MANY, range(8), 1000),
    *runs_from_exact(TUNE, "task.init", FEW, range(3), 1000),
    *runs_from_exact(TUNE, "task.init", MOST, range(8, 20), 1000),
]
VALIDATE = "task=swap_loss task.splits=[validation] task.offset=1000"
TEST = "task=swap_loss task.splits=[test] task.offset=1000"
ESTIMATES = [FAVORP, "favorpp m=256", "relu m=256"]
SWAPPED = [
    *runs_from_exact(VALIDATE, "task.start", [*MANY, *FEW], range(8), split="validation"),
    *runs_from_exact(VALIDATE, "task.start", MOST, range(8, 20), split="validation"),
    *runs_from_exact(TEST, "task.start", ["exact", "uniform"], range(8)),
]
for i in range(3):  # sets of projections
    sets = {"projections": {i: ""}}
    SWAPPED += runs_from_exact(TEST, "task.start", ESTIMATES, range(8), 8 * i, **sets)

FRESH = "m=64 redraw_every=100"
SCRATCH = {
    "dataset": {GENERATED: f"{FAMILIES[GENERATED]} trainer.eval_every=500"},
    "mode": {"U": DIRECTIONS["U"]},
}
REDRAWS = ["exact", "favorp m=64", f"favorp {FRESH}"]
FEATURES = [f"favorp {FRESH}", f"smreg {FRESH}", f"favor {FRESH}"]

BOOKS = f"{MODEL} task=books task.vocabulary_size=300 task.evaluated=1000 task.max_length=64"
BOOKS += " trainer.eval_batch=64"
WORDS = {"dataset": "WikiText-2", "mode": "U"}
MOVE = without_sizes(f"{BOOKS} trainer.steps=80 trainer.eval_every=40")
MOVED = ["favor m=32", "favorp m=32", "favorp m=32 redraw_every=20", "smreg m=32 redraw_every=20"]
BOOK_MODELS = seeds_from(f"task.init={HOME}/books/WikiText-2_U_exact", range(5))
SMALL = {
    "redraw": TUNED,
    "redraw/swap": SWAPPED,
    "redraw-scratch": sweep(MODEL, **SCRATCH, attention=REDRAWS, seed=range(3)),
    "redraw-scratch/features": sweep(MODEL, **SCRATCH, attention=FEATURES, seed=range(3, 11)),
    "books/moved": sweep(MOVE, **WORDS, attention=MOVED, seed=BOOK_MODELS),
}

REDRAWN = "redraw_every=1000"
PG19_RUN = "experiment=performers_pg19"
ON_PG19 = ["exact", "favorp redraw_every=0", f"favorp {REDRAWN}", f"favor {REDRAWN}"]
ON_PG19 += [f"smreg {REDRAWN}"]
LM1B_RUN = "experiment=performers_lm1b"
LM1B = {"dataset": "LM1B", "mode": "U", "seed": [0]}
MOVE_LM1B = f"{LM1B_RUN} trainer.steps=50000 task.init={HOME}/lm1b/LM1B_U_exact_0"
FULL = {
    "books": sweep(PG19_RUN, dataset="PG-19", mode=DIRECTIONS, attention=ON_PG19, seed=[0]),
    "books/moved": sweep(MOVE_LM1B, **LM1B, attention=["favorp", "favor"]),
}
BOOKS_TRAINED = f"{BOOKS} trainer.steps=800 trainer.eval_every=200"
MODELS = {
    "redraw-exact": training_runs(MODEL, FAMILIES, "U", ["exact"], 20),
    "books": sweep(BOOKS_TRAINED, **WORDS, attention=["exact"], seed=range(5)),
    "lm1b": sweep(LM1B_RUN, **LM1B, attention=["exact"]),
}
