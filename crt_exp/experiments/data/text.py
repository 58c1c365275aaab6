"""Text as token ids: files, Hugging Face data sets, token blocks and masks.

No function draws from a global generator. Masks of a block come from a generator of the caller, such as `Plan.rng`, so
that a resumed run reads the same batches.
Notation: B sequences of a batch, L tokens of a sequence, V entries of a vocabulary.
"""

import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.data import DataError, Folder, numbered_lines
from crt_exp.experiments.data.files import Arrays, cached, files_ending, key_of, sha256
from crt_exp.experiments.data.plan import IGNORED
from crt_exp.experiments.data.sources import (
    SOURCES,
    Hub,
    load_rows,
    missing_file,
    refuse_data_dir,
    text_folder,
    written_once,
)

Paths = str | Path | Sequence[str | Path]
PARTS = {
    "train": "train",
    "validation": "valid",
    "test": "test",
}  # splits, and their official names
SUFFIXES = (".txt", ".tokens", ".raw")
GROUP = 256  # strings per call of the tokenizer, which are parallel
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDNET = "wordnet"
DEFINITIONS = 2200
SHARE = 0.15  # of masked tokens, as in BERT
WORDNET_DIGEST = "8a4e99a1fe7aa0622bb487359b3db2ef7b7abd445e2e90c224823e8932ea6efd"


# ------------------------------------------------------------------------------------------------------- files
def text_files(paths: Paths) -> list[Path]:
    """Files named by `paths`: files, text files in folders, and "wordnet".

    A folder gives all its .txt, .tokens and .raw files. Raises DataError.
    """
    files = []
    for name in [paths] if isinstance(paths, (str, Path)) else paths:
        path = text_path(name)
        inside = [path]
        if not path.is_file():
            inside = sorted(files_ending(path, SUFFIXES))
        if not inside:
            problem = "expected"
            if not path.exists():
                problem = "no such file; expected"
            raise DataError(
                f"{path}: {problem} a UTF-8 text file, a folder of {' '.join(SUFFIXES)} files, or {WORDNET}"
            )
        files += inside
    return files


def text_path(name: str | Path) -> Path:
    """Path as typed; "wordnet" is the file of definitions unless such a path exists."""
    path = Path(name).expanduser()
    return wordnet_file() if str(name) == WORDNET and not path.exists() else path


