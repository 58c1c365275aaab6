"""Small language models of proteins, which several pages train."""

from collections.abc import Mapping, Sequence

from crt_exp.experiments.report import PlannedRun, sweep

DIRECTIONS = {"U": "task.direction=unidirectional", "B": "task.direction=bidirectional"}
MODEL = (
    "task=trembl task.dropout=0 +task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 "
    "trainer.batch=32 trainer.warmup=20 trainer.eval_batch=128 trainer.select=last trainer.save_every=1000000"
)
FAMILIES = {
    "generated families": "task.dataset=generated task.max_length=64 task.generated.shortest=32 "
    "task.generated.longest=64 trainer.eval_every=100 trainer.log_every=100 trainer.steps=1000"
}
PROTEOMES = {
    "proteomes": "task.dataset=uniprot task.max_length=128 trainer.eval_every=40 trainer.log_every=40 "
    "trainer.steps=200"
}
CHAINS = (
    "task=trembl task.dataset=uniprot task.chains=true task.max_length=8192 task.held_out_files=[] "
    "task.validation_share=0.01 task.test_share=0.01 task.dropout=0 task.preset=tiny trainer.batch=1 "
    "trainer.warmup=4 trainer.select=last trainer.eval_every=1000000 trainer.save_every=1000000 trainer.steps=32"
)
FIRST_LOOK = 3  # seeds of the first look; later ones were added after it, and decide alone


def training_runs(
    options: str, data: Mapping[str, str], direction: str, methods: Sequence[str], seeds: int
) -> list[PlannedRun]:
    """Return the runs of a model; data: name of a data set -> its options."""
    return sweep(
        options,
        dataset=data,
        mode={direction: DIRECTIONS[direction]},
        attention=methods,
        seed=range(seeds),
    )


# ---- the runs of perf_proteins

METHODS = ["exact", "favorp m=32", "favorpp m=32", "relu m=32", "uniform"]
REFORMER = "reformer chunk=16 buckets=16 hashes=2"
EVERY = [*METHODS, "linformer length=128 rank=32", REFORMER]
PROTEINS = [
    *training_runs(MODEL, FAMILIES, "U", METHODS, 8),
    *training_runs(MODEL, FAMILIES, "U", [REFORMER], 3),
    *training_runs(MODEL, FAMILIES, "B", EVERY, 8),
    *training_runs(MODEL, PROTEOMES, "U", [*METHODS, REFORMER], 3),
    *training_runs(MODEL, PROTEOMES, "B", EVERY, 3),
]
LONG = training_runs(
    CHAINS, {"chains of proteomes": ""}, "U", ["exact", "uniform", "favorpp m=32"], 3
)
TREMBL, SET = "experiment=performers_trembl", {"TrEMBL": ""}
FULL_METHODS = [
    "relu",
    "exact",
    "elu",
    "uniform",
    "favorp redraw_every=1000",
    "favorpp redraw_every=1000",
]
FULL_LINFORMER = "linformer length=1024 rank=600 redraw_every=1000"
FULL_REFORMER = "reformer hashes=2 chunk=128 buckets=16"
FULL_PROTEINS = [
    *training_runs(TREMBL, SET, "U", FULL_METHODS, 1),
    *training_runs(TREMBL, SET, "B", [*FULL_METHODS, FULL_LINFORMER], 1),
    *training_runs(f"{TREMBL} trainer.clip=null", SET, "U", [FULL_REFORMER], 1),
]
CONCATENATED = "experiment=performers_trembl_concat"
FULL_LONG = training_runs(CONCATENATED, {"chains of TrEMBL": ""}, "U", FULL_METHODS, 1)
SMALL = {"proteins": PROTEINS, "proteins-long": LONG}
FULL = {"proteins": FULL_PROTEINS, "proteins-long": FULL_LONG}
