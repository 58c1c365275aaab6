"""Transformers on symbol sequences with any attention, and their saved folders.

Symbols are amino acids, bytes, word pieces or pixels. The model is the stack of Performers: embeddings, pre-norm
Transformer, norm, then logits of symbols (`LanguageModel`) or classes (`Classifier`). A unidirectional model predicts
the next symbol, a bidirectional one the masked symbols. The folder `<run>/model` holds model.safetensors, including
random projections, and config.json with sizes, symbols and attention.

Notation: B batch, L symbols of a sequence, V vocabulary size, H heads, d dimension.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crt_exp.attention.state import make_room
from crt_exp.experiments.models.folder import (
    Tensors,
    check_shapes,
    mismatch,
    open_folder,
    save_folder,
    without,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.swap.swap import LayerMaker
from crt_exp.validation import Count, check_options

KIND = "language_model"
Positions = Literal["learned", "rotary", "none"]


class TransformerSizes(TypedDict):
    """Sizes of a Transformer; d is the model width, d_ff the feed-forward width."""

    heads: Count
    layers: Count
    d_ff: Count
    d: Count


PRESETS = {
    "tiny": (4, 2, 128, 64),
    "small": (4, 4, 512, 128),
    "performer6": (8, 6, 2048, 512),  # Performers 4.4, for sequences of 8192
    "performer36": (8, 36, 1024, 512),
}  # Performers Fig. 6, from ProGen (Madani et al., 2020)


def sizes_of(preset: str, changes: dict[str, Any], option: str) -> TransformerSizes:
    """Return the sizes of a preset with changes. Raises ConfigError naming `option`."""
    sizes = dict(zip(TransformerSizes.__annotations__, PRESETS[preset])) | dict(changes)
    check_options(option, TransformerSizes, sizes)
    if sizes["d"] % sizes["heads"]:
        raise ConfigError(f"{option}.d={sizes['d']}: expected a multiple of heads={sizes['heads']}")
    return sizes


@dataclass(frozen=True)
class LanguageDescription:
    """The architecture of a model, without attention and weights.

    Raises ConfigError for inconsistent sizes.

    Attributes:
        symbols: vocabulary size V.
        length: maximum sequence length, which is the number of learned positions.
        tied: the output head shares the weights of the embeddings.
    """

    symbols: int
    length: int
    sizes: TransformerSizes
    causal: bool
    positions: Positions = "learned"
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        if self.positions == "rotary" and self.sizes["d"] // self.sizes["heads"] % 2:
            raise ConfigError(
                f"task.positions=rotary: d / heads = {self.sizes['d']} / {self.sizes['heads']}; expected "
                "even"
            )


class SequenceModel(nn.Module):
    """Embeddings and Transformer blocks; subclasses add the output head.

    `make` builds the attention of each layer. With `checkpointing` the backward pass recomputes the blocks, which needs
    less memory and gives the same gradients.
    """

    def __init__(
        self, description: LanguageDescription, make: LayerMaker, checkpointing: bool = False
    ):
        super().__init__()
        sizes = description.sizes
        self.description = description
        self.symbol = nn.Embedding(description.symbols, sizes["d"])
        self.place = (
            nn.Embedding(description.length, sizes["d"])
            if description.positions == "learned"
            else None
        )
        self.dropout = nn.Dropout(description.dropout)
        self.body = Transformer(
            heads=sizes["heads"],
            layers=sizes["layers"],
            ffn=sizes["d_ff"],
            dim=sizes["d"],
            make=make,
            causal=description.causal,
            dropout=description.dropout,
            rotary=description.positions == "rotary",
            checkpointing=checkpointing,
        )
        self.norm = nn.LayerNorm(sizes["d"])

    def initialize_embeddings(self) -> None:
        for embedding in filter(None, (self.symbol, self.place)):
            nn.init.normal_(embedding.weight, std=0.02)  # as in GPT-2: tied logits start near 0

    def states(
        self, tokens: Tensor, key_mask: Tensor | None = None, pasts: Sequence | None = None
    ) -> Tensor:
        """Tokens (B, L) -> hidden states (B, L, d) before the last norm.

        key_mask is (B, L), True = keep; `pasts` comes from `begin`. Raises ValueError for more tokens than learned
        positions.
        """
        start = pasts[0].length if pasts else 0
        x = self.symbol(tokens)
        if self.place is not None:
            if start + tokens.shape[1] > (most := self.description.length):
                raise ValueError(
                    f"{start + tokens.shape[1]} symbols: expected at most {most}, the learned positions"
                )
            x = x + self.place(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        return self.body(self.dropout(x), key_mask, pasts)


class LanguageModel(SequenceModel):
    """Predict the next symbol, or masked symbols."""

    def __init__(
        self, description: LanguageDescription, make: LayerMaker, checkpointing: bool = False
    ):
        super().__init__(description, make, checkpointing)
        self.head = nn.Linear(description.sizes["d"], description.symbols)
        self.initialize_embeddings()
        if description.tied:
            self.head.weight = self.symbol.weight
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        chosen: Tensor | None = None,
        pasts: Sequence | None = None,
    ) -> Tensor:
        """Tokens (B, L) -> logits (B, L, V).

        Args:
            key_mask: (B, L), True = keep. Logits of padding are undefined.
            chosen: boolean (B, L). Return the logits (n, V) of these n positions only.
            pasts: decoding states of `begin`.

        Raises:
            ValueError: more tokens than learned positions.
        """
        x = self.states(tokens, key_mask, pasts)
        if chosen is not None:
            x = x[chosen]
        return self.head(self.norm(x))

    def begin(self) -> list:
        """Decoding states before the first symbol, for eval mode without gradients.

        Each call of the model with these states consumes the next symbols of B sequences. Their size is O(1) in the
        length with random features; exact attention stores keys and values of all symbols.
        """
        return self.body.begin()


class Classifier(SequenceModel):
    """Classify sequences, or pairs of sequences (together=2).

    The model encodes the sequences of a pair separately. The head reads [a, b, a b, a - b], as in Long Range Arena.
    """

    def __init__(
        self,
        description: LanguageDescription,
        classes: int,
        make: LayerMaker,
        checkpointing: bool = False,
        together: int = 1,
    ):
        super().__init__(description, make, checkpointing)
        d = description.sizes["d"]
        self.together = together
        width = d if together == 1 else 4 * d
        self.head = nn.Sequential(nn.Linear(width, d), nn.GELU(), nn.Linear(d, classes))
        self.initialize_embeddings()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L) -> logits (B / together, classes). key_mask (B, L), True = keep."""
        states = self.norm(self.states(tokens, key_mask))
        if key_mask is None:
            key_mask = states.new_ones(states.shape[:2], dtype=torch.bool)
        sums = torch.where(key_mask[..., None], states, 0.0).sum(1)
        pooled = sums / key_mask.sum(1, keepdim=True).to(sums).clamp(
            min=1
        )  # mean over kept positions
        if self.together == 2:
            a, b = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([a, b, a * b, a - b], -1)
        return self.head(pooled)


