"""Arguments that the library refuses: the error names the value and the expectation."""

from types import SimpleNamespace

import pytest
import torch
from helpers.seeds import seeded

from crt_exp import samplers
from crt_exp.attention import Generalized, Linformer, Reformer, attention
from crt_exp.experiments.runner.configuration import check_plain
from crt_exp.features import AngularHybrid, Hedgehog, Moments, PosRF
from crt_exp.features.complex_exponential import _for_dimension
from crt_exp.features.statistics import log_kernel
from crt_exp.registry import ConfigError
from crt_exp.samplers.blocks import row_lengths
from crt_exp.swap.interface import interface_attention

X = torch.randn(1, 2, 5, 4, generator=seeded())
NOISE = samplers.iid(3, 4, seeded(1))
LINFORMER = Linformer(2, 4, length=4, rank=2)
REFORMER = Reformer(2, 4, chunk=2, buckets=4)
SWAPPED = SimpleNamespace(swapped=SimpleNamespace(path="layer 0"))
CALLS = {
    "noise of generalized features": (
        lambda: Generalized().phi_q(X),
        ValueError,
        "noise=None: expected a noise",
    ),
    "kernel of generalized features": (
        lambda: Generalized().log_kernel(X, X),
        NotImplementedError,
        r"\(relu\): no known",
    ),
    "rank": (
        lambda: Linformer(2, 4, length=4, rank=5),
        ValueError,
        "rank=5: expected 1 <= rank <= length=4",
    ),
    "causal linformer": (
        lambda: Linformer(2, 4, causal=True)(X, X, X),
        ValueError,
        "causal=True: not supported",
    ),
    "length of linformer": (
        lambda: LINFORMER(X, X, X),
        ValueError,
        "S=5: linformer expected at most length=4",
    ),
    "cross attention of reformer": (
        lambda: REFORMER(X[:, :, :4], X, X),
        ValueError,
        "L=4, S=5: expected L == S",
    ),
    "policy": (
        lambda: attention(X, X, X, PosRF(), NOISE, denominator="clip"),
        ValueError,
        "denominator='clip': expected",
    ),
    "variance of hedgehog": (
        lambda: Hedgehog().log_variance(X, X),
        NotImplementedError,
        "estimate no kernel",
    ),
    "dimension of M": (
        lambda: _for_dimension(torch.ones(1, 3), X),
        ValueError,
        "M: 3 dimensions, expected 4",
    ),
    "shared projections of a hybrid": (
        lambda: AngularHybrid().phi_q(X, (NOISE, NOISE)),
        ValueError,
        "independent",
    ),
    "kernel": (
        lambda: log_kernel("laplace", X, X),
        ValueError,
        "kernel=laplace: expected softmax or gaussian",
    ),
    "vectors of known moments": (
        lambda: Moments.from_values(mean=torch.ones(4)).sets(),
        ValueError,
        "statistics without vectors",
    ),
    "lengths of rows": (
        lambda: row_lengths((3,), 4, "unit", None),
        ValueError,
        "lengths='unit': expected chi, sqrt_d",
    ),
    "key of the configuration": (
        lambda: check_plain({"tsk": "glue"}),
        ConfigError,
        "tsk.*did you mean task",
    ),
    "mask of numbers": (
        lambda: interface_attention(SWAPPED, X, X, X, torch.zeros(1, 5)),
        ValueError,
        "layer 0: unsupported mask of torch.float",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()
