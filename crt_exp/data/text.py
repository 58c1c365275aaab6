"""Text as token ids: tokenizers from a vocabulary file, and masked blocks for masked language models.

Nothing here draws from a global generator: the masks of a block come from a generator that the caller names (such as
`Plan.rng`), those of a stream from (seed, rank, step), so a run that resumes sees what the uninterrupted run would have
seen.
Legend: B sequences of a batch, L tokens of a sequence, V entries of a vocabulary.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp.data import DataError, check_regular, wordnet
from crt_exp.data.cache import cached, key_of
from crt_exp.data.endings import hidden
from crt_exp.data.hub import Hub, hub_examples, text_folder
from crt_exp.data.sources import SOURCES, missing

IGNORED = -100                                               # the label of a token that has no share in the loss
SUFFIXES = (".txt", ".tokens", ".raw")
GROUP = 256                                                  # texts that a tokenizer takes at once, in parallel
LONGEST_WORD = 100_000                                       # characters


# -------------------------------------------------------------------------------------------------- tokenizers
def bert_tokenizer(vocabulary: str | Path, lowercase: bool = True):
    """A BERT WordPiece tokenizer from a vocab.txt (or the folder that holds one), without any network.

    Raises DataError where the file is missing or is not a BERT vocabulary.
    """
    from transformers import BertTokenizerFast

    path = Path(vocabulary).expanduser()
    path = path / "vocab.txt" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"The vocabulary {path} is not there. "
                        "Get vocab.txt of the model from its page on huggingface.co\n"
                        "(bert-base-uncased: https://huggingface.co/google-bert/bert-base-uncased) and give its path.")
    words = [line for _, line in numbered_lines(path)]
    ids = {word: i for i, word in enumerate(words)}
    for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        if word not in ids:
            raise DataError(f"{path}: {word} is not among its {len(words)} lines, so this is not a BERT vocabulary.")
    if len(ids) != len(words):
        twice = Counter(words).most_common(1)[0][0]
        raise DataError(f"{path}: {twice!r} stands there twice; each line must be another token.")
    return BertTokenizerFast(vocab=ids, do_lower_case=lowercase)


def check_vocabulary(tokenizer, vocab_size: int, pad_token_id: int | None = None) -> None:
    """Raise DataError where the tokenizer makes ids that the model has no embedding for, or pads with another token.

    vocab_size, pad_token_id: those of the model's configuration; a model may have unused entries at the end.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise DataError(f"Tokenizer and model disagree: the tokenizer's ids go up to {largest} ({token!r}), the "
                        f"model's vocabulary ends at {vocab_size - 1}.\nUse the tokenizer that the model was trained "
                        f"with, or give a new model vocab_size={largest + 1}.")
    if pad_token_id is not None and tokenizer.pad_token_id != pad_token_id:
        raise DataError(f"Tokenizer and model disagree: the tokenizer pads with id {tokenizer.pad_token_id}, the model "
                        f"takes id {pad_token_id} for padding.\nUse the tokenizer that the model was trained with.")


def fingerprint(tokenizer) -> str:
    """Equal for tokenizers that turn every text into the same ids, however they were used before: 64 hex digits."""
    import tokenizers

    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        varying = ("truncation", "padding")  # set by each call
        state = {key: value for key, value in state.items() if key not in varying}
    else:
        state = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    state = [state, getattr(tokenizer, "truncation_side", ""), tokenizers.__version__]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- files
def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without line ends and byte order mark. Raises DataError."""
    check_file(path)
    try:
        with open(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{path}, line {number}: not UTF-8 text.") from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error}).") from None


def text_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files meant by `paths`: files, all .txt, .tokens and .raw files of folders, sorted, and the text that is
    known as "wordnet". Raises DataError."""
    files = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        path = text_path(path)
        if not path.exists():
            raise DataError(f"The text {path} is not there. Give a text file (UTF-8), a folder of "
                            f"{' '.join(SUFFIXES)} files, or {wordnet.NAME}, which needs no file.")
        inside = [path] if not path.is_dir() else sorted(
            file for file in path.rglob("*") if file.suffix in SUFFIXES and not hidden(file.relative_to(path)))
        if not inside:
            raise DataError(f"{path}: no {' '.join(SUFFIXES)} file in this folder.")
        files += inside
    for file in files:
        check_file(file)
    return files


