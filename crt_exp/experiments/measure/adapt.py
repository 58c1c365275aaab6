"""Loss after a swap, after attention transfer, and after low-rank adapters.

task=adapt uses small models, trained from scratch for each seed. task=adapt_pretrained uses a pretrained language
model. The order is that of LoLCATs: swap, attention transfer, then adapters.

Settings of task=adapt: `copying`, a GPT-2 on random symbols whose second half repeats the first half; `causal`, a GPT-2
on characters of WikiText-2; `vision`, a ViT on MNIST.
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

from crt_exp.experiments.data.text import IGNORED, generator_of, official_file
from crt_exp.experiments.measure import Records, SwapMeasurement, TensorPair, pretrained
from crt_exp.experiments.measure.bench import swap_and_fit
from crt_exp.experiments.measure.times import PROCESSOR, milliseconds
from crt_exp.experiments.measure.variance import mnist_file
from crt_exp.experiments.runner.trainer_config import Adapters, Lora
from crt_exp.experiments.tasks.base import task_class
from crt_exp.experiments.tasks.mlm import following
from crt_exp.experiments.tasks.transfer import (
    TransferModel,
    calibrate,
    layer_parameters,
    release,
    swapped_layers,
    transfer_attention,
)
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.threads import threads
from crt_exp.swap.calibration import learns, swapped_states
from crt_exp.validation import Count, FileName, Positive, Several, Whole

# alphabet of `copying`; tokens of a row
SYMBOLS = 16
LENGTH = 64
# sizes of the small models
WIDTH = 128
LAYERS = 4
HEADS = 4
PATCH = 4  # pixels of a side: 49 patches of 28 x 28, and a class token
ROWS = 16  # batch size
UNIFORM = "uniform"  # control, without adapters
MINUTE = 60_000  # milliseconds
# learning rates of training with exact attention, and of attention transfer
EXACT_LR = 3e-3
TRANSFER_LR = 2e-2
PRETRAINED_TRANSFER_LR = 1e-2


# ---- rows and models


@dataclass(frozen=True)
class Setting:
    """A small model and its data.

    model: creates the model. rows: (split, seed, count) -> inputs and labels, IGNORED for positions without prediction.
    tested: number of test rows.
    """

    model: Callable[[], nn.Module]
    rows: Callable[[str, int, int], TensorPair]
    tested: int = 96

    def calibration(self, seed: int) -> list[Tensor]:
        """Return two batches of training inputs."""
        first = 777 + 10 * seed
        return [self.rows("train", first + i, ROWS)[0] for i in range(2)]

    @torch.no_grad()
    def test_loss(self, model: nn.Module, seed: int) -> float:
        """Return nats per predicted token or image, on rows that are never trained on."""
        inputs, labels = self.rows("test", 10_000 + seed, self.tested)
        return float(mean_loss(model.eval(), inputs, labels))


@lru_cache(maxsize=2)
def characters(split: str) -> Tensor:
    """Characters of WikiText-2 in lower case as integers; unknown ones have id 0."""
    text = official_file("wikitext2", split).read_text(encoding="utf-8")
    alphabet = "\n abcdefghijklmnopqrstuvwxyz.,'-@=0123456789"
    return torch.tensor([alphabet.find(character) + 1 for character in text.lower()[:400_000]])


def copying_rows(split: str, seed: int, count: int) -> TensorPair:
    g = generator_of(seed, count + (split == "test"))
    ids = torch.randint(SYMBOLS, (count, LENGTH // 2), generator=g).repeat(1, 2)
    labels = following(ids)
    labels[:, : LENGTH // 2] = IGNORED
    return ids, labels


def causal_rows(split: str, seed: int, count: int) -> TensorPair:
    text = characters(split)
    g = generator_of(seed, LENGTH)
    first = torch.randint(len(text) - LENGTH, (count, 1), generator=g)
    ids = text[first + torch.arange(LENGTH)]
    return ids, following(ids)


@lru_cache(maxsize=2)
def digits(split: str) -> TensorPair:
    """MNIST images (n, 1, 28, 28) in [-1, 1], and labels (n,)."""
    name = {"train": "train", "test": "t10k"}[split]
    images = torch.tensor(mnist_file(f"{name}-images-idx3-ubyte.gz")).unsqueeze(1) / 127.5 - 1
    return images, torch.tensor(mnist_file(f"{name}-labels-idx1-ubyte.gz")).long()


def vision_rows(split: str, seed: int, count: int) -> TensorPair:
    images, labels = digits(split)
    g = generator_of(seed, count + 3 * (split == "test"))
    indices = torch.randint(len(images), (count,), generator=g)
    return images[indices], labels[indices]


def decoder() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=2 * WIDTH,
        n_positions=LENGTH,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def vision() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=28,
        patch_size=PATCH,
        num_channels=1,
        num_labels=10,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        initializer_range=0.1,
    )
    return ViTForImageClassification(config)


SETTINGS = {
    "copying": Setting(decoder, copying_rows),
    "causal": Setting(decoder, causal_rows),
    "vision": Setting(vision, vision_rows, 400),
}


# ---- training


def mean_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    logits = model(inputs).logits.flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def transfer_loss(student: TransferModel, inputs: Tensor, labels: Tensor) -> Tensor:
    return student(inputs)[0].mean()


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


@lru_cache(maxsize=64)
def exact_weights(setting: str, seed: int, steps: int, lr: float) -> dict[str, Tensor]:
    """Weights of the model with exact attention of a seed, from which methods start."""
    torch.manual_seed(seed)
    model = SETTINGS[setting].model()
    Training(setting, seed).run(model, steps, lr)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Training:
    """Training of a small model on the rows of a setting and a seed, from row `first` on."""

    setting: str
    seed: int
    first: int = 0

    def run(
        self, model: nn.Module, steps: int, lr: float, loss: Callable[..., Tensor] = mean_loss
    ) -> None:
        """Train the parameters that require gradients."""
        rows = SETTINGS[self.setting].rows
        start = 1_000_003 * (self.seed + 1) + self.first

        def step_loss(i: int) -> Tensor:
            return loss(model, *rows("train", start + i, ROWS))

        model.train()
        for _ in descent(model, step_loss, steps, lr):
            pass


# ---- one method


@task_class
class Adapt(SwapMeasurement):
    """task=adapt: `loss` (nats) of a small model at each `stage`.

    Stages: "swapped"; "transferred"; "transfer, LoRA"; and "LoRA", adapters alone for transfer + lora steps. The
    uniform control has only the first two.

    Args:
        model: A key of SETTINGS.
        steps: Training steps with exact attention.
        transfer: Steps of attention transfer.
        lora: Steps of adapters after the transfer.
    """

    metric = "loss"

    model: Literal[*SETTINGS]
    steps: Count
    transfer: Count
    lora: Count
    lora_lr: Positive
    rank: Count

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        def row(stage: str) -> dict[str, Any]:
            return {"stage": stage, "loss": SETTINGS[self.model].test_loss(model, seed)}

        with threads(1):
            model = self.swapped_model(mechanism, seed)
            yield row("swapped")
            if not mechanism.is_exact and layer_parameters(swapped_layers(model)):
                self.train_transfer(model, seed)
            yield row("transferred")
            if mechanism.name != UNIFORM:
                later = Training(self.model, seed, self.transfer)
                self.train_adapters(model, self.lora, later)
                yield row("transfer, LoRA")
                model = self.swapped_model(mechanism, seed)
                whole = Training(self.model, seed)
                self.train_adapters(model, self.transfer + self.lora, whole)
                yield row("LoRA")

    def swapped_model(self, mechanism: Mechanism, seed: int) -> nn.Module:
        setting = SETTINGS[self.model]
        weights = exact_weights(self.model, seed, self.steps, EXACT_LR)
        model = setting.model()
        model.load_state_dict(weights, strict=False)
        seeded = replace(mechanism, seed=seed)
        return swap_and_fit(model.eval(), seeded, setting.calibration(seed))

    def train_transfer(self, model: nn.Module, seed: int) -> None:
        student = TransferModel(model)
        calibrate(student, SETTINGS[self.model].calibration(seed))
        training = Training(self.model, seed)
        training.run(student, self.transfer, TRANSFER_LR, transfer_loss)
        release(student)

    def train_adapters(self, model: nn.Module, steps: int, training: Training) -> None:
        """Train adapters and merge them; the seed determines their initial weights."""
        adapters = add_adapters(model, self.rank, training.seed)
        training.run(model, steps, self.lora_lr)
        adapters.merge()


# ---- a pretrained language model


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


@lru_cache(maxsize=4)
def exact_predictions(
    model: str, kind: str, length: int, count: int
) -> list[tuple[pretrained.Row, pretrained.Prediction]]:
    """Rows, and the predictions of the pretrained checkpoint for each."""
    return [pretrained.exact_prediction(model, kind, length, i) for i in range(count)]


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
            arguments = (model, captured, self.transfer, PRETRAINED_TRANSFER_LR)
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
        increases = {}
        for kind in self.texts:
            increases[kind] = []
            for row, exact in exact_predictions(self.model, kind, self.length, self.tested):
                above = pretrained.predict_row(model, row).nats - exact.nats
                increases[kind].append(float(above.mean()))
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
