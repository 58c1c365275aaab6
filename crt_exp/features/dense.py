"""Dense-exponential features (SDERF), and AutoRF, which selects a map per head.

Notation: A (d, d) symmetric, R = (I - 4A)^(1/2), G balance, x' = G x, y' = G^-T y, s = x' + y', h shift. The features
of the softmax kernel are

    log phi(x) = log det(R) / 2 + omega.A omega + omega.R (x' - h/2) - |x'|^2 / 2 + h.x' - |h|^2 / 4,

and the same for y'. The balance leaves x.y unchanged. The shift is equivalent to centring: queries x' - b, keys y' - c
with weights exp(b.y'), for any b + c = h. The remaining query factors cancel in attention.

OPRF and SDERF with diagonal A are special cases of SDERF. Heads of AutoRF with different choices are therefore one
map. TrigRF is no candidate: the mean of |x - y|^2 is at least that of |x + y - h|^2.

Sources: Likhosherstov et al. 2023 (FAVOR#: SDERF, ADERF). The shift, the closed form of G and the variance of
antithetic pairs were derived for this project.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.features.base import (
    BoundMap,
    FeatureMap,
    Features,
    align,
    check_finite,
    fit_sets,
    scalar,
    values_readable,
)
from crt_exp.features.complex_exponential import apply_matrix, apply_to_pairs, inverse_transposed
from crt_exp.features.exponential import (
    OPRF,
    OPRFParams,
    PositiveExponential,
    optimal_a,
    sq_norm,
)
from crt_exp.features.statistics import Moments, Statistics
from crt_exp.samplers.noise import DenseNoise, Noise, at_least_float32, no_autocast

LARGEST_D = 256  # of full matrices; larger ones take longer to decompose than the features
# Ridge of the balance, relative to the mean square. It prevents overfitting to few vectors (10 vectors, d = 64:
# 4.1 nats on held-out vectors, 7.7 with 1e-6) and limits rounding errors in half precision.
RIDGE = 1e-3
VECTORS = 96  # queries and keys for the comparison of candidates, which uses all pairs


class SDERFParams(NamedTuple):
    """R, h and G; None means h = 0 or G = I.

    Matrices are diagonals (..., 1, d) or full symmetric matrices (..., d, d).
    """

    root: Tensor
    shift: Tensor | None  # (..., 1, d)
    balance: Tensor | None
    choice: Tensor | None = None  # of AutoRF: index of the selected map, (..., 1, 1)

    @property
    def A(self) -> Tensor:
        """The eigenvalues of A = (I - R^2) / 4, (..., 1, d)."""
        sizes = self.root
        if sizes.shape[-2] > 1:
            sizes = torch.linalg.eigvalsh(sizes).unsqueeze(-2)
        return (1 - sizes.square()) / 4


@dataclass(frozen=True)
class Dense(PositiveExponential):
    """Base class: the features and their exact errors, for all fitting rules."""

    fitted = True
    transforms_inputs = True

    @property
    def one_map(self) -> bool:
        return self.kernel != "softmax"

    def bind(self, noise: Noise, params: SDERFParams) -> BoundMap:
        weight = self._weight(noise, params)

        def phi(x: Tensor, G: Tensor | None) -> Features:
            return self._phi(self._moved(x, G, params.shift), noise, weight)

        phi_q = partial(phi, G=params.balance)
        if params.balance is None:
            return BoundMap(phi_q, phi_q)
        return BoundMap(phi_q, partial(phi, G=inverse_transposed(params.balance)))

    def transform_inputs(
        self,
        x: Tensor,
        params: SDERFParams,
        key: bool = False,
        factor: float = 1.0,
    ) -> tuple[Tensor, float]:
        """Map factor * x to the vector in the formula of phi, and the remaining factor."""
        G = params.balance
        if G is None and params.shift is None:
            return x, factor
        if key and G is not None:
            G = inverse_transposed(G)
        return self._moved(x, G, params.shift, factor), 1.0

    def _moved(self, x: Tensor, G: Tensor | None, h: Tensor | None, factor: float = 1.0) -> Tensor:
        """Return factor G x - h, or factor x - h/2 for the Gaussian kernel."""
        x = at_least_float32(x)
        x = x * factor if G is None else _precise_times(x, factor * G)
        if h is None:
            return x
        return torch.sub(x, h.to(x), alpha=0.5 / self.norm_weight)

    def affine(self, noise, params):
        """Return the rows omega R, and the bias without shift."""
        rows = _precise_times(noise.rows(), params.root)
        quadratic = noise.sq_norm - sq_norm(rows).mT  # 4 omega.A omega
        R = params.root.double()
        if R.shape[-2] == 1:
            log_det = R.log().sum(-1, keepdim=True)
        else:
            log_det = torch.linalg.slogdet(R)[1][..., None, None]
        log_width = math.log(self.width(noise.m))
        constant = torch.rsub(log_det, -log_width / 2, alpha=-1 / 2).to(quadratic)
        bias = torch.add(constant, quadratic, alpha=1 / 4)
        return DenseNoise(rows, noise.gaussian), None, bias

    def exponent(self, noise, params):
        rows, _, bias = super().exponent(noise, params)
        if params.shift is not None and self.kernel == "softmax":
            h = params.shift.to(rows)
            bias = torch.add(bias, (rows * h).sum(-1).unsqueeze(-2), alpha=1 / 2)
            bias = torch.add(bias, sq_norm(h), alpha=1 / 4)
        return rows, None, bias

    def _principal(self, x, y, params):
        R = params.root.double()
        ndim = max(x.ndim, y.ndim)
        if params.balance is not None:
            G = params.balance.double()
            x = apply_to_pairs(x, G, ndim)
            y = apply_to_pairs(y, inverse_transposed(G), ndim)
        s = x + y
        if params.shift is not None:
            s = s - align(params.shift.double(), x, y)
        if R.shape[-2] > 1:
            sizes, Q = torch.linalg.eigh(R)
            s = apply_to_pairs(s, Q.mT, ndim)
            R = sizes.unsqueeze(-2)
        size = align(R, x, y)
        return s, -torch.log1p(2 * (size - 1) * (size + 1))  # 1 - 8a = 2 size^2 - 1


@dataclass(frozen=True)
class SDERF(Dense):
    """Dense-exponential positive features of least mean log second moment (FAVOR#).

    A is fitted to the mean of (s - h)(s - h)^T over all pairs. The fit applies CRT eq. (7) in each principal
    direction, or in each coordinate if `diagonal`. Features are bounded if s varies in all directions. The estimate is
    unbiased for all A < 1/8, h and invertible G that do not depend on omega. The fit of full matrices takes O(d^3).

    Args:
        diagonal: restrict A and G to diagonal matrices.
        centred: h is the mean of s; False: h = 0.
        balance: G equalises the second moments of x' and y', which minimises the mean of |s - h|^2; False: G = I;
            None: True for the softmax kernel only.
        antithetic: use omega and -omega: M = 2m features.

    Raises:
        ValueError: a balance with the Gaussian kernel, or (in `fit`) full matrices with d > 256.

    >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> params = SDERF().fit(Statistics.of(x, x))
    >>> params.root.shape, bool((params.A <= 0).all())
    (torch.Size([4, 4]), True)
    """

    diagonal: bool = False
    centred: bool = True
    balance: bool | None = None

    until_fitted = "using A = 0, no shift and no balance"

    def __post_init__(self):
        super().__post_init__()
        if self.balance and self.kernel != "softmax":
            raise ValueError(
                f"balance=True: expected kernel='softmax', got {self.kernel!r}; use balance=False"
            )

    @property
    def balanced(self) -> bool:
        if self.balance is None:
            return self.kernel == "softmax"
        return self.balance

    @property
    def second_moments(self) -> bool:
        return not self.diagonal

    @property
    def moments(self) -> tuple[str, ...]:
        return ("mean", "mean_sq") if self.diagonal else ("mean",)

    @property
    def one_map(self) -> bool:
        return not self.balanced

    def fit(self, stats: Statistics) -> SDERFParams:
        if not self.diagonal and stats.d > LARGEST_D:
            raise ValueError(
                f"d={stats.d}: expected at most {LARGEST_D} for full matrices; set features.diagonal=true"
            )
        x_mean = stats.x.mean.double().unsqueeze(-2)
        y_mean = stats.y.mean.double().unsqueeze(-2)
        x = check_finite(self._spread(stats.x), "A")
        y = check_finite(self._spread(stats.y), "A")
        G = None
        if self.balanced:
            if self.centred:
                G = balance(x, y)
            else:
                G = balance(x + self._square(x_mean), y + self._square(y_mean))
            inverse = inverse_transposed(G)
            x = rotate_moment(x, G)
            y = rotate_moment(y, inverse)
            x_mean = apply_matrix(x_mean, G)
            y_mean = apply_matrix(y_mean, inverse)
        h = x_mean + y_mean
        spread = x + y
        if not self.centred:
            spread = spread + self._square(h)
            h = None
        return SDERFParams(matrix_function(spread, optimal_root), h, G)

    def unfitted(self, d: int) -> SDERFParams:
        unit = torch.eye(d, dtype=torch.float64)
        if self.diagonal:
            unit = torch.ones(1, d, dtype=torch.float64)
        shift = torch.zeros(1, d, dtype=torch.float64) if self.centred else None
        return SDERFParams(unit, shift, unit.clone() if self.balanced else None)

    def admitted(self, params: SDERFParams) -> SDERFParams:
        """Return the parameters with R made symmetric.

        The estimate is unbiased for every invertible R and G and every h.
        """
        R = params.root
        if R.shape[-2] == 1:
            return params
        return params._replace(root=(R + R.mT) / 2)

    def _spread(self, side: Moments) -> Tensor:
        """Return variances (..., 1, d), or the covariance (..., d, d)."""
        if not self.diagonal:
            return side.covariance
        return side.variance.unsqueeze(-2)

    def _square(self, mean: Tensor) -> Tensor:
        return mean.square() if self.diagonal else mean.mT @ mean


# ---- matrices, diagonal (..., 1, d) or full (..., d, d)


def _precise_times(x: Tensor, M: Tensor) -> Tensor:
    """Return M x for the rows of x (..., L, d), without autocast."""
    with no_autocast(x):
        return apply_matrix(x, M.to(x))


def rotate_moment(spread: Tensor, G: Tensor) -> Tensor:
    """Return G spread G^T."""
    return spread * G.square() if G.shape[-2] == 1 else G @ spread @ G.mT


def optimal_root(spread: Tensor) -> Tensor:
    """Return R of the A of least mean log second moment, for eigenvalues (CRT eq. (7))."""
    return torch.rsub(optimal_a(spread.clamp(min=0)), 1, alpha=4).sqrt()


def matrix_function(M: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the eigenvalues of a symmetric matrix."""
    if M.shape[-2] == 1:
        return function(M)
    values, Q = torch.linalg.eigh(M)
    return (Q * function(values).unsqueeze(-2)) @ Q.mT


def balance(x: Tensor, y: Tensor) -> Tensor:
    """Return the symmetric positive G of least trace(G x G + G^-1 y G^-1).

    G^2 is the geometric mean of x^-1 and y. A ridge bounds G in directions where one side is zero.
    """
    ridge = _mean_size(x + y) * (RIDGE / 2) + 1e-300
    if x.shape[-2] == 1:
        return ((y + ridge) / (x + ridge)) ** 0.25
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    # Scaled by the ridge to avoid underflow. Only CPUs check that the matrix is positive definite, as other devices
    # would wait for the result.
    scaled = torch.addcdiv(unit, x, ridge)
    factor = torch.linalg.cholesky_ex(scaled, check_errors=values_readable(x)).L
    middle = factor.mT @ torch.addcdiv(unit, y, ridge) @ factor
    sizes, Q = torch.linalg.eigh(middle)
    half = Q * sizes.clamp(min=1e-300).pow(1 / 4).unsqueeze(-2)
    half = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return matrix_function(half @ half.mT, lambda sizes: sizes.clamp(min=1e-12).sqrt())


def _mean_size(M: Tensor) -> Tensor:
    """Return the mean diagonal entry, (..., 1, 1)."""
    sizes = M if M.shape[-2] == 1 else M.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return sizes.mean(-1, keepdim=True)


@dataclass(frozen=True)
class AutoRF(Dense):
    """Selects OPRF, diagonal SDERF or SDERF (d <= 256) per batch entry (head).

    The selected map has the least mean log second moment over pairs of vectors, in closed form. Each candidate is
    fitted to the first half of the vectors and evaluated on the second half, which penalises full matrices with few
    vectors. The selected map is then fitted to all vectors. The estimate is unbiased if the choice does not depend on
    the projections.

    Raises:
        ValueError: (in `fit`) the statistics hold no vectors.

    >>> x = torch.randn(2, 100, 4, generator=torch.Generator().manual_seed(0))
    >>> AutoRF().fit(Statistics.of(x, x)).root.shape
    torch.Size([2, 4, 4])
    """

    antithetic: bool = True
    trainable = False
    on_vectors = True
    until_fitted = "using A = 0 (FAVOR+)"

    def candidates(self, d: int) -> dict[str, FeatureMap]:
        """Return the candidate maps for d dimensions, by name."""
        maps: dict[str, FeatureMap] = {
            "oprf": OPRF(self.kernel, self.antithetic),
            "diagonal sderf": SDERF(self.kernel, self.antithetic, diagonal=True),
        }
        if d <= LARGEST_D:
            maps["sderf"] = SDERF(self.kernel, self.antithetic)
        return maps

    def unfitted(self, d: int) -> SDERFParams:
        return as_dense(OPRFParams(scalar(0)), d, scalar(0))

    def fit(self, stats: Statistics) -> SDERFParams:
        return fit_sets(stats, self._select)

    def _select(self, x: Tensor, y: Tensor) -> SDERFParams:
        """Return the parameters for queries (L, d) and keys (S, d)."""
        candidates = list(self.candidates(x.shape[-1]).values())
        x_half, x_rest = _halves(x)
        y_half, y_rest = _halves(y)
        half = Statistics.of(x_half, y_half)
        moments = []
        for phi in candidates:
            params = phi.fit(half)
            pairs = phi.log_relative_second_moment(x_rest[:, None], y_rest[None], params)
            moments.append(pairs.mean())
        choice = torch.stack(moments).argmin()
        params = candidates[int(choice)].fit(Statistics.of(x, y))
        return as_dense(params, x.shape[-1], choice)

    def names(self, params: SDERFParams) -> list[str]:
        """Return the name of the selected map of each batch entry, in order."""
        assert params.choice is not None
        names = list(self.candidates(params.root.shape[-1]))
        return [names[int(i)] for i in params.choice.flatten()]


def as_dense(params: OPRFParams | SDERFParams, d: int, choice: Tensor) -> SDERFParams:
    """Return equal SDERF parameters without None, with the index of the selected map.

    Matrices are full (d, d) if d <= 256, else diagonal (1, d).
    """
    if isinstance(params, OPRFParams):
        params = SDERFParams(torch.sqrt(1 - 4 * params.A).expand(1, d), None, None)
    shift = params.root.new_zeros(1, d) if params.shift is None else params.shift
    G = params.root.new_ones(1, d) if params.balance is None else params.balance
    return SDERFParams(_full(params.root), shift, _full(G), choice.double().view(1, 1))


def _full(M: Tensor) -> Tensor:
    return M if M.shape[-2] > 1 or M.shape[-1] > LARGEST_D else M[0].diag()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first half of the rows, and up to VECTORS rows of the second half.

    A single row is returned in both. Halves are contiguous, so that duplicates, which are neighbours, stay on one
    side.
    """
    middle = -(-len(x) // 2)
    rest = x[middle:] if len(x) > 1 else x
    count = min(len(rest), VECTORS)
    places = torch.arange(count, device=x.device) * len(rest) // count
    return x[:middle], rest[places]
