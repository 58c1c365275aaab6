"""Protein sequences: FASTA files, splits, rows of tokens, statistics, unigram.

A hash of its letters assigns a sequence to training, validation or test, in every release of the data. Only the first
of equal sequences is kept. Sequences of held-out Pfam families or files, and their copies, are out of distribution
(ood). Source: Performers, appendix C. The hash has 64 bits: among the 139 million sequences of TrEMBL, the probability
of any collision is 1 / 2000.

Notation: n sequences, B rows of a batch, L tokens of the longest row.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import numpy as np
from torch import Tensor

from crt_exp.experiments.data import DataError, Folder, warn
from crt_exp.experiments.data.files import cached_folder, files_ending, key_of
from crt_exp.experiments.data.plan import token_batch
from crt_exp.experiments.data.sources import missing_file, task_folder
from crt_exp.experiments.data.text import Masking, flag_table
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Rate, Whole

# ambiguous, rare and unknown amino acids in UniProt
STANDARD = "ACDEFGHIKLMNPQRSTVWY"
ANOMALOUS = "BOUXZ"
LETTERS = STANDARD + ANOMALOUS
PAD, MASK, BEGIN, END = range(len(LETTERS), len(LETTERS) + 4)
TOKENS = len(LETTERS) + 4
UNKNOWN = 255  # code of a byte that is not a letter
CODES = bytes(LETTERS.find(chr(byte)) % 256 for byte in range(256))
ENDINGS = (
    *(".fasta", ".fasta.gz", ".fa", ".fa.gz", ".faa", ".faa.gz"),
    *(".fas", ".fas.gz", ".pep", ".pep.gz"),
)
HEADER = re.compile(
    r"(?:sp|tr)\|([^|\s]+?)(?:\.\d+)?(?:[|\s]|$)|(?!sp\||tr\|)\s*(\S+)"
)  # drops UniProt's version
BLOCK = 1 << 14  # sequences per write
LINES = 1 << 20  # lines per read of a table of families
COUNTED = 100_000  # training rows that give the unigram baseline
ARRAYS = {
    "tokens": np.uint8,
    "ends": np.int64,
    "accessions": "S16",
    "digests": np.uint64,
    "repeated": np.bool_,
    "files": np.uint32,
}
SPLITS = ("train", "validation", "test", "ood")
# Pfam families of Performers, appendix C.1
HELD_OUT = Path(__file__).with_name("protein_families.txt").read_text().split()


# ---- files -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sequences:
    """Memory-mapped sequences; row i is tokens[ends[i - 1]:ends[i]].

    Attributes:
        digests: 64-bit hashes of the letters, for splits.
        repeated: whether an earlier sequence is equal.
        files: index in `names` of the file or generated family.
    """

    tokens: np.ndarray  # (letters,) uint8
    ends: np.ndarray  # (n,) int64
    accessions: np.ndarray  # (n,) S16
    digests: np.ndarray  # (n,) uint64
    repeated: np.ndarray  # (n,) bool
    files: np.ndarray  # (n,) uint32
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.tokens[int(self.ends[row - 1]) if row else 0 : int(self.ends[row])]

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence, (n,) int64."""
        return np.diff(self.ends, prepend=0)


def read_uniprot(data_dir: Folder, cache_dir: Folder) -> Sequences:
    """Sequences of all FASTA files of a folder, by default $CRT_DATA/protein.

    Raises DataError.
    """
    folder = task_folder("protein", data_dir)
    if folder is None or not folder.is_dir():
        raise missing_file("protein", folder and folder / "UP000000625_83333.fasta")
    files = files_ending(folder, ENDINGS, deep=False)
    if not files:
        raise DataError(
            f"{folder}: no FASTA file; expected files ending in {' '.join(ENDINGS[::2])}, plain or .gz"
        )
    return read_files(files, cache_dir)


def read_fasta(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield accession and letter codes of each sequence. Raises DataError."""
    from Bio.SeqIO.FastaIO import SimpleFastaParser

    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_file(path, "rt", encoding="latin-1") as stream:
            if stream.read(1) != ">":
                raise DataError(f"{path}: expected a FASTA file, which starts with >")
            stream.seek(0)
            for header, letters in SimpleFastaParser(stream):
                match = HEADER.match(header)
                tokens = letters.encode("latin-1").translate(CODES)
                if match is None or not tokens or UNKNOWN in tokens:
                    wrong = "an empty name or sequence"
                    if UNKNOWN in tokens:
                        wrong = repr(letters[tokens.find(UNKNOWN)])
                    raise DataError(
                        f"{path}: >{header[:40]} has {wrong}; expected >NAME and letters of {LETTERS}"
                    )
                yield (match[1] or match[2]).encode("latin-1"), tokens
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def digest_of(content: bytes, size: int = 8) -> int:
    """Hash of the content with `size` bytes, as an integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=size).digest(), "little")


