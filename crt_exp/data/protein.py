"""Proteins as tokens: the letters, the splits, single sequences and chains of them, statistics, the unigram baseline.

Splits: a hash of its accession puts a sequence into training, validation or test, in every release of the data. Out of
distribution (ood) are sequences of held-out Pfam families, or of held-out files. Performers, appendix C.

Legend: B rows of a batch, L the longest row.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.fasta import SUFFIXES, Index, fasta_files, indexed
from crt_exp.data.plan import masked, padded
from crt_exp.data.sources import missing, task_folder
from crt_exp.data.text import IGNORED, Masking, table

STANDARD, ANOMALOUS = "ACDEFGHIKLMNPQRSTVWY", "BOUXZ"       # UniProt's ambiguous, rare and unknown ones
LETTERS = STANDARD + ANOMALOUS
PAD, MASK, BEGIN, END = range(len(LETTERS), len(LETTERS) + 4)
TOKENS = len(LETTERS) + 4
LINES = 1 << 20                                              # of a table of families, read at once
COUNTED = 100_000                                            # training rows that the unigram baseline is counted on
SPLITS = ("train", "validation", "test", "ood")
HELD_OUT = ("PF18369", "PF04680", "PF17988", "PF12325", "PF03272", "PF03938", "PF17724", "PF10696", "PF11968",
            "PF04153", "PF06173", "PF12378", "PF04420", "PF10841", "PF06917", "PF03492", "PF06905", "PF15340",
            "PF17055", "PF05318")                            # Performers, appendix C.1


def encode(text: str, what: str = "the sequence") -> list[int]:
    """Numbers of letters. Raises DataError, naming the first that is none."""
    for place, letter in enumerate(text, 1):
        if letter not in LETTERS:
            raise DataError(f"{what}: {letter!r}, letter {place}, is no amino acid; known are {LETTERS}")
    return [LETTERS.index(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    """The letters of tokens that are letters."""
    return "".join(LETTERS[i] for i in tokens if i < len(LETTERS))


# ---- files and splits ------------------------------------------------------------------------------------------------


def uniprot(data_dir: str | None, cache_dir: str | None) -> Index:
    """The index of all FASTA files of a folder, by default $CRT_DATA/protein. Raises DataError."""
    folder = task_folder("protein", data_dir)
    if folder is None or not folder.is_dir():
        raise missing("protein", folder and folder / "UP000000625_83333.fasta")
    files = fasta_files(folder)
    if not files:
        raise DataError(f"{folder} holds no FASTA file ({' '.join(SUFFIXES)}, with or without .gz). Put UniProt's "
                        "there: `python -m crt_exp.data fetch protein`.")
    return indexed(files, LETTERS, cache_dir)


def held_out_by_file(index: Index, names: Sequence[str] | None) -> np.ndarray:
    """Which sequences are of held-out files (or generated families): (n,) bool. None: the last of several.

    Raises ConfigError for a name that is no file's, and where nothing is left.
    """
    if names is None:
        names = index.names[-1:] if len(index.names) > 1 else ()
    unknown = [name for name in names if name not in index.names]
    if unknown:
        raise ConfigError(f"task.held_out_files: {unknown[0]} is none of the files {', '.join(index.names)}")
    out = np.isin(index.files, [place for place, name in enumerate(index.names) if name in names])
    if out.all():
        raise ConfigError("task.held_out_files: every file is held out, and none is left to train on")
    return out


def held_out_by_family(index: Index, mapping: str | Path, families: Sequence[str]) -> np.ndarray:
    """Which sequences are of a held-out family, by a table of accessions and families: (n,) bool.

    Lines are `accession<tab>family;family` as UniProt exports Pfam; no family is a line too, and a title line may stand
    first. Raises DataError for lines that are none, and for sequences that the table misses.
    """
    wanted, rows = set(families), read_families(Path(mapping).expanduser())
    names, places = np.unique(index.accessions, return_inverse=True)
    seen, out = np.zeros((2, len(names)), bool)
    while block := list(islice(rows, LINES)):
        keys = np.array([accession for accession, _ in block])
        at = np.searchsorted(names, keys).clip(max=len(names) - 1)
        here = names[at] == keys
        seen[at[here]] = True
        out[at[here & [not wanted.isdisjoint(named) for _, named in block]]] = True
    gone = np.flatnonzero(~seen[places])
    if len(gone):
        raise DataError(f"{mapping} misses {len(gone)} of the {len(index)} sequences, the first is "
                        f"{index.accessions[gone[0]].decode()}. A sequence without a family has a line with nothing "
                        "behind the tab.")
    return out[places]


def read_families(path: Path) -> Iterator[tuple[bytes, list[str]]]:
    """Accession and families of each line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            for number, row in enumerate(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if len(row) != 2 or not row[0]:
                    raise DataError(f"{path}, line {number}: a line is an accession, a tab and its families.")
                if number > 1 or row[0] != "Entry":
                    yield row[0].encode(), [name.strip() for name in row[1].split(";")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the table of families cannot be read ({error}).") from None


def split_rows(index: Index, out: np.ndarray, validation: float, test: float) -> dict[str, np.ndarray]:
    """Rows of each split, in order; out (n,) bool: out of distribution. Raises DataError where one is empty."""
    at = index.hashes / 2.0**32
    which = np.where(at < test, 2, np.where(at < test + validation, 1, 0))
    which[out] = 3
    rows = {split: np.flatnonzero(which == i) for i, split in enumerate(SPLITS)}
    empty = [split for split in SPLITS[:3] if not len(rows[split])]
    if empty:
        raise DataError(f"{len(index)} sequences with task.validation_share = {validation} and task.test_share = "
                        f"{test} leave none for {empty[0]}: give more sequences or other shares")
    return rows if len(rows["ood"]) else {split: rows[split] for split in SPLITS[:3]}


# ---- rows ------------------------------------------------------------------------------------------------------------


class ProteinRow(NamedTuple):
    """Tokens of a row of at most L, and whether the sequence ends with them."""

    tokens: np.ndarray
    ends: bool


class ProteinRows(Protocol):
    """What a task reads: rows by number, and the length of each."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> ProteinRow: ...


@dataclass(frozen=True)
class Singles:
    """One sequence a row, cut to L letters."""

    index: Index
    rows: np.ndarray
    longest: int

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.minimum(self.index.lengths[self.rows], self.longest)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> ProteinRow:
        letters = self.index.sequence(self.rows[i])
        return ProteinRow(letters[:self.longest], len(letters) < self.longest)

    def check_whole(self) -> None:
        """Raises DataError, naming file and line, where a sequence is longer than L."""
        longer = np.flatnonzero(self.index.lengths[self.rows] > self.longest)
        if len(longer):
            row = int(self.rows[longer[0]])
            place = f"{self.index.place(row, LETTERS)}: " if self.index.paths else ""
            name, length = self.index.accessions[row].decode(), len(self.index.sequence(row))
            raise DataError(f"{place}{name} has {length} letters, and {len(longer)} sequences have more than "
                            f"task.max_length = {self.longest}: raise it, or cut them with task.longer=cut")


@dataclass(frozen=True)
class Chains:
    """All sequences, one after another with END between, in rows of exactly L tokens; the last ones fill none."""

    index: Index
    rows: np.ndarray
    longest: int

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each sequence and its END end in the chain."""
        return np.cumsum(self.index.lengths[self.rows] + 1)

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.longest)

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.longest

    def __getitem__(self, i: int) -> ProteinRow:
        first, last = i * self.longest, (i + 1) * self.longest
        a, b = np.searchsorted(self.ends, [first, last - 1], "right")
        parts = [part for row in self.rows[a:b + 1] for part in (self.index.sequence(row), np.uint8([END]))]
        begin = int(self.ends[a - 1]) if a else 0
        return ProteinRow(np.concatenate(parts)[first - begin:last - begin], False)


# ---- batches ---------------------------------------------------------------------------------------------------------


def next_tokens(rows: Sequence[ProteinRow]) -> dict[str, Tensor]:
    """BEGIN and the row without its last token, to predict the row; END behind a sequence that ends within L."""
    targets = [np.append(row.tokens, END) if row.ends else row.tokens for row in rows]
    inputs = [np.concatenate([[BEGIN], target[:-1]]) for target in targets]
    return batch_of(inputs, targets)


def masked_tokens(rows: Sequence[ProteinRow], generators: Iterable[np.random.Generator],
                  masking: Masking) -> dict[str, Tensor]:
    """BERT's corruption of each row, by a generator of the row's own."""
    inputs, labels = [], []
    for row, rng in zip(rows, generators):
        masked = masking(row.tokens[None].astype(np.int64), rng.random((3, 1, len(row.tokens))))
        inputs.append(masked["input_ids"][0].numpy())
        labels.append(masked["labels"][0].numpy())
    return batch_of(inputs, labels)


def masking(share: float) -> Masking:
    """A letter to predict becomes MASK (80%), one of all letters (10%) or stays."""
    special = table(TOKENS, range(len(LETTERS), TOKENS))
    return Masking(MASK, special, share, len(LETTERS))


def batch_of(inputs: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """tokens, labels (B, L) int64, labels -100 at padding; key_mask (B, L) where there is padding."""
    return masked(padded(inputs, PAD), [len(row) for row in inputs]) | {"labels": padded(labels, IGNORED)}


# ---- statistics ------------------------------------------------------------------------------------------------------


def statistics(lengths: np.ndarray) -> dict[str, float]:
    """Of whole sequences, as Performers Table 1 has them."""
    return {"sequences": len(lengths), "length_min": int(lengths.min()), "length_max": int(lengths.max()),
            "length_mean": float(lengths.mean()), "length_std": float(lengths.std()),
            "length_median": float(np.median(lengths))}


def frequencies(rows: ProteinRows, counted: int = COUNTED) -> np.ndarray:
    """Share of each letter in the rows, (25,): of at most `counted` of them, spread evenly; one more of each letter.

    Performers C.2: the empirical baseline predicts by these alone.
    """
    chosen = np.linspace(0, len(rows) - 1, min(counted, len(rows))).astype(np.int64)
    counts = np.ones(len(LETTERS))
    for i in chosen:
        counts += np.bincount(rows[i].tokens, minlength=TOKENS)[:len(LETTERS)]
    return counts / counts.sum()
