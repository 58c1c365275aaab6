"""What a language model of text predicts: hidden tokens, by an encoder, or the next token, by a decoder.

An objective says which class of transformers the model has, what a new one is made of, how text becomes blocks of
token ids, and what is to be predicted in them; `tasks/mlm.py` does the rest. Legend: B rows of a batch, L tokens of a
block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.config import ConfigError
from crt_exp.data import text as data
from crt_exp.data.byte_pairs import byte_pairs, running_blocks
from crt_exp.data.vocabulary import wordpieces

Cache = str | Path | None


@dataclass(frozen=True)
class Masked:
    """BERT's: a share of the tokens is hidden, and an encoder says what they were."""

    share: float
    whole_words: bool
    lowercase: bool

    kind, config_class, least = "AutoModelForMaskedLM", "BertConfig", 3  # [CLS], a token, [SEP]
    names = {}                                               # keys of task.sizes that its configuration calls otherwise
    call = {}                                                # further arguments of the model

    def tokenizer(self, files: Sequence[Path], size: int, cache_dir: Cache):
        from transformers import BertTokenizerFast

        words = wordpieces(files, size, self.lowercase, cache_dir)
        return BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}, do_lower_case=self.lowercase)

    def blocks(self, files: Any, tokenizer, length: int, cache_dir: Cache) -> np.ndarray:
        return data.local_blocks(files, tokenizer, length, cache_dir)

    def masking(self, tokenizer) -> data.Masking:
        return data.Masking.of(tokenizer, self.share, self.whole_words)

    def batch(self, blocks: np.ndarray, rows: np.ndarray, masking: data.Masking,
              rng: Callable[[int], np.random.Generator]) -> dict[str, Tensor]:
        return data.masked_blocks(blocks, rows, masking, rng)


@dataclass(frozen=True)
class NextToken:
    """GPT's: a decoder says at each token which one comes next. The first token of a block is not predicted.

    repeat: this share of the rows is repeated (`repeated`), which teaches a model to copy."""

    lowercase: bool
    repeat: float = 0.0

    kind, config_class, least = "AutoModelForCausalLM", "GPT2Config", 2
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    call = {"use_cache": False}

    def tokenizer(self, files: Sequence[Path], size: int, cache_dir: Cache):
        return byte_pairs(files, size, self.lowercase, cache_dir)

    def blocks(self, files: Any, tokenizer, length: int, cache_dir: Cache) -> np.ndarray:
        return running_blocks(files, tokenizer, length, cache_dir)

    def masking(self, tokenizer) -> None:
        """Nothing is drawn."""

    def batch(self, blocks: np.ndarray, rows: np.ndarray, masking: None,
              rng: Callable[[int], np.random.Generator]) -> dict[str, Tensor]:
        ids = torch.from_numpy(blocks[rows].astype(np.int64))
        if self.repeat:
            ids = repeated(ids, self.repeat, torch.from_numpy(data.uniforms(map(rng, rows), 1)[:2, :, 0]))
        return {"input_ids": ids, "labels": following(ids)}


def repeated(ids: Tensor, share: float, draws: Tensor) -> Tensor:
    """ids (B, L), in about `share` of whose rows the second half is the first half from a random place on and, behind
    its end, from its start; draws (2, B) uniform in [0, 1)."""
    half = ids.shape[1] // 2
    at = (draws[1] * half).long().unsqueeze(1) + torch.arange(ids.shape[1] - half)
    again = torch.cat([ids[:, :half], ids.gather(1, at % half)], 1)
    return torch.where((draws[0] < share).unsqueeze(1), again, ids)


def following(ids: Tensor) -> Tensor:
    """(B, L) -> (B, L): the token that comes next; behind the last one nothing is to be predicted."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], data.IGNORED)], 1)


def objective_of(causal: bool, share: float, whole_words: bool, lowercase: bool, repeat: float) -> Masked | NextToken:
    """Raises ConfigError for an option of masks where nothing is masked, and for one of decoders where they are not."""
    if causal and whole_words:
        raise ConfigError("task.whole_words=true masks whole words, and task.causal=true masks nothing: leave one out")
    if repeat and not causal:
        raise ConfigError("task.repeat repeats passages for decoders that are to copy: it takes task.causal=true")
    return NextToken(lowercase, repeat) if causal else Masked(share, whole_words, lowercase)
