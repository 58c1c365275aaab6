"""A pretrained language model by its name, its tokenizer, and texts as rows of its tokens: for task=advise and
task=fidelity."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.advice.bench_pieces import HEADS, LENGTH, MASKED, NEXT, trained_on
from crt_exp.data.text import bert_tokenizer, check_vocabulary, local_blocks, running_blocks
from crt_exp.mechanism import Mechanism
from crt_exp.models import encoders

LEAST = 32  # tokens of a text
KINDS = {MASKED: "AutoModelForMaskedLM", NEXT: "AutoModelForCausalLM", None: "AutoModel"}  # None: predicts nothing


def opened(name: str, tokenizer: str | None) -> tuple[nn.Module, str | None, Any]:
    """The model in eval mode, what it predicts, and its tokenizer or the one that is named."""
    model, predicts = load(name)
    made = load_tokenizer(name, tokenizer)
    check_vocabulary(made, model.config.vocab_size)
    return model, predicts, made


def length_of(model: nn.Module, length: int | None, least: int = 1) -> int:
    """Tokens of a text: as asked, or those of the blocks of the model's run, of other models 512 or their positions.
    Raises ValueError for too many and too few."""
    most = min(positions(model), 2**20)
    length = min(max(trained_on(model) or LENGTH, least), most) if length is None else length
    if not least <= length <= most:
        raise ValueError(f"task.length = {length}: it takes {least} to {most} tokens; the model has {most} positions")
    return length


def rows_of(text: str | Sequence[str], predicts: str | None, tokenizer: Any, length: int,
            cache_dir: str | Path | None) -> Tensor:
    """(n, length) token ids of all the text, with [CLS] and [SEP] for encoders."""
    framed = predicts != NEXT and tokenizer.cls_token_id is not None
    rows = (local_blocks if framed else running_blocks)(text, tokenizer, length, cache_dir)
    return torch.from_numpy(rows.astype(np.int64))


def load(name: str) -> tuple[nn.Module, str | None]:
    """The model in eval mode, float32, and what it predicts."""
    origin = encoders.Origin(encoders.folder_of(name, "task.model"), "task.model", weights=True, noise=False)
    config = encoders.load_config(origin)
    refuse_other(name, encoders.saved_attention(config))
    kinds = [kind for architecture in config.architectures or () for end, kind in HEADS.items()
             if architecture.endswith(end)]
    predicts = kinds[0] if kinds else None
    model = encoders.load_model(KINDS[predicts], config, origin, Mechanism.of("exact")).eval()
    if model.main_input_name != "input_ids":
        raise ValueError(f"task.model = {name}: {type(model).__name__} reads {model.main_input_name}, not text")
    if config.is_encoder_decoder:
        raise ValueError(f"task.model = {name}: {type(model).__name__} has an encoder and a decoder: give an encoder "
                         "or a decoder alone")
    return model, predicts


def refuse_other(name: str, described: Mapping[str, Any]) -> None:
    if changed := encoders.differing_keys(dict(described), encoders.EXACT):
        raise ValueError(f"task.model = {name} was trained with another attention than exact ({', '.join(changed)}): "
                         "there is nothing that it should stay true to")


def load_tokenizer(model: str, name: str | None):
    """That of the model's folder, or the one that task.tokenizer names."""
    if name is None:
        origin = encoders.Origin(encoders.folder_of(model, "task.model"), "task.model", True, False)
        return encoders.load_tokenizer(origin)
    if name.endswith(".txt"):
        return bert_tokenizer(name)
    return encoders.load_tokenizer(encoders.Origin(name, "task.tokenizer", True, False))


def positions(model: nn.Module) -> int:
    """The longest sequence that the model can read."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2**31
    for path, part in model.named_modules():
        if path.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            most = min(most, part.num_embeddings - part.padding_idx - 1)  # RoBERTa counts from behind the padding index
    return most
