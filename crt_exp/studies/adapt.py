"""What a swap loses and light training brings back, on four small models that are trained here.

copying: a GPT-2 on rows of random symbols whose second half is the first again; causal: the same on characters of
WikiText-2; masked: a pre-norm RoBERTa on symbols said twice, some of them hidden; vision: a ViT on handwritten digits.
Each seed has a model of its own.
Every arm is swapped in, taught by attention transfer, and trained by low-rank adapters, after the transfer (LoLCATs'
order) and without it for as many steps in all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from crt_exp.nearfar import NearFar
from crt_exp.data import mnist
from crt_exp.data.text import IGNORED, generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.runner.adapters import Adapters
from crt_exp.studies.bench import fitted
from crt_exp.studies.cells import Cells, Draw
from crt_exp.times import PROCESSOR, Watch, milliseconds
from crt_exp.swap.transfer import Transferring, calibrate, learned, release, swapped_layers
from crt_exp.tasks.objectives import following

HOME = Path("outputs/adapt")
SYMBOLS, COPIED, LENGTH, MASKED, SHARE = 16, 64, 64, 64, 0.3   # symbols; tokens of rows; hidden ones
WIDTH, LAYERS, HEADS = 128, 4, 4                    # those of the small models of fidelity and copying
PATCH = 4                                           # pixels a side of MNIST's 28: 49 tokens and one more
HIDDEN = 63                                         # the token of a hidden character
ROWS = 16                                           # of a step
EXACT_LR, TRANSFER_LR, LORA_LR, RANK = 3e-3, 2e-2, 5e-3, 4
PLACES = ("swapped", "transferred", "transfer, LoRA", "LoRA")
EXACT, UNIFORM = "exact", "uniform"
ARMS = ("nearfar block=4 heavy=2 cells=4 open=8 exact_until=8", "favorpp learn=projections",
        "favorsharp learn=parameters", "hedgehog", "window block=4 first=2")
JUDGED = (EXACT, UNIFORM, *ARMS[:2])                # those that may have more seeds
M = {"favorpp": 64, "favorsharp": 32, "hedgehog": 32}  # all of 64 features
BUDGET = 48                                         # keys that all causal layers of near-far together read


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
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr, (0.9, 0.98), weight_decay=0.0)
    model.train()
    with Watch(PROCESSOR) as watch:
        for i in range(steps):
            loss = step(model, SETTINGS[setting].rows("train", 1_000_003 * (seed + 1) + first + i, ROWS))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wanted, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (i + 1) / (0.05 * steps + 1)) * (1 - i / steps)
            optimizer.step()
    return watch.seconds


def exact(setting: str, seed: int, steps: int) -> dict[str, float]:
    """Trains the exact model of a seed and keeps it."""
    torch.manual_seed(seed)
    model = SETTINGS[setting].model()
    seconds = trained(model, setting, seed, steps, EXACT_LR)
    HOME.mkdir(parents=True, exist_ok=True)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, file_of(setting, seed, steps))
    return {"loss": tested(model, setting, seed), "seconds": seconds}


def file_of(setting: str, seed: int, steps: int) -> Path:
    return HOME / f"{setting}-{seed}-{steps}.safetensors"


def begun(setting: str, seed: int, steps: int) -> nn.Module:
    model = SETTINGS[setting].model()
    model.load_state_dict(load_file(file_of(setting, seed, steps)), strict=False)
    return model.eval()


# ---- an arm


def adapted(setting: str, seed: int, steps: int, arm: str, transfer: int, lora: int) -> dict[str, Any]:
    """Loss and CPU seconds at each of PLACES; of a step of transfer and of training: seconds and bytes for the backward
    pass."""
    model = swapped(setting, seed, steps, arm)
    places = {"swapped": (tested(model, setting, seed), 0.0)}
    seconds = taught(model, setting, seed, transfer) if arm not in (EXACT, UNIFORM) else 0.0
    places["transferred"] = (tested(model, setting, seed), seconds)
    if arm != UNIFORM:
        more = low_rank(model, setting, seed, lora, transfer)
        places["transfer, LoRA"] = (tested(model, setting, seed), seconds + more)
        model = swapped(setting, seed, steps, arm)
        alone = low_rank(model, setting, seed, transfer + lora, 0)
        places["LoRA"] = (tested(model, setting, seed), alone)
    return {"places": places, "steps": of_steps(setting, seed, steps, arm)}


def swapped(setting: str, seed: int, steps: int, arm: str) -> nn.Module:
    """The exact model with the arm's attention, whose statistics are of training rows."""
    model = begun(setting, seed, steps)
    if arm == EXACT:
        return model
    mechanism = Mechanism.parse(arm, seed=seed)
    mechanism.projecting(M.get(mechanism.name, mechanism.m)).swap(model, saved=False)
    return fitted(model, calibration(setting, seed))