def read_files(files: Sequence[Path], cache_dir: Folder = None) -> Sequences:
    """Read FASTA files into memory-mapped arrays.

    cache_dir: stores the arrays; None uses a temporary folder. The folder's name depends on the size and time of each
    file, so a changed file is read again. Raises DataError.
    """
    states = []
    names = []
    for file in files:
        state = file.stat()
        states.append((str(file.absolute()), state.st_size, state.st_mtime_ns))
        names.append(re.sub(r"\.[^.]+(\.gz)?$", "", file.name, flags=re.IGNORECASE))
    key = key_of("proteins", LETTERS, ARRAYS, states)
    with TemporaryDirectory(prefix="crt_exp-proteins-") as place:  # mapped files may be removed
        folder = cached_folder(cache_dir or place, key, partial(write_arrays, files))
        arrays = {name: np.memmap(folder / name, kind, "r") for name, kind in ARRAYS.items()}
    return Sequences(**arrays, names=tuple(names))


def write_arrays(files: Sequence[Path], folder: Path) -> None:
    """Write the arrays of `Sequences` in blocks, because TrEMBL exceeds the memory.

    Only the hashes of all sequences are in memory at once.
    """
    import pandas as pd

    end = 0
    with ExitStack() as stack:
        streams = {name: stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        for number, file in enumerate(files):
            sequences = read_fasta(file)
            while block := list(islice(sequences, BLOCK)):
                accessions, letters = zip(*block)
                ends = end + np.cumsum([len(codes) for codes in letters])
                end = int(ends[-1])
                values = {
                    "tokens": np.frombuffer(b"".join(letters), np.uint8),
                    "ends": ends,
                    "accessions": accessions,
                    "digests": [digest_of(codes) for codes in letters],
                    "files": np.full(len(block), number),
                }
                for name, array in values.items():
                    streams[name].write(np.asarray(array, ARRAYS[name]).tobytes())
    digests = pd.Series(np.fromfile(folder / "digests", np.uint64))
    digests.duplicated().to_numpy().tofile(folder / "repeated")


# ---- splits ----------------------------------------------------------------------------------------------------------
def held_out_by_file(sequences: Sequences, names: Sequence[str] | None) -> np.ndarray:
    """Mask of sequences in held-out files, (n,) bool. Raises ConfigError.

    names: None holds out the last of several files.
    """
    known = sequences.names
    names = (known[-1:] if len(known) > 1 else ()) if names is None else names
    held = set(names)
    if not held <= set(known) or held == set(known):
        raise ConfigError(
            f"task.held_out_files={list(names)}: expected some, not all, of {', '.join(known[:50])}"
        )
    return np.isin(sequences.files, [i for i, name in enumerate(known) if name in held])


def held_out_by_family(sequences: Sequences, path: str | Path) -> np.ndarray:
    """Mask of sequences in the HELD_OUT Pfam families, (n,) bool. Raises DataError.

    path: Pfam-A.regions.uniprot.tsv.gz as published by Pfam, or its header with some lines.
    """
    import pandas as pd

    try:
        blocks = pd.read_csv(
            Path(path).expanduser(),
            sep="\t",
            usecols=["uniprot_acc", "pfamA_acc"],
            dtype=str,
            chunksize=LINES,
        )
        held = pd.concat(
            block.uniprot_acc[block.pfamA_acc.isin(HELD_OUT)] for block in blocks
        ).unique()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"task.families={path}: {error}; expected columns uniprot_acc and pfamA_acc"
        ) from None
    out = np.isin(
        np.char.partition(sequences.accessions, b"-")[:, 0], np.array([*held], "S")
    )  # isoforms: P12345-2
    if not out.any():
        raise DataError(
            f"task.families={path}: expected some sequences of {', '.join(HELD_OUT[:3])} ..."
        )
    return out


def split_rows(
    sequences: Sequences, out: np.ndarray, validation: float, test: float
) -> dict[str, np.ndarray]:
    """Rows of each split in order, without repeated sequences.

    out: (n,) bool, out-of-distribution sequences; their copies join them. Raises DataError if a split is empty.
    """
    import pandas as pd

    digests = pd.Series(sequences.digests)
    position = sequences.digests / 2.0**64
    which = 2 - np.digitize(position, [test, test + validation])
    which[digests.isin(digests[out])] = 3
    which[sequences.repeated] = -1
    if count := int(sequences.repeated.sum()):
        warn("skipped %d of %d sequences, which repeat earlier ones", count, len(sequences))
    rows = {split: np.flatnonzero(which == i) for i, split in enumerate(SPLITS)}
    if empty := [split for split in SPLITS[:3] if not len(rows[split])]:
        raise DataError(
            f"{empty[0]}: none of {len(sequences)} sequences with task.validation_share={validation}, "
            f"task.test_share={test}; use more sequences, or other shares"
        )
    if not len(rows["ood"]):
        del rows["ood"]
    return rows


# ---- rows ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Singles:
    """Rows of one sequence each, truncated to L letters."""

    sequences: Sequences
    rows: np.ndarray
    longest: int

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.minimum(self.sequences.lengths[self.rows], self.longest)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.sequences[self.rows[i]][: self.longest]


