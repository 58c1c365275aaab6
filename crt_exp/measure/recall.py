"""Recall: heads in which each query gives most of its weight to a key of its own, far away, a model that was trained to
recall pairs, and one that copies passages.

What a mean of many keys cannot give back: the hardest case for attention that does not look at each key.
Legend: L tokens, H heads, d.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from crt_exp import mechanism_text
from crt_exp.attention import exact_attention, uniform_attention, window_attention
from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import repeat_heads
from crt_exp.config import unknown
from crt_exp.data.byte_pairs import running_blocks
from crt_exp.data.text import generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import LanguageModel
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.recall import rows_at
from crt_exp.advice.bench import Layers, Swap, fitted
from crt_exp.advice.bench_pieces import UNSURE, TextBench, following
from crt_exp.measure.dense_peers import PEERS, cells_at
from crt_exp.measure.texts import FOLDER
from crt_exp.tasks.objectives import repeated
from crt_exp.tasks.recall import drawn
from crt_exp.times import Watch

OWN = ("uniform", "window", "near_far")  # what `Law` makes itself
CALIBRATION = 4      # rows that statistics are made of


# ---- heads


class Heads(NamedTuple):
    """q (1, H, R, d), of keys k and values v (1, H, L, d), to be scaled by 1."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Law:
    """Of heads whose queries each give `weight` to a key at least `far` tokens away: the last `queries`, in their past;
    both: one at every token, on either side. Keys are iid normal, or in normal `clusters` with 0.64 of the variance
    between them."""

    length: int
    heads: int
    d: int
    far: int
    weight: float
    queries: int = 0
    clusters: int = 0
    both: bool = False

    def draw(self, seed: int) -> Heads:
        g, L = torch.Generator().manual_seed(seed), self.length
        k, hidden = self.keys(g), None
        if self.both:
            ahead = (torch.rand(self.heads, L, generator=g) * (L - 2 * self.far)).long() + self.far
            target = (torch.arange(L) + ahead) % L       # as far on a circle, so at least `far` away or beyond an end
        else:
            places = torch.arange(L - self.queries, L)
            target = (torch.rand(self.heads, self.queries, generator=g) * (places - self.far)).long()
            hidden = torch.arange(L) > places.unsqueeze(1)
        q = self.towards(k, target, hidden)
        return Heads(*(t.unsqueeze(0) for t in (q, k, torch.randn(self.heads, L, self.d, generator=g))))

    def keys(self, g: torch.Generator) -> Tensor:
        """(H, L, d)."""
        k = torch.randn(self.heads, self.length, self.d, generator=g)
        if self.clusters:
            at = torch.randint(self.clusters, (self.heads, self.length), generator=g)
            k = 0.6 * k + 0.8 * rows_at(torch.randn(self.heads, self.clusters, self.d, generator=g), at)
        return k

    def towards(self, k: Tensor, target: Tensor, hidden: Tensor | None) -> Tensor:
        """Queries (H, R, d) that point to keys k (H, L, d) at `target` (H, R), as long as gives these their weight
        among the keys that are not hidden (R, L); less where a longer key lies in that direction, as in clusters."""
        unit = torch.nn.functional.normalize(rows_at(k, target), dim=-1)
        logits = unit @ k.mT
        logits = logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
        low, high = torch.zeros(*target.shape, 1), torch.full((*target.shape, 1), 50.0)
        for _ in range(40):
            middle = (low + high) / 2
            less = (middle * logits).softmax(-1).gather(-1, target.unsqueeze(-1)) < self.weight
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        return low * unit

    # ---- what is compared; all but PEERS are causal where the law is

    def output(self, arm: str, heads: Heads) -> Tensor:
        """Of an arm such as "near_far open=32": a function of this class, or one of PEERS."""
        name, options = mechanism_text.read(arm)
        if name in PEERS:
            return PEERS[name](*heads, **options)
        if name not in OWN:
            raise unknown("arm", name, [*OWN, *PEERS])
        return getattr(self, name)(heads, **options)

    def exact(self, heads: Heads) -> Tensor:
        return exact_attention(*heads, causal=not self.both)

    def uniform(self, heads: Heads) -> Tensor:
        return uniform_attention(*heads, causal=not self.both)

    def window(self, heads: Heads) -> Tensor:
        return window_attention(*heads, causal=not self.both)

    def near_far(self, heads: Heads, block: int, heavy: int, **options: int) -> Tensor:
        sizes = Sizes(block, heavy, cells_at(self.length), **options)
        return near_far_attention(*heads, sizes, causal=not self.both).out


@torch.no_grad()
def errors(arm: Mapping[str, str], seed: int, **law: Any) -> list[dict[str, Any]]:
    """Relative error of the output of each arm, over the queries of all heads of a `Law`."""
    law = Law(**law)
    heads = law.draw(seed)
    exact = law.exact(heads)
    return [{"arm": name, "error": float((law.output(each, heads) - exact).norm() / exact.norm())}
            for name, each in arm.items()]


# ---- a model that was trained to recall


