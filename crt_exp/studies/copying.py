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
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from crt_exp.data.byte_pairs import running_blocks
from crt_exp.data.text import generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.studies.far_key import cells_at, of_pages, reading
from crt_exp.studies.times import again, in_turns
from crt_exp.swap.calibration import fill_statistics, learns
from crt_exp.swap.swap import unswap_attention
from crt_exp.tasks.objectives import repeated

NEAR, FIRST = 64, 16               # of the peers
LLOYD = 10                         # passes of k-means
UNSURE = 16                        # tokens of the second passage after which a model can know where it stands
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


@torch.no_grad()
def losses(start: str, length: int, seed: int, attention: str, m: int | None = None) -> dict[str, list[float]]:
    """Nats a token of each row: of its first half, `new`, and of the second but for its beginning, `copied`."""
    model, result = model_of(start)[0], {"new": [], "copied": []}
    with Swapped(start, attention, m, length):
        for row in passages(start, "test", length, seed):
            nats = F.cross_entropy(model(input_ids=row[None], use_cache=False).logits[0, :-1], row[1:],
                                   reduction="none")
            result["new"].append(float(nats[:length // 2 - 1].mean()))
            result["copied"].append(float(nats[length // 2 + UNSURE:].mean()))
    return result


@torch.no_grad()
def times(start: str, length: int, attentions: Sequence[tuple[str, int | None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the layers of the model for one row, all in turn in each round."""
    body, row = model_of(start)[0].model, passages(start, "test", length, 0)[:1]

    def within(swapped: Swapped) -> float:
        with swapped:
            return again(partial(body, input_ids=row, use_cache=False))
    return in_turns({attention: Swapped(start, attention, m, length) for attention, m in attentions}, rounds, within,
                    warm=0)


class Swapped:
    """Within it the model has this attention: "exact", one of PEERS with its number of keys ("pages 64"), or one as
    `Mechanism.parse` reads it, fitted to training text where it has something to fit."""

    def __init__(self, start: str, attention: str, m: int | None, length: int):
        self.start, self.attention, self.m, self.length = start, attention, m, length
        self.model = model_of(start)[0]

    def __enter__(self) -> None:
        name, *words = self.attention.split()
        if name in PEERS:
            AttentionInterface.register("peer", as_layer(PEERS[name], int(words[0])))
            self.model.set_attn_implementation("peer")
        elif name != "exact":
            Mechanism.parse(self.attention, m=self.m).swap(self.model, saved=False)
            if learns(self.model):
                fill_statistics(self.model, list(passages(self.start, "train", self.length, 0)[:CALIBRATION].split(1)))

    def __exit__(self, *_) -> None:
        if self.attention.split()[0] in PEERS:
            self.model.set_attn_implementation("sdpa")
        elif self.attention != "exact":
            unswap_attention(self.model)


# ---- peers


def as_layer(peer: Callable[..., Tensor], count: int) -> Callable[..., tuple[Tensor, None]]:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float, **_) -> tuple[Tensor, None]:
        return peer(query * scaling, key, value, count).transpose(1, 2), None
    return attend


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
