"""What a composed configuration trains, without its data: the model on the meta device, and what a step of it costs.

A configuration does not say what the data decide: entries of a vocabulary, classes, the length of a row. `Facts` do.
FLOPs are two for each multiply-add of a matrix product, of the forward pass; all else is left out.
Legend: L tokens of a row, d of a head, H heads, m projections, M columns of their features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import nn

from crt_exp import attention
from crt_exp.config import ConfigError
from crt_exp.data import listops, protein
from crt_exp.data.image_values import VALUES
from crt_exp.data.labelled import BYTES, LONGEST
from crt_exp.data.symbols import Symbols
from crt_exp.mechanism import Mechanism
from crt_exp.models import language, lstm, vision
from crt_exp.models.classifier import Classifier
from crt_exp.models.conformer_transducer import PRESETS, subsampled
from crt_exp.models.recogniser import Recogniser

PUBLISHED = "google-bert/bert-base-uncased"                  # whose sizes are the defaults of transformers' BertConfig


@dataclass(frozen=True)
class Facts:
    """What data say. rows: of the training split; tokens: of a row in the mean, None: as the configuration has it;
    seconds: of all audio; written: symbols of a transcript."""

    rows: int | None = None
    tokens: int | None = None
    symbols: int | None = None
    classes: int | None = None
    outputs: int = 2
    seconds: float | None = None
    written: int = 0


class Outline(NamedTuple):
    """A model on the meta device and its sizes. ffn: width of the feed-forward layers. tokens: of a row. products:
    FLOPs of a row without attention. d: of a head."""

    model: nn.Module
    layers: int
    heads: int
    width: int
    ffn: int
    tokens: int
    products: float
    causal: bool = False

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def flops(self, mechanism: Mechanism) -> float:
        """Of the forward pass of a row."""
        if not self.heads:
            return self.products
        d = self.width // self.heads
        return self.products + self.layers * attention_flops(mechanism, self.tokens, self.heads, d, self.causal)


def outline(cfg: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    """Of a composed configuration. Raises ConfigError for a task of which none is known."""
    name = cfg.task["_target_"].rpartition(".")[2]
    if name not in KINDS:
        raise ConfigError(f"{cfg.task['_target_']}: known are the models of {' '.join(KINDS)}")
    with torch.device("meta"):
        return KINDS[name](cfg.task, mechanism, facts)


# ---- costs -----------------------------------------------------------------------------------------------------------


def attention_flops(mechanism: Mechanism, L: int, H: int, d: int, causal: bool) -> float:
    """Of one layer and a row: of a query to all keys, or of making features and of their two products with values.

    Raises ConfigError for a mechanism of which none is known."""
    options, kind = mechanism.options, mechanism.kind
    if issubclass(kind, attention.RandomFeatureAttention):
        columns = mechanism.map().width(mechanism.m) if mechanism.m is not None else d
        return 8.0 * L * H * d * columns
    if kind in (attention.Identity, attention.Uniform):
        return 0.0
    if kind not in READ:
        raise ConfigError(f"attention {mechanism.name}: its FLOPs are not known here")
    return 4.0 * L * H * d * READ[kind](options, L, 2 if causal else 3)


# keys that a query is multiplied with, by the options, L, and the blocks that lie around its own, which count with it
READ: dict[type, Callable[[dict[str, Any], int, int], float]] = {
    attention.Exact: lambda options, L, around: L / 2 if around == 2 else L,
    attention.Linformer: lambda options, L, around: 2 * options["rank"],   # mixed, and then attended to
    attention.Reformer: lambda options, L, around: options["hashes"] * options["chunk"] * around,
    attention.Window: lambda options, L, around: options["first"] + options["block"] * around}


def matrices(*modules: nn.Module) -> int:
    """Numbers of all matrices but embeddings and what attention learns: those that multiply each token."""
    found = {}
    for module in modules:
        tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        own = {id(p) for part in module.modules() if isinstance(part, attention.Linformer) for p in part.parameters()}
        found |= {id(p): p.numel() for p in module.parameters() if p.dim() > 1 and id(p) not in tables | own}
    return sum(found.values())


# ---- the models ------------------------------------------------------------------------------------------------------


def sequence(task: DictConfig, mechanism: Mechanism, symbols: int, length: int, tokens: int, causal: bool,
             predicted: float) -> Outline:
    """predicted: the share of the tokens that logits are computed of."""
    model = language.LanguageModel(described(task, symbols, length, causal), mechanism.layer)
    sizes = model.description.sizes
    products = 2.0 * tokens * (matrices(model.body) + predicted * sizes["d"] * symbols)
    return of_body(model, sizes, tokens, products, causal)


def described(task: DictConfig, symbols: int, length: int, causal: bool) -> language.LanguageDescription:
    sizes = language.sizes_of(task.preset or "tiny", dict(task.sizes), "task.sizes")
    tied = task.get("tied")
    return language.LanguageDescription(symbols, length, sizes, causal, task.positions or "learned",
                                True if tied is None else tied, task.dropout)


def of_body(model: nn.Module, sizes: language.TransformerSizes, tokens: int, products: float, causal: bool) -> Outline:
    return Outline(model, sizes["layers"], sizes["heads"], sizes["d"], sizes["d_ff"], tokens, products, causal)


def trembl(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    causal = task.direction == "unidirectional"
    tokens = task.max_length if task.chains else facts.tokens or task.max_length
    return sequence(task, mechanism, protein.TOKENS, task.max_length, tokens, causal, 1.0 if causal else task.share)


def books(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    causal = task.direction == "unidirectional"
    symbols = (facts.symbols or task.vocabulary_size) + (0 if causal else 1)
    tokens = facts.tokens if task.rows == "apart" and facts.tokens else task.max_length
    return sequence(task, mechanism, symbols, task.max_length, tokens, causal, 1.0 if causal else task.share)


def pixels(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    digits = task.dataset == "digits"
    values = (task.size or (8 if digits else 32)) ** 2 * (task.channels or (1 if digits else 3))
    return sequence(task, mechanism, VALUES + 1, values, values, True, 1.0)


ARENA = {"listops": (len(listops.SYMBOLS), 10, 1), "text": (BYTES, 2, 1), "retrieval": (BYTES, 2, 2),
         "image": (BYTES, 10, 1), "pathfinder": (BYTES, 2, 1)}            # symbols, classes, rows of an example


def lra(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    symbols, classes, together = ARENA[task.dataset]
    length = task.max_length or facts.tokens or LONGEST
    model = Classifier(described(task, symbols + 1, length, False), classes, mechanism.layer, together=together)
    rows = together * length
    return of_body(model, model.description.sizes, rows, 2.0 * rows * matrices(model.body), False)


def bert(task: DictConfig, facts: Facts):
    from transformers import BertConfig

    if task.model == PUBLISHED:
        return BertConfig(num_labels=facts.outputs)
    if task.model is not None:
        raise ConfigError(f"task.model = {task.model}: the sizes of {PUBLISHED} alone are known without its files")
    sizes = dict(task.sizes) | {"vocab_size": facts.symbols or task.vocabulary_size}
    return BertConfig(**{"max_position_embeddings": max(512, task.block)} | sizes)


def transformer(kind: str, config: Any, mechanism: Mechanism, tokens: int, predicted: float) -> Outline:
    import transformers

    model = getattr(transformers, kind).from_config(config)
    d, inner = config.hidden_size, config.intermediate_size
    products = 2.0 * tokens * (matrices(model.base_model.encoder) + predicted * d * (d + config.vocab_size))
    model = model if mechanism.is_exact else mechanism.swap(model)
    return Outline(model, config.num_hidden_layers, config.num_attention_heads, d, inner, tokens, products)


def mlm(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    return transformer("AutoModelForMaskedLM", bert(task, facts), mechanism, task.block, task.share)


def glue(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    kind = "AutoModelForSequenceClassification"
    return transformer(kind, bert(task, facts), mechanism, facts.tokens or task.max_length, 0.0)


def imagenet(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    digits, classes = task.dataset == "digits", tuple(map(str, range(facts.classes or 1000)))
    sizes = {vision.SIZES[key]: value for key, value in task.sizes.items() if value is not None}
    size, patch = (8, 2) if digits else (224, 16)
    description = (vision.known(task.model) if task.model
                   else vision.VisionDescription(vision.SIZED, size, vision.NEW | {"patch_size": patch} | sizes))
    options = description.options | ({"global_pool": task.pool} if task.pool else {})
    description = replace(description, classes=classes, size=task.size or description.size, options=options)
    model = vision.build(description, mechanism, drop_path=task.drop_path)
    patches = model.patch_embed.num_patches
    products = 2.0 * (patches + 1) * matrices(model.blocks) + 2.0 * patches * matrices(model.patch_embed)
    block = model.blocks[0]
    return Outline(model, len(model.blocks), block.attn.num_heads, model.embed_dim, block.mlp.fc1.out_features,
                   patches + 1, products)


def librispeech(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    sizes = PRESETS[task.preset] | dict(task.sizes)
    count = facts.symbols or task.pieces
    symbols = Symbols(task.symbols or "characters", tuple(map(str, range(count))))
    model = Recogniser(symbols, task.rate or 16000, sizes, mechanism).build()
    T, U, bands = facts.tokens or 1, facts.written + 1, sizes["mels"]
    first, second = matrices(model.encoder.subsampling.first), matrices(model.encoder.subsampling.second)
    heard = matrices(*model.encoder.layers, model.encoder.subsampling.out, model.joiner.heard)
    said = matrices(model.predictor.lstm, model.joiner.said)
    positions = first * 2 * T * (bands // 2) + second * T * subsampled(bands)
    products = 2.0 * (positions + T * heard + U * said + T * U * matrices(model.joiner.out))
    return Outline(model, sizes["layers"], sizes["heads"], sizes["dim"], sizes["ffn"], T, products)


def ptb(task: DictConfig, mechanism: Mechanism, facts: Facts) -> Outline:
    """A row is a word; heads there are none."""
    body = lstm.WordLSTM(facts.symbols, task.width, task.layers, task.dropout)
    classes = facts.symbols if task.softmax in ("full", "exact") else task.sampling.negatives + 1
    model = lstm.LSTMLanguageModel(body, lstm.FullSoftmax(body.embedding.weight), task.temperature)
    return Outline(model, task.layers, 0, task.width, 0, 1, 2.0 * (matrices(body.lstm) + classes * task.width))


KINDS: dict[str, Callable[[DictConfig, Mechanism, Facts], Outline]] = {
    "TrEMBL": trembl, "Books": books, "Pixels": pixels, "LRA": lra, "MLM": mlm, "GLUE": glue, "ImageNet": imagenet,
    "LibriSpeech": librispeech, "PTB": ptb}
