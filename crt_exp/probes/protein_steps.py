"""Chains of proteins: training on them, and what steps and drawn letters cost against length.

Training is that of a `Grid`. Time and memory are those of unidirectional models with random weights, on this machine's
CPU whatever the size. Legend: L letters of a row, which are random there: time does not depend on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.attention import Exact
from crt_exp.data.protein import LETTERS, TOKENS
from crt_exp.mechanism import Mechanism
from crt_exp.models.language import LanguageDescription, LanguageModel, TransformerSizes, sizes_of
from crt_exp.probes import grid
from crt_exp.probes.cells import Cells, Draw, Key
from crt_exp.times import Update, in_turns
from crt_exp.swap.calibration import fill_statistics

FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix: attention before there were fused kernels
WARM = 3                         # letters of each that are drawn before time counts
HEADS, D = 2, 64                 # of the attention layer alone: each head takes as long
LAYER, MODEL, WIDE = "attention layer", "model", "wide model"
Part = Literal["attention layer", "model", "wide model"]
# Performers Fig. 7, right: the exact model that fits at L = 8192, and one layer of the Performer.
SIZES: dict[str, TransformerSizes] = {MODEL: {"heads": 8, "layers": 1, "d_ff": 256, "d": 256},
                                      WIDE: {"heads": 8, "layers": 1, "d_ff": 2048, "d": 512}}
M = {LAYER: 128, MODEL: 64, WIDE: 128}  # twice the width of a head
A_STEP = 32768                          # letters that a step reads, whatever L: so L alone differs
TIMED = ("exact", "favorpp", "uniform")
FLAT, DRAWING = "model, all lengths in turn", "drawing letters"  # settings, besides the parts
OWN = ("lengths", "long", "processes", "positions", "letters", "drawn", "m")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of the grid, and per process (the unit): letters_per_s of training steps (setting: the part of the
    model, x: letters a row; each round a row), ms of a drawn letter (x: letters before it), mib at the peak of a step.
    lengths: of rows; long: that of the wide model, and the longest whose matrix can be formed. positions, letters:
    where letters are drawn, and how many by each process; drawn, m: the preset and the projections of that model."""
    yield from grid.measure(name, sources, {"runs": size["runs"]}, keep)
    own, cells = {key: size[key] for key in OWN}, Cells(name, sources, keep)
    parts = [*product((LAYER, MODEL), own["lengths"]), (WIDE, own["long"])]
    steps = {(part, length): {"part": part, "cases": [[arm, length, rows(part, length)] for arm in TIMED],
                              "rounds": 2 if length < own["long"] else 1} for part, length in parts}
    flat = {"part": MODEL, "rounds": 2,
            "cases": [["favorpp", length, rows(MODEL, length)] for length in own["lengths"]]}
    for (part, _), key in (*steps.items(), ((FLAT, None), flat)):
        yield from of_steps(cells, name, part, key, own["processes"])
    yield from of_memory(cells, name, own)
    yield from of_drawing(cells, name, own)


def of_steps(cells: Cells, name: str, setting: str, key: Key, processes: int) -> Iterator[Draw]:
    keys = [{**key, "process": i} for i in range(processes)]
    cells.fill(keys, times, f"{name}: {setting}", apart=True)
    for unit, each in enumerate(keys):
        for (arm, length, count), values in zip(key["cases"], cells[each]):
            for took in values:
                yield cells.draw(each, setting, arm, "letters_per_s", 1e3 * count * length / took, unit, length, "time")


def of_memory(cells: Cells, name: str, own: Mapping[str, Any]) -> Iterator[Draw]:
    keys = {(arm, length): {"name": arm, "length": length} for arm, length in product((*TIMED, FORMED), own["lengths"])
            if arm != FORMED or length <= own["long"]}
    cells.fill([*keys.values()], memory, f"{name}: memory", apart=True)
    for (arm, length), key in keys.items():
        yield cells.draw(key, MODEL, arm, "mib", cells[key], 0, length, "memory")


