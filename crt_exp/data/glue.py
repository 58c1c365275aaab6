"""The GLUE tasks: the official TSV files or the copy on the Hugging Face hub, and their sentences as token ids.

`load("rte", "dev")` reads $CRT_DATA/glue/RTE/dev.tsv. The files are read without quoting: a field may hold an unpaired
double quote. Columns are read by their names, which differ between parts of a task; CoLA's train and dev have none.
Legend: n examples of a split, B of a batch, L tokens of the longest example of a batch.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.data import DataError, warn
from crt_exp.data.plan import padded
from crt_exp.data.sources import from_hub, how_to_fetch, is_on_hub, missing, task_folder
from crt_exp.data.text import numbered_lines

HUB = "nyu-mll/glue"
GROUP = 10_000                                               # examples that are tokenized at once


@dataclass(frozen=True)
class GlueTask:
    """One GLUE task: its files, columns, classes and metrics.

    spelled: how the files write the classes, in the order of `names`; both empty: a score from 0 to 5.
    metrics: the one that the paper's table reports comes first.
    """

    folder: str
    label: str
    names: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ("0", "1")
    columns: tuple[str, ...] = ("sentence1", "sentence2")
    hub_columns: tuple[str, ...] = ()                        # where they differ from `columns`
    headless: tuple[str, ...] = ()                           # columns of files that have no header line
    metrics: tuple[str, ...] = ("accuracy",)
    two_devs: bool = False                                   # matched and mismatched
    broken: float = 0.0                                      # share of broken rows that the published files have

    @property
    def source(self) -> str:
        return f"glue/{self.folder}"

    @property
    def outputs(self) -> int:
        """Width of the model's head: classes, or 1 for a score."""
        return len(self.names) or 1

    @property
    def splits(self) -> dict[str, str]:
        """Split -> name of its file, without suffix. Labels of tests are not published."""
        devs = {"dev": "dev_matched", "dev_mm": "dev_mismatched"} if self.two_devs else {"dev": "dev"}
        return {"train": "train", **devs}


ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
TASKS = {
    "cola": GlueTask("CoLA", "label", ("unacceptable", "acceptable"), columns=("sentence",), metrics=("mcc",),
                     headless=("source", "label", "mark", "sentence")),
    "sst2": GlueTask("SST-2", "label", ("negative", "positive"), columns=("sentence",)),
    "mrpc": GlueTask("MRPC", "Quality", ("not_equivalent", "equivalent"), columns=("#1 String", "#2 String"),
                     hub_columns=("sentence1", "sentence2"), metrics=("f1", "accuracy")),
    # Some published question pairs are broken over two lines; every reader in use leaves them out.
    "qqp": GlueTask("QQP", "is_duplicate", ("not_duplicate", "duplicate"), columns=("question1", "question2"),
                    metrics=("accuracy", "f1"), broken=1e-3),
    "stsb": GlueTask("STS-B", "score", spelled=(), metrics=("spearman", "pearson")),
    "mnli": GlueTask("MNLI", "gold_label", NLI, NLI, hub_columns=("premise", "hypothesis"), two_devs=True),
    "qnli": GlueTask("QNLI", "label", ENTAILMENT, ENTAILMENT, columns=("question", "sentence")),
    "rte": GlueTask("RTE", "label", ENTAILMENT, ENTAILMENT),
    "wnli": GlueTask("WNLI", "label", ("not_entailment", "entailment")),
}


@dataclass(frozen=True)
class Examples:
    """n examples of a task, in the order of the file: one or two lists of sentences, and classes or scores."""

    texts: list[list[str]]
    labels: list[int] | list[float]

    def __len__(self) -> int:
        return len(self.labels)

    def subsample(self, n: int | None, seed: int = 0) -> "Examples":
        """n examples drawn without replacement, in the order of the file; all, where there are no more or n is None.

        The sample depends on (seed, number of examples) alone, and a smaller one is part of a larger one.
        """
        return self if n is None or n >= len(self) else self.rows(self.order(seed)[:n])

    def apart(self, n: int, seed: int = 0) -> tuple["Examples", "Examples"]:
        """The others and n that are held out, drawn as those of `subsample`. Raises DataError where none is left."""
        if n >= len(self):
            raise DataError(f"task.held_out={n}: expected 1 to {len(self) - 1}, of {len(self)} examples")
        order = self.order(seed)
        return self.rows(order[n:]), self.rows(order[:n])

    def order(self, seed: int) -> list[int]:
        draw = random.Random(seed).random
        order = [draw() for _ in self.labels]
        return sorted(range(len(order)), key=order.__getitem__)

    def rows(self, chosen: Sequence[int]) -> "Examples":
        *texts, labels = [[values[i] for i in sorted(chosen)] for values in (*self.texts, self.labels)]
        return Examples(texts, labels)


