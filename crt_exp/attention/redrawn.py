"""Layers without random features that draw a matrix, and draw it again while they train."""

import zlib

import torch
from torch import Tensor

from crt_exp.attention.base import in_backward
from crt_exp.attention.baselines import Baseline


class Redrawn(Baseline):
    """Its buffer `drawn` is drawn from (seed, layer, draw), so that it is the same on every process: anew after every
    `redraw_every` training passes, never in eval mode, in a backward pass or within a step; 0: never.

    Subclasses say which tensor a generator gives, and call `begin` once they can. Buffers, saved and restored: that
    one, steps and draws.
    """

    drawn: str

    def __init__(self, heads: int, d: int, *, redraw_every: int = 0, seed: int = 0, layer: int = 0, **sizes):
        super().__init__(heads, d, seed=seed, layer=layer, **sizes)
        self.redraw_every, self.seeds = redraw_every, (seed, layer)

    def sample(self, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def begin(self) -> None:
        self.register_buffer(self.drawn, self._draw(0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))

    def _draw(self, draw: int) -> Tensor:
        seed = zlib.crc32("/".join(map(str, (*self.seeds, draw))).encode())
        return self.sample(torch.Generator().manual_seed(seed))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        self.check_call(q, k)
        if self.training and self.redraw_every and not self.going_on and not in_backward():
            if int(self.steps) and int(self.steps) % self.redraw_every == 0:
                self.redraw()
            self.steps.add_(1)
        return super().forward(q, k, v, key_mask)

    @torch.inference_mode(False)   # a buffer of inference mode could not be trained or loaded later
    def redraw(self) -> None:
        """Draws again; new tensors, so that a graph that is still to be differentiated keeps its own."""
        self.draws.add_(1)
        setattr(self, self.drawn, self._draw(int(self.draws)).to(getattr(self, self.drawn)))
