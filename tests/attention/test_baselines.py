"""Baselines and controls against their materialised twins, and properties of every attention of conf/attention."""

import copy

import pytest
import torch
from helpers.attention_cases import Case, assert_same
from helpers.covering import in_turn
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from crt_exp.attention import (
    Exact,
    Identity,
    Linformer,
    Reformer,
    feature_attention,
    softmax_attention,
    uniform_attention,
    window_attention,
)
from crt_exp.attention.engines.selection import TRITON
from crt_exp.features import OPRF
from crt_exp.features.exponential import PositiveExponential
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices

transformers = pytest.importorskip("transformers")
from helpers.decoders import CONTROLS, mechanisms  # noqa: E402
from helpers.decoders import layer as layer_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")]
B = 2
H = 3
D = 4
both_ways = pytest.mark.parametrize("causal", [False, True])


# ---- uniform attention and a window ----------------------------------------------------------------------------------


def tensors(L, S, kv_heads=H):
    g = torch.Generator().manual_seed(0)
    x, y, v = (
        torch.randn(B, h, n, D, generator=g, dtype=torch.float64)
        for h, n in ((H, L), (kv_heads, S), (kv_heads, S))
    )
    keep = torch.rand(B, S, generator=g) < 0.7
    return x.requires_grad_(), y.requires_grad_(), v.requires_grad_(), keep


def places(L, S):
    return torch.arange(L)[:, None] + S - L, torch.arange(S)


def twin(x, y, v, allowed):
    """Softmax over the allowed pairs (B, 1, L, S), by the whole matrix; 0 for a row without keys."""
    y, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (y, v))
    logits = (x @ y.mT).masked_fill(~allowed, -torch.inf)
    return torch.where(allowed.any(-1, keepdim=True), logits.softmax(-1), 0.0).nan_to_num() @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "L, S, block, first, causal",
    [
        (17, 17, 4, 2, False),
        (17, 17, 4, 2, True),
        (8, 8, 8, 0, False),
        (5, 5, 16, 9, True),
        (3, 21, 4, 3, True),
        (1, 10, 3, 1, True),
    ],
)  # of two sequences a window is refused
def test_window_is_softmax_over_its_keys(L, S, block, first, causal, masked):
    x, y, v, keep = tensors(L, S, kv_heads=1)
    begin = (
        keep.int().argmax(1)[:, None, None, None] if masked else 0
    )  # places count from the first real token
    i, j = (at - begin for at in places(L, S))
    near = (j // block >= i // block - 1) & (j // block <= i // block + (0 if causal else 1))
    allowed = (near | (j < first)) & ((j <= i) | torch.tensor(not causal))
    allowed = allowed.expand(B, 1, L, S) & (keep[:, None, None] if masked else True)
    out = window_attention(
        x, y, v, block=block, first=first, causal=causal, key_mask=keep if masked else None
    )
    expected = twin(x, y, v, allowed)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), (x, y, v)),
        torch.autograd.grad(expected.square().sum(), (x, y, v)),
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
@both_ways
def test_uniform_is_the_mean_of_the_values_that_are_seen(causal, masked):
    x, y, v, keep = tensors(5, 9)
    i, j = places(5, 9)
    allowed = ((j <= i) | torch.tensor(not causal)).expand(B, 1, 5, 9) & (
        keep[:, None, None] if masked else True
    )
    expected = twin(torch.zeros_like(x), y, v, allowed)
    torch.testing.assert_close(
        uniform_attention(x, y, v, causal=causal, key_mask=keep if masked else None), expected
    )


def test_no_matrix_of_pairs():
    """Of 2^14 tokens it would take 1 GB, and its gradient as much."""
    x = torch.randn(1, 1, 2**14, 4).requires_grad_()
    actual = window_attention(x, x, x, causal=True).shape
    assert actual == x.shape
    out = Reformer(1, 4, causal=True, hashes=1, buckets=512, chunk=16)(x, x, x)
    out.square().mean().backward()
    assert x.grad.isfinite().all()


# ---- Linformer -------------------------------------------------------------------------------------------------------


L = 9
Q, K, V = torch.randn(3, 3, H, L, D, generator=torch.Generator().manual_seed(0))


def linformer(seed=0, layer=0, **options):
    return Mechanism.of("linformer", length=12, rank=3, seed=seed, **options).layer(
        H, D, layer=layer
    )


def reformer(causal=False, **options):
    options = {"hashes": 3, "buckets": 4, "chunk": 3, "redraw_every": 0} | options
    return Reformer(H, D, causal=causal, **options)


