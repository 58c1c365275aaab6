"""Runs of GLUE: MiniLM with swapped attention, and BERT as in CRT Table 2."""

from collections.abc import Mapping, Sequence

from crt_exp.experiments.papers.parts.small_encoders import FAVORP, FAVORPP, RELU, SHARP
from crt_exp.experiments.report import HOME, PlannedRun, quoted_override, sweep

UPTRAINED = f"{FAVORPP} after uptraining"
NEAR = "nearfar exact_until=0 block=8 heavy=4 cells=8"

# ---- MiniLM

HELD_OUT = "sst2, held out"
OTHER_HALF = "qnli, other half"
DATA = {
    "sst2": "task.dataset=sst2",
    "stsb": "task.dataset=stsb",
    HELD_OUT: "task.dataset=sst2 task.data_dir=outputs/texts/sst2-20000",
    "qnli": "task.dataset=qnli task.data_dir=outputs/texts/qnli-2",
    OTHER_HALF: "task.dataset=qnli task.data_dir=outputs/texts/qnli-1",
}
LONG = {2e-4: "trainer.steps=400 trainer.lr=0.0002"}  # learning rate -> options
SHORT = {1e-4: "trainer.steps=120 trainer.freeze=[embeddings] trainer.lr=0.0001"}


def minilm_runs(
    dataset: str, methods: Sequence[str], seeds: int, training: Mapping = LONG, options: str = ""
) -> list[PlannedRun]:
    return sweep(
        "task=glue task.model=models/minilm task.bucketed=true task.parts=24 task.max_length=64 "
        f"trainer.eval_every=1000000 trainer.save_every=1000000 {options}",
        attention=methods,
        model="MiniLM",
        dataset={dataset: DATA[dataset]},
        lr=training,
        seed=range(seeds),
    )


CONTROLS = ["exact", FAVORPP, FAVORP, "uniform"]
MINILM = [
    *minilm_runs("sst2", [*CONTROLS, NEAR, SHARP, RELU], 1, options="task.held_out=500"),
    *minilm_runs(HELD_OUT, [FAVORPP, FAVORP], 5),
    *minilm_runs(HELD_OUT, ["exact", "uniform"], 3),
    *minilm_runs("qnli", [*CONTROLS, NEAR], 1, SHORT),
    *minilm_runs("stsb", [*CONTROLS, NEAR], 1, SHORT),
    *minilm_runs(OTHER_HALF, CONTROLS, 1, SHORT),
]

# ---- BERT, as in the paper

SCORES = {  # title, metric, the paper's scores
    "sst2": ("SST-2", "accuracy", "90.58 91.51 91.97 92.00 92.20"),
    "qnli": ("QNLI", "accuracy", "87.13 89.09 88.85 89.58 89.73"),
    "stsb": ("STS-B (Spearman)", "spearman", "85.07 86.68 87.64 85.62 85.90"),
    "rte": ("RTE", "accuracy", "67.59 68.59 67.51 67.87 67.63"),
    "cola": ("CoLA (Matthews)", "mcc", "53.17 48.43 52.08 54.95 58.85"),
    "mrpc": ("MRPC (F1)", "f1", "83.82 85.05 84.56 85.78 88.73"),
    "mnli": ("MNLI", "accuracy", "80.26 80.72 81.39 81.25 82.29"),
    "qqp": ("QQP", "accuracy", "89.53 90.05 90.11 90.15 90.43"),
}
PRETRAINED = [FAVORP, "elu", RELU, FAVORPP, "uniform"]
MODELS = {
    "pretraining": sweep("experiment=crt_bert_pretrain", attention=PRETRAINED),
    "uptraining": sweep("experiment=crt_uptrain", attention=[FAVORPP]),
}
STARTS = {"exact": "attention=exact"}
for method in PRETRAINED:
    start = quoted_override("task.init", f"{HOME}/pretraining/{method.replace(' ', '-')}")
    STARTS[method] = f"{start} attention={method.replace(' m=', ' features.m=')}"
start = quoted_override("task.init", f"{HOME}/uptraining/favorpp-m=256")
STARTS[UPTRAINED] = f"{start} attention=favorpp features.m=256"
BERT = sweep(
    "experiment=crt_glue",
    model="BERT-base",
    method=STARTS,
    seed=[0],
    **{"task.dataset": [*SCORES], "trainer.lr": [2e-5, 3e-5, 4e-5, 5e-5]},
)
