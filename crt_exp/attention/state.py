"""State that random-feature layers learn from their inputs.

`Running` averages the statistics of training batches: means over all tokens and ranks, and minima. Statistics of the
last pass are `pending` until the next pass begins, and are then folded into those that are `running`.

`FittedOnce` fits a map to vectors once. Each of the first training passes leaves a sample of its queries and keys, and
the fit happens between two passes. A calibration fits after each of its passes.
`FittedToSequences` uses whole sequences, of the first training pass or of a calibration.
Samples come from all processes, and parameters from the first, so that all ranks agree.

Notation: B batch, H query heads, Hkv key heads, P vectors of a sample, d.
"""

from collections.abc import Iterable

import torch
import torch.distributed as ranks
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import LinearAttention
from crt_exp.attention.checks import outside_graphs, repeat_heads
from crt_exp.features.base import FeatureMap, NotFinite, Params, all_true, values_readable
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers.noise import Nested, leaves, map_leaves

MOMENTS = ("mean", "mean_sq", "mean_abs")  # running averages; the minimum is stored separately
SAMPLE = 512  # vectors of each head for a fit, for queries and keys each
SHORTEST, MORE = 16, 8  # minimal tokens of a sequence; factor of the sample in a calibration
SIDES = ("queries", "keys")