def test_linformer_is_softmax_over_mixtures_and_identity_the_values():
    case = Case(OPRF(), masked=True, dtype=torch.float32)
    layer = Linformer(4, 4, length=11, rank=3, scaling=1.0)
    keep = case.mask[:, None, :, None]
    begin = case.mask.int().argmax(1).tolist()  # places count from the first real key
    both = []
    for t in (case.y, case.v):
        both.append(torch.stack([row.roll(-at, 1) for row, at in zip(t * keep, begin)]))
    y, v = both
    y = layer.key_projection @ y
    v = layer.value_projection @ v
    assert_same([layer(case.x, case.y, case.v, case.mask)], [softmax_attention(case.x, y, v)], 1e-5)
    layer(case.x, case.y[:, :, :7], case.v[:, :, :7]).sum().backward()
    assert (layer.key_projection.grad[:, 7:] == 0).all()
    assert layer.key_projection.grad[:, :7].abs().min() > 0
    actual = Identity(H, D, causal=True)(Q, K, V)
    assert torch.equal(actual, V)
    actual = Exact(H, D)(Q, K, V)
    expected = softmax_attention(Q * D**-0.25, K * D**-0.25, V)
    torch.testing.assert_close(actual, expected)


def test_learned_mixtures_are_parameters_alone():
    """As checkpoints hold them: nothing is drawn again, and nothing else is kept."""
    layer = linformer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert (
        {*before}
        == {"key_projection", "value_projection"}
        == {name for name, _ in layer.named_parameters()}
    )
    layer.train()(Q, K, V), layer(Q, K, V)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_random_mixtures_are_those_of_keys_and_values():
    layer = linformer(redraw_every=2).eval()
    keys, values = (layer.mixtures[:, :L] @ t for t in (K, V))
    actual = layer(Q, K, V)
    expected = softmax_attention(D**-0.25 * Q, D**-0.25 * keys, values)
    torch.testing.assert_close(actual, expected)
    many = Linformer(1, 4, length=200, rank=100, redraw_every=1).mixtures
    assert not [*layer.parameters()]
    assert many.std() == pytest.approx(200**-0.5, rel=0.03)


@pytest.mark.parametrize("make, buffer", [(linformer, "mixtures"), (reformer, "rotations")])
def test_baselines_are_drawn_from_seed_layer_and_pass(make, buffer):
    """The same on every process, whatever was drawn there before; in eval mode they stay; restored, bit for bit."""
    torch.manual_seed(1)
    one = make(redraw_every=2)
    torch.manual_seed(2)
    actual = getattr(one, buffer)
    expected = getattr(make(redraw_every=2), buffer)
    assert torch.equal(actual, expected)
    for other in ({"seed": 1}, {"layer": 1}):
        assert not torch.equal(getattr(one, buffer), getattr(make(redraw_every=2, **other), buffer))
    seen = []
    for _ in range(5):
        one.train()(Q, K, V), one.eval()(Q, K, V)
        seen.append(getattr(one, buffer).clone())
    actual = [torch.equal(a, b) for a, b in zip(seen, seen[1:])]
    assert actual == [
        True,
        False,
        True,
        False,
    ]
    assert int(one.draws) == 2
    other = make(redraw_every=2, seed=3)
    other.load_state_dict(one.state_dict())
    actual = one(Q, K, V)
    expected = other(Q, K, V)
    assert torch.equal(actual, expected)
    again = make(redraw_every=2)
    again.load_state_dict(one.state_dict())
    for _ in range(4):
        actual = one.train()(Q, K, V)
        expected = again.train()(Q, K, V)
        assert torch.equal(actual, expected)
        assert int(one.draws) == int(again.draws)


# ---- Reformer --------------------------------------------------------------------------------------------------------


def reformer_twin(layer, q, v, keep=None):
    """By the whole matrix: a pair counts where a round has both in one bucket, at most `chunk` of its tokens apart."""
    keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if keep is None else keep
    buckets = layer.hash(q, keep)
    same = buckets.unsqueeze(-1) == buckets.unsqueeze(-2)  # (B, H, R, S, S)
    rank = same.tril().sum(-1)  # within the bucket
    apart = rank.unsqueeze(-1) - rank.unsqueeze(-2)
    seen = same & (apart <= layer.chunk) & (apart >= (0 if layer.causal else -layer.chunk))
    seen = seen.any(2) & keep[:, None, None]
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT  # scaling d^(1/2) = 1
    logits = torch.where(torch.eye(q.shape[2], dtype=torch.bool), -1e5, logits)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    weights, v = (torch.where(keep[:, None, :, None], t, 0.0) for t in (weights, v))
    return weights.nan_to_num() @ v


