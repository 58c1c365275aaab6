"""Implicit Attention Policies (Choromanski et al., 2021; HRF 4.4, K.1): patches of an image ranked by how much
attention they get, a small controller that reads those that rank first.

Legend: P policies at once, each with its own parameters and its own image; N parameters; C channels; L patches; T
numbers of a token; H heads, d; S numbers of the body's state; A actions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism

Looks = Literal["attention", "average"]


def column_sums(layer: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    """How much attention each key gets of all queries, (B, H, L): the transpose of the attention matrix times ones, for
    any attention in the time and memory that it takes itself, being the gradient of its outputs by values of width 1.
    """
    v = torch.ones(*k.shape[:3], 1, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(layer(q, k, v).sum(), v)[0].squeeze(-1)


def tokens(images: Tensor, patch: int) -> Tensor:
    """Of each patch of images (P, C, size, size) the sum of each channel, its place, from -1/2 to 1/2, and a one,
    (P, L, T); rows as in the image."""
    side = images.shape[-1] // patch
    content = F.avg_pool2d(images, patch, divisor_override=1).flatten(2).mT
    place = (torch.arange(side) + 0.5) / side - 0.5
    x, y = torch.meshgrid(place, place, indexing="ij")
    rest = torch.stack([x, y, torch.ones_like(x)], -1).flatten(0, 1)
    return torch.cat([content, rest.expand(len(images), -1, -1)], -1)


@dataclass(frozen=True)
class ImplicitPolicy:
    """Actions of `actions` numbers within -1 to 1, of images (channels, size, size) and `states` numbers.

    Each of `heads` heads has queries and keys of dimension d, made from the tokens and put on the unit sphere, as in
    the paper; the `top` patches that get most attention are kept, the others masked. The controller is linear with a
    hyperbolic tangent: it reads the mean place and content of the kept patches of each head, and the state. looks:
    "average" keeps all patches: a policy without attention.
    """

    channels: int
    size: int
    states: int
    actions: int
    patch: int = 2
    d: int = 8
    heads: int = 1
    top: int = 8
    looks: Looks = "attention"

    def __post_init__(self):
        if self.size % self.patch:
            raise ConfigError(f"task.patch={self.patch}: expected a divisor of the {self.size} pixels of a side")
        if not 0 < self.top <= self.length:
            raise ConfigError(f"task.top={self.top}: expected 1 to {self.length}, the patches of an image")

    @property
    def length(self) -> int:
        """L."""
        return (self.size // self.patch) ** 2

    @property
    def read(self) -> int:
        """Numbers that the controller reads: means of the kept patches, the state and a one."""
        return self.heads * (self.channels + 2) + self.states + 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one policy's parameters, in their order."""
        width = self.channels + 3                                                      # T
        ranked = {"query": (self.heads, width, self.d), "key": (self.heads, width, self.d)}
        return (ranked if self.looks == "attention" else {}) | {"controller": (self.read, self.actions)}

    @property
    def parameters(self) -> int:
        """N."""
        return sum(map(prod, self.shapes.values()))

    def initial(self, generator: torch.Generator, lead: Tensor) -> Tensor:
        """(N,): random queries and keys of opposite sign, so that patches unlike the others get most attention, and a
        controller that goes by where each head looks. lead: (heads, 3, A), of each head the weights of the row and the
        column of the mean place, and what is added."""
        controller = torch.zeros(self.read, self.actions)
        for head, weights in enumerate(lead):
            first = head * (self.channels + 2) + self.channels
            controller[first:first + 2] = weights[:2]
            controller[-1] += weights[2]
        query = torch.randn(self.shapes.get("query", (0,)), generator=generator)
        return torch.cat([query.flatten(), -query.flatten(), controller.flatten()])

    def parts(self, theta: Tensor) -> Iterator[Tensor]:
        """Parameters (P, N) as matrices, in the order of `shapes`."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        for part, shape in zip(theta.split(sizes, -1), self.shapes.values()):
            yield part.unflatten(-1, shape)

    def layer(self, mechanism: Mechanism) -> nn.Module | None:
        """What ranks the patches; None where all are kept."""
        return None if self.looks == "average" else mechanism.layer(self.heads, self.d, scaling=1.0).eval()

    def kept(self, layer: nn.Module | None, theta: Tensor, images: Tensor) -> Tensor:
        """Which patches the controller reads, (P, H, L), ones and zeros; of equal ranks the first, in their order."""
        if layer is None:
            return torch.ones(len(images), self.heads, self.length)
        query, key, _ = self.parts(theta)
        read = tokens(images, self.patch)
        q, k = (F.normalize(torch.einsum("plt,phtd->phld", read, part), dim=-1) for part in (query, key))
        ranks = column_sums(layer, q, k)                                               # (P, H, L)
        order = ranks.argsort(dim=-1, descending=True, stable=True)[..., :self.top]
        return torch.zeros_like(ranks).scatter(-1, order, 1.0)

    @torch.no_grad()
    def act(self, layer: nn.Module | None, theta: Tensor, images: Tensor, states: Tensor) -> Tensor:
        """theta (P, N), images (P, C, size, size), states (P, S) -> actions (P, A)."""
        *_, controller = self.parts(theta)
        kept = self.kept(layer, theta, images)
        seen = tokens(images, self.patch)[..., :-1]                                    # (P, L, C + 2)
        seen[..., :self.channels] /= self.patch**2                                     # a mean, of the size of places
        mean = kept @ seen / kept.sum(-1, keepdim=True)                                # (P, H, C + 2)
        read = torch.cat([mean.flatten(1), states, torch.ones(len(states), 1)], 1)
        return torch.tanh(torch.einsum("pr,pra->pa", read, controller))
