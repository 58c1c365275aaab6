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
