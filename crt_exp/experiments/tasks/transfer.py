"""Attention transfer: train swapped layers to match exact attention.

In `TransferModel`, every swapped layer returns the output of exact attention. The next layer therefore receives the
input of the exact model. Each layer's error is measured against exact attention and does not depend on other layers. No
labels are needed.

`transfer_attention` trains any swapped model. task=transfer takes the language models and text of task=mlm.
Notation: B batch, H query heads, L queries, dv value dimension.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer, LinearAttention
from crt_exp.attention.baselines import exact_attention
from crt_exp.experiments.models import encoders
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, Tensors, task_class
from crt_exp.experiments.tasks.mlm import MLM, MaskedModel
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.swap.calibration import (
    call_arguments,
    call_model,
    fill_statistics,
    real_queries,
    swapped_states,
)

# ---- transfer for any swapped model


class TransferModel(nn.Module):
    """Swapped model that trains its attention layers against exact attention.

    A call returns the errors of the layers (layers,), |output - exact|^2 / |exact|^2, and the output of the exact
    model. The model stays in eval mode, without dropout. Only parameters of the swapped layers are trained. With
    `teaching` = False, `model` runs its swapped attention. Raises ValueError if no layer is swapped.
    """

    teaching = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        states = swapped_layers(model)
        model.requires_grad_(False)
        for parameter in layer_parameters(states):
            parameter.requires_grad_(True)
        self.squares: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, for layers in the last call
        self.hooks = [
            state.register_forward_hook(partial(self._teach, number), with_kwargs=True)
            for number, state in enumerate(states)
        ]

    def _teach(
        self, number: int, state: AttentionLayer, args: tuple, kwargs: dict, out: Tensor
    ) -> Tensor | None:
        """Replace the layer's output by exact attention and record both squared norms."""
        if not self.teaching:
            return None
        arguments = call_arguments(*args, **kwargs)
        q, k, v, key_mask = arguments
        root = state.scaling**0.5
        with torch.no_grad():
            exact = exact_attention(q * root, k * root, v, causal=state.causal, key_mask=key_mask)
        self.squares[number] = squares(state, arguments, out, exact)
        return exact

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        self.squares.clear()
        out = self.model(*args, **kwargs)
        errors = []
        for number in sorted(self.squares):
            error, exact = self.squares[number]
            errors.append(error / exact.clamp(min=1e-30))
        return torch.stack(errors), out

    def train(self, mode: bool = True) -> "TransferModel":
        super().train(mode)
        self.model.eval()
        for state in swapped_layers(self.model):
            state.train(mode)
        return self


@torch.no_grad()
def exact_calls(student: TransferModel, batch: Any) -> dict[int, tuple[tuple, Tensor]]:
    """Arguments and exact outputs (B, H, L, dv) of each layer, by layer number.

    A training step on recorded calls costs only the layers, not the whole model.
    """
    calls: dict[int, tuple[tuple, Tensor]] = {}

    def record(number: int, state: AttentionLayer, args: tuple, kwargs: dict, out: Tensor) -> None:
        calls[number] = (call_arguments(*args, **kwargs), out)

    with ExitStack() as stack:  # hooks after `_teach` receive exact outputs
        for number, state in enumerate(swapped_layers(student.model)):
            hook = state.register_forward_hook(partial(record, number), with_kwargs=True)
            stack.callback(hook.remove)
        call_model(student, batch)
    return calls


