"""Pretraining and fine-tuning of language models on any text, with any attention.

Encoders predict masked tokens. Decoders (task.causal) predict the next token. Text is tokenized into blocks once; masks
are drawn again each epoch.
Notation: B rows of a batch, L tokens of a block, n predicted tokens, V entries of the vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data import text as data
from crt_exp.experiments.data.sources import Hub, Place, refuse_data_dir
from crt_exp.experiments.data.vocabularies import new_tokenizer
from crt_exp.experiments.models import encoders
from crt_exp.experiments.tasks.base import (
    Batch,
    Metrics,
    Plan,
    Reader,
    Task,
    Tensors,
    exp,
    task_class,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, unknown
from crt_exp.validation import Count, FileName, Files, Share, Whole

HELD_OUT = 0.02  # share of the last blocks for validation, if it has no text


class MaskedModel(nn.Module):
    """Language model that computes logits only at predicted positions.

    For a small encoder, the head over V costs more than the encoder. call: further arguments of the model.
    """

    def __init__(self, model: nn.Module, call: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.chosen = None
        self.call = call or {}
        model.base_model.register_forward_hook(self._choose)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (n, V) and labels (n,) at predicted positions.

        input_ids, labels: (B, L); labels are -100 where nothing is predicted.
        """
        self.chosen = labels != data.IGNORED
        call = dict(self.call)
        if call and torch.compiler.is_compiling():
            # without a mask, compiled decoders of transformers search the positions for packed sequences
            call["attention_mask"] = torch.ones_like(input_ids)
        try:
            return self.model(input_ids=input_ids, **call).logits[0], labels[self.chosen]
        finally:
            self.chosen = None

    def _choose(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        if self.chosen is not None:
            output["last_hidden_state"] = output["last_hidden_state"][self.chosen][None]
        return output


class TextHub(Hub):
    """Hugging Face text data set: its split and text column."""

    split: str
    column: str


@task_class
class MLM(Task):
    """Language model of any text; see `conf/task/mlm.yaml` for the options.

    Raises:
        DataError: the text or the model is unavailable.
        ConfigError: options contradict each other.
    """

    text: FileName | Sequence[FileName] | None
    validation_text: FileName | Sequence[FileName] | None
    data_dir: str | None
    source: Place
    hub: TextHub
    model: FileName | None
    init: Annotated[str, Files(("scratch", "uptrain"))]
    sizes: dict[str, Any]
    vocabulary: FileName | None
    vocabulary_size: Count
    lowercase: bool
    block: Annotated[int, Field(ge=3)]
    cache_dir: str | None
    causal: bool = False
    calibration: Whole = 4
    repeat: Share = 0.0

    metric = "perplexity"
    lower_is_better = True
    reported = ("accuracy",)

    def __post_init__(self):
        self.check_options()
        self.kind = "AutoModelForCausalLM" if self.causal else "AutoModelForMaskedLM"
        self.call = {"use_cache": False} if self.causal else {}
        self.texts = self.named_texts()
        self.test = "test" if "test" in self.texts else None
        self.origin = encoders.origin_of(self.model, self.init)
        if self.origin is encoders.NEW:
            self.tokenizer = self.new_tokenizer()
            self.config = self.new_config()
        else:
            self.tokenizer = encoders.load_tokenizer(self.origin)
            self.config = encoders.load_config(self.origin)
        encoders.check_vocabulary(self.tokenizer, self.config.vocab_size, self.config.pad_token_id)
        encoders.check_length(self.config, self.block, "task.block")
        self.masking = None if self.causal else data.Masking.from_tokenizer(self.tokenizer)

    def check_options(self) -> None:
        if self.vocabulary is not None and (self.causal or self.model is not None):
            raise ConfigError("task.vocabulary: expected null with task.causal=true or task.model")
        if self.hub["name"] is not None and self.text is not None:
            raise ConfigError("task.text, task.hub.name: expected only one of them")
        if self.repeat and not self.causal:
            raise ConfigError(f"task.repeat={self.repeat}: only for decoders; set task.causal=true")

    # ---- text

    def named_texts(self) -> dict[str, list[Path]]:
        """Text of each split that has one."""
        named = {"train": self.text, "validation": self.validation_text}
        if self.hub["name"] is None:
            return data.split_files(named, self.data_dir, self.source)
        refuse_data_dir(self.data_dir, "task.hub.name")
        texts = {"train": [data.hub_text(self.hub)]}
        if self.validation_text is not None:
            texts["validation"] = data.text_files(self.validation_text)
        return texts

    def inputs(self) -> list[Path]:
        texts = dict(self.texts)
        if self.hub["name"] is not None:
            del texts["train"]  # a copy
        return list(chain.from_iterable(texts.values()))

    @cached_property
    def splits(self) -> dict[str, np.ndarray]:
        """Blocks of each split, (blocks, block) int32.

        For encoders (blocks, block - 2), because batches add [CLS] and [SEP].
        """
        length = self.block if self.causal else data.body_length(self.tokenizer, self.block)
        end = "\n" if self.causal else ""
        blocks = {}
        for split, text in self.texts.items():
            blocks[split] = data.running_blocks(text, self.tokenizer, length, self.cache_dir, end)
        if "validation" not in blocks:
            held_out = math.ceil(HELD_OUT * len(blocks["train"]))
            if held_out == len(blocks["train"]):
                raise DataError(
                    f"task.block={self.block}: the text fills only one block; expected at least 2; use a "
                    "longer text, a smaller task.block, or task.validation_text"
                )
            blocks["validation"] = blocks["train"][-held_out:]
            blocks["train"] = blocks["train"][:-held_out]
        return blocks

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        for rows in plan.rows(self.length(split), split):
            blocks = self.splits[split][rows]
            generators = map(plan.rng, rows)
            if not self.causal:
                framed = data.framed(blocks, self.tokenizer)
                yield self.masking(framed, data.uniforms(generators, self.block))
                continue
            ids = torch.from_numpy(blocks.astype(np.int64))
            if self.repeat:
                uniform = torch.from_numpy(data.uniforms(generators, 1)[:2, :, 0])
                ids = repeat_first_half(ids, self.repeat, uniform)
            yield {"input_ids": ids, "labels": following(ids)}

    # ---- model

    def new_tokenizer(self):
        if self.vocabulary is not None:
            return data.bert_tokenizer(self.vocabulary, self.lowercase)
        kind = "byte_pairs" if self.causal else "wordpiece"
        return new_tokenizer(
            kind,
            self.texts["train"],
            self.vocabulary_size,
            self.lowercase,
            self.cache_dir,
        )

    def new_config(self):
        import transformers

        kind = transformers.GPT2Config if self.causal else transformers.BertConfig
        known = [*kind().to_dict(), *kind.attribute_map, "intermediate_size"]
        for key in self.sizes:
            if key not in known:
                raise unknown("key", f"task.sizes.{key}", [f"task.sizes.{name}" for name in known])
        options = {}
        for mark in ("pad", "bos", "eos"):
            number = getattr(self.tokenizer, f"{mark}_token_id")
            if number is not None:
                options[f"{mark}_token_id"] = number
        options["max_position_embeddings"] = max(512, self.block)
        options["vocab_size"] = len(self.tokenizer)
        options |= self.sizes
        if self.causal and "intermediate_size" in options:  # the name that GPT-2 does not share
            options["n_inner"] = options.pop("intermediate_size")
        with encoders.buildable(f"task.sizes={dict(self.sizes)}"):
            config = kind(**options)
            with torch.device("meta"):  # uses neither memory nor random numbers
                transformers.AutoModel.from_config(config)
        return config

    def build(self, mechanism: Mechanism) -> nn.Module:
        model = encoders.load_model(self.kind, self.config, self.origin, mechanism)
        if self.origin.weights and not self.origin.noise:
            self.calibrate(model)
        return MaskedModel(model, self.call)

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"input_ids": batch["input_ids"], **self.call}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, labels = model(**batch)
        return F.cross_entropy(logits.float(), labels)

    def weight(self, batch: Batch) -> Tensor:
        return (batch["labels"] != data.IGNORED).sum()

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Loss in nats, perplexity and accuracy over predicted tokens."""

        def measure(batch: Batch) -> dict[str, Any]:
            logits, labels = model(**batch)
            return {
                "loss": F.cross_entropy(logits.float(), labels, reduction="sum"),
                "accuracy": (logits.argmax(-1) == labels).sum(),
                "count": len(labels),
            }

        counted = "predicted_tokens" if self.causal else "masked_tokens"
        means = reader.means(split, measure, counted)
        return means | {"perplexity": exp(means["loss"])}

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        encoders.save_model(model.model, inner, self.tokenizer, directory)


def repeat_first_half(ids: Tensor, share: float, draws: Tensor) -> Tensor:
    """ids (B, L), where rows with probability `share` repeat their first half.

    The second half is the first half, rotated to begin at a random position. draws: (2, B) uniform in [0, 1).
    """
    half = ids.shape[1] // 2
    at = (draws[1] * half).long().unsqueeze(1) + torch.arange(ids.shape[1] - half)
    again = torch.cat([ids[:, :half], ids.gather(1, at % half)], 1)
    return torch.where((draws[0] < share).unsqueeze(1), again, ids)


def following(ids: Tensor) -> Tensor:
    """Next-token labels (B, L); the last one is ignored."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], data.IGNORED)], 1)
