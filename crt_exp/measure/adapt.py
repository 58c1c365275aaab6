"""What a swap loses and light training brings back: task=adapt, small models that are trained here, one a seed;
task=adapt_pretrained, a pretrained language model, step by step.

A method is swapped in, its layers learn exact attention's output (attention transfer), and then low-rank adapters are
trained (LoLCATs' order). copying: a GPT-2 on rows of random symbols whose second half is the first again; causal: the
same on characters of WikiText-2; masked: a pre-norm RoBERTa on repeated symbols, some of them hidden; vision: a ViT on
handwritten digits.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.advice.bench import fitted, quiet
from crt_exp.data import mnist
from crt_exp.data.text import IGNORED, generator_of, official_file
from crt_exp.hints import Count, Positive, Several, Whole
from crt_exp.measure import pretrained
from crt_exp.measure.base import SwapMeasurement
from crt_exp.mechanism import Mechanism
from crt_exp.runner.adapters import Adapters
from crt_exp.schema import checked
from crt_exp.swap.calibration import learns
from crt_exp.swap.transfer import Transferring, calibrate, learned, release, swapped_layers, transfer_attention
from crt_exp.tasks.objectives import following
from crt_exp.times import PROCESSOR, Watch, milliseconds, threads

SYMBOLS, COPIED, LENGTH, MASKED, SHARE = 16, 64, 64, 64, 0.3   # symbols; tokens of rows; hidden ones
WIDTH, LAYERS, HEADS = 128, 4, 4                    # those of the small models of the page swap
PATCH = 4                                           # pixels a side of MNIST's 28: 49 tokens and one more
HIDDEN = 63                                         # the token of a hidden character
ROWS = 16                                           # of a step
UNIFORM = "uniform"                                 # the control, which is not adapted
MINUTE = 60_000                                     # milliseconds


# ---- rows and models


@dataclass(frozen=True)
class Setting:
    """model: makes one. rows: (split, seed, count) -> its input and labels, IGNORED where nothing is predicted.
    tested: rows of the test."""

    model: Callable[[], nn.Module]
    rows: Callable[[str, int, int], tuple[Tensor, Tensor]]
    tested: int = 96


@lru_cache(maxsize=2)
def characters(split: str) -> Tensor:
    """Of WikiText-2 in lower case, as numbers from 0; those that are rarest in the training text are one."""
    text = official_file("wikitext2", split).read_text(encoding="utf-8").lower()[:400_000]
    known = "\n abcdefghijklmnopqrstuvwxyz.,'-@=0123456789"
    return torch.tensor([known.find(each) + 1 for each in text])


def windows(split: str, seed: int, count: int, length: int) -> Tensor:
    text = characters(split)
    at = torch.randint(len(text) - length, (count, 1), generator=generator_of(seed, length))
    return text[at + torch.arange(length)]


def copying_rows(split: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    g = generator_of(seed, count + (split == "test"))
    ids = torch.randint(SYMBOLS, (count, COPIED // 2), generator=g).repeat(1, 2)
    labels = following(ids)
    labels[:, :COPIED // 2] = IGNORED
    return ids, labels


def causal_rows(split: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    ids = windows(split, seed, count, LENGTH)
    return ids, following(ids)


def masked_rows(split: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    g = generator_of(seed, count + 2 * (split == "test"))
    ids = torch.randint(SYMBOLS, (count, MASKED // 2), generator=g).repeat(1, 2)
    hidden = torch.rand(ids.shape, generator=g) < SHARE
    return ids.masked_fill(hidden, HIDDEN), ids.masked_fill(~hidden, IGNORED)


@lru_cache(maxsize=2)
def digits(split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) between -1 and 1, and what they show."""
    images = torch.tensor(mnist.images(split)).unsqueeze(1) / 127.5 - 1
    return images, torch.tensor(mnist.labels(split)).long()


def vision_rows(split: str, seed: int, count: int) -> tuple[Tensor, Tensor]:
    images, labels = digits(split)
    at = torch.randint(len(images), (count,), generator=generator_of(seed, count + 3 * (split == "test")))
    return images[at], labels[at]


