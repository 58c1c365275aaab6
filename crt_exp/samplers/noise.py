"""Random projections, dense or by fast Hadamard transform, and helpers.

Helpers handle nested values and autocast. A nested value is a leaf (a `Noise` or tensor), None, or a tuple of nested
values, one for each part of a map.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Hadamard projections use transforms if m d / (stacks n) is at least this. Measured for a million outputs (one x86
# core, float32): rows 12.4 ms at 576, 13.6 at 768, 17.6 at 1024, 37 at 2048; transforms 14.3, 9.1, 10.3, 11.2.
# Not measured on GPUs.
MATRIX_FREE_FROM = 768
Nested = Any  # a leaf, None, or a tuple of nested values
RADIX = 64  # largest factor of the fast transform; products with H_64 are faster than more passes over memory


def cacheable() -> bool:
    """Whether a new tensor may be cached: not inside torch.func or torch.export."""
    return not (transforming() or torch.compiler.is_exporting())


def transforming() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) is active.

    Its tensors are wrappers that are invalid afterwards.
    """
    return torch._C._are_functorch_transforms_active()


class cached_property:  # noqa: N801 (used as a decorator)
    """functools.cached_property without its lock, which torch.compile cannot trace.

    Values computed inside torch.func or torch.export are not cached.
    """

    def __init__(self, function):
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = self.function(instance)
        if cacheable():
            instance.__dict__[self.name] = value
        return value


class Noise(ABC):
    """m random projections in d dimensions, shape (*batch, m, d).

    Attributes:
        gaussian: whether rows are exactly N(0, I_d); discrete maps need it.
        matrix_free: whether `project` is faster than a product with `rows()`.

    >>> from crt_exp.samplers import iid
    >>> noise = iid(8, 4)
    >>> torch.equal(noise.project(torch.eye(4)), noise.rows().mT)
    True
    """

    matrix_free = False
    m: int
    d: int
    batch: tuple[int, ...]
    gaussian: bool

    @abstractmethod
    def rows(self) -> Tensor:
        """Return the matrix W, (*batch, m, d)."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors()[0].dtype

    @abstractmethod
    def to(self, *args, **kwargs) -> "Noise":
        """Convert dtype or device, as `Tensor.to`."""

    def project(self, x: Tensor) -> Tensor:
        """Return x W^T (..., L, m) for x (..., L, d), in float32 or float64.

        Lower precision is not enough: an absolute error of a log feature is a relative error of the feature.
        """
        self.check(x)
        with no_autocast(x):
            return self._project(at_least_float32(x))

    def _project(self, x: Tensor) -> Tensor:
        return x @ self.rows().to(x.dtype).mT

    def check(self, x: Tensor) -> None:
        """Raise ValueError if the last dimension of x (..., L, d) differs from d."""
        if x.shape[-1] != self.d:
            raise ValueError(
                f"x has {x.shape[-1]} dimensions, expected {self.d}: check the axis order (..., L, d)"
            )

    @cached_property
    def sq_norm(self) -> Tensor:
        """|omega_m|^2, (*batch, 1, m)."""
        with torch.inference_mode(False):  # a cached inference tensor would fail in backward
            return self.rows().square().sum(-1).unsqueeze(-2)

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that define this object."""

    def on_sphere(self) -> "Noise":
        """Return rows of equal direction with length sqrt(d), for SMREG."""
        return DenseNoise(_directions(self.rows()) * self.d**0.5, gaussian=False)

    def scaled(self, factor: Tensor) -> "Noise":
        """Return the rows multiplied by `factor` (*batch, m, 1)."""
        return DenseNoise(self.rows() * factor, gaussian=False)

    def __repr__(self):
        return f"{type(self).__name__}(m={self.m}, d={self.d}, batch={self.batch})"


class DenseNoise(Noise):
    """Random projections stored as a matrix W (*batch, m, d).

    >>> DenseNoise(torch.eye(4), gaussian=False).project(torch.ones(1, 4))
    tensor([[1., 1., 1., 1.]])
    """

    def __init__(self, weight: Tensor, gaussian: bool):
        self.weight = weight
        self.gaussian = gaussian
        *batch, self.m, self.d = weight.shape
        self.batch = tuple(batch)

    def rows(self) -> Tensor:
        return self.weight

    def tensors(self) -> list[Tensor]:
        return [self.weight]

    def to(self, *args, **kwargs) -> "DenseNoise":
        return DenseNoise(self.weight.to(*args, **kwargs), self.gaussian)


