"""Attention transfer on text: what each layer of a swapped language model has to learn, learned from exact attention.

The model and its text are those of task=mlm; swap/transfer.py teaches the layers. Legend as there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders
from crt_exp.schema import Count, checked
from crt_exp.swap.transfer import Transferring, calibrate, swapped_layers
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.mlm import MLM, MaskedModel

SOURCE = ("task=transfer learns from a model with exact attention: name it, task.init=<run of task=mlm> or "
          "task.model=<folder or name of the hub>")


@checked("task")
@dataclass(eq=False)
class Transfer(MLM):
    """See `conf/task/transfer.yaml` for the options. Raises ConfigError where there is no exact model to learn from."""

    budget: Count | None = None

    metric, lower_is_better = "error", True

    def __post_init__(self):
        super().__post_init__()
        self.origin = self.origin._replace(weights=True, noise=False)
        own = getattr(self.config, "crt_exp", encoders.EXACT)
        if own != encoders.EXACT:
            changed = ", ".join(encoders.differing_keys(own, encoders.EXACT))
            raise ConfigError(f"{self.origin.option} = {self.origin.name} was not trained with exact attention; these "
                              f"keys differ: {changed}. {SOURCE}")

    def check_options(self) -> None:
        if self.init == "scratch" or (self.model is None and self.init == "uptrain"):
            raise ConfigError(SOURCE)
        super().check_options()

    def check_shards(self) -> None:
        raise ConfigError("task=transfer trains a few parameters of each layer: it does not go with trainer=fsdp")

    def check_adapters(self) -> None:
        raise ConfigError("task=transfer trains what the layers learn and nothing else: trainer.adapt comes after it, "
                          "task=mlm task.init=<this run>")

    # ---- model

    def build(self, mechanism: Mechanism) -> nn.Module:
        if mechanism.name == "exact":
            raise ConfigError("attention=exact is what task=transfer learns from: choose another, such as "
                              "attention=hedgehog")
        model = encoders.load_model(self.objective.kind, self.config, self.origin, mechanism)
        taught = Transferring(MaskedModel(model, self.objective.call))
        try:
            calibrate(taught, islice(self.batches("train", Plan(8)), max(self.calibration, 1)), self.budget)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.budget is not None:
            opens = [state.sizes.open for state in swapped_layers(model)]
            model.config.crt_exp = replace(mechanism, options=mechanism.options | {"open": opens}).describe()
        return taught

    # ---- learning

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        errors, _ = model(**batch)
        return errors.mean()

    def weight(self, batch: Batch) -> None:
        """Each layer's error is over its outputs, of which rows have as many."""

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """error: the mean over layers of |output - exact| / |exact|, error_worst the largest of a layer; then the loss
        of the swapped model, of its own inputs, beside that of the exact one, exact_loss."""
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


class Recorded:
    """A taught model that gives what the exact one does, and adds up the squares of its layers."""

    def __init__(self, model: Transferring):
        self.model, self.totals = model, ([], [])

    @torch.no_grad()
    def __call__(self, **batch: Tensor):
        _, out = self.model(**batch)
        found = [t.squares for t in self.model.teachers if t.squares is not None]
        self.totals = tuple([float(part) + before for part, before in zip(side, self._before(i, side))]
                            for i, side in enumerate(zip(*found)))
        return out

    def _before(self, i: int, side: tuple[Tensor, ...]) -> Iterator[float]:
        return self.totals[i] or [0.0] * len(side)
