"""Near-far attention in C equals that of PyTorch in float64: the choice of the sets, outputs and gradients."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers.native_cases import assert_near
from helpers.nearfar_cases import random_integers
from helpers.seeds import seeded
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

from crt_exp.attention import exact_attention
from crt_exp.attention.engines import native
from crt_exp.features.base import NotFinite
from crt_exp.nearfar import native as near_far
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.both_directions import Bidirectional
from crt_exp.nearfar.choice import KeyMetric, Sizes, _cholesky_root

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        native.library() is None, reason="no C compiler here, or CRT_EXP_ENGINE=plain"
    ),
]
CASES = {
    "usual": (Sizes(32, 16, 64, True), dict(S=300, d=64, dv=64, scale=0.35)),
    "grouped": (Sizes(5, 5, 7, True), dict(S=151, G=3, dv=17, masked=True)),
    "many queries of a block": (Sizes(50, 5, 7, True), dict(S=230, G=2, d=20)),
    "many blocks": (Sizes(40, 3, 5, True), dict(S=700, masked=True)),
    "few large blocks": (Sizes(150, 3, 5), dict(S=700, d=4)),
    "one token": (Sizes(3, 4, 9, True), dict(S=1, d=2, dv=1)),
    "all heavy": (Sizes(3, 40, 90), dict(S=30)),
    "a cell for each key": (Sizes(2, 0, 40, True), dict(S=31)),
    "of another sequence": (
        Sizes(32, 16, 64, True),
        dict(L=37, S=300, d=64, dv=64, scale=0.35),
    ),
    "more queries than keys": (
        Sizes(5, 3, 7),
        dict(L=200, S=67, G=3, d=5, dv=17, masked=True),
    ),
    "one query": (Sizes(4, 3, 9, True), dict(L=1, S=70, masked=True)),
}


def tensors(
    Z=2,
    G=1,
    S=8,
    d=8,
    dv=8,
    scale=1.0,
    masked=False,
    L=None,
):
    """Queries (Z, G, L, d), keys (Z, S, d), values (Z, S, dv), the gradient (Z, G, L, dv) and a mask (Z, S); L is given
    where queries are of another sequence."""
    L = L or S
    g = seeded()

    def draw(*size):
        return torch.randn(Z, *size, generator=g)

    x = scale * draw(G, L, d)
    y = scale * (draw(S, d) + 0.3)
    v = draw(S, dv)
    grad = draw(G, L, dv)
    keep = None
    if masked:
        keep = torch.rand(Z, S, generator=g) < 0.7
        keep[0, -1] = True
        keep[1, : S // 2] = False
    return x, y, v, grad, keep


def gradients(out, inputs, grad):
    return torch.autograd.grad((out * grad).sum(), inputs)


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    """With sets that PyTorch has chosen; NaN in the padding."""
    sizes, shape = CASES[name]
    *inputs, grad, keep = tensors(**shape)
    call = Bidirectional(sizes, "L" in shape)
    exact = [t.double().requires_grad_() for t in inputs]
    assert not near_far.applies(*exact)
    assert near_far.applies(*inputs)
    sets = cast(call.choose(*exact[:2], keep), torch.float32)
    out = call.attend(*exact, cast(sets, torch.float64))
    if keep is not None:
        for t in inputs[1:]:
            t.masked_fill_(~keep.unsqueeze(-1), torch.nan)
    inputs = [t.requires_grad_() for t in inputs]
    actual = near_far.attend(*inputs, sets, sizes, cross=call.cross)
    if keep is not None and not call.cross:  # what padded queries see depends on no law
        grad = grad * keep[:, None, :, None]
    assert_near([actual * (grad != 0)], [out * (grad != 0)])
    assert_near(gradients(actual, inputs, grad), gradients(out, exact, grad))


def cast(sets, dtype):
    """The sets with their floating-point tensors of another type."""

    def convert(t):
        return t.to(dtype) if t.is_floating_point() else t

    return tree_map_only(torch.Tensor, convert, sets)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_chooses_what_float64_does(name):
    sizes, shape = CASES[name]
    x, y, *_, keep = tensors(**shape)
    call = Bidirectional(sizes, "L" in shape)
    sets = replace(call, native=True).choose(x, y, keep)
    expected = call.choose(x.double(), y.double(), keep)
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    for ours, theirs in zip(sets.metric, expected.metric):
        assert_close(ours, theirs, **close)
    # or some centres are any keys
    if (expected.pool.sum(1) >= expected.centres.shape[1]).all():
        assert_close(sets.centres, expected.centres, **close)
    assert torch.equal(sets.pool, expected.pool)
    for z in range(len(y)):
        heavy = set(sets.heavy[z].tolist())
        assert len(heavy) == sets.heavy.shape[1]
        assert heavy == set(expected.heavy[z].tolist()) or not sets.there[z].all()
    z = (y.double() - expected.metric.shift) @ expected.metric.root
    distances = torch.cdist(z, sets.centres.double())
    ours = distances.gather(2, sets.cluster.unsqueeze(-1)).squeeze(-1)
    assert (ours <= distances.amin(-1) + 1e-4)[sets.pool].all()


def repeated_keys(seed, across, masked, most):
    """Tensors at any shape whose keys are of few kinds, a mask with holes, and near-far sizes with at most `most` cells
    or, where None, as many as there are kinds."""
    g = seeded(seed)
    pick = random_integers(g)

    def draw(n, k):
        return torch.randn(1, 2, n, k, generator=g)

    d = pick(2, 40)
    dv = pick(1, 20)
    S = pick(150, 300)
    kinds = pick(3, 12)
    block = pick(1, 6)
    heavy = pick(0, 16)
    cells = kinds if most is None else pick(1, most)
    open = pick(1, 8)
    sizes = Sizes(block, heavy, cells, open=open)
    L = S
    if across:
        L = pick(1, S)
    scale = (1, 3, 8)[seed % 3] * d**-0.25
    others = torch.randint(kinds, (S - 2 * kinds,), generator=g)
    kind = torch.cat([torch.arange(kinds).repeat(2), others])
    x = scale * draw(L, d)
    y = scale * draw(kinds, d)[:, :, kind]
    v = draw(S, dv)
    weight = draw(L, dv)
    keep = None
    if masked:
        keep = torch.rand(1, S, generator=g) < 0.7
    if masked and not across:
        weight = weight * keep[:, None, :, None]
    return (x, y, v), weight, keep, sizes


@pytest.mark.parametrize("most", [None, 8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way, seed", [("both", 0), ("across", 4), ("causal", 8)])
def test_repeated_keys(way, masked, most, seed):
    """Of equal keys the first is heavy, and each kind has a centre: outputs and gradients."""
    causal = way == "causal"
    across = way == "across"
    seed += 2 * masked + bool(most)
    tensors, weight, keep, sizes = repeated_keys(seed, across, masked, most)
    if causal:
        sizes = sizes._replace(exact_until=60)

    def near_far(*t):
        return near_far_attention(*t, sizes, causal=causal, cross=across, key_mask=keep)

    def exact(*t):
        return exact_attention(*t, causal=causal, key_mask=keep)

    def with_gradients(attend, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in tensors]
        out = attend(*inputs) * (weight != 0)
        return [out, *torch.autograd.grad((out * weight).sum(), inputs)]

    ours = with_gradients(near_far, torch.float64)
    assert_near(with_gradients(near_far, torch.float32), ours, 1e-4)
    if most is None and not causal:  # what a causal query reads is chosen by logits in 8 bits
        assert_near(ours[:1], with_gradients(exact, torch.float64)[:1], 1e-9)


def attended(x, y, v, grad):
    x, y, v = (t.detach().requires_grad_() for t in (x, y, v))
    out = near_far_attention(x, y, v, Sizes(4, 3, 9, True))
    return [out.detach(), *torch.autograd.grad(out, (x, y, v), grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_of_queries_and_keys(dtype):
    x, y, v, grad, _ = tensors(Z=3, S=70)
    x = x.to(dtype).transpose(0, 1).requires_grad_()
    y = y[None].to(dtype).requires_grad_()
    v = v[None].to(dtype).requires_grad_()
    grad = grad.to(dtype).transpose(0, 1)

    def call(x, y, **options):
        return near_far_attention(x, y, v, Sizes(4, 3, 9, True), **options)

    actual = []
    for out in (call(x, y, factor=0.4), call(0.4 * x, 0.4 * y)):
        actual.append([out, *torch.autograd.grad(out, (x, y, v), grad)])
    assert_close(*actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("served", [True, False])
def test_no_batch_another_type_another_device(served, monkeypatch):
    if not served:
        monkeypatch.setattr(native, "library", lambda: None)
    x, y, v = torch.randn(3, 1, 2, 50, 8)
    sizes = Sizes(8, 4, 4)
    actual = near_far_attention(x[:0], y[:0], v[:0], sizes).shape
    assert actual == (0, 2, 50, 8)
    out = near_far_attention(x, y, v, sizes)
    actual = near_far_attention(x, y, v.double(), sizes)
    assert_close(actual, out.double(), rtol=1e-4, atol=1e-5)
    if served:
        with torch.device("meta"):
            actual = near_far_attention(x, y, v, sizes)
            assert torch.equal(actual, out)


def test_repeats_exactly_for_any_threads():
    x, y, v, grad, _ = tensors(Z=6, S=90)

    def call():
        return attended(x.transpose(0, 1), y[None], v[None], grad.transpose(0, 1))

    first = call()
    for n in (1, 2, 3, 8):
        torch.set_num_threads(n)
        for a, b in zip(call(), first):
            assert torch.equal(a, b)


def test_any_strides():
    """Heads behind tokens, as projections leave them, columns apart, an expanded gradient."""
    g = seeded()
    x, y, v = torch.randn(3, 2, 3, 40, 5, generator=g)
    ones = torch.ones(()).expand(v.shape)
    expected = attended(x, y, v, ones.contiguous())
    layouts = [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.mT.contiguous().mT,
    ]
    for layout in layouts:
        actual = attended(layout(x), layout(y), layout(v), ones)
        assert_near(actual, expected, 1e-6)


def test_large_shifts_and_long_vectors():
    """Keys far from 0 and logits of thousands, whose exponentials no number holds."""
    x, y, v, grad, _ = tensors(Z=3, S=120, scale=20.0)
    inputs = x.transpose(0, 1), y[None] + 100, v[None], grad.transpose(0, 1)
    ours = attended(*inputs)
    exact = attended(*(t.double() for t in inputs))
    assert_near(ours[:1], exact[:1], 5e-3)
    for t in ours:
        assert t.isfinite().all()


@pytest.mark.parametrize(
    "side, rank, causal",
    [
        ("queries", 0, False),
        ("queries", 3, True),
        ("keys", 0, True),
        ("keys", 1, False),
    ],
)
def test_queries_and_keys_of_few_directions(side, rank, causal):
    """What float32 rounds away of their second moments is more than their least eigenvalues, and sets are chosen."""
    g = seeded(rank)

    def draw(*size):
        return torch.randn(*size, generator=g)

    mean = draw(1, 2, 1, 48)
    few = mean + draw(1, 2, 800, rank) @ draw(1, 2, rank, 48) / 48**0.5
    many = draw(1, 2, 800, 48)
    if side == "queries":
        x = 0.3 * few
        y = many
    else:
        x = 0.3 * many
        y = 3 * few
    v = draw(1, 2, 800, 48)
    sizes = Sizes(16, 24, 32, open=16, exact_until=256 * causal)
    wide = [t.double() for t in (x, y, v)]
    exact = exact_attention(*wide, causal=causal)

    def error(*t):
        out = near_far_attention(*t, sizes, causal=causal)
        return (out - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))

    off = error(x, y, v)
    allowed = error(*wide)
    assert (off <= 1.1 * allowed + 1e-3).all(), (off, allowed)


def test_a_matrix_that_rounding_left_without_a_root_is_no_metric_of_half():
    moments = torch.tensor(
        [[[1.0, 2.0], [2.0, 1.0]], [[4.0, 2.0], [2.0, 3.0]]], dtype=torch.float64
    )
    ridge = torch.full((2, 1, 1), 1e-4)
    largest = torch.full((2, 1, 1), 4.0)
    roots = _cholesky_root(moments, ridge, largest)
    assert_close(roots[0], 4.0001**0.5 * torch.eye(2), check_dtype=False)
    expected = moments[1] + 1e-4 * torch.eye(2)
    assert_close(roots[1] @ roots[1].T, expected, check_dtype=False)


@pytest.mark.parametrize("side", [0, 1])
def test_squares_that_overflow_are_named(side):
    inputs = list(tensors(S=70)[:2])
    inputs[side][1, ..., 33, 2] = 1e30
    with pytest.raises(NotFinite, match="NaN, infinity"):
        near_far.choose(*inputs, Sizes(8, 3, 9), None)


def test_inputs_outside_the_c_engine_use_pytorch(monkeypatch):
    x, y, v, *_ = tensors(Z=2, S=20)
    assert near_far.applies(x, y, v)
    assert near_far.applies(x.bfloat16(), y, v)
    assert not near_far.applies(x, y.double(), v)
    with pytest.raises(NotImplementedError, match="torch.func"):
        x = x.transpose(0, 1).requires_grad_()
        out = near_far_attention(x, y[None], v[None], Sizes(4, 2, 3))
        torch.autograd.grad(out.sum(), x, create_graph=True)

    class Full:
        def __getattr__(self, name):
            return lambda call: native.NO_MEMORY

    monkeypatch.setattr(native, "library", lambda: Full())
    with pytest.raises(MemoryError, match="20 tokens with d=8"):
        near_far.choose(x.transpose(0, 1).detach(), y, Sizes(8, 3, 9), None)


def test_another_sequence_by_known_moments():
    """What keys are measured by is known from other queries; rows that are masked whole give 0."""
    g = seeded()
    x = torch.randn(2, 4, 30, 8, generator=g)
    y, v = torch.randn(2, 2, 2, 90, 8, generator=g)
    keep = torch.rand(2, 90, generator=g) < 0.7
    keep[1] = False
    queries, keys = torch.randn(2, 4, 40, 8, generator=g)
    metric = KeyMetric.fit(queries + 0.3, keys, None, None)
    options = {"cross": True, "metric": metric, "key_mask": keep}
    actual = []
    for dtype in (torch.float32, torch.float64):
        inputs = [t.to(dtype).requires_grad_() for t in (x, y, v)]
        out = near_far_attention(*inputs, Sizes(8, 3, 9, True), **options)
        actual.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert_near(*actual, tolerance=5e-5)
    assert not actual[0][0][1].any()


# ---- under the sanitisers of gcc, at odd shapes: forward, backward and token by token

SCRIPT = """
import torch
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.decoding import RecallState
from crt_exp.attention.engines import native