class Running(LinearAttention):
    """Base class of layers with running statistics of queries and keys.

    It needs `phi`, the map of the layer. `RandomFeatureAttention` describes the use of the statistics.
    """

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the averaged statistics."""
        return (*MOMENTS, "second") if self.phi.second_moments else MOMENTS

    @property
    def keeps_statistics(self) -> bool:
        """Whether the layer has running statistics.

        Some layers are causal in one call and not in the next.
        """
        return "running_weight" in self._buffers

    @property
    def running(self) -> bool:
        """Whether calls use and update the running statistics."""
        return self.keeps_statistics and (self.causal or self.cross)

    def _statistics(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Statistics:
        return grouped_statistics(q, k, key_mask, self.scale, same=self.causal or not self.cross)

    def _register_statistics(self) -> None:
        for stage in ("running", "pending"):
            for side in "xy":
                for name in self.moments:
                    square = (self.d,) if name == "second" else ()
                    self.register_buffer(
                        f"{stage}_{side}_{name}", torch.zeros(self.kv_heads, self.d, *square)
                    )
                self.register_buffer(f"{stage}_{side}_minimum", torch.zeros(self.kv_heads, self.d))
            # running: 1 - decay^n; pending: 0 or 1
            self.register_buffer(f"{stage}_weight", torch.zeros(()))
        # tokens in the pending means; not saved, as checkpoints lie between steps
        for side in "xy":
            self.register_buffer(f"pending_{side}_count", torch.zeros(()), persistent=False)
        self.register_buffer("folds", torch.zeros((), dtype=torch.long))

    def running_statistics(self) -> Statistics:
        """Return the running averages of queries and keys, (Hkv, d) each.

        Before the first batch they are those of zero vectors.
        """
        return Statistics(*(self._running_moments(side) for side in "xy"))

    def _running_moments(self, side: str) -> Moments:
        seen = self.running_weight > 0
        weight = torch.where(seen, self.running_weight, 1.0)
        moments = {name: getattr(self, f"running_{side}_{name}") / weight for name in self.moments}
        return Moments.known(
            **moments, minimum=torch.where(seen, getattr(self, f"running_{side}_minimum"), 0.0)
        )

    @torch.no_grad()
    def _note(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
        """Pool the statistics of this batch, over all ranks, with the pending ones.

        Raises:
            NotFinite: a statistic overflows, on CPUs or in a calibration; the stored ones stay.
        """
        stats = self._statistics(q, k, key_mask)
        pooled = {}
        for side, moments in (("x", stats.x), ("y", stats.y)):
            count = moments.count.expand(q.shape[0], self.kv_heads, 1).to(torch.float32)
            pending = [getattr(self, f"pending_{side}_{name}") for name in self.moments]
            totals = [(getattr(moments, name).flatten(2) * count).sum(0) for name in self.moments]
            sums = torch.cat([*totals, count.sum(0)], -1)
            minimum = getattr(self, f"pending_{side}_minimum")
            sums, low = _over_ranks(
                sums, moments.minimum.amin(0) if len(q) else torch.full_like(minimum, torch.inf)
            )
            kept, count = getattr(self, f"pending_{side}_count"), sums[0, -1]
            total = kept + count
            share = (count / total.clamp(min=1)).to(sums)  # 0 for an empty batch
            for name, t, new in zip(
                self.moments, pending, sums[:, :-1].split([t[0].numel() for t in pending], -1)
            ):
                mean = (new / count.clamp(min=1)).view_as(t)
                pooled[f"pending_{side}_{name}"] = torch.lerp(t.to(sums), mean, share).to(t)
            pooled[f"pending_{side}_minimum"] = _lower(minimum, kept > 0, low, count > 0)
            pooled[f"pending_{side}_count"] = total
        self._check_statistics(pooled.values())
        for name, value in pooled.items():
            getattr(self, name).copy_(value)
        self.pending_weight.copy_((total > 0).to(self.pending_weight))
        if self.calibrated is not None:
            self.calibrated += 1
            self._fold(torch.full_like(self.pending_weight, 1 / self.calibrated))

    def _check_statistics(self, values: Iterable[Tensor]) -> None:
        for value in values:
            read = self.calibrated is not None or values_readable(value)
            if read and not all_true(value.isfinite()):
                raise NotFinite(
                    f"statistics of {type(self.phi).__name__}: not finite; expected vectors without NaN, "
                    "infinity or overflow"
                )

    @torch.no_grad()
    def _fold(self, rate: Tensor) -> None:
        """Update running <- (1 - rate) running + rate pending.

        The weight is the share of data in the running averages.
        """
        for side in "xy":
            for name in self.moments:
                getattr(self, f"running_{side}_{name}").lerp_(
                    getattr(self, f"pending_{side}_{name}"), rate
                )
            low, new = (
                getattr(self, f"{stage}_{side}_minimum") for stage in ("running", "pending")
            )
            low.copy_(_lower(low, self.running_weight * (1 - rate) > 0, new, rate > 0))
        self.running_weight.lerp_(torch.ones_like(rate), rate)
        self.folds.add_(self.pending_weight.long())
        self._forget()

    def _forget(self) -> None:
        """Reset the pending statistics."""
        for side in "xy":
            getattr(self, f"pending_{side}_count").zero_()
        self.pending_weight.zero_()


def _lower(low: Tensor, counts: Tensor, other: Tensor, other_counts: Tensor) -> Tensor:
    """Return the minimum of the values that count, or 0 if none counts.

    Averages of states with inf would be inf or NaN.
    """
    low, other = torch.where(counts, low, torch.inf), torch.where(other_counts, other, torch.inf)
    return torch.where(counts | other_counts, torch.minimum(low, other), 0.0)


def _over_ranks(sums: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce sums and minima over all processes."""
    if several_ranks():
        sums, low = sums.contiguous(), low.contiguous()
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(low, op=torch.distributed.ReduceOp.MIN)
    return sums, low