def transfer_attention(
    model: nn.Module, batches: Sequence, steps: int = 200, lr: float = 1e-2
) -> nn.Module:
    """Train swapped layers in place to match exact attention; return the model.

    `fill_statistics` first takes statistics of the exact model's queries and keys from all batches. One pass records
    the inputs and exact outputs of each layer. Adam then trains the layers on the recorded batches in turn; the
    learning rate decays linearly to 0. All other parameters stay as they are.

    Args:
        model: a model with swapped attention.
        batches: as for `calibrate_attention`.
        steps: optimiser steps, each on one batch.
        lr: initial learning rate.

    Raises:
        ValueError: there are no batches, no layer is swapped, or no layer has anything to learn.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("batches: empty; expected at least one")
    training = model.training
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    student = TransferModel(model)
    calibrate(student, batches)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    if parameters:
        calls = [exact_calls(student.eval(), batch) for batch in batches]
        release(student)
        student.train()
        states = swapped_layers(model)
        optimizer = torch.optim.Adam(parameters, lr)
        for step in range(steps):
            optimizer.zero_grad()
            layers = calls[step % len(calls)]
            for number, (arguments, exact) in layers.items():  # one layer at a time saves memory
                out = states[number](*arguments)
                error, square = squares(states[number], arguments, out, exact)
                (error / square.clamp(min=1e-30) / len(layers)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr * (1 - (step + 1) / steps)
    return release(student, trainable).train(training)


def calibrate(student: TransferModel, batches: Iterable) -> None:
    """Fit statistics of the layers to inputs of the exact model.

    Raises ValueError if the layers have neither statistics nor parameters to learn.
    """
    batches = list(batches)
    states = swapped_layers(student.model)
    has_statistics = any(isinstance(state, LinearAttention) and state.learns for state in states)
    if not (has_statistics or layer_parameters(states)):
        raise ValueError(
            f"attention={states[0].mechanism}: has nothing to train; use hedgehog, or random features "
            "with attention.learn=parameters or projections"
        )
    if has_statistics:
        fill_statistics(student.model, batches)


def release(student: TransferModel, wanted: Iterable[nn.Parameter] = ()) -> nn.Module:
    """Remove the hooks and return the model; `wanted` parameters require gradients."""
    for hook in student.hooks:
        hook.remove()
    for parameter in wanted:
        parameter.requires_grad_(True)
    return student.model


def swapped_layers(model: nn.Module) -> list[AttentionLayer]:
    """Swapped layers in module order; raises ValueError if there are none."""
    states = swapped_states(model)
    if not states:
        raise ValueError(f"{type(model).__name__}: no swapped attention; call swap_attention first")
    return states


def layer_parameters(states: Iterable[nn.Module]) -> list[nn.Parameter]:
    parameters = []
    for state in states:
        parameters += state.parameters()
    return parameters


def squares(
    state: AttentionLayer, arguments: tuple, out: Tensor, exact: Tensor
) -> tuple[Tensor, Tensor]:
    """|output - exact|^2 and |exact|^2, summed over all queries but padding."""
    q, k, _, key_mask = arguments
    real = real_queries(state, q, k, key_mask)[:, None, :, None].to(exact.dtype)
    error = (out - exact).float().square().mul(real).sum()
    return error, exact.float().square().mul(real).sum()


# ---- the task


@task_class
class Transfer(MLM):
    """Transfer for language models; see `conf/task/transfer.yaml` for the options.

    Raises ConfigError if there is no exact model to learn from.
    """

    metric = "error"
    lower_is_better = True
    reported = ("error_worst", "loss", "exact_loss")

    def __post_init__(self):
        super().__post_init__()
        self.origin = self.origin._replace(weights=True, noise=False)
        encoders.check_exact(
            f"{self.origin.option}={self.origin.name}",
            getattr(self.config, "crt_exp", encoders.EXACT),
        )

    def check_options(self) -> None:
        if self.init == "scratch" or (self.model is None and self.init == "uptrain"):
            raise ConfigError(
                f"task.init={self.init}: expected a model trained with exact attention; set "
                "task.init=<run of task=mlm>, or task.model and task.init=uptrain"
            )
        super().check_options()

    def check_shards(self) -> None:
        raise ConfigError("task=transfer: not supported with trainer=fsdp; remove trainer=fsdp")

    def check_adapters(self) -> None:
        raise ConfigError(
            "task=transfer: not supported with trainer.adapt; use it afterwards, with task=mlm "
            "task.init=<this run>"
        )

    def build(self, mechanism: Mechanism) -> nn.Module:
        """Swapped model, calibrated on task.calibration batches of 8 rows.

        Raises ConfigError if the attention has nothing to learn.
        """
        if mechanism.is_exact:
            raise ConfigError("attention=exact: expected an approximate method, such as hedgehog")
        model = encoders.load_model(self.kind, self.config, self.origin, mechanism)
        student = TransferModel(MaskedModel(model, self.call))
        batches = islice(self.batches("train", Plan(8)), max(self.calibration, 1))
        try:
            calibrate(student, batches)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return student

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        errors, _ = model(**batch)
        return errors.mean()

    def weight(self, batch: Batch) -> None:
        """None: every row has the same number of layer outputs."""

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Layer errors, metrics of the swapped model, and loss of the exact model.

        `error` is the mean over layers of |output - exact| / |exact|, `error_worst` the largest layer error. Then come
        the metrics of the swapped model on its own layer inputs. `exact_loss` is the loss of the exact model.
        """
        totals: Counter[tuple[int, int]] = Counter()  # the squares of each layer, in turn

        def exact_model(**batch: Tensor) -> Any:
            _, out = model(**batch)
            for number, squares in sorted(model.squares.items()):
                for i, square in enumerate(squares):
                    totals[number, i] += float(square)
            return out

        exact = super().evaluate(exact_model, split, reader)
        sums = reader.sum(*totals.values())
        errors = [(error / whole) ** 0.5 for error, whole in zip(sums[::2], sums[1::2])]
        model.teaching = False
        try:
            swapped = super().evaluate(model.model, split, reader)
        finally:
            model.teaching = True
        return {
            "error": sum(errors) / len(errors),
            "error_worst": max(errors),
            **swapped,
            "exact_loss": exact["loss"],
        }

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        super().export(model.model, renamed, directory)
