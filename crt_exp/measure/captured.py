"""What attention layers are given, for probes of approximation: a pretrained model's own tensors while it reads a
text, or synthetic ones; and how far the hidden states behind each layer move when attention is approximated.

Legend: H query heads, Hkv key heads, L queries, S keys, d, dv. x and y are scaled, so that x.y is the logit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.attention import exact_attention, uniform_attention
from crt_exp.attention.checks import repeat_heads
from crt_exp.attention.statistics import for_query_heads, grouped_statistics
from crt_exp.attention.reference import attention_matrix
from crt_exp.features import FeatureMap
from crt_exp.features.base import Params
from crt_exp.mechanism import Mechanism
from crt_exp.models.transformer import Transformer
from crt_exp.samplers.noise import cached


@dataclass
class LayerInputs:
    """One call of an attention layer."""

    path: str
    x: Tensor  # (1, H, L, d)
    y: Tensor  # (1, Hkv, S, d)
    v: Tensor  # (1, Hkv, S, dv)
    causal: bool = False

    def __post_init__(self):
        self.heads, self.d = self.x.shape[1], self.x.shape[3]

    @cached
    def y_of_heads(self) -> Tensor:
        """The keys of each query head, (1, H, S, d)."""
        return repeat_heads(self.y, self.heads)

    @cached
    def output(self) -> Tensor:
        """Of exact attention, (1, H, L, dv)."""
        return exact_attention(self.x, self.y, self.v, causal=self.causal)

    @cached
    def uniform(self) -> Tensor:
        """The mean of the values that each query may see, (1, H, L, dv): the control."""
        return uniform_attention(self.x, self.y, self.v, causal=self.causal)

    def matrix(self, rows: Tensor) -> Tensor:
        """Those rows of the exact attention matrix, (1, H, rows, S) float64."""
        return attention_matrix(self.x, self.y, causal=self.causal, rows=rows)

    def fit(self, phi: FeatureMap) -> Params:
        """Parameters (1, H, 1, ...) for these tensors, the query heads of a group together."""
        return for_query_heads(phi.fit(grouped_statistics(self.x, self.y)), self.heads // self.y.shape[1])


class Synthetic:
    """q, k ~ N(0, scale^2) and v ~ N(0, 1), drawn for each sample;
    hidden states of a plain Transformer of random weights.

    turn: radians by which a query is turned away from the key at its position, in a random plane (q = cos(turn) k +
    sin(turn) g, g ~ N(0, scale^2)): so heads look that match positions. None: queries are independent of keys.

    That one has `depth` pre-norm layers of width heads d with an FFN four times as wide, torch's initial weights but
    for those of queries and keys, which give them standard deviation `scale` too, and reads tokens ~ N(0, 1). All
    bidirectional.
    """

    def __init__(self, length: int, heads: int, d: int, scale: float, depth: int, turn: float | None = None):
        self.length, self.heads, self.d, self.scale, self.depth, self.turn = length, heads, d, scale, depth, turn

    def layers(self, sample: int, seed: int) -> list[LayerInputs]:
        return [_normal(self.length, self.heads, self.d, self.scale, self.turn, sample, seed)]

    @torch.no_grad()
    def hidden_errors(self, mechanism: Mechanism, samples: int, seed: int) -> Tensor:
        """Relative error (Frobenius) of the hidden states behind each layer: (samples, depth). One seed has the same
        weights for all samples."""
        errors = []
        for sample in range(samples):
            model, tokens, exact = self.exact_pass(seed, 1000 * seed + sample)
            states = branches(model, tokens, self.made(replace(mechanism, seed=seed), sample)).states
            errors.append([relative_error(*pair) for pair in zip(states, exact.states)])
        return torch.tensor(errors)

    @torch.no_grad()
    def branch_errors(self, mechanism: Mechanism, seed: int) -> dict[str, list[float]]:
        """As the function of this name; weights and tokens of their own for each seed."""
        model, tokens, exact = self.exact_pass(seed, seed)
        made = self.made(replace(mechanism, seed=0), seed)
        return branch_errors(exact, branches(model, tokens, made), branches(model, tokens, {0: made[0]}))

    def exact_pass(self, weights: int, tokens: int) -> tuple[Transformer, Tensor, "Branches"]:
        """The model and the tokens of these seeds, and what its layers make of them."""
        size = (self.heads, self.d, self.scale, self.depth, weights)
        return _random_transformer(*size), *_exact_branches(*size, self.length, tokens)

    def made(self, mechanism: Mechanism, sample: int) -> dict[int, nn.Module]:
        return {i: mechanism.layer(self.heads, self.d, layer=self.depth * sample + i) for i in range(self.depth)}


class Branches(NamedTuple):
    """Of each layer, (1, L, width): what attention adds, and the hidden states behind it."""

    added: list[Tensor]
    states: list[Tensor]


def branch_errors(exact: Branches, every: Branches, first: Branches) -> dict[str, list[float]]:
    """Relative errors in each layer: of the hidden states behind it, which is the output of a model of so many layers
    (`output`), and of what attention adds to them, its projection included (`accumulated`), both with all attention
    approximated (`every`); of the latter with that of the first layer alone (`propagated`; `first`)."""
    pairs = {"output": (every.states, exact.states), "accumulated": (every.added, exact.added),
             "propagated": (first.added, exact.added)}
    return {kind: [relative_error(estimate, expected).item() for estimate, expected in zip(*pair)]
            for kind, pair in pairs.items()}


def branches(model: Transformer, h: Tensor, given: Mapping[int, nn.Module]) -> Branches:
    """With the attention of some blocks replaced by the modules given."""
    result = Branches([], [])
    for i, block in enumerate(model.blocks):
        own, block.attention = block.attention, given.get(i, block.attention)
        hook = block.proj.register_forward_hook(lambda module, inputs, output: result.added.append(output))
        h = block(h)
        hook.remove()
        block.attention = own
        result.states.append(h)
    return result


@lru_cache(maxsize=64)
def _normal(length: int, heads: int, d: int, scale: float, turn: float | None, sample: int, seed: int) -> LayerInputs:
    g = torch.Generator().manual_seed(1000 * seed + sample)
    q, k, v = torch.randn(3, 1, heads, length, d, generator=g)
    if turn is not None:
        q = math.cos(turn) * k + math.sin(turn) * q
    return LayerInputs("synthetic", scale * q / d**0.25, scale * k / d**0.25, v)


@lru_cache(maxsize=1)
def _random_transformer(heads: int, d: int, scale: float, depth: int, seed: int) -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(heads, depth, 4 * heads * d, heads * d, Mechanism.of("exact").layer)
    for block in model.blocks:  # torch's uniform weights give normalised tokens the variance 1/3
        block.qkv.weight.data[:2 * heads * d] *= 3**0.5 * scale
    return model.eval()


@lru_cache(maxsize=16)  # samples
def _exact_branches(heads: int, d: int, scale: float, depth: int, weights: int, length: int,
                    tokens: int) -> tuple[Tensor, Branches]:
    """The tokens, (1, L, heads d), and what the layers make of them."""
    h = torch.randn(1, length, heads * d, generator=torch.Generator().manual_seed(tokens))
    return h, branches(_random_transformer(heads, d, scale, depth, weights), h, {})


def relative_error(estimate: Tensor, expected: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """|estimate - expected| / |expected| in the Frobenius norm over `dims` (default all), float64."""
    error, size = (t.double().square().sum(dims).sqrt() for t in (estimate.double() - expected, expected))
    return error / size
