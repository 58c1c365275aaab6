"""Tensors that a layer draws from a seed, and draws again while it trains."""

import zlib

import torch
from torch import Tensor, nn

from crt_exp.attention.base import in_backward
from crt_exp.attention.baselines import Baseline


class Redraws(nn.Module):
    """Tensors that are drawn from a seed: buffers, with `steps` and `draws`.

    Of those that are drawn again the layer keeps a second copy, which alone counts: averages of weights (EMA, SWA)
    average buffers, and a mean of draws is not a draw. An averaged layer draws again where its `draws` have grown.
    """

    redraw_every: int
    held = 0                        # the number of the draw that the tensors are of
    kept: dict[str, Tensor] = {}    # the copies

    def register_drawn(self, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            self.register_buffer(name, t)
        self.kept = {name: t.clone() for name, t in tensors.items() if self.redraw_every}
        for name in ("steps", "draws"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def rows(self, name: str) -> Tensor:
        buffer = getattr(self, name)
        if name not in self.kept:
            return buffer
        self._keep_up()
        if not buffer.is_meta:
            self.kept[name] = self.kept[name].to(buffer)
        return self.kept[name]

    def count_pass(self) -> None:
        """At the start of a training pass: draws again where it is time."""
        if int(self.steps) and int(self.steps) % self.redraw_every == 0:
            self.redraw()
        self.steps.add_(1)

    def redraw(self) -> None:
        """Draws again now, into new tensors: a graph that is still to be differentiated keeps its own."""
        self.draws.add_(1)
        self._hold(int(self.draws))

    def _keep_up(self) -> None:
        """An average of counts is cut to a whole number, so fewer draws change nothing."""
        if not torch.compiler.is_compiling() and not self.draws.is_meta and (draws := int(self.draws)) > self.held:
            self._hold(draws)

    @torch.inference_mode(False)   # a buffer of inference mode could not be trained or loaded later
    def _hold(self, draw: int) -> None:
        self.held = draw
        for name, t in self.rows_of_draw(draw).items():
            setattr(self, name, t.to(getattr(self, name)).contiguous())
        self._keep()

    def _keep(self) -> None:
        self.kept = {name: getattr(self, name).clone() for name in self.kept}

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update((prefix + name, self.rows(name).clone()) for name in self.kept)

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        if self.kept:
            self.held = int(self.draws)
            self._keep()


class Redrawn(Redraws, Baseline):
    """Its tensor `name` is drawn from (seed, layer, draw), so that it is the same on every process: anew after every
    `redraw_every` training passes, never in eval mode, in a backward pass or within a step; 0: never.

    Subclasses say which tensor a generator gives, and call `begin` once they can. Saved and restored: that one, steps
    and draws.
    """

    name: str

    def __init__(self, heads: int, d: int, *, redraw_every: int = 0, seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, seed=seed, layer=layer, **sizes)
        self.redraw_every, self.seeds = redraw_every, (seed, layer)

    def sample(self, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def begin(self) -> None:
        self.register_drawn(self.rows_of_draw(0))

    def rows_of_draw(self, draw: int) -> dict[str, Tensor]:
        seed = zlib.crc32("/".join(map(str, (*self.seeds, draw))).encode())
        return {self.name: self.sample(torch.Generator().manual_seed(seed))}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        if self.training and self.redraw_every and not self.going_on and not in_backward():
            self.count_pass()
        return super().forward(q, k, v, key_mask)
