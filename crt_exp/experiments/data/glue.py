"""GLUE data: official TSV files or the Hugging Face copy, and their token ids.

`load("rte", "dev")` reads $CRT_DATA/glue/RTE/dev.tsv. Files are read without quoting, because a field may hold an
unpaired double quote. Columns are found by name, because their order differs between the files of a task. The train and
dev files of CoLA have no header.
Notation: n examples of a split, B of a batch, L tokens of the longest example of a batch.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.experiments.data import DataError, Folder, numbered_lines, warn
from crt_exp.experiments.data.plan import length_mask, pad_rows
from crt_exp.experiments.data.sources import (
    how_to_fetch,
    is_on_hub,
    load_rows,
    missing_file,
    task_folder,
)

HUB = "nyu-mll/glue"
GROUP = 10_000  # examples per call of the tokenizer


@dataclass(frozen=True)
class GlueTask:
    """Files, columns, classes and metrics of one GLUE task.

    Attributes:
        spelled: labels of the classes in the files, in the order of `names`. Both are empty for a score from 0 to 5.
        metrics: the metric of the paper's table comes first.
    """

    folder: str
    label: str
    names: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ("0", "1")
    columns: tuple[str, ...] = ("sentence1", "sentence2")
    hub_columns: tuple[str, ...] = ()  # if they differ from `columns`
    headless: tuple[str, ...] = ()  # columns of files without a header line
    metrics: tuple[str, ...] = ("accuracy",)
    # file name of each split; test labels are not published
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "dev": "dev"})
    broken: float = 0.0  # share of broken rows in the published files

    @property
    def source(self) -> str:
        return f"glue/{self.folder}"


ENTAILMENT = ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
MATCHED = {"train": "train", "dev": "dev_matched", "dev_mm": "dev_mismatched"}
TASKS = {
    "cola": GlueTask(
        "CoLA",
        "label",
        ("unacceptable", "acceptable"),
        columns=("sentence",),
        metrics=("mcc",),
        headless=("source", "label", "mark", "sentence"),
    ),
    "sst2": GlueTask("SST-2", "label", ("negative", "positive"), columns=("sentence",)),
    "mrpc": GlueTask(
        "MRPC",
        "Quality",
        ("not_equivalent", "equivalent"),
        columns=("#1 String", "#2 String"),
        hub_columns=("sentence1", "sentence2"),
        metrics=("f1", "accuracy"),
    ),
    # Some published question pairs are broken over two lines; other readers leave them out too.
    "qqp": GlueTask(
        "QQP",
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        columns=("question1", "question2"),
        metrics=("accuracy", "f1"),
        broken=1e-3,
    ),
    "stsb": GlueTask("STS-B", "score", spelled=(), metrics=("spearman", "pearson")),
    "mnli": GlueTask(
        "MNLI", "gold_label", NLI, NLI, hub_columns=("premise", "hypothesis"), splits=MATCHED
    ),
    "qnli": GlueTask("QNLI", "label", ENTAILMENT, ENTAILMENT, columns=("question", "sentence")),
    "rte": GlueTask("RTE", "label", ENTAILMENT, ENTAILMENT),
    "wnli": GlueTask("WNLI", "label", ("not_entailment", "entailment")),
}


@dataclass(frozen=True)
class Examples:
    """n examples in file order: one or two lists of sentences, and their labels.

    labels: classes, or scores.
    """

    texts: list[list[str]]
    labels: list[int] | list[float]

    def __len__(self) -> int:
        return len(self.labels)

    def sample(self, n: int) -> tuple["Examples", "Examples"]:
        """Split off n random examples: (other examples, sample), in file order.

        The sample depends only on the number of examples. A smaller sample is part of a larger one.
        """
        draw = random.Random(0).random
        keys = [draw() for _ in self.labels]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        parts = []
        for indices in (sorted(order[n:]), sorted(order[:n])):
            texts = [[*map(column.__getitem__, indices)] for column in self.texts]
            parts.append(Examples(texts, [self.labels[i] for i in indices]))
        return parts[0], parts[1]


def load(
    name: str, split: str = "train", data_dir: Folder = None, source: str = "auto"
) -> Examples:
    """Read one split (train, dev; MNLI also dev_mm) of the GLUE task `name`.

    source: "files" reads the official TSVs in `data_dir` (default $CRT_DATA/glue/<TASK>). "hub" reads the copy on the
    Hugging Face hub. "auto" reads the files if they exist, else the hub. Raises DataError for a missing or empty file,
    too many rows with a wrong number of columns, and an unknown label.
    """
    task = TASKS[name]
    if is_on_hub(source, task.source, task_folder(task.source), data_dir):
        return from_copy(name, split)
    path = split_file(task, split, data_dir)
    header = [*task.headless]
    rows = []
    broken = []
    for number, line in numbered_lines(path):
        if not line:
            continue
        place = f"{path}, line {number}"
        fields = line.split("\t")
        if not header:
            header = fields
        elif len(fields) == len(header):
            rows.append((place, dict(zip(header, fields))))
        else:
            broken.append(place)
    has_columns = {*task.columns, task.label} <= {*header}
    if not rows or not has_columns or len(broken) > task.broken * len(rows):
        place = broken[0] if broken else path
        raise DataError(
            f"{place}: expected rows of {len(header)} columns, with "
            f"{', '.join(task.columns)} and {task.label}; run `python -m crt_exp data fetch {task.source}`"
        )
    if broken:
        warn("%s: skipped %s broken rows", path, len(broken))
    texts = []
    for column in task.columns:
        texts.append([row[column] for _, row in rows])
    labels: list[Any] = []
    for place, row in rows:
        label = row[task.label]
        if label in task.spelled:
            labels.append(task.spelled.index(label))
        elif not task.spelled and re.fullmatch(r"[0-4](\.\d+)?|5(\.0+)?", label):
            labels.append(float(label))
        else:
            expected = ", ".join(task.spelled) or "a number from 0 to 5"
            raise DataError(f"{place}: label {label!r}: expected {expected}")
    return Examples(texts, labels)


def split_file(task: GlueTask, split: str, data_dir: Folder = None) -> Path:
    """Path of the official TSV of a split. Raises DataError if the file is missing."""
    folder = task_folder(task.source, data_dir)
    path = folder / f"{task.splits[split]}.tsv" if folder else None
    if path is None or not path.is_file():
        raise missing_file(task.source, path, list(task.splits).index(split))
    return path


def from_copy(name: str, split: str) -> Examples:
    task = TASKS[name]
    part = task.splits[split].replace("dev", "validation")
    hub = {"name": HUB, "config": name, "data_files": None}
    rows = load_rows(hub, part, otherwise=how_to_fetch(task.source))
    if task.names != tuple(getattr(rows.features["label"], "names", ())):
        raise DataError(
            f"{HUB} ({name}): expected the classes {', '.join(task.names) or 'scores'}; use the files"
        )
    columns = task.hub_columns or task.columns
    return Examples([list(rows[column]) for column in columns], list(rows["label"]))


def encode(examples: Examples, tokenizer, max_length: int, classes: bool) -> list[dict[str, Any]]:
    """Token ids and label of each example, with special tokens.

    Truncation to `max_length` removes tokens from the longer sentence of a pair first. Raises DataError if `max_length`
    leaves no tokens for text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=len(examples.texts) > 1)
    if max_length <= special or tokenizer.pad_token_id is None:
        raise DataError(
            f"task.max_length={max_length}: expected more than the {special} special tokens, and a "
            "tokenizer with a padding token"
        )
    kind = np.int64 if classes else np.float32
    labels = np.array(examples.labels, kind)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(examples), GROUP):
        group = [column[start : start + GROUP] for column in examples.texts]
        encoded = tokenizer(
            *group, truncation=True, max_length=max_length, return_attention_mask=False
        )
        for values in zip(*encoded.values()):
            row = {name: np.array(ids, np.int32) for name, ids in zip(encoded, values)}
            row["labels"] = labels[len(rows)]
            rows.append(row)
    return rows


def collate(batch: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Batch of examples, padded on the right to the longest.

    Returns labels (B,), and int64 tensors (B, L): input_ids, attention_mask (1 = token) and, if present,
    token_type_ids.
    """
    lengths = torch.tensor([len(example["input_ids"]) for example in batch])
    result = {
        "labels": torch.from_numpy(np.array([example["labels"] for example in batch])),
        "attention_mask": length_mask(lengths, int(lengths.max())).long(),
    }
    for name in batch[0]:
        if name != "labels":
            padding = pad_id if name == "input_ids" else 0
            result[name] = pad_rows([example[name] for example in batch], padding)
    return result
