"""Hybrid random features (HRF): weighted combinations of kernel estimates.

Notation: n projections of a coefficient. The estimate is

    K = sum_k lambda_k K_k + (1 - sum_k lambda_k) K_last

with bases K_k and estimated coefficients lambda_k. It is unbiased for all coefficients that are independent of the
bases. The features are the concatenated products of HRF Lemma 2.3 in real numbers, with negative signs on the query
side.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from crt_exp.features.base import (
    ONE,
    BoundMap,
    FeatureMap,
    Features,
    Params,
    Projections,
    log_expm1,
)
from crt_exp.features.blocks import (
    AngularCoefficient,
    BipolarCoefficient,
    BipolarGaussianCoefficient,
    Block,
    Blocks,
    Coefficient,
    GaussianCoefficient,
    InBlocks,
    column,
)
from crt_exp.features.complex_exponential import CERF
from crt_exp.features.exponential import GERF, OPRF, SMREG, HypRF, PosRF, TrigRF, sq_norm
from crt_exp.features.statistics import Statistics
from crt_exp.samplers.noise import DenseNoise, Nested, at_least_float32, map_leaves, share_leaf
from crt_exp.validation import Count, Positive, Several, check_options, split_words, unknown


@dataclass(frozen=True)
class HybridMap(InBlocks):
    """Base class of hybrid maps.

    Projections and parameters are pairs of tuples: one entry per coefficient, and one entry per base. m is the number
    of projections of each base, or the pair (n, m).

    Args:
        n: projections of each coefficient; None: as many as each base.
        shared: all bases use the same projections. The estimate stays unbiased and is cheaper. For TrigRF with PosRF
            or HypRF the variance does not increase.
    """

    n: Count | None = None
    shared: bool = True
    one_coefficient_noise = False  # all coefficients use the same projections

    def __post_init__(self):
        super().__post_init__()
        self.components()  # building parts checks their options

    @abstractmethod
    def _build_components(self) -> tuple[tuple[Coefficient, ...], tuple[FeatureMap, ...]]:
        """Return the coefficients and bases; called once."""

    def components(self) -> tuple[tuple[Coefficient, ...], tuple[FeatureMap, ...]]:
        """Return p coefficients and p + 1 bases; the last base has weight 1 - sum lambda."""
        return self._components

    @cached_property
    def _components(self) -> tuple[tuple[Coefficient, ...], tuple[FeatureMap, ...]]:
        return self._build_components()

    @property
    def fitted(self) -> bool:
        coefficients, bases = self.components()
        return any(part.fitted for part in (*coefficients, *bases))

    @property
    def second_moments(self) -> bool:
        coefficients, bases = self.components()
        return any(part.second_moments for part in (*coefficients, *bases))

    def projections(self, m: Nested) -> Nested:
        coefficients, bases = self.components()
        n, m = self._counts(m)
        several = len(coefficients) > 1 and not self.one_coefficient_noise
        of_coefficients = []
        for i, (coefficient, count) in enumerate(zip(coefficients, n)):
            part = i if several else None
            projections = coefficient.projections(count)
            of_coefficients.append(_rename_parts("coefficient", part, projections))
        of_bases = []
        for i, (base, count) in enumerate(zip(bases, m)):
            part = None if self.shared else i
            of_bases.append(_rename_parts("base", part, base.projections(count)))
        return tuple(of_coefficients), tuple(of_bases)

    def width(self, m: Nested) -> int:
        coefficients, bases = self.components()
        n, m = self._counts(m)
        columns = [c.width(k) for c, k in zip(coefficients, n)]
        if len(coefficients) == 1:
            columns.append(coefficients[0].complement_width(n[0]))
        else:
            columns.append(1 + sum(c.columns * k for c, k in zip(coefficients, n)))
        return sum(r * b.width(k) for r, b, k in zip(columns, bases, m))

    def _counts(self, m: Nested) -> tuple[tuple, tuple]:
        """Return the numbers of projections of each coefficient and of each base."""
        coefficients, bases = self.components()
        if isinstance(m, tuple):
            n, m = m
        else:
            n = self.n or m
        if not isinstance(n, tuple):
            n = (n,) * len(coefficients)
        if not isinstance(m, tuple):
            m = (m,) * len(bases)
        return n, m

    def fit(self, stats: Statistics) -> Params:
        coefficients, bases = self.components()
        of_coefficients = tuple(part.fit(stats) for part in coefficients)
        return of_coefficients, tuple(part.fit(stats) for part in bases)

    def _check(self, noise: Nested, params: Nested) -> None:
        coefficients, bases = self.components()
        if not isinstance(noise, tuple) or len(noise) != 2 or share_leaf(*noise):
            raise ValueError(
                "noise: expected independent projections for the two parts; use phi.noise(m, draw)"
            )
        for given, what in ((noise, "noise"), (params, "params")):
            if len(given) != 2 or [len(part) for part in given] != [len(coefficients), len(bases)]:
                raise ValueError(
                    f"{what}: expected a pair of tuples ({len(coefficients)} coefficients, {len(bases)} "
                    "bases); use phi.noise and phi.fit"
                )

    def bind(self, noise, params) -> BoundMap:
        self._check(noise, params)
        bases = self.components()[1]
        bound = [b.bind(n, p) for b, n, p in zip(bases, noise[1], params[1])]

        def features(x: Tensor, key: bool) -> Blocks:
            rhos = [
                c.rho(x, n, p, key) for c, n, p in zip(self.components()[0], noise[0], params[0])
            ]
            weights = self._weights(rhos, params[0], key)
            return Blocks(
                tuple(Block(w, (b.phi_k if key else b.phi_q)(x)) for w, b in zip(weights, bound))
            )

        return BoundMap(lambda x: features(x, False), lambda y: features(y, True))

    def _weights(self, rhos: list[Tensor], params: tuple, key: bool) -> list[Tensor]:
        """Return the weights of each base, (..., L, R).

        They are [sqrt|a|, rho] of its coefficient; the last base has the columns of 1 - sum lambda.
        """
        coefficients, _ = self.components()
        weights = [c.lambda_columns(rho, p, key) for c, rho, p in zip(coefficients, rhos, params)]
        if len(coefficients) == 1:
            return [*weights, coefficients[0].complement_columns(rhos[0], params[0], key)]
        constants = [c.constant(p) for c, p in zip(coefficients, params)]
        rest = [column(1 - sum(constants), rhos[0], key), *(rho if key else -rho for rho in rhos)]
        return [*weights, torch.cat(rest, -1)]

    # ---- exact errors

    def log_mse(self, x, y, params, m) -> Tensor:
        """Return the log variance with m i.i.d. projections of bases, n of coefficients."""
        relative = self.log_relative_variance(x, y, params, self.n or m, m)
        return 2 * self.log_kernel(x.double(), y.double()) + relative

    def log_relative_variance(
        self, x: Tensor, y: Tensor, params: Params, n: int = 1, m: int = 1
    ) -> Tensor:
        """Return log(Var / K^2) with n and m i.i.d. projections, float64, in nats.

        The variance is the sum over bases of E lambda_k^2 Var K_k. With shared projections the sum of E lambda_k
        lambda_l Cov(K_k, K_l) is added (HRF Theorems 3.1, D.1, F.1; derived for this project for p > 1).

        Raises:
            NotImplementedError: no covariance is known. It is known for TrigRF, PosRF, HypRF and CERF.
        """
        x = x.double()
        y = y.double()
        bases = self.components()[1]
        moments = self._moments(x, y, params[0], n)
        spread = torch.stack(
            [
                log_expm1(b.log_relative_second_moment(x, y, p)) + moments[k][k].log()
                for k, (b, p) in enumerate(zip(bases, params[1]))
            ]
        )
        top = spread.amax(0).clamp(min=-1e300)
        total = (spread - top).exp().sum(0)
        if self.shared:
            for k in range(len(bases)):
                for j in range(k):
                    total = total + 2 * moments[k][j] * covariance(
                        (bases[k], bases[j]), (params[1][k], params[1][j]), x, y, top
                    )
        return torch.where(total > 0, total.clamp(min=0).log() + top, -torch.inf) - math.log(m)

    def _moments(self, x: Tensor, y: Tensor, params: tuple, n: int) -> list[list[Tensor]]:
        """Return E lambda_k lambda_l of the estimated weights, including the last base.

        The entries sum to 1.
        """
        coefficients = self.components()[0]
        means = [c.mean(x, y, p) for c, p in zip(coefficients, params)]
        spreads = [c.variance(x, y, p) / n for c, p in zip(coefficients, params)]
        means.append(1 - sum(means))
        moments = []
        for mean in means:
            moments.append([mean * other for other in means])
        for k, spread in enumerate(spreads):
            moments[k][k] = moments[k][k] + spread
            moments[k][-1] = moments[-1][k] = moments[k][-1] - spread
            moments[-1][-1] = moments[-1][-1] + spread
        return moments


BASES = {"trig": TrigRF, "pos": PosRF, "hyp": HypRF, "oprf": OPRF, "gerf": GERF, "complex": CERF}
COEFFICIENTS = {
    "angular": AngularCoefficient,
    "gaussian": GaussianCoefficient,
    "bipolar": BipolarGaussianCoefficient,
}


@dataclass(frozen=True)
class Hybrid(HybridMap):
    """The hybrid of p coefficients and p + 1 bases of one kernel (HRF eq. (8)).

    A coefficient or base is an object, or a string with a name of COEFFICIENTS or BASES and options, such as "complex
    M=0.5+1j".
    """

    coefficients: Several[Coefficient | str] = ()
    bases: Several[FeatureMap | str] = ()

    def _build_components(self):
        coefficients = tuple(
            _part("coefficients", each, COEFFICIENTS) for each in self.coefficients
        )
        bases = tuple(_part("bases", each, BASES, kernel=self.kernel) for each in self.bases)
        if len(bases) != len(coefficients) + 1:
            raise ValueError(
                f"coefficients: {len(coefficients)}; expected one fewer than bases ({len(bases)})"
            )
        if any(b.kernel != self.kernel or isinstance(b, SMREG) for b in bases):
            raise ValueError(f"kernel={self.kernel}: expected bases that all estimate this kernel")
        return coefficients, bases


def _part(key: str, part: Any, known: dict[str, type], **given: Any) -> Any:
    """Build a coefficient or base from a string; return objects unchanged."""
    if not isinstance(part, str):
        return part
    name, options = split_words(part)
    if name not in known:
        raise unknown(key, name, known)
    check_options(f"{key} {name}", known[name], options)
    return known[name](**options, **given)


@dataclass(frozen=True)
class Bipolar(HybridMap):
    """Base class of lambda K_positive + (1 - lambda) K_trig.

    lambda is 0 at x = y, where the trigonometric base is exact, and largest at x = -y, where the positive base is
    exact.

    Args:
        base: the positive base, "hyp" (antithetic, 2m features) or "pos".
    """

    base: Literal["hyp", "pos"] = "hyp"

    @abstractmethod
    def coefficient(self) -> BipolarCoefficient: ...

    def _build_components(self):
        positive = HypRF(self.kernel) if self.base == "hyp" else PosRF(self.kernel)
        return (self.coefficient(),), (positive, TrigRF(self.kernel))

    def bind(self, noise, params) -> BoundMap:
        """Bind both maps; shared projections need one matrix product."""
        self._check(noise, params)
        (of_coefficient,), (of_base, other) = noise
        if of_base is not other or of_base.matrix_free or of_base.batch != of_coefficient.batch:
            return super().bind(noise, params)
        rows = DenseNoise(torch.cat([of_coefficient.rows(), of_base.rows()], -2), gaussian=False)

        def features(x: Tensor, key: bool) -> Blocks:
            tau_x, omega_x = rows.project(x).split([of_coefficient.m, of_base.m], -1)
            rho = self.components()[0][0].of_projections(tau_x, params[0][0], key)
            weights = self._weights([rho], params[0], key)
            return Blocks(tuple(map(Block, weights, self._bases(at_least_float32(x), omega_x))))

        return BoundMap(lambda x: features(x, False), lambda y: features(y, True))

    def _bases(self, x: Tensor, omega_x: Tensor) -> tuple[Features, Features]:
        """Return positive and trigonometric features from projections (..., L, m)."""
        half = sq_norm(x) / 2
        m = omega_x.shape[-1]
        both = torch.cat([omega_x, -omega_x], -1) if self.base == "hyp" else omega_x
        down = half if self.kernel == "softmax" else 2 * half
        up = half if self.kernel == "softmax" else torch.zeros_like(half)
        return (
            Features(ONE, both - (down + math.log(both.shape[-1]) / 2)),
            Features(torch.cat([omega_x.cos(), omega_x.sin()], -1), up - math.log(m) / 2),
        )


@dataclass(frozen=True)
class AngularHybrid(Bipolar):
    """Angular hybrid theta/pi K_positive + (1 - theta/pi) K_trig (HRF 3.1).

    M = 8 m n for the hyperbolic base. Estimates may be negative. For vectors of equal length the variance is zero at
    angles 0 and pi. Unequal lengths increase it at both.
    """

    def rank(self, m: Nested) -> int:
        """Return 4m (n + 1), the dimension in HRF, which has a = 1/2 and no indicators."""
        (n,), m = self._counts(m)
        return (n + 1) * sum(b.width(k) for b, k in zip(self.components()[1], m))

    def coefficient(self):
        return AngularCoefficient()


@dataclass(frozen=True)
class GaussianHybrid(Bipolar):
    """Bipolar hybrid with Gaussian coefficients (HRF appendix F).

    M = 4m (2n + 1) for the hyperbolic base. Estimates may be negative. The variance is zero at x = y. sigma and r are
    those of `BipolarGaussianCoefficient`.
    """

    sigma: Positive | None = None
    r: Positive | None = None

    def coefficient(self):
        return BipolarGaussianCoefficient(sigma=self.sigma, r=self.r)


def covariance(
    bases: tuple[FeatureMap, FeatureMap], params: tuple, x: Tensor, y: Tensor, log_unit: Tensor
) -> Tensor:
    """Return Cov(K_1, K_2) / K^2 of two estimates from one projection.

    The result is divided by exp(log_unit). For TrigRF with PosRF or HypRF the covariance is cos(|x|^2 - |y|^2) - 1
    (HRF Theorem 3.1). The general case was derived for this project.
    """
    one, other = (_pair_vector(b, x, y, p) for b, p in zip(bases, params))
    antithetic = any(getattr(b, "antithetic", False) for b in bases)
    signs = (1, -1) if antithetic else (1,)
    total = 0
    for product in ((one * other).sum(-1), (one * other.conj()).sum(-1)):
        for sign in signs:
            total = total + torch.exp(sign * product.real - log_unit) * product.imag.cos()
    return total / (2 * len(signs)) - torch.exp(-log_unit)


def _pair_vector(base: FeatureMap, x: Tensor, y: Tensor, params) -> Tensor:
    """Return w = M x + M^-T y of the base, complex (..., d)."""
    if hasattr(base, "pair_vector"):
        return base.pair_vector(x, y, params)
    if isinstance(base, TrigRF):
        return 1j * (x - y)
    if type(base) in (PosRF, HypRF):
        return (x + y).to(torch.complex128)
    raise NotImplementedError(
        f"{type(base).__name__}: unknown covariance with shared projections; set shared=False"
    )


def _rename_parts(what: str, part: int | None, needed: Nested) -> Nested:
    prefix = what if part is None else f"{what}_{part}"

    def named(p: Projections) -> Projections:
        return replace(p, name=f"{prefix}_{p.name}" if p.name else prefix)

    return map_leaves(named, needed) if not isinstance(needed, Projections) else named(needed)
