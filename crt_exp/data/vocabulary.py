"""A WordPiece vocabulary made from text."""

from collections import Counter
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.text import Paths, lines_of, made_of

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1000                                              # most frequent characters that are known


def wordpieces(paths: Paths, size: int, lowercase: bool = True, cache_dir: str | Path | None = None) -> list[str]:
    """`size` pieces, or fewer where the text has no more, the special ones first; kept in `cache_dir` by content.

    The same text gives the same vocabulary, in every process.
    Raises DataError for a size without room for the characters.
    """
    words = made_of(paths, cache_dir, ("wordpiece 2", size, lowercase),
                    lambda files: np.frombuffer("\n".join(trained(files, size, lowercase)).encode(), np.uint8))
    return words.tobytes().decode().split("\n")


def trained(files: list[Path], size: int, lowercase: bool) -> list[str]:
    """The library numbers the "##" characters in the order of a hash table, and breaks ties by it:
    they are given beforehand."""
    from tokenizers.implementations import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=lowercase)
    counts = Counter()
    for line in lines_of(files):
        counts.update(tokenizer.normalize(line))
    counts.pop(" ", None)
    alphabet = sorted(sorted(counts, key=lambda c: (-counts[c], c))[:ALPHABET])
    first = [*SPECIAL, *("##" + c for c in alphabet)]
    if size < len(first) + len(alphabet):
        raise DataError(f"A vocabulary of {size} pieces has no room for the {len(alphabet)} characters of this text; "
                        f"task.vocabulary_size={2 * len(first)} has.")
    tokenizer.train_from_iterator(lines_of(files), vocab_size=size, show_progress=False, special_tokens=first,
                                  initial_alphabet=alphabet, limit_alphabet=ALPHABET)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)