def grouped_statistics(
    x: Tensor, y: Tensor, key_mask: Tensor | None = None, scale: float = 1.0, same: bool = True
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
    return Statistics(Moments.of(x, x_mask, scale), Moments.of(y, y_mask, scale))


def for_query_heads(params: Nested, groups: int) -> Nested:
    """Repeat parameters of key heads for the query heads of their groups."""
    if groups == 1:
        return params
    return map_leaves(lambda t: t if t.ndim < 3 else t.repeat_interleave(groups, -3), params)


class FittedOnce(nn.Module):
    """State of a map that is fitted to vectors once (`phi.on_vectors`).

    Buffers: fitted_0, ...: parameters of the map (Hkv, ., d), initially those of `phi.unfitted`; fits: number of fits;
    passes: number of passes with a sample in `queries` and `keys` (Hkv, P, d). P is constant, because averages of
    states need constant shapes.

    Args:
        steps: training passes that are sampled before a fit.
        trained: make the fitted values parameters of this module, which later calibrations do not replace.
        vectors: vectors of each head for a fit.
    """

    def __init__(
        self,
        phi: FeatureMap,
        heads: int,
        d: int,
        steps: int,
        trained: bool = False,
        vectors: int = SAMPLE,
    ):
        super().__init__()
        self.vectors = vectors  # of each head, for a fit
        self.sampled = -(-vectors // steps)  # of each head, from a pass
        self.phi = phi
        self.heads = heads
        self.d = d
        self.steps = steps
        self.trained = trained
        self.kept: list[str] = []
        self.names = map_leaves(self._keep, phi.unfitted(d))
        self.register_buffer("fits", torch.zeros((), dtype=torch.long))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        for side in SIDES:
            self.register_buffer(side, torch.zeros(heads, self.sampled * steps, d))
        self.done = False  # whether fits > 0, without waiting for a device
        self.seen: dict[str, list[Tensor]] | None = None  # samples of the current calibration

    def _keep(self, t: Tensor) -> str:
        name, value = f"fitted_{len(self.kept)}", t.float().expand(self.heads, *t.shape).clone()
        self.kept.append(name)
        if self.trained:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)
        return name

    def params(self) -> Params:
        """Return the parameters of the map in float64.

        Matrix inverses then belong to the stored values, whatever the precision of the buffers.
        """
        params = map_leaves(lambda name: getattr(self, name).double(), self.names)
        return self.phi.admitted(params) if isinstance(self.phi, FeatureMap) else params

    @outside_graphs
    @torch.inference_mode(False)  # buffers of inference mode could not be trained or loaded later
    def advance(self) -> None:
        """Fit to the samples once `steps` passes have left them, then reset the samples."""
        if int(self.passes) >= self.steps:
            self._fit({side: getattr(self, side) for side in SIDES})
            self._forget()

    @outside_graphs
    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None) -> None:
        """Store a sample of the scaled queries and keys of a pass.

        x (B,H,L,d), y (B,Hkv,S,d), masks (B,L) and (B,S).
        """
        at = int(self.passes)
        if self.seen is None and (self.settled or at >= self.steps):
            return
        many = self.vectors if self.seen is not None else self.sampled
        samples = {}
        for side, t, mask in zip(SIDES, (x, y), (x_mask, y_mask)):
            rows = _gather_ranks(sample(t, mask, self.heads, many))
            samples[side] = _subsample(rows, many)
        if self.seen is not None:
            joined = {}
            for side, rows in samples.items():
                self.seen[side].append(rows)
                joined[side] = _subsample(torch.cat(self.seen[side], 1), self.vectors)
            if all(bool(rows.isfinite().any()) for rows in joined.values()):  # not of empty batches
                self._fit(joined)
            return
        for side, rows in samples.items():
            getattr(self, side)[:, at * many : (at + 1) * many] = rows
        self.passes.add_(1)

    def calibrate(self, begin: bool) -> None:
        """Begin or end a calibration.

        During a calibration every noted pass fits the map to all samples so far.
        """
        self.seen = {side: [] for side in SIDES} if begin and not self.settled else None
        if not begin and self.done:
            self._forget()

    @property
    def settled(self) -> bool:
        """Whether the stored values may have been trained."""
        return self.trained and self.done

    @torch.no_grad()
    def _fit(self, samples: dict[str, Tensor]) -> None:
        """Fit the map to the finite rows of the samples.

        Rows of processes without vectors are NaN.

        Raises:
            ValueError: as `phi.fit` does.
            NotFinite: a parameter is not finite in the dtype of its buffer; the stored ones stay.
        """
        params = self._params_of(*(samples[side].float() for side in SIDES))
        stored = {}
        for name, t in zip(leaves(self.names), leaves(params), strict=True):
            fitted = t.to(getattr(self, name)).contiguous()
            if several_ranks():
                ranks.broadcast(fitted, 0)
            stored[name] = fitted
        if not all(bool(t.isfinite().all()) for t in stored.values()):
            raise NotFinite(
                f"fitted parameters of {type(self.phi).__name__}: not finite; expected vectors without NaN, "
                "infinity or overflow"
            )
        for name, fitted in stored.items():
            if self.trained:
                getattr(self, name).copy_(fitted)
            else:
                setattr(self, name, fitted)
        self.fits.add_(1)
        self.done = True

    def _params_of(self, x: Tensor, y: Tensor) -> Params:
        return self.phi.fit(Statistics.of(x, y, *(t.isfinite().all(-1) for t in (x, y))))

    def _forget(self) -> None:
        self.passes.zero_()
        for side in SIDES:
            getattr(self, side).zero_()

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name in leaves(self.names):
            saved, own = state_dict.get(prefix + name), getattr(self, name)
            if saved is not None and saved.shape != own.shape:
                raise ValueError(
                    f"{prefix}{name}: saved (heads, clusters, d)={tuple(saved.shape)}, expected "
                    f"{tuple(own.shape)}; set features.queries and features.keys, or load without these "
                    "buffers"
                )
        self.make_room(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.done = int(self.fits) > 0

    def make_room(self, state: dict[str, Tensor], prefix: str) -> None:
        """Pad the samples in a state dict to the number of rows of this layer.

        `passes` is recomputed from the rows that hold vectors, because `steps` may differ from that of the saved layer.
        """
        for side in SIDES:
            saved, rows = state.get(prefix + side), self.sampled * self.steps
            if saved is not None and saved.ndim == 3:
                state[prefix + side] = F.pad(saved, (0, 0, 0, rows - saved.shape[1]))
                state[prefix + "passes"] = (saved != 0).any(-1).any(0).sum().clamp(
                    max=rows
                ) // self.sampled


class FittedToSequences(FittedOnce):
    """State of a map that is fitted to sequences (`phi.on_sequences`), by query head.

    It samples SAMPLE tokens of the first training pass, as whole sequences or as ordered subsets of longer ones. A
    calibration samples MORE times as many and fits at its end.
    Calibration passes use exact attention, so that deeper layers see the inputs of the original model. passes: number
    of tokens stored for each sequence.
    """

    def __init__(self, phi: FeatureMap, heads: int, d: int, trained: bool, causal: bool):
        super().__init__(phi, heads, d, 1, trained)
        self.causal = causal

    @outside_graphs
    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None) -> None:
        if self.seen is None and (self.settled or int(self.passes)):
            return
        if self.seen is not None:
            self._check_vectors(x, x_mask)
            self._check_vectors(y, y_mask)
        if self.seen and self.seen["keys"]:
            tokens = self.seen["keys"][0].shape[1]
        else:
            tokens = min(max(SHORTEST, 2 ** (y.shape[2] - 1).bit_length()), self.vectors)
        if several_ranks():  # batch sizes may differ: each rank gives one long sequence
            x = x[:1]
            y = y[:1]
            tokens = self.vectors
        most = self.vectors // tokens
        if self.seen is not None:
            most = most * MORE
        y = repeat_heads(y, self.heads)
        queries = _gather_ranks(sequences(x[:most], x_mask, tokens))
        keys = _gather_ranks(sequences(y[:most], y_mask, tokens))
        there = _full_tensor(queries, keys)
        for side, rows in zip(SIDES, (queries, keys)):
            rows = rows[:, there][:, :most]
            if self.seen is not None:
                self.seen[side] = [*self.seen[side], *rows.unbind(1)][:most]
            else:
                buffer = getattr(self, side).fill_(torch.nan)
                buffer[:, : rows.shape[1] * tokens] = rows.flatten(1, 2)
        if self.seen is None and bool(there.any()):
            self.passes.fill_(tokens)

    def _check_vectors(self, x: Tensor, mask: Tensor | None) -> None:
        """Raise NotFinite if an unmasked vector is not finite; exact attention accepts such vectors."""
        finite = x.isfinite().all(-1)
        if not bool((finite if mask is None else finite | ~mask[:, None]).all()):
            raise NotFinite(
                f"vectors for {type(self.phi).__name__}: expected vectors without NaN or infinity"
            )

    def calibrate(self, begin: bool) -> None:
        try:
            if not begin and self.seen and self.seen["keys"]:
                self._fit({side: torch.stack(rows, 1) for side, rows in self.seen.items()})
        finally:
            super().calibrate(begin)

    def make_room(self, state: dict[str, Tensor], prefix: str) -> None:
        """Do nothing: the number of rows is constant."""

    def _params_of(self, x: Tensor, y: Tensor) -> Params:
        if x.ndim == 3:
            x, y = (t.unflatten(1, (-1, int(self.passes))) for t in (x, y))
        there = _full_tensor(x, y)
        return self.phi.fit_sequences(x[:, there], y[:, there], self.causal)