# ---- a pre-norm Transformer body, which the speed benchmarks use too -------------------------------------------------
class Rotary(nn.Module):
    """Rotary position embedding (Su et al., 2021), in the layout of transformers.

    Coordinates i and i + d/2 of a head rotate by position * base^(-2i/d).
    """

    def __init__(self, d: int, base: float = 10_000.0):
        super().__init__()
        self.register_buffer(
            "rates", base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d), persistent=False
        )

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions start, start + 1, ...: (length, d) each, float32."""
        places = torch.arange(start, start + length, device=self.rates.device, dtype=torch.float32)
        angles = (places[:, None] * self.rates).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(t: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys (B, H, L, d)."""
    first, second = t.chunk(2, -1)
    cos, sin = (part.to(t.dtype) for part in turn)
    return t * cos + torch.cat([-second, first], -1) * sin


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + ffn(norm(x)); x (B, L, dim).

    Dropout applies to both residual branches.
    """

    def __init__(self, dim: int, heads: int, ffn: int, attention: nn.Module, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn), nn.GELU(), nn.Linear(ffn, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
        past=None,
    ) -> Tensor:
        """Apply the block; `turn` is the output of `Rotary`.

        `past` is the decoding state of the attention, which the call updates.
        """
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # each (B, H, L, d)
        q, k = (rotate(q, turn), rotate(k, turn)) if turn else (q, k)
        out = self.attention(q, k, v, key_mask) if past is None else past.step(q, k, v)
        x = x + self.dropout(self.proj(out.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class Transformer(nn.Module):
    """A stack of pre-norm blocks; (B, L, dim) -> (B, L, dim).

    Args:
        ffn: width of the feed-forward layers.
        dim: width of the model.
        make: builds the attention of a layer.
        rotary: rotate queries and keys by their positions.
        checkpointing: the backward pass recomputes each block. Training then stores O(B L dim) numbers a block.
    """

    def __init__(
        self,
        heads: int,
        layers: int,
        ffn: int,
        dim: int,
        make: LayerMaker,
        causal: bool = False,
        *,
        dropout: float = 0.0,
        rotary: bool = False,
        checkpointing: bool = False,
    ):
        super().__init__()
        attentions = (make(heads, dim // heads, causal=causal, layer=i) for i in range(layers))
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, heads, ffn, attention, dropout) for attention in attentions
        )
        self.rotary = Rotary(dim // heads) if rotary else None
        self.checkpointing = checkpointing

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, pasts: Sequence | None = None
    ) -> Tensor:
        """Apply the blocks. key_mask (B, L), True = keep.

        `pasts` are decoding states of `begin`, which the call updates, without gradients.
        """
        if pasts and key_mask is not None:
            raise ValueError(
                "key_mask: not supported when decoding with pasts; expected sequences of one length"
            )
        start = pasts[0].length if pasts else 0
        turn = self.rotary and self.rotary(start, x.shape[1])
        again = self.checkpointing and not pasts and torch.is_grad_enabled()
        for block, past in zip(self.blocks, pasts or [None] * len(self.blocks)):
            x = (
                checkpoint(block, x, key_mask, turn, use_reentrant=False)
                if again
                else block(x, key_mask, turn, past)
            )
        return x

    def begin(self) -> list:
        """Decoding states of all layers before the first token; causal attention only."""
        return [block.attention.past() for block in self.blocks]


# ---- the folder of a run ---------------------------------------------------------------------------------------------
class SavedLanguageModel(NamedTuple):
    """A saved language model. `symbols` describes the vocabulary as JSON.

    `named` is the name of the folder in errors.
    """

    description: LanguageDescription
    mechanism: Mechanism
    symbols: dict[str, Any]
    tensors: Tensors
    named: str

    def untied(self) -> Tensors:
        """The tensors, including head weights that are tied to the embeddings."""
        tied = self.description.tied and "symbol.weight" in self.tensors
        return self.tensors | ({"head.weight": self.tensors["symbol.weight"]} if tied else {})

    def build(self, mechanism: Mechanism | None = None) -> LanguageModel:
        """Build the model in eval mode.

        By default it has its own attention and random projections. With another mechanism it keeps its other weights,
        and causal layers with fitted features need `calibrate_attention`.
        """
        model = LanguageModel(self.description, (mechanism or self.mechanism).layer)
        load_weights(model, self, mechanism or self.mechanism)
        return model.eval()


def save_model(
    description: LanguageDescription,
    mechanism: Mechanism,
    symbols: dict[str, Any],
    tensors: Tensors,
    directory: Path,
) -> None:
    """Write `<directory>/model` atomically from the model's state. Raises OSError."""
    config = (
        {"kind": KIND}
        | asdict(description)
        | {"attention": mechanism.to_saved(), "vocabulary": symbols}
    )
    if description.tied:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    save_folder(directory, config, tensors)


