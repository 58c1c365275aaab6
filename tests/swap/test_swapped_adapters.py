"""Adapters of PEFT on the projections of swapped attention."""

import pytest
import torch
from swap_models import IMAGE, bert, inputs, llama, made, run

from crt_exp import swap_attention, unswap_attention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("make, targets", [(bert, ["query", "key", "value"]), (llama, ["q_proj", "k_proj", "v_proj"]),
                                           (IMAGE["timm"], ["qkv"])], ids=["bert", "llama", "timm"])
@pytest.mark.parametrize("first", ["adapter", "swap"])
def test_adapters_stay_and_train(make, targets, first):
    peft = pytest.importorskip("peft")
    model = made(make)
    if first == "swap":
        swap_attention(model, "exact")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        before = run(adapted, **inputs(make))
        assert not torch.allclose(before, run(made(make), **inputs(make)))
        torch.testing.assert_close(run(swap_attention(adapted, "exact"), **inputs(make)), before, rtol=1e-4, atol=1e-5)
    swap_attention(adapted, "nearfar")
    run(adapted.train(), **inputs(make)).square().mean().backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained)
    assert all(".lora_" in name for name, p in adapted.named_parameters() if p.requires_grad)
    with torch.no_grad():
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        torch.testing.assert_close(run(unswap_attention(adapted).eval(), **inputs(make)), before, rtol=1e-4, atol=1e-5)
