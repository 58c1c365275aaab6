"""`Running`: what layers of random features remember of the batches that they saw, in buffers.

Legend: d, Hkv key heads. Statistics are means over all tokens of a batch and over ranks, but for the minimum; those of
the last pass are `pending` until the next one begins, and then folded into those that are `running`.
"""

import torch
from torch import Tensor

from crt_exp.attention.fitted_once import several_ranks
from crt_exp.attention.linear import LinearAttention
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers.noise import Nested, mapped

MOMENTS = ("mean", "mean_sq", "mean_abs")  # running averages; the minimum is kept apart


class Running(LinearAttention):
    """Needs `phi`, the map of the layer. See `RandomFeatureAttention` for what the statistics are used for."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Those that running statistics are averages of."""
        return (*MOMENTS, "second") if self.phi.second_moments else MOMENTS

    @property
    def keeps_statistics(self) -> bool:
        """Whether there are running statistics: some layers are causal in one call and not in the next."""
        return "running_weight" in self._buffers

    @property
    def running(self) -> bool:
        """Whether calls as the layer now stands use and fill the running statistics."""
        return self.keeps_statistics and (self.causal or self.cross)

    def _statistics(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Statistics:
        return grouped_statistics(q, k, key_mask, self.scale, same=self.causal or not self.cross)

    def _register_statistics(self) -> None:
        for stage in ("running", "pending"):
            for side in "xy":
                for name in self.moments:
                    square = (self.d,) if name == "second" else ()
                    self.register_buffer(f"{stage}_{side}_{name}", torch.zeros(self.kv_heads, self.d, *square))
                self.register_buffer(f"{stage}_{side}_minimum", torch.zeros(self.kv_heads, self.d))
            self.register_buffer(f"{stage}_weight", torch.zeros(()))  # running: 1 - decay^n; pending: 0 or 1
        for side in "xy":  # tokens that the pending ones are the means of; a checkpoint lies between steps
            self.register_buffer(f"pending_{side}_count", torch.zeros(()), persistent=False)
        self.register_buffer("folds", torch.zeros((), dtype=torch.long))

    def running_statistics(self) -> Statistics:
        """The running averages of queries and keys, (key heads, d) each; of zero vectors before anything is seen."""
        return Statistics(*(self._running_moments(side) for side in "xy"))

    def _running_moments(self, side: str) -> Moments:
        seen = self.running_weight > 0
        weight = torch.where(seen, self.running_weight, 1.0)
        moments = {name: getattr(self, f"running_{side}_{name}") / weight for name in self.moments}
        return Moments.known(**moments, minimum=torch.where(seen, getattr(self, f"running_{side}_minimum"), 0.0))

    @torch.no_grad()
    def _note(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        """Keeps the statistics of this batch for `_fold`, pooled over batch entries, ranks and what is kept already."""
        stats = self._statistics(q, k, key_mask)
        for side, moments in (("x", stats.x), ("y", stats.y)):
            count = moments.count.expand(q.shape[0], self.kv_heads, 1).to(torch.float32)
            pending = [getattr(self, f"pending_{side}_{name}") for name in self.moments]
            totals = [(getattr(moments, name).flatten(2) * count).sum(0) for name in self.moments]
            sums = torch.cat([*totals, count.sum(0)], -1)
            minimum = getattr(self, f"pending_{side}_minimum")
            sums, low = _over_ranks(sums, moments.minimum.amin(0) if len(q) else torch.full_like(minimum, torch.inf))
            kept, count = getattr(self, f"pending_{side}_count"), sums[0, -1]
            total = kept + count
            share = (count / total.clamp(min=1)).to(sums)          # an empty batch has none
            for t, new in zip(pending, sums[:, :-1].split([t[0].numel() for t in pending], -1)):
                t.copy_(torch.lerp(t.to(sums), (new / count.clamp(min=1)).view_as(t), share))
            minimum.copy_(_lower(minimum, kept > 0, low, count > 0))
            kept.copy_(total)
        self.pending_weight.copy_((total > 0).to(self.pending_weight))
        if self.calibrated is not None:
            self.calibrated += 1
            self._fold(torch.full_like(self.pending_weight, 1 / self.calibrated))

    @torch.no_grad()
    def _fold(self, rate: Tensor) -> None:
        """running <- (1 - rate) running + rate pending; the weight tells how much of running is data."""
        for side in "xy":
            for name in self.moments:
                getattr(self, f"running_{side}_{name}").lerp_(getattr(self, f"pending_{side}_{name}"), rate)
            low, new = (getattr(self, f"{stage}_{side}_minimum") for stage in ("running", "pending"))
            low.copy_(_lower(low, self.running_weight * (1 - rate) > 0, new, rate > 0))
        self.running_weight.lerp_(torch.ones_like(rate), rate)
        self.folds.add_(self.pending_weight.long())
        self._forget()

    def _forget(self) -> None:
        """Nothing is pending."""
        for side in "xy":
            getattr(self, f"pending_{side}_count").zero_()
        self.pending_weight.zero_()


def _lower(low: Tensor, counts: Tensor, other: Tensor, other_counts: Tensor) -> Tensor:
    """The minimum of those that count; 0 where none does, as an average of states with inf would be inf or NaN."""
    low, other = torch.where(counts, low, torch.inf), torch.where(other_counts, other, torch.inf)
    return torch.where(counts | other_counts, torch.minimum(low, other), 0.0)


def _over_ranks(sums: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and minima over all processes of a distributed run."""
    if several_ranks():
        sums, low = sums.contiguous(), low.contiguous()
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(low, op=torch.distributed.ReduceOp.MIN)
    return sums, low


def grouped_statistics(x: Tensor, y: Tensor, key_mask: Tensor | None = None, scale: float = 1.0,
                       same: bool = True) -> Statistics:
    """Of scale x and scale y of each (batch, key head), the query heads of a group together; a query at a padded place
    does not count where queries and keys are of the same sequence."""
    groups = x.shape[1] // y.shape[1]
    y_mask = None if key_mask is None else key_mask[:, None]
    x_mask = y_mask if same and x.shape[2] == y.shape[2] else None
    if groups > 1:
        x = x.unflatten(1, (y.shape[1], groups)).flatten(2, 3)
        x_mask = None if x_mask is None else x_mask.repeat(1, 1, groups)
    return Statistics.of(x, y, x_mask, y_mask, scale)


def for_query_heads(params: Nested, groups: int) -> Nested:
    """Parameters of key heads, repeated for the query heads of their groups."""
    if groups == 1:
        return params
    return mapped(lambda t: t if t.ndim < 3 else t.repeat_interleave(groups, -3), params)
