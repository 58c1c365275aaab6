"""Text for models that predict the next token: byte pairs made from it, and blocks that run on without marks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.text import Paths, cut, fingerprint, lines_of, made_of, made_tokenizer

END, UNKNOWN = "<|endoftext|>", "<unk>"                      # every byte is known: WikiText has <unk> for rare words
MARKS = {"unk_token": UNKNOWN, "eos_token": END, "bos_token": END}
BYTES = 256


def byte_pairs(paths: Paths, size: int, lowercase: bool = True, cache_dir: str | Path | None = None):
    """A tokenizer of transformers with `size` byte pairs, or fewer where the text has no more, made from the text;
    kept in `cache_dir` by content.

    Raises DataError for a size without room for the 256 bytes.
    """
    if size < BYTES + 2:
        raise DataError(f"A vocabulary of {size} byte pairs has no room for the {BYTES} bytes and two marks; give "
                        f"task.vocabulary_size={2 * BYTES} or more.")
    return made_tokenizer(paths, cache_dir, ("byte pairs 2", size, lowercase),
                          lambda files: trained(files, size, lowercase), **MARKS)


def trained(files: list[Path], size: int, lowercase: bool) -> str:
    """As JSON."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(running(files, UNKNOWN), trainers.BpeTrainer(
        vocab_size=size, special_tokens=[UNKNOWN, END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return tokenizer.to_str()


def running(files: Sequence[Path], unknown: str):
    """Lines that are not blank, with their ends: what follows a line matters too."""
    return (f"{line}\n" for line in lines_of(files, unknown))


def running_blocks(paths: Paths, tokenizer, length: int, cache_dir: str | Path | None = None) -> np.ndarray:
    """Text files (see `text_files`) joined and cut into blocks of `length` tokens: (n, length) int32, kept in
    `cache_dir` by content. What does not fill the last block is left out.

    Raises DataError where not one block is filled.
    """
    unknown = tokenizer.unk_token or UNKNOWN
    return made_of(paths, cache_dir, ("running blocks 2", length, fingerprint(tokenizer)),
                   lambda files: cut(running(files, unknown), tokenizer, length))
