"""Weights of DINOv2 in ONNX: written here as an exporter names them, read by the package, run by timm."""

import re

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close
from transformers import Dinov2Config, Dinov2Model

from crt_exp.data import DataError
from crt_exp.pretrained import onnx
from crt_exp.pretrained.convert import convert
from crt_exp.pretrained.published import Member, Published

WIDTH, DEPTH, HEADS, PATCH, SIDE = 16, 2, 2, 4, 3
EARLIER = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value",
           "o_proj": "output.dense"}                     # of transformers, when the file was exported
BEFORE = re.compile("|".join(EARLIER))
MODEL = Published("models/tiny", "", "tiny", "1.0", "onnx", "vit_small_patch14_dinov2", "MIT", "", "", "a ViT",
                  (Member("m.onnx", "model.onnx", 0, ""),))


def varint(value):
    more = bytearray()
    while value > 127:
        more.append(value & 127 | 128)
        value >>= 7
    return bytes([*more, value])


def field(number, value):
    """A number, or what is as long as it says."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def tensor(name, value, packed=False, kind=1):
    dims = [field(1, b"".join(map(varint, value.shape)))] if packed else [field(1, size) for size in value.shape]
    return field(5, b"".join([*dims, field(2, kind), field(8, name.encode()),
                              field(9, np.ascontiguousarray(value, "<f4").tobytes())]))


def node(name, *given):
    return field(1, b"".join([*(field(1, each.encode()) for each in given), field(2, b"out"), field(3, name.encode())]))


def exported(model):
    """The bytes of a file: matrices transposed and numbered, places apart, numbers of another type among them."""
    state = {BEFORE.sub(lambda found: EARLIER[found[0]], name): value.detach().numpy()
             for name, value in model.named_parameters() if "mask_token" not in name}
    places = state.pop("embeddings.position_embeddings")
    parts = [node("/backbone/embeddings/Concat", "onnx::Concat_1"), tensor("onnx::Concat_1", places[:, :1]),
             tensor("onnx::Reshape_2", places[:, 1:], packed=True), tensor("steps", np.ones(2), kind=7)]
    for i, (name, value) in enumerate(state.items()):
        if name.endswith(".weight") and value.ndim == 2:
            number, layer = f"onnx::MatMul_{i + 10}", re.sub(r"\.(?!\d)", "/", name.removesuffix(".weight"))
            parts += [tensor(number, value.T), node(f"/backbone/{layer}/MatMul", "states", number)]
        else:
            parts.append(tensor(f"backbone.{name}", value))
    return field(1, 7) + field(2, b"pytorch") + field(7, b"".join(parts))


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"WIDTH": WIDTH, "DEPTH": DEPTH, "PATCH": PATCH, "SIDE": SIDE}.items():
        monkeypatch.setattr(onnx, name, value)
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
                                     patch_size=PATCH, image_size=PATCH * SIDE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def test_timm_computes_what_transformers_does(tiny, tmp_path):
    (tmp_path / "model.onnx").write_bytes(exported(tiny))
    config, state = onnx.dinov2(onnx.read(tmp_path / "model.onnx"), "vit_small_patch14_dinov2")
    vit = VisionTransformer(img_size=PATCH * SIDE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
                            init_values=1.0, num_classes=0, global_pool="").eval()
    vit.load_state_dict(state)
    images = torch.randn(2, 3, PATCH * SIDE, PATCH * SIDE)
    assert_close(vit(images), tiny(images).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert config["pretrained_cfg"]["input_size"] == [3, 12, 12]


def test_another_file_is_refused(tiny, tmp_path):
    """One that ends early, is none, or holds another model."""
    whole, path = exported(tiny), tmp_path / "model.onnx"
    for content in (whole[:-9], b"", b"\x80", field(1, 7), b"<html>", field(7, field(5, field(1, 3) + field(2, 1)))):
        path.write_bytes(content)
        with pytest.raises(DataError, match="^models/tiny: .*(no whole file of ONNX|lacks)") as caught:
            convert(MODEL, tmp_path, tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    path.write_bytes(whole.replace(b"layer_scale2", b"layer_scale9"))
    with pytest.raises(DataError, match="it lacks 'backbone.encoder.layer.0.layer_scale2.lambda1': no small DINOv2"):
        convert(MODEL, tmp_path, tmp_path)
