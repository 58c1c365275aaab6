"""How much of what a swap costs a pretrained language model comes back by training, step by step.

Every arm is swapped in, its layers learn from captured calls of the exact model's, and low-rank adapters are then
trained (LoLCATs' order), in all arms on the same rows. Texts and readings are those of `pretrained`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.data.text import generator_of
from crt_exp.mechanism import Mechanism
from crt_exp.measure import pretrained
from crt_exp.measure.adapt import descent, low_rank
from crt_exp.advice.bench import fitted, quiet
from crt_exp.swap.calibration import learns
from crt_exp.swap.transfer import learned, swapped_layers, transfer_attention
from crt_exp.times import PROCESSOR, Watch, milliseconds

MINUTE = 60_000    # milliseconds


def training_rows(model: str, length: int, seed: int, count: int) -> Tensor:
    """(count, length) of the training text, in an order of the seed's. Raises ValueError where it has fewer."""
    text = pretrained.tokens(model, "train")
    rows = text[:len(text) // length * length].view(-1, length)
    if count > len(rows):
        raise ValueError(f"{count} rows of {length} tokens: the training text of WikiText-2 has {len(rows)}")
    return rows[torch.randperm(len(rows), generator=generator_of(seed, length))[:count]]


@lru_cache(maxsize=4)
def exact_of(model: str, kind: str, length: int, count: int) -> list[tuple[pretrained.Row, pretrained.Reading]]:
    """Rows, and what the model as it is published makes of each."""
    return [pretrained.exact_of(model, kind, length, i) for i in range(count)]


def called(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "use_cache": False}


@dataclass(frozen=True)
class Trained:
    """A model of `pretrained` that gets other attention. settings: name -> a kind of row, of `length` tokens, of which
    `tested` are read, after so many `steps` (0, and those behind the transfer): the first `transfer` are of attention
    transfer, on so many `captured` rows, the others of adapters, on a row each, in bfloat16 where autocast has it so
    with `bf16`. *_lr: learning rates. rank: of adapters."""

    model: str
    settings: Mapping[str, str]
    length: int
    tested: int
    captured: int
    transfer: int
    steps: Sequence[int]
    transfer_lr: float
    lora_lr: float
    rank: int
    bf16: bool = False

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        """Of each setting, after so many `steps` of transfer and adapters: nats `above` the exact model as it is
        published, and `nats`, of each row. Attention with nothing to learn is after the transfer what it was before.
        And the `minutes` of the processor that training took so far."""
        rows = training_rows(self.model, self.length, seed, self.captured + self.lora)
        model = self.swapped(mechanism, seed, rows[:self.captured])
        found, transfer = self.readings(model), 0.0
        yield from behind(0, found)
        if can_be_taught(model):
            transfer = milliseconds(self.taught, model, rows[:self.captured], clock=PROCESSOR) / MINUTE
            found = self.readings(model)
        yield from behind(self.transfer, found, transfer)
        low_rank(model, self.rank, seed)
        loss = adapter_loss(model, rows[self.captured:], self.bf16)
        for step, minutes in paced(descent(model, loss, self.lora, self.lora_lr)):
            if self.transfer + step in self.steps:
                yield from behind(self.transfer + step, self.readings(model), transfer + minutes)

    @property
    def lora(self) -> int:
        """Steps of adapters."""
        return max(self.steps) - self.transfer

    def swapped(self, mechanism: Mechanism, seed: int, rows: Tensor) -> nn.Module:
        """A copy with the arm's attention, fitted to training rows."""
        model = deepcopy(pretrained.opened(self.model).model)
        if mechanism.is_exact:
            return model
        with quiet():
            replace(mechanism, seed=seed).swap(model, saved=False)
            return fitted(model, [called(row[None]) for row in rows])

    def taught(self, model: nn.Module, rows: Tensor) -> None:
        transfer_attention(model, [called(row[None]) for row in rows], self.transfer, self.transfer_lr, captured=True)

    def readings(self, model: nn.Module) -> list[dict[str, Any]]:
        model.eval()
        return [{"setting": setting, **self.reading(model, kind)} for setting, kind in self.settings.items()]

    def reading(self, model: nn.Module, kind: str) -> dict[str, list[float]]:
        pairs = exact_of(self.model, kind, self.length, self.tested)
        found = [(pretrained.read(model, row).nats, exact.nats) for row, exact in pairs]
        return {"nats": [float(ours.mean()) for ours, _ in found],
                "above": [float((ours - exact).mean()) for ours, exact in found]}


def behind(steps: int, found: list[dict[str, Any]], minutes: float = 0.0) -> list[dict[str, Any]]:
    return [{"steps": steps, **row} for row in [*found, {"minutes": minutes}]]


def paced(steps: Iterator[int]) -> Iterator[tuple[int, float]]:
    """Each step with the processor's minutes that it and those before it took; what the reader does between counts
    not."""
    minutes = 0.0
    while True:
        with Watch(PROCESSOR) as watch:
            step = next(steps, None)
        if step is None:
            return
        minutes += watch.ms / MINUTE
        yield step, minutes


def can_be_taught(model: nn.Module) -> bool:
    return any("swapped" in part._modules for part in model.modules()) and (
        learns(model) or bool(learned(swapped_layers(model))))


def adapter_loss(model: nn.Module, rows: Tensor, bf16: bool) -> Callable[[int], Tensor]:
    """loss(i), nats a token of row i."""
    def loss(i: int) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
            logits = model.train()(**called(rows[i][None])).logits[0, :-1]
        return F.cross_entropy(logits.float(), rows[i][1:])
    return loss
