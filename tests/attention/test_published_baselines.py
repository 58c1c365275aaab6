"""Linformer and Reformer equal their formulas, for each draw of their projections."""

import pytest
import torch
from helpers.attention_cases import Case, assert_same, sample_inputs
from helpers.covering import in_turn
from helpers.nearfar_cases import at_tokens, same
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp.attention import (
    Exact,
    Identity,
    Linformer,
    Reformer,
    softmax_attention,
)
from crt_exp.features import OPRF
from crt_exp.mechanism import Mechanism

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")]
B = 2
H = 3
D = 4
both_ways = pytest.mark.parametrize("causal", [False, True])
L = 9
Q, K, V = torch.randn(3, 3, H, L, D, generator=seeded())


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

    def aligned(t):
        return torch.stack([row.roll(-at, 1) for row, at in zip(t * keep, begin)])

    y = layer.key_projection @ aligned(case.y)
    v = layer.value_projection @ aligned(case.v)
    actual = [layer(*case.inputs, case.mask)]
    expected = [softmax_attention(case.x, y, v)]
    assert_same(actual, expected, 1e-5)
    layer(case.x, case.y[:, :, :7], case.v[:, :, :7]).sum().backward()
    assert (layer.key_projection.grad[:, 7:] == 0).all()
    actual = layer.key_projection.grad[:, :7].abs().min()
    assert actual > 0
    actual = Identity(H, D, causal=True)(Q, K, V)
    assert torch.equal(actual, V)
    actual = Exact(H, D)(Q, K, V)
    expected = softmax_attention(Q * D**-0.25, K * D**-0.25, V)
    assert_close(actual, expected)


def test_learned_mixtures_are_parameters_alone():
    """As checkpoints hold them: nothing is drawn again, and nothing else is kept."""
    layer = linformer()
    before = {}
    for name, value in layer.state_dict().items():
        before[name] = value.clone()
    assert {*before} == {"key_projection", "value_projection"}
    assert {name for name, _ in layer.named_parameters()} == {*before}
    layer.train()(Q, K, V), layer(Q, K, V)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_random_mixtures_are_those_of_keys_and_values():
    layer = linformer(redraw_every=2).eval()
    keys = layer.mixtures[:, :L] @ K
    values = layer.mixtures[:, :L] @ V
    actual = layer(Q, K, V)
    expected = softmax_attention(D**-0.25 * Q, D**-0.25 * keys, values)
    assert_close(actual, expected)
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
        expected = getattr(make(redraw_every=2, **other), buffer)
        assert not torch.equal(getattr(one, buffer), expected)
    seen = []
    for _ in range(5):
        one.train()(Q, K, V), one.eval()(Q, K, V)
        seen.append(getattr(one, buffer).clone())
    actual = []
    for a, b in zip(seen, seen[1:]):
        actual.append(torch.equal(a, b))
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
    if keep is None:
        keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
    buckets = layer.hash(q, keep)
    same = buckets.unsqueeze(-1) == buckets.unsqueeze(-2)  # (B, H, R, S, S)
    rank = same.tril().sum(-1)  # within the bucket
    apart = rank.unsqueeze(-1) - rank.unsqueeze(-2)
    latest = 0 if layer.causal else -layer.chunk
    seen = same & (apart <= layer.chunk) & (apart >= latest)
    seen = seen.any(2) & keep[:, None, None]
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT  # scaling d^(1/2) = 1
    logits = torch.where(torch.eye(q.shape[2], dtype=torch.bool), -1e5, logits)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    real = keep[:, None, :, None]
    return torch.where(real, weights, 0.0).nan_to_num() @ torch.where(real, v, 0.0)


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
        times=2,
    ),
    ids=str,
)
def test_reformer_is_softmax_over_the_union_of_the_rounds(options, causal, masked):
    """Outputs and gradients, each pair counted once."""
    options = dict(options)
    L = options.pop("L")
    q, k, v, keep = sample_inputs(L, L)
    layer = reformer(causal, **options).double()
    if not masked:
        keep = None
    out = layer(q, k, v, keep)
    expected = reformer_twin(layer, q, v, keep)
    same(out, expected, (q, v))


@torch.no_grad()
@both_ways
def test_one_bucket_is_exact_attention_with_shared_queries_and_keys(causal):
    q, k, v, _ = sample_inputs(11, 11)
    layer = reformer(causal, buckets=1, chunk=11).double()
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    hidden = torch.eye(11, dtype=torch.bool)
    if causal:
        hidden |= torch.ones(11, 11, dtype=torch.bool).triu(1)
    hidden[0, 0] &= not causal  # the first token sees itself alone
    actual = layer(q, k, v)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    assert_close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
def test_future_never_leaks_in_buckets(chunk):
    q, k, v, _ = sample_inputs(23, 23)
    layer = reformer(True, chunk=chunk).double()
    whole = layer(q, k, v)
    for n in range(1, 23):
        actual = layer(*at_tokens((q, k, v), slice(n)))
        expected = whole[:, :, :n]
        assert_close(actual, expected)
