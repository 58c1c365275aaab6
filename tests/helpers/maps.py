"""The feature maps that property tests run over: all of conf/features, and variants."""

from dataclasses import replace

from crt_exp.features import (
    CERF,
    GERF,
    OPRF,
    SDERF,
    SMREG,
    AngularCoefficient,
    ArcCosineRF,
    AutoRF,
    ClusteredHybrid,
    GaussianHybrid,
    GaussianMixtureHybrid,
    GeomRF,
    GeomRFPlus,
    Hybrid,
    HypRF,
    LaplaceRF,
    MaternRF,
    PoisRF,
    PoisRFPlus,
    PosRF,
    Product,
    RationalQuadraticRF,
    Sum,
    TrigRF,
)
from crt_exp.features.exponential import PositiveExponential
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices


def map_names(without=()):
    """The maps of conf/features that estimate softmax or the Gaussian kernel, but for those `without`."""
    unknown = {*without} - {*choices("features")}
    assert not unknown, unknown
    maps = {}
    for name in choices("features"):
        if name not in without:
            maps[name] = Mechanism.of(features=name).map(own_kernel=True)
    return tuple(name for name, phi in maps.items() if not phi.own_kernel and phi.estimates)


KERNELS = ("softmax", "gaussian")
OF_PARTS = ("angular", "gaussian", "clustered", "gaussian_mixture", "hybrid")
HYBRIDS = dict.fromkeys((*OF_PARTS, "auto"), "noise or parameters of several parts") | {
    "mixture": "size is the number of projections: tests/features/test_fitted.py"
}
SPECIAL = [
    GERF(s=1),
    GERF(s=-1),
    GERF(A=-0.1 + 0.05j, s=1),
    GERF(A=-0.05 + 0.03j, s=-1, kernel="gaussian"),
    GERF(A=0.02, s=-1),
    OPRF(antithetic=True),
    OPRF(A=-0.3),
    OPRF(A=0.02, antithetic=True),
    PoisRF(rate=0.7),
    GeomRF(p=0.6),
    SMREG(antithetic=True),
    SDERF(),
    SDERF(diagonal=True),
    SDERF(centred=False, balance=False),
]
NAMED = []
for name in map_names(HYBRIDS):
    NAMED += [Mechanism.of(features=name).map(kernel) for kernel in KERNELS]
ONE_KERNEL = [
    phi for n, phi in enumerate(NAMED) if n % 4 in (0, 3)
] + SPECIAL  # of each map one kernel, in turn
SIMPLE = NAMED + SPECIAL
COMPOSITE = [
    Sum(TrigRF(), PosRF(), weights=(0.3, 0.7)),
    Sum(OPRF(), OPRF(), weights=(1.5, -0.5)),
    Product(TrigRF("gaussian"), OPRF()),
    Sum(Product(TrigRF("gaussian"), PosRF()), GERF()),
]
EXPONENTIAL = [CERF("gaussian", M=0.9 + 0.4j, antithetic=True), AutoRF()]
HYBRID = [
    replace(phi, n=None) if hasattr(phi, "n") else phi
    for name in OF_PARTS
    if (phi := Mechanism.of(features=name).map())
] + [
    GaussianHybrid("gaussian", base="pos", shared=False),
    ClusteredHybrid("gaussian", queries=1, field="complex"),
    GaussianMixtureHybrid(default=None, tau=1.5),
    GaussianMixtureHybrid("gaussian", queries=1, field="complex", default="hyp"),
    Hybrid(
        coefficients=["gaussian M=-1", AngularCoefficient()],
        bases=["trig", HypRF(), "oprf"],
        shared=False,
    ),
    Hybrid(
        "gaussian",
        coefficients=["angular"],
        bases=["complex M=0.9", "complex M=1j antithetic=true"],
    ),
]
SPECTRAL = [
    MaternRF(nu=0.5),
    MaternRF(nu=1.5),
    MaternRF(nu=2.5),
    LaplaceRF(),
    RationalQuadraticRF(),
    RationalQuadraticRF(alpha=0.3),
    RationalQuadraticRF(alpha=7.0),
]
OTHER_KERNELS = [
    *SPECTRAL,
    ArcCosineRF(order=0),
    ArcCosineRF(order=1),
]  # no softmax: outside of attention
POSITIVE = [m for m in SIMPLE if isinstance(m, (PositiveExponential, PoisRFPlus, GeomRFPlus))]
MAPS = (
    SIMPLE + COMPOSITE + EXPONENTIAL
)  # HYBRID: unbiased and of known variance by tests/features/test_hybrid.py


def independent(phi, draw):
    """A noise for phi with as many independent draws as it has parts."""
    return phi.noise(1, lambda _: draw())
