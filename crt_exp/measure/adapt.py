"""What a swap loses and light training brings back, on small models that are trained here.

copying: a GPT-2 on rows of random symbols whose second half is the first again; causal: the same on characters of
WikiText-2; masked: a pre-norm RoBERTa on symbols said twice, some of them hidden; vision: a ViT on handwritten digits.
Each seed has a model of its own.
Every arm is swapped in, taught by attention transfer, and trained by low-rank adapters, after the transfer (LoLCATs'
order) and without it for as many steps in all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.data import mnist
from crt_exp.data.text import IGNORED, generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.runner.adapters import Adapters
from crt_exp.advice.bench import fitted
from crt_exp.swap.transfer import Transferring, calibrate, learned, release, swapped_layers
from crt_exp.tasks.objectives import following
from crt_exp.times import PROCESSOR, Watch, milliseconds, threads

SYMBOLS, COPIED, LENGTH, MASKED, SHARE = 16, 64, 64, 64, 0.3   # symbols; tokens of rows; hidden ones
WIDTH, LAYERS, HEADS = 128, 4, 4                    # those of the small models of fidelity and copying
PATCH = 4                                           # pixels a side of MNIST's 28: 49 tokens and one more
HIDDEN = 63                                         # the token of a hidden character
ROWS = 16                                           # of a step
UNIFORM = "uniform"                                 # the control, which is not adapted


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
    """The weights of the exact model of a seed, which every arm starts from."""
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


# ---- an arm


@dataclass(frozen=True)
class Adapted:
    """A model of SETTINGS that gets other attention. steps: of its own training; transfer, and lora beyond these: of
    adaptation; *_lr: learning rates of all three. rank: of adapters."""

    setting: str
    steps: int
    transfer: int
    lora: int
    exact_lr: float
    transfer_lr: float
    lora_lr: float
    rank: int

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        """Loss (nats) and CPU seconds at each place: swapped, transferred, after LoRA beyond it, and after as many
        steps of LoRA alone; of a step of transfer over one of training all weights: CPU seconds, and bytes for the
        backward pass."""
        with threads(1):
            yield from self.places(mechanism, seed)
            yield from self.step_ratios(mechanism, seed)

    def places(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        def at(place: str, seconds: float) -> dict[str, Any]:
            return {"place": place, "loss": tested(model, self.setting, seed), "seconds": seconds}

        model = self.swapped(mechanism, seed)
        yield at("swapped", 0.0)
        seconds = self.taught(model, seed) if adapts(mechanism) else 0.0
        yield at("transferred", seconds)
        if mechanism.name != UNIFORM:
            more = self.low_rank(model, seed, self.lora, self.transfer)
            yield at("transfer, LoRA", seconds + more)
            model = self.swapped(mechanism, seed)
            yield at("LoRA", self.low_rank(model, seed, self.transfer + self.lora, 0))

    def swapped(self, mechanism: Mechanism, seed: int) -> nn.Module:
        """The exact model with the arm's attention, whose statistics are of training rows."""
        model = SETTINGS[self.setting].model()
        model.load_state_dict(exact(self.setting, seed, self.steps, self.exact_lr), strict=False)
        if mechanism.is_exact:
            return model.eval()
        replace(mechanism, seed=seed).swap(model.eval(), saved=False)
        return fitted(model, calibration(self.setting, seed))

    def taught(self, model: nn.Module, seed: int) -> float:
        """Attention transfer of those that have something to learn; CPU seconds."""
        if not learned(swapped_layers(model)):
            return 0.0
        with Watch(PROCESSOR) as watch:
            taught = Transferring(model)
            calibrate(taught, calibration(self.setting, seed))
            trained(taught, self.setting, seed, self.transfer, self.transfer_lr, transfer_loss)
            release(taught)
        return watch.seconds

    def low_rank(self, model: nn.Module, seed: int, steps: int, first: int) -> float:
        """Adapters, drawn from the seed, trained and merged; CPU seconds."""
        adapters = low_rank(model, self.rank, seed)
        seconds = trained(model, self.setting, seed, steps, self.lora_lr, first=first)
        adapters.merge()
        return seconds

    def step_ratios(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        if not adapts(mechanism):
            return
        model, rows = self.swapped(mechanism, seed), SETTINGS[self.setting].rows("train", 5, ROWS)
        if learned(swapped_layers(model)):
            seconds, mib = cost(lambda: loss_of(model.train(), rows))
            taught = Transferring(model).train()
            taught_seconds, taught_mib = cost(lambda: transfer_loss(taught, rows))
            yield {"place": "transferred", "time_ratio": taught_seconds / seconds, "memory_ratio": taught_mib / mib}


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