def of_drawing(cells: Cells, name: str, own: Mapping[str, Any]) -> Iterator[Draw]:
    common = {"names": ["exact", "favorpp"], "sizes": sizes_of(own["drawn"], {}, "sizes"), "m": own["m"],
              "positions": list(own["positions"]), "rounds": own["letters"]}
    keys = [{**common, "process": i} for i in range(own["processes"])]
    cells.fill(keys, generation, f"{name}: drawing letters", apart=True)
    for unit, key in enumerate(keys):
        for (arm, position), values in zip(product(common["names"], common["positions"]), cells[key]):
            for took in values:
                yield cells.draw(key, DRAWING, arm, "ms", took, unit, position, "time")


# ---- training steps


class Formed(Exact):
    """Causal softmax attention that forms its matrix."""

    def attend(self, x, y, v, *, causal, key_mask):
        later = torch.ones(x.shape[2], y.shape[2], dtype=torch.bool, device=x.device).triu(1)
        return (x @ y.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def layer(name: str, m: int, heads: int, d: int, **sizes) -> nn.Module:
    """Causal attention of that name; m is for those that have projections."""
    if name == FORMED:
        return Formed(heads, d, **sizes)
    return Mechanism.parse(name).projecting(m).layer(heads, d, **sizes)


def language_model(name: str, length: int, sizes: TransformerSizes, m: int) -> LanguageModel:
    """With random weights, and positions for rows of that length."""
    torch.manual_seed(0)
    described = LanguageDescription(TOKENS, length, sizes, causal=True)
    return LanguageModel(described, lambda heads, d, **more: layer(name, m, heads, d, **more))


def drawn(*shape: int) -> Tensor:
    return torch.randint(len(LETTERS), shape, generator=torch.Generator().manual_seed(0))


def rows(part: Part, length: int) -> int:
    """Rows of a step; one of the wide model, which would take too long."""
    return 1 if part == WIDE else max(1, A_STEP // length)


@dataclass(frozen=True)
class Case:
    """What takes its turn: attention `name` in `part` of the model, on `rows` rows of L = length letters."""

    name: str
    length: int
    rows: int

    def step(self, part: Part) -> "LayerStep | Update":
        return LayerStep(self) if part == LAYER else self.update(SIZES[part], M[part])

    def update(self, sizes: TransformerSizes, m: int) -> Update:
        """Next-letter training; no row is padded."""
        tokens = drawn(self.rows, self.length + 1)
        return Update(language_model(self.name, self.length, sizes, m),
                      lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


class LayerStep:
    """Forward and backward of one attention layer in training, as a call without arguments."""

    def __init__(self, case: Case):
        self.layer = layer(case.name, M[LAYER], HEADS, D, causal=True)
        g = torch.Generator().manual_seed(0)
        self.given = [torch.randn(case.rows, HEADS, case.length, D, generator=g).requires_grad_() for _ in range(3)]
        self.gradient = torch.randn(case.rows, HEADS, case.length, D, generator=g)

    def __call__(self) -> None:
        self.layer(*self.given).backward(self.gradient)
        for t in self.given:
            t.grad = None


def times(part: Part, cases: Sequence[Sequence], rounds: int, process: int = 0) -> list[list[float]]:
    """Milliseconds of a step in each round, in the order of cases (name, length, rows), which all take their turn in
    every round."""
    steps = {str(case): Case(*case).step(part) for case in cases}
    spent = in_turns(steps, rounds)
    return [spent[str(case)] for case in cases]


def memory(name: str, length: int) -> float:
    """MiB at the peak of a step of the model on one row, beyond weights, gradients and the optimiser's state. For a new
    process."""
    Case(name, 64, 1).step(MODEL)()  # libraries and threads
    return Case(name, length, 1).step(MODEL).added()


# ---- drawing letters


@torch.no_grad()
def generation(names: Sequence[str], positions: Sequence[int], rounds: int, sizes: TransformerSizes, m: int,
               process: int = 0) -> list[list[float]]:
    """Milliseconds of a letter behind so many in each round: of each name and, within it, each position; all take
    their turn in every round, and each goes on from where its last letter was."""
    calls, token = {}, drawn(1, 1)
    for name in names:
        model = language_model(name, max(positions) + rounds + WARM, sizes, m).eval()
        if name != FORMED and Mechanism.parse(name).draws:
            fill_statistics(model, [drawn(1, min(positions))])
        for position in positions:
            pasts = model.begin()
            model(drawn(1, position), pasts=pasts)
            calls[name, position] = partial(model, token, pasts=pasts)
    spent = in_turns(calls, rounds, warm=WARM)
    return [spent[name, position] for name in names for position in positions]