def calibration(setting: str, seed: int) -> list[Tensor]:
    return [SETTINGS[setting].rows("train", 777 + 10 * seed + i, ROWS)[0] for i in range(2)]


def has_budget(model: nn.Module) -> bool:
    """Whether it is causal near-far attention, whose layers share the keys that they read."""
    first = swapped_layers(model)[0]
    return isinstance(first, NearFar) and first.causal


def taught(model: nn.Module, setting: str, seed: int, steps: int) -> float:
    """Attention transfer of those that have something to learn; CPU seconds."""
    shares = has_budget(model)
    if not (shares or learned(swapped_layers(model))):
        return 0.0
    with Watch(PROCESSOR) as watch:
        taught = Transferring(model)
        calibrate(taught, calibration(setting, seed), BUDGET if shares else None)
        if learned(swapped_layers(model)):
            trained(taught, setting, seed, steps, TRANSFER_LR, transfer_loss)
        release(taught)
    return watch.seconds


def transfer_loss(taught: Transferring, rows: tuple[Tensor, Tensor]) -> Tensor:
    return taught(rows[0])[0].mean()


def low_rank(model: nn.Module, setting: str, seed: int, steps: int, first: int) -> float:
    adapters = Adapters(model, {"rank": RANK, "alpha": 2.0 * RANK, "dropout": 0.0, "targets": None, "also": [],
                                "merge": True})
    seconds = trained(model, setting, seed, steps, LORA_LR, first=first)
    adapters.merge()
    return seconds


def of_steps(setting: str, seed: int, steps: int, arm: str, rounds: int = 5) -> dict[str, tuple[float, float]]:
    """Of a step of transfer and of one of training all weights: CPU seconds, the least of some, and MiB kept."""
    if arm in (EXACT, UNIFORM):
        return {}
    model, rows = swapped(setting, seed, steps, arm), SETTINGS[setting].rows("train", 5, ROWS)
    if not learned(swapped_layers(model)):
        return {}
    costs = {"trained": cost(lambda: loss_of(model.train(), rows), rounds)}
    taught = Transferring(model).train()
    return costs | {"transferred": cost(lambda: transfer_loss(taught, rows), rounds)}


def cost(loss: Callable[[], Tensor], rounds: int) -> tuple[float, float]:
    held = {}

    def keep(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    spent = [milliseconds(lambda: loss().backward(), clock=PROCESSOR) / 1e3 for _ in range(rounds)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss()
    return min(spent), sum(held.values()) / 2**20


# ---- draws


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics: loss (nats), seconds (CPU) at each place x; time_ratio and memory_ratio of a step of transfer to one of
    training (unit: seeds, of the arms JUDGED `judged` of them in the settings that it names)."""
    torch.set_num_threads(1)
    cells, judged = Cells(name, sources, keep), size.get("judged", {})
    most = {setting: max(size["seeds"], judged.get(setting, 0)) for setting in SETTINGS}
    starts = {(setting, seed): {"setting": setting, "seed": seed, "steps": size["steps"][setting]}
              for seed, setting in product(range(max(most.values())), SETTINGS) if seed < most[setting]}
    cells.fill([*starts.values()], exact, f"{name}: exact models", workers=1)
    keys = {(setting, seed, arm): start | {"arm": arm, "transfer": size["transfer"], "lora": size["lora"]}
            for (setting, seed), start in starts.items() for arm in (EXACT, UNIFORM, *ARMS)
            if seed < size["seeds"] or arm in JUDGED}
    cells.fill([*keys.values()], adapted, f"{name}: arms", workers=1)
    for (setting, seed, arm), key in keys.items():
        for place, (loss, seconds) in cells[key]["places"].items():
            yield cells.draw(key, setting, arm, "loss", loss, seed, place)
            yield cells.draw(key, setting, arm, "seconds", seconds, seed, place)
        steps = cells[key]["steps"]
        for i, metric in enumerate(("time_ratio", "memory_ratio") if steps else ()):
            yield cells.draw(key, setting, arm, metric, steps["transferred"][i] / steps["trained"][i], seed,
                             "transferred")
