"""Random features for softmax and Gaussian kernels, and linear-time attention.

The package runs the mechanisms of Chefs' Random Tables, Performers and Hybrid Random Features, and swaps the attention
of pretrained models. Names are imported on first use, so that `import crt_exp` is fast.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "crt_exp.estimators": ("RandomFeatures",),
    "crt_exp.estimators.kernel_regression": (
        "KernelRegressionClassifier",
        "KernelRegressionRegressor",
    ),
    "crt_exp.estimators.ridge": ("RandomFeatureClassifier", "RandomFeatureRidge"),
    "crt_exp.mechanism": ("Mechanism", "swap_attention"),
    "crt_exp.swap.calibration": ("calibrate_attention", "describe_attention"),
    "crt_exp.swap.swap": ("unswap_attention",),
    "crt_exp.swap.pretrained": ("from_pretrained",),
    "crt_exp.experiments.measure.advise": ("advise",),
}
_HOME_OF = {}
for _module, _names in _HOMES.items():
    _HOME_OF |= dict.fromkeys(_names, _module)
__all__ = sorted(_HOME_OF)


def __getattr__(name):
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'crt_exp' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
