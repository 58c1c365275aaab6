"""Attention transfer: what each layer of a swapped model has to learn, learned from exact attention.

Language models and their text are those of task=mlm, image classifiers and their images those of task=imagenet;
swap/transfer.py teaches the layers. Legend as there.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders, vision
from crt_exp.options import checked
from crt_exp.swap.transfer import Transferring, calibrate
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.tasks.imagenet import ImageNet
from crt_exp.tasks.mlm import MLM, MaskedModel

SOURCE = "set task.init=<run of task={}> with exact attention, or task.model and task.init={}"


class Teaching(Task):
    """What transfer is whatever the model: the task that it stands before gives the model, the batches and the metrics
    of the swapped model and of the exact one. name: of the task as it is typed. later: what trains further."""

    name: str
    later: str

    metric, lower_is_better = "error", True

    def check_shards(self) -> None:
        raise ConfigError(f"task={self.name} trains a few parameters of each layer: it does not go with trainer=fsdp")

    def check_adapters(self) -> None:
        raise ConfigError(f"task={self.name} trains what the layers learn and nothing else: trainer.adapt comes after "
                          f"it, task={self.later} task.init=<this run>")

    def taught(self, model: nn.Module, mechanism: Mechanism, count: int) -> Transferring:
        """The swapped model, calibrated on as many batches of 8. Raises ConfigError for what has nothing to learn."""
        if mechanism.is_exact:
            raise ConfigError(f"attention=exact is what task={self.name} learns from: choose another, such as "
                              "attention=hedgehog")
        taught = Transferring(model)
        try:
            calibrate(taught, map(self.given, islice(self.batches("train", Plan(8)), max(count, 1))))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return taught

    def given(self, batch: Batch) -> Any:
        """What a model is called with."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        given = self.given(batch)
        errors, _ = model(**given) if isinstance(given, dict) else model(given)
        return errors.mean()

    def weight(self, batch: Batch) -> None:
        """Each layer's error is over its outputs, of which rows have as many."""

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """error: the mean over layers of |output - exact| / |exact|, error_worst the largest of a layer; then the
        metrics of the swapped model, of its own inputs, beside the loss of the exact one, exact_loss."""
        taught = Recorded(model)
        exact = super().evaluate(taught, split, reader)
        errors = [(error / whole) ** 0.5 for error, whole in zip(*(reader.sum(*side) for side in taught.totals))]
        model.taught = False
        try:
            swapped = super().evaluate(model.model, split, reader)
        finally:
            model.taught = True
        return {"error": sum(errors) / len(errors), "error_worst": max(errors), **swapped, "exact_loss": exact["loss"]}

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        super().export(model.model, {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
                       directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (f"transfer: error {last['error']:.4f} of exact attention, worst layer {last['error_worst']:.4f}; loss "
                f"{last['loss']:.4f} (exact {last['exact_loss']:.4f}; {last['split']}, step {last['step']})")


@checked("task")
@dataclass(eq=False)
class Transfer(Teaching, MLM):
    """See `conf/task/transfer.yaml` for the options. Raises ConfigError where there is no exact model to learn from."""

    name, later = "transfer", "mlm"

    def __post_init__(self):
        super().__post_init__()
        self.origin = self.origin._replace(weights=True, noise=False)
        own = getattr(self.config, "crt_exp", encoders.EXACT)
        if own != encoders.EXACT:
            changed = ", ".join(encoders.differing_keys(own, encoders.EXACT))
            raise ConfigError(f"{self.origin.option}={self.origin.name}: expected a model trained with exact "
                              f"attention, these keys differ: {changed}")

    def check_options(self) -> None:
        if self.init == "scratch" or (self.model is None and self.init == "uptrain"):
            raise ConfigError("task=transfer learns from exact attention; " + SOURCE.format("mlm", "uptrain"))
        super().check_options()

    def build(self, mechanism: Mechanism) -> nn.Module:
        model = encoders.load_model(self.kind, self.config, self.origin, mechanism)
        return self.taught(MaskedModel(model, self.call), mechanism, self.calibration)


@checked("task")
@dataclass(eq=False)
class TransferVision(Teaching, ImageNet):
    """See `conf/task/transfer_vision.yaml` for the options. Raises ConfigError where there is no exact classifier to
    learn from."""

    name, later = "transfer_vision", "imagenet"

    def __post_init__(self):
        if self.init == "scratch":
            raise ConfigError("task=transfer_vision learns from exact attention; "
                              + SOURCE.format("imagenet", "pretrained"))
        if self.new_head:
            raise ConfigError("task.new_head=true: expected false with task=transfer_vision, which trains layers")
        super().__post_init__()
        checkpoint = vision.checkpoint_of(self.init)
        if checkpoint is not None and checkpoint.attention:
            changed = ", ".join(encoders.differing_keys(checkpoint.attention["described"], encoders.EXACT))
            raise ConfigError(f"{checkpoint.named}: expected a model trained with exact attention, these keys differ: "
                              f"{changed}")

    def build(self, mechanism: Mechanism) -> nn.Module:
        return self.taught(super().build(mechanism), mechanism, 1)

    def given(self, batch: Batch) -> Tensor:
        return batch["images"]


class Recorded:
    """A taught model that gives what the exact one does, and adds up the squares of its layers."""

    def __init__(self, model: Transferring):
        self.model, self.totals = model, ([], [])

    @torch.no_grad()
    def __call__(self, *args: Tensor, **batch: Tensor):
        _, out = self.model(*args, **batch)
        taught = [self.model.squares[number] for number in sorted(self.model.squares)]
        self.totals = tuple([float(part) + before for part, before in zip(side, self.totals[i] or [0.0] * len(side))]
                            for i, side in enumerate(zip(*taught)))
        return out
