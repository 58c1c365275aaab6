"""Complex-exponential features (CERF), and the learned features of Hedgehog.

Notation: w = M x + M^-T y; v^2 = sum_l v_l^2 without conjugation. Matrices are diagonal (..., 1, d) or full (..., d,
d). `diagonal_by_centres` and `diagonal_by_moments` fit a diagonal M.

Sources: HRF 2.3 and H.2. The variance for complex M was derived for this project.
"""

import math
from dataclasses import dataclass
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
    broadcast_matrix,
    check_finite,
    log_cosh,
)
from crt_exp.features.exponential import log_mean_exp2, sq_norm
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import Nested, Noise, at_least_float32, no_autocast

Field = Literal["real", "complex"]
SIZES = (1e-2, 1e2)  # limits of |M_ll|; larger ratios give huge variance away from the centre
RIDGE = 1e-6  # relative to the mean square; avoids 0 / 0


class Diagonal(NamedTuple):
    """A diagonal M (..., d) with entries `size`, or i `size` where `imaginary`."""

    size: Tensor
    imaginary: Tensor  # bool

    @property
    def matrix(self) -> Tensor:
        """The entries of M, complex (..., d)."""
        turn = torch.where(self.imaginary, 1j, 1.0).to(torch.complex128)
        return self.size * turn


def diagonal_by_centres(r: Tensor, t: Tensor, field: Field = "complex") -> Diagonal:
    """Return the diagonal M of least |M r + M^-T t|^2 (HRF eq. (86)-(88)).

    r and t (..., d) are centres of queries and keys. The variance at the centres is zero for complex M. For real M it
    is zero if r_l t_l <= 0 in every coordinate.
    """
    r = r.double()
    t = t.double()
    none = (r == 0) & (t == 0)
    size = torch.where(none, 1.0, (t / torch.where(r == 0, 1.0, r)).abs().sqrt())
    size = torch.where((r == 0) & ~none, SIZES[1], size).clamp(*SIZES)
    return Diagonal(size, (r * t > 0) & (field == "complex"))


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
    return Diagonal(
        size.clamp(*SIZES), (x_mean.double() * y_mean.double() > 0) & (field == "complex")
    )


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
        field: "real" or "complex" entries of a fitted M; real M gives positive features.
        antithetic: use omega and -omega: twice as many features.

    Raises:
        ValueError: M is singular, not finite or of another shape, or complex with field="real".
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
            raise ValueError("M: complex entries; expected real entries with field='real'")
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
        best = diagonal_by_moments(
            stats.x.mean, stats.x.mean_sq, stats.y.mean, stats.y.mean_sq, self.field
        )
        check_finite(best.size, "M")
        return CERFParams((best.size if self.field == "real" else best.matrix).unsqueeze(-2))

    def bind(self, noise: Noise, params: CERFParams) -> BoundMap:
        for_keys = inverse_transposed(params.M)
        return BoundMap(
            lambda x: self._phi(x, noise, params.M, key=False),
            lambda y: self._phi(y, noise, for_keys, key=True),
        )

    def _phi(self, x: Tensor, noise: Noise, M: Tensor, key: bool) -> Features:
        noise.check(x)
        x = at_least_float32(x)
        with no_autocast(x):
            M = _for_dimension(M, x).to(x.device)
            re = apply_matrix(x, M.real.to(x.dtype))
            im = None
            if self.field == "complex":
                im = apply_matrix(x, M.imag.to(x.dtype)) if M.is_complex() else torch.zeros_like(re)
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
        x, y, M = (t.to(torch.complex128) for t in (x, y, _for_dimension(params.M, x)))
        ndim = max(x.ndim, y.ndim)
        return apply_to_pairs(x, M, ndim) + apply_to_pairs(y, inverse_transposed(M), ndim)


@dataclass(frozen=True)
class Hedgehog(FeatureMap):
    """Learned features [softmax(W x), softmax(-W x)], M = 2m (Zhang et al. 2024).

    Features are positive and bounded by 1. They estimate no kernel. W is trained to reproduce the outputs of exact
    attention (`task=transfer`), or with the model. Queries and keys have separate W, which start from equal rows. With
    Gaussian rows, softmax(W x) is close to exp(W x - |x|^2 / 2) / m, the antithetic features of FAVOR+.

    Raises:
        ValueError: the kernel is Gaussian.
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
        raise NotImplementedError("hedgehog features estimate no kernel and have no variance")

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
    signs = (1, -1) if antithetic else (1,)
    if half is None:
        half = (sq_norm(re) if im is None else sq_norm(re) - sq_norm(im)) / 2
    offset = base - half - math.log(noise.m * len(signs)) / 2
    projected = noise.project(re)
    if im is None:
        logs = [offset + projected if s > 0 else offset - projected for s in signs]
        return Features(ONE, logs[0] if len(logs) == 1 else torch.cat(logs, -1))
    log = torch.cat([offset + s * projected for s in signs], -1)
    turned = noise.project(im)
    turn = (re * im).sum(-1, keepdim=True)
    phase = torch.cat([s * turned - turn for s in signs], -1)
    return Features(
        torch.cat([phase.cos(), -phase.sin() if key else phase.sin()], -1),
        torch.cat([log, log], -1),
    )


def inverse_transposed(M: Tensor) -> Tensor:
    """Return M^-T."""
    return 1 / M if M.shape[-2] == 1 else torch.linalg.inv(M).mT


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
        M = M.detach().cpu() if isinstance(M, Tensor) else torch.from_numpy(np.array(M, complex))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"M={M!r}: expected a number, d numbers (a diagonal), or d rows of d numbers"
        ) from None
    M = M.to(torch.complex128)
    if M.ndim > 2 or (M.ndim == 2 and M.shape[0] != M.shape[1]) or M.numel() == 0:
        raise ValueError(
            f"M: shape {tuple(M.shape)}; expected a number, d numbers, or d rows of d numbers"
        )
    if not bool(M.abs().isfinite().all()):
        raise ValueError("M: expected finite entries")
    singular = bool((M == 0).any()) if M.ndim < 2 else float(torch.linalg.cond(M)) > 1e12
    if singular:
        raise ValueError("M: singular; expected an invertible matrix")
    return M if bool((M.imag != 0).any()) else M.real


def _as_tuples(M: Tensor) -> Any:
    plain = M.tolist()
    return tuple(map(tuple, plain)) if M.ndim == 2 else tuple(plain) if M.ndim else plain


def _for_dimension(M: Tensor, x: Tensor) -> Tensor:
    """Return M; raise ValueError if its dimension differs from that of x (..., d)."""
    if M.shape[-1] not in (1, x.shape[-1]) or (M.shape[-2] > 1 and M.shape[-1] != x.shape[-1]):
        raise ValueError(f"M: {M.shape[-1]} dimensions, expected {x.shape[-1]} as the vectors")
    return M
