"""A fixed sample of the models of `make families`: each is exact when swapped, or refused at the swap;
none is wrong."""

from pathlib import Path

import pytest
import torch

from crt_exp.config import ConfigError
from crt_exp.probes import sources
from crt_exp.report.__main__ import measure
from crt_exp.report.draws import read
from tests import model_types, tiny_models
from tests.model_types import judge, judge_model
from tests.tiny_models import spread

ROOT = Path(__file__).parents[2]
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
REFUSED = {
    "transformers": {"deepseek_v32": "sparse index", "gemma2": "softcap", "gpt_oss": "sinks",
                     "mistral": "sees a window", "pixtral": "packed",
                     "parakeet_encoder": "changes its mask", "sam3": "bias of boxes", "seamless_m4t": "position bias",
                     "t5": "position bias", "t5gemma2": "one softmax"},
    "torchaudio": {"wavlm_model": "WavLMSelfAttention from its weights"},
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


def test_the_page_is_measured_where_the_tests_are(tmp_path, monkeypatch, request):
    """Its measurement is a helper of the tests, found in the folder of the command; elsewhere one line says so."""
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(sources.closure.cache_clear)     # of files below this folder, which other tests do not run in
    with pytest.raises(ConfigError, match="tests.model_types is no file of crt_exp or of this directory; run the comm"):
        measure("families", "small", tmp_path, keep=False, again=False)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.setattr(model_types, "LIBRARIES", {"torch": (lambda: ["Transformer"], tiny_models.of_torch)})
    measure("families", "small", tmp_path, keep=False, again=False)
    new, = judged(tmp_path, "Transformer")
    old, = judged(ROOT / "outputs/report", "Transformer")
    assert new[:2] == old[:2] == ("exact", "causal") and max(new[2], old[2]) < 1e-12


def judged(folder, model):
    """(outcome, why, worst) of each draw of a model."""
    frame = read("families", folder)
    frame = frame[(frame["setting"] == "torch") & (frame["arm"] == model)]
    outcome, why, worst = (frame.loc[frame["metric"] == metric, "value"] for metric in ("outcome", "why", "worst"))
    return [*zip(outcome, why, map(float, worst))]


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


@pytest.mark.filterwarnings("ignore:.*has no statistics yet.*:UserWarning")
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
