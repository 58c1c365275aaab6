"""Names of conf/attention as attn_implementation of transformers and attn_layer of timm; diffusers; adapters."""

import pytest
import timm
import torch
import transformers
from swap_models import IMAGE, bert, each, gpt2, inputs, llama, made, run, vit

import crt_exp
from crt_exp import swap_attention, unswap_attention
from crt_exp.config import ConfigError, choices

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]
NAMES = ["nearfar", "uniform", "favorpp", "window"]


@each({"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit})
@torch.no_grad()
def test_from_pretrained_gives_the_swapped_model(make, tmp_path):
    made(make).save_pretrained(tmp_path)
    kind = type(made(make))
    for name in NAMES:
        model = kind.from_pretrained(tmp_path, attn_implementation=name).eval()
        other = swap_attention(kind.from_pretrained(tmp_path).eval(), name)
        assert torch.equal(run(model, **inputs(make)), run(other, **inputs(make)))
        assert set(model.state_dict()) == set(other.state_dict()) and model.config.crt_exp == other.config.crt_exp
    unswap_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_every_name_builds_from_a_configuration():
    config = made(bert).config
    for name in choices("attention"):
        model = transformers.AutoModel.from_config(config, attn_implementation=name)
        assert model.config.crt_exp["mechanisms"][0]["name"] == name
    assert not hasattr(config, "crt_exp")


@torch.no_grad()
def test_set_attn_implementation_swaps_and_swaps_again():
    model = made(bert)
    before = run(model, **inputs(bert))
    model.set_attn_implementation("uniform")
    uniform = run(model, **inputs(bert))
    assert not torch.equal(uniform, before)
    model.set_attn_implementation("exact")
    torch.testing.assert_close(run(model, **inputs(bert)), before, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="call unswap_attention"):
        model.set_attn_implementation("sdpa")
    unswap_attention(model).set_attn_implementation("eager")
    torch.testing.assert_close(run(model, **inputs(bert)), before, rtol=1e-4, atol=1e-5)


def test_a_saved_swap_with_its_own_name_is_brought_back(tmp_path):
    model = swap_attention(made(bert), "favorpp", m=8, seed=5)
    model.save_pretrained(tmp_path)
    back = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="favorpp", add_pooling_layer=False)
    assert torch.equal(run(model, **inputs(bert)), run(back.eval(), **inputs(bert)))
    other = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="uniform", add_pooling_layer=False)
    assert other.config.crt_exp["mechanisms"][0]["name"] == "uniform"


def test_what_cannot_be_is_refused(tmp_path):
    made(bert).save_pretrained(tmp_path)
    for call in (lambda name: transformers.BertModel.from_pretrained(tmp_path, attn_implementation=name),
                 made(bert).set_attn_implementation):
        with pytest.raises(ValueError, match="takes the whole model"):
            call({"text_config": "nearfar"})
    t5 = transformers.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, vocab_size=40)
    transformers.T5EncoderModel(t5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="position bias"):
        transformers.T5EncoderModel.from_pretrained(tmp_path, attn_implementation="nearfar")
    config = made(bert).config
    config._attn_implementation = "nearfar"
    with pytest.raises(ValueError, match=r"load the model by from_pretrained\(..., attn_implementation='nearfar'\)"):
        transformers.BertModel(config)(**inputs(bert))


# ---- timm

def test_attn_layer_of_timm():
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 0}
    model = timm.models.VisionTransformer(**sizes, attn_layer=crt_exp.attn_layer("favorpp", m=8)).eval()
    plain = timm.models.VisionTransformer(**sizes).eval()
    missing = model.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(".swapped." in key for key in missing.missing_keys)
    images = inputs(next(iter(IMAGE.values())))["pixel_values"]
    torch.testing.assert_close(model(images), swap_attention(plain, "favorpp", m=8)(images))
    unswap_attention(model), unswap_attention(plain)
    assert torch.equal(model(images), plain(images))
    with pytest.raises(ConfigError, match="unknown attention"):
        crt_exp.attn_layer("favour")


# ---- diffusers

def unet(cross=False):
    from diffusers import UNet2DConditionModel, UNet2DModel

    torch.manual_seed(0)
    sizes = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "attention_head_dim": 8,
             "block_out_channels": (16, 32), "norm_num_groups": 8}
    if cross:
        return UNet2DConditionModel(**sizes, cross_attention_dim=12,
                                    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                                    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")).eval()
    return UNet2DModel(**sizes, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                       up_block_types=("AttnUpBlock2D", "UpBlock2D")).eval()


def dit():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    return DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2,
                                 sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=8).eval()


def denoised(model):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    name = type(model).__name__
    extras = {"DiTTransformer2DModel": {"class_labels": torch.tensor([1, 2])},
              "UNet2DConditionModel": {"encoder_hidden_states": torch.ones(2, 7, 12)}}.get(name, {})
    return model(x, timestep=torch.tensor([3, 4]), **extras).sample


@pytest.mark.parametrize("make", [unet, dit, lambda: unet(True)], ids=["unet", "dit", "conditional"])
@pytest.mark.filterwarnings("ignore:attention of other kinds stays:UserWarning")
@torch.no_grad()
def test_self_attention_of_diffusers(make, tmp_path):
    model = make()
    before = denoised(model)
    torch.testing.assert_close(denoised(swap_attention(model, "exact")), before, rtol=1e-4, atol=1e-5)
    uniform = denoised(swap_attention(model, "uniform"))
    assert (uniform - before).abs().max() > 1e-4
    linear = denoised(swap_attention(model, "favorpp", m=256))
    assert (linear - before).norm() < (uniform - before).norm()
    model.save_pretrained(tmp_path)
    assert torch.equal(denoised(crt_exp.from_pretrained(type(model), tmp_path).eval()), linear)
    assert torch.equal(denoised(unswap_attention(model)), before) and "crt_exp" not in model.config


# ---- adapters

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