class HadamardNoise(Noise):
    """Rows of stacked products H D_k ... H D_1, scaled by lengths.

    H is the orthonormal Hadamard matrix and D_i are diagonals of random signs; see `hadamard`. The object stores signs
    / sqrt(n) (*batch, stacks, k, n) and lengths (*batch, m, 1). A transform takes O(m log d) per vector. Below
    MATRIX_FREE_FROM the product with the rows is faster; the rows are then cached.

    >>> signs = torch.full((1, 1, 4), 0.5)
    >>> HadamardNoise(signs, lengths=torch.ones(4, 1), d=4).rows()[0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    gaussian = False

    def __init__(self, signs: Tensor, lengths: Tensor, d: int):
        self.signs = signs
        self.lengths = lengths
        self.d = d
        self.m = lengths.shape[-2]
        self.batch = tuple(lengths.shape[:-2])
        self.n = signs.shape[-1]
        self.matrix_free = self.m * self.d >= MATRIX_FREE_FROM * self.n * signs.shape[-3]

    def rows(self) -> Tensor:
        return self._rows

    def tensors(self) -> list[Tensor]:
        return [self.signs, self.lengths]

    @cached_property
    def _rows(self) -> Tensor:
        with torch.no_grad(), torch.inference_mode(False):  # see sq_norm
            unit = torch.eye(self.d, dtype=torch.float64, device=self.signs.device)
            columns = self._transform(unit)  # (*batch, d, m)
            return columns.mT.to(self.lengths.dtype).contiguous()

    def _project(self, x: Tensor) -> Tensor:
        return self._transform(x) if self.matrix_free else super()._project(x)

    def _transform(self, x: Tensor) -> Tensor:
        """Map x (..., L, d) to (..., L, m) by fast transforms."""
        x = torch.nn.functional.pad(x, (0, self.n - self.d)).unsqueeze(-2)  # (..., L, 1, n)
        for signs in self.signs.to(x.dtype).unsqueeze(-4).unbind(-2):  # (*batch, 1, stacks, n)
            x = fwht(x * signs)  # (..., L, stacks, n)
        return x.flatten(-2)[..., : self.m] * self.lengths.to(x.dtype).mT

    @cached_property
    def sq_norm(self) -> Tensor:
        # the cut to d columns changes the lengths
        rows = self.rows() if self.d < self.n else self.lengths
        with torch.inference_mode(False):
            return rows.square().sum(-1).unsqueeze(-2)

    def on_sphere(self) -> Noise:
        if self.d < self.n:
            return super().on_sphere()
        return HadamardNoise(self.signs, torch.full_like(self.lengths, self.d**0.5), self.d)

    def scaled(self, factor: Tensor) -> Noise:
        return HadamardNoise(self.signs, self.lengths * factor, self.d)

    def to(self, *args, **kwargs) -> "HadamardNoise":
        return HadamardNoise(
            self.signs.to(*args, **kwargs), self.lengths.to(*args, **kwargs), self.d
        )


def match_float64(noise: Nested, dtype: torch.dtype) -> Nested:
    """Convert the projections to float64 if the vectors are float64."""
    if dtype != torch.float64:
        return noise

    def convert(part: Noise) -> Noise:
        return part if part.dtype == dtype else part.to(dtype)

    return map_leaves(convert, noise)


def fwht(x: Tensor) -> Tensor:
    """Fast Walsh-Hadamard transform of the last axis, with entries +-1 (unnormalised).

    The length must be a power of two. The transform applies the Kronecker factors of H_n, of size at most 64, in O(n
    log n). It is differentiable.
    """
    hadamard = _hadamard_matrix if cacheable() else _hadamard_matrix.__wrapped__
    h = 1
    for r in _radices(x.shape[-1]):
        matrix = hadamard(r, x.dtype, x.device)
        if h == 1:
            x = (x.unflatten(-1, (-1, r)) @ matrix).flatten(-2)
        else:
            x = (matrix @ x.unflatten(-1, (-1, r, h))).flatten(-3)
        h *= r
    return x


def _radices(n: int) -> list[int]:
    """Return powers of two up to RADIX with product n, as even as possible."""
    bits = n.bit_length() - 1
    steps = max(1, -(-bits // (RADIX.bit_length() - 1)))
    size, longer = divmod(bits, steps)
    return [2 ** (size + 1)] * longer + [2**size] * (steps - longer)


@lru_cache
def _hadamard_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a cached inference tensor would fail in backward
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while len(matrix) < n:
            upper = torch.cat([matrix, matrix], 1)
            matrix = torch.cat([upper, torch.cat([matrix, -matrix], 1)])
        return matrix


def _directions(rows: Tensor) -> Tensor:
    """Normalise rows; zero rows, possible after cutting Hadamard rows, become +-e_1."""
    length = rows.norm(dim=-1, keepdim=True)
    axis = torch.zeros_like(rows)
    axis[..., 0::2, 0] = 1
    axis[..., 1::2, 0] = -1
    return torch.where(length > 1e-6, rows / length.clamp(min=1e-6), axis)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert x to float32, unless it is float32 or float64.

    >>> at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def leaves(tree: Nested) -> list:
    """Return all leaves in order, with repetitions."""
    if isinstance(tree, tuple):
        parts = []
        for part in tree:
            parts += leaves(part)
        return parts
    return [] if tree is None else [tree]


def map_leaves(
    function: Callable[[Any], Any], tree: Nested, results: dict[int, Any] | None = None
) -> Nested:
    """Apply `function` to each leaf; None stays None.

    The function is called once per distinct leaf, so shared projections stay shared. `results` holds its values.
    """
    if tree is None:
        return None
    if results is None:
        results = {}
    if isinstance(tree, tuple):
        parts = [map_leaves(function, part, results) for part in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    if id(tree) not in results:
        results[id(tree)] = function(tree)
    return results[id(tree)]


def no_autocast(t: Tensor) -> AbstractContextManager:
    """Disable autocast on the device of a tensor; a null context on the meta device."""
    return nullcontext() if t.is_meta else torch.autocast(t.device.type, enabled=False)
