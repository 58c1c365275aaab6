"""What a swapped model says of itself, calibration, and what is refused by name."""

import warnings

import pytest
import torch
import transformers
from swap_models import ALL, LOOSE, B, L, attention, bert, gpt2, inputs, llama, made, run, swapped
from torch import nn

from crt_exp import calibrate_attention, describe_attention, swap_attention, unswap_attention
from crt_exp.attention import RandomFeatureAttention

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
              pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")]


def test_table(capsys):
    model = swapped(bert)
    rows = describe_attention(model)
    assert capsys.readouterr().out == "" and rows["mechanism"].tolist() == ["favorpp"] * 2
    assert rows["type"].tolist() == ["BertSelfAttention"] * 2 and rows["A mean"].isna().all()
    assert rows["error on calibration"].isna().all() and rows["uniform's error"].isna().all()
    calibrate_attention(model, [inputs(bert, seed=s) for s in range(2)])
    rows = describe_attention(model)
    assert (rows["A min"] <= rows["A mean"]).all() and (rows["A max"] <= 0).all() and (rows["M"] == 32).all()
    more = describe_attention(calibrate_attention(swapped(bert, m=1024), [inputs(bert, seed=s) for s in range(2)]))
    assert (more["error on calibration"] < 0.5 * rows["error on calibration"]).all()
    assert more["uniform's error"][0] == rows["uniform's error"][0]  # the first layer sees the same
    swap_attention(model, "relu", layers=[0], m=8)
    assert describe_attention(model)["error on calibration"].isna().tolist() == [True, False]
    assert describe_attention(unswap_attention(model))["mechanism"].tolist() == ["unchanged"] * 2
    causal = describe_attention(swapped(llama, "gerf"))
    assert causal["error on calibration"].notna().all() and causal["A mean"].notna().all() and (causal["M"] == 64).all()


@pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")
def test_calibration_fills_causal_statistics_only_and_restores_the_mode():
    model = made(gpt2).train()
    swap_attention(model, "favorpp", m=8)
    states = [part for part in model.modules() if isinstance(part, RandomFeatureAttention)]
    assert not any(float(s.running_weight) for s in states)
    calibrate_attention(model, [inputs(gpt2)["input_ids"], (inputs(gpt2, seed=1)["input_ids"],), inputs(gpt2, seed=2)])
    assert all(float(s.running_weight) == 1 and int(s.folds) == 3 for s in states) and model.training
    with pytest.raises(ValueError, match="batches: empty"):
        calibrate_attention(model, [])
    with pytest.raises(ValueError, match="swapped: none"):
        calibrate_attention(made(gpt2), [inputs(gpt2)])
    with pytest.raises(ValueError, match="swapped: window"):
        calibrate_attention(swap_attention(made(gpt2), "window"), [inputs(gpt2)])


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="Linear: no supported attention"):
        swap_attention(nn.Linear(2, 2), "favorpp")
    with pytest.raises(ValueError, match="did you mean favorp"):
        swap_attention(made(bert), "favorpq")
    for layers in ([2], [-3], ["0"]):
        with pytest.raises(ValueError, match="2 layers, 0 to 1"):
            swap_attention(made(bert), "favorpp", layers=layers)
    with pytest.raises(ValueError, match=r"layers=\[\]: expected"):
        swap_attention(made(bert), "favorpp", layers=[])
    with pytest.raises(ValueError, match="BertModel: no swapped attention"):
        unswap_attention(made(bert))
    with pytest.raises(ValueError, match="add_zero_attn"):
        swap_attention(attention(add_zero_attn=True), "favorpp")
    state = swap_attention(made(bert), "favorpp", m=16).state_dict()
    with pytest.raises(ValueError, match=r"saved .*=\(4, 16, 4\), expected \(4, 32, 4\); use m=16"):
        swap_attention(made(bert), "favorpp", m=32).load_state_dict(state)


class Mixed(nn.Module):
    """One attention that can be swapped beside two of other kinds, one of them within a wrapper."""

    class OwnAttention(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    class Fused(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def __init__(self):
        super().__init__()
        self.known, self.own = nn.MultiheadAttention(16, 4), self.OwnAttention()
        self.wrapper = nn.Sequential(self.Fused())


def test_attention_of_other_kinds_is_named():
    with pytest.warns(UserWarning, match=r"Mixed: .*: own \(OwnAttention\), wrapper.0 \(Fused\)"):
        model = swap_attention(Mixed(), "favorpp", m=8)
    rows = describe_attention(model)
    assert rows["mechanism"].tolist() == ["favorpp", "cannot be swapped", "cannot be swapped"]
    assert rows["path"].tolist() == ["known", "own", "wrapper.0"]
    assert rows["layer"].isna().tolist() == [False, True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(Mixed(), "favorpp", m=8, layers=[0])  # who chooses layers knows
        for make in ALL.values():
            swap_attention(make(), "exact")


def test_position_biases_are_refused():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 20}
    with pytest.raises(ValueError, match=r"SelfAttention \(T5Attention\).*position bias"):
        swap_attention(transformers.T5EncoderModel(transformers.T5Config(**sizes)), "favorpp")
    alibi = transformers.BloomModel(transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=20))
    with pytest.raises(ValueError, match=r"unsupported: h.0.self_attention \(BloomAttention\)"):
        swap_attention(alibi, "favorpp")


@torch.no_grad()
def test_masks_that_are_not_linear_are_refused():
    model, ids = swapped(gpt2), inputs(gpt2)["input_ids"]
    causal = torch.ones(B, 1, L, L, dtype=torch.bool).tril()
    torch.testing.assert_close(run(model, input_ids=ids, attention_mask=causal), run(model, input_ids=ids), **LOOSE)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn: attention_mask"):
        run(model, input_ids=ids, attention_mask=causal.triu(-2))
    packed = torch.arange(L).remainder(4).expand(B, -1)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn: attention_mask"):
        run(model, input_ids=ids, position_ids=packed, use_cache=False)


@torch.no_grad()
def test_windows_that_do_not_cut_are_exact():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 32, "vocab_size": 40, "max_position_embeddings": 20}
    model = transformers.MistralModel(transformers.MistralConfig(**sizes, sliding_window=20)).eval()
    before = run(model, **inputs(llama))
    torch.testing.assert_close(run(swap_attention(model, "exact"), **inputs(llama)), before, **LOOSE)
