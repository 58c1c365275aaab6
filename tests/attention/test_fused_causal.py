"""Causal attention by its Triton kernels, in the interpreter: outputs and gradients are those of the definition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import Case, assert_same

from crt_exp.attention import attention_reference
from crt_exp.attention.call import partial_attention
from crt_exp.attention.engines import fused_causal, operators
from crt_exp.features import OPRF, SDERF, SMREG, PosRF

pytest.importorskip("triton", reason="Triton comes with PyTorch on Linux alone")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1",
                                reason="tests/attention/test_gpu.py runs them on the GPU that is here")
SMALL = {"B": 1, "H": 1, "dtype": torch.float32}  # the interpreter takes a head after the other
CASES = {
    "segments": dict(H=2, L=45, S=45), "padding": dict(L=20, S=20, masked=True, B=2),
    "the last queries": dict(L=19, S=60, masked=True), "many keys and one query": dict(L=1, S=70),
    "grouped heads": dict(H=2, Hkv=1, L=17, S=23), "wide": dict(L=18, S=18, d=20, dv=33, m=18),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fused_causal, "applies", lambda x, y, v: x.dtype != torch.float64)
    monkeypatch.setattr(fused_causal, "SEGMENT", 32)


def precise(case):
    """The same numbers in float64."""
    for name in "xyv":
        setattr(case, name, getattr(case, name).detach().double().requires_grad_())
    case.grad = case.grad.double()
    return case


def compared(case, tolerance):
    ours = case.with_grads(causal=True)
    assert_same(ours, precise(case).with_grads(attention_reference, causal=True), tolerance)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
    compared(Case(OPRF(), **SMALL | CASES[name]), 3e-6)


@pytest.mark.parametrize("phi", [PosRF(), SMREG(), SDERF()], ids=repr)
def test_other_maps(phi):
    compared(Case(phi, **SMALL, L=18, S=18), 3e-6)


def test_a_late_key_hides_no_early_row():
    """Its features are larger by far more than float32 holds: alone in a piece, then in a later one."""
    for at in (9, 40):
        case = Case(PosRF(), **SMALL, L=45, S=45)
        case.y.data[:, :, at] *= 60
        with torch.no_grad():
            logs = case.phi.phi_k(case.y, case.noise, case.params).log_scale
        assert logs.amax(-1).amax(-1).sub(logs.amax(-1).amin(-1)).abs().max() > 104
        compared(case, 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_half_precision(dtype, tolerance):
    compared(Case(OPRF(), **SMALL | {"dtype": dtype}, L=20, S=20), tolerance)


def test_padding_may_hold_nan():
    case = Case(OPRF(), **SMALL, L=18, S=18, masked=True)
    for t in (case.y, case.v):
        t.data[0, :, :5] = torch.nan
    compared(case, 3e-6)


def test_gradients_of_log_sums():
    results, case = [], Case(OPRF(), **SMALL, L=18, S=30, masked=True)
    for each in (case, precise(case)):
        tensors = each.x, each.y, each.v
        rows = partial_attention(*tensors, each.phi, each.noise, each.params, causal=True, key_mask=each.mask)
        logs = rows.logsum
        seen = logs.isfinite()
        total = torch.where(seen, logs, 0).square().sum() + (rows.output * each.grad).sum()
        results.append([torch.where(seen, logs, 0), *torch.autograd.grad(total, tensors)])
    assert_same(*results, 3e-6)


def test_is_chosen():
    """Of causal calls, unless the map learns."""
    case = Case(OPRF(), **SMALL)
    form = operators.form_of(case.x, case.y, case.v, case.phi, case.noise, case.params, None)
    given = case.x, case.y, case.v
    assert operators._engine(*given, form, causal=True) == "fused causal"
    assert operators._engine(*given, form, causal=False) != "fused causal"
    assert operators._engine(*given, form._replace(learned=True), causal=True) != "fused causal"


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path):
    """For an H100, without one; within the shared memory that a block may have on any GPU since 2020."""
    new = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, Path(__file__).with_name("compiled_kernels.py")], capture_output=True,
                          text=True, env=new | {"TRITON_CACHE_DIR": str(tmp_path)}, check=False)
    assert made.returncode == 0, made.stderr
    sizes = json.loads(made.stdout)
    assert len(sizes) == 5 and max(sizes.values()) <= 99 * 1024, sizes