@torch.no_grad()
def accuracy(arm: str, start: str, length: int, pairs: int, rows: int, seed: int, split: str = "test"
             ) -> dict[str, float]:
    """The share of the values that are right, of all pairs that were said in so many rows, and milliseconds of a row,
    by a run of task=recall whose attention is swapped without training."""
    model, symbols, right, count = swapped(start, length, pairs, arm), kept(start).symbols["values"], 0, 0
    with Watch() as watch:
        for i in range(rows):
            tokens, labels = map(torch.from_numpy, drawn(split, 1000 * seed + i, length, symbols, pairs, pairs))
            asked = labels >= 0
            chosen = model(tokens[None], chosen=asked[None])[:, :symbols].argmax(-1)
            right, count = right + int((chosen == labels[asked]).sum()), count + int(asked.sum())
    return {"accuracy": right / count, "ms": watch.ms / rows}


@lru_cache(maxsize=1)
def kept(start: str) -> language.KeptLanguageModel:
    return language.load(start, "start")


@lru_cache(maxsize=32)
def swapped(start: str, length: int, pairs: int, arm: str) -> LanguageModel:
    """The model with that attention, fitted to training rows where it has something to fit."""
    made = kept(start)
    given = (drawn("train", i, length, made.symbols["values"], pairs, pairs)[0] for i in range(CALIBRATION))
    return fitted(made.build(Mechanism.parse(arm)), (torch.from_numpy(tokens)[None] for tokens in given))


# ---- a model that copies: passages that are said twice


ROWS = 4    # of a draw, and of the training text that statistics are made of


# ---- its texts


@lru_cache(maxsize=2)
def model_of(start: str) -> tuple[nn.Module, Any]:
    model = AutoModelForCausalLM.from_pretrained(f"{start}/model").eval()
    return model, AutoTokenizer.from_pretrained(f"{start}/model")


@lru_cache(maxsize=8)
def blocks(start: str, split: str, length: int) -> Tensor:
    rows = running_blocks(official_file("wikitext2", split), model_of(start)[1], length, FOLDER / "tokens")
    return torch.from_numpy(rows.astype(np.int64))


def passages(start: str, split: str, length: int, seed: int) -> Tensor:
    """(ROWS, length): the second half of each row is its first half from a random place on."""
    text, g = blocks(start, split, length), generator_of(seed, length)
    rows = text[torch.randperm(len(text), generator=g)[:ROWS]]
    return repeated(rows, 1.0, torch.rand(2, len(rows), generator=g))


# ---- what it keeps


@lru_cache(maxsize=1)
def bench_of(start: str, length: int, seed: int) -> TextBench:
    """Rows of the test split to judge on, and of the training text to fit to."""
    return TextBench(model_of(start)[0], passages(start, "test", length, seed), passages(start, "train", length, 0))


@torch.no_grad()
def losses(arm: str, start: str, length: int, seed: int) -> dict[str, float]:
    """Nats a token of the first half of rows, `new`, and of the second but for its beginning, `copied`; `gain`: by
    which the second is cheaper."""
    bench = bench_of(start, length, seed)
    with bench.swapped(attention_of(arm)):
        nats = [bench.nats(*following(row)) for row in bench.rows.split(1)]
    new = [float(row[:length // 2 - 1].mean()) for row in nats]
    copied = [float(row[length // 2 + UNSURE:].mean()) for row in nats]
    new, copied = (sum(each) / len(each) for each in (new, copied))
    return {"new": new, "copied": copied, "gain": new - copied}


def times(arm: Mapping[str, str], start: str, length: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Milliseconds of the layers of the model for one row in each round, in which all take their turn."""
    bench = bench_of(start, length, seed)
    spent = bench.times({name: attention_of(each) for name, each in arm.items()}, bench.rows[:1], rounds,
                        torch.no_grad()(bench.body))
    return [{"arm": name, "ms": each} for name, each in spent.items()]


def attention_of(text: str, **given: Any) -> Swap | None:
    """None for "exact"; one of PEERS ("pages keys=64"), or one as `Mechanism.parse` reads it with what is given."""
    name, options = mechanism_text.read(text)
    if name in PEERS:
        return Layers(partial(Peer, partial(PEERS[name], **options)), name)
    return None if text == "exact" else Mechanism.parse(text, **given)


class Peer(AttentionLayer):
    """A dense peer in the place of attention. Raises ValueError for a padding mask, which it does not know."""

    def __init__(self, peer: Callable[..., Tensor], heads: int, d: int, *, kv_heads: int | None = None,
                 causal: bool = False, scaling: float | None = None, layer: int = 0):
        super().__init__(heads, d, kv_heads, causal, scaling)
        self.peer = peer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None and not bool(key_mask.all()):
            raise ValueError("dense peers take no padding: give rows of one length")
        k, v = (repeat_heads(t, q.shape[1]) for t in (k, v))
        return torch.cat([self.peer(*row) for row in zip(*(t.split(1) for t in (q * self.scaling, k, v)))])
