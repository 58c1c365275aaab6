"""Fine-tuning on a GLUE task, Table 2 of Chefs' Random Tables (CRT), or on labelled text of your own.

A pretrained encoder gets the attention of the run and a new head. The metrics are the paper's, on the dev split,
because test labels are not published. MNLI is also evaluated on its second dev split, as `<metric>_mismatched`. With
task.held_out, held-out training examples are the validation split, and dev is read once, at the end. Text of your own
(task.csv, task.hub.name) has a validation and a test split.
"""

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import DataError, check_classes, glue, labelled_text
from crt_exp.experiments.data.plan import by_length
from crt_exp.experiments.data.sources import Place, refuse_data_dir, task_folder
from crt_exp.experiments.data.tabular import Kind
from crt_exp.experiments.models import encoders
from crt_exp.experiments.predictions import Prediction
from crt_exp.experiments.tasks.base import (
    METRICS,
    Batch,
    Metrics,
    Plan,
    Reader,
    Task,
    Tensors,
    jackknife_values,
    task_class,
)
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, FileName, Files, Positive, Several

# options of labelled text of your own, in addition to task.csv and task.hub
OWN = ("validation_csv", "test_csv", "columns", "target", "kind", "split")


@task_class
class GLUE(Task):
    """One GLUE task, or text of your own, with one encoder; see `conf/task/glue.yaml` for the options.

    Raises:
        DataError: files are missing or malformed, the encoder is unavailable, or the tokenizer does not fit the
            encoder.
        ConfigError: options contradict each other.
    """

    dataset: Literal[*glue.TASKS]
    data_dir: str | None
    source: Place
    model: FileName
    init: Annotated[str, Files(("scratch", "uptrain"))]
    max_length: Count
    examples: Count | None
    bucketed: bool
    parts: Count | None = None
    held_out: Count | None = None
    csv: FileName | None = None
    validation_csv: FileName | None = None
    test_csv: FileName | None = None
    hub: labelled_text.LabelledHub = field(default_factory=lambda: {"name": None})
    columns: Annotated[Several[str], Field(max_length=2)] | None = None
    target: str | None = None
    kind: Kind | None = None
    split: tuple[Positive, Positive, Positive] | None = None

    predictions = True
    validation = "dev"
    test = None

    def __post_init__(self):
        if self.csv is not None or self.hub["name"] is not None:
            self.glue_task, self.texts = self.own_texts()
            self.validation = "validation"
            self.test = "test"
        else:
            self.glue_task = glue.TASKS[self.dataset]
            for name in OWN:
                if getattr(self, name) is not None:
                    raise ConfigError(f"task.{name}: only for task.csv=FILE or task.hub.name=NAME")
            self.texts = {}
            for part in self.glue_task.splits:
                self.texts[part] = glue.load(self.dataset, part, self.data_dir, self.source)
        self.metric = self.glue_task.metrics[0]
        self.origin = encoders.origin_of(self.model, self.init)
        names = dict(enumerate(self.glue_task.names)) or {0: "score"}
        self.config = encoders.load_config(
            self.origin,
            num_labels=len(names),
            id2label=names,
            label2id={name: i for i, name in names.items()},
        )
        self.config.text_columns = list(self.glue_task.columns)
        encoders.check_length(self.config, self.max_length, "task.max_length")
        self.tokenizer = encoders.load_tokenizer(self.origin)
        encoders.check_vocabulary(self.tokenizer, self.config.vocab_size, self.config.pad_token_id)
        self.published = self.length("train")
        if self.examples:
            _, self.texts["train"] = self.texts["train"].sample(self.examples)
        if self.held_out:
            if self.held_out >= self.length("train"):
                raise DataError(
                    f"task.held_out={self.held_out}: expected 1 to {self.length('train') - 1}, of "
                    f"{self.length('train')} examples"
                )
            self.validation = "held_out"
            self.test = "dev"
            rest, held_out = self.texts["train"].sample(self.held_out)
            self.texts |= {"train": rest, "held_out": held_out}
        if self.glue_task.names:
            check_classes(self.texts["train"].labels, f"{self.glue_task.folder}, training split")
        self.final = self.test or self.validation
        if self.parts and not 2 <= self.parts <= self.length(self.final):
            raise ConfigError(
                f"task.parts={self.parts}: expected 2 to {self.length(self.final)}, the {self.final} "
                "examples, or null"
            )

    def own_texts(self) -> tuple[glue.GlueTask, dict[str, glue.Examples]]:
        """Task and examples of task.csv or task.hub. Raises ConfigError or DataError."""
        key = "task.hub.name" if self.csv is None else "task.csv"
        refuse_data_dir(self.data_dir, key)
        if self.csv is not None and self.hub["name"] is not None:
            raise ConfigError("task.csv, task.hub.name: expected only one of them")
        if self.held_out:
            raise ConfigError(f"task.held_out={self.held_out}: not used by {key}; set task.split")
        shares = self.split or labelled_text.SHARES
        if abs(sum(shares) - 1) > 1e-9:
            raise ConfigError(f"task.split={list(shares)}: expected three fractions with sum 1")
        target = self.target or "label"
        if self.csv is None:
            tables = labelled_text.read_hub(self.hub, target)
        else:
            files = ("csv", "validation_csv", "test_csv")
            tables = labelled_text.read_files(
                {f"task.{name}": getattr(self, name) for name in files}
            )
        return labelled_text.read_labelled(tables, self.columns, target, self.kind, shares)

    def inputs(self) -> list[Path | None]:
        if self.final == "test":
            return []  # options with the annotation FileName name the files
        folder = task_folder(self.glue_task.source, self.data_dir)
        return [folder] if self.source != "hub" and folder and folder.is_dir() else []

    @cached_property
    def encoded(self) -> dict[str, list[dict[str, Any]]]:
        return {
            part: glue.encode(texts, self.tokenizer, self.max_length, bool(self.glue_task.names))
            for part, texts in self.texts.items()
        }

    def length(self, split: str) -> int:
        return len(self.texts[split])

    def build(self, mechanism: Mechanism) -> nn.Module:
        return encoders.load_model(
            "AutoModelForSequenceClassification", self.config, self.origin, mechanism
        )

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.encoded[split]
        lengths = np.array([len(row["input_ids"]) for row in data])
        for rows in by_length(lengths, split, plan, self.bucketed):
            batch = glue.collate([data[i] for i in rows], self.tokenizer.pad_token_id)
            yield batch | {"rows": torch.from_numpy(rows)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        _, losses = self.outputs(model, batch)
        return losses.mean()

    def outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Classes or scores (B,), and losses (B,) in float32.

        The loss is the cross entropy in nats, or the squared error of the score.
        """
        logits = model(**self.model_inputs(batch)).logits.float()
        labels = batch["labels"]
        if self.glue_task.names:
            return logits.argmax(-1), F.cross_entropy(logits, labels, reduction="none")
        scores = logits.squeeze(-1)
        return scores, F.mse_loss(scores, labels, reduction="none")

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        self.predicted: list[Prediction] = []
        metrics = self.evaluate_part(model, split, reader)
        if split == "dev" and "dev_mm" in self.glue_task.splits:
            mismatched = self.evaluate_part(model, "dev_mm", reader)
            metrics |= {f"{name}_mismatched": value for name, value in mismatched.items()}
        return metrics | {
            "train_examples": self.length("train"),
            "train_examples_available": self.published,
        }

    def evaluate_part(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Metrics over all examples of one split; adds predictions, in the order of the split.

        With task.parts, the last split also gets the jackknife values of the first metric.
        """
        rows = []
        for batch in reader.batches(split):
            answers, losses = self.outputs(model, batch)
            columns = (batch["rows"], answers, batch["labels"], losses.double())
            rows += zip(*[column.tolist() for column in columns])
        rows = reader.gather(rows)
        numbers, answers, labels, losses = zip(*rows)
        if not np.isfinite(answers).all():
            raise NotFinite(
                f"{self.glue_task.folder}: predicted scores are not finite; try a lower trainer.lr"
            )
        names = self.glue_task.names
        for number, label, answer in sorted(zip(numbers, labels, answers)):
            row = {"split": split, "example": number, "label": label, "prediction": answer}
            if names:
                row |= {"label": names[label], "prediction": names[answer]}
            self.predicted.append(row)
        metrics = {name: METRICS[name](answers, labels) for name in self.glue_task.metrics}
        metrics["loss"] = sum(losses) / len(rows)
        is_whole = split == self.final and len(rows) == self.length(split)
        if self.parts and is_whole:
            parts = jackknife_values(self.metric, answers, labels, self.parts)
            for i, value in enumerate(parts):
                metrics[f"{self.metric}_part{i}"] = value
        return metrics

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        encoders.save_model(model, tensors, self.tokenizer, directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        names = [key for key in last if key.removesuffix("_mismatched") in self.glue_task.metrics]
        values = ", ".join(f"{key} {last[key]:.4f}" for key in names)
        split = last["split"]
        return (
            f"{self.glue_task.folder}: {values} (trained on {self.length('train')} of {self.published} examples; "
            f"{split}: {self.length(split)} examples)"
        )
