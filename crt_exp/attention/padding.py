"""Rows of a batch that begin with padding: places, and blocks of tokens, are counted from the first real one of each
row. Tokens after it that do not count keep their places.

So a row's outputs do not depend on how much padding the other rows of its batch bring with them. Legend: B batch, S
keys, L queries, which are the last of the sequence, b tokens of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.samplers.noise import transforming


def first_kept(keep: Tensor) -> Tensor:
    """The place of the first real token of each row (B,) of keep (B, S); 0 where there is none."""
    return keep.to(torch.uint8).argmax(1)


class Shift(NamedTuple):
    """Moves the tokens of each row back by `by` (B,) places, so that its first real one begins a block."""

    by: Tensor
    most: int     # places that are added

    @classmethod
    def of(cls, keep: Tensor | None, b: int) -> "Shift | None":
        """None where no row needs it; asked on a CPU alone, elsewhere the answer would have to be waited for."""
        if keep is None:
            return None
        by = -first_kept(keep) % b
        if torch.compiler.is_compiling() or transforming() or not keep.is_cpu:
            return cls(by, b - 1)
        most = int(by.max()) if len(by) else 0
        return cls(by, most) if most else None

    def there(self, t: Tensor, dim: int = 2) -> Tensor:
        """t (B, ., n, k), or (B, n) along dim 1, with `most` more places, whose contents mean nothing."""
        return _taken(t, torch.arange(t.shape[dim] + self.most, device=t.device) - self.by.unsqueeze(1), dim)

    def mask(self, keep: Tensor) -> Tensor:
        """That of the keys, False at the places that are added."""
        places = torch.arange(keep.shape[1] + self.most, device=keep.device) - self.by.unsqueeze(1)
        return self.there(keep, 1) & (places >= 0) & (places < keep.shape[1])

    def back(self, t: Tensor) -> Tensor:
        """The inverse of `there`."""
        return _taken(t, torch.arange(t.shape[2] - self.most, device=t.device) + self.by.unsqueeze(1), 2)


def from_first(t: Tensor, keep: Tensor, n: int) -> Tensor:
    """Of t (B, ., S, k) the n tokens from the first real one of each row on; zeros after the last one."""
    places = torch.arange(n, device=t.device) + first_kept(keep).unsqueeze(1)
    return _taken(t, places, 2).masked_fill((places >= t.shape[2])[:, None, :, None], 0)


def _taken(t: Tensor, places: Tensor, dim: int) -> Tensor:
    """Of each row of t those at its places (B, n)."""
    places = places.clamp(0, t.shape[dim] - 1)
    if dim == 1:
        return t.gather(1, places)
    return t.gather(2, places[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))
