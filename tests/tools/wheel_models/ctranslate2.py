"""Whisper's weights in the format of CTranslate2, version 6, with the names that transformers gives them.

A file is a list of variables: name, dimensions, type, bytes. A string is its length in two bytes, then its characters
and a zero byte; numbers are little-endian.
"""

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from crt_exp.experiments.data import DataError

VERSION = 6
TYPES = {
    0: "<f4",
    1: "i1",
    2: "<i2",
    3: "<i4",
    4: "<f2",
}
LAYER = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
FUSED = {
    "self_attention/linear_0": ("self_attn", "qkv"),
    "attention/linear_1": ("encoder_attn", "kv"),
}
ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
OUTER = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The kind of model, such as "WhisperSpec", and its variables. Raises DataError for another version, and for a
    file that ends too early."""
    try:
        with open(path, "rb") as stream:
            version = _number(stream, "<I")
            if version != VERSION:
                raise DataError(
                    f"{path.name} is of version {version} of CTranslate2's format, not {VERSION}"
                )
            kind = _string(stream)
            _ = _number(stream, "<I")
            count = _number(stream, "<I")
            return kind, dict(_variable(stream) for _ in range(count))
    except (struct.error, ValueError, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"{path.name} is no whole file of CTranslate2 ({error})") from None


def _number(stream: BinaryIO, form: str) -> int:
    return struct.unpack(form, stream.read(struct.calcsize(form)))[0]


def _string(stream: BinaryIO) -> str:
    return stream.read(_number(stream, "<H")).rstrip(b"\0").decode()


def _variable(stream: BinaryIO) -> tuple[str, np.ndarray]:
    name = _string(stream)
    rank = _number(stream, "<B")
    shape = [_number(stream, "<I") for _ in range(rank)]
    kind = TYPES[_number(stream, "<B")]
    size = _number(stream, "<I")
    return name, np.frombuffer(stream.read(size), kind).reshape(shape)


def whisper(
    kind: str, variables: dict[str, np.ndarray]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes, as WhisperConfig calls them, and weights in float32, as WhisperForConditionalGeneration does.
    Raises DataError for another kind of model, and for weights that are rounded to whole numbers."""
    if kind != "WhisperSpec":
        raise DataError(f"it is a {kind} of CTranslate2; this reader takes a WhisperSpec")
    weights = {}
    for name, value in variables.items():
        if value.ndim and not name.endswith("alignment_heads"):
            weights[name] = value
    if odd := next((name for name, value in weights.items() if value.dtype.kind != "f"), None):
        raise DataError(
            f"its weights are {weights[odd].dtype} ({odd}); this reader takes float16 or float32"
        )
    try:
        return _sizes(variables), _state(weights)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"it lacks {error}, or has other variables than a Whisper model") from None


def _sizes(variables: dict[str, np.ndarray]) -> dict[str, int]:
    width, mels, _ = variables["encoder/conv1/weight"].shape
    sizes = {
        "d_model": width,
        "num_mel_bins": mels,
        "vocab_size": len(variables["decoder/embeddings/weight"]),
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
    }
    for part in ("encoder", "decoder"):
        sizes |= {
            f"{part}_layers": len(
                {
                    name.split("/")[1]
                    for name in variables
                    if name.startswith(f"{part}/layer_") and name.split("/")[1] != "layer_norm"
                }
            ),
            f"{part}_attention_heads": int(variables[f"{part}/num_heads"]),
            f"{part}_ffn_dim": len(variables[f"{part}/layer_0/ffn/linear_0/weight"]),
        }
    return sizes


def _state(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    state = {}
    for name, value in weights.items():
        tensor = torch.from_numpy(value.astype(np.float32))
        for place, part in _named(name, tensor):
            state[f"model.{place}"] = part.contiguous()
    return state | {"proj_out.weight": state["model.decoder.embed_tokens.weight"]}


def _named(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """One variable by the names of transformers; queries, keys and values in one are three. Keys have no bias there:
    softmax does not see it."""
    part, *middle, end = name.split("/")
    end = ENDS.get(end, end)
    if not middle or not middle[0].startswith("layer_") or middle[0] == "layer_norm":
        inner = end
        if middle:
            inner = OUTER.get(middle[0], middle[0])
        return [(f"{part}.{inner}.{end}", tensor)]
    layer = f"{part}.layers.{middle[0].removeprefix('layer_')}"
    inner = "/".join(middle[1:])
    if inner not in FUSED:
        return [(f"{layer}.{LAYER[inner]}.{end}", tensor)]
    attention, letters = FUSED[inner]
    pieces = zip(letters, tensor.chunk(len(letters)))
    return [
        (f"{layer}.{attention}.{letter}_proj.{end}", piece)
        for letter, piece in pieces
        if letter + end != "kbias"
    ]
