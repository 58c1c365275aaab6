"""A vocabulary of sentencepiece made from text, as a fast tokenizer that gives every text back as it was."""

import io
import random
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from crt_exp.data import DataError
from crt_exp.data.byte_pairs import BYTES, END, MARKS, UNKNOWN
from crt_exp.data.text import Paths, lines_of, made_tokenizer

BLANK, LINE_END = "▁", "\n"                             # what stands for a blank; a piece of its own
SENTENCES = 2_000_000                                        # lines that pieces are made from; of more a sample
LONGEST = 2**16                                              # bytes of a line that pieces are made from


def sentence_pieces(paths: Paths, size: int, lowercase: bool = True, cache_dir: str | Path | None = None):
    """A tokenizer of transformers with `size` pieces of a unigram model, or fewer where the text has no more, made from
    the text, of which more than SENTENCES lines are sampled; kept in `cache_dir` by content. What no piece has is
    spelled in bytes.

    Raises DataError for a size without room for the 256 bytes and the characters of the text.
    """
    return made_tokenizer(paths, cache_dir, ("sentence pieces 3", size, lowercase, SENTENCES),
                          lambda files: tokenizer_of(scored(files, size, lowercase), lowercase), **MARKS)


def scored(files: Sequence[Path], size: int, lowercase: bool) -> list[tuple[str, float]]:
    """Pieces and their log chances, UNKNOWN first. One thread and the text as it is: the same text gives the same."""
    lines = (line.lower() if lowercase else line for line in sample(lines_of(files, " "), SENTENCES))
    model = unigram_model(lines, f"{size} pieces of this text, {BYTES} of them the bytes",
                          "task.vocabulary_size, or task.vocabulary=byte_pairs", vocab_size=size - 2,
                          byte_fallback=True, unk_piece=UNKNOWN, add_dummy_prefix=False,
                          remove_extra_whitespaces=False, max_sentence_length=LONGEST)
    processor = loaded(model)
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def sample(lines: Iterable[str], count: int) -> list[str]:
    """So many of the lines, each as likely as another, the same for the same lines; all of them in their order where
    there are no more. Only these are in memory."""
    lines, draw = iter(lines), random.Random(0)
    chosen = [*islice(lines, count)]
    for seen, line in enumerate(lines, count + 1):
        if (place := draw.randrange(seen)) < count:
            chosen[place] = line
    return chosen


def unigram_model(texts: Iterable[str], wanted: str, instead: str, **options: Any) -> bytes:
    """sentencepiece's, trained by one thread on the texts as they are, so that the same texts give the same pieces.
    Raises DataError, which says what was `wanted` and what to choose `instead`."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, hard_vocab_limit=False,
                                   num_threads=1, bos_id=-1, eos_id=-1, normalization_rule_name="identity",
                                   minloglevel=2, **options)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DataError(f"sentencepiece makes no {wanted}: {reason}. Choose another {instead}.") from None
    return model.getvalue()


def loaded(model: bytes):
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model)


def tokenizer_of(pieces: list[tuple[str, float]], lowercase: bool) -> str:
    """As JSON: words begin with their blank, and a line ends in a piece of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram([*pieces, (LINE_END, 0.0)], unk_id=0, byte_fallback=True))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(LINE_END, "isolated"), pre_tokenizers.Metaspace(BLANK, prepend_scheme="never")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([UNKNOWN, END])
    return tokenizer.to_str()