def wordnet_file() -> Path:
    """2200 definitions of WordNet 3.0 in random order, one a line, 207 kB.

    The file is written once, in $XDG_CACHE_HOME/crt_exp. The definitions come with the package timm, whose ImageNet
    classes are WordNet nouns. WordNet is (c) 2006 by Princeton University, which permits use, copies, changes and
    distribution without fee. Raises DataError if the file has other content.
    """
    path = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
        / "crt_exp"
        / f"{WORDNET}.txt"
    )
    if not path.is_file():
        from timm.data import ImageNetInfo

        lines = random.Random(0).sample(
            ImageNetInfo("imagenet-22k").label_descriptions(detailed=True), DEFINITIONS
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            part.write_text("\n".join([*lines, ""]))
    if sha256(path) != WORDNET_DIGEST:
        raise DataError(
            f"{path}: expected the definitions of timm 1.0.31; install timm 1.0.31 and remove this file"
        )
    return path


def official_file(name: str, split: str, data_dir: Folder = None, source: str = "auto") -> Path:
    """File of "ptb" or "wikitext2" for the split train, valid or test.

    data_dir: default $CRT_DATA/NAME. source: auto, files or hub. Raises DataError.
    """
    place = [*PARTS.values()].index(split)
    folder = text_folder(source, name, data_dir)
    path = folder / Path(SOURCES[name].files[place].path).name if folder else None
    if path is None or not path.is_file():
        raise missing_file(name, path, place)
    return path


def split_files(
    texts: Mapping[str, Paths | None], data_dir: Folder, source: str = "auto"
) -> dict[str, list[Path]]:
    """Files of the splits that have a text of their own.

    Without a text for training, the splits are those of WikiText-2. Raises DataError.
    """
    files = {}
    if texts["train"] is None:
        for split, part in PARTS.items():
            files[split] = [official_file("wikitext2", part, data_dir, source)]
    else:
        refuse_data_dir(data_dir, "task.text")
    for split, paths in texts.items():
        if paths is not None:
            files[split] = text_files(paths)
    return files


def lines_of(text: Paths, unknown: str = "[UNK]") -> Iterator[str]:
    """Lines that are not blank, without WikiText's marks.

    In .tokens files, " @-@ " becomes "-" and <unk> becomes `unknown`.
    """
    for file in text_files(text):
        has_marks = file.suffix.lower() == ".tokens"
        for _, line in numbered_lines(file):
            if not line.strip():
                continue
            if has_marks:
                for mark in "-,.":
                    line = line.replace(f" @{mark}@ ", mark)
                line = line.replace("<unk>", unknown)
            yield line


def hub_text(hub: Hub) -> Path:
    """Text file of the column `hub["column"]` of a Hugging Face data set, written once.

    The set has one document per row. Raises DataError if the set or the column is unavailable, and for rows that are
    not text.
    """
    column = hub["column"]
    rows = load_rows(hub, hub["split"], ["column"])

    def lines() -> Iterator[str]:
        for number, document in enumerate(rows[column], 1):
            if not isinstance(document, str):
                raise DataError(
                    f"{hub['data_files'] or hub['name']}, row {number}: column {column} is {document!r}, "
                    f"read as {type(document).__name__}; expected text; fix or remove the row"
                )
            yield from document.splitlines()

    return written_once(f"{key_of(rows._fingerprint, column)}.txt", lines)


# -------------------------------------------------------------------------------------------------- tokenizers
def bert_tokenizer(vocabulary: str | Path, lowercase: bool = True):
    """BERT WordPiece tokenizer of a vocab.txt or its folder. Raises DataError."""
    from transformers import BertTokenizerFast

    path = Path(vocabulary).expanduser()
    path = path / "vocab.txt" if path.is_dir() else path
    words = [line for _, line in numbered_lines(path)]
    if not {*SPECIAL} <= {*words} or len({*words}) < len(words):
        raise DataError(
            f"{path}: expected a BERT vocabulary, one unique token per line, with {' '.join(SPECIAL)}"
        )
    return BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)}, do_lower_case=lowercase
    )


