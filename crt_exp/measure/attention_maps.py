"""Attention matrices of a protein model, exact and swapped, and the similarity of amino acids by its attention.

Similarity as in Vig et al., BERTology meets biology, 2020 (section 4): the correlation over heads of the shares of
attention that two amino acids receive. Matrices of amino acids are (20, 20) in the order of `STANDARD`. Notation: H
heads of all layers, n sequences.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.attention import Baseline, LinearAttention
from crt_exp.config import ConfigError
from crt_exp.data import DataError, protein
from crt_exp.data.protein import BEGIN, LETTERS, STANDARD
from crt_exp.data.sources import missing, task_folder
from crt_exp.options import Count, checked
from crt_exp.measure.base import SwapMeasurement
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.folder import folder_of
from crt_exp.models.kept import WEIGHTS
from crt_exp.swap.bench import fitted
from crt_exp.swap.calibration import swapped_states

PAIRS = np.triu_indices(len(STANDARD), 1)  # 190


@checked("task")
class AttentionMaps(SwapMeasurement):
    """task=attention_maps: relative errors |A' - A| / |A| (Frobenius norm over the heads of a layer) of the attention
    matrices of one protein in a kept run. `drawn` adds each query's weights as a string.

    With exact attention also the similarity of amino acids `by` its attention, by that of random weights, by their
    frequencies in each sequence (composition) and overall: the correlation r with BLOSUM62, and p of Mantel's test.
    """

    metric = "mean_error"

    def __init__(self, start: str | None, file: str, entry: str, sequences: Count, drawn: bool = False):
        self.start, self.file, self.entry, self.sequences, self.drawn = start, file, entry, sequences, drawn

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        folder = task_folder("protein", None)
        if folder is None or not (folder / self.file).is_file():
            raise missing("protein", folder and folder / self.file)
        letters, kept = entry_of(folder / self.file, self.entry), of_proteins(self.start)
        exact, made = (matrices(kept.build(each), letters)
                       for each in (Mechanism.of("exact"), replace(mechanism, seed=seed)))
        if self.drawn:
            for i, layer in enumerate(made):
                for j, A in enumerate(layer):
                    yield {"head": f"{i}.{j}", "query": [*range(len(A))],
                           "row": [" ".join(f"{weight:.3g}" for weight in row) for row in A.tolist()]}
        if mechanism.name == "exact":
            index = protein.uniprot(None, None)
            order = np.argsort(index.hashes, kind="stable")[:self.sequences]  # the test split has the lowest hashes too
            yield from self.similar(kept, [np.array(index[row]) for row in order])
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(made, exact)]
        yield {"layer": [*range(len(errors))], "error": errors, "mean_error": float(np.mean(errors))}

    def similar(self, kept: language.KeptLanguageModel, chains: list[np.ndarray]) -> Iterator[dict[str, Any]]:
        composition, score = frequencies(chains), blosum62()
        logs = np.log(np.maximum(composition.mean(0), 1e-12))
        by = {"attention": similarity(shares(kept.build(), chains)),
              "random weights": similarity(shares(with_random_weights(kept, self.start), chains)),
              "composition": similarity(composition), "frequency": -np.abs(logs[:, None] - logs)}
        for name, matrix in by.items():
            yield {"by": name, **correlation(matrix, score)}
        names = [f"{STANDARD[a]}{STANDARD[b]}" for a, b in zip(*PAIRS)]
        for name, matrix in {"attention": by["attention"], "BLOSUM62": score}.items():
            yield {"by": name, "sample": names, "similarity": matrix[PAIRS].tolist()}


def of_proteins(start: str) -> language.KeptLanguageModel:
    """The model of a run of task=trembl. Raises DataError and ConfigError for other folders."""
    kept = language.load(start, "task.start")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"task.start = {start} reads other symbols than amino acids: give a run of task=trembl")
    return kept


def entry_of(path: Path, accession: str) -> list[int]:
    """The tokens of an entry. Raises DataError where the file has no such entry."""
    entries = {name.decode(): list(tokens) for name, tokens in protein.entries(path)}
    if accession not in entries:
        raise DataError(f"{path}: no entry {accession}; expected one of its accessions, such as {next(iter(entries))}")
    return entries[accession]


def with_random_weights(kept: language.KeptLanguageModel, start: str) -> language.LanguageModel:
    """A model of the same sizes; its seed is a digest of the run's weights."""
    weights = (folder_of(start, "task.start", "a run of task=trembl") / WEIGHTS).read_bytes()
    digest = hashlib.sha256(weights).hexdigest()[:16]
    torch.manual_seed(int(hashlib.sha256(digest.encode()).hexdigest()[:8], 16))
    return language.LanguageModel(kept.description, kept.mechanism.layer).eval()


