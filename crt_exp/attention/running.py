"""Running statistics of queries and keys, for the fit of maps in causal and cross-attention.

Statistics of the last training pass are `pending` until the next pass begins, and are then folded into those that are
`running`. Means are over all tokens and ranks.

Notation: B batch, H query heads, Hkv key heads, d.
"""

from typing import NamedTuple

import torch
import torch.distributed as ranks
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from crt_exp.attention.base import LinearAttention
from crt_exp.attention.compiled import compiled
from crt_exp.features.base import FeatureMap, NotFinite, Params, values_readable
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers.noise import Nested, map_leaves

MEANS = ("mean", "mean_sq", "mean_abs")


class Running(LinearAttention):
    """Base class of layers with running statistics of queries and keys.

    `RandomFeatureAttention` describes the use of the statistics.
    """

    phi: FeatureMap
    running_weight: Tensor  # 1 - decay^n after n folds
    pending_weight: Tensor  # 1, or 0 if nothing is pending
    pending_x_count: Tensor
    pending_y_count: Tensor
    folds: Tensor
    # whether the layer has running statistics; some layers are causal in some calls only
    keeps_statistics = False
    moments: tuple[str, ...]  # names of the statistics that the fit of the map uses

    @property
    def running(self) -> bool:
        """Whether calls use and update the running statistics."""
        return self.keeps_statistics and (self.causal or self.cross)

    def _register_statistics(self) -> None:
        # all statistics, whatever the map uses, so that saved states have one form
        names = [*MEANS, "minimum"]
        if self.phi.second_moments:
            names.append("second")
        for stage in ("running", "pending"):
            for side in "xy":
                for name in names:
                    columns = (self.d, self.d) if name == "second" else (self.d,)
                    zeros = torch.zeros(self.kv_heads, *columns)
                    self.register_buffer(f"{stage}_{side}_{name}", zeros)
            self.register_buffer(f"{stage}_weight", torch.zeros(()))
        # tokens in the pending means; not saved, as checkpoints lie between steps
        for side in "xy":
            self.register_buffer(f"pending_{side}_count", torch.zeros(()), persistent=False)
        self.register_buffer("folds", torch.zeros((), dtype=torch.long))
        self.keeps_statistics = True

    def statistics(self, stage: str) -> list[dict[str, Tensor]]:
        """Return the running or pending statistics of queries and of keys, by name."""
        sides = []
        for side in "xy":
            sides.append({name: getattr(self, f"{stage}_{side}_{name}") for name in self.moments})
        return sides

    def fit_to_running(self) -> Params:
        """Return the parameters of the map for the running statistics."""
        fit = compiled(fit_to_averages, self.running_weight.device)
        return fit(self.phi, self.running_weight, *self.statistics("running"))

    @torch.no_grad()
    def _note(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        """Pool the statistics of this batch, over all ranks, with the pending ones.

        Raises:
            NotFinite: a statistic overflows, on CPUs or in a calibration; the stored ones stay.
        """
        if len(q) == 0 and not several_ranks():
            return
        same = self.causal or not self.cross
        batch = compiled(batch_moments, q.device)(q, k, key_mask, self.scale, same, self.moments)
        if several_ranks():
            batch = [reduce_ranks(moments) for moments in batch]
        if self.calibrated is not None or values_readable(q):
            means = []
            for moments in batch:
                means += [moments.values[name] for name in self.moments if name != "minimum"]
            if not all(bool(mean.isfinite().all()) for mean in means):
                raise NotFinite(
                    f"statistics of {type(self.phi).__name__}: not finite; expected vectors without NaN, "
                    "infinity or overflow"
                )
        counts = [self.pending_x_count, self.pending_y_count]
        pool = compiled(pool_batch, q.device)
        pool(self.pending_weight, counts, self.statistics("pending"), batch)
        if self.calibrated is not None:
            self.calibrated += 1
            self._fold(1 / self.calibrated)

    @torch.no_grad()
    def _fold(self, share: float) -> None:
        """Update running <- (1 - share) running + share pending, and drop the pending statistics."""
        counters = (self.folds, self.running_weight, self.pending_weight)
        fold = compiled(fold_pending, self.running_weight.device)
        fold(*counters, self.statistics("running"), self.statistics("pending"), share)
        self._forget()

    def _forget(self) -> None:
        """Drop the pending statistics."""
        torch._foreach_zero_([self.pending_weight, self.pending_x_count, self.pending_y_count])


class BatchMoments(NamedTuple):
    """Moments of the queries or keys of a batch, by key head."""

    values: dict[str, Tensor]  # (Hkv, .) each; without vectors means are 0, and the minimum is inf
    number: Tensor | int  # of vectors of a head; a tensor if a mask or other ranks decide it


def batch_moments(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    scale: float,
    same: bool,
    names: tuple[str, ...],
) -> list[BatchMoments]:
    """Return the moments of the scaled queries and keys of a batch; see `grouped_statistics`."""
    stats = grouped_statistics(q, k, key_mask, scale, same)
    sides = []
    for moments in (stats.x, stats.y):
        values = {}
        for name in names:
            if name != "minimum":
                values[name] = moments.batch_mean(name)
            elif len(q):
                values[name] = moments.minimum.amin(0)
            else:
                values[name] = q.new_full((k.shape[1], q.shape[-1]), torch.inf)
        sides.append(BatchMoments(values, moments.batch_count))
    return sides


def reduce_ranks(moments: BatchMoments) -> BatchMoments:
    """Return the moments of the vectors of all processes."""
    values = dict(moments.values)
    low = values.pop("minimum", None)
    number = values["mean"].new_tensor(moments.number, dtype=torch.float64)
    totals = [*(mean * number for mean in values.values()), number]
    flat = _flatten_dense_tensors(totals)
    ranks.all_reduce(flat)
    *totals, number = _unflatten_dense_tensors(flat, totals)
    for name, total in zip(values, totals):
        values[name] = total / number.clamp(min=1)
    if low is not None:
        low = low.contiguous()
        ranks.all_reduce(low, op=ranks.ReduceOp.MIN)
        values["minimum"] = low
    return BatchMoments(values, number)


def pool_batch(
    weight: Tensor,
    counts: list[Tensor],
    pending: list[dict[str, Tensor]],
    batch: list[BatchMoments],
) -> None:
    """Add the moments of a batch to pending statistics over `counts` vectors, in place."""
    old = [weight]
    new = []
    for count, stored, moments in zip(counts, pending, batch):
        total = count + moments.number
        old += [count, *stored.values()]
        share = moments.number / total.clamp(min=1)
        new += [total, *moved(stored, moments.values, share, count > 0)]
    any_key = total > 0
    torch._foreach_copy_(old, [any_key.to(weight), *new])


def fold_pending(
    folds: Tensor,
    weight: Tensor,
    pending_weight: Tensor,
    running: list[dict[str, Tensor]],
    pending: list[dict[str, Tensor]],
    share: float,
) -> None:
    """Move running statistics towards those that are pending, by their share, in place."""
    rate = share * pending_weight
    old = [folds, weight]
    new = [folds + pending_weight.long(), weight.lerp(pending_weight, rate)]
    for stored, values in zip(running, pending):
        old += stored.values()
        new += moved(stored, values, rate, weight * (1 - rate) > 0)
    torch._foreach_copy_(old, new)


def moved(
    old: dict[str, Tensor], new: dict[str, Tensor], share: Tensor, has_old: Tensor
) -> list[Tensor]:
    """Return averages (1 - share) old + share new, and the minimum of both.

    has_old: whether the old minimum is that of any vectors.
    """
    values = []
    for name, t in old.items():
        if name != "minimum":
            values.append(t.lerp(new[name].to(t), share.to(t)))
            continue
        # averages of states with inf would be inf or NaN: the minimum of no vectors is stored as 0
        has_new = share > 0
        low = torch.where(has_old, t, torch.inf).minimum(torch.where(has_new, new[name], torch.inf))
        values.append(torch.where(has_old | has_new, low, 0.0))
    return values


def averages(weight: Tensor, sums: dict[str, Tensor]) -> Moments:
    """Return the moments of weighted sums; 0 for weight 0."""
    values = {}
    for name, total in sums.items():
        if name == "minimum":
            values[name] = torch.where(weight > 0, total, 0.0)
        else:
            values[name] = total / weight.clamp(min=torch.finfo(weight.dtype).tiny)
    return Moments.from_values(**values)


def fit_to_averages(
    phi: FeatureMap, weight: Tensor, x: dict[str, Tensor], y: dict[str, Tensor]
) -> Params:
    """Return the parameters of a map for weighted sums of queries and keys."""
    return phi.fit(Statistics(averages(weight, x), averages(weight, y)))


def fit_to_call(
    phi: FeatureMap, q: Tensor, k: Tensor, key_mask: Tensor | None, scale: float
) -> Params:
    """Return the parameters of a map for the scaled queries and keys of a call."""
    return phi.fit(grouped_statistics(q, k, key_mask, scale))


def grouped_statistics(
    x: Tensor,
    y: Tensor,
    key_mask: Tensor | None = None,
    scale: float = 1.0,
    same: bool = True,
) -> Statistics:
    """Return the statistics of scale x and scale y for each (batch, key head).

    Query heads of a group are pooled. Padded queries are left out if queries and keys are of one sequence (`same`).
    """
    groups = x.shape[1] // y.shape[1]
    y_mask = None if key_mask is None else key_mask[:, None]
    x_mask = y_mask if same and x.shape[2] == y.shape[2] else None
    if groups > 1:
        x = x.unflatten(1, (y.shape[1], groups)).flatten(2, 3)
        x_mask = None if x_mask is None else x_mask.repeat(1, 1, groups)
    return Statistics(
        Moments.from_vectors(x, x_mask, scale), Moments.from_vectors(y, y_mask, scale)
    )


def for_query_heads(params: Nested, groups: int) -> Nested:
    """Repeat parameters of key heads for the query heads of their groups."""
    return map_leaves(lambda t: t if t.ndim < 3 else t.repeat_interleave(groups, -3), params)


def several_ranks() -> bool:
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1
