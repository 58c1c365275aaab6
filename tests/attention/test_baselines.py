"""Baselines and controls against their materialised twins, and properties of every attention of conf/attention."""

import copy

import pytest
import torch
from helpers.attention_cases import sample_inputs
from helpers.covering import in_turn, slow
from helpers.nearfar_cases import at_tokens, same
from helpers.seeds import seeded
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from crt_exp.attention import (
    Reformer,
    feature_attention,
    uniform_attention,
    window_attention,
)
from crt_exp.attention.engines import TRITON
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


def places(L, S):
    return torch.arange(L)[:, None] + S - L, torch.arange(S)


def twin(x, y, v, allowed):
    """Softmax over the allowed pairs (B, 1, L, S), by the whole matrix; 0 for a row without keys."""
    y = y.repeat_interleave(H // y.shape[1], 1)
    v = v.repeat_interleave(H // v.shape[1], 1)
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
    x, y, v, keep = sample_inputs(L, S, kv_heads=1)
    if not masked:
        keep = torch.ones_like(keep)
    begin = keep.int().argmax(1)[:, None, None, None]  # places count from the first real token
    i, j = places(L, S)
    i = i - begin
    j = j - begin
    apart = j // block - i // block
    allowed = (apart.abs() <= 1) | (j < first)
    if causal:
        allowed &= j <= i
    expected = twin(x, y, v, allowed & keep[:, None, None])
    key_mask = keep if masked else None
    out = window_attention(x, y, v, block=block, first=first, causal=causal, key_mask=key_mask)
    same(out, expected, (x, y, v))


@pytest.mark.parametrize("masked", [False, True])
@both_ways
def test_uniform_attention_is_the_mean_of_the_visible_values(causal, masked):
    x, y, v, keep = sample_inputs(5, 9)
    i, j = places(5, 9)
    allowed = torch.ones(B, 1, 5, 9, dtype=torch.bool)
    if causal:
        allowed &= j <= i
    key_mask = None
    if masked:
        key_mask = keep
        allowed &= keep[:, None, None]
    expected = twin(torch.zeros_like(x), y, v, allowed)
    actual = uniform_attention(x, y, v, causal=causal, key_mask=key_mask)
    assert_close(actual, expected)


def test_no_matrix_of_pairs():
    """Of 2^14 tokens it would take 1 GB, and its gradient as much."""
    x = torch.randn(1, 1, 2**14, 4).requires_grad_()
    actual = window_attention(x, x, x, causal=True).shape
    assert actual == x.shape
    out = Reformer(1, 4, causal=True, hashes=1, buckets=512, chunk=16)(x, x, x)
    out.square().mean().backward()
    assert x.grad.isfinite().all()


# ---- padding, of every attention of conf/attention -------------------------------------------------------------------


LENGTH = 27
REAL = {
    "left": slice(5, 27),
    "right": slice(0, 22),
    "both": slice(9, 24),
    "not": slice(0, 27),
}
CASES = []
for name in mechanisms():
    CASES.append((name, False))
    if name != "linformer":
        CASES.append((name, True))


def draw_inputs(batch, heads, seed):
    g = seeded(seed)
    return torch.randn(batch, heads, LENGTH, 16, generator=g, dtype=torch.float64)


def build_layer(name, causal):
    """Calibrated."""
    kind, options = mechanisms()[name]
    attention = layer_of(kind, options, causal=causal).double().eval()
    if kind not in CONTROLS:
        with attention.calibration(), torch.no_grad():
            attention(draw_inputs(4, 4, 6), draw_inputs(4, 2, 7), draw_inputs(4, 2, 8))
    return attention


def padded(rows, holes=()):
    """q, k, v and the mask: padded keys and values are NaN, which no output may show."""
    at = torch.arange(LENGTH)
    keep = torch.stack([(at >= row.start) & (at < row.stop) for row in rows])
    keep[:, holes] = False
    padding = ~keep[:, None, :, None]
    q = draw_inputs(len(rows), 4, 0)
    k = draw_inputs(len(rows), 2, 1).masked_fill(padding, torch.nan)
    v = draw_inputs(len(rows), 2, 2).masked_fill(padding, torch.nan)
    return q, k, v, keep


TURNS = [*mechanisms()]


def is_fast(name, causal):
    """Of every mechanism one direction, in turn; of near-far, whose directions are two computations, both."""
    return name.startswith(("nearfar", "linformer")) or causal == TURNS.index(name) % 2


@pytest.mark.parametrize(
    "name, causal", [case if is_fast(*case) else slow(*case) for case in CASES]
)
@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_padding_is_truncation_on_either_side(name, causal):
    """Also where tokens within do not count, which keep their places."""
    attention = build_layer(name, causal)
    rows = [*REAL.values()]
    for holes in ((), (10, 11, 17)):
        q, k, v, keep = padded(rows, list(holes))
        out = attention(q, k, v, keep)
        for row, at in enumerate(rows):
            own = keep[[row], at] if holes else None
            alone = attention(q[[row], :, at], k[[row], :, at], v[[row], :, at], own)
            real = keep[row, at]
            actual = out[row, :, at][:, real]
            expected = alone[0][:, real]
            assert_close(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", TURNS)
@torch.no_grad()
def test_masked_keys_enter_no_output(name):
    """Of queries at padding neither, and a row without keys gives 0."""
    causal = name != "linformer" and TURNS.index(name) % 2 == 0
    attention = build_layer(name, causal=causal)
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
    actual = layer(q, k, v, keep)
    assert torch.equal(actual, expected)
    if causal:
        actual = layer(q[:, :, -7:], k, v, keep)
        assert torch.equal(actual, expected[:, :, -7:])


@pytest.mark.parametrize("name", ["favorpp", "geom", "nearfar below", "nearfar beyond", "window"])
@torch.no_grad()
def test_the_last_queries_of_a_padded_sequence_equal_those_of_the_whole(name):
    attention = build_layer(name, True)
    rows = [*REAL.values()]
    q, k, v, keep = padded(rows)
    whole = attention(q, k, v, keep)
    for last in (1, 7):
        out = attention(q[:, :, -last:], k, v, keep)
        real = keep[:, None, -last:, None].expand(-1, 4, -1, 16)
        expected = whole[:, :, -last:][real]
        assert_close(out[real], expected, rtol=1e-6, atol=1e-8)


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
    length = LONG
    if name == "nearfar":  # beyond what it computes exactly
        length = 2 * LONG
    key_mask = None
    if masked:
        key_mask = torch.ones(2, length, dtype=torch.bool, device="meta")
    q = torch.randn(2, 4, length, 16, device="meta", requires_grad=True)
    k = torch.randn(2, 4, length, 16, device="meta", requires_grad=True)
    v = torch.randn(2, 4, length, 16, device="meta", requires_grad=True)
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
def test_a_training_step_reads_no_value(name, causal, engine_of_gpus):
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
def test_a_training_step_with_a_padding_mask_reads_no_value(name, causal, options, engine_of_gpus):
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
    if isinstance(averaged, ModelEmaV3):
        averaged.update(model)
    else:
        averaged.update_parameters(model)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name, redraw_every",
    [case for case in in_turn(KINDS, [0, 1]) if case.values[0] != "hedgehog"] + [("hedgehog", 0)],
)  # its rows are trained
def test_an_average_of_states_is_a_state(name, redraw_every):
    """Its projections are those of some draw, its outputs finite; that of one state gives the outputs of this state."""
    mechanism = Mechanism.of(name)
    options = {}
    if mechanism.m is not None:
        options["m"] = 8
    if "fit_steps" in mechanism.options:
        options["fit_steps"] = 3
    layer = Mechanism.of(name, redraw_every=redraw_every, **options).layer(
        2, 4, causal=name != "linformer"
    )
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 4))
    q, k, v = torch.randn(3, 2, 2, 12, 4)
    averages = {}
    for kind, build_layer in AVERAGES.items():
        averages[kind] = build_layer(model)
    for _ in range(6):
        layer(q, k, v)
        for averaged in averages.values():
            average(averaged, model)
    layer.eval()
    for kind, averaged in averages.items():
        copied = averaged.module[0].eval()
        assert copied(q, k, v).isfinite().all(), kind
        if name != "linformer" or redraw_every:
            for rows, t in copied.rows_of_draw(copied.copied_draw).items():
                assert torch.equal(copied.rows(rows), t), kind
        if kind != "mean with buffers":  # of which the counters are averaged too
            assert copied.copied_draw == layer.copied_draw, kind
        averaged = AVERAGES[kind](model)
        for _ in range(3):
            average(averaged, model)
        actual = averaged.module[0](q, k, v)
        expected = layer(q, k, v)
        assert_close(actual, expected, msg=kind)
        other = copy.deepcopy(layer)
        other.load_state_dict(copied.state_dict())
        actual = other(q, k, v)
        expected = copied(q, k, v)
        assert torch.equal(actual, expected), kind


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("hedgehog", "favormix")])
def test_replaced_buffers_are_used(name):
    """As by torch.func.functional_call, and by accelerate when it loads a checkpoint."""
    mechanism = Mechanism.of(name, redraw_every=1)
    ours = mechanism.layer(2, 4, layer=0).eval()
    other = mechanism.layer(2, 4, layer=1).eval()
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
    cases = [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float16, True),
    ]
    scale = 0.5 if name == "geom" else 1.0  # so that no denominator of signed features is near 0
    for dtype, causal in cases:
        layer = Mechanism.of(name).layer(2, 65, causal=causal).eval()
        inputs = scale * torch.randn(3, 2, 2, 16, 65, generator=seeded())
        q, k, v = inputs.to(dtype)
        outputs = [layer(q, k, v)]
        if causal:
            past = layer.past()
            steps = []
            for i in range(16):
                steps.append(past.step(*at_tokens((q, k, v), slice(i, i + 1))))
            outputs.append(torch.cat(steps, 2))
        exact = layer.double()(q.double(), k.double(), v.double())
        for out in outputs:
            assert out.dtype == dtype
            difference = (out - exact).abs().max()
            assert difference < torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_integer_masks_and_other_heads_are_refused(name):
    layer = Mechanism.of(name).layer(2, 4).eval()
    q, k, v = torch.randn(3, 2, 2, 12, 4)
    with pytest.raises(ValueError, match="torch.int64 .*boolean .*True = keep"):
        layer(q, k, v, torch.ones(2, 12, dtype=torch.long))
    if name != "linformer":  # its projections are of any number of heads
        with pytest.raises(ValueError, match="batch|heads=2"):
            layer(*[torch.cat([t, t], 1) for t in (q, k, v)])
