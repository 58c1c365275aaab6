"""Random-feature maps phi_q, phi_k with E <phi_q(x), phi_k(y)> = kernel(x, y)."""

from crt_exp.features.base import FeatureMap, Features, Projections
from crt_exp.features.blocks import (
    AngularCoefficient,
    BipolarGaussianCoefficient,
    GaussianCoefficient,
)
from crt_exp.features.clustered import ClusteredHybrid, GaussianMixtureHybrid
from crt_exp.features.complex_exponential import CERF, Hedgehog
from crt_exp.features.dense import SDERF, AutoRF
from crt_exp.features.discrete import GeomRF, GeomRFPlus, PoisCoordRF, PoisRF, PoisRFPlus
from crt_exp.features.exponential import GERF, OPRF, SMREG, HypRF, PosRF, TrigRF
from crt_exp.features.hybrid import AngularHybrid, GaussianHybrid, Hybrid
from crt_exp.features.mixture import Mixture
from crt_exp.features.other_kernels import (
    ArcCosineRF,
    LaplaceRF,
    MaternRF,
    Product,
    RationalQuadraticRF,
    Sum,
)
from crt_exp.features.statistics import Moments, Statistics

__all__ = [
    "AngularCoefficient",
    "AngularHybrid",
    "ArcCosineRF",
    "AutoRF",
    "BipolarGaussianCoefficient",
    "CERF",
    "ClusteredHybrid",
    "FeatureMap",
    "Features",
    "GERF",
    "GaussianCoefficient",
    "GaussianHybrid",
    "GaussianMixtureHybrid",
    "GeomRF",
    "GeomRFPlus",
    "Hedgehog",
    "Hybrid",
    "HypRF",
    "LaplaceRF",
    "MaternRF",
    "Mixture",
    "Moments",
    "OPRF",
    "PoisCoordRF",
    "PoisRF",
    "PoisRFPlus",
    "PosRF",
    "Product",
    "Projections",
    "RationalQuadraticRF",
    "SDERF",
    "SMREG",
    "Statistics",
    "Sum",
    "TrigRF",
]
