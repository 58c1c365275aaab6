"""A vocabulary of sentencepiece made from text, as a fast tokenizer that gives every text back as it was."""

import io
from collections.abc import Sequence
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.data.byte_pairs import BYTES, END, UNKNOWN, as_bytes
from crt_exp.data.cache import cached, key_of
from crt_exp.data.text import content, lines_of, text_files

BLANK, LINE_END = "▁", "\n"                             # what stands for a blank; a piece of its own
LONGEST = 2**16                                              # bytes of a line that pieces are made from


def sentence_pieces(paths: str | Path | Sequence[str | Path], size: int, lowercase: bool = True,
                    cache_dir: str | Path | None = None):
    """A tokenizer of transformers with `size` pieces of a unigram model, or fewer where the text has no more, made from
    the text; kept in `cache_dir` by content. What no piece has is spelled in bytes.

    Raises DataError for a size without room for the 256 bytes and the characters of the text.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    files = text_files(paths)
    key = key_of("sentence pieces 1", size, lowercase, *[f"{file.suffix}:{content(file)}" for file in files])
    arrays = cached(cache_dir, key, lambda: {"json": as_bytes(tokenizer_of(scored(files, size, lowercase), lowercase))})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(arrays["json"].tobytes().decode()),
                                   unk_token=UNKNOWN, eos_token=END, bos_token=END)


def scored(files: Sequence[Path], size: int, lowercase: bool) -> list[tuple[str, float]]:
    """Pieces and their log chances, UNKNOWN first. One thread and the text as it is: the same text gives the same."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    lines = (line.lower() if lowercase else line for line in lines_of(files, " "))
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=size - 2,
                                   hard_vocab_limit=False, byte_fallback=True, num_threads=1, unk_piece=UNKNOWN,
                                   bos_id=-1, eos_id=-1, normalization_rule_name="identity", add_dummy_prefix=False,
                                   remove_extra_whitespaces=False, max_sentence_length=LONGEST, minloglevel=2)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DataError(f"sentencepiece makes no {size} pieces of this text, {BYTES} of them the bytes: {reason}. "
                        "Choose another task.vocabulary_size, or task.vocabulary=byte_pairs.") from None
    processor = SentencePieceProcessor(model_proto=model.getvalue())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


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
