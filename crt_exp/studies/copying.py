"""What a model that copies keeps of it when its attention is swapped: passages that are said twice.

Legend: L tokens of a row, H heads, d. Peers that no file of conf/attention holds are dense here: they say what they
give, not what they cost. All of them see the last NEAR tokens and the FIRST ones.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from crt_exp.attention.base import AttentionLayer
from crt_exp.data.byte_pairs import running_blocks
from crt_exp.data.text import generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.studies.bench import Layers, Swap
from crt_exp.studies.bench_pieces import UNSURE, TextBench, following
from crt_exp.studies.far_key import cells_at, of_pages, reading
from crt_exp.tasks.objectives import repeated

NEAR, FIRST = 64, 16               # of the peers
LLOYD = 10                         # passes of k-means
ROWS = 4                           # of a draw
CALIBRATION = 4                    # rows of the training text that codebooks and statistics are made of


# ---- texts


@lru_cache(maxsize=2)
def model_of(start: str) -> tuple[nn.Module, Any]:
    model = AutoModelForCausalLM.from_pretrained(f"{start}/model").eval()
    return model, AutoTokenizer.from_pretrained(f"{start}/model")


@lru_cache(maxsize=8)
def blocks(start: str, split: str, length: int) -> Tensor:
    rows = running_blocks(official_file("wikitext2", split), model_of(start)[1], length, f"{start}/../tokens")
    return torch.from_numpy(rows.astype(np.int64))


def passages(start: str, split: str, length: int, seed: int) -> Tensor:
    """(ROWS, length): the second half of each row is its first half from a random place on."""
    text, g = blocks(start, split, length), generator_of(seed, length)
    rows = text[torch.randperm(len(text), generator=g)[:ROWS]]
    return repeated(rows, 1.0, torch.rand(2, len(rows), generator=g))


# ---- what is measured


@lru_cache(maxsize=1)
def bench_of(start: str, length: int, seed: int) -> TextBench:
    """Rows of the test split to judge on, and of the training text to fit to."""
    training = passages(start, "train", length, 0)[:CALIBRATION]
    return TextBench(model_of(start)[0], passages(start, "test", length, seed), training)


@torch.no_grad()
def losses(start: str, length: int, seed: int, attention: str, m: int | None = None) -> dict[str, list[float]]:
    """Nats a token of each row: of its first half, `new`, and of the second but for its beginning, `copied`."""
    bench = bench_of(start, length, seed)
    with bench.swapped(attention_of(attention, m)):
        nats = [bench.nats(*following(row)) for row in bench.rows.split(1)]
    return {"new": [float(row[:length // 2 - 1].mean()) for row in nats],
            "copied": [float(row[length // 2 + UNSURE:].mean()) for row in nats]}


def times(start: str, length: int, attentions: Sequence[tuple[str, int | None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the layers of the model for one row, all in turn in each round."""
    bench, arms = bench_of(start, length, 0), {name: attention_of(name, m) for name, m in attentions}
    return bench.times(arms, bench.rows[:1], rounds, torch.no_grad()(bench.body))


def attention_of(text: str, m: int | None) -> Swap | None:
    """None for "exact"; one of PEERS with its number of keys ("pages 64"), or one as `Mechanism.parse` reads it."""
    name, *words = text.split()
    if name in PEERS:
        return Layers(partial(Peer, PEERS[name], int(words[0])), name)
    return None if name == "exact" else Mechanism.parse(text, m=m)


# ---- peers


class Peer(AttentionLayer):
    """A dense peer that reads `count` keys, in the place of causal attention."""

    def __init__(self, peer: Callable[..., Tensor], count: int, heads: int, d: int, *, kv_heads: int | None = None,
                 causal: bool = False, scaling: float | None = None, layer: int = 0):
        super().__init__(heads, d, kv_heads, causal, scaling)
        self.peer, self.count = peer, count

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.peer(q * self.scaling, k, v, self.count)


def near_of(length: int) -> tuple[Tensor, Tensor]:
    """Which keys each query sees however they rank, and which of the others are in its past, (L, L) each."""
    ago = torch.arange(length).unsqueeze(1) - torch.arange(length)
    near = (ago >= 0) & ((ago < NEAR) | (torch.arange(length) < FIRST))
    return near, (ago >= 0) & ~near


def largest(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """The largest weights, which no one knows without all of them, and no others."""
    return reading((q, k, v), q @ k.mT, *near_of(q.shape[2]), count)


def pages(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """After Quest (Tang et al., 2024): pages of consecutive keys, by a bound on their best logit, and no others."""
    return reading((q, k, v), of_pages(q, k), *near_of(q.shape[2]), count)


def clusters(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """After Multipole Attention (Kim et al., 2025): the keys of the clusters whose centroids rank first, as many as
    `count`, and the other clusters by centroid, number and mean value so far. Clusters are of the whole sequence, whose
    future they see: with less to go by it could do no better."""
    length, K = q.shape[2], cells_at(q.shape[2])
    centres, cell = kmeans(k, K)
    member = F.one_hot(cell, K).to(k)                                                        # (1, H, L, K)
    near, far = near_of(length)
    there = member.clone()
    there[:, :, :FIRST] = 0
    there = torch.cat([torch.zeros_like(there[:, :, :NEAR]), there[:, :, :-NEAR]], 2)        # the last NEAR are near
    N = there.cumsum(2)
    late = torch.cat([torch.zeros_like(v[:, :, :NEAR]), v[:, :, :-NEAR]], 2)
    V = (there.unsqueeze(-1) * late.unsqueeze(3)).cumsum(2) / N.clamp(min=1).unsqueeze(-1)   # (1, H, L, K, dv)
    rank = (q @ centres.mT).masked_fill(N == 0, -torch.inf)
    order = rank.argsort(-1, descending=True)
    held = N.gather(-1, order).cumsum(-1)
    opened = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, order, held <= count)
    read = opened.double() @ member.double().mT > 0
    logits = torch.cat([(q @ k.mT).masked_fill(~(near | read & far), -torch.inf),
                        (rank + N.log()).masked_fill(opened | (N == 0), -torch.inf)], -1)
    weights = logits.softmax(-1)
    return weights[..., :length] @ v + (weights[..., None, length:] @ V).squeeze(-2)


def kmeans(k: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Centroids (1, H, K, d) of keys (1, H, L, d), and the cluster of each (1, H, L)."""
    centres = k[:, :, torch.linspace(0, k.shape[2] - 1, K).round().long()]
    for _ in range(LLOYD):
        member = F.one_hot(torch.cdist(k, centres).argmin(-1), K).to(k)
        N = member.sum(2).unsqueeze(-1)
        centres = torch.where(N > 0, member.mT @ k / N.clamp(min=1), centres)
    return centres, torch.cdist(k, centres).argmin(-1)


PEERS = {"largest": largest, "pages": pages, "clusters": clusters}
