"""The model of `make recall`: two layers of exact attention with rotary positions that are trained here on task=recall,
from short rows to long ones."""

import hashlib
from pathlib import Path

from crt_exp.report import runs

PLACE = Path("outputs/recall")
SOURCES = ("tasks/recall.py", "tasks/sequences.py", "models/language.py", "models/transformer.py",
           "attention/baselines.py", "runner", "report/recall_runs.py")
# tokens of a row, pairs, queries, rows of a batch, steps, learning rate
STAGES = ((16, 2, 6, 256, 400, 2e-3), (32, 4, 12, 128, 400, 2e-3), (64, 8, 24, 64, 500, 2e-3),
          (128, 16, 48, 32, 500, 2e-3), (256, 32, 64, 16, 500, 2e-3), (512, 64, 128, 8, 500, 2e-3),
          (2048, 64, 128, 4, 300, 5e-4), (8192, 64, 256, 2, 150, 5e-4))
OPTIONS = ("task=recall", "attention=exact", "task.symbols=256", "task.rows=512000", "task.evaluated=16",
           "trainer.eval_every=1000000", "trainer.select=last", "trainer.keep=1", "resume=auto")


def stages() -> list[list[str]]:
    """The command line of each, but for where it starts."""
    names = ("task.block", "task.pairs", "task.queries", "trainer.batch", "trainer.steps", "trainer.lr")
    return [[*OPTIONS, *(f"{name}={value}" for name, value in zip(names, stage))] for stage in STAGES]


def place(count: int) -> Path:
    """The run of the last of so many stages: its name depends on all of them."""
    decided = " ".join([*(option for each in stages()[:count] for option in each), runs.code(SOURCES)])
    return PLACE / f"exact-{hashlib.sha256(decided.encode()).hexdigest()[:10]}"


def train() -> tuple[Path, float]:
    """The run of the last stage, and seconds of all. Stages that are done are not done again."""
    seconds = 0.0
    for count, stage in enumerate(stages(), 1):
        start = f"task.init={place(count - 1) if count > 1 else 'scratch'}"
        seconds += runs.run([*stage, start], place(count))[-1]["time_s"]
    return place(len(STAGES)), seconds
