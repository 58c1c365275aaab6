"""A model of sequences of symbols (amino acids, bytes, pieces of words, pixels) with any attention, and the folder in
which a run keeps it.

Performers' stack: embeddings, pre-norm Transformer, norm, logits. Unidirectional it predicts the next symbol,
bidirectional those that are masked. The folder `<run>/model` holds model.safetensors, with the attention's noise, and
config.json: sizes, symbols, and the attention by its names in conf/, which are compared and never built.

Legend: B sequences of a batch, L symbols of a sequence, V kinds of symbols.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.attention.fitted_once import make_room
from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.options import Count, Parameter, check_options, parameters
from crt_exp.mechanism import Mechanism
from crt_exp.models.folder import (CONFIG, check_numbers, check_shapes, description_in, folder_of, save_tensors,
                                   whole_folder)
from crt_exp.models.transformer import Transformer
from crt_exp.swap.swap import LayerMaker

KIND, WEIGHTS = "language_model", "model.safetensors"
Dropout = Annotated[float, Field(ge=0, lt=1)]
Positions = Literal["learned", "rotary", "none"]


class TransformerSizes(TypedDict):
    """What a preset holds; widths of the model (d), of its feed-forward layers (d_ff)."""

    heads: Count
    layers: Count
    d_ff: Count
    d: Count


PRESETS = {"tiny": (4, 2, 128, 64), "small": (4, 4, 512, 128),
           "performer6": (8, 6, 2048, 512),     # Performers 4.4, for sequences of 8192
           "performer36": (8, 36, 1024, 512)}   # Performers Fig. 6, from ProGen (Madani et al., 2020)


def sizes_of(preset: str, changes: dict[str, Any], option: str) -> TransformerSizes:
    """The sizes of a preset with other values for some keys; `option` is where those were given. Raises ConfigError."""
    hints = {key: Parameter(hint, False) for key, (hint, *_) in parameters(TransformerSizes).items()}
    check_options(option, hints, changes)
    sizes = dict(zip(TransformerSizes.__annotations__, PRESETS[preset])) | dict(changes)
    if sizes["d"] % sizes["heads"]:
        raise ConfigError(f"{option}: d = {sizes['d']} is no multiple of heads = {sizes['heads']}")
    return sizes


@dataclass(frozen=True)
class LanguageDescription:
    """All that a model is, without attention and weights.

    symbols: V. length: of the longest sequence; learned positions end there. tied: logits by the embeddings of the
    symbols. Raises ConfigError for sizes that do not go together.
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
            raise ConfigError("positions = rotary turn pairs of coordinates, and heads of d / heads = "
                              f"{self.sizes['d']} / {self.sizes['heads']} have an odd one")


class SequenceModel(nn.Module):
    """Embeddings and blocks of the model that a description says, with the attention that `make` makes for each layer;
    subclasses say what is made of its states.

    checkpointing: blocks are computed again in the backward pass, to the same gradients, in less memory.
    """

    def __init__(self, description: LanguageDescription, make: LayerMaker, checkpointing: bool = False):
        super().__init__()
        sizes, self.description = description.sizes, description
        self.symbol = nn.Embedding(description.symbols, sizes["d"])
        self.place = nn.Embedding(description.length, sizes["d"]) if description.positions == "learned" else None
        self.dropout = nn.Dropout(description.dropout)
        self.body = Transformer(**{"ffn" if key == "d_ff" else "dim" if key == "d" else key: value
                                   for key, value in sizes.items()}, make=make, causal=description.causal,
                                dropout=description.dropout, rotary=description.positions == "rotary",
                                checkpointing=checkpointing)
        self.norm = nn.LayerNorm(sizes["d"])

    def begin_small(self) -> None:
        for embedding in filter(None, (self.symbol, self.place)):
            nn.init.normal_(embedding.weight, std=0.02)  # GPT-2's: tied logits begin near 0

    def states(self, tokens: Tensor, key_mask: Tensor | None = None, pasts: Sequence | None = None) -> Tensor:
        """tokens (B, L) -> (B, L, d), before the last norm. key_mask (B, L), True = keep. pasts: of `begin`.

        Raises ValueError for more tokens than there are learned positions.
        """
        start = pasts[0].length if pasts else 0
        x = self.symbol(tokens)
        if self.place is not None:
            self._check_length(start + tokens.shape[1])
            x = x + self.place(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        return self.body(self.dropout(x), key_mask, pasts)

    def _check_length(self, length: int) -> None:
        most = self.description.length
        if length > most:
            raise ValueError(f"this model has learned positions for {most} symbols, got {length}")


class LanguageModel(SequenceModel):
    """Logits of the next symbol, or of masked ones."""

    def __init__(self, description: LanguageDescription, make: LayerMaker, checkpointing: bool = False):
        super().__init__(description, make, checkpointing)
        self.head = nn.Linear(description.sizes["d"], description.symbols)
        self.begin_small()
        if description.tied:
            self.head.weight = self.symbol.weight
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, chosen: Tensor | None = None,
                pasts: Sequence | None = None) -> Tensor:
        """tokens (B, L) -> logits (B, L, V), or (n, V) of the n places that `chosen` (B, L) names, row by row.

        key_mask (B, L), True = keep: what is padding; at its places the logits mean nothing. pasts: of `begin`. Raises
        ValueError for more tokens than there are learned positions.
        """
        x = self.states(tokens, key_mask, pasts)
        return self.head(self.norm(x if chosen is None else x[chosen]))

    def begin(self, window: int | None = None) -> list:
        """The pasts before the first symbol: each call of the model with them takes the next symbols of B sequences.

        With random features they are O(1) in the length, else keys and values of all, or of the last `window` symbols.
        For eval mode, without gradient.
        """
        if not self.description.causal:
            raise ValueError("a bidirectional model predicts masked symbols: only a unidirectional one goes symbol by "
                             "symbol")
        return self.body.begin(window)