def decoder() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=2 * WIDTH,
                                      n_positions=LENGTH, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
                                      attn_pdrop=0.0, initializer_range=0.1, bos_token_id=0, eos_token_id=0))


def encoder() -> nn.Module:
    from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

    return RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(
        vocab_size=64, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH, max_position_embeddings=MASKED + 64, pad_token_id=62, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.1))


def vision() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        image_size=28, patch_size=PATCH, num_channels=1, num_labels=10, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, intermediate_size=2 * WIDTH, initializer_range=0.1))


SETTINGS = {"copying": Setting(decoder, copying_rows), "causal": Setting(decoder, causal_rows),
            "masked": Setting(encoder, masked_rows), "vision": Setting(vision, vision_rows, 400)}


def loss_of(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    given, labels = rows
    return F.cross_entropy(model(given).logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def tested(model: nn.Module, setting: str, seed: int) -> float:
    """Nats a predicted token or image, of rows that no training reads."""
    model.eval()
    return float(loss_of(model, SETTINGS[setting].rows("test", 10_000 + seed, SETTINGS[setting].tested)))


# ---- training


def trained(model: nn.Module, setting: str, seed: int, steps: int, lr: float, step: Callable[..., Tensor] = loss_of,
            first: int = 0) -> float:
    """Trains what takes gradients for `steps` steps on rows from number `first` on; CPU seconds."""
    def loss(i: int) -> Tensor:
        return step(model, SETTINGS[setting].rows("train", 1_000_003 * (seed + 1) + first + i, ROWS))

    model.train()
    with Watch(PROCESSOR) as watch:
        for _ in descent(model, loss, steps, lr):
            pass
    return watch.seconds


def descent(model: nn.Module, loss: Callable[[int], Tensor], steps: int, lr: float) -> Iterator[int]:
    """Trains what takes gradients by loss(0), loss(1), ...; yields how many steps were made, after each."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr, (0.9, 0.98), weight_decay=0.0)
    for i in range(steps):
        given = loss(i)
        optimizer.zero_grad()
        given.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (i + 1) / (0.05 * steps + 1)) * (1 - i / steps)
        optimizer.step()
        yield i + 1


@lru_cache(maxsize=64)
def exact(setting: str, seed: int, steps: int, lr: float) -> dict[str, Tensor]:
    """The weights of the exact model of a seed, which all methods start from."""
    torch.manual_seed(seed)
    model = SETTINGS[setting].model()
    trained(model, setting, seed, steps, lr)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def low_rank(model: nn.Module, rank: int, seed: int) -> Adapters:
    """Adapters of the projections of attention, which alone take gradients from now on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Adapters(model, {"rank": rank, "alpha": 2.0 * rank, "dropout": 0.0, "targets": None, "also": [],
                                "merge": True})


# ---- one method


@checked("task")
class Adapt(SwapMeasurement):
    """task=adapt: `loss`, nats, and CPU `seconds` at each `stage`: swapped, transferred, "transfer, LoRA", and "LoRA"
    alone for as many steps; with the transfer of methods that learn, CPU seconds and bytes of a step over those of a
    step that trains all weights, `time_ratio` and `memory_ratio`.

    steps: of the model's own training; transfer, and lora beyond these: of adaptation; *_lr: learning rates. rank: of
    adapters.
    """

    metric = "loss"

    def __init__(self, model: Literal[*SETTINGS], steps: Count, transfer: Count, lora: Count, exact_lr: Positive,
                 transfer_lr: Positive, lora_lr: Positive, rank: Count):
        self.setting, self.steps, self.transfer, self.lora, self.rank = model, steps, transfer, lora, rank
        self.exact_lr, self.transfer_lr, self.lora_lr = exact_lr, transfer_lr, lora_lr

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        with threads(1):
            yield from self.stages(mechanism, seed)

    def stages(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        def at(stage: str, seconds: float, **more: float) -> dict[str, Any]:
            return {"stage": stage, "loss": tested(model, self.setting, seed), "seconds": seconds, **more}

        model = self.swapped(mechanism, seed)
        yield at("swapped", 0.0)
        seconds, ratios = self.transferred(model, seed) if adapts(mechanism) else (0.0, {})
        yield at("transferred", seconds, **ratios)
        if mechanism.name != UNIFORM:
            more = self.low_rank(model, seed, self.lora, self.transfer)
            yield at("transfer, LoRA", seconds + more)
            model = self.swapped(mechanism, seed)
            yield at("LoRA", self.low_rank(model, seed, self.transfer + self.lora, 0))

    def swapped(self, mechanism: Mechanism, seed: int) -> nn.Module:
        """The exact model with the method's attention, whose statistics are of training rows."""
        model = SETTINGS[self.setting].model()
        model.load_state_dict(exact(self.setting, seed, self.steps, self.exact_lr), strict=False)
        if mechanism.is_exact:
            return model.eval()
        replace(mechanism, seed=seed).swap(model.eval(), saved=False)
        return fitted(model, calibration(self.setting, seed))

    def transferred(self, model: nn.Module, seed: int) -> tuple[float, dict[str, float]]:
        """Attention transfer of methods that have something to learn; CPU seconds, and ratios of a step."""
        if not learned(swapped_layers(model)):
            return 0.0, {}
        ratios = step_ratios(deepcopy(model), SETTINGS[self.setting].rows("train", 5, ROWS))
        with Watch(PROCESSOR) as watch:
            taught = Transferring(model)
            calibrate(taught, calibration(self.setting, seed))
            trained(taught, self.setting, seed, self.transfer, self.transfer_lr, transfer_loss)
            release(taught)
        return watch.seconds, ratios

    def low_rank(self, model: nn.Module, seed: int, steps: int, first: int) -> float:
        """Adapters, drawn from the seed, trained and merged; CPU seconds."""
        adapters = low_rank(model, self.rank, seed)
        seconds = trained(model, self.setting, seed, steps, self.lora_lr, first=first)
        adapters.merge()
        return seconds


def step_ratios(model: nn.Module, rows: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of a step of transfer over one of training all weights."""
    seconds, mib = cost(lambda: loss_of(model.train(), rows))
    taught = Transferring(model).train()
    taught_seconds, taught_mib = cost(lambda: transfer_loss(taught, rows))
    return {"time_ratio": taught_seconds / seconds, "memory_ratio": taught_mib / mib}


def adapts(mechanism: Mechanism) -> bool:
    return not mechanism.is_exact and mechanism.name != UNIFORM


def calibration(setting: str, seed: int) -> list[Tensor]:
    return [SETTINGS[setting].rows("train", 777 + 10 * seed + i, ROWS)[0] for i in range(2)]


def transfer_loss(taught: Transferring, rows: tuple[Tensor, Tensor]) -> Tensor:
    return taught(rows[0])[0].mean()


def cost(loss: Callable[[], Tensor], rounds: int = 5) -> tuple[float, float]:
    """CPU seconds, the least of some, and MiB kept for the backward pass."""
    held = {}

    def keep(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    spent = [milliseconds(lambda: loss().backward(), clock=PROCESSOR) / 1e3 for _ in range(rounds)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss()
    return min(spent), sum(held.values()) / 2**20

# ---- a pretrained language model


def training_rows(model: str, length: int, seed: int, count: int) -> Tensor:
    """(count, length) of the training text, in an order of the seed's. Raises ValueError where it has fewer."""
    text = pretrained.tokens(model, "train")
    rows = text[:len(text) // length * length].view(-1, length)
    if count > len(rows):
        raise ValueError(f"{count} rows of {length} tokens: the training text of WikiText-2 has {len(rows)}")
    return rows[torch.randperm(len(rows), generator=generator_of(seed, length))[:count]]


@lru_cache(maxsize=4)
def published(model: str, kind: str, length: int, count: int) -> list[tuple[pretrained.Row, pretrained.Reading]]:
    """Rows, and what the model as it is published makes of each."""
    return [pretrained.exact_of(model, kind, length, i) for i in range(count)]


def called(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "use_cache": False}


@checked("task")
class AdaptPretrained(SwapMeasurement):
    """task=adapt_pretrained: of each kind of row in `texts`, after each of `steps` (0, and those behind the transfer),
    nats a token, `nats`, and what of it is `above` the model with exact attention as it is published, lists over
    `tested` rows of `length` tokens; then the `minutes` of the processor that training took so far, and `cost`, the
    mean of `above`.

    The first `transfer` steps are of attention transfer, on so many `captured` rows, the others of adapters of `rank`,
    on a row each, in bfloat16 where autocast has it so with `bf16`. *_lr: learning rates. Methods with nothing to learn
    are after the transfer what they were before.
    """

    metric = "cost"

    def __init__(self, model: str, texts: Several[Literal[*pretrained.ROWS]], length: Count, tested: Count,
                 captured: Count, transfer: Count, steps: Several[Whole], transfer_lr: Positive, lora_lr: Positive,
                 rank: Count, bf16: bool):
        self.model, self.texts, self.length, self.tested, self.captured = model, texts, length, tested, captured
        self.transfer, self.steps, self.rank, self.bf16 = transfer, steps, rank, bf16
        self.transfer_lr, self.lora_lr, self.lora = transfer_lr, lora_lr, max(steps) - transfer

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        rows = training_rows(self.model, self.length, seed, self.captured + self.lora)
        model = self.swapped(mechanism, seed, rows[:self.captured])
        found, transfer = self.readings(model), 0.0
        yield from after(0, found, 0.0)
        if can_learn(model):
            transfer = milliseconds(self.transferred, model, rows[:self.captured], clock=PROCESSOR) / MINUTE
            found = self.readings(model)
        yield from after(self.transfer, found, transfer)
        low_rank(model, self.rank, seed)
        loss = adapter_loss(model, rows[self.captured:], self.bf16)
        for step, minutes in paced(descent(model, loss, self.lora, self.lora_lr)):
            if self.transfer + step in self.steps:
                yield from after(self.transfer + step, self.readings(model), transfer + minutes)

    def swapped(self, mechanism: Mechanism, seed: int, rows: Tensor) -> nn.Module:
        """A copy with the method's attention, fitted to training rows."""
        model = deepcopy(pretrained.opened(self.model).model)
        if mechanism.is_exact:
            return model
        with quiet():
            replace(mechanism, seed=seed).swap(model, saved=False)
            return fitted(model, [called(row[None]) for row in rows])

    def transferred(self, model: nn.Module, rows: Tensor) -> None:
        transfer_attention(model, [called(row[None]) for row in rows], self.transfer, self.transfer_lr, captured=True)

    def readings(self, model: nn.Module) -> dict[str, dict[str, list[float]]]:
        model.eval()
        return {kind: self.reading(model, kind) for kind in self.texts}

    def reading(self, model: nn.Module, kind: str) -> dict[str, list[float]]:
        pairs = published(self.model, kind, self.length, self.tested)
        found = [(pretrained.read(model, row).nats, exact.nats) for row, exact in pairs]
        return {"nats": [float(ours.mean()) for ours, _ in found],
                "above": [float((ours - exact).mean()) for ours, exact in found]}


def after(step: int, found: dict[str, dict[str, list[float]]], minutes: float) -> Iterator[dict[str, Any]]:
    yield from ({"step": step, "text": kind, **values} for kind, values in found.items())
    cost = float(np.mean([values["above"] for values in found.values()]))
    yield {"step": step, "sample": "", "minutes": minutes, "cost": cost}


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


def can_learn(model: nn.Module) -> bool:
    return any("swapped" in part._modules for part in model.modules()) and (
        learns(model) or bool(learned(swapped_layers(model))))


def adapter_loss(model: nn.Module, rows: Tensor, bf16: bool) -> Callable[[int], Tensor]:
    """loss(i), nats a token of row i."""
    def loss(i: int) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
            logits = model.train()(**called(rows[i][None])).logits[0, :-1]
        return F.cross_entropy(logits.float(), rows[i][1:])
    return loss
