"""Implicit Attention Policies (Choromanski et al., 2021; HRF 4.4, K.1).

Attention ranks the patches of an image. A small controller reads the patches of highest rank.

Notation: P policies, each with its own parameters and image; N parameters; C channels; L patches; T numbers of a token;
H heads; d head dimension; S numbers of the body's state; A actions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError


def column_sums(layer: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    """Total attention that each key receives from all queries, (B, H, L).

    This is the transposed attention matrix times ones. It is the gradient of the outputs by values of width 1, so any
    attention computes it in its own time and memory.
    """
    v = torch.ones(*k.shape[:3], 1, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(layer(q, k, v).sum(), v)[0].squeeze(-1)


def tokens(images: Tensor, patch: int) -> Tensor:
    """Tokens of the patches of images (P, C, size, size), (P, L, T).

    A token holds the sum of each channel over the patch, the patch position from -1/2 to 1/2, and a one.
    """
    side = images.shape[-1] // patch
    content = F.avg_pool2d(images, patch, divisor_override=1).flatten(2).mT
    place = (torch.arange(side) + 0.5) / side - 0.5
    x, y = torch.meshgrid(place, place, indexing="ij")
    rest = torch.stack([x, y, torch.ones_like(x)], -1).flatten(0, 1)
    return torch.cat([content, rest.expand(len(images), -1, -1)], -1)


@dataclass(frozen=True)
class ImplicitPolicy:
    """A policy from images (channels, size, size) and states to actions in [-1, 1].

    Each of `heads` heads has queries and keys of dimension d, which are projections of the tokens on the unit sphere. A
    head keeps the `top` patches with the most attention. The controller is linear, followed by tanh. It reads the mean
    position and content of the kept patches of each head, and the state. attends=False keeps all patches: a policy
    without attention.
    """

    channels: int
    size: int
    states: int
    actions: int
    patch: int = 2
    d: int = 8
    heads: int = 1
    top: int = 8
    attends: bool = True

    def __post_init__(self):
        if self.size % self.patch:
            raise ConfigError(
                f"task.patch={self.patch}: expected a divisor of the image size, {self.size} pixels"
            )
        if not 0 < self.top <= self.length:
            raise ConfigError(
                f"task.top={self.top}: expected 1 to {self.length}, the patches of an image"
            )

    @property
    def length(self) -> int:
        """Number of patches L."""
        return (self.size // self.patch) ** 2

    @property
    def read(self) -> int:
        """Number of inputs of the controller: means of the kept patches, state and a one."""
        return self.heads * (self.channels + 2) + self.states + 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one policy, in order."""
        width = self.channels + 3  # T
        ranked = {"query": (self.heads, width, self.d), "key": (self.heads, width, self.d)}
        controller = {"controller": (self.read, self.actions)}
        return ranked | controller if self.attends else controller

    @property
    def parameters(self) -> int:
        """Number of parameters N."""
        return sum(map(prod, self.shapes.values()))

    def initial(self, generator: torch.Generator, lead: Tensor) -> Tensor:
        """Initial parameters (N,).

        Queries and keys are random with opposite signs, so that patches unlike the others get the most attention. The
        controller depends on the position of each head only. lead (heads, 3, A): weights of the row and the column of
        the mean position, and a bias.
        """
        controller = torch.zeros(self.read, self.actions)
        for head, weights in enumerate(lead):
            first = head * (self.channels + 2) + self.channels
            controller[first : first + 2] = weights[:2]
            controller[-1] += weights[2]
        query = torch.randn(self.shapes.get("query", (0,)), generator=generator)
        return torch.cat([query.flatten(), -query.flatten(), controller.flatten()])

    def parts(self, theta: Tensor) -> Iterator[Tensor]:
        """Yield the parameters (P, N) as matrices, in the order of `shapes`."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        for part, shape in zip(theta.split(sizes, -1), self.shapes.values()):
            yield part.unflatten(-1, shape)

    def layer(self, mechanism: Mechanism) -> nn.Module | None:
        """The attention that ranks the patches; None if all are kept."""
        if not self.attends:
            return None
        return mechanism.layer(self.heads, self.d, scaling=1.0).eval()

    def selected_patches(self, layer: nn.Module | None, theta: Tensor, images: Tensor) -> Tensor:
        """Patches that the controller reads, (P, H, L), as ones and zeros.

        Among equal ranks the first patches are kept.
        """
        if layer is None:
            return torch.ones(len(images), self.heads, self.length)
        query, key, _ = self.parts(theta)
        read = tokens(images, self.patch)
        q = F.normalize(torch.einsum("plt,phtd->phld", read, query), dim=-1)
        k = F.normalize(torch.einsum("plt,phtd->phld", read, key), dim=-1)
        ranks = column_sums(layer, q, k)  # (P, H, L)
        order = ranks.argsort(dim=-1, descending=True, stable=True)[..., : self.top]
        return torch.zeros_like(ranks).scatter(-1, order, 1.0)

    @torch.no_grad()
    def act(self, layer: nn.Module | None, theta: Tensor, images: Tensor, states: Tensor) -> Tensor:
        """theta (P, N), images (P, C, size, size), states (P, S) -> actions (P, A)."""
        *_, controller = self.parts(theta)
        kept = self.selected_patches(layer, theta, images)
        seen = tokens(images, self.patch)[..., :-1]  # (P, L, C + 2)
        seen[..., : self.channels] /= self.patch**2  # a mean, of the scale of positions
        mean = kept @ seen / kept.sum(-1, keepdim=True)  # (P, H, C + 2)
        read = torch.cat([mean.flatten(1), states, torch.ones(len(states), 1)], 1)
        return torch.tanh(torch.einsum("pr,pra->pa", read, controller))
