"""Tensors that a layer draws from a seed, and draws again while it trains."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from crt_exp.attention.base import in_backward
from crt_exp.attention.baselines import Baseline


class Redraws(nn.Module):
    """A layer with tensors that are drawn from a seed: buffers, with the counters `steps` and `draws`.

    Subclasses define `rows_of_draw(draw)`, which gives them by name.

    Averages of weights (EMA, SWA) change buffers in place, and a mean of draws is not a draw. The layer therefore
    computes with a copy of each buffer that is drawn again, and draws again where its `draws` have grown. A buffer that
    was replaced by another tensor (a loader, torch.func.functional_call) counts itself.
    """

    redraw_every: int
    held = 0                                       # the number of the draw in the copies
    kept: dict[str, tuple[Tensor, Tensor]] = {}    # buffers and their copies

    def register_drawn(self, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            self.register_buffer(name, t)
        for name in ("steps", "draws"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self._keep(tensors if self.redraw_every else ())

    def rows(self, name: str) -> Tensor:
        """The tensor to compute with."""
        buffer = getattr(self, name)
        own, copy = self.kept.get(name, (None, buffer))
        if torch.compiler.is_compiling() or buffer.is_meta or own is None:
            return copy
        if own is not buffer:
            return buffer
        if int(self.draws) > self.held:    # an average of counts is rounded down: fewer draws change nothing
            self._draw_again()
        return self.kept[name][1].to(buffer)

    def count_pass(self) -> None:
        """At the start of a training pass: draws again where it is time."""
        if int(self.steps) and int(self.steps) % self.redraw_every == 0:
            self.redraw()
        self.steps.add_(1)

    def redraw(self) -> None:
        """Draws again now, into new tensors: a graph that is still to be differentiated keeps its own."""
        self.draws.add_(1)
        self._draw_again()

    @torch.inference_mode(False)   # a buffer of inference mode could not be trained or loaded later
    def _draw_again(self) -> None:
        self.held = int(self.draws)
        for name, t in self.rows_of_draw(self.held).items():
            setattr(self, name, t.to(getattr(self, name)).contiguous())
        self._keep(self.kept)

    def _keep(self, names: Iterable[str]) -> None:
        self.kept = {name: (getattr(self, name), getattr(self, name).clone()) for name in names}

    def _apply(self, *args, **options) -> "Redraws":
        for name in self.kept:      # the new buffers are of the copies, not of averages
            setattr(self, name, self.rows(name))
        super()._apply(*args, **options)
        self._keep(self.kept)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update((prefix + name, self.rows(name).clone()) for name in self.kept)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        if self.kept:
            self.held = int(self.draws)
            self._keep(self.kept)


class Redrawn(Redraws, Baseline):
    """A layer whose tensor `name` is drawn from (seed, layer, draw), the same on every process: again after every
    `redraw_every` training passes, never in eval mode, in a backward pass or within a step; 0: never.

    Subclasses define `sample(generator)`, and call `register_drawn` at the end of `__init__`.
    """

    name: str

    def __init__(self, heads: int, d: int, *, redraw_every: int = 0, seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, seed=seed, layer=layer, **sizes)
        self.redraw_every, self.seeds = redraw_every, (seed, layer)

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        seed = zlib.crc32("/".join(map(str, (*self.seeds, draw))).encode())
        return {self.name: self.sample(torch.Generator().manual_seed(seed))}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        if self.training and self.redraw_every and not self.going_on and not in_backward():
            self.count_pass()
        return super().forward(q, k, v, key_mask)