def load(name: str, split: str = "train", data_dir: str | Path | None = None, source: str = "auto") -> Examples:
    """Read one split (train, dev; MNLI also dev_mm) of the GLUE task `name`.

    source: "files", the official TSVs in `data_dir` (default $CRT_DATA/glue/<TASK>), "hub", the copy on the Hugging
    Face hub, or "auto", files where they are there. Raises DataError for a missing or empty file, a row with too few
    columns, and an unknown label.
    """
    task = TASKS[name]
    if is_on_hub(source, task.source, task_folder(task.source), data_dir):
        return from_copy(name, split)
    folder = task_folder(task.source, data_dir)
    path = folder / f"{task.splits[split]}.tsv" if folder else None
    if path is None or not path.is_file():
        raise missing(task.source, path, list(task.splits).index(split))
    lines = [(f"{path}, line {number}", line.split("\t")) for number, line in numbered_lines(path) if line]
    header = [*task.headless] or (lines.pop(0)[1] if lines else [])
    rows = [(place, dict(zip(header, fields))) for place, fields in lines if len(fields) == len(header)]
    broken = [place for place, fields in lines if len(fields) != len(header)]
    if not rows or not {*task.columns, task.label} <= {*header} or len(broken) > task.broken * len(rows):
        raise DataError(f"{broken[0] if broken else path}: expected examples of {len(header)} columns, with "
                        f"{', '.join(task.columns)} and {task.label}; get the published file: "
                        f"`python -m crt_exp.data fetch {task.source}`")
    if broken:
        warn("%s: %s broken rows are left out", path, len(broken))
    return Examples([[row[column] for _, row in rows] for column in task.columns],
                    [label_of(task, row[task.label], place) for place, row in rows])


def label_of(task: GlueTask, text: str, place: str) -> int | float:
    """The class, or the score, that a label stands for."""
    if text in task.spelled:
        return task.spelled.index(text)
    if not task.spelled and re.fullmatch(r"[0-4](\.\d+)?|5(\.0+)?", text):
        return float(text)
    raise DataError(f"{place}: label {text!r}: expected {', '.join(task.spelled) or 'a number from 0 to 5'}")


def from_copy(name: str, split: str) -> Examples:
    from datasets import load_dataset

    task = TASKS[name]
    part = task.splits[split].replace("dev", "validation")
    rows = from_hub(lambda: load_dataset(HUB, name, split=part), f"{HUB} ({name}, {part})",
                    how_to_fetch(task.source))
    if task.names != tuple(getattr(rows.features["label"], "names", ())):
        raise DataError(f"{HUB} ({name}): expected the classes {', '.join(task.names) or 'scores'}; use the files")
    return Examples([list(rows[column]) for column in task.hub_columns or task.columns], list(rows["label"]))


def encode(examples: Examples, tokenizer, max_length: int, classes: bool) -> list[dict[str, Any]]:
    """Token ids of each example, with the tokenizer's special tokens; what exceeds `max_length` is cut off, from the
    longer sentence of a pair first. Raises DataError for a `max_length` without room."""
    special = tokenizer.num_special_tokens_to_add(pair=len(examples.texts) > 1)
    if max_length <= special or tokenizer.pad_token_id is None:
        raise DataError(f"task.max_length={max_length}: expected more than the {special} special tokens, and a "
                        "tokenizer with a padding token")
    rows: list[dict[str, Any]] = []
    for start in range(0, len(examples), GROUP):
        group = [part[start:start + GROUP] for part in examples.texts]
        coded = tokenizer(*group, truncation=True, max_length=max_length, return_attention_mask=False)
        rows += [{name: np.array(ids, np.int32) for name, ids in zip(coded, row)} for row in zip(*coded.values())]
    labels = np.array(examples.labels, np.int64 if classes else np.float32)
    return [row | {"labels": label} for row, label in zip(rows, labels)]


def collate(batch: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Examples, padded on the right to the longest: input_ids, attention_mask (1 = token), token_type_ids where there
    are any, (B, L) int64, and labels (B,)."""
    lengths = torch.tensor([len(item["input_ids"]) for item in batch])
    out = {"labels": torch.from_numpy(np.array([item["labels"] for item in batch])),
           "attention_mask": (torch.arange(lengths.max()) < lengths[:, None]).long()}
    return out | {name: padded([item[name] for item in batch], pad_id if name == "input_ids" else 0)
                  for name in batch[0] if name != "labels"}
