"""What `make fig4-right` measures: training steps of timm's ViT-Ti/16 on images of any size, their time and memory.

Legend: L patches of an image of 16 sqrt(L) pixels a side; the model reads them and a class token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.mechanism import Mechanism
from crt_exp.studies.cells import Cells, Draw
from crt_exp.times import Update, in_turns

MODEL, PATCH, CLASSES, M = "vit_tiny_patch16_224", 16, 10, 256
FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix: attention before there were fused kernels
LONGEST_MATRIX = 3136                  # 3 heads, 12 layers: 2.8 GB of matrices
METHODS = ("exact", "favorp", "favorpp", "uniform", FORMED)


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics by tokens (x): ms of every round, units are processes, in which all methods take their turn; mib, the
    peak of a step in a process of its own."""
    cells = Cells(name, sources, keep)
    keys = {place: {"tokens": place[0], "rounds": rounds(place[0]), "process": place[1]}
            for place in product(size["tokens"], range(size["processes"]))}
    cells.fill([*keys.values()], times, f"{name}: training steps", apart=True)
    peaks = {(n, arm): {"tokens": n, "name": arm} for n in size["memory"] for arm in methods(n)}
    cells.fill([*peaks.values()], memory, f"{name}: memory", apart=True)
    for (n, process), key in keys.items():
        for arm, spent in cells[key].items():
            yield from (cells.draw(key, MODEL, arm, "ms", ms, process, n) for ms in spent)
    for (n, arm), key in peaks.items():
        yield cells.draw(key, MODEL, arm, "mib", cells[key], x=n)


def rounds(tokens: int) -> int:
    """Of each process: more of the short ones, whose times vary more."""
    return math.ceil(6 * min(1, 512 / tokens))


def methods(tokens: int) -> list[str]:
    return [name for name in METHODS if name != FORMED or tokens <= LONGEST_MATRIX]


def vit(name: str, tokens: int) -> nn.Module:
    """The model for images of that many patches. Raises ValueError where that is no square."""
    import timm

    side = round(tokens**0.5)
    if side**2 != tokens:
        raise ValueError(f"{tokens} patches make no square image")
    torch.manual_seed(0)
    model = timm.create_model(MODEL, img_size=PATCH * side, num_classes=CLASSES)
    if name == FORMED:
        for block in model.blocks:
            block.attn.fused_attn = False
        return model
    mechanism = Mechanism.parse(name).projecting(M)
    return model if name == "exact" else mechanism.swap(model)


def step(name: str, tokens: int) -> Update:
    """Training on one image."""
    model, given, label = vit(name, tokens), image(tokens), torch.zeros(1, dtype=torch.long)
    return Update(model, lambda model: F.cross_entropy(model(given), label))


def image(tokens: int) -> Tensor:
    side = PATCH * round(tokens**0.5)
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def times(tokens: int, rounds: int, process: int = 0) -> dict[str, list[float]]:
    """method -> milliseconds of a training step in each round; every method takes its turn in every round."""
    return in_turns({name: step(name, tokens) for name in methods(tokens)}, rounds)


def memory(tokens: int, name: str) -> float:
    """MiB at the peak of a training step, beyond weights, gradients and the optimiser's state. For a new process."""
    step(name, 64)()  # libraries and threads
    return step(name, tokens).added()
