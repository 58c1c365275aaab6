"""Attention matrices of a protein model, exact and swapped, and which amino acids its attention takes for alike.

Amino acids as Vig et al., BERTology meets biology, 2020: each has, of every head, the share of attention that goes to
it; two are alike as far as these shares go together over heads. How frequent letters are cancels: a head that looks at
all alike gives each its frequency. Matrices of amino acids are (20, 20) in the order of `STANDARD`. Legend: H heads of
all layers, n sequences.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.advice.bench import fitted
from crt_exp.config import ConfigError
from crt_exp.data import DataError, fasta
from crt_exp.data.protein import BEGIN, LETTERS, STANDARD, decode
from crt_exp.data.sources import missing, task_folder
from crt_exp.hints import Count
from crt_exp.measure.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import KeptLanguageModel, LanguageModel
from crt_exp.schema import checked
from crt_exp.swap.matrices import attention_matrices

OWN = "a run of task=trembl"
PAIRS = np.triu_indices(len(STANDARD), 1)  # 190
PAIR_NAMES = [f"{STANDARD[a]}{STANDARD[b]}" for a, b in zip(*PAIRS)]


@checked("task")
class AttentionMaps(Measurement):
    """task=attention_maps: of the matrices of one protein in a kept run, by layer, |A' - A| / |A| in the Frobenius norm
    over all heads, the model's own hidden states read; with `drawn` each query's weights as text.

    With exact attention instead: which amino acids are alike `by` its attention, by that of random weights, over
    sequences (composition), and in how frequent they are, with the correlation r with BLOSUM62 and p of Mantel's test.
    """

    metric = "mean_error"
    measures_whole = staticmethod(lambda mechanism: True)  # any attention has matrices

    def __init__(self, start: str, file: str, entry: str, sequences: Count, drawn: bool = False):
        self.start, self.file, self.entry, self.sequences, self.drawn = start, file, entry, sequences, drawn

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        folder = task_folder("protein", None)
        if folder is None or not (folder / self.file).is_file():
            raise missing("protein", folder and folder / self.file)
        letters = list(entry_of(folder / self.file, self.entry).tokens)
        kept, exact_one = of_proteins(self.start), Mechanism.of("exact")
        exact = matrices(kept.build(exact_one), letters)
        is_exact = mechanism.name == exact_one.name
        made = exact if is_exact else matrices(swapped(kept, replace(mechanism, seed=seed), letters), letters)
        if self.drawn:
            yield {"letters": decode(letters)[:exact[0].shape[-1]]}
            for i, layer in enumerate(made):
                for j, A in enumerate(layer):
                    rows = [" ".join(f"{weight:.3g}" for weight in row) for row in A.tolist()]
                    yield {"head": f"{i}.{j}", "row": rows, "query": [*range(len(rows))]}
        if is_exact:
            yield from self.alike(kept, sequences_of(fasta.fasta_files(folder), self.sequences))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(made, exact)]
        yield {"layer": [*range(len(errors))], "error": errors, "mean_error": float(np.mean(errors))}

    def alike(self, kept: KeptLanguageModel, chains: list[np.ndarray]) -> Iterator[dict[str, Any]]:
        composition, score = frequencies(chains), blosum62()
        untrained = with_random_weights(kept, chains[0], self.start)
        for name, matrix in {"attention": likeness(shares(kept.build(), chains)),
                             "random weights": likeness(shares(untrained, chains)),
                             "composition": likeness(composition),
                             "frequency": likeness_by_frequency(composition.mean(0))}.items():
            yield {"by": name, **correlation(matrix, score)._asdict()}
            yield {"by": name, "sample": PAIR_NAMES, "similarity": matrix[PAIRS].tolist()}
        yield {"by": "BLOSUM62", "sample": PAIR_NAMES, "similarity": score[PAIRS].tolist()}


def of_proteins(start: str) -> KeptLanguageModel:
    """Raises DataError and ConfigError for what is no run of task=trembl."""
    kept = language.load(start, "task.start")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"task.start = {start} reads other symbols than amino acids: give {OWN}")
    return kept


def entry_of(path: Path, accession: str) -> fasta.FastaEntry:
    """Raises DataError where the file has no such entry."""
    for entry in fasta.entries(path, LETTERS):
        if accession == entry.accession.decode():
            return entry
    raise DataError(f"{path} has no entry {accession}: give one of its accessions, such as "
                    f"{next(fasta.entries(path, LETTERS)).accession.decode()}")


def sequences_of(files: Sequence[Path], count: int) -> list[np.ndarray]:
    """Those whose accessions have the lowest hashes, which is where the test split is taken from."""
    index = fasta.indexed([Path(file) for file in files], LETTERS)
    return [np.array(index.sequence(row)) for row in np.argsort(index.hashes, kind="stable")[:count]]


def swapped(kept: KeptLanguageModel, mechanism: Mechanism, letters: list[int]) -> LanguageModel:
    """The run's weights with that attention; causal maps fitted to the entry."""
    model = kept.build(mechanism)
    return fitted(model, [read_by(model, letters)])