@pytest.mark.parametrize(
    "options, causal, masked",
    in_turn(
        [
            {"L": 1},
            {"L": 17},
            {"L": 12, "hashes": 1},
            {"L": 20, "chunk": 7, "buckets": 2},
            {"L": 9, "buckets": 1},
        ],
        [False, True],
        [False, True],
        each=2,
    ),
    ids=str,
)
def test_reformer_is_softmax_over_the_union_of_the_rounds(options, causal, masked):
    """Outputs and gradients, each pair counted once."""
    L = options["L"]
    options = {name: value for name, value in options.items() if name != "L"}
    (q, k, v, keep), layer = tensors(L, L), reformer(causal, **options).double()
    keep = keep if masked else None
    out = layer(q, k, v, keep)
    expected = reformer_twin(layer, q, v, keep)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(each.square().sum(), (q, v)) for each in (out, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@both_ways
def test_one_bucket_is_exact_attention_with_shared_queries_and_keys(causal):
    (q, k, v, _), layer = tensors(11, 11), reformer(causal, buckets=1, chunk=11).double()
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    hidden = torch.eye(11, dtype=torch.bool) | (
        torch.ones(11, 11, dtype=torch.bool).triu(1) & torch.tensor(causal)
    )
    hidden[0, 0] &= not causal  # the first token sees itself alone
    actual = layer(q, k, v)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
def test_future_never_leaks_in_buckets(chunk):
    (q, k, v, _), layer = tensors(23, 23), reformer(True, chunk=chunk).double()
    whole = layer(q, k, v)
    for n in range(1, 23):
        actual = layer(q[:, :, :n], k[:, :, :n], v[:, :, :n])
        torch.testing.assert_close(actual, whole[:, :, :n])


# ---- padding, of every attention of conf/attention -------------------------------------------------------------------


LENGTH = 27
REAL = {"left": slice(5, 27), "right": slice(0, 22), "both": slice(9, 24), "not": slice(0, 27)}
CASES = []
for name in mechanisms():
    CASES.append((name, False))
    if name != "linformer":
        CASES.append((name, True))


def drawn(batch, heads, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, LENGTH, 16, generator=g, dtype=torch.float64)


def made(name, causal):
    """Calibrated."""
    kind, options = mechanisms()[name]
    attention = layer_of(kind, options, causal=causal).double().eval()
    if kind not in CONTROLS:
        with attention.calibration(), torch.no_grad():
            attention(drawn(4, 4, 6), drawn(4, 2, 7), drawn(4, 2, 8))
    return attention


def padded(rows, holes=()):
    """q, k, v and the mask: padded keys and values are NaN, which no output may show."""
    at = torch.arange(LENGTH)
    keep = torch.stack([(at >= row.start) & (at < row.stop) for row in rows])
    keep[:, holes] = False
    q, *rest = drawn(len(rows), 4, 0), drawn(len(rows), 2, 1), drawn(len(rows), 2, 2)
    return q, *(torch.where(keep[:, None, :, None], t, torch.nan) for t in rest), keep


# Of every mechanism one direction is fast, in turn; of near-far, whose directions are two computations, both.
TURNS = [*{name: None for name, _ in CASES}]


@pytest.mark.parametrize(
    "name, causal",
    [
        pytest.param(
            name,
            causal,
            id=f"{name}-{'causal' if causal else 'both'}",
            marks=[]
            if name.startswith(("nearfar", "linformer")) or causal == TURNS.index(name) % 2
            else [pytest.mark.slow],
        )
        for name, causal in CASES
    ],
)
@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_padding_is_truncation_on_either_side(name, causal):
    """Also where tokens within do not count, which keep their places."""
    attention = made(name, causal)
    rows = [*REAL.values()]
    for holes in ((), (10, 11, 17)):
        q, k, v, keep = padded(rows, list(holes))
        out = attention(q, k, v, keep)
        for row, at in enumerate(rows):
            own = keep[row : row + 1, at] if holes else None
            alone = attention(*(t[row : row + 1, :, at] for t in (q, k, v)), own)
            real = keep[row, at]
            torch.testing.assert_close(
                out[row, :, at][:, real], alone[0][:, real], rtol=1e-6, atol=1e-8
            )


@pytest.mark.parametrize("name", TURNS)
@torch.no_grad()
def test_masked_keys_enter_no_output(name):
    """Of queries at padding neither, and a row without keys gives 0."""
    attention = made(name, causal=name != "linformer" and TURNS.index(name) % 2 == 0)
    q, k, v, keep = padded([*REAL.values(), slice(0, 0)], [10, 11, 17])
    out = attention(q, k, v, keep)
    assert out.isfinite().all()
    assert (out[-1] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_identity_sees_the_key_of_each_query_alone(causal):
    layer = layer_of("identity", {}, causal=causal)
    q, k, v, keep = padded([*REAL.values()], [10, 11, 17])
    expected = torch.where(keep[:, None, :, None], v, 0.0).repeat_interleave(2, 1)
    assert torch.equal(layer(q, k, v, keep), expected)
    if causal:
        assert torch.equal(layer(q[:, :, -7:], k, v, keep), expected[:, :, -7:])


@pytest.mark.parametrize("name", ["favorpp", "geom", "nearfar below", "nearfar beyond", "window"])
@torch.no_grad()
def test_the_last_queries_of_a_padded_sequence_see_what_they_see_alone(name):
    attention = made(name, True)
    rows = [*REAL.values()]
    q, k, v, keep = padded(rows)
    whole = attention(q, k, v, keep)
    for last in (1, 7):
        out = attention(q[:, :, -last:], k, v, keep)
        real = keep[:, None, -last:, None].expand(-1, 4, -1, 16)
        torch.testing.assert_close(out[real], whole[:, :, -last:][real], rtol=1e-6, atol=1e-8)


# ---- values, averages and precision, of every attention of conf/attention --------------------------------------------


LONG = 1100  # several chunks, and more than a segment
# a value decides what runs next: rows whose denominator vanishes in a chunk, quantiles, clusters, buckets
CHUNKS = (
    "elu",
    "favor",
    "generalized",
    "geom",
    "geom_plus",
    "gerf",
    "hedgehog",
    "hrf_angular",
    "hrf_gaussian",
    "relu",
)
WAITS = {(name, True) for name in CHUNKS}
for name in ("pois", "pois_plus", "hrf_cluster", "favormix", "reformer"):
    WAITS |= {(name, False), (name, True)}


def step(name, causal, masked=False, **options):
    layer = Mechanism.of(name, **options).layer(4, 16, causal=causal).to("meta")
    length = (
        2 * LONG if name == "nearfar" else LONG
    )  # beyond what near-far attention computes exactly
    key_mask = torch.ones(2, length, dtype=torch.bool, device="meta") if masked else None
    q, k, v = (torch.randn(2, 4, length, 16, device="meta", requires_grad=True) for _ in range(3))
    out = layer(q, k, v, key_mask)
    out.sum().backward()
    assert out.shape == (2, 4, length, 16)
    assert v.grad.shape == v.shape


@pytest.fixture
def engine_of_gpus(monkeypatch):
    """Positive maps use the engine in Triton, whose kernels do nothing on the meta device."""
    choose = feature_attention.choose_engine

    def choose_triton(phi, *inputs):
        positive = isinstance(phi, PositiveExponential)
        return TRITON if positive else choose(phi, *inputs)

    monkeypatch.setattr(feature_attention, "choose_engine", choose_triton)
    monkeypatch.setattr("crt_exp.attention.engines.gpu.Call.launch", lambda *args, **values: None)


@pytest.mark.parametrize(
    "name, causal",
    in_turn(sorted({*choices("attention")} - {"linformer", "hrf_angular"}), [False, True]),
)
def test_a_training_step_asks_for_no_value(name, causal, engine_of_gpus):
    """On the meta device a program that asks for a value fails: what runs there keeps no GPU waiting."""
    if (name, causal) in WAITS:  # docs/attention.md names those that wait
        with pytest.raises(RuntimeError, match="item|nonzero|meta"):
            step(name, causal)
    else:
        step(name, causal)


# near-far attention where no row is exact or of another order for its length: by_rows would compute both for all rows
MASKED = [
    ("favorp", False, {}),
    ("favorpp", True, {}),
    ("nearfar", False, {"exact_until": 0, "first_order": True}),
]


@pytest.mark.parametrize("name, causal, options", MASKED)
def test_a_training_step_with_a_padding_mask_asks_for_no_value(
    name, causal, options, engine_of_gpus
):
    step(name, causal, masked=True, **options)


AVERAGES = {
    "timm": lambda model: ModelEmaV3(model, decay=0.9),
    "timm without buffers": lambda model: ModelEmaV3(model, decay=0.9, exclude_buffers=True),
    "torch": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "mean with buffers": lambda model: AveragedModel(model, use_buffers=True),
}
# one of each kind of state: none, running averages, other noises, several, clusters, sequences, trained rows, no map
KINDS = [
    "favor",
    "favorpp",
    "geom",
    "hrf_gaussian",
    "hrf_cluster",
    "favormix",
    "hedgehog",
    "linformer",
    "reformer",
]


def average(averaged, model):
    (averaged.update if isinstance(averaged, ModelEmaV3) else averaged.update_parameters)(model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name, redraw_every",
    [case for case in in_turn(KINDS, [0, 1]) if case.values[0] != "hedgehog"] + [("hedgehog", 0)],
)  # its rows are trained
def test_an_average_of_states_is_a_state(name, redraw_every):
    """Its projections are those of some draw, its outputs finite; that of one state gives the outputs of this state."""
    options = {"m": 8} if Mechanism.of(name).draws else {}
    options |= {"fit_steps": 3} if "fit_steps" in Mechanism.of(name).options else {}
    layer = Mechanism.of(name, redraw_every=redraw_every, **options).layer(
        2, 4, causal=name != "linformer"
    )
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 4))
    q, k, v = torch.randn(3, 2, 2, 12, 4)
    averages = {kind: made(model) for kind, made in AVERAGES.items()}
    for _ in range(6):
        layer(q, k, v)
        for averaged in averages.values():
            average(averaged, model)
    layer.eval()
    for kind, averaged in averages.items():
        copied = averaged.module[0].eval()
        assert copied(q, k, v).isfinite().all(), kind
        if name != "linformer" or redraw_every:
            drawn = copied.rows_of_draw(copied.copied_draw)
            for rows, t in drawn.items():
                assert torch.equal(copied.rows(rows), t), kind
        assert (
            "buffers" in kind
            and kind != "timm without buffers"
            or copied.copied_draw == layer.copied_draw
        ), kind
        averaged = AVERAGES[kind](model)
        for _ in range(3):
            average(averaged, model)
        actual = averaged.module[0](q, k, v)
        expected = layer(q, k, v)
        torch.testing.assert_close(actual, expected, msg=kind)
        other = copy.deepcopy(layer)
        other.load_state_dict(copied.state_dict())
        actual = other(q, k, v)
        expected = copied(q, k, v)
        assert torch.equal(actual, expected), kind


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("hedgehog", "favormix")])
def test_a_buffer_that_was_replaced_counts(name):
    """As by torch.func.functional_call, and by accelerate when it loads a checkpoint."""
    ours, other = (Mechanism.of(name, redraw_every=1).layer(2, 4, layer=i).eval() for i in (0, 1))
    inputs = torch.randn(3, 2, 2, 12, 4)
    before = ours(*inputs)
    expected = other(*inputs)
    assert torch.equal(
        torch.func.functional_call(ours, other.state_dict(), tuple(inputs)), expected
    )
    assert torch.equal(ours(*inputs), before)
    assert not torch.equal(before, expected)
    for buffer, value in other.state_dict().items():
        module, _, own = buffer.rpartition(".")
        setattr(ours.get_submodule(module), own, value)
    assert torch.equal(ours(*inputs), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["gerf", "favorp", *KINDS[:3], *KINDS[4:7]])
