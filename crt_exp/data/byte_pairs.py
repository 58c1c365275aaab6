"""Text for models that predict the next token: byte pairs made from it, and blocks that run on without marks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.cache import cached, key_of
from crt_exp.data.text import content, fingerprint, lines_of, text_files, token_lists

END, UNKNOWN = "<|endoftext|>", "<unk>"                      # every byte is known: WikiText has <unk> for rare words
BYTES = 256


def byte_pairs(paths: str | Path | Sequence[str | Path], size: int, lowercase: bool = True,
               cache_dir: str | Path | None = None):
    """A tokenizer of transformers with `size` byte pairs, or fewer where the text has no more, made from the text;
    kept in `cache_dir` by content.

    Raises DataError for a size without room for the 256 bytes.
    """
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer

    if size < BYTES + 2:
        raise DataError(f"A vocabulary of {size} byte pairs has no room for the {BYTES} bytes and two marks; give "
                        f"task.vocabulary_size={2 * BYTES} or more.")
    files = text_files(paths)
    key = key_of("byte pairs 1", size, lowercase, *[f"{file.suffix}:{content(file)}" for file in files])
    arrays = cached(cache_dir, key, lambda: {"json": as_bytes(trained(files, size, lowercase).to_str())})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(arrays["json"].tobytes().decode()),
                                   unk_token=UNKNOWN, eos_token=END, bos_token=END)


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def trained(files: list[Path], size: int, lowercase: bool):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(running(files, UNKNOWN), trainers.BpeTrainer(
        vocab_size=size, special_tokens=[UNKNOWN, END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return tokenizer


def running(files: Sequence[Path], unknown: str):
    """Lines that are not blank, with their ends: what follows a line matters too."""
    return (f"{line}\n" for line in lines_of(files, unknown))


def running_blocks(paths: str | Path | Sequence[str | Path], tokenizer, length: int,
                   cache_dir: str | Path | None = None) -> np.ndarray:
    """Text files (see `text_files`) joined and cut into blocks of `length` tokens: (n, length) int32, kept in
    `cache_dir` by content. What does not fill the last block is left out.

    Raises DataError where not one block is filled.
    """
    files = text_files(paths)
    contents = [] if cache_dir is None else [f"{file.suffix}:{content(file)}" for file in files]
    return cached(cache_dir, key_of("running blocks 1", length, fingerprint(tokenizer), *contents),
                  lambda: {"blocks": cut(files, tokenizer, length)})["blocks"]


def cut(files: Sequence[Path], tokenizer, length: int) -> np.ndarray:
    texts = running(files, tokenizer.unk_token or UNKNOWN)
    arrays = (np.array(ids, np.int32) for ids in token_lists(texts, tokenizer))
    tokens = np.concatenate([np.zeros(0, np.int32), *arrays])
    if len(tokens) < length:
        raise DataError(f"The text has {len(tokens)} tokens, and one block needs {length}. Give more text, or a "
                        "shorter length.")
    return tokens[:len(tokens) // length * length].reshape(-1, length)