def with_random_weights(kept: KeptLanguageModel, letters: Sequence[int], start: str) -> LanguageModel:
    """Drawn from a seed that is the run's."""
    weights = (language.folder_of(start, "task.start", OWN) / language.WEIGHTS).read_bytes()
    own = hashlib.sha256(weights).hexdigest()[:16]
    torch.manual_seed(int(hashlib.sha256(own.encode()).hexdigest()[:8], 16))
    model = LanguageModel(kept.description, kept.mechanism.layer).eval()
    return fitted(model, [read_by(model, letters)])


def matrices(model: LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: what the layer gives for one-hot values."""
    return [A[0] for A in attention_matrices(model, read_by(model, letters))]


# ---- which are alike: BERTology meets biology, section 4


def read_by(model: nn.Module, letters: Sequence[int]) -> Tensor:
    """Tokens (1, L) of a sequence, cut to the model's length: the letters, or of a causal model what it has read when
    it predicts them."""
    described = model.description
    given = list(letters)[:described.length]
    return torch.tensor([[BEGIN, *given[:-1]] if described.causal else given], dtype=torch.long)


def shares(model: nn.Module, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """(H, 20): the share of the attention of each head that goes to each of the standard amino acids, over all queries
    of all sequences."""
    sums = 0.0
    for letters in sequences:
        tokens = read_by(model, letters)
        of_letter = torch.nn.functional.one_hot(tokens[0], 1 + int(tokens.max())).double()
        received = attention_matrices(model, tokens, keep=lambda A: A[0].double().sum(1))      # layers of (heads, L)
        of_letters = (torch.cat(received) @ of_letter)[:, :len(STANDARD)]
        sums = sums + torch.nn.functional.pad(of_letters, (0, len(STANDARD) - of_letters.shape[1]))
    return (sums / sums.sum(1, keepdim=True)).numpy()


def frequencies(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """(n, 20): the share of each standard amino acid in each sequence."""
    counts = np.stack([np.bincount(letters, minlength=len(STANDARD))[:len(STANDARD)] for letters in sequences])
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def likeness(values: np.ndarray) -> np.ndarray:
    """(20, 20): Pearson's correlation over the rows of (rows, 20), heads or sequences.

    Raises ValueError where it is not defined.
    """
    same = np.flatnonzero(values.std(0) <= 1e-6 * values.mean(0))
    if len(values) < 3 or len(same):
        which = f"of {''.join(STANDARD[i] for i in same)} are the same in all" if len(same) else "are too few"
        raise ValueError(f"which amino acids are alike cannot be said: the shares of {len(values)} heads or sequences "
                         f"{which}; give more sequences, or a run with more heads and other attention")
    return np.corrcoef(values.T)


def likeness_by_frequency(shares: np.ndarray) -> np.ndarray:
    """(20, 20): minus the difference of the logarithms of how frequent two amino acids are; shares (20,)."""
    logs = np.log(np.maximum(shares, 1e-12))
    return -np.abs(logs[:, None] - logs)


def blosum62() -> np.ndarray:
    from Bio.Align import substitution_matrices

    matrix = substitution_matrices.load("BLOSUM62")
    return np.array([[matrix[a, b] for b in STANDARD] for a in STANDARD])


class Correlation(NamedTuple):
    """r: Pearson's, over the 190 pairs. p: of one as large where amino acids have no part in it."""

    r: float
    p: float


def correlation(first: np.ndarray, second: np.ndarray, permutations: int = 9999, seed: int = 0) -> Correlation:
    """Of two symmetric matrices, their diagonals left out; p by Mantel's test, one-sided.

    The 190 pairs are not independent: 19 of them share an amino acid. So the amino acids of one matrix change places,
    its rows and columns alike, and p is the share of such matrices whose r is at least as large.
    """
    rng, one, other = np.random.default_rng(seed), standardised(first), standardised(second)[PAIRS]
    orders = rng.permuted(np.tile(np.arange(len(first)), (permutations, 1)), axis=1)
    others = one[orders[:, PAIRS[0]], orders[:, PAIRS[1]]] @ other
    r = float(one[PAIRS] @ other)
    return Correlation(r, float(1 + (others >= r - 1e-12).sum()) / (1 + permutations))


def standardised(matrix: np.ndarray) -> np.ndarray:
    """So that its 190 pairs have mean 0 and length 1."""
    centred = matrix - matrix[PAIRS].mean()
    return centred / np.linalg.norm(centred[PAIRS])
