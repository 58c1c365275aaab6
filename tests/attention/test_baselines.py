"""The controls that every report holds beside a mechanism: uniform attention and a window,
against their materialised twins."""

import pytest
import torch

from crt_exp import swap_attention
from crt_exp.attention import Uniform, Window, uniform_attention, window_attention
from crt_exp.mechanism import Mechanism

B, H, D = 2, 3, 4


def tensors(L, S, kv_heads=H):
    g = torch.Generator().manual_seed(0)
    x, y, v = (torch.randn(B, h, n, D, generator=g, dtype=torch.float64)
               for h, n in ((H, L), (kv_heads, S), (kv_heads, S)))
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
@pytest.mark.parametrize("L, S, block, first, causal", [
    *((*sizes, causal) for sizes in ((17, 17, 4, 2), (8, 8, 8, 0), (5, 5, 16, 9)) for causal in (False, True)),
    (3, 21, 4, 3, True), (1, 10, 3, 1, True)])              # of two sequences a window is refused
def test_window_is_softmax_over_its_keys(L, S, block, first, causal, masked):
    x, y, v, keep = tensors(L, S, kv_heads=1)
    begin = keep.int().argmax(1)[:, None, None, None] if masked else 0     # places count from the first real token
    i, j = (at - begin for at in places(L, S))
    near = (j // block >= i // block - 1) & (j // block <= i // block + (0 if causal else 1))
    allowed = (near | (j < first)) & ((j <= i) | torch.tensor(not causal))
    allowed = allowed.expand(B, 1, L, S) & (keep[:, None, None] if masked else True)
    out = window_attention(x, y, v, block=block, first=first, causal=causal, key_mask=keep if masked else None)
    expected = twin(x, y, v, allowed)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), (x, y, v)),
                            torch.autograd.grad(expected.square().sum(), (x, y, v))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_uniform_is_the_mean_of_the_values_that_are_seen(causal, masked):
    x, y, v, keep = tensors(5, 9)
    i, j = places(5, 9)
    allowed = ((j <= i) | torch.tensor(not causal)).expand(B, 1, 5, 9) & (keep[:, None, None] if masked else True)
    expected = twin(torch.zeros_like(x), y, v, allowed)
    torch.testing.assert_close(uniform_attention(x, y, v, causal=causal, key_mask=keep if masked else None), expected)


def test_a_window_needs_no_memory_of_pairs():
    x = torch.randn(1, 1, 2**16, 8)
    assert window_attention(x, x, x, causal=True).shape == x.shape


def test_controls_by_name():
    q = torch.randn(B, H, 7, D)
    assert isinstance(Mechanism.of("uniform").layer(H, D), Uniform)
    assert Mechanism.of("window", block=2, first=1).layer(H, D, causal=True)(q, q, q).shape == q.shape
    with pytest.raises(ValueError, match="needs L == S"):
        Window(H, D)(q, torch.randn(B, H, 9, D), torch.randn(B, H, 9, D))
    for name in ("uniform", "window"):
        with pytest.raises(ValueError, match=f"attention={name}: does not use m=8; remove it"):
            Mechanism.of(name, m=8)


@torch.no_grad()
def test_a_swapped_model_is_causal_with_its_controls():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=40, n_positions=40)
    ids = torch.randint(40, (2, 12))
    for name in ("uniform", "window"):
        model = swap_attention(transformers.GPT2Model(config).eval().double(), name)
        whole, part = model(ids).last_hidden_state, model(ids[:, :7]).last_hidden_state
        torch.testing.assert_close(whole[:, :7], part)


def test_what_cannot_be_causal_is_refused_at_the_swap_of_a_causal_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=40, n_positions=40)
    with pytest.raises(ValueError, match=r"h.0.attn \(GPT2Attention\) is causal: not supported by attention=linformer"):
        swap_attention(transformers.GPT2Model(config), "linformer", length=40, rank=8)