# ---- the folder of a run ---------------------------------------------------------------------------------------------


class KeptLanguageModel(NamedTuple):
    """What a run kept. symbols: what its task says of them, as JSON. named: the folder, for messages."""

    description: LanguageDescription
    mechanism: Mechanism
    symbols: dict[str, Any]
    tensors: dict[str, Tensor]
    named: str

    def build(self, mechanism: Mechanism | None = None) -> LanguageModel:
        """In eval mode, with its own attention and noise; or its weights with the attention of another mechanism, whose
        causal layers, where their features are fitted, then want `calibrate_attention`."""
        model = LanguageModel(self.description, (mechanism or self.mechanism).layer)
        fill(model, self, mechanism or self.mechanism)
        return model.eval()


def keep(description: LanguageDescription, mechanism: Mechanism, symbols: dict[str, Any], tensors: dict[str, Tensor],
         directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the model's state. Raises OSError."""
    config = {"kind": KIND} | asdict(description) | {"attention": mechanism.saved(), "vocabulary": symbols}
    if description.tied:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    with whole_folder(directory) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        save_tensors(tensors, folder / WEIGHTS)


def load(run: str | Path, option: str) -> KeptLanguageModel:
    """What a run kept. Raises DataError, naming `option`, for what is none, ConfigError for attention that is gone."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = folder_of(run, option, "the directory of a run of a sequence model, such as one of task=trembl")
    named = f"{option} = {run}"
    try:
        config = description_in(folder, named)
        if config.pop("kind", None) != KIND:
            raise DataError(f"{named} is a run of another task: {folder / CONFIG} describes no sequence model")
        mechanism, symbols = Mechanism.of_saved(config.pop("attention"), named), config.pop("vocabulary")
        tensors = load_file(folder / WEIGHTS)
        check_numbers(tensors.items(), named)
        check_options("", LanguageDescription, config)
        kept = KeptLanguageModel(LanguageDescription(**config), mechanism, symbols, tensors, named)
        check_sizes(kept)
        return kept
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{named}: {folder} cannot be read: {type(error).__name__}: {error}") from None


def check_sizes(kept: KeptLanguageModel) -> None:
    """Raises DataError for a description whose model has other weights than were kept, before it takes memory."""
    layers, tensors = kept.description.sizes["layers"], dict(kept.tensors)
    if kept.description.tied:
        tensors["head.weight"] = tensors.get("symbol.weight")
    exact = Mechanism.of("exact").layer
    check_shapes(lambda: LanguageModel(kept.description, exact), layers, tensors, kept.named)


def fill(model: LanguageModel, kept: KeptLanguageModel, mechanism: Mechanism) -> bool:
    """Loads the kept weights; with them noise and statistics, where the model has the attention they were trained with.

    Returns whether it has. Raises ConfigError for a weight that is missing, superfluous or of another shape.
    """
    same = mechanism.describe() == kept.mechanism.describe()
    tensors = dict(kept.tensors)
    if kept.description.tied:
        tensors["head.weight"] = tensors.get("symbol.weight")
    taken = {name: tensor for name, tensor in tensors.items() if same or ".attention." not in name}
    make_room(model, taken)
    own = model.state_dict()
    wanted = {name for name in own if same or ".attention." not in name}
    wrong = sorted(wanted ^ taken.keys()) or sorted(name for name in wanted if taken[name].shape != own[name].shape)
    if wrong:
        shapes = [tuple(part[wrong[0]].shape) if wrong[0] in part else "none" for part in (taken, own)]
        raise ConfigError(f"{kept.named}: {wrong[0]} is {shapes[0]} there and {shapes[1]} in this model: choose the "
                          "sizes, length and positions of that run")
    model.load_state_dict(taken, strict=same)
    return same
