"""A fixed sample of the models of `make families`: each is exact when swapped, or refused at the swap; none is wrong."""

import pytest
import torch

from crt_exp.report.families import judge

EXACT = {
    "transformers": ["aimv2", "albert", "altclip", "bart", "beit", "bert", "bigbird_pegasus", "clip", "clip_text_model",
                     "cohere", "detr", "dinov3_vit", "git", "gpt2", "gpt_neox", "llama", "llava", "marian", "mistral",
                     "nllb-moe", "opt", "paligemma", "pegasus_x", "qwen2_vl", "roberta", "siglip_vision_model",
                     "splinter", "vit_mae", "whisper"],
    "timm": ["eva02_tiny_patch14_224", "vit_small_patch16_rope_224"],
    "torch": ["MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerEncoder"],
    "torchaudio": ["Conformer"],
}
REFUSED = {
    "transformers": {"deepseek_v32": "sparse index", "gemma2": "softcap", "gpt_oss": "sinks", "pixtral": "packed",
                     "parakeet_encoder": "changes its mask", "sam3": "bias of boxes", "seamless_m4t": "position bias",
                     "t5": "position bias", "t5gemma2": "one softmax"},
    "torchaudio": {"wavlm_model": "WavLMSelfAttention from its weights"},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("library, name", [(library, name) for library, names in EXACT.items() for name in names])
def test_exact_when_swapped(library, name):
    verdict = judge(library, name)
    assert verdict.outcome == "exact", verdict


@pytest.mark.parametrize("library, name", [(library, name) for library, names in REFUSED.items() for name in names])
def test_refused_at_the_swap_with_the_reason(library, name):
    verdict = judge(library, name)
    assert verdict.outcome == "refused" and REFUSED[library][name] in verdict.why, verdict
