"""Samplers: rows omega for random features, each marginally N(0, I_d) unless said otherwise.

Legend: m projections (rows), d dimension, `batch` leading dimensions (heads, layers). A sampler is a function
`(m, d, generator=None, batch=()) -> Noise`. Numbers are drawn in float64 on the generator's device (CPU unless a CUDA
generator is given, so that one seed means one draw on every machine) and cast at the end.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor


class Noise(ABC):
    """m random rows in d dimensions, shape (*batch, m, d).

    Attributes: m, d, batch; `gaussian` says whether rows are exactly N(0, I_d) marginally, which the discrete maps need.
    """

    m: int
    d: int
    batch: tuple[int, ...]
    gaussian: bool

    @abstractmethod
    def rows(self) -> Tensor:
        """The matrix W, (*batch, m, d)."""

    @abstractmethod
    def _project(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def to(self, *args, **kwargs) -> "Noise":
        """As `Tensor.to`."""

    def project(self, x: Tensor) -> Tensor:
        """x (..., L, d) -> x W^T (..., L, m), in float32 at least: an error in a log feature is a relative error."""
        if x.shape[-1] != self.d:
            raise ValueError(f"the input has {x.shape[-1]} dimensions but the noise has d = {self.d}: draw it with "
                             f"d = {x.shape[-1]}, or check the order of the axes (..., L, d)")
        with torch.autocast(x.device.type, enabled=False):
            return self._project(at_least_float32(x))

    @cached_property
    def sq_norm(self) -> Tensor:
        """|omega_m|^2, (*batch, 1, m)."""
        return self.rows().square().sum(-1).unsqueeze(-2)

    def on_sphere(self) -> "Noise":
        """The same directions with every row of length sqrt(d) (the noise of SMREG)."""
        return DenseNoise(self.rows() * (self.d**0.5 / self.sq_norm.mT.sqrt()), gaussian=False)

    def __repr__(self):
        return f"{type(self).__name__}(m={self.m}, d={self.d}, batch={self.batch})"


class DenseNoise(Noise):
    """Rows held as a matrix W (*batch, m, d)."""

    def __init__(self, weight: Tensor, gaussian: bool):
        self.weight, self.gaussian = weight, gaussian
        *batch, self.m, self.d = weight.shape
        self.batch = tuple(batch)

    def rows(self) -> Tensor:
        return self.weight

    def _project(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype).mT

    def to(self, *args, **kwargs) -> "DenseNoise":
        return DenseNoise(self.weight.to(*args, **kwargs), self.gaussian)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def iid(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Independent Gaussian rows."""
    _check(m, d)
    return DenseNoise(_normal((*batch, m, d), generator).to(dtype), gaussian=True)


def orthogonal(m: int, d: int, generator: torch.Generator | None = None, batch: tuple[int, ...] = (),
               lengths: str = "chi", dtype: torch.dtype = torch.float32) -> DenseNoise:
    """Blocks of d mutually orthogonal rows with Haar directions (Performers 2.4); the last block is cut.

    `lengths`: "chi" draws row lengths from chi(d), so rows are exactly Gaussian; "sqrt_d" fixes them (SMREG noise).
    """
    _check(m, d)
    blocks = -(-m // d)
    directions = haar((*batch, blocks, d, d), generator).flatten(-3, -2)[..., :m, :]
    return DenseNoise((directions * _lengths((*batch, m), d, lengths, generator)).to(dtype), lengths == "chi")


def haar(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Haar-distributed orthogonal matrices, float64, shape (..., d, d).

    The sign of the diagonal of R is fixed: without it LAPACK's Q is not Haar (the mean of Q_00 is about -0.3 at
    d = 4), and exponential features, which are not even in omega, are biased.
    """
    q, r = torch.linalg.qr(_normal(shape, generator))
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q)
    return q * sign.unsqueeze(-2)


def _lengths(shape: tuple[int, ...], d: int, kind: str, generator: torch.Generator | None) -> Tensor:
    if kind == "chi":
        return _normal((*shape, d), generator).norm(dim=-1, keepdim=True)
    if kind == "sqrt_d":
        return torch.full((*shape, 1), d**0.5, dtype=torch.float64, device=_device(generator))
    raise ValueError(f"unknown lengths {kind!r}: choose chi (Gaussian rows) or sqrt_d (rows on the sphere)")


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=_device(generator))


def _device(generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else torch.device("cpu")


def _check(m: int, d: int) -> None:
    if not (isinstance(m, int) and m >= 1):
        raise ValueError(f"m = {m}: the number of projections must be a whole number of at least 1 (features.m)")
    if not (isinstance(d, int) and d >= 1):
        raise ValueError(f"d = {d}: the dimension must be a whole number of at least 1")
