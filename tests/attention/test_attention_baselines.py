"""Attention by other formulas, and bad input: one clear sentence each."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, assert_same

from crt_exp import samplers
from crt_exp.attention import (
    DecodingState,
    Generalized,
    Linformer,
    attention,
    exact_attention,
    identity_attention,
    softmax_attention,
)
from crt_exp.features import OPRF, PosRF, Statistics, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")


@pytest.mark.parametrize("f", ["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"])
def test_generalized_is_its_formula(f):
    functions = {"relu": F.relu, "elu+1": lambda t: F.elu(t) + 1, "gelu": F.gelu, "identity": lambda t: t}
    for projection in (True, False):
        case = Case(Generalized(f=f, projection=projection), S=9, L=9)
        case.noise = case.noise if projection else None
        u, w = (t @ case.noise.rows().mT if projection else t for t in (case.x, case.y))
        phi = lambda t: functions.get(f, getattr(torch, f, None))(t) / t.shape[-1] ** 0.5 + 1e-3
        A = phi(u) @ phi(w).mT
        assert_same([case(), case(normalize=False)], [A @ case.v / A.sum(-1, keepdim=True), A @ case.v], 1e-7)
        assert not case.phi.positive or (A > 0).all()
    with pytest.raises(NotImplementedError, match="no known kernel"):
        case.phi.log_variance(case.x, case.x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_is_softmax(is_causal):
    for options in ({}, {"masked": True}, {"Hkv": 2, "L": 5}):
        case = Case(OPRF(), **options)
        run = lambda f, case=case: f(case.x, case.y, case.v, causal=is_causal, key_mask=case.mask)
        assert_same([run(exact_attention)], [run(softmax_attention)])


def linformer(length, rank, **sizes):
    return Linformer(2, 4, length=length, rank=rank, scaling=1.0, **sizes)


def test_identity_and_linformer():
    case = Case(OPRF(), masked=True, dtype=torch.float32)
    assert torch.equal(identity_attention(case.x, case.y, case.v), case.v)
    layer, keep = linformer(11, 3), case.mask[:, None, :, None]
    begin = case.mask.int().argmax(1).tolist()     # places count from the first real key
    y, v = (torch.stack([row.roll(-at, 1) for row, at in zip(t * keep, begin)]) for t in (case.y, case.v))
    y, v = layer.key_projection @ y, layer.value_projection @ v
    assert_same([layer(case.x, case.y, case.v, case.mask)], [softmax_attention(case.x, y, v)], 1e-5)
    layer(case.x, case.y[:, :, :7], case.v[:, :, :7]).sum().backward()
    assert (layer.key_projection.grad[:, 7:] == 0).all() and layer.key_projection.grad[:, :7].abs().min() > 0


# ---- bad input -------------------------------------------------------------------------------------------------------


def call(x=(2, 4, 6, 4), y=None, v=None, noise=None, params=None, phi=None, **options):
    y = x if y is None else y
    v = y if v is None else v
    phi = phi or OPRF(A=-0.1)
    noise = noise if noise is not None else samplers.iid(5, 4)
    return attention(*(torch.zeros(*s) if isinstance(s, tuple) else s for s in (x, y, v)), phi, noise,
                     phi.fit(None) if params is None else params, **options)


BAD = {
    "pairwise masks": lambda: call(key_mask=torch.ones(2, 1, 6, 6) > 0),
    r"pairwise masks ?": lambda: call(key_mask=torch.ones(6, 6, 1) > 0),
    "torch.float32 on cpu: .* boolean": lambda: call(key_mask=torch.ones(2, 6)),
    r"expected a boolean .B, S.=\(2, 6\)": lambda: call(key_mask=torch.ones(2, 5) > 0),
    "torch.bool on meta: .* on cpu": lambda: call(key_mask=torch.ones(2, 6, dtype=torch.bool, device="meta")),
    r"v \(2, 4, 6, 0\) torch.float32: expected": lambda: call(v=(2, 4, 6, 0)),
    r"x \(4, 6, 4\)": lambda: call(x=(4, 6, 4)),
    "torch.int64: expected floating-point": lambda: call(x=torch.zeros(2, 4, 6, 4, dtype=torch.long), y=(2, 4, 6, 4)),
    "x is on meta, y is on cpu: expected one device": lambda: call(
        x=torch.zeros(2, 4, 6, 4, device="meta"), y=(2, 4, 6, 4)),
    "x is on cpu, v is on meta": lambda: call(v=torch.zeros(2, 4, 6, 4, device="meta")),
    "x is on cpu, y is on meta": lambda: Statistics.of(torch.zeros(3, 2), torch.zeros(3, 2, device="meta")),
    r"y \(3, 4, 6, 4\), v \(3, 4, 6, 4\): expected \(B, H, L, d\)": lambda: call(y=(3, 4, 6, 4)),
    r"y \(2, 4, 6, 5\)": lambda: call(y=(2, 4, 6, 5)),
    r"v \(2, 4, 7, 4\)": lambda: call(v=(2, 4, 7, 4)),
    "kv_heads=3: expected a divisor of heads=4": lambda: call(y=(2, 3, 6, 4)),
    "kv_heads=8: expected a divisor of heads=4": lambda: call(y=(2, 8, 6, 4)),
    r"y \(2, 4, 0, 4\)": lambda: call(y=(2, 4, 0, 4)),
    "expected L <= S": lambda: call(y=(2, 4, 5, 4), causal=True),
    "d=7, .* with d=4": lambda: call(noise=samplers.iid(5, 7)),
    r"batch=\(3,\)": lambda: call(noise=samplers.iid(5, 4, batch=(3,))),
    r"parameter \(3, 1, 1\)": lambda: call(params=OPRF().fit(Statistics.of(*torch.zeros(2, 3, 2, 4)))),
    "noise=tensor": lambda: call(noise=torch.zeros(5, 4)),
    "expected a tensor of `fit`": lambda: call(params=(-0.1,)),
    "denominator='eps'": lambda: call(denominator="eps"),
    "bfloat16 or float32": lambda: call(x=torch.full((2, 4, 6, 4), 7e4).half()),
    "bfloat16 or float32 ?": lambda: call(x=torch.full((2, 4, 6, 4), torch.nan), phi=TrigRF(), params=()),
    "bfloat16 or float32  ?": lambda: call(y=torch.full((2, 4, 6, 4), 1e30), x=(2, 4, 6, 4), causal=True),
    "f=softplus: expected relu": lambda: Generalized(f="softplus"),
    "kernel_epsilon=-1": lambda: Generalized(kernel_epsilon=-1),
    "noise=None": lambda: Generalized().phi_q(torch.zeros(2, 3)),
    "rank=9": lambda: linformer(8, 9),
    "causal=True": lambda: linformer(8, 2, causal=True)(*torch.zeros(3, 2, 4, 6, 4)),
    "S=6: .*length=4": lambda: linformer(4, 2)(*torch.zeros(3, 2, 4, 6, 4)),
    "needs L == S": lambda: identity_attention(torch.zeros(1, 1, 2, 3), *torch.zeros(2, 1, 1, 4, 3)),
    "needs equal numbers": lambda: DecodingState(PosRF(), samplers.iid(5, 4)).step(
        torch.zeros(1, 1, 1, 4), *torch.zeros(2, 1, 1, 2, 4)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message.strip(" ?")):
        BAD[message]()
