"""Attention matrices of a protein model, exact and swapped, and which amino acids its attention takes for alike.

Models are runs of task=trembl with exact attention. `example` {file, entry} names the sequence whose attention is
drawn, in a FASTA file of the proteomes. Rows name the entry.

Which amino acids are alike, and BLOSUM62: as Vig et al., BERTology meets biology, 2020. Each amino acid has, of every
head, the share of attention that goes to it; two are alike as far as these shares go together over heads. How frequent
letters are cancels: a head that looks at all alike gives each its frequency. Matrices of amino acids are (20, 20) in
the order of `STANDARD`. Legend: H heads of all layers, n sequences.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError, fasta
from crt_exp.data.protein import BEGIN, LETTERS, STANDARD, decode
from crt_exp.data.sources import missing, task_folder
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import KeptLanguageModel, LanguageModel
from crt_exp.advice.bench import fitted
from crt_exp.measure.grid import digest
from crt_exp.runner.configuration import kept_task
from crt_exp.swap.matrices import attention_matrices
from crt_exp.tasks.base import Reader

OWN = "a run of task=trembl"
Row = dict[str, Any]


# ---- matrices


def maps(arm: Mapping[str, str], run: str, noises: int, example: Mapping[str, str], seed: int) -> Iterator[Row]:
    """Of the model with exact attention and with the first arm, each query's weights as text, and the errors of all
    arms, by layer and draw of the noise.

    Raises DataError and ConfigError for a run, file or entry that cannot be used.
    """
    _, place = proteomes(example)
    protein = entry_of(place, example["entry"])
    kept, letters, named = of_proteins(run), list(protein.tokens), {"entry": protein.accession.decode()}
    exact = matrices(kept.build(Mechanism.of("exact")), letters)
    yield named | {"letters": decode(letters)[:exact[0].shape[-1]], "file": place.name}
    yield from (named | row for row in weights("exact", exact))
    for name, text in arm.items():
        for noise in range(noises):
            made = matrices(swapped(kept, text, noise, letters), letters)
            if name == next(iter(arm)) and not noise:
                yield from (named | row for row in weights(name, made))
            yield named | {"arm": name, "noise": noise, "error": errors_of(made, exact),
                           "layer": [*range(len(exact))], "table": "error"}


def weights(arm: str, layers: list[Tensor]) -> Iterator[Row]:
    """Of each head, layer.head, a text for each query: the weights of the keys."""
    for i, layer in enumerate(layers):
        for j, A in enumerate(layer):
            rows = [" ".join(f"{weight:.3g}" for weight in row) for row in A.tolist()]
            yield {"arm": arm, "head": f"{i}.{j}", "row": rows, "query": [*range(len(rows))]}


def swapped(kept: KeptLanguageModel, text: str, seed: int, letters: list[int]) -> LanguageModel:
    """The run's weights with that attention; causal maps fitted to the entry."""
    model = kept.build(Mechanism.parse(text, seed=seed))
    return fitted(model, [read_by(model, letters)])


def matrices(model: LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: what the layer gives for one-hot values."""
    return [A[0] for A in attention_matrices(model, read_by(model, letters))]


def errors_of(estimates: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|A' - A| / |A| of each layer, in the Frobenius norm over all heads; each model reads its own hidden states."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(estimates, exact)]


# ---- amino acids


def alike(arm: str, runs: Sequence[str], sequences: int, example: Mapping[str, str], seed: int) -> Iterator[Row]:
    """r with BLOSUM62 and its p of each model, of one like it with random weights, and of controls that are the same
    for all models; of the mean over trained models the similarity of each pair of amino acids. arm: "trained"."""
    files, place = proteomes(example)
    named, score = {"entry": entry_of(place, example["entry"]).accession.decode()}, blosum62()
    chains = sequences_of(files, sequences)
    composition, similar = frequencies(chains), []
    controls = {"composition": likeness(composition),
                "frequency": likeness_by_frequency(composition.mean(0))}
    for i, run in enumerate(runs):
        kept = of_proteins(run)
        similar.append(likeness(shares(kept.build(), chains)))
        untrained = likeness(shares(with_random_weights(kept, chains[0], run), chains))
        for name, matrix in {arm: similar[-1], **controls, "random weights": untrained}.items():
            yield named | {"arm": name, "model": i, "table": "alike",
                           **correlation(matrix, score)._asdict()}
    for a, b in zip(*PAIRS):
        for name, matrix in ((arm, np.mean(similar, 0)), ("BLOSUM62", score)):
            yield named | {"arm": name, "pair": f"{STANDARD[a]}{STANDARD[b]}", "similarity": float(matrix[a, b])}


def with_random_weights(kept: KeptLanguageModel, letters: Sequence[int], run: str) -> LanguageModel:
    """Drawn from a seed that is the run's."""
    own = digest(language.folder_of(run, "run", OWN) / language.WEIGHTS)
    torch.manual_seed(int(hashlib.sha256(own.encode()).hexdigest()[:8], 16))
    model = LanguageModel(kept.description, kept.mechanism.layer).eval()
    return fitted(model, [read_by(model, letters)])


def sequences_of(files: Sequence[str], count: int) -> list[np.ndarray]:
    """Those whose accessions have the lowest hashes, which is where the test split is taken from."""
    index = fasta.indexed([Path(file) for file in files], LETTERS)
    return [np.array(index.sequence(row)) for row in np.argsort(index.hashes, kind="stable")[:count]]


# ---- whether attention matters


@torch.no_grad()
def after_swap(arm: str, run: str, example: Mapping[str, str], seed: int) -> Row:
    """The loss on the test split of a run's weights in this attention."""
    _, place = proteomes(example)
    task = kept_task(run, init=run)
    found = task.metrics(task.build(Mechanism.parse(arm)).eval(), "test", Reader(task))
    return {"entry": entry_of(place, example["entry"]).accession.decode(), "model": seed, "loss": found["loss"]}


# ---- what is chosen


def of_proteins(run: str) -> KeptLanguageModel:
    """Raises DataError and ConfigError for what is no run of task=trembl."""
    kept = language.load(run, "run")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"run = {run} reads other symbols than amino acids: give {OWN}")
    return kept


def proteomes(example: Mapping[str, str]) -> tuple[list[str], Path]:
    """The FASTA files, and the one with the example. Raises DataError where there is none."""
    folder = task_folder("protein", None)
    if folder is None or not (folder / example["file"]).is_file():
        raise missing("protein", folder and folder / example["file"])
    return [str(path) for path in fasta.fasta_files(folder)], folder / example["file"]


def entry_of(path: Path, accession: str) -> fasta.FastaEntry:
    """Raises DataError where the file has no such entry."""
    for entry in fasta.entries(path, LETTERS):
        if accession == entry.accession.decode():
            return entry
    raise DataError(f"{path} has no entry {accession}: give one of its accessions, such as "
                    f"{next(fasta.entries(path, LETTERS)).accession.decode()}")


# ---- which are alike: BERTology meets biology, section 4


PAIRS = np.triu_indices(len(STANDARD), 1)  # 190


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
