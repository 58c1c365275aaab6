"""The GLUE tasks: the official TSV files or the copy on the Hugging Face hub, and their sentences as token ids.

`load("rte", "dev")` reads $CRT_DATA/glue/RTE/dev.tsv. The files are read without quoting: a field may hold an unpaired
double quote. Columns are read by their names, which differ between parts of a task; CoLA's train and dev have none.
Legend: n examples of a split, B of a batch, L tokens of the longest example of a batch.
"""

import difflib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from crt_exp.data import DataError
from crt_exp.data.cache import cached, key_of
from crt_exp.data.hub import from_hub, how_to_fetch, is_on_hub
from crt_exp.data.sources import SOURCES, Source, missing, task_folder
from crt_exp.data.text import fingerprint, numbered_lines

if TYPE_CHECKING:
    from crt_exp.data.plan import Plan

HUB = "nyu-mll/glue"
GROUP = 10_000                                               # examples that are tokenized at once


# ------------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class GlueTask:
    """One GLUE task: its files, columns, classes and metrics.

    spelled: how the files write the classes, in the order of `names`; both empty: a score on the scale of `score`.
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
    score: tuple[float, float] = (0.0, 5.0)
    two_devs: bool = False                                   # matched and mismatched
    broken: float = 0.0                                      # share of broken rows that the published files have

    @property
    def source(self) -> Source:
        return SOURCES[f"glue/{self.folder}"]

    @property
    def outputs(self) -> int:
        """Width of the model's head: classes, or 1 for a score."""
        return len(self.names) or 1

    @property
    def splits(self) -> dict[str, str]:
        """Split -> name of its file, without suffix."""
        if self.two_devs:
            return {"train": "train", "dev": "dev_matched", "dev_mm": "dev_mismatched", "test": "test_matched",
                    "test_mm": "test_mismatched"}
        return {"train": "train", "dev": "dev", "test": "test"}


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


