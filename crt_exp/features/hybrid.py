"""Hybrid random features (HRF): weighted combinations of kernel estimates.

Notation: n projections of a coefficient. The estimate is

    K = sum_k lambda_k K_k + (1 - sum_k lambda_k) K_last

with bases K_k and estimated coefficients lambda_k. It is unbiased for all coefficients that are independent of the
bases. The features are the concatenated products of HRF Lemma 2.3 in real numbers, with negative signs on the query
side.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from crt_exp.features.base import (
    BoundMap,
    Composite,
    FeatureMap,
    Params,
    check_independent,
    requests_of,
)
from crt_exp.features.blocks import (
    AngularCoefficient,
    BipolarGaussianCoefficient,
    Block,
    Blocks,
    Coefficient,
    GaussianCoefficient,
    InBlocks,
    column,
    indicators_of_equal_signs,
)
from crt_exp.features.complex_exponential import CERF
from crt_exp.features.exponential import (
    GERF,
    OPRF,
    SMREG,
    HypRF,
    PosRF,
    TrigRF,
)
from crt_exp.samplers.noise import (
    DenseNoise,
    Nested,
    at_least_float32,
)
from crt_exp.validation import Count, Positive, Several, check_options, split_words, unknown


@dataclass(frozen=True)
class HybridMap(InBlocks, Composite):
    """Base class of hybrid maps.

    Projections and parameters are pairs of tuples: one entry per coefficient, and one entry per base. m is the number
    of projections of each base.

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
        _ = self.parts  # building parts checks their options

    @abstractmethod
    def _build_parts(self) -> tuple[tuple[Coefficient, ...], tuple[FeatureMap, ...]]:
        """Return the coefficients and bases; called once."""

    @cached_property
    def parts(self) -> tuple[tuple[Coefficient, ...], tuple[FeatureMap, ...]]:
        """The p coefficients and p + 1 bases; the last base has weight 1 - sum lambda."""
        return self._build_parts()

    def projections(self, m: int) -> Nested:
        coefficients, bases = self.parts
        one_noise = len(coefficients) == 1 or self.one_coefficient_noise
        return (
            requests_of(coefficients, self.n or m, _names("coefficient", one_noise, coefficients)),
            requests_of(bases, m, _names("base", self.shared, bases)),
        )

    def width(self, m: int) -> int:
        coefficients, bases = self.parts
        n = self.n or m
        columns = [part.width(n) for part in coefficients]
        rest = int(not self._indicators) + 2 * n * len(coefficients)
        return sum(r * base.width(m) for r, base in zip([*columns, rest], bases))

    @property
    def _indicators(self) -> bool:
        """Whether 1 - lambda needs no constant column."""
        coefficients, _ = self.parts
        return len(coefficients) == 1 and isinstance(coefficients[0], AngularCoefficient)

    def _check(self, noise: Nested, params: Nested) -> None:
        check_independent(noise)
        sizes = [len(parts) for parts in self.parts]
        for name, value in (("noise", noise), ("params", params)):
            if [len(parts) for parts in value] != sizes:
                raise ValueError(
                    f"{name}: expected a pair of tuples ({sizes[0]} coefficients, {sizes[1]} bases); use "
                    "phi.noise and phi.fit"
                )

    def bind(self, noise, params) -> BoundMap:
        self._check(noise, params)
        coefficients, bases = self.parts
        bound = [base.bind(n, p) for base, n, p in zip(bases, noise[1], params[1])]
        coefficient_parts = list(zip(coefficients, noise[0], params[0]))

        def features(x: Tensor, key: bool) -> Blocks:
            rhos = [part.rho(x, n, p, key) for part, n, p in coefficient_parts]
            blocks = []
            for weight, base in zip(self._weights(rhos, params[0], key), bound):
                phi = base.phi_k if key else base.phi_q
                blocks.append(Block(weight, phi(x)))
            return Blocks(tuple(blocks))

        return BoundMap(partial(features, key=False), partial(features, key=True))

    def _weights(self, rhos: list[Tensor], params: tuple, key: bool) -> list[Tensor]:
        """Return the weights of each base, (..., L, R).

        They are [sqrt|a|, rho] of its coefficient; the last base has the columns of 1 - sum lambda.
        """
        coefficients, _ = self.parts
        if self._indicators:
            rest = indicators_of_equal_signs(rhos[0], key)
        else:
            constants = [part.constant(p) for part, p in zip(coefficients, params)]
            columns = [column(1 - sum(constants), rhos[0], key)]
            columns += rhos if key else [-rho for rho in rhos]
            rest = torch.cat(columns, -1)
        parts = zip(coefficients, rhos, params)
        return [*(part.lambda_columns(rho, p, key) for part, rho, p in parts), rest]

    # ---- exact errors

    def log_mse(self, x, y, params, m) -> Tensor:
        """Return the log variance with m i.i.d. projections of bases, n of coefficients."""
        relative = self.log_relative_variance(x, y, params, self.n or m, m)
        return 2 * self.log_kernel(x.double(), y.double()) + relative

    def log_relative_variance(
        self,
        x: Tensor,
        y: Tensor,
        params: Params,
        n: int = 1,
        m: int = 1,
    ) -> Tensor:
        """Return log(Var / K^2) with n and m i.i.d. projections, float64, in nats.

        The variance is the sum over bases of E lambda_k^2 Var K_k. With shared projections the sum of E lambda_k
        lambda_l Cov(K_k, K_l) is added (HRF Theorems 3.1, D.1, F.1; derived for this project for p > 1).

        Raises:
            NotImplementedError: no covariance is known. It is known for TrigRF, PosRF, HypRF and CERF.
        """
        x = x.double()
        y = y.double()
        bases = list(zip(self.parts[1], params[1]))
        moments = self._moments(x, y, params[0], n)
        logs = []
        for k, (base, p) in enumerate(bases):
            variance = base.log_relative_variance(x, y, p)
            logs.append(variance + moments[k][k].log())
        spread = torch.stack(logs)
        top = spread.amax(0).clamp(min=-1e300)
        total = (spread - top).exp().sum(0)
        if self.shared:
            vectors = [_pair_vector(base, x, y, p) for base, p in bases]
            antithetic = [isinstance(base, HypRF | CERF) and base.antithetic for base, _ in bases]
            for k in range(len(bases)):
                for j in range(k):
                    either = antithetic[k] or antithetic[j]
                    pair = covariance(vectors[k], vectors[j], either, top)
                    total = total + 2 * moments[k][j] * pair
        return torch.where(total > 0, total.clamp(min=0).log() + top, -torch.inf) - math.log(m)

    def _moments(self, x: Tensor, y: Tensor, params: tuple, n: int) -> list[list[Tensor]]:
        """Return E lambda_k lambda_l of the estimated weights, including the last base.

        The entries sum to 1.
        """
        coefficients, _ = self.parts
        means = [part.mean(x, y, p) for part, p in zip(coefficients, params)]
        means.append(1 - torch.as_tensor(sum(means)))
        moments = []
        for mean in means:
            moments.append([mean * other for other in means])
        for k, row in enumerate(self._covariances(x, y, params) / n):
            for j, value in enumerate(row):
                moments[k][j] = moments[k][j] + value
                moments[k][-1] = moments[k][-1] - value
                moments[-1][j] = moments[-1][j] - value
                moments[-1][-1] = moments[-1][-1] + value
        return moments

    def _covariances(self, x: Tensor, y: Tensor, params: tuple) -> Tensor:
        """Return the covariances of the coefficients with one projection, (p, p, ...)."""
        variances = [part.variance(x, y, p) for part, p in zip(self.parts[0], params)]
        return torch.stack(variances, -1).diag_embed(dim1=0, dim2=1)


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

    >>> phi = Hybrid(coefficients=("angular",), bases=("pos", "trig"))
    >>> x = torch.ones(4)
    >>> phi.log_variance(x, -x, phi.fit(None)).item()
    -inf
    """

    coefficients: Several[Coefficient | str] = ()
    bases: Several[FeatureMap | str] = ()

    def _build_parts(self):
        coefficients = tuple(
            build_part("coefficients", part, COEFFICIENTS) for part in self.coefficients
        )
        bases = tuple(build_part("bases", part, BASES, kernel=self.kernel) for part in self.bases)
        if len(bases) != len(coefficients) + 1:
            raise ValueError(
                f"coefficients: {len(coefficients)}; expected one fewer than bases ({len(bases)})"
            )
        if any(base.kernel != self.kernel or isinstance(base, SMREG) for base in bases):
            raise ValueError(f"kernel={self.kernel}: expected bases that all estimate this kernel")
        return coefficients, bases


def build_part(key: str, part: Any, classes: dict[str, type], **options: Any) -> Any:
    """Build a coefficient or base from a string; return objects unchanged."""
    if not isinstance(part, str):
        return part
    name, words = split_words(part)
    if name not in classes:
        raise unknown(key, name, classes)
    check_options(f"{key} {name}", classes[name], words)
    return classes[name](**words, **options)


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
    def coefficient(self) -> Coefficient: ...

    def _build_parts(self):
        positive = BASES[self.base](self.kernel)
        return (self.coefficient(),), (positive, TrigRF(self.kernel))

    def bind(self, noise, params) -> BoundMap:
        """Bind both maps; shared projections need one matrix product."""
        self._check(noise, params)
        (tau,), (omega, other) = noise
        if omega is not other or omega.matrix_free or omega.batch != tau.batch:
            return super().bind(noise, params)
        rows = DenseNoise(torch.cat([tau.rows(), omega.rows()], -2), gaussian=False)
        parts: Any = self.parts
        (coefficient,), (positive, trigonometric) = parts
        _, _, bias = positive.affine(omega, ())

        def features(x: Tensor, key: bool) -> Blocks:
            tau_x, omega_x = rows.project(x).split([tau.m, omega.m], -1)
            rho = coefficient.of_projections(tau_x, params[0][0], key)
            weights = self._weights([rho], params[0], key)
            x = at_least_float32(x)
            bases = (
                positive.of_projections(x, omega_x, bias),
                trigonometric.of_projections(x, omega_x),
            )
            return Blocks(tuple(map(Block, weights, bases)))

        return BoundMap(partial(features, key=False), partial(features, key=True))


@dataclass(frozen=True)
class AngularHybrid(Bipolar):
    """Angular hybrid theta/pi K_positive + (1 - theta/pi) K_trig (HRF 3.1).

    M = 8 m n for the hyperbolic base. Estimates may be negative. For vectors of equal length the variance is zero at
    angles 0 and pi. Unequal lengths increase it at both.

    >>> x = torch.ones(4)
    >>> AngularHybrid().log_variance(x, -x, AngularHybrid().fit(None)).item()
    -inf
    """

    def coefficient(self):
        return AngularCoefficient()


@dataclass(frozen=True)
class GaussianHybrid(Bipolar):
    """Bipolar hybrid with Gaussian coefficients (HRF appendix F).

    M = 4m (2n + 1) for the hyperbolic base. Estimates may be negative. The variance is zero at x = y. sigma and r are
    those of `BipolarGaussianCoefficient`.

    >>> phi = GaussianHybrid(r=2.0)
    >>> x = torch.ones(4)
    >>> phi.log_variance(x, x, phi.fit(None)).item()
    -inf
    """

    sigma: Positive | None = None
    r: Positive | None = None

    def coefficient(self):
        return BipolarGaussianCoefficient(sigma=self.sigma, r=self.r)


def covariance(one: Tensor, other: Tensor, antithetic: bool, log_unit: Tensor) -> Tensor:
    """Return Cov(K_1, K_2) / K^2 of two estimates from one projection.

    The result is divided by exp(log_unit). For TrigRF with PosRF or HypRF the covariance is cos(|x|^2 - |y|^2) - 1
    (HRF Theorem 3.1). The general case was derived for this project.

    Args:
        one: w = M x + M^-T y of the first base (..., d), complex.
        other: w of the second base.
        antithetic: one of the bases uses omega and -omega.
    """
    total = torch.zeros_like(log_unit)
    signs = (1, -1) if antithetic else (1,)
    for product in ((one * other).sum(-1), (one * other.conj()).sum(-1)):
        for sign in signs:
            total = total + torch.exp(sign * product.real - log_unit) * product.imag.cos()
    return total / (2 * len(signs)) - torch.exp(-log_unit)


def _pair_vector(base: FeatureMap, x: Tensor, y: Tensor, params) -> Tensor:
    """Return w = M x + M^-T y of the base, complex (..., d)."""
    if isinstance(base, CERF):
        return base.pair_vector(x, y, params)
    if isinstance(base, TrigRF):
        return 1j * (x - y)
    if type(base) in (PosRF, HypRF):
        return (x + y).to(torch.complex128)
    raise NotImplementedError(
        f"{type(base).__name__}: unknown covariance with shared projections; set shared=False"
    )


def _names(name: str, equal: bool, parts: tuple) -> list[str]:
    """Return a name for each part, numbered unless they are equal."""
    return [name if equal else f"{name}_{i}" for i in range(len(parts))]
