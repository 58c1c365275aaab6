"""What `make ptb-peer` measures: task=ptb compared with the same run in plain PyTorch (`plain_lstm`).

Sizes, batches, rates and epochs are the same; seeds and the order of weights differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crt_exp.data.text import official_file
from crt_exp.stored import read_yaml
from crt_exp.studies import plain_lstm, runs, training
from crt_exp.studies.cells import Cells, Draw
from crt_exp.studies.language_laws import MODEL
from crt_exp.studies.plain_lstm import Options

HOME = Path("outputs/ptb-peer")
SPLITS = {"train": "train", "validation": "valid"}
SETTING = "Penn Treebank"


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Perplexity, one run each: table "validation" (x: epoch), and of ours with the unigram law "test"."""
    cells = Cells(name, sources, keep)
    ours = {"overrides": [*size["run"]], "sources": [*MODEL], "kept": True}
    theirs = {"overrides": [*size["run"]], "sources": [*MODEL], "peer": "plain PyTorch"}
    cells.fill([ours], training.train, f"{name}: ours", 1).fill([theirs], plain, f"{name}: plain PyTorch", 1)
    for record in cells[ours]["curve"]:
        yield cells.draw(ours, SETTING, "ours", "perplexity", record["perplexity"], 0, record["epoch"], "validation")
    for epoch, value in enumerate(cells[theirs], 1):
        yield cells.draw(theirs, SETTING, "plain", "perplexity", value, 0, epoch, "validation")
    for arm, field in (("ours", "perplexity"), ("unigram", "unigram_perplexity")):
        yield cells.draw(ours, SETTING, arm, "perplexity", cells[ours]["last"][field], 0, table="test")
    yield cells.draw(ours, SETTING, "ours", "minutes", cells[ours]["last"]["time_s"] / 60, 0, table="test")


def plain(overrides: list[str], sources: list[str], peer: str) -> list[float]:
    """Perplexity on the validation text after each epoch of the same run."""
    cfg = read_yaml(runs.Home(training.HOME, tuple(sources)).place(overrides) / "config.yaml")
    files = {split: official_file("ptb", part, cfg.task.data_dir) for split, part in SPLITS.items()}
    return plain_lstm.run(files, options_of(cfg), HOME)


def options_of(cfg: Any) -> Options:
    task, trainer = cfg.task, cfg.trainer
    return Options(task.width, task.layers, task.dropout, task.bptt, trainer.batch, int(trainer.epochs), trainer.lr,
                   tuple(trainer.betas), trainer.clip, int(trainer.warmup), trainer.schedule == "linear", cfg.seed)