def test_half_precision_is_rounded_at_its_ends_alone(name):
    """At a scale that is no power of two: a log feature magnifies what is rounded before."""
    for dtype, causal in ((torch.bfloat16, False), (torch.float16, False), (torch.float16, True)):
        layer = Mechanism.of(name).layer(2, 65, causal=causal).eval()
        q, k, v = torch.randn(3, 2, 2, 16, 65, generator=torch.Generator().manual_seed(0)).to(dtype)
        out = layer(q, k, v)
        past = layer.past() if causal else None
        exact = layer.double()(q.double(), k.double(), v.double())
        assert (out - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()
        if causal:
            last = torch.cat(
                [past.step(*(t[:, :, i : i + 1] for t in (q, k, v))) for i in range(16)], 2
            )
            assert last.dtype == dtype
            assert (last - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_integer_masks_and_other_heads_are_refused(name):
    layer = Mechanism.of(name).layer(2, 4).eval()
    q, k, v = torch.randn(3, 2, 2, 12, 4)
    with pytest.raises(ValueError, match="torch.int64 .*boolean .*True = keep"):
        layer(q, k, v, torch.ones(2, 12, dtype=torch.long))
    if name != "linformer":  # its projections are of any number of heads
        with pytest.raises(ValueError, match="batch|heads=2"):
            layer(*(t.repeat(1, 2, 1, 1) for t in (q, k, v)))