def _full_tensor(x: Tensor, y: Tensor) -> Tensor:
    """Return which sequences (B,) of x and y (H, B, P, d) contain no NaN."""
    return (x.isfinite() & y.isfinite()).all(-1).all(-1).all(0)


def make_room(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Prepare a state dict for all such layers, before shapes are compared by name."""
    for path, module in model.named_modules():
        if isinstance(module, FittedOnce):
            module.make_room(state, f"{path}.")


def sample(x: Tensor, mask: Tensor | None, heads: int, many: int) -> Tensor:
    """Return `many` vectors of each key head, evenly spread: (heads, many, d).

    They come from x (B,H,L,d) where mask (B,L) is True. Vectors repeat if there are fewer; without any the result is
    NaN.
    """
    groups = x.shape[1] // heads
    pooled = x.detach().float().unflatten(1, (heads, groups)).permute(1, 2, 0, 3, 4).flatten(1, 3)
    if mask is None:
        there = torch.arange(pooled.shape[1], device=x.device)
    else:
        there = mask.repeat(groups, 1).flatten().nonzero().squeeze(-1)
    if not len(there):
        return pooled.new_full((heads, many, x.shape[-1]), torch.nan)
    return pooled[:, there[torch.arange(many, device=x.device) * len(there) // many]]


def sequences(x: Tensor, mask: Tensor | None, many: int) -> Tensor:
    """Return `many` vectors of each sequence in order: (H, B, many, d).

    They are evenly spread over x (B, H, L, d) where mask, (B or more, L), is True; NaN for a sequence without any.
    """
    if mask is None:
        mask = torch.ones(len(x), x.shape[2], dtype=torch.bool, device=x.device)
    mask = mask[: len(x)]
    count = mask.sum(-1, keepdim=True)
    unmasked_first = mask.long().argsort(dim=-1, descending=True, stable=True)
    positions = unmasked_first.gather(1, torch.arange(many, device=x.device) * count // many)
    index = positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    rows = x.detach().float().gather(2, index)
    return torch.where(count.view(-1, 1, 1, 1) > 0, rows, torch.nan).transpose(0, 1)


def _subsample(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` rows, evenly spread."""
    count = rows.shape[1]
    if count <= most:
        return rows
    return rows[:, torch.arange(most, device=rows.device) * count // most]


def several_ranks() -> bool:
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


def _gather_ranks(rows: Tensor) -> Tensor:
    if not several_ranks():
        return rows
    parts = [torch.empty_like(rows) for _ in range(ranks.get_world_size())]
    ranks.all_gather(parts, rows.contiguous())
    return torch.cat(parts, 1)