def task_of(name: str) -> GlueTask:
    """The task called `name`, in any spelling such as SST-2 or sst2. Raises DataError."""
    plain = str(name).lower().replace("-", "").replace("_", "")
    if plain not in TASKS:
        near = difflib.get_close_matches(plain, TASKS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DataError(f"There is no GLUE task {name!r}.{hint} Known: {', '.join(TASKS)}.")
    return TASKS[plain]


@dataclass(frozen=True, eq=False)
class Examples:
    """n examples of a task, in the order of the file."""

    sentence1: list[str]                                     # (n,)
    sentence2: list[str] | None                              # None: the task has single sentences
    labels: list[int] | list[float] | None                   # classes, or scores; None: not published (test)
    names: tuple[str, ...]                                   # of the classes; empty: scores
    source: str                                              # for captions: where from, and which part of it
    lacks: str = ""                                          # for captions: what the file lacks of the published one

    def __len__(self) -> int:
        return len(self.sentence1)

    @property
    def described(self) -> str:
        """For captions: how many there are, of how many published."""
        return self.lacks if "published" in self.lacks else f", {len(self)} examples{self.lacks}"

    def subsample(self, n: int | None, seed: int = 0) -> "Examples":
        """n examples drawn without replacement, in the order of the file; all, where there are no more or n is None.

        The draw depends on (seed, number of examples) alone, in every version of Python, and a smaller subsample is
        part of a larger one. `source` says what was drawn. Raises DataError for n < 1.
        """
        if n is not None and n < 1:
            raise DataError(f"A subsample of {n} examples is none; take 1 or more, or leave it out for all "
                            f"{len(self)}.")
        if n is None or n >= len(self):
            return self
        return self.rows(self.order(seed)[:n], f"{n} of {len(self)} examples drawn with seed {seed}")

    def apart(self, n: int, seed: int = 0) -> tuple["Examples", "Examples"]:
        """The others and n that are held out, drawn as those of `subsample`. Raises DataError where none would be left
        or n < 1."""
        if not 1 <= n < len(self):
            raise DataError(f"{n} examples held out of {len(self)}: expected 1 to {len(self) - 1}.")
        order = self.order(seed)
        return (self.rows(order[n:], f"without {n} of {len(self)} examples, held out with seed {seed}"),
                self.rows(order[:n], f"{n} of {len(self)} examples held out with seed {seed}"))

    def order(self, seed: int) -> list[int]:
        """Their numbers as they are drawn."""
        draw = random.Random(seed).random
        order = [draw() for _ in range(len(self))]
        return sorted(range(len(self)), key=order.__getitem__)

    def rows(self, chosen: Sequence[int], words: str) -> "Examples":
        """Examples of these numbers, in the order of the file; words: for `source`."""
        first, second, labels = (None if values is None else [values[i] for i in sorted(chosen)]
                                 for values in (self.sentence1, self.sentence2, self.labels))
        return replace(self, sentence1=first, sentence2=second, labels=labels, source=f"{self.source}, {words}")


def load(name: str, split: str = "train", data_dir: str | Path | None = None, source: str = "auto",
         n: int | None = None, seed: int = 0) -> Examples:
    """Read one split (train, dev, test; MNLI also dev_mm, test_mm) of the GLUE task `name`.

    source: "files", the official TSVs in `data_dir` (the option task.data_dir, default $CRT_DATA/glue/<TASK>), "hub",
    the copy on the Hugging Face hub, or "auto", files where they are there. n, seed: see `Examples.subsample`. Raises
    DataError for unknown names, a file that is missing or empty, and a row of it that has too few columns or a label
    that the task does not have.
    """
    task = task_of(name)
    if split not in task.splits:
        raise DataError(f"GLUE's {task.folder} has no split {split!r}; it has {', '.join(task.splits)}.")
    on_hub = is_on_hub(source, task.source.name, task_folder(task.source.name), data_dir)
    return (read_hub(task, split) if on_hub else from_files(task, split, data_dir)).subsample(n, seed)


# ------------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class GlueReader:
    """One TSV file of a task, with what its error messages need."""

    task: GlueTask
    path: Path
    labelled: bool                                           # train or dev: a file without labels is an error

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        """Raise DataError: where, what, and how to get the file as published."""
        source = self.task.source
        raise DataError(f"{self.path}{'' if line is None else f', line {line}'}: {problem}.\n"
                        "To get the file as published: "
                        f"`python -m crt_exp.data fetch {source.name}`, or {source.page}.")

    def read(self) -> Examples:
        lines = ((number, line.split("\t")) for number, line in numbered_lines(self.path) if line)
        header = self.header(lines)
        names = [*self.task.columns, *[self.task.label] * (self.task.label in header)]
        rows, broken = self.rows(lines, header, [header.index(name) for name in names])
        texts = [[fields[place] for _, fields in rows] for place in range(len(self.task.columns))]
        labels = [self.label(fields[-1], line) for line, fields in rows] if self.task.label in header else None
        note = self.note(len(rows), broken)
        second = texts[1] if len(texts) > 1 else None
        return Examples(texts[0], second, labels, self.task.names, f"{self.path}{note}", note)

    def rows(self, lines: Iterator[tuple[int, list[str]]], header: Sequence[str],
             places: Sequence[int]) -> tuple[list[tuple[int, list[str]]], int]:
        """(line number, the fields at `places`) of each row, and how many broken rows were left out."""
        rows, broken = [], []
        for line, fields in lines:
            if len(fields) == len(header):
                rows.append((line, [fields[place] for place in places]))
            else:
                broken.append((line, len(fields)))
        if len(broken) > self.task.broken * len(rows):
            self.fail(f"{broken[0][1]} columns, {len(header)} expected ({', '.join(header)})", broken[0][0])
        if not rows:
            self.fail("the file is empty" if self.headless else "there is no example after the header line")
        return rows, len(broken)

    def note(self, rows: int, broken: int) -> str:
        """For captions: what this file lacks of the published one."""
        published = next(file.rows for file in self.task.source.files if Path(file.path).name == self.path.name)
        published -= not self.headless                       # the header line counts there
        part = f", {rows} of {published} published examples" if published > 0 and rows != published else ""
        return part + (f", without {broken} broken rows" if broken else "")

    @property
    def headless(self) -> bool:
        return bool(self.task.headless) and self.labelled

    def header(self, lines: Iterator[tuple[int, list[str]]]) -> list[str]:
        if self.headless:
            return list(self.task.headless)
        line, header = next(lines, (None, []))
        if line is None:
            self.fail("the file is empty")
        for column in (*self.task.columns, *[self.task.label] * self.labelled):
            if column not in header:
                self.fail(f"the header line has no column {column!r}; it has {', '.join(header)[:200]}", line)
        return header

    def label(self, text: str, line: int) -> int | float:
        """The class, or the score, that a label stands for."""
        if self.task.spelled:
            if text not in self.task.spelled:
                self.fail(f"label {text!r} is not one of {', '.join(self.task.spelled)}", line)
            return self.task.spelled.index(text)
        low, high = self.task.score
        score = number(text)
        if not low <= score <= high:
            self.fail(f"score {text!r} is not a number from {low:g} to {high:g}", line)
        return score


def number(text: str) -> float:
    """NaN where `text` is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def from_files(task: GlueTask, split: str, data_dir: str | Path | None) -> Examples:
    place = list(task.splits).index(split)
    folder = task_folder(task.source.name, data_dir)
    path = folder / f"{task.splits[split]}.tsv" if folder else None
    if path is None or not path.is_file():
        raise missing(task.source.name, path, place)
    return GlueReader(task, path, labelled=not split.startswith("test")).read()


# --------------------------------------------------------------------------------------------------------- hub
def read_hub(task: GlueTask, split: str) -> Examples:
    from datasets import load_dataset

    name = next(name for name, other in TASKS.items() if other is task)
    part = task.splits[split].replace("dev", "validation")
    rows = from_hub(lambda: load_dataset(HUB, name, split=part), f"{HUB} ({name}, {part})",
                    how_to_fetch(task.source.name))
    if task.names != tuple(getattr(rows.features["label"], "names", ())):
        raise DataError(f"{HUB} ({name}) has other classes than expected ({', '.join(task.names) or 'scores'}); "
                        "use the files.")
    texts = [list(rows[column]) for column in task.hub_columns or task.columns]
    labels = list(rows["label"])
    if all(label == -1 for label in labels):                 # how the hub marks a test set without labels
        labels = None
    return Examples(texts[0], texts[1] if len(texts) > 1 else None, labels, task.names, f"{HUB} ({name}, {part})")


# ---------------------------------------------------------------------------------------------------- encoding
@dataclass(frozen=True, eq=False)
class Encoded:
    """n examples as token ids, end to end: example i has tokens offsets[i] to offsets[i + 1]."""

    input_ids: np.ndarray                                    # (tokens,) int32
    offsets: np.ndarray                                      # (n + 1,) int64
    token_type_ids: np.ndarray | None                        # (tokens,) uint8; None: the tokenizer makes none
    labels: np.ndarray | None                                # (n,) int64 classes or float32 scores

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(n,) tokens of each example."""
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> dict[str, Any]:
        place = slice(self.offsets[i], self.offsets[i + 1])
        item = {"input_ids": self.input_ids[place]}
        if self.token_type_ids is not None:
            item["token_type_ids"] = self.token_type_ids[place]
        if self.labels is not None:
            item["labels"] = self.labels[i]
        return item


def encode(examples: Examples, tokenizer, max_length: int, cache_dir: str | Path | None = None) -> Encoded:
    """Token ids of all examples, with the tokenizer's special tokens; what exceeds `max_length` is cut off, from the
    longer sentence of a pair first. Kept in `cache_dir` by content. Raises DataError for a `max_length` without room.
    """
    special = tokenizer.num_special_tokens_to_add(pair=examples.sentence2 is not None)
    if max_length <= special:
        raise DataError(f"max_length={max_length} leaves no room for text besides {special} special tokens; "
                        "BERT takes up to 512.")
    texts = (examples.sentence1, *([examples.sentence2] if examples.sentence2 is not None else []))
    key = "" if cache_dir is None else key_of("glue 1", max_length, fingerprint(tokenizer),
                                              *(repr(part) for part in texts))
    arrays = cached(cache_dir, key, lambda: tokenized(texts, tokenizer, max_length))
    labels = None if examples.labels is None else np.array(examples.labels, np.int64 if examples.names else np.float32)
    return Encoded(arrays["input_ids"], arrays["offsets"], arrays.get("token_type_ids"), labels)


def tokenized(texts: Sequence[list[str]], tokenizer, max_length: int) -> dict[str, np.ndarray]:
    parts = []
    for start in range(0, len(texts[0]), GROUP):
        group = [part[start:start + GROUP] for part in texts]
        coded = tokenizer(*group, truncation=True, max_length=max_length, return_attention_mask=False)
        parts.append({name: flat(rows, name) for name, rows in coded.items() if name in ("input_ids", "token_type_ids")}
                     | {"lengths": np.array([len(row) for row in coded["input_ids"]], np.int64)})
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {"offsets": np.concatenate([[0], np.cumsum(joined.pop("lengths"))])}


def flat(rows: list[list[int]], name: str) -> np.ndarray:
    return np.fromiter((value for row in rows for value in row), np.int32 if name == "input_ids" else np.uint8)


# ----------------------------------------------------------------------------------------------------- batches
def collate(batch: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Items of `Encoded`, padded on the right to the longest: tensors (B, L) int64.

    Keys: input_ids, attention_mask (1 = token, 0 = padding), token_type_ids and labels (B,) where the items have them.
    Raises DataError where the tokenizer has no padding token (pad_id is None).
    """
    if pad_id is None:
        raise DataError("The tokenizer has no padding token, so examples of different lengths make no batch.\n"
                        "Set one: tokenizer.pad_token = tokenizer.eos_token.")
    lengths = np.array([len(item["input_ids"]) for item in batch])
    inside = np.arange(lengths.max()) < lengths[:, None]     # (B, L)
    out = {name: padded(batch, name, inside, fill) for name, fill in (("input_ids", pad_id), ("token_type_ids", 0))
           if name in batch[0]}
    out["attention_mask"] = torch.from_numpy(inside.astype(np.int64))
    if "labels" in batch[0]:
        out["labels"] = torch.from_numpy(np.array([item["labels"] for item in batch]))
    return out


def padded(batch: Sequence[dict[str, Any]], name: str, inside: np.ndarray, fill: int) -> Tensor:
    values = np.full(inside.shape, fill, np.int64)
    values[inside] = np.concatenate([item[name] for item in batch])
    return torch.from_numpy(values)


def by_length(lengths: np.ndarray, split: str, plan: "Plan", like_together: bool) -> Iterator[np.ndarray]:
    """Rows of each batch. Evaluation goes by length, for metrics do not depend on the order and batches then hold
    little padding; training does where rows of like length are to be together."""
    if split == "train":
        return bucketed(lengths, plan) if like_together else plan.rows(len(lengths), split)
    order = np.argsort(lengths, kind="stable")
    return (order[places] for places in plan.rows(len(lengths), split))


def bucketed(lengths: np.ndarray, plan: "Plan", pool: int = 50) -> Iterator[np.ndarray]:
    """Rows of each training micro-batch, as `plan.rows(n, "train")`, but with examples of like length together.

    Of `pool` batches at a time, so that batches still vary; it saves padding. The same rows as without, in other
    batches; as there, a pure function of the plan, and a process has its share of every batch.
    """
    n, share = len(lengths), plan.batch // plan.world
    steps = n // plan.batch
    whole = replace(plan, micro=1, start=0, rank=0, world=1)
    places = np.array([*whole.rows(n, "train")]).reshape(steps, plan.batch)
    for start in range(0, steps, pool):
        group = places[start:start + pool]
        group[:] = group.reshape(-1)[np.argsort(lengths[group.reshape(-1)], kind="stable")].reshape(group.shape)
    places = places[np.random.default_rng([plan.seed, plan.epoch, 0]).permutation(steps)]
    mine = places[plan.start:, plan.rank * share:(plan.rank + 1) * share]
    yield from mine.reshape(-1, share // plan.micro)