def text_path(name: str | Path) -> Path:
    """A path as it is typed; the name of the text that comes with a package is its file, unless one is called so."""
    path = Path(name).expanduser()
    return wordnet.wordnet_file() if str(name) == wordnet.NAME and not path.exists() else path


def check_file(file: Path) -> None:
    """Raises DataError for what is no regular file: a pipe would be waited for without end."""
    try:
        check_regular(file)
    except OSError as error:
        raise DataError(f"{file}: the file cannot be read ({error.strerror or error}).") from None
    except ValueError as error:
        raise DataError(f"{file} is {error}.") from None


def lines_of(files: Iterable[Path], unknown: str = "[UNK]") -> Iterator[str]:
    """Lines that are not blank; WikiText's own marks (in .tokens files) undone, its <unk> turned into `unknown`.

    Raises DataError for a word of more than LONGEST_WORD characters: tokenizers take minutes for one of a million."""
    for file in files:
        for number, line in numbered_lines(file):
            if len(line) > LONGEST_WORD and (longest := max(map(len, line.split()), default=0)) > LONGEST_WORD:
                raise DataError(f"{file}, line {number}: a word of {longest} characters, and at most {LONGEST_WORD} "
                                "are taken. Is this a text? Break it up, or leave it out.")
            if line.strip():
                yield untokenized(line, unknown) if file.suffix == ".tokens" else line


def untokenized(line: str, unknown: str) -> str:
    for mark in "-,.":
        line = line.replace(f" @{mark}@ ", mark)
    return line.replace("<unk>", unknown)


def official_file(name: str, split: str, data_dir: str | Path | None = None, source: str = "auto") -> Path:
    """The file of "ptb" or "wikitext2" for train, valid or test; data_dir: by default $CRT_DATA/NAME.
    source: auto, files or hub. Raises DataError."""
    place = ("train", "valid", "test").index(split)
    folder = text_folder(source, name, data_dir)
    path = folder / Path(SOURCES[name].files[place].path).name if folder else None
    if path is None or not path.is_file():
        raise missing(name, path, place)
    return path


# ----------------------------------------------------------------------------------------------------- packing
def token_lists(texts: Iterable[str], tokenizer) -> Iterator[list[int]]:
    """The ids of each text, without special tokens."""
    texts = iter(texts)
    while group := list(islice(texts, GROUP)):
        yield from tokenizer(group, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
                             verbose=False)["input_ids"]


class Spans(NamedTuple):
    """The tokens of a text, and the characters that each stands for: (first, behind the last)."""

    ids: list[int]
    places: list[tuple[int, int]]


def token_spans(texts: Iterable[str], tokenizer) -> Iterator[Spans]:
    """As `token_lists`, by a fast tokenizer."""
    texts = iter(texts)
    while group := list(islice(texts, GROUP)):
        coded = tokenizer(group, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
                          return_offsets_mapping=True, verbose=False)
        yield from map(Spans, coded["input_ids"], coded["offset_mapping"])


