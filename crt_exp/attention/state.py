"""State of maps that are fitted to vectors or sequences once.

`FittedOnce` fits a map to vectors. Each of the first training passes leaves a sample of its queries and keys, and the
fit happens between two passes. A calibration fits after each of its passes.
`FittedToSequences` uses whole sequences, of the first training pass or of a calibration.
Samples come from all processes, and parameters from the first, so that all ranks agree.

Notation: B batch, H query heads, Hkv key heads, P vectors of a sample, d.
"""

import itertools
from typing import Any

import torch
import torch.distributed as ranks
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention.base import add_to_counter, read_value
from crt_exp.attention.checks import outside_graphs, repeat_heads
from crt_exp.attention.running import several_ranks
from crt_exp.features.base import FeatureMap, NotFinite, Params
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import leaves, map_leaves

SAMPLE = 512  # vectors of each head for a fit, for queries and keys each
MIN_TOKENS = 16  # of a sequence
CALIBRATION_FACTOR = 8  # size of a calibration's sample, relative to that of a training pass
SIDES = ("queries", "keys")


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

    fits: Tensor
    passes: Tensor
    causal = False  # whether the sequences are those of causal attention

    def __init__(
        self,
        phi: Any,
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
        unfitted = phi.unfitted(d)
        numbers = itertools.count()
        self.names = map_leaves(lambda _: f"fitted_{next(numbers)}", unfitted)
        for name, t in zip(leaves(self.names), leaves(unfitted)):
            value = t.float().expand(heads, *t.shape).clone()
            if trained:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.register_buffer("fits", torch.zeros((), dtype=torch.long))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        for side in SIDES:
            self.register_buffer(side, torch.zeros(heads, self.sampled * steps, d))
        self.done = False  # whether fits > 0, without waiting for a device
        self.calibration: dict[str, list[Tensor]] | None = None  # samples of the current one

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
        if read_value(self.passes) >= self.steps:
            self._fit({side: getattr(self, side) for side in SIDES})
            self._forget()

    @outside_graphs
    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None) -> None:
        """Store a sample of the scaled queries and keys of a pass.

        x (B,H,L,d), y (B,Hkv,S,d), masks (B,L) and (B,S).
        """
        calibration = self.calibration
        passes = read_value(self.passes)
        if calibration is None and (self.settled or passes >= self.steps):
            return
        count = self.sampled if calibration is None else self.vectors
        samples = {}
        for side, t, mask in zip(SIDES, (x, y), (x_mask, y_mask)):
            rows = _gather_ranks(sample_vectors(t, mask, self.heads, count))
            samples[side] = _subsample(rows, count)
        if calibration is None:
            for side, rows in samples.items():
                getattr(self, side)[:, passes * count : (passes + 1) * count] = rows
            add_to_counter(self.passes)
            return
        for side, rows in samples.items():
            calibration[side].append(rows)
            samples[side] = _subsample(torch.cat(calibration[side], 1), self.vectors)
        if all(bool(rows.isfinite().any()) for rows in samples.values()):  # not of empty batches
            self._fit(samples)

    def calibrate(self, begin: bool) -> None:
        """Begin or end a calibration.

        During a calibration every noted pass fits the map to all samples so far.
        """
        self.calibration = None
        if begin and not self.settled:
            self.calibration = {side: [] for side in SIDES}
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
        params = self._fit_params(samples["queries"].float(), samples["keys"].float())
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
        add_to_counter(self.fits)
        self.done = True

    def _fit_params(self, x: Tensor, y: Tensor) -> Params:
        return self.phi.fit(Statistics.of(x, y, x.isfinite().all(-1), y.isfinite().all(-1)))

    def _forget(self) -> None:
        self.passes.zero_()
        for side in SIDES:
            getattr(self, side).zero_()

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name in leaves(self.names):
            saved = state_dict.get(prefix + name)
            own = getattr(self, name)
            if saved is not None and saved.shape != own.shape:
                raise ValueError(
                    f"{prefix}{name}: saved (heads, clusters, d)={tuple(saved.shape)}, expected "
                    f"{tuple(own.shape)}; set features.queries and features.keys, or load without these "
                    "buffers"
                )
        self.make_room(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.done = read_value(self.fits) > 0

    def make_room(self, state: dict[str, Tensor], prefix: str) -> None:
        """Pad the samples in a state dict to the number of rows of this layer.

        `passes` is recomputed from the rows that hold vectors, because `steps` may differ from that of the saved layer.
        """
        rows = self.sampled * self.steps
        for side in SIDES:
            saved = state.get(prefix + side)
            if saved is not None and saved.ndim == 3:
                state[prefix + side] = F.pad(saved, (0, 0, 0, rows - saved.shape[1]))
                stored = (saved != 0).any(-1).any(0).sum().clamp(max=rows)
                state[prefix + "passes"] = stored // self.sampled


class FittedToSequences(FittedOnce):
    """State of a map that is fitted to sequences (`phi.on_sequences`), by query head.

    It samples SAMPLE tokens of the first training pass, as whole sequences or as ordered subsets of longer ones. A
    calibration samples MORE times as many and fits at its end.
    Calibration passes use exact attention, so that deeper layers see the inputs of the original model. passes: number
    of tokens stored for each sequence.
    """

    phi: FeatureMap

    def __init__(self, phi: FeatureMap, heads: int, d: int, trained: bool, causal: bool):
        super().__init__(phi, heads, d, 1, trained)
        self.causal = causal

    @outside_graphs
    @torch.inference_mode(False)
    @torch.no_grad()
    def note(self, x: Tensor, y: Tensor, x_mask: Tensor | None, y_mask: Tensor | None) -> None:
        calibration = self.calibration
        if calibration is None and (self.settled or read_value(self.passes)):
            return
        if calibration is not None:
            self._check_vectors(x, x_mask)
            self._check_vectors(y, y_mask)
        tokens = min(max(MIN_TOKENS, 2 ** (y.shape[2] - 1).bit_length()), self.vectors)
        if calibration is not None and calibration["keys"]:
            tokens = calibration["keys"][0].shape[1]
        if several_ranks():  # batch sizes may differ: each rank gives one long sequence
            x = x[:1]
            y = y[:1]
            tokens = self.vectors
        most = self.vectors // tokens
        if calibration is not None:
            most = most * CALIBRATION_FACTOR
        y = repeat_heads(y, self.heads)
        queries = _gather_ranks(sample_sequences(x[:most], x_mask, tokens))
        keys = _gather_ranks(sample_sequences(y[:most], y_mask, tokens))
        valid = _finite_sequences(queries, keys)
        for side, rows in zip(SIDES, (queries, keys)):
            rows = rows[:, valid][:, :most]
            if calibration is not None:
                calibration[side] = [*calibration[side], *rows.unbind(1)][:most]
            else:
                buffer = getattr(self, side).fill_(torch.nan)
                buffer[:, : rows.shape[1] * tokens] = rows.flatten(1, 2)
        if calibration is None and bool(valid.any()):
            self.passes.fill_(tokens)

    def _check_vectors(self, x: Tensor, mask: Tensor | None) -> None:
        """Raise NotFinite if an unmasked vector is not finite; exact attention accepts such vectors."""
        finite = x.isfinite().all(-1)
        if mask is not None:
            finite = finite | ~mask[:, None]
        if not bool(finite.all()):
            raise NotFinite(
                f"vectors for {type(self.phi).__name__}: expected vectors without NaN or infinity"
            )

    def calibrate(self, begin: bool) -> None:
        try:
            samples = self.calibration
            if not begin and samples and samples["keys"]:
                self._fit({side: torch.stack(rows, 1) for side, rows in samples.items()})
        finally:
            super().calibrate(begin)

    def make_room(self, state: dict[str, Tensor], prefix: str) -> None:
        """Do nothing: the number of rows is constant."""

    def _fit_params(self, x: Tensor, y: Tensor) -> Params:
        if x.ndim == 3:
            tokens = read_value(self.passes)
            x = x.unflatten(1, (-1, tokens))
            y = y.unflatten(1, (-1, tokens))
        valid = _finite_sequences(x, y)
        return self.phi.fit_sequences(x[:, valid], y[:, valid], self.causal)


def _finite_sequences(x: Tensor, y: Tensor) -> Tensor:
    """Return which sequences (B,) of x and y (H, B, P, d) contain no NaN."""
    return (x.isfinite() & y.isfinite()).all(-1).all(-1).all(0)


def make_room(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Prepare a state dict for all such layers, before shapes are compared by name."""
    for path, module in model.named_modules():
        if isinstance(module, FittedOnce):
            module.make_room(state, f"{path}.")


def sample_vectors(x: Tensor, mask: Tensor | None, heads: int, count: int) -> Tensor:
    """Return `count` vectors of each key head, evenly spread: (heads, count, d).

    They come from x (B,H,L,d) where mask (B,L) is True. Vectors repeat if there are fewer; without any the result is
    NaN.
    """
    groups = x.shape[1] // heads
    by_group = x.detach().float().unflatten(1, (heads, groups))
    pooled = by_group.permute(1, 2, 0, 3, 4).flatten(1, 3)
    if mask is None:
        mask = torch.ones(len(x), x.shape[2], dtype=torch.bool, device=x.device)
    unmasked = mask.repeat(groups, 1).flatten()
    if not len(unmasked):
        return pooled.new_full((heads, count, pooled.shape[-1]), torch.nan)
    unmasked_first = unmasked.long().argsort(descending=True, stable=True)
    number = unmasked.sum()
    spread = torch.arange(count, device=x.device)
    rows = pooled[:, unmasked_first[spread * number // count]]
    return torch.where(number > 0, rows, torch.nan)


def sample_sequences(x: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """Return `count` vectors of each sequence in order: (H, B, count, d).

    They are evenly spread over x (B, H, L, d) where mask, (B or more, L), is True; NaN for a sequence without any.
    """
    if mask is None:
        mask = torch.ones(len(x), x.shape[2], dtype=torch.bool, device=x.device)
    mask = mask[: len(x)]
    unmasked = mask.sum(-1, keepdim=True)
    unmasked_first = mask.long().argsort(dim=-1, descending=True, stable=True)
    spread = torch.arange(count, device=x.device) * unmasked // count
    index = unmasked_first.gather(1, spread)[:, None, :, None]
    rows = x.detach().float().gather(2, index.expand(-1, x.shape[1], -1, x.shape[-1]))
    return torch.where(unmasked.view(-1, 1, 1, 1) > 0, rows, torch.nan).transpose(0, 1)


def _subsample(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` rows, evenly spread."""
    count = rows.shape[1]
    if count <= most:
        return rows
    return rows[:, torch.arange(most, device=rows.device) * count // most]


def _gather_ranks(rows: Tensor) -> Tensor:
    if not several_ranks():
        return rows
    parts = [torch.empty_like(rows) for _ in range(ranks.get_world_size())]
    ranks.all_gather(parts, rows.contiguous())
    return torch.cat(parts, 1)
