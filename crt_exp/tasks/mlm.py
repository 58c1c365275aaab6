"""Pretraining and uptraining of language models, with any attention, on any text: encoders that predict masked tokens,
or (task.causal) decoders that predict the next one.

Local text is packed into blocks once, and its masks are drawn again each epoch; sets of the hub are streamed. Legend: B
rows of a batch, L tokens of a block, n predicted tokens, V entries of the vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data import text as data
from crt_exp.data.hub import Hub
from crt_exp.data.sources import no_folder
from crt_exp.options import Count, NotNegative, Parameter, Whole, check_options, checked, parameters
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders
from crt_exp.swap.calibration import fill_statistics, learns
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.tasks.objectives import objective_of

HELD_OUT = 0.02  # of the blocks, at the end of the text, where there is no text for validation


class MaskedModel(nn.Module):
    """A language model that computes logits of the tokens to predict alone: the head over V costs more than a small
    encoder. call: further arguments of the model."""

    def __init__(self, model: nn.Module, call: dict[str, Any] | None = None):
        super().__init__()
        self.model, self.chosen, self.call = model, None, call or {}
        model.base_model.register_forward_hook(self._choose)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, labels (B, L), labels -100 where nothing is to be predicted -> logits (n, V), labels (n,)."""
        self.chosen = labels != data.IGNORED
        try:
            return self.model(input_ids=input_ids, **self.call).logits[0], labels[self.chosen]
        finally:
            self.chosen = None

    def _choose(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        if self.chosen is not None:
            output["last_hidden_state"] = output["last_hidden_state"][self.chosen][None]
        return output


class TextHub(Hub):
    """What is read of it."""

    split: str
    validation: str | None
    column: str
    buffer: Whole
    validation_blocks: Count


@checked("task")
@dataclass(eq=False)
class MLM(Task):
    """See `conf/task/mlm.yaml` for the options.

    Raises DataError for text or a model that cannot be had, ConfigError for options that do not go together.
    """

    text: str | Sequence[str] | None
    validation_text: str | Sequence[str] | None
    data_dir: str | None
    hub: TextHub
    model: str | None
    init: str
    sizes: dict[str, Any]
    vocabulary: str | None
    vocabulary_size: Count
    lowercase: bool
    block: Annotated[int, Field(ge=2)]
    share: Annotated[float, Field(gt=0, lt=1)]
    whole_words: bool
    cache_dir: str | None
    causal: bool = False
    calibration: Whole = 4
    repeat: Annotated[float, Field(ge=0, le=1)] = 0.0

    metric, lower_is_better = "perplexity", True

    def __post_init__(self):
        self.objective = objective_of(self.causal, self.share, self.whole_words, self.lowercase, self.repeat)
        self.check_options()
        self.streamed = self.hub["name"] is not None
        if self.streamed:
            no_folder(self.data_dir, "task.hub.name")
        self.files = {} if self.streamed else self.local_files()
        self.test = "test" if "test" in self.files else None
        scratch = self.model is None and self.init == "scratch"
        self.origin = None if scratch else encoders.origin_of(self.model, self.init)
        self.tokenizer = encoders.load_tokenizer(self.origin) if self.origin else self.new_tokenizer()
        self.config = encoders.load_config(self.origin) if self.origin else self.new_config()
        data.check_vocabulary(self.tokenizer, self.config.vocab_size, self.config.pad_token_id)
        encoders.check_length(self.config, self.block, "task.block")
        self.masking = self.objective.masking(self.tokenizer)

    def check_options(self) -> None:
        if self.block < self.objective.least:
            raise ConfigError(f"task.block = {self.block}: it takes a whole number of at least {self.objective.least}")
        if self.causal and self.hub["name"] is not None:
            raise ConfigError("task.causal=true reads files: give task.text in place of task.hub.name")
        if self.causal and self.vocabulary is not None:
            raise ConfigError("task.vocabulary is a WordPiece vocabulary, and task.causal=true makes byte pairs: leave "
                              "it out, or name a model with a tokenizer of its own, task.model=...")
        if self.hub["name"] is not None and self.text is not None:
            raise ConfigError("task.text and task.hub.name both name a text: leave one of them out")
        if self.hub["name"] is not None and not (self.validation_text or self.hub["validation"]):
            raise ConfigError("a streamed text needs another one for validation: set task.hub.validation to a split of "
                              "the set, or task.validation_text")
        if self.model is None and self.init == "uptrain":
            raise ConfigError("task.init=uptrain starts from a pretrained model: name it, task.model=...")
        if self.model is not None and self.vocabulary is not None:
            raise ConfigError("task.vocabulary is for a new model (task.model=null): "
                              "task.model has a tokenizer of its own")

    # ---- text

    def local_files(self) -> dict[str, list[Path]]:
        """The files of each split, where there are any."""
        own = {"validation": data.text_files(self.validation_text)} if self.validation_text else {}
        if self.text is not None:
            no_folder(self.data_dir, "task.text")
            return {"train": data.text_files(self.text)} | own
        names = {"train": "train", "validation": "valid", "test": "test"}
        return {split: [data.official_file("wikitext2", name, self.data_dir)] for split, name in names.items()} | own

    def inputs(self) -> list[Path]:
        return [file for files in self.files.values() for file in files]

    @cached_property
    def blocks(self) -> dict[str, np.ndarray]:
        """(blocks, block) int32 of each split that is not streamed."""
        blocks = {split: self.packed(files) for split, files in self.files.items()}
        if self.streamed:
            blocks["validation"] = self.streamed_validation()
        if "validation" not in blocks:
            held_out = math.ceil(HELD_OUT * len(blocks["train"]))
            if held_out == len(blocks["train"]):
                raise DataError(f"The text fills one block of {self.block} tokens, and validation needs another. Give "
                                "more text, a smaller task.block, or task.validation_text.")
            blocks["train"], blocks["validation"] = blocks["train"][:-held_out], blocks["train"][-held_out:]
        return blocks

    def packed(self, files: Any) -> np.ndarray:
        return self.objective.blocks(files, self.tokenizer, self.block, self.cache_dir)

    def streamed_validation(self) -> np.ndarray:
        if self.validation_text:
            return self.packed(self.validation_text)
        body = data.body_length(self.tokenizer, self.block)
        lists = data.token_lists(self.documents(self.hub["validation"], buffer=0)(0), self.tokenizer)
        ids = np.fromiter(islice(chain.from_iterable(lists), self.hub["validation_blocks"] * body), np.int32)
        if len(ids) < body:
            raise DataError(f"{self.hub['name']}, {self.hub['validation']}: {len(ids)} tokens fill no block of "
                            f"{self.block}.")
        return data.framed(ids[:len(ids) // body * body].reshape(-1, body), self.tokenizer)

    def documents(self, split: str, **options: Any):
        return data.hub_documents(self.hub, split, self.hub["column"], **options)

    def length(self, split: str) -> int | None:
        return None if self.streamed and split == "train" else len(self.blocks[split])

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        if self.streamed and split == "train":
            yield from self.stream(plan)
            return
        blocks = self.blocks[split]
        for rows in plan.rows(len(blocks), split):
            yield self.objective.batch(blocks, rows, self.masking, plan.rng)

    def stream(self, plan: Plan) -> Iterator[Batch]:
        """From where the plan starts: a continued run reads, but does not mask, what came before."""
        documents = self.documents(self.hub["split"], rank=plan.rank, world=plan.world, seed=plan.seed,
                                   buffer=self.hub["buffer"])
        rows = plan.batch // plan.world // plan.micro
        return data.stream(documents, self.tokenizer, self.block, self.masking, rows, plan.seed, plan.rank,
                           plan.start * plan.micro)

    # ---- model

    def new_tokenizer(self):
        if self.vocabulary is not None:
            return data.bert_tokenizer(self.vocabulary, self.lowercase)
        if self.streamed:
            raise ConfigError("a new model on a streamed text needs a vocabulary: task.vocabulary=vocab.txt, or the "
                              "tokenizer of task.model")
        return self.objective.tokenizer(self.files["train"], self.vocabulary_size, self.cache_dir)

    def new_config(self):
        import transformers
        from transformers import AutoModel

        kind, names = getattr(transformers, self.objective.config_class), self.objective.names
        wanted = {key: size(kind, key, hint) for key, (hint, *_) in parameters(kind).items()}
        check_options("task.sizes", wanted | {ours: wanted[theirs] for ours, theirs in names.items()}, self.sizes)
        given = {"max_position_embeddings": max(512, self.block), "vocab_size": len(self.tokenizer), **self.sizes}
        marks = {f"{mark}_token_id": getattr(self.tokenizer, f"{mark}_token_id") for mark in ("pad", "bos", "eos")}
        known = {mark: number for mark, number in marks.items() if number is not None}
        with encoders.buildable(f"task.sizes = {dict(self.sizes)}"):
            config = kind(**known | {names.get(key, key): value for key, value in given.items()})
            if config.hidden_size % config.num_attention_heads:
                raise ConfigError(f"task.sizes: hidden_size = {config.hidden_size} is no multiple of "
                                  f"num_attention_heads = {config.num_attention_heads}")
            with torch.device("meta"):  # which takes neither memory nor random numbers
                AutoModel.from_config(config)
        return config

    def build(self, mechanism: Mechanism) -> nn.Module:
        origin = self.origin or encoders.Origin("", "task.model", False, False)
        model = encoders.load_model(self.objective.kind, self.config, origin, mechanism)
        if origin.weights and not origin.noise:
            self.calibrate(model)
        return MaskedModel(model, self.objective.call)

    def calibrate(self, model: nn.Module) -> None:
        """Fills the statistics that causal features are fitted to: the weights come from another attention."""
        if learns(model):
            read = [{"input_ids": batch["input_ids"], **self.objective.call}
                    for batch in islice(self.batches("train", Plan(8)), self.calibration)]
            if read:
                fill_statistics(model, read)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, labels = model(**batch)
        return F.cross_entropy(logits.float(), labels)

    def weight(self, batch: Batch) -> Tensor:
        return (batch["labels"] != data.IGNORED).sum()

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Over the tokens to predict: loss in nats, its exponential, and how many are guessed right."""
        loss = right = count = 0
        for batch in reader.batches(split):
            logits, labels = model(**batch)
            loss += float(F.cross_entropy(logits.float(), labels, reduction="sum"))
            right += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
        loss, right, count = reader.sum(loss, right, count)
        return {"loss": loss / count, "perplexity": exp(loss / count), "accuracy": right / count,
                "predicted_tokens" if self.causal else "masked_tokens": count}

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        encoders.keep(model.model, inner, self.tokenizer, directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        which = "next" if self.causal else "masked"
        return (f"mlm: perplexity {last['perplexity']:.2f}, {last['accuracy']:.1%} of the {which} tokens right "
                f"({last['split']}, step {last['step']})")


def size(kind: type, key: str, hint: Any) -> Parameter:
    """What a key of a configuration takes: its own annotation, but no counts below 1 and no numbers below 0."""
    default = getattr(kind(), key, None)
    bounded = {int: Count if default else Whole, float: NotNegative}
    return Parameter(bounded.get(type(default), hint), False)


def exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
