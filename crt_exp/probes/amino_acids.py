"""Which amino acids attention takes for alike, and BLOSUM62: Vig et al., BERTology meets biology, 2020, section 4.

Each amino acid has, of every head, the share of attention that goes to it; two are alike as far as these shares go
together over heads. How frequent letters are cancels: a head that looks at all alike gives each its frequency.
Legend: H heads of all layers, n sequences; matrices (20, 20) in the order of `STANDARD`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.data.protein import BEGIN, STANDARD
from crt_exp.swap.rollout import attention_matrices

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


def alike(values: np.ndarray) -> np.ndarray:
    """(20, 20): Pearson's correlation over the rows of (rows, 20), heads or sequences.

    Raises ValueError where it is not defined.
    """
    same = np.flatnonzero(values.std(0) <= 1e-6 * values.mean(0))
    if len(values) < 3 or len(same):
        which = f"of {''.join(STANDARD[i] for i in same)} are the same in all" if len(same) else "are too few"
        raise ValueError(f"which amino acids are alike cannot be said: the shares of {len(values)} heads or sequences "
                         f"{which}; give more sequences, or a run with more heads and other attention")
    return np.corrcoef(values.T)


def alike_by_frequency(shares: np.ndarray) -> np.ndarray:
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

