"""Which engine serves a call with a positive exponential map.

C serves CPUs, and Triton serves GPUs where it runs. Plain operations (chunks.py) serve everything else: float64,
learned maps on GPUs, transforms of torch.func, exported programs, other devices, and CRT_EXP_ENGINE=plain.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crt_exp.attention import engines
from crt_exp.attention.checks import requires_gradient, transformed
from crt_exp.attention.engines import PLAIN, TRITON, C, native
from crt_exp.features.base import FeatureMap
from crt_exp.features.exponential import PositiveExponential
from crt_exp.samplers.noise import Nested

if TYPE_CHECKING:
    from crt_exp.attention.engines import gpu

LONGEST = 128  # largest d and dv of the Triton kernels


def choose_engine(
    phi: FeatureMap, x: Tensor, y: Tensor, v: Tensor, noise: Nested, params: Nested
) -> str:
    """Return C, TRITON or PLAIN; a call's backward pass uses the same engine."""
    dtypes = {x.dtype, y.dtype, v.dtype}
    if engines.PLAIN_CHOSEN or not isinstance(phi, PositiveExponential) or torch.float64 in dtypes:
        return PLAIN
    if torch.compiler.is_exporting() or transformed(x, y, v):
        return PLAIN
    if x.device.type == "cpu" and native.available():
        return C
    fits = len(dtypes) == 1 and max(x.shape[3], v.shape[3]) <= LONGEST
    if x.device.type != "cuda" or not fits or requires_gradient(noise, params):
        return PLAIN
    return TRITON if triton_works(x.device, x.dtype) else PLAIN


def find_engine(name: str, causal: bool) -> "native.Engine | gpu.Engine":
    """Return an engine with the interface in `engines/__init__.py`."""
    if name == C:
        return native.causal if causal else native.bidirectional
    from crt_exp.attention.engines import gpu  # imports triton, which takes a second

    return gpu.causal if causal else gpu.bidirectional


def triton_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels compute a small case correctly on this device."""
    try:
        from crt_exp.attention.engines import gpu
    except ImportError:
        return False
    return gpu.works(device, dtype)


# set by torch.compiler.assume_constant_result, which would import the compiler; that takes longer than torch
triton_works._dynamo_marked_constant = True  # type: ignore[attr-defined]
