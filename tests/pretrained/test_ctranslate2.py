"""Weights of Whisper in the format of CTranslate2: written here, read by the package."""

import struct

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from crt_exp.data import DataError
from crt_exp.pretrained import ctranslate2

SIZES = {"d_model": 16, "num_mel_bins": 8, "vocab_size": 30, "max_source_positions": 12, "max_target_positions": 10,
         "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1)
KINDS = {"<f4": 0, "|i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def written(variables, kind="WhisperSpec", version=6) -> bytes:
    parts = [struct.pack("<I", version), string(kind), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        value = np.asarray(value)
        parts += [string(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape),
                  struct.pack("<BI", KINDS[value.dtype.str], value.nbytes), value.tobytes()]
    tied = string("decoder/projection/weight") + string("decoder/embeddings/weight")
    return b"".join([*parts, struct.pack("<I", 1), tied])


def variables_of(model) -> dict[str, np.ndarray]:
    """The weights under CTranslate2's names."""
    parts = {name: part for name, part in model.model.named_modules()}
    found = {f"{side}/num_heads": np.int16(SIZES[f"{side}_attention_heads"]) for side in ("encoder", "decoder")}
    found["decoder/alignment_heads"] = np.array([[0, 1]], np.int16)

    def put(name, *modules):
        found[f"{name}/weight"] = torch.cat([each.weight for each in modules]).detach().numpy()
        biases = [torch.zeros(len(each.weight)) if each.bias is None else each.bias for each in modules]
        found[f"{name}/bias"] = torch.cat(biases).detach().numpy()

    def norm(name, module):
        found[f"{name}/gamma"], found[f"{name}/beta"] = (t.detach().numpy() for t in (module.weight, module.bias))

    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = parts[side].embed_positions.weight.detach().numpy()
        norm(f"{side}/layer_norm", parts[side].layer_norm)
        for i, layer in enumerate(parts[side].layers):
            own, here = layer.self_attn, f"{side}/layer_{i}"
            norm(f"{here}/self_attention/layer_norm", layer.self_attn_layer_norm)
            put(f"{here}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            put(f"{here}/self_attention/linear_1", own.out_proj)
            norm(f"{here}/ffn/layer_norm", layer.final_layer_norm)
            put(f"{here}/ffn/linear_0", layer.fc1)
            put(f"{here}/ffn/linear_1", layer.fc2)
            if side == "decoder":
                cross = layer.encoder_attn
                norm(f"{here}/attention/layer_norm", layer.encoder_attn_layer_norm)
                put(f"{here}/attention/linear_0", cross.q_proj)
                put(f"{here}/attention/linear_1", cross.k_proj, cross.v_proj)
                put(f"{here}/attention/linear_2", cross.out_proj)
    for i in (1, 2):
        put(f"encoder/conv{i}", parts[f"encoder.conv{i}"])
    found["decoder/embeddings/weight"] = parts["decoder"].embed_tokens.weight.detach().numpy()
    return found


@pytest.fixture(scope="module")
def whisper():
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES, **IDS)).eval()
    with torch.no_grad():  # a bias of zero would not show where it goes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


@pytest.mark.parametrize(("stored", "error"), [(np.float32, 0), (np.float16, 2e-2)])
def test_the_same_model(whisper, tmp_path, stored, error):
    variables = {name: value.astype(stored) if value.dtype == np.float32 else value
                 for name, value in variables_of(whisper).items()}
    (tmp_path / "model.bin").write_bytes(written(variables))
    sizes, state = ctranslate2.whisper(*ctranslate2.read(tmp_path / "model.bin"))
    assert sizes == SIZES
    again = WhisperForConditionalGeneration(WhisperConfig(**sizes, **IDS)).eval()
    again.load_state_dict(state)
    heard, asked = torch.randn(1, 8, 24), torch.tensor([[1, 7, 4]])
    with torch.no_grad():
        expected, found = (each(input_features=heard, decoder_input_ids=asked).logits for each in (whisper, again))
    assert float((found - expected).abs().max()) <= error


CHANGES = {
    "of version 5": (lambda v: written(v, version=5), "version 5 of CTranslate2's format, not 6"),
    "another kind": (lambda v: written(v, kind="TransformerSpec"), "TransformerSpec"),
    "rounded": (lambda v: written(v | {"encoder/conv1/weight": np.ones((16, 8, 3), np.int8)}), "int8"),
    "one less": (lambda v: written({n: x for n, x in v.items() if n != "encoder/num_heads"}), "encoder/num_heads"),
    "a stranger": (lambda v: written(v | {"encoder/layer_0/adapter/weight": np.ones((2, 2), np.float32)}), "adapter"),
    "half": (lambda v: written(v)[:5000], "no whole file"),
    "empty": (lambda v: b"", "no whole file"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refused_in_one_line(whisper, tmp_path, change):
    write, said = CHANGES[change]
    (tmp_path / "model.bin").write_bytes(write(variables_of(whisper)))
    with pytest.raises(DataError, match=said) as caught:
        ctranslate2.whisper(*ctranslate2.read(tmp_path / "model.bin"))
    assert "\n" not in str(caught.value)
