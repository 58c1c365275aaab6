"""Rows of unlike length as a batch, and a few rows of many."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def padded(rows: Sequence[np.ndarray], pad: int) -> Tensor:
    """(B, L) int64, L the longest: `pad` behind the shorter ones."""
    result = torch.full((len(rows), max(map(len, rows))), pad)
    for i, row in enumerate(rows):
        result[i, :len(row)] = torch.from_numpy(np.asarray(row, np.int64))
    return result


def masked(tokens: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """tokens (B, L), and key_mask (B, L), True = keep, where there is padding."""
    if min(lengths) == tokens.shape[1]:
        return {"tokens": tokens}
    return {"tokens": tokens, "key_mask": torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]}


def few(rows: int, count: int | None) -> np.ndarray:
    """`count` row numbers in their order, drawn once and for all; all where there are no more, or count is None."""
    if count is None or count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).permutation(rows)[:count])