@dataclass(frozen=True)
class Chains(Singles):
    """All sequences joined with END tokens, in rows of exactly L tokens.

    Tokens that do not fill a last row are left out.
    """

    @cached_property
    def ends(self) -> np.ndarray:
        """End of each sequence with its END token in the chain."""
        return np.cumsum(self.sequences.lengths[self.rows] + 1)

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.longest)

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.longest

    def __getitem__(self, i: int) -> np.ndarray:
        first = i * self.longest
        last = (i + 1) * self.longest
        a, b = np.searchsorted(self.ends, [first, last - 1], "right")
        parts = [np.append(self.sequences[row], np.uint8(END)) for row in self.rows[a : b + 1]]
        begin = self.ends[a] - len(parts[0])
        return np.concatenate(parts)[first - begin : last - begin]


# ---- batches ---------------------------------------------------------------------------------------------------------
def next_token_batch(rows: Sequence[np.ndarray], longest: int) -> dict[str, Tensor]:
    """Batch for next-token prediction: inputs begin with BEGIN, labels are the row.

    A row shorter than L also predicts END.
    """
    inputs = []
    targets = []
    for row in rows:
        target = np.append(row, END) if len(row) < longest else row
        inputs.append(np.append(BEGIN, target[:-1]))
        targets.append(target)
    return token_batch(inputs, PAD, targets)


def letter_masking() -> Masking:
    """BERT's masking of letters: 80% MASK, 10% a random letter, 10% unchanged."""
    special = flag_table(TOKENS, range(len(LETTERS), TOKENS))
    return Masking(MASK, special, len(LETTERS))


# ---- statistics ------------------------------------------------------------------------------------------------------
def length_statistics(lengths: np.ndarray) -> dict[str, float]:
    """Length statistics of whole sequences (Performers Table 1)."""
    statistics = {"sequences": len(lengths)}
    for measure in (np.min, np.max, np.mean, np.std, np.median):
        statistics[f"length_{measure.__name__}"] = measure(lengths).item()
    return statistics


# ---- generated families of sequences ---------------------------------------------------------------------------------
class FamilyOptions(TypedDict):
    """Options of generated families.

    `families` are in distribution, `held_out` others are not. Sequence lengths are in [shortest, longest], lags in
    [nearest, farthest]. `copied` is the probability of a copied letter.
    """

    sequences: Count
    families: Count
    held_out: Whole
    shortest: Count
    longest: Count
    nearest: Count
    farthest: Count
    copied: Rate
    seed: Whole


def generate(options: FamilyOptions) -> Sequences:
    """Protein-like sequences of F families; `files` holds the family.

    Each family has a Markov chain over the 20 amino acids and a lag. With probability `copied` a letter repeats the
    letter `lag` positions earlier, else the chain gives the next letter. A model therefore needs the distant letter,
    and must infer the family from the letters so far. Lengths are uniform. A tenth as many sequences are added of the
    held-out families, which come last. Sequences are split by their accession.

    Raises ConfigError for a lower bound above its upper bound.
    """
    for low, high in (("shortest", "longest"), ("nearest", "farthest")):
        if options[low] > options[high]:
            raise ConfigError(
                f"task.generated.{low}={options[low]}: expected at most {high}={options[high]}"
            )
    symbols = len(STANDARD)
    inside = options["families"]
    count = inside + options["held_out"]  # F
    rng = np.random.default_rng([options["seed"], 0])
    chains = rng.dirichlet(np.full(symbols, 0.3), (count, symbols))  # by the letter before
    starts = rng.dirichlet(np.full(symbols, 3.0), count)
    lags = rng.integers(options["nearest"], options["farthest"] + 1, count)

    rng = np.random.default_rng([options["seed"], 1])
    family = rng.integers(0, inside, options["sequences"])
    if options["held_out"]:
        held_out = rng.integers(inside, count, max(1, options["sequences"] // 10))
        family = np.append(family, held_out)
    rows = np.arange(len(family))
    longest = options["longest"]
    lengths = rng.integers(options["shortest"], longest + 1, len(rows))
    letters = np.zeros((len(rows), longest), np.uint8)
    lag = lags[family]
    for t in range(longest):
        chances = starts[family] if t == 0 else chains[family, letters[:, t - 1]]
        below = chances.cumsum(1) < rng.random((len(rows), 1))
        drawn = below.sum(1).clip(max=symbols - 1)
        copies = (rng.random(len(rows)) < options["copied"]) & (lag <= t)
        letters[:, t] = np.where(copies, letters[rows, np.maximum(t - lag, 0)], drawn)
    names = np.array([f"G{row:09d}" for row in rows], "S16")
    digests = [(digest_of(name, 4) << 32) + row for row, name in enumerate(names.tolist())]
    return Sequences(
        tokens=letters[np.arange(longest) < lengths[:, None]],
        ends=np.cumsum(lengths),
        accessions=names,
        digests=np.array(digests, np.uint64),
        repeated=np.zeros(len(rows), bool),
        files=family.astype(np.uint32),
        names=tuple(f"family {i}" for i in range(count)),
    )
