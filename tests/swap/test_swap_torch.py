"""torch.nn.MultiheadAttention by itself, swapped."""

import copy

import pytest
import torch
from swap_models import LOOSE, B, Encoder, attention, inputs, made, run
from torch import nn

from crt_exp import calibrate_attention, swap_attention, unswap_attention

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
              pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")]


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"kdim": 6, "vdim": 5}, {"bias": False}], ids=str)
@torch.no_grad()
def test_multihead_attention_equals_torch(options):
    module = attention(**options)
    swap = swap_attention(copy.deepcopy(module), "exact")
    time_first, kdim, vdim = not options.get("batch_first"), options.get("kdim", 16), options.get("vdim", 16)
    q, k, v = torch.randn(B, 5, 16), torch.randn(B, 7, kdim), torch.randn(B, 7, vdim)
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[0, 5:] = True
    turn = lambda t: t.transpose(0, 1) if time_first else t
    for given in ({}, {"key_padding_mask": padding},
                  {"key_padding_mask": torch.zeros(B, 7).masked_fill(padding, -torch.inf)},
                  {"need_weights": False}, {"average_attn_weights": False}):
        expected, got = (m(turn(q), turn(k), turn(v), **given) for m in (module, swap))
        torch.testing.assert_close(got, expected, **LOOSE)
    expected, got = (m(q[0], k[0], v[0], key_padding_mask=padding[0]) for m in (module, swap))  # not batched
    torch.testing.assert_close(got, expected, **LOOSE)


@torch.no_grad()
def test_causal_masks_of_torch():
    module = attention(batch_first=True)
    swap, x = swap_attention(copy.deepcopy(module), "exact"), torch.randn(B, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    expected = module(x, x, x, attn_mask=mask)[0]
    for given in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}, {"attn_mask": mask == -torch.inf},
                  {"attn_mask": mask.expand(B * 4, 6, 6)}):
        torch.testing.assert_close(swap(x, x, x, **given)[0], expected, **LOOSE)
    short = mask[:2]    # two queries, the first of six tokens
    for each in (True, False):
        torch.testing.assert_close(*(m(x[:, :2], x, x, attn_mask=short, average_attn_weights=each)
                                     for m in (swap, module)), **LOOSE)
    torch.testing.assert_close(swap(x, x, x, attn_mask=torch.zeros(6, 6))[0], module(x, x, x)[0], **LOOSE)
    for bad in (mask == 0, torch.rand(6, 6), (mask < 0) | torch.eye(6, dtype=torch.bool).roll(2, 0)):
        with pytest.raises(ValueError, match="MultiheadAttention: attention_mask"):
            swap(x, x, x, attn_mask=bad)


def test_one_module_causal_and_not():
    module, x = swap_attention(attention(batch_first=True), "favorpp", m=16).eval(), torch.randn(B, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    full = module(x, x, x)[0]
    with pytest.warns(UserWarning, match="calibrate_attention"):
        causal = module(x, x, x, attn_mask=mask)[0]
    calibrate_attention(module, [{"query": x, "key": x, "value": x, "attn_mask": mask}])
    torch.testing.assert_close(module(x, x, x)[0], full)
    fitted = module(x, x, x, attn_mask=mask)[0]
    assert not torch.equal(fitted, causal) and not torch.allclose(fitted, full)


@torch.no_grad()
def test_encoder_in_eval_mode_is_swapped_and_restored():
    model, ids = made(Encoder), inputs(Encoder)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    before = run(model, input_ids=ids, attention_mask=mask)
    swap_attention(model, "identity")
    calls = []
    hooks = [part.register_forward_hook(lambda *_: calls.append(1)) for part in model.modules()
             if hasattr(part, "scaling")]
    run(model, input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2
    layer = model.inner.layers[0].self_attn
    layer.swapped.forward = None  # without hooks, which would end the fast path by themselves
    with pytest.raises(TypeError):
        run(model, input_ids=ids)
    unswap_attention(model)
    assert torch.equal(run(model, input_ids=ids, attention_mask=mask), before)
