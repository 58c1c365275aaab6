"""Fine-tuning on a GLUE task: Table 2 of Chefs' Random Tables (CRT).

A pretrained encoder gets the attention of the run and a new head. The metrics are the paper's, on the dev split,
because test labels are not published. MNLI is also evaluated on its second dev split, as `<metric>_mismatched`. With
task.held_out, held-out training examples are the validation split, and dev is read once, at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import check_classes, glue
from crt_exp.experiments.data.plan import by_length
from crt_exp.experiments.data.sources import task_folder
from crt_exp.experiments.data.text import check_vocabulary
from crt_exp.experiments.models import encoders
from crt_exp.experiments.predictions import Prediction
from crt_exp.experiments.tasks.base import Batch, Plan, Reader, Task, glue_metrics, jackknife_values
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, FileName, Files, checked


@checked("task")
@dataclass(eq=False)
class GLUE(Task):
    """One GLUE task with one encoder; see `conf/task/glue.yaml` for the options.

    Raises:
        DataError: files are missing or malformed, the encoder is unavailable, or the tokenizer does not fit the
            encoder.
        ConfigError: options contradict each other.
    """

    dataset: Literal[*glue.TASKS]
    data_dir: str | None
    source: Literal["auto", "files", "hub"]
    model: FileName
    init: Annotated[str, Files(("scratch", "uptrain"))]
    max_length: Count
    examples: Count | None
    bucketed: bool
    parts: Count | None = None
    held_out: Count | None = None
    predictions: bool = True

    validation = "dev"
    test = None

    def __post_init__(self):
        self.glue_task = glue.TASKS[self.dataset]
        self.metric = self.glue_task.metrics[0]
        self.origin = encoders.origin_of(self.model, self.init)
        names = dict(enumerate(self.glue_task.names)) or {0: "score"}
        self.config = encoders.load_config(
            self.origin,
            num_labels=self.glue_task.outputs,
            id2label=names,
            label2id={name: i for i, name in names.items()},
        )
        encoders.check_length(self.config, self.max_length, "task.max_length")
        self.tokenizer = encoders.load_tokenizer(self.origin)
        check_vocabulary(self.tokenizer, self.config.vocab_size, self.config.pad_token_id)
        self.texts = {
            part: glue.load(self.dataset, part, self.data_dir, self.source)
            for part in self.glue_task.splits
        }
        self.published = len(self.texts["train"])
        self.texts["train"] = self.texts["train"].subsample(self.examples)
        if self.held_out:
            self.validation = "held_out"
            self.test = "dev"
            self.texts["train"], self.texts["held_out"] = self.texts["train"].hold_out(
                self.held_out
            )
        if self.glue_task.names:
            check_classes(
                self.texts["train"].labels, f"task.dataset={self.dataset}, training split"
            )
        if self.parts and not 2 <= self.parts <= self.length("dev"):
            raise ConfigError(
                f"task.parts={self.parts}: expected 2 to {self.length('dev')}, the dev examples, or null"
            )

    def inputs(self) -> list[Path | None]:
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
        return self.losses(self.outputs(model, batch), batch["labels"]).mean()

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, classes), or scores (B,), in float32."""
        logits = model(**self.model_inputs(batch)).logits.float()
        return logits if self.glue_task.names else logits.squeeze(-1)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Loss of each row (B,): cross entropy in nats, or squared error of the score."""
        if self.glue_task.names:
            return F.cross_entropy(outputs, labels, reduction="none")
        return F.mse_loss(outputs, labels, reduction="none")

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        self.predicted = []
        metrics = self.evaluate_part(model, split, reader)
        if self.glue_task.two_devs and split == "dev":
            mismatched = self.evaluate_part(model, "dev_mm", reader)
            metrics |= {f"{name}_mismatched": value for name, value in mismatched.items()}
        return metrics | {
            "train_examples": self.length("train"),
            "train_examples_available": self.published,
        }

    def evaluate_part(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Metrics over all examples of one split.

        With task.parts, the dev split also gets the jackknife values of the first metric.
        """
        rows = []
        for batch in reader.batches(split):
            outputs = self.outputs(model, batch)
            answers = outputs.argmax(-1) if self.glue_task.names else outputs
            losses = self.losses(outputs, batch["labels"]).double()
            rows += zip(
                batch["rows"].tolist(),
                answers.tolist(),
                batch["labels"].tolist(),
                losses.tolist(),
            )
        rows = reader.gather(rows)
        numbers, answers, labels, losses = zip(*rows)
        if not np.isfinite(answers).all():
            raise NotFinite(
                f"{self.dataset}: predicted scores are not finite; try a lower trainer.lr"
            )
        predicted = self.named_predictions(split, numbers, labels, answers)
        self.predicted = [*self.predicted, *predicted]
        metrics = glue_metrics(self.dataset, answers, labels)
        metrics["loss"] = sum(losses) / len(rows)
        is_whole = split == "dev" and len(rows) == self.length(split)
        if self.parts and is_whole:
            parts = jackknife_values(self.metric, answers, labels, self.parts)
            for i, value in enumerate(parts):
                metrics[f"{self.metric}_part{i}"] = value
        return metrics

    def named_predictions(
        self, split: str, numbers: Sequence[int], labels: Sequence[Any], answers: Sequence[Any]
    ) -> list[Prediction]:
        """Predictions with the names of the classes, in the order of the split."""
        names = self.glue_task.names
        rows = []
        for number, label, answer in sorted(zip(numbers, labels, answers)):
            row = {"split": split, "example": number, "label": label, "prediction": answer}
            if names:
                row |= {"label": names[label], "prediction": names[answer]}
            rows.append(row)
        return rows

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        encoders.save_model(model, tensors, self.tokenizer, directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        names = [key for key in last if key.removesuffix("_mismatched") in self.glue_task.metrics]
        values = ", ".join(f"{key} {last[key]:.4f}" for key in names)
        return f"{self.glue_task.folder}: {values} (trained on {self.length('train')} of {self.published} examples)"
