"""Attention by hashing with shared queries and keys, against its whole matrix; and its laws."""

import pytest
import torch

from crt_exp.attention import Reformer
from crt_exp.mechanism import Mechanism

B, H, D = 2, 3, 4


def tensors(L, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, H, L, D, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))


def layer_of(causal=False, **options):
    options = {"hashes": 3, "buckets": 4, "chunk": 3, "redraw_every": 0} | options
    return Reformer(H, D, causal=causal, **options).double()


def twin(layer, q, v, keep=None):
    """By the whole matrix: a pair counts where a round has both in one bucket, at most `chunk` of its tokens apart."""
    keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if keep is None else keep
    buckets = layer.hash(q, keep)
    same = buckets.unsqueeze(-1) == buckets.unsqueeze(-2)                                      # (B, H, R, S, S)
    rank = same.tril().sum(-1)                                                                 # within the bucket
    apart = rank.unsqueeze(-1) - rank.unsqueeze(-2)
    seen = same & (apart <= layer.chunk) & (apart >= (0 if layer.causal else -layer.chunk))
    seen = seen.any(2) & keep[:, None, None]
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT                                         # scaling d^(1/2) = 1
    logits = torch.where(torch.eye(q.shape[2], dtype=torch.bool), -1e5, logits)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    weights, v = (torch.where(keep[:, None, :, None], t, 0.0) for t in (weights, v))
    return weights.nan_to_num() @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("L, options", [(1, {}), (17, {}), (12, {"hashes": 1}),
                                        (20, {"chunk": 7, "buckets": 2}), (9, {"buckets": 1})])
def test_softmax_over_the_union_of_the_rounds(L, options, causal, masked):
    """Outputs and gradients, each pair counted once."""
    (q, k, v), layer = tensors(L), layer_of(causal, **options)
    keep = torch.rand(B, L, generator=torch.Generator().manual_seed(2)) < 0.7 if masked else None
    out, expected = layer(q, k, v, keep), twin(layer, q, v, keep)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(each.square().sum(), (q, v)) for each in (out, expected))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_one_bucket_is_exact_attention_with_shared_queries_and_keys(causal):
    (q, k, v), layer = tensors(11), layer_of(causal, buckets=1, chunk=11)
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    hidden = torch.eye(11, dtype=torch.bool) | (torch.ones(11, 11, dtype=torch.bool).triu(1) & torch.tensor(causal))
    hidden[0, 0] &= not causal                                            # the first token sees itself alone
    torch.testing.assert_close(layer(q, k, v), logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_causal_attention_is_that_of_each_prefix(chunk):
    (q, k, v), layer = tensors(23), layer_of(True, chunk=chunk)
    whole = layer(q, k, v)
    for n in range(1, 23):
        torch.testing.assert_close(layer(q[:, :, :n], k[:, :, :n], v[:, :, :n]), whole[:, :, :n])


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing_whatever_it_holds(causal):
    (q, k, v), layer = tensors(20), layer_of(causal)
    keep = (torch.arange(20) < 13).expand(B, -1)
    bad = [t.masked_fill(~keep[:, None, :, None], torch.nan) for t in (q, k, v)]
    found = layer(*bad, keep)
    torch.testing.assert_close(found[:, :, :13], layer(q[:, :, :13], k[:, :, :13], v[:, :, :13]))
    assert (found[:, :, 13:] == 0).all()


def test_no_matrix_of_pairs():
    """2^15 tokens: the matrix would take 4 GB, and its gradient as much."""
    x = torch.randn(1, 1, 2**15, 4).requires_grad_()
    out = Reformer(1, 4, causal=True, hashes=1, buckets=1024, chunk=16)(x, x, x)
    out.square().mean().backward()
    assert out.shape == x.shape and x.grad.isfinite().all()


def test_hashes_are_drawn_from_seed_layer_and_pass():
    make = lambda seed=0, layer=0, **options: Mechanism.of("reformer", seed=seed, **options).layer(H, D, layer=layer)
    one = make()
    assert torch.equal(one.rotations, make().rotations)
    assert not any(torch.equal(one.rotations, make(**other).rotations) for other in ({"seed": 1}, {"layer": 1}))
    q, k, v = (t.detach().float() for t in tensors(8))
    first = one.rotations.clone()
    one.eval()(q, k, v)
    assert torch.equal(one.rotations, first)
    one.train()(q, k, v)
    assert torch.equal(one.rotations, first)              # the first pass has the first draw
    one(q, k, v)
    assert not torch.equal(one.rotations, first) and int(one.draws) == 1
    fixed = make(redraw_every=0).train()
    fixed(q, k, v), fixed(q, k, v)
    assert torch.equal(fixed.rotations, first)


@torch.no_grad()
def test_half_precision():
    (q, k, v), layer = tensors(12), layer_of(True).float()
    low = [t.bfloat16() for t in (q, k, v)]
    found = layer(*low)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), layer(*(t.float() for t in low)), rtol=2e-2, atol=2e-2)


def test_what_is_refused():
    with pytest.raises(ValueError, match="buckets=5: expected 1 or an even"):
        Reformer(H, D, buckets=5)
    q, k, v = tensors(8)
    with pytest.raises(ValueError, match="use_cache=False"):
        layer_of()(q[:, :, :5], k, v)
    with pytest.raises(ValueError, match="does not use m"):
        Mechanism.of("reformer", m=8)