def cut(texts: Iterable[str], tokenizer, length: int) -> np.ndarray:
    """Join the texts and cut them into pieces of `length` tokens: (n, length) int32.

    What does not fill the last one is left out. Raises DataError where not one is filled.
    """
    arrays = (np.array(ids, np.int32) for ids in token_lists(texts, tokenizer))
    tokens = np.concatenate([np.zeros(0, np.int32), *arrays])
    if len(tokens) < length:
        raise DataError(f"The text has {len(tokens)} tokens, and one block needs {length}. Give more text, or a "
                        "shorter length.")
    return tokens[:len(tokens) // length * length].reshape(-1, length)


def pack(texts: Iterable[str], tokenizer, length: int) -> np.ndarray:
    """`cut` into blocks [CLS] ... [SEP] of `length` tokens: (n, length) int32."""
    return framed(cut(texts, tokenizer, body_length(tokenizer, length)), tokenizer)


def body_length(tokenizer, length: int) -> int:
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        raise DataError(f"{type(tokenizer).__name__} has no [CLS] or [SEP] token: "
                        "a tokenizer of a BERT-type encoder is needed.")
    if length < 3:
        raise DataError(f"length={length} leaves no room for text between [CLS] and [SEP]; at least 3 is needed.")
    return length - 2


def framed(bodies: np.ndarray, tokenizer) -> np.ndarray:
    """(n, length - 2) -> (n, length) int32."""
    ends = ((0, 0), (1, 1))
    marks = ((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return np.pad(bodies, ends, constant_values=marks).astype(np.int32)


Paths = str | Path | Sequence[str | Path]


def local_blocks(paths: Paths, tokenizer, length: int, cache_dir: str | Path | None = None) -> np.ndarray:
    """`pack` of text files (see `text_files`), kept in `cache_dir` by their content: (n, length) int32.
    Raises DataError.

    WikiText-2: `local_blocks(official_file("wikitext2", "train"), ...)`.
    """
    unknown = tokenizer.unk_token or "<unk>"
    return made_of(paths, cache_dir, ("blocks 2", length, fingerprint(tokenizer)),
                   lambda files: pack(lines_of(files, unknown), tokenizer, length))


def made_of(paths: Paths, cache_dir: str | Path | None, key: Sequence[Any],
            make: Callable[[list[Path]], np.ndarray]) -> np.ndarray:
    """`make` of text files (see `text_files`), kept in `cache_dir` by the key and their content. Raises DataError."""
    files = text_files(paths)
    contents = [] if cache_dir is None else [f"{file.suffix}:{content(file)}" for file in files]
    return cached(cache_dir, key_of(*key, *contents), lambda: {"made": make(files)})["made"]


def made_tokenizer(paths: Paths, cache_dir: str | Path | None, key: Sequence[Any], make: Callable[[list[Path]], str],
                   **marks: str):
    """A tokenizer of transformers of the JSON that `make` gives, which is kept as in `made_of`."""
    kept = made_of(paths, cache_dir, key, lambda files: np.frombuffer(make(files).encode(), np.uint8))
    return fast_tokenizer(kept.tobytes().decode(), **marks)


def fast_tokenizer(json: str, **marks: str):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json), **marks)


def content(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ----------------------------------------------------------------------------------------------------- masking
@dataclass(frozen=True, eq=False)
class Masking:
    """BERT's corruption: `share` of the tokens are to be predicted; of these 80% become [MASK], 10% a random token,
    10% stay. Special tokens (and unknown ones) are never chosen.
    Every row that has a token to choose gets at least one.

    With whole words, a word and its "##" pieces are chosen together, with the same probability `share`.
    Source: Devlin et al., 2019, section 3.1 and the authors' whole-word option.
    """

    mask_id: int
    special: np.ndarray                                      # (V,) bool
    continues: np.ndarray                                    # (V,) bool: belongs to the word of the token before
    share: float = 0.15
    drawn: int = 0                                           # a random token is one of the first so many; 0: of all

    @classmethod
    def of(cls, tokenizer, share: float = 0.15, whole_words: bool = False) -> "Masking":
        """Raises DataError for a tokenizer without mask token, or without "##" pieces where whole words are wanted."""
        if tokenizer.mask_token_id is None:
            raise DataError(f"{type(tokenizer).__name__} has no mask token: "
                            "a tokenizer of a masked language model is needed.")
        if not 0 < share < 1:
            raise DataError(f"A share of {share} of the tokens cannot be masked; "
                            "give a number between 0 and 1, such as 0.15.")
        vocabulary = tokenizer.get_vocab()
        pieces = [i for token, i in vocabulary.items() if token.startswith("##")] if whole_words else []
        if whole_words and not pieces:
            raise DataError(f"{type(tokenizer).__name__} has no '##' pieces: "
                            "whole words can be masked with WordPiece only.")
        size = max(vocabulary.values()) + 1
        return cls(tokenizer.mask_token_id, table(size, tokenizer.all_special_ids), table(size, pieces), share)

    def __call__(self, ids: np.ndarray, uniform: np.ndarray) -> dict[str, Tensor]:
        """ids (B, L) -> {"input_ids", "labels"}, (B, L) int64 each; the label is -100 where nothing is to be predicted.

        uniform: (3, B, L) numbers in [0, 1), see `uniforms`: which tokens are chosen, what becomes of them, and into
        which random token they turn. NumPy throughout: on batches this small, torch's threads cost more than the work.
        """
        score, action, token = uniform
        chosen = self.chosen(ids, score)
        random = (token * float(self.drawn or len(self.special))).astype(np.int64)
        inputs = np.where(chosen & (action < 0.8), self.mask_id, ids)
        inputs = np.where(chosen & (action >= 0.9), random, inputs)
        return {"input_ids": torch.from_numpy(inputs.astype(np.int64)),
                "labels": torch.from_numpy(np.where(chosen, ids, IGNORED).astype(np.int64))}

    def chosen(self, ids: np.ndarray, score: np.ndarray) -> np.ndarray:
        """(B, L) bool: the tokens to predict."""
        word = np.maximum(np.cumsum(~self.continues[ids], axis=1) - 1, 0)
        # one score for all pieces of a word
        score = np.where(self.special[ids], 2.0, np.take_along_axis(score, word, axis=1))
        return score <= np.clip(score.min(axis=1, keepdims=True), self.share, 1.0)


def table(size: int, members: Sequence[int]) -> np.ndarray:
    flags = np.zeros(size, bool)
    flags[np.array(members, np.int64)] = True
    return flags


def uniforms(generators: Iterable[np.random.Generator | torch.Generator], length: int) -> np.ndarray:
    """What `Masking` draws, row by row from a generator of the row's own: (3, B, length) float64."""
    return np.stack([torch.rand(3, length, generator=draw, dtype=torch.float64).numpy()
                     if isinstance(draw, torch.Generator) else draw.random((3, length)) for draw in generators], axis=1)


def generator_of(*numbers: int) -> torch.Generator:
    """Independent streams for different tuples of non-negative integers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def masked_blocks(blocks: np.ndarray, rows: Sequence[int], masking: Masking,
                  rng: Callable[[int], np.random.Generator | torch.Generator]) -> dict[str, Tensor]:
    """The batch of the given rows of `blocks` (n, L): {"input_ids", "labels"}, (B, L) int64 each. No padding occurs.

    rng(row): where the masks of that row come from; with `Plan.rng` they depend on seed, epoch and row alone.
    """
    return masking(blocks[rows], uniforms(map(rng, rows), blocks.shape[1]))


# ----------------------------------------------------------------------------------------------------- streams
def stream(documents: Callable[[int], Iterable[str]], tokenizer, length: int, masking: Masking, batch: int,
           seed: int = 0, rank: int = 0, start: int = 0) -> Iterator[dict[str, Tensor]]:
    """Masked batches packed from a stream of documents, without end: after the last document the next pass begins.

    documents(epoch): this process's texts in the order of the pass `epoch`. Yields {"input_ids", "labels"}, (B, L)
    int64 each, B = `batch` rows of this process; from batch number `start` on: those before it are read, not masked.
    Raises DataError where a whole pass yields no token.
    """
    body, tokens = body_length(tokenizer, length), tokens_of(documents, tokenizer)
    for step in count():
        bodies = np.fromiter(islice(tokens, batch * body), np.int32, batch * body).reshape(batch, body)
        if step >= start:
            ids = framed(bodies, tokenizer)
            uniform = uniforms([generator_of(seed, rank, step)], ids.size).reshape(3, *ids.shape)
            yield masking(ids, uniform)


def tokens_of(documents: Callable[[int], Iterable[str]], tokenizer) -> Iterator[int]:
    """Of pass after pass."""
    for epoch in count():
        some = False
        for ids in token_lists(documents(epoch), tokenizer):
            some = some or bool(ids)
            yield from ids
        if not some:
            raise DataError("The stream of text has no document with text in it for this process.")


# --------------------------------------------------------------------------------------------------------- hub
def hub_documents(hub: Hub, split: str, column: str = "text", **order: Any) -> Callable[[int], Iterator[str]]:
    """`documents` for `stream`: a column of a set, streamed, never stored whole. order: see `hub_examples`.

    Raises DataError where the set cannot be had or has no such column.
    """
    examples = hub_examples(hub, split, **order)

    def documents(epoch: int) -> Iterator[str]:
        for example in examples(epoch):
            if column not in example:
                raise DataError(f"{hub['name']} has no column {column!r}; it has {', '.join(example)}.")
            yield example[column]

    return documents
