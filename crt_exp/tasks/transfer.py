"""Attention transfer: swapped layers learn the output of exact attention.

While a model is `Transferring` every swapped layer passes on what exact attention gives, so that the next layer's input
is the exact model's, and keeps how far its own output is from that. No layer's error depends on another layer, and no
labels are needed. `transfer_attention` trains any swapped model. task=transfer takes language models and text as
task=mlm, task=transfer_vision image classifiers and images as task=imagenet.
Notation: B batch, H query heads, L queries, S keys, dv.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer, LinearAttention
from crt_exp.attention.baselines import exact_attention
from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders, vision
from crt_exp.options import checked
from crt_exp.swap.calibration import call, call_arguments, fill_statistics, real_queries, swapped_states
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.tasks.imagenet import ImageNet
from crt_exp.tasks.mlm import MLM, MaskedModel

SOURCE = "set task.init=<run of task={}> with exact attention, or task.model and task.init={}"


# ---- transfer for any swapped model

class Transferring(nn.Module):
    """A swapped model whose layers are taught. A call gives their errors (layers,), |output - exact|^2 / |exact|^2, and
    what the model with exact attention returns.

    The model itself is in eval mode, without dropout, and of its parameters only those of the swapped layers are
    trained. `taught` = False gives the swapped model. Raises ValueError where nothing is swapped.
    """

    taught = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        states = swapped_layers(model)
        model.requires_grad_(False)
        for parameter in learned(states):
            parameter.requires_grad_(True)
        self.squares: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer that the last call reached
        self.hooks = [state.register_forward_hook(partial(self._teach, number), with_kwargs=True)
                      for number, state in enumerate(states)]

    def _teach(self, number: int, state: AttentionLayer, args: tuple, kwargs: dict, out: Tensor) -> Tensor | None:
        """Exact attention in place of the layer's output, whose squares are kept."""
        if not self.taught:
            return None
        q, k, v, key_mask = given = call_arguments(*args, **kwargs)
        root = state.scaling**0.5
        with torch.no_grad():
            exact = exact_attention(q * root, k * root, v, causal=state.causal, key_mask=key_mask)
        self.squares[number] = squares(state, given, out, exact)
        return exact

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        self.squares.clear()
        out = self.model(*args, **kwargs)
        if not self.squares:
            raise ValueError("this call reached no swapped layer: there is nothing to transfer to")
        errors = [error / exact.clamp(min=1e-30) for _, (error, exact) in sorted(self.squares.items())]
        return torch.stack(errors), out

    def train(self, mode: bool = True) -> "Transferring":
        super().train(mode)
        self.model.eval()
        for state in swapped_layers(self.model):
            state.train(mode)
        return self


@torch.no_grad()
def exact_calls(taught: Transferring, batch: Any) -> dict[int, tuple[tuple, Tensor]]:
    """Number of the layer -> its arguments in the exact model and what exact attention gives, (B, H, L, dv).

    A step on these costs the layers and not the model.
    """
    calls: dict[int, tuple[tuple, Tensor]] = {}

    def keep(number: int):
        return lambda state, args, kwargs, out: calls.update({number: (call_arguments(*args, **kwargs), out)})

    with ExitStack() as stack:   # after `_teach`, which puts exact attention in the place of outputs
        for number, state in enumerate(swapped_layers(taught.model)):
            stack.callback(state.register_forward_hook(keep(number), with_kwargs=True).remove)
        call(taught, batch)
    return calls


def transfer_attention(model: nn.Module, batches: Sequence, steps: int = 200, lr: float = 1e-2) -> nn.Module:
    """Teach the swapped layers of a model what exact attention gives, in place, and return the model.

    Statistics are taken from the exact model's queries and keys of all batches (`fill_statistics`). The model then
    reads each batch once, and Adam trains the parameters of the layers on the calls of the batches in turn, all others
    staying as they are. Batches are as `calibrate_attention` takes them. Raises ValueError for no batches, and where no
    layer has anything to learn.
    """
    batches, training, wanted = list(batches), model.training, [p for p in model.parameters() if p.requires_grad]
    if not batches:
        raise ValueError("no batches to transfer with")
    taught = Transferring(model)
    calibrate(taught, batches)
    if parameters := [p for p in taught.parameters() if p.requires_grad]:
        optimizer, states = torch.optim.Adam(parameters, lr), swapped_layers(model)
        calls = [exact_calls(taught.eval(), batch) for batch in batches]
        release(taught)
        taught.train()
        for step in range(steps):
            optimizer.zero_grad()
            now = calls[step % len(calls)]
            for number, (given, exact) in now.items():  # one layer at a time, for its memory
                error, square = squares(states[number], given, states[number](*given), exact)
                (error / square.clamp(min=1e-30) / len(now)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr * (1 - (step + 1) / steps)
    return release(taught, wanted).train(training)


def calibrate(taught: Transferring, batches: Iterable) -> None:
    """Fills what the layers keep of earlier inputs, from the exact model's. Raises ValueError where they have nothing
    to learn, neither so nor by gradients."""
    states, batches = swapped_layers(taught.model), list(batches)
    kept = any(isinstance(state, LinearAttention) and state.learns for state in states)
    if not (kept or learned(states)):
        raise ValueError(f"attention={states[0].mechanism} has nothing to learn from the exact layer: take hedgehog, "
                         "or random features with attention.learn=parameters or projections")
    if kept:
        fill_statistics(taught.model, batches)


def release(taught: Transferring, wanted: Iterable[nn.Parameter] = ()) -> nn.Module:
    """The model, taught no longer; `wanted` parameters take gradients again."""
    for hook in taught.hooks:
        hook.remove()
    for parameter in wanted:
        parameter.requires_grad_(True)
    return taught.model


def swapped_layers(model: nn.Module) -> list[AttentionLayer]:
    """In the order of the model's modules. Raises ValueError where there are none."""
    states = swapped_states(model)
    if not states:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped: call swap_attention first")
    return states


def learned(states: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for state in states for parameter in state.parameters()]


def squares(state: AttentionLayer, given: tuple, out: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """|output - exact|^2 and |exact|^2 over heads, columns and the queries that are not padding."""
    q, k, _, key_mask = given
    real = real_queries(state, q, k, key_mask)[:, None, :, None].to(exact.dtype)
    return (out - exact).float().square().mul(real).sum(), exact.float().square().mul(real).sum()


# ---- tasks

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
