"""Exponential features behind a matrix: complex ones exp(omega.Mx - (Mx)^2 / 2), and Hedgehog's learned ones.

Here are also the matrices M that make complex ones exact at chosen points.

Legend as in base.py; v^2 = sum_l v_l^2 without conjugation; w = M x + M^-T y. Each matrix is diagonal, (..., 1, d), or
full, (..., d, d). Source: HRF 2.3 and H.2; the variance for complex M is our own.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp.features.base import ONE, BoundMap, FeatureMap, Features, Projections, check_finite, log_cosh, placed
from crt_exp.features.exponential import log_mean_exp2, sq_norm
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Nested, Noise, as_given, at_least_float32

Field = Literal["real", "complex"]
SIZES = (1e-2, 1e2)  # of a diagonal entry: beyond them a point off the centre has a huge variance
RIDGE = 1e-6         # of the mean square over coordinates, added to each: no quotient of zeros


class Diagonal(NamedTuple):
    """A diagonal M (..., d) with entries `size`, or i `size` where `imaginary`: all that the closed forms ask for."""

    size: Tensor
    imaginary: Tensor  # bool

    @property
    def matrix(self) -> Tensor:
        """M itself, complex (..., d)."""
        turn = torch.where(self.imaginary, 1j, 1.0).to(torch.complex128)
        return self.size * turn


def diagonal_by_centres(r: Tensor, t: Tensor, field: Field = "complex") -> Diagonal:
    """The diagonal M (..., d) of least |M r + M^-T t|^2 for centres r of the queries and t of the keys (HRF (86)-(88)).

    The variance at the centres is then zero if M may be complex, or where r_l t_l <= 0 in every coordinate.
    """
    r, t = r.double(), t.double()
    none = (r == 0) & (t == 0)
    size = torch.where(none, 1.0, (t / torch.where(r == 0, 1.0, r)).abs().sqrt())
    size = torch.where((r == 0) & ~none, SIZES[1], size).clamp(*SIZES)
    return Diagonal(size, (r * t > 0) & (field == "complex"))


def diagonal_by_moments(x_mean: Tensor, x_mean_sq: Tensor, y_mean: Tensor, y_mean_sq: Tensor,
                        field: Field = "complex") -> Diagonal:
    """The diagonal M of least mean |M x + M^-T y|^2 over all pairs of two sets, from their moments (..., d) (own).

    It takes the spread of the sets into account, which a fit to their centres does not, and has no degenerate cases.
    """
    x, y = x_mean_sq.double(), y_mean_sq.double()
    ridge = RIDGE * (x + y).mean(-1, keepdim=True) + 1e-300
    size = ((y + ridge) / (x + ridge)) ** 0.25
    return Diagonal(size.clamp(*SIZES), (x_mean.double() * y_mean.double() > 0) & (field == "complex"))


class CERFParams(NamedTuple):
    M: Tensor  # (..., 1, d) diagonal or (..., d, d), real or complex


@dataclass(frozen=True)
class CERF(FeatureMap):
    """Complex exponential features: Psi_M(x) = exp(omega.Mx - (Mx)^2/2), and Psi of M^-T for keys (HRF (14)-(16)).

    M: None (a diagonal one, fitted to the moments of queries and keys), a number, d numbers (its diagonal) or d rows of
    d numbers; invertible, real or complex. M = 1 is PosRF and M = i TrigRF. field: "real" for a fitted real diagonal,
    whose features are positive (a given M says it by itself). Unbiased for every M; the variance is zero iff M x + M^-T
    y = 0. Complex M: M = 2m features, Re, then Im. `antithetic`: omega and -omega, twice as many features. Raises
    ValueError where M is singular, not finite, or of another shape.
    """

    M: Any = None
    field: Field | None = None
    antithetic: bool = False

    one_map = False

    def __post_init__(self):
        super().__post_init__()
        if self.M is None:
            object.__setattr__(self, "field", self.field or "complex")
            return
        M = _matrix(self.M)
        object.__setattr__(self, "M", _as_tuples(M))
        if self.field == "real" and M.is_complex():
            raise ValueError("M has complex entries, which field='real' rules out")
        object.__setattr__(self, "field", self.field or ("complex" if M.is_complex() else "real"))

    @property
    def fitted(self) -> bool:
        return self.M is None

    def width(self, m: int) -> int:
        return m * (2 if self.field == "complex" else 1) * (2 if self.antithetic else 1)

    def fit(self, stats: Statistics) -> CERFParams:
        if self.M is not None:
            M = torch.as_tensor(_matrix(self.M))
            return CERFParams(M.reshape(1, -1) if M.ndim < 2 else M)
        best = diagonal_by_moments(stats.x.mean, stats.x.mean_sq, stats.y.mean, stats.y.mean_sq, self.field)
        check_finite(best.size, "M")
        return CERFParams((best.size if self.field == "real" else best.matrix).unsqueeze(-2))

    def bind(self, noise: Noise, params: CERFParams) -> BoundMap:
        for_keys = inverse_transposed(params.M)
        return BoundMap(lambda x: self._phi(x, noise, params.M, key=False),
                        lambda y: self._phi(y, noise, for_keys, key=True))

    def _phi(self, x: Tensor, noise: Noise, M: Tensor, key: bool) -> Features:
        noise.check(x)
        x = at_least_float32(x)
        with as_given(x):
            M = _for_dimension(M, x).to(x.device)
            re = times(x, M.real.to(x.dtype))
            im = None
            if self.field == "complex":
                im = times(x, M.imag.to(x.dtype)) if M.is_complex() else torch.zeros_like(re)
            base = -sq_norm(x) / 2 if self.kernel == "gaussian" else 0.0
            return exponential(noise, re, im, base, self.antithetic, key)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        w = self.meeting(x, y, params)
        high, low = w.abs().square().sum(-1), (w * w).sum(-1)
        if self.antithetic:  # Re cosh(a + ib) = cosh a cos b
            return log_mean_exp2(log_cosh(high), log_cosh(low.real), low.imag)
        return log_mean_exp2(high, low.real, low.imag)

    def meeting(self, x: Tensor, y: Tensor, params: CERFParams) -> Tensor:
        """w = M x + M^-T y, complex128 (..., d), pair by pair: what decides every variance and covariance."""
        x, y, M = (t.to(torch.complex128) for t in (x, y, _for_dimension(params.M, x)))
        ndim = max(x.ndim, y.ndim)
        return paired(x, M, ndim) + paired(y, inverse_transposed(M), ndim)


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """phi(x) = [softmax(W x), softmax(-W x)], each over its m features: M = 2m (Zhang et al., 2024, Hedgehog).

    Positive, and bounded by 1. Not unbiased, for any kernel: W is made to give exact attention's outputs, by
    `task=transfer` or in training. Queries and keys have projections of their own, which begin as the same rows: with
    Gaussian ones softmax(W x) is exp(W x - |x|^2 / 2) / m up to a factor near 1, the features of FAVOR+ in pairs.
    Raises ValueError for the Gaussian kernel: attention alone can learn.
    """

    kernel: Literal["softmax"] = "softmax"

    learned = True
    estimates = False
    trainable = True

    def projections(self, m: Nested) -> tuple[Projections, Projections]:
        return Projections(m, "queries", begin=""), Projections(m, "keys", begin="")

    def width(self, m: Nested) -> int:
        return 2 * (m[0] if isinstance(m, tuple) else m)

    def phi_q(self, x, noise, params=()) -> Features:
        return _softmaxes(x, noise[0])

    def phi_k(self, y, noise, params=()) -> Features:
        return _softmaxes(y, noise[1])

    def log_relative_second_moment(self, x, y, params=()):
        raise NotImplementedError("hedgehog features estimate no kernel: there is no variance to give")

    def log_kernel(self, x, y):
        raise NotImplementedError("hedgehog features estimate no kernel")


def _softmaxes(x: Tensor, noise: Noise) -> Features:
    u = noise.project(x)
    return Features(ONE, torch.cat([u.log_softmax(-1), (-u).log_softmax(-1)], -1))


def exponential(noise: Noise, re: Tensor, im: Tensor | None, base: Tensor | float, antithetic: bool, key: bool,
                half: Tensor | None = None) -> Features:
    """Features exp(omega.v - v^2/2 + base) of v = re + i im (..., L, d), real or as [Re, +-Im]: Re(ab) = Re a Re b -
    Im a Im b, so that the keys carry the minus. `base` (..., L, 1) goes into every one; half: Re v^2/2, if known."""
    signs = (1, -1) if antithetic else (1,)
    if half is None:
        half = (sq_norm(re) if im is None else sq_norm(re) - sq_norm(im)) / 2
    offset = base - half - math.log(noise.m * len(signs)) / 2
    projected = noise.project(re)
    if im is None:
        logs = [offset + projected if s > 0 else offset - projected for s in signs]
        return Features(ONE, logs[0] if len(logs) == 1 else torch.cat(logs, -1))
    log = torch.cat([offset + s * projected for s in signs], -1)
    turned, turn = noise.project(im), (re * im).sum(-1, keepdim=True)
    phase = torch.cat([s * turned - turn for s in signs], -1)
    return Features(torch.cat([phase.cos(), -phase.sin() if key else phase.sin()], -1), torch.cat([log, log], -1))


def inverse_transposed(M: Tensor) -> Tensor:
    """M^-T, of a diagonal entry by entry."""
    return 1 / M if M.shape[-2] == 1 else torch.linalg.inv(M).mT


def times(x: Tensor, M: Tensor) -> Tensor:
    """M x for the rows of x (..., L, d)."""
    return x * M if M.shape[-2] == 1 else x @ M.mT


def paired(x: Tensor, M: Tensor, ndim: int) -> Tensor:
    """M x for vectors x (..., d) that meet others, of which the larger have so many dimensions."""
    M = placed(M, ndim)
    return x * M[..., 0, :] if M.shape[-2] == 1 else (M @ x.unsqueeze(-1)).squeeze(-1)


def _matrix(M: Any) -> Tensor:
    """A given M as a tensor of 0, 1 or 2 dimensions, complex only where an entry is."""
    try:
        M = M.detach().cpu() if isinstance(M, Tensor) else torch.from_numpy(np.array(M, complex))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"M = {M!r}: give a number, the d numbers of a diagonal, or d rows of d numbers") from None
    M = M.to(torch.complex128)
    if M.ndim > 2 or (M.ndim == 2 and M.shape[0] != M.shape[1]) or M.numel() == 0:
        raise ValueError(f"M has shape {tuple(M.shape)}: give a number, d numbers or d rows of d numbers")
    if not bool(M.abs().isfinite().all()):
        raise ValueError("M holds NaN or infinite values")
    singular = bool((M == 0).any()) if M.ndim < 2 else float(torch.linalg.cond(M)) > 1e12
    if singular:
        raise ValueError("M is singular: the features of the keys are made of its inverse")
    return M if bool((M.imag != 0).any()) else M.real


def _as_tuples(M: Tensor) -> Any:
    plain = M.tolist()
    return tuple(map(tuple, plain)) if M.ndim == 2 else tuple(plain) if M.ndim else plain


def _for_dimension(M: Tensor, x: Tensor) -> Tensor:
    """Raises ValueError where M is of another dimension than x (..., d)."""
    if M.shape[-1] not in (1, x.shape[-1]) or (M.shape[-2] > 1 and M.shape[-1] != x.shape[-1]):
        raise ValueError(f"M is made for {M.shape[-1]} dimensions but the vectors have {x.shape[-1]}")
    return M
