"""Random-feature maps: each gives phi_q, phi_k with E <phi_q(x), phi_k(y)> = kernel(x, y)."""

from crt_exp.features.algebra import Product, Sum
from crt_exp.features.base import FeatureMap, Features, Projections
from crt_exp.features.discrete import GeomRF, GeomRFPlus, PoisCoordRF, PoisRF, PoisRFPlus
from crt_exp.features.exponential import GERF, OPRF, SMREG, HypRF, PosRF, TrigRF
from crt_exp.features.statistics import Moments, Statistics

__all__ = ["FeatureMap", "Features", "GERF", "GeomRF", "GeomRFPlus", "HypRF", "Moments", "OPRF", "PoisCoordRF",
           "PoisRF", "PoisRFPlus", "PosRF", "Product", "Projections", "SMREG", "Statistics", "Sum", "TrigRF"]
