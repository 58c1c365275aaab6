"""Complex-exponential features (CERF), and the learned features of Hedgehog.

Notation: w = M x + M^-T y; v^2 = sum_l v_l^2 without conjugation. Matrices are diagonal (..., 1, d) or full (..., d,
d). `diagonal_by_centres` and `diagonal_by_moments` fit a diagonal M.

Sources: HRF 2.3 and H.2. The variance for complex M was derived for this project.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    Projections,
    both_signs,
    broadcast_matrix,
    check_dimension,
    check_finite,
    cos_sin,
    log_cosh,
    log_mean_exp2,
    values_readable,
)
from crt_exp.features.exponential import sq_norm
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Noise, at_least_float32, no_autocast

Field = Literal["real", "complex"]
SIZES = (1e-2, 1e2)  # limits of |M_ll|; larger ratios give huge variance away from the centre
RIDGE = 1e-6  # relative to the mean square; avoids 0 / 0


class Diagonal(NamedTuple):
    """A diagonal M (..., d) with entries `size`, or i `size` where `imaginary`."""

    size: Tensor
    imaginary: Tensor  # bool, or 0 and 1

    @property
    def M(self) -> Tensor:
        """The entries of M, complex (..., d)."""
        turn = torch.where(self.imaginary > 0, 1j, 1.0).to(torch.complex128)
        return self.size * turn


def diagonal_by_centres(r: Tensor, t: Tensor, field: Field = "complex") -> Diagonal:
    """Return the diagonal M of least |M r + M^-T t|^2 (HRF eq. (86)-(88)).

    r and t (..., d) are centres of queries and keys. The variance at the centres is zero for complex M. For real M it
    is zero if r_l t_l <= 0 in every coordinate.
    """
    r = r.double()
    t = t.double()
    ratio = t / torch.where(r == 0, 1.0, r)
    size = torch.where(r == 0, SIZES[1], ratio.abs().sqrt())
    size = torch.where((r == 0) & (t == 0), 1.0, size)
    return Diagonal(size.clamp(*SIZES), (r * t > 0) & (field == "complex"))


def diagonal_by_moments(
    x_mean: Tensor, x_mean_sq: Tensor, y_mean: Tensor, y_mean_sq: Tensor, field: Field = "complex"
) -> Diagonal:
    """Return the diagonal M of least mean |M x + M^-T y|^2 over all pairs of two sets.

    The arguments are moments (..., d) of the sets. Unlike a fit to centres, this fit uses the spread of the sets and
    has no degenerate cases. It was derived for this project.
    """
    x = x_mean_sq.double()
    y = y_mean_sq.double()
    ridge = RIDGE * (x + y).mean(-1, keepdim=True) + 1e-300
    size = ((y + ridge) / (x + ridge)) ** 0.25
    equal_signs = x_mean.double() * y_mean.double() > 0
    return Diagonal(size.clamp(*SIZES), equal_signs & (field == "complex"))


class CERFParams(NamedTuple):
    M: Tensor  # (..., 1, d) diagonal or (..., d, d), real or complex


@dataclass(frozen=True)
class CERF(FeatureMap):
    """Complex-exponential features (HRF eq. (14)-(16)).

    Queries have features exp(omega.Mx - (Mx)^2/2); keys use M^-T instead of M. The estimate is unbiased for every
    invertible M. Its variance is zero if and only if M x + M^-T y = 0. M = 1 is PosRF, M = i is TrigRF. Complex M has
    twice as many features: real parts, then imaginary parts.

    Args:
        M: a number, d numbers (diagonal) or d rows of d numbers, real or complex; None: a diagonal fitted to the
            moments of queries and keys.
        field: "real" or "complex" entries of a fitted M; real M gives positive features. None: as M, else "complex".
        antithetic: use omega and -omega: twice as many features.

    Raises:
        ValueError: M is singular, not finite or of another shape, or complex with field="real".

    >>> x = torch.ones(4)
    >>> CERF(M=1j).log_variance(x, x, CERF(M=1j).fit(None)).item(), CERF(M=1j).width(8)
    (-inf, 16)
    """

    M: Any = None
    field: Field | None = None
    antithetic: bool = False

    one_map = False
    fixed = "M"

    def __post_init__(self):
        super().__post_init__()
        M = self.matrix  # raises if M is no matrix
        if self.field == "real" and M is not None and M.is_complex():
            raise ValueError("M: complex entries; expected real entries with field='real'")

    @cached_property
    def matrix(self) -> Tensor | None:
        """The fixed M as a tensor, complex only if an entry is; None: M is fitted."""
        return None if self.M is None else _matrix(self.M)

    @cached_property
    def is_complex(self) -> bool:
        """Whether features have real and imaginary parts."""
        if self.field is not None or self.matrix is None:
            return self.field != "real"
        return self.matrix.is_complex()

    def width(self, m: int) -> int:
        return m * 2 ** (self.is_complex + self.antithetic)

    def fit(self, stats: Statistics) -> CERFParams:
        M = self.matrix
        if M is not None:
            if M.ndim < 2:
                M = M.reshape(1, -1)
            return CERFParams(M)
        x = stats.x
        y = stats.y
        field: Field = "complex" if self.is_complex else "real"
        best = diagonal_by_moments(x.mean, x.mean_sq, y.mean, y.mean_sq, field)
        check_finite(best.size, "M")
        M = best.M if self.is_complex else best.size
        return CERFParams(M.unsqueeze(-2))

    def bind(self, noise: Noise, params: CERFParams) -> BoundMap:
        phi_q = partial(self._phi, noise=noise, M=params.M, key=False)
        phi_k = partial(self._phi, noise=noise, M=inverse_transposed(params.M), key=True)
        return BoundMap(phi_q, phi_k)

    def _phi(self, x: Tensor, noise: Noise, M: Tensor, key: bool) -> Features:
        noise.check(x)
        x = at_least_float32(x)
        with no_autocast(x):
            M = _for_dimension(M, x).to(x.device)
            re = apply_matrix(x, M.real.to(x.dtype))
            im = None
            if self.is_complex:
                im = torch.zeros_like(re)
                if M.is_complex():
                    im = apply_matrix(x, M.imag.to(x.dtype))
            base = -sq_norm(x) / 2 if self.kernel == "gaussian" else 0.0
            return exponential(noise, re, im, base, self.antithetic, key)

    def log_relative_second_moment(self, x, y, params) -> Tensor:
        w = self.pair_vector(x, y, params)
        high = w.abs().square().sum(-1)
        low = (w * w).sum(-1)
        if self.antithetic:  # Re cosh(a + ib) = cosh a cos b
            return log_mean_exp2(log_cosh(high), log_cosh(low.real), low.imag)
        return log_mean_exp2(high, low.real, low.imag)

    def pair_vector(self, x: Tensor, y: Tensor, params: CERFParams) -> Tensor:
        """Return w = M x + M^-T y for each pair, complex128 (..., d)."""
        M = _for_dimension(params.M, x).to(torch.complex128)
        ndim = max(x.ndim, y.ndim)
        of_x = apply_to_pairs(x.to(M.dtype), M, ndim)
        return of_x + apply_to_pairs(y.to(M.dtype), inverse_transposed(M), ndim)


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """Learned features [softmax(W x), softmax(-W x)], M = 2m (Zhang et al. 2024).

    Features are positive and bounded by 1. They estimate no kernel. W is trained to reproduce the outputs of exact
    attention (`task=transfer`), or with the model. Queries and keys have separate W, which start from equal rows. With
    Gaussian rows, softmax(W x) is close to exp(W x - |x|^2 / 2) / m, the antithetic features of FAVOR+.

    Raises:
        ValueError: the kernel is Gaussian.

    >>> from crt_exp.samplers import iid
    >>> phi = Hedgehog()
    >>> noise = phi.noise(8, lambda request: iid(request.m, 4))
    >>> phi.phi_q(torch.zeros(1, 4), noise).exp().sum().item()  # of two softmaxes
    2.0
    """

    kernel: Literal["softmax"] = "softmax"

    learned = True
    estimates = False
    trainable = True

    def projections(self, m: int) -> tuple[Projections, Projections]:
        return Projections(m, "queries", begin=""), Projections(m, "keys", begin="")

    def width(self, m: int) -> int:
        return 2 * m

    def phi_q(self, x, noise, params=()) -> Features:
        return _softmaxes(x, noise[0])

    def phi_k(self, y, noise, params=()) -> Features:
        return _softmaxes(y, noise[1])

    def log_kernel(self, x, y):
        raise NotImplementedError("hedgehog features estimate no kernel")


def _softmaxes(x: Tensor, noise: Noise) -> Features:
    u = noise.project(x)
    return Features(ONE, torch.cat([u.log_softmax(-1), (-u).log_softmax(-1)], -1))


def exponential(
    noise: Noise,
    re: Tensor,
    im: Tensor | None,
    base: Tensor | float,
    antithetic: bool,
    key: bool,
    half: Tensor | None = None,
) -> Features:
    """Return features exp(omega.v - v^2/2 + base) of v = re + i im (..., L, d).

    Complex features are [Re, Im] for queries and [Re, -Im] for keys, so that their product is the real part.

    Args:
        base: log factor of all features, (..., L, 1) or a number.
        half: Re v^2/2, if it is already computed.
    """
    if half is None:
        half = sq_norm(re) / 2 if im is None else (sq_norm(re) - sq_norm(im)) / 2
    count = 2 * noise.m if antithetic else noise.m
    offset = base - half - math.log(count) / 2
    log_scale = both_signs(offset, noise.project(re), antithetic)
    if im is None:
        return Features(ONE, log_scale)
    turn = (re * im).sum(-1, keepdim=True)
    phase = both_signs(-turn, noise.project(im), antithetic)
    return Features(cos_sin(phase, key), torch.cat([log_scale, log_scale], -1))


def inverse_transposed(M: Tensor) -> Tensor:
    """Return M^-T; only CPUs check that M is invertible, because other devices would wait."""
    if M.shape[-2] == 1:
        return 1 / M
    return torch.linalg.inv_ex(M, check_errors=values_readable(M)).inverse.mT


def apply_matrix(x: Tensor, M: Tensor) -> Tensor:
    """Return M x for the rows of x (..., L, d)."""
    return x * M if M.shape[-2] == 1 else x @ M.mT


def apply_to_pairs(x: Tensor, M: Tensor, ndim: int) -> Tensor:
    """Return M x for x (..., d), broadcast to pairs of `ndim` dimensions."""
    M = broadcast_matrix(M, ndim)
    return x * M[..., 0, :] if M.shape[-2] == 1 else (M @ x.unsqueeze(-1)).squeeze(-1)


def _matrix(M: Any) -> Tensor:
    """Return M as a tensor of 0, 1 or 2 dimensions, complex only if an entry is."""
    try:
        values = torch.as_tensor(M if isinstance(M, Tensor) else np.array(M, complex))
        values = values.detach().cpu().to(torch.complex128)
        full = values if values.ndim == 2 else values.reshape(-1).diag()
        if values.ndim > 2 or len(full) != full.shape[1] or not torch.linalg.cond(full) <= 1e12:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"M={M!r}: expected a number, d numbers (a diagonal), or d rows of d numbers, finite and invertible"
        ) from None
    return values if bool((values.imag != 0).any()) else values.real


def _for_dimension(M: Tensor, x: Tensor) -> Tensor:
    """Return M; raise ValueError if its dimension differs from that of x (..., d)."""
    if M.shape[-2:] != (1, 1):
        check_dimension("M", M, x)
    return M
