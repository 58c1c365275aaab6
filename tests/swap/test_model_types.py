"""Model types of transformers, timm, torch and torchaudio: each is exact when swapped, or refused at the swap; none is
wrong. A fixed sample is fast; the slow test tries all."""

import pytest
import torch

from crt_exp import swap_attention, unswap_attention
from tests.model_types import LIBRARIES, distance, judge, judge_model
from tests.tiny_models import outputs, spread

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = {
    "transformers": ["bart", "beit", "bert", "clip", "detr", "gemma3_text", "gpt2", "gpt_neox", "llama", "llava",
                     "modernbert", "opt", "qwen2_vl", "vit_mae", "whisper"],
    "timm": ["eva02_tiny_patch14_224", "vit_small_patch16_rope_224"],
    "torch": ["MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerEncoder"],
    "torchaudio": ["Conformer"],
}
ALIKE = ["aimv2", "albert", "altclip", "bigbird_pegasus", "clip_text_model", "cohere", "dinov3_vit", "git", "marian",
         "nllb-moe", "paligemma", "roberta", "siglip_vision_model", "splinter"]   # their layers are those of others
LONG = ["pegasus_x"]   # whose blocks of 512 tokens take as long as ten others; what is swapped is bart's
TEXTS = ["albert", "altclip", "bigbird_pegasus", "clip", "clip_text_model", "cohere", "gpt_neox", "marian", "nllb-moe",
         "opt", "qwen2_vl", "roberta", "splinter"]
REFUSED = {
    "transformers": {"deepseek_v32": "sparse index", "gemma2": "softcap", "gpt_oss": "sinks",
                     "mistral": "has a window", "pixtral": "packed",
                     "parakeet_encoder": "masks pairs", "sam3": "box bias", "seamless_m4t": "position bias",
                     "t5": "position bias", "t5gemma2": "one softmax"},
    "torchaudio": {"wavlm_model": "computed by WavLMSelfAttention"},
}


@pytest.mark.parametrize("library, name", [(library, name) for library, names in EXACT.items() for name in names] + [
    pytest.param("transformers", name, marks=pytest.mark.slow) for name in ALIKE + LONG])
def test_exact_when_swapped(library, name):
    verdict = judge(library, name)
    assert verdict.outcome == "exact", verdict


@pytest.mark.parametrize("library, name", [(library, name) for library, names in REFUSED.items() for name in names])
def test_refused_at_the_swap_with_the_reason(library, name):
    verdict = judge(library, name)
    assert verdict.outcome == "refused" and REFUSED[library][name] in verdict.why, verdict


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_model_type_is_wrong(library):
    names = LIBRARIES[library][0]()
    found = {name: judge(library, name) for name in names}
    assert not {name: verdict for name, verdict in found.items() if verdict.outcome == "wrong"}
    assert any(verdict.outcome == "exact" for verdict in found.values())


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
         "max_position_embeddings": 64}
INFORMER = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1,
            "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "attention_type": "full"}


def informer():
    values = lambda *shape: torch.randn(2, *shape, dtype=torch.float64)
    return {"past_values": values(18), "past_time_features": values(18, 1),
            "past_observed_mask": torch.ones(2, 18).double(),
            "future_values": values(8), "future_time_features": values(8, 1)}


def text():
    return {"input_ids": torch.randint(5, 50, (2, 10))}


MADE = {"ClapTextModel": ("ClapTextConfig", SIZES, text), "AlignTextModel": ("AlignTextConfig", SIZES, text),
        "InformerModel": ("InformerConfig", INFORMER, informer)}


@pytest.mark.filterwarnings("ignore:.*no statistics yet.*:UserWarning")
@pytest.mark.parametrize("name, causal", [("ClapTextModel", False), ("AlignTextModel", False), ("InformerModel", True)])
def test_encoders_stay_bidirectional_and_decoders_causal(name, causal):
    """Models whose modules say the opposite of the mask that they ask for."""
    import transformers

    config, sizes, batch = MADE[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).double().eval()
    spread(model)
    verdict = judge_model(model, batch())
    assert verdict.outcome == "exact" and verdict.why == ("causal" if causal else ""), verdict


def odd_masks(ids):
    """Of other sizes and kinds than (batch, tokens); a padded one leaves out the last tokens."""
    (B, L), ones = ids.shape, lambda *sizes: torch.ones(sizes, dtype=torch.long)
    padded = lambda mask: mask.masked_fill(torch.arange(mask.shape[-1]) >= mask.shape[-1] - 2, 0)
    sizes = {"shorter": (B, L - 4), "longer": (B, L + 3), "one row": (1, L), "too many rows": (B + 1, L),
             "one column": (B, 1), "no column": (B, 0), "one axis": (L,), "pairs": (B, L, L)}
    masks = {name: ones(*size) for name, size in sizes.items()}
    masks |= {f"{name}, padded": padded(masks[name]) for name in ("shorter", "longer", "one row", "too many rows")}
    return masks | {"causal pairs": ones(B, L, L).tril(), "boolean": padded(ones(B, L)).bool(),
                    "boolean, shorter": padded(ones(B, L - 4)).bool(), "numbers": padded(ones(B, L)).double()}


def answer(model, batch):
    try:
        return outputs(model, batch)
    except Exception as error:
        return error


@pytest.mark.filterwarnings("ignore:.*window attention stay unchanged:UserWarning")
@pytest.mark.parametrize("name", ["bart", "bert", "distilbert", "gemma3_text", "gpt2", "llama", "modernbert", *(
    pytest.param(name, marks=pytest.mark.slow) for name in TEXTS)])
def test_a_mask_of_any_form_means_what_it_did_or_is_refused(name):
    """Where the model itself takes it."""
    model, batch = LIBRARIES["transformers"][1](name)
    for key in ("input_ids", "decoder_input_ids"):
        for what, mask in odd_masks(batch[key]).items() if key in batch else ():
            case = batch | {key.replace("input_ids", "attention_mask"): mask}
            own = answer(model, case)
            new = answer(swap_attention(model, "exact"), case)
            unswap_attention(model)
            if isinstance(own, Exception):
                continue
            if isinstance(new, Exception):
                assert isinstance(new, ValueError) and "attention_mask" in str(new), (key, what, new)
            else:
                assert distance(new, own) < 1e-6, (key, what)
