"""Features in blocks: columns that are products of a weight and a feature of a base, kept as the two factors.

Legend as in base.py; R weights of a token, D features of the base. Attention puts the factors together for the tokens
of one chunk alone (attention/partials.py), after the exponential: nothing of length L x R D is ever made there.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.features.base import ONE, FeatureMap, Features


@dataclass(frozen=True)
class InBlocks(FeatureMap):
    """A map whose `bind` gives features in blocks, and whose error is known relative to the kernel."""

    one_map = False

    @abstractmethod
    def log_relative_variance(self, x: Tensor, y: Tensor, params) -> Tensor:
        """log(Var / K^2), float64, nats."""

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        return torch.nn.functional.softplus(self.log_relative_variance(x, y, params))

    def log_variance(self, x, y, params) -> Tensor:
        return 2 * self.log_kernel(x.double(), y.double()) + self.log_relative_variance(x, y, params)


@dataclass(frozen=True)
class Block:
    """Column r D + d is weight_r times feature d of the base."""

    weight: Tensor     # (..., L, R), bounded
    base: Features     # (..., L, D)
    groups = 1
    cluster = None

    @property
    def columns(self) -> int:
        return max(t.shape[-1] for t in self.base if t is not ONE)

    @property
    def width(self) -> int:
        return self.weight.shape[-1] * self.columns

    def top(self, log: Tensor) -> Tensor:
        """Of log features of the base (..., L, D or 1), the maxima over tokens for all columns, (..., width, 1)."""
        top = log.amax(-2).unsqueeze(-1)
        return top.expand(*top.shape[:-2], self.columns, 1).repeat(*[1] * (top.ndim - 2), self.weight.shape[-1], 1)

    def own(self, top: Tensor) -> Tensor:
        """Of what all columns have (..., width, 1), in the way of `top`, that of the base: (..., 1, D or 1)."""
        return top[..., :self.base.log_scale.shape[-1], :].mT

    def dense(self) -> Features:
        value, log = torch.broadcast_tensors(self.base.value.to(self.base.log_scale), self.base.log_scale)
        value = self.weight.unsqueeze(-1) * value.unsqueeze(-2)
        return Features(value.flatten(-2), log.unsqueeze(-2).expand(value.shape).flatten(-2))


@dataclass(frozen=True)
class Selected(Block):
    """A token has one block of each group, that of its cluster, and the others are zero: weight is 1 there, else 0.

    With A groups and C clusters, block (a, c) stands at a C + c and holds D / A columns, those of group a of the base.
    """

    cluster: Tensor    # (..., L, 1), the number of the token's cluster
    groups: int = 1

    @classmethod
    def of(cls, cluster: Tensor, clusters: int, base: Features, groups: int = 1) -> "Selected":
        own = cluster == torch.arange(clusters, device=cluster.device)
        return cls(own.to(base.log_scale), base, cluster, groups)

    def top(self, log: Tensor) -> Tensor:
        tops = [log.masked_fill(weight.unsqueeze(-1) == 0, -torch.inf).amax(-2) for weight in self.weight.unbind(-1)]
        return torch.stack([t.unflatten(-1, (self.groups, -1)) for t in tops], -2).flatten(-3).unsqueeze(-1)

    def own(self, top: Tensor) -> Tensor:
        of_cluster = top.squeeze(-1).unflatten(-1, (self.groups, self.weight.shape[-1], -1)).transpose(-3, -2)
        return rows_of(of_cluster.flatten(-2), self.cluster)

    def dense(self) -> Features:
        value, log = self.base
        value = ONE if value is ONE else self._spread(value, 0.0)
        return Features(value, self._spread(log, -torch.inf))

    def _spread(self, t: Tensor, empty: float) -> Tensor:
        t = t.unflatten(-1, (self.groups, 1, -1))
        return torch.where(self.weight[..., None, :, None] > 0, t, empty).flatten(-3)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table (..., C, k) by their numbers (..., L, 1): (..., L, k), batch dimensions broadcast.

    A pass for each row: a few passes over k columns are faster than one that looks up every number.
    """
    rows = table[..., :1, :].expand(*[1] * (index.ndim - table.ndim), *table.shape[:-2], index.shape[-2], -1)
    for c in range(1, table.shape[-2]):
        rows = torch.where(index == c, table[..., c:c + 1, :], rows)
    return rows


@dataclass(frozen=True)
class Blocks:
    """Blocks side by side, in the place of `Features`."""

    parts: tuple[Block, ...]

    def dense(self) -> Features:
        """The features themselves."""
        parts = [part.dense() for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        return Features(*(torch.cat(t, -1) for t in zip(*parts)))
