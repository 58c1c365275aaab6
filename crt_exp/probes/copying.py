"""What a model that copies keeps of it when its attention is swapped: passages that are said twice.

Legend: L tokens of a row.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from crt_exp import mechanism_text
from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import repeat_heads
from crt_exp.data.byte_pairs import running_blocks
from crt_exp.data.text import generator_of, official_file
from crt_exp.mechanism import Mechanism
from crt_exp.probes.bench import Layers, Swap
from crt_exp.probes.bench_pieces import UNSURE, TextBench, following
from crt_exp.probes.dense_peers import PEERS
from crt_exp.probes.texts import FOLDER
from crt_exp.tasks.objectives import repeated

ROWS = 4    # of a draw, and of the training text that codebooks and statistics are made of


# ---- texts


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


# ---- what is measured


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