def matrices(model: language.LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: the outputs for one-hot values. Causal maps are fitted to the letters."""
    tokens = read_by(model, letters)
    return [A[0] for A in attention_matrices(fitted(model, [tokens]), tokens)]


@torch.no_grad()
def attention_matrices(model: nn.Module, *inputs: Tensor,
                       keep: Callable[[Tensor], Tensor] = lambda A: A) -> list[Tensor]:
    """keep(A) of each layer's matrix A (B, H, L, L) in one forward pass, in the order of the calls; rows sum to 1.

    A linear attention never forms its matrix, but that is its output for the unit vectors as values. Layers are those
    that were swapped, and of models that were made with a `Mechanism` their own. Raises ValueError where there are
    none: `swap_attention(model, "exact")` makes exact attention visible too.
    """
    found, states = [], swapped_states(model)
    states = states or [part for part in model.modules() if isinstance(part, (LinearAttention, Baseline))]
    if not states:
        raise ValueError(f"no attention of this {type(model).__name__} is swapped: call swap_attention(model, 'exact')")

    def note(state: nn.Module, args: tuple, out: Tensor) -> None:
        q, k, _, *mask = args
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
        found.append(keep(state.forward(q, k, unit, *mask)))  # not called as a module, which would come here again

    with ExitStack() as stack:
        for state in states:
            stack.callback(state.register_forward_hook(note).remove)
        model(*inputs)
    return found


# ---- similarity of amino acids


def read_by(model: nn.Module, letters: Sequence[int]) -> Tensor:
    """Tokens (1, L) of a sequence, cut to the model's length; a causal model reads BEGIN and all letters but the last.
    """
    read = list(letters)[:model.description.length]
    return torch.tensor([[BEGIN, *read[:-1]] if model.description.causal else read], dtype=torch.long)


def shares(model: nn.Module, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """(H, 20): the share of the attention of each head that goes to each of the standard amino acids, over all queries
    of all sequences."""
    sums = 0.0
    for letters in sequences:
        tokens = read_by(model, letters)
        received = attention_matrices(model, tokens, keep=lambda A: A[0].double().sum(1))      # layers of (heads, L)
        sums = sums + torch.cat(received) @ (tokens[0][:, None] == torch.arange(len(STANDARD))).double()
    return (sums / sums.sum(1, keepdim=True)).numpy()


def frequencies(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """(n, 20): the share of each standard amino acid in each sequence."""
    counts = np.stack([np.bincount(letters, minlength=len(STANDARD))[:len(STANDARD)] for letters in sequences])
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def similarity(values: np.ndarray) -> np.ndarray:
    """(20, 20): Pearson's correlation over the rows of (rows, 20), heads or sequences. Raises ValueError where it is
    not defined."""
    same = "".join(np.array([*STANDARD])[values.std(0) <= 1e-6 * values.mean(0)])
    if len(values) < 3 or same:
        which = f"the shares of {same} are equal in all" if same else "too few"
        raise ValueError(f"similarity of amino acids: {len(values)} heads or sequences: {which}; give more of them")
    return np.corrcoef(values.T)


def blosum62() -> np.ndarray:
    from Bio.Align import substitution_matrices

    return np.array(substitution_matrices.load("BLOSUM62").select("".join(STANDARD)))


def correlation(first: np.ndarray, second: np.ndarray, permutations: int = 9999, seed: int = 0) -> dict[str, float]:
    """Pearson's r of two symmetric matrices over their 190 pairs, and p of Mantel's test, one-sided.

    Pairs that share an amino acid are not independent. So rows and columns of one matrix are permuted together, and p
    is the share of permutations whose r is at least as large.
    """
    one, other = ((matrix - matrix[PAIRS].mean()) / (matrix[PAIRS].std() * len(PAIRS[0]) ** 0.5)
                  for matrix in (first, second))
    orders = np.random.default_rng(seed).permuted(np.tile(np.arange(len(one)), (permutations, 1)), axis=1)
    r, others = float(one[PAIRS] @ other[PAIRS]), one[orders[:, PAIRS[0]], orders[:, PAIRS[1]]] @ other[PAIRS]
    return {"r": r, "p": float(1 + (others >= r - 1e-12).sum()) / (1 + permutations)}