assert native.library() is not None
for seed in range(60):
    g = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))
    group, kv, S, d, dv = pick(1, 3), pick(1, 2), pick(40, 500), pick(1, 70), pick(1, 70)
    L, block = pick(1, S), 8 * 2 ** pick(0, 3)
    sizes = Sizes(block, pick(0, 20), pick(1, 80), open=pick(1, 90), exact_until=pick(0, 200))
    draw = lambda heads, n, k: torch.randn(2, heads, n, k, generator=g).requires_grad_()
    x, y, v = draw(group * kv, L, d), draw(kv, S, d), draw(kv, S, dv)
    keep = None if seed % 2 else torch.rand(2, S, generator=g) < 0.7
    both, own = Sizes(block, *sizes[1:3], seed % 3 > 0), draw(group * kv, S, d)
    for queries, given, way in ((x, sizes, {"causal": True}), (x, both, {"cross": True}), (own, both, {})):
        out = near_far_attention(queries, y, v, given, key_mask=keep, **way)
        grads = torch.autograd.grad(out.square().sum(), (queries, y, v))
        assert all(t.isfinite().all() for t in (out, *grads))
    if seed % 6 == 0:
        with torch.no_grad():
            y, v, state, most = draw(kv, S, d), draw(kv, S, dv), RecallState(sizes), S // 2
            state.step(own[:, :, :most], y[:, :, :most], v[:, :, :most])
            for i in range(most, min(S, most + 60)):
                state.step(*(t[:, :, i:i + 1] for t in (own, y, v)))
print("whole")
"""


@pytest.mark.slow
def test_nothing_is_read_or_written_beyond_its_end(tmp_path):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc, whose sanitisers are used, is not there")

    def find(name):
        return subprocess.run(
            [gcc, f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()

    libraries = [find("libasan.so"), find("libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this gcc has no sanitisers")
    env = os.environ | {
        "CC": "gcc -g -fsanitize=address,undefined -fno-sanitize=alignment",
        "OMP_NUM_THREADS": "2",
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=900
    )
    if "ReserveShadowMemoryRange failed" in done.stderr:
        pytest.skip(
            "the address space is limited (ulimit -v): the sanitisers cannot reserve their shadow memory"
        )
    assert done.returncode == 0, done.stderr[-4000:]
    actual = done.stdout.strip()
    assert actual == "whole", done.stderr[-4000:]