def fingerprint(tokenizer) -> str:
    """Hash (64 hex digits), equal for tokenizers that give the same ids.

    Earlier truncation and padding settings do not change the hash.
    """
    import tokenizers

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}
    content = json.dumps([state, tokenizers.__version__], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def token_lists(texts: Iterable[str], tokenizer, spans: bool = False) -> Iterator[Any]:
    """Token ids of each string, without special tokens.

    spans: yield (ids, (first, last) characters of each token); needs a fast tokenizer.
    """
    texts = iter(texts)
    while group := list(islice(texts, GROUP)):
        coded = tokenizer(
            group,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=spans,
            verbose=False,
        )
        yield from zip(coded["input_ids"], coded["offset_mapping"]) if spans else coded["input_ids"]


# ------------------------------------------------------------------------------------------------------ blocks
def running_blocks(
    text: Paths, tokenizer, length: int, cache_dir: Folder = None, end: str = "\n"
) -> np.ndarray:
    """Lines of a document, each with `end`, joined and cut into (n, length) int32.

    `cache_dir` stores the tokens. Tokens that do not fill the last block are left out. Raises DataError if the text
    does not fill one block.
    """

    def make() -> Arrays:
        tokens = array("i")
        for ids in token_lists(
            (line + end for line in lines_of(text, tokenizer.unk_token or "<unk>")), tokenizer
        ):
            tokens.extend(ids)
        return {"tokens": np.array(tokens, np.int32)}

    key = ("tokens 1", end, fingerprint(tokenizer))
    tokens = cached(cache_dir, make, *key, files=text_files(text))["tokens"]
    if len(tokens) < length:
        raise DataError(
            f"the text has {len(tokens)} tokens, fewer than a block of {length}; use a longer text or a "
            "smaller block"
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def local_blocks(text: Paths, tokenizer, length: int, cache_dir: Folder = None) -> np.ndarray:
    """Blocks [CLS] ... [SEP] of `running_blocks` without line ends, (n, length) int32."""
    return framed(
        running_blocks(text, tokenizer, body_length(tokenizer, length), cache_dir, end=""),
        tokenizer,
    )


def body_length(tokenizer, length: int) -> int:
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id) or length < 3:
        raise DataError(
            f"length={length}, {type(tokenizer).__name__}: expected length >= 3 and a BERT-type tokenizer "
            "with [CLS] and [SEP]"
        )
    return length - 2


def framed(bodies: np.ndarray, tokenizer) -> np.ndarray:
    """Add [CLS] and [SEP]: (n, length - 2) to (n, length) int32."""
    marks = ((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return np.pad(bodies, ((0, 0), (1, 1)), constant_values=marks).astype(np.int32)


# ----------------------------------------------------------------------------------------------------- masking
@dataclass(frozen=True, eq=False)
class Masking:
    """BERT's masking (Devlin et al., 2019, section 3.1).

    `share` of the tokens are predicted. Of these, 80% become [MASK], 10% become a random token and 10% stay. Special
    tokens, which include [UNK], are never predicted. Every row with a candidate has at least one predicted token.
    """

    mask_id: int
    special: np.ndarray  # (V,) bool
    drawn: int  # random tokens are among the first `drawn` ids

    @classmethod
    def from_tokenizer(cls, tokenizer) -> "Masking":
        """Masking of a tokenizer; raises DataError without a mask token."""
        if tokenizer.mask_token_id is None:
            raise DataError(
                f"{type(tokenizer).__name__}: expected a mask token, as in masked language models"
            )
        size = max(tokenizer.get_vocab().values()) + 1
        special = flag_table(size, tokenizer.all_special_ids)
        return cls(tokenizer.mask_token_id, special, size)

    def __call__(self, ids: np.ndarray, uniform: np.ndarray) -> dict[str, Tensor]:
        """Mask ids (B, L); return input_ids and labels, (B, L) int64 each.

        Labels are -100 where nothing is predicted. uniform: (3, B, L) numbers in [0, 1) from `uniforms`. They select
        the predicted tokens, their replacement and the random token. NumPy is faster here: on small batches, torch's
        threads cost more than the work.
        """
        score, action, token = uniform
        score = np.where(self.special[ids], 2.0, score)
        chosen = score <= np.clip(score.min(axis=1, keepdims=True), SHARE, 1.0)
        random_ids = (token * float(self.drawn)).astype(np.int64)
        inputs = np.where(chosen & (action < 0.8), self.mask_id, ids)
        inputs = np.where(chosen & (action >= 0.9), random_ids, inputs)
        return {
            "input_ids": torch.from_numpy(inputs.astype(np.int64)),
            "labels": torch.from_numpy(np.where(chosen, ids, IGNORED).astype(np.int64)),
        }

    def mask_row(self, row: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mask one row (L,); return inputs and labels, (L,) int64 each."""
        masked = self(row[None].astype(np.int64), rng.random((3, 1, len(row))))
        return masked["input_ids"][0].numpy(), masked["labels"][0].numpy()


def flag_table(size: int, members: Sequence[int]) -> np.ndarray:
    flags = np.zeros(size, bool)
    flags[np.array(members, np.int64)] = True
    return flags


def uniforms(
    generators: Iterable[np.random.Generator | torch.Generator], length: int
) -> np.ndarray:
    """Random numbers of `Masking`, (3, B, length) float64, a generator for each row."""
    rows = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            row = torch.rand(3, length, generator=generator, dtype=torch.float64).numpy()
        else:
            row = generator.random((3, length))
        rows.append(row)
    return np.stack(rows, axis=1)


def generator_of(*numbers: int) -> torch.Generator:
    """Generator for a tuple of non-negative integers, independent for each tuple."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
