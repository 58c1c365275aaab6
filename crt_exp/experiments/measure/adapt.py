"""Loss of a pretrained language model after a swap, after attention transfer, and after low-rank adapters.

The order is that of LoLCATs: swap, attention transfer, then adapters.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.experiments.data.text import generator_of
from crt_exp.experiments.measure import Records, SwapMeasurement, pretrained
from crt_exp.experiments.measure.bench import swap_and_fit
from crt_exp.experiments.measure.times import PROCESSOR, milliseconds
from crt_exp.experiments.runner.trainer_config import Adapters, Lora
from crt_exp.experiments.tasks.base import task_class
from crt_exp.experiments.tasks.transfer import layer_parameters, transfer_attention
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import learns, swapped_states
from crt_exp.validation import Count, FileName, Positive, Several, Whole

MINUTE = 60_000  # milliseconds
TRANSFER_LR = 1e-2  # learning rate of attention transfer


def descent(
    model: nn.Module, loss: Callable[[int], Tensor], steps: int, lr: float
) -> Iterator[int]:
    """Train by AdamW on loss(0), loss(1), ...; yield the number of steps done.

    Only parameters that require gradients are trained. The learning rate has a warm-up of 5% and decays linearly to 0.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr, (0.9, 0.98), weight_decay=0.0)
    for i in range(steps):
        value = loss(i)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        warm_up = min(1.0, (i + 1) / (0.05 * steps + 1))
        optimizer.param_groups[0]["lr"] = lr * warm_up * (1 - i / steps)
        optimizer.step()
        yield i + 1


def add_adapters(model: nn.Module, rank: int, seed: int) -> Adapters:
    """Add adapters to the projections of attention and freeze other parameters."""
    options: Lora = {
        "rank": rank,
        "alpha": 2.0 * rank,
        "dropout": 0.0,
        "targets": None,
        "also": [],
        "merge": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Adapters(model, options)


def training_rows(model: str, length: int, seed: int, count: int) -> Tensor:
    """Return (count, length) tokens of the training text, in random order by seed.

    Raises ValueError if the text has fewer rows.
    """
    text = pretrained.tokens(model, "train")
    rows = text[: len(text) // length * length].view(-1, length)
    if count > len(rows):
        raise ValueError(
            f"{count} rows of {length} tokens: the training text of WikiText-2 has only {len(rows)}; use "
            "fewer"
        )
    order = torch.randperm(len(rows), generator=generator_of(seed, length))
    return rows[order[:count]]


def batch_arguments(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "use_cache": False}


@task_class
class AdaptPretrained(SwapMeasurement):
    """task=adapt_pretrained: loss of a pretrained language model during adaptation.

    After each of `steps` (0, the end of the transfer, then steps of adapters) there is one row per kind in `texts`,
    with `above`: the loss increase over the pretrained checkpoint with exact attention (nats per token), a list over
    `tested` rows. One more row has the CPU `minutes` of training so far and `cost`, the mean of `above`.

    Methods without learned parameters skip the transfer.

    Args:
        texts: Kinds of rows, keys of `pretrained.ROWS`.
        tested: Test rows of each kind.
        captured: Training rows of attention transfer.
        transfer: Steps of attention transfer; all later steps train adapters in bfloat16, one row per step.
    """

    metric = "cost"

    model: FileName
    texts: Several[Literal[*pretrained.ROWS]]
    length: Count
    tested: Count
    captured: Count
    transfer: Count
    steps: Several[Whole]
    lora_lr: Positive
    rank: Count

    def __post_init__(self):
        self.lora = max(self.steps) - self.transfer

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        rows = training_rows(self.model, self.length, seed, self.captured + self.lora)
        captured = [batch_arguments(row[None]) for row in rows[: self.captured]]
        exact = pretrained.load_pretrained(self.model)[0]
        model = swap_and_fit(deepcopy(exact), replace(mechanism, seed=seed), captured)
        minutes = 0.0
        losses = self.loss_increases(model)
        yield from step_rows(0, losses, minutes)
        if learns(model) or layer_parameters(swapped_states(model)):
            arguments = (model, captured, self.transfer, TRANSFER_LR)
            minutes = milliseconds(transfer_attention, *arguments, clock=PROCESSOR) / MINUTE
            losses = self.loss_increases(model)
        yield from step_rows(self.transfer, losses, minutes)
        add_adapters(model, self.rank, seed)
        loss = adapter_loss(model, rows[self.captured :])
        training = descent(model, loss, self.lora, self.lora_lr)
        for step in range(self.transfer + 1, self.transfer + self.lora + 1):
            minutes += milliseconds(next, training, clock=PROCESSOR) / MINUTE
            if step in self.steps:
                yield from step_rows(step, self.loss_increases(model), minutes)

    def loss_increases(self, model: nn.Module) -> dict[str, list[float]]:
        """Return the loss increases of the test rows, nats per token, by kind."""
        model.eval()
        increases = {kind: [] for kind in self.texts}
        for kind, values in increases.items():
            for i in range(self.tested):
                row, exact = pretrained.exact_losses(self.model, kind, self.length, i)
                above = pretrained.token_losses(model, row) - exact
                values.append(float(above.mean()))
        return increases


def step_rows(step: int, losses: dict[str, list[float]], minutes: float) -> Records:
    for kind, values in losses.items():
        yield {"step": step, "text": kind, "above": values}
    cost = float(np.mean([*losses.values()]))
    yield {"step": step, "sample": "", "minutes": minutes, "cost": cost}


def adapter_loss(model: nn.Module, rows: Tensor) -> Callable[[int], Tensor]:
    """Return loss(i), nats per token of row i."""

    def loss(i: int) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16):
            output = model.train()(**batch_arguments(rows[i : i + 1]))
        return F.cross_entropy(output.logits[0, :-1].float(), rows[i, 1:])

    return loss
