"""The kernels for GPUs without a GPU: Triton's interpreter on the CPU, and compilation ahead of time."""

import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.covering import slow
from torch import Tensor

from crt_exp.attention import decoding, feature_attention, partial_attention
from crt_exp.attention.decoding import DecodingState
from crt_exp.attention.engines import TRITON, C, Form
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism

triton = pytest.importorskip("triton", reason="needs triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
CAPABILITIES = (80, 90)
SHARED_MEMORY = 99 * 1024


@dataclass(frozen=True)
class Sizes:
    B: int = 1
    H: int = 2
    Hkv: int = 1
    L: int = 20
    S: int = 20
    d: int = 16
    dv: int = 16
    m: int = 20
    causal: bool = False
    masked: bool = False
    norm: float | None = None
    heads_of_map: int | None = None
    dtype: torch.dtype = torch.float32


SMALL = [
    Sizes(H=1, L=37, S=37, d=9, dv=12, m=5, causal=True),
    Sizes(L=17, S=30, m=17, causal=True, masked=True, heads_of_map=1),
    Sizes(L=1, S=3, d=8, dv=20, m=1, masked=True),
    Sizes(L=35, S=20, masked=True, norm=30.0),
    Sizes(H=1, L=33, S=33, m=16, causal=True, norm=30.0),
    Sizes(H=1, L=66, S=66, m=16, causal=True, dtype=torch.bfloat16),
    Sizes(H=1, L=30, S=40, d=24, dtype=torch.float16),
]


def random_sizes(seed: int) -> Sizes:
    choose = random.Random(seed)
    L = choose.randint(1, 200)
    causal = choose.random() < 0.6
    keys = L + choose.choice((0, 0, choose.randint(1, 100)))
    key_heads = choose.choice((1, 2))
    return Sizes(
        B=choose.choice((1, 2)),
        H=key_heads * choose.choice((1, 2)),
        Hkv=key_heads,
        L=L,
        S=keys if causal else choose.randint(1, 200),
        d=choose.randint(8, 128),
        dv=choose.randint(8, 128),
        m=choose.choice((1, 40, choose.randint(1, 300))),
        causal=causal,
        masked=choose.random() < 0.5,
        norm=choose.choice((None, None, 30.0)),
        heads_of_map=choose.choice((None, 1)),
        dtype=choose.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
    )


class Case:
    """Attention with random inputs and gradients; padding holds NaN."""

    def __init__(self, sizes: Sizes):
        s = self.sizes = sizes
        g = torch.Generator().manual_seed(s.L)

        def sample(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        def vectors(*shape: int) -> Tensor:
            t = sample(*shape)
            if s.norm:
                t = t / t.norm(dim=-1, keepdim=True) * s.norm
            return t.to(s.dtype)

        self.x = vectors(s.B, s.H, s.L, s.d)
        self.y = vectors(s.B, s.Hkv, s.S, s.d)
        self.v = sample(s.B, s.Hkv, s.S, s.dv).to(s.dtype)
        heads = s.heads_of_map or s.H
        scale = 0.8 + 0.5 * torch.rand(1, heads, 1, 1, generator=g)
        bias = 0.3 * sample(1, heads, s.m) - 2
        self.keep = None
        if s.masked:
            self.keep = torch.rand(s.B, s.S, generator=g) < 0.7
            self.keep[0, : s.S // 2] = False
            self.y.masked_fill_(~self.keep[:, None, :, None], torch.nan)
            self.v.masked_fill_(~self.keep[:, None, :, None], torch.inf)
        self.form = Form(sample(1, heads, s.m, s.d), scale, bias, 0.5, self.keep)
        self.grad = sample(s.B, s.H, s.L, s.dv).to(s.dtype)
        self.grad_logsum = sample(s.B, s.H, s.L)

    def computed(self) -> dict[str, Tensor]:
        from crt_exp.attention.engines import gpu

        engine = gpu.causal if self.sizes.causal else gpu.bidirectional
        saved = engine.forward(self.x, self.y, self.v, self.form)
        grad_logsum = self.grad_logsum * engine.unit
        inputs = (self.x, self.y, self.v, self.form, saved, self.grad, grad_logsum)
        grads = engine.backward(*inputs)
        logsum = saved.logsum * engine.unit
        return dict(out=saved.out, logsum=logsum, dx=grads.x, dy=grads.y, dv=grads.v)

    def defined(self) -> dict[str, Tensor]:
        """Outputs and gradients by the definition in float64, feature by feature."""
        s = self.sizes
        y, v = self.y.double(), self.v.double()
        visible = torch.ones(s.L, s.S, dtype=torch.bool)
        if s.causal:
            visible = visible.tril(s.S - s.L)
        visible = visible.expand(s.B, 1, s.L, s.S)
        if self.keep is not None:
            y = torch.where(self.keep[:, None, :, None], y, 0.0)
            v = torch.where(self.keep[:, None, :, None], v, 0.0)
            visible = visible & self.keep[:, None, None, :]
        inputs = [t.requires_grad_() for t in (self.x.double(), y, v)]
        x, y, v = inputs
        y = y.repeat_interleave(s.H // s.Hkv, 1)
        v = v.repeat_interleave(s.H // s.Hkv, 1)
        rows = (self.form.rows.double() * self.form.scale.double()).mT
        bias = self.form.bias.double().unsqueeze(-2)
        a = x @ rows + bias
        b = y @ rows + bias - 0.5 * y.square().sum(-1, keepdim=True)
        logits = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), -1)
        logits = torch.where(visible, logits, -1e9)
        sees = visible.any(-1)
        logsum = torch.where(sees, torch.logsumexp(logits, -1), 0.0)
        weights = torch.where(visible, torch.exp(logits - logsum.unsqueeze(-1)), 0.0)
        out = weights @ v
        loss = (out * self.grad.double()).sum() + (logsum * self.grad_logsum.double()).sum()
        dx, dy, dv = torch.autograd.grad(loss, inputs)
        return dict(out=out.detach(), logsum=logsum.detach(), dx=dx, dy=dy, dv=dv)


def check(sizes: Sizes) -> None:
    """Largest error relative to the norm of the result; logits of long vectors round by their size."""
    tolerance = 1e-5 if sizes.dtype == torch.float32 else 2e-2
    if sizes.norm and sizes.dtype == torch.float32:
        tolerance *= 10  # logits up to 450 in float32
    case = Case(sizes)
    computed = case.computed()
    for name, expected in case.defined().items():
        error = (computed[name].double() - expected).norm()
        assert error <= tolerance * expected.norm().clamp(min=1e-3), (name, float(error), sizes)


@interpreted
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_small_cases(sizes):
    check(sizes)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_sizes(seed):
    check(random_sizes(seed))


@interpreted
def test_sums_of_keys_are_those_of_features():
    from crt_exp.attention.engines import gpu

    case = Case(Sizes(Hkv=2, L=1, S=50))
    sums, top = gpu.bidirectional.sum_keys(case.y, case.v, case.form)
    y, v = case.y.double(), case.v.double()
    logs = y @ (case.form.rows * case.form.scale).double().mT + case.form.bias.double()[:, :, None]
    features = (logs - 0.5 * y.square().sum(-1, keepdim=True)).exp()
    expected = torch.cat([v, torch.ones_like(v[..., :1])], -1).mT @ features
    computed = sums.double() * top.double().exp()[:, :, None]
    assert (computed - expected).norm() <= 1e-5 * expected.norm()


@interpreted
@pytest.mark.parametrize("inference", [slow(False), True])
def test_the_engine_checks_itself(inference, monkeypatch, caplog):
    from crt_exp.attention.engines import gpu

    cpu = torch.device("cpu")
    with torch.inference_mode(inference):
        assert gpu.works.__wrapped__(cpu, torch.float32), caplog.text
    monkeypatch.setattr(gpu, "largest_error", lambda *case: float("nan"))
    assert not gpu.works.__wrapped__(cpu, torch.float32)
    assert "relative error nan" in caplog.text
    monkeypatch.setattr(gpu, "largest_error", None)
    assert not gpu.works.__wrapped__(cpu, torch.float32)


METHODS = ["favorp", "favorpp", "favorsharp", "hyp", "favorpp normalize_qk=true"]


def with_engine(monkeypatch, name: str) -> None:
    for module in (feature_attention, decoding):
        monkeypatch.setattr(module, "choose_engine", lambda *call: name)


def training_steps(layer, tensors, key_mask=None):
    """Outputs and gradients of the second training step."""
    for _ in range(2):
        inputs = [t.detach().requires_grad_() for t in tensors]
        out = layer(*inputs, key_mask)
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
    return out, *grads


def check_layer(method, causal, dtype, kv_heads, masked, monkeypatch):
    """A layer computes on the kernels what it computes on CPUs, in the second training step."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 24, 2, 16, generator=g).transpose(1, 2).to(dtype)
    k, v = torch.randn(2, 2, 24, kv_heads, 16, generator=g).transpose(2, 3).to(dtype)
    key_mask = None
    if masked:
        key_mask = torch.rand(2, 24, generator=g) < 0.7
        key_mask[:, 0] = True
    results = []
    for engine in (TRITON, C):
        layer = Mechanism.parse(method, m=16).layer(2, 16, causal=causal, kv_heads=kv_heads)
        with_engine(monkeypatch, engine)
        results.append(training_steps(layer.train(), (q, k, v), key_mask))
    compare(*results, 1e-5 if dtype == torch.float32 else 2e-2)


def compare(results, expected, tolerance):
    for ours, theirs in zip(results, expected):
        assert (ours - theirs).float().norm() <= tolerance * theirs.float().norm()


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_and_padding_in_a_layer(causal, monkeypatch):
    check_layer("favorp", causal, torch.float32, 1, True, monkeypatch)


@interpreted
@pytest.mark.parametrize("engine", [TRITON, C])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_keeps_the_rules_of_torch(causal, engine):
    """Its outputs are new tensors of the shapes that torch.compile is told, and autograd reaches its inputs."""
    heads = 1 if engine == TRITON else 2
    case = Case(Sizes(Hkv=heads, causal=causal))
    form = case.form._replace(bias=case.form.bias[..., :1].expand_as(case.form.bias))
    inputs = [t.requires_grad_() for t in (case.x, case.y, case.v)]
    torch.library.opcheck(
        torch.ops.crt_exp.attention,
        (*inputs, *form, engine, causal),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_layers_compute_what_they_do_on_cpus(method, causal, dtype, kv_heads, masked, monkeypatch):
    check_layer(method, causal, dtype, kv_heads, masked, monkeypatch)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["favorp", "favorpp"])
def test_partial_sums_and_decoding_are_those_of_cpus(method, causal, monkeypatch):
    mechanism = Mechanism.of(method, m=16)
    phi = mechanism.map()
    g = torch.Generator().manual_seed(0)
    noise = mechanism.noise(16, g, batch=(2,))
    x, y, v = torch.randn(3, 2, 2, 30, 16, generator=g)
    params = phi.fit(Statistics.of(x, y))
    results = []
    for engine in (TRITON, C):
        with_engine(monkeypatch, engine)
        inputs = [t.clone().requires_grad_() for t in (x, y, v)]
        rows = partial_attention(*inputs, phi, noise, params, causal=causal)
        grads = torch.autograd.grad((rows.output.square() + rows.logsum).sum(), inputs)
        state = DecodingState(phi, noise, params)
        state.take(y, v)
        results.append(
            (rows.output, rows.logsum, *grads, state.step(x[:, :, :1], y[:, :, :1], v[:, :, :1]))
        )
    compare(*results, 1e-5)


@pytest.mark.parametrize("marked", ["not slow", slow("slow")], ids=["fast", "slow"])
def test_in_the_interpreter(marked):
    """Triton chooses its interpreter at import, so that another process runs the tests above."""
    if INTERPRETED:
        pytest.skip("this is the other process")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-m", marked, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 7


# ---- compilation ahead of time

FLOAT32 = {"rows", "scale", "bias", "states", "references", "chunk_references", "logsum"}
FLOAT32 |= {"dlogsum", "dstates", "diagonal", "dx_of_diagonal", "dy_of_diagonal"}
VECTORS = {"x", "y", "v", "grad", "out", "dx", "dy", "dv"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("key_sums", "scan", "outputs", "query_sums", "scan_back", "query_gradients")
KERNELS += ("key_gradients", "diagonal_logs", "diagonal_gradients")


@dataclass
class Resources:
    registers: int
    spilled: int  # bytes
    shared_memory: int  # bytes


def compile_kernel(name: str, capability: int, dtype: str, d: int, causal: bool, of_keys=True):
    """Compile one kernel for a GPU that need not be here, and return its resources."""
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from crt_exp.attention.engines import gpu, kernels

    program = gpu.program(DTYPES[dtype], d)
    if name.startswith("diagonal"):
        program = gpu.DIAGONAL
    if name.startswith("scan"):
        program = gpu.SCAN
    constants = dict(D=d, DV=d, BLOCK_D=gpu.columns(d), BLOCK_V=gpu.columns(d), ROWS=d + 1)
    constants |= dict(BLOCK_M=gpu.FEATURES, BLOCK_R=gpu.SUM_ROWS, CHUNK=program.chunk)
    constants |= dict(GROUP=1, SHARED=1, KEYS_OF_STATE=1, CAUSAL=causal, MASKED=True)
    constants |= dict(HAS_DLOGSUM=True, HALF=dtype != "fp32", OF_KEYS=of_keys)
    signature = {}
    for argument in getattr(kernels, name).arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "keep":
            signature[argument] = "*u8"
        elif argument in FLOAT32 or (name == "diagonal_gradients" and argument in ("dx", "dy")):
            signature[argument] = "*fp32"
        elif argument in VECTORS:
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "fp32" if argument == "norm_weight" else "i32"
    divisible = {}
    for i, (argument, kind) in enumerate(signature.items()):
        if kind.startswith("*") or argument.endswith(("_b", "_h", "_t", "_m")):
            divisible[(i,)] = [["tt.divisibility", 16]]
    used = {key: value for key, value in constants.items() if key in signature}
    source = ASTSource(getattr(kernels, name), signature, used, divisible)
    options = dict(num_warps=program.warps, num_stages=program.stages)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembler = Path(nvidia.__file__).parent / "bin" / "ptxas"
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    log = subprocess.run(
        [assembler, "-v", f"-arch={architecture}", "-o", os.devnull, "-"],
        input=built.asm["ptx"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    spilled = re.findall(r"(\d+) bytes spill", log)
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    return Resources(registers, sum(map(int, spilled)), built.metadata.shared)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiled by the other process")
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_fit_the_registers(capability, dtype, d, record_property):
    for name in KERNELS:
        for causal in (True, False):
            for of_keys in (True, False):
                if of_keys or name == "key_gradients":
                    resources = compile_kernel(name, capability, dtype, d, causal, of_keys)
                    record_property(f"{name} {causal} {of_keys}", str(resources))
                    assert resources.spilled == 0, (name, causal, of_keys, resources)
                    assert resources.shared_memory <= SHARED_MEMORY, (name, causal, resources)


@pytest.mark.skipif(INTERPRETED, reason="compiled by the other process")
def test_one_kernel_compiles():
    assert compile_kernel("outputs", 90, "bf16", 64, True).spilled == 0