def load(run: str | Path, option: str) -> SavedLanguageModel:
    """Load the model of a run.

    Raises DataError, naming `option`, if the run holds no such model, and ConfigError for an unknown attention.
    """
    named = f"{option}={run}"
    with open_folder(run, option, KIND, "a sequence model, such as task=trembl") as (
        _,
        config,
        tensors,
    ):
        mechanism = Mechanism.from_saved(config.pop("attention"), named)
        symbols = config.pop("vocabulary")
        check_options("", LanguageDescription, config)
        saved = SavedLanguageModel(
            LanguageDescription(**config), mechanism, symbols, tensors, named
        )
        exact = Mechanism.of("exact").layer
        layers = saved.description.sizes["layers"]
        check_shapes(lambda: LanguageModel(saved.description, exact), layers, saved.untied(), named)
        return saved


def load_weights(model: LanguageModel, source: SavedLanguageModel, mechanism: Mechanism) -> bool:
    """Load saved weights into a model; return whether its attention is the same.

    Random projections and statistics are loaded only for the same attention. Raises ConfigError for weights that are
    missing, unexpected or of another shape.
    """
    same = mechanism.describe() == source.mechanism.describe()
    saved = source.untied()
    if not same:
        saved = without(saved, ".attention.")
    make_room(model, saved)
    expected = model.state_dict()
    if not same:
        expected = without(expected, ".attention.")
    if wrong := mismatch(expected, saved):
        raise ConfigError(
            f"{source.named}: {wrong}; use the sizes, length and positions of that run"
        )
    model.load_state_dict(saved, strict=same)
    return same
