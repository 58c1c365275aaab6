"""Weights out of a file of ONNX, with the names that timm gives those of DINOv2's ViT.

A file is protobuf: fields of a number and a wire type, a message within a message. Weights are the graph's
initializers. An exporter keeps the names of those that it did not change; matrices of linear layers it transposes and
calls by a number, and the node that multiplies by one says whose it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp.experiments.data import DataError

GRAPH = 7
NODE = 1
INITIALIZER = 5  # fields of a model and of its graph
INPUT = 1
NODE_NAME = 3  # of a node
DIMS = 1
TYPE = 2
TENSOR_NAME = 8
RAW = 9  # of a tensor
VARINT = 0
EIGHT = 1
BYTES = 2
FOUR = 5  # wire types
FLOAT = 1  # the type of a tensor of float32
MATRIX = "/MatMul"  # ends the name of a linear layer's node
DEPTH = 12
WIDTH = 384
PATCH = 14
SIDE = 37  # of the small one; patches of 14 pixels, 37 a side
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)  # of ImageNet
LAYER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


class Graph(NamedTuple):
    """weights: initializer -> its numbers; users: initializer -> the name of the last node that reads it."""

    weights: dict[str, np.ndarray]
    users: dict[str, str]


def read(path: Path) -> Graph:
    """The float32 initializers of a file. Raises DataError for a file that is no whole ONNX model."""
    try:
        graph = next(
            value for number, value in fields(memoryview(path.read_bytes())) if number == GRAPH
        )
        weights = {}
        users = {}
        for number, value in fields(graph):
            if number == INITIALIZER:
                weights |= tensor(value)
            elif number == NODE:
                given = [*fields(value)]
                users |= {
                    bytes(each).decode(): bytes(name).decode()
                    for field, each in given
                    if field == INPUT
                    for other, name in given
                    if other == NODE_NAME
                }
        return Graph(weights, users)
    except (StopIteration, IndexError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path.name} is no whole file of ONNX ({error or 'it has no graph'})"
        ) from None


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: whole numbers, and the bytes of all others. Raises IndexError where
    it ends too early, ValueError for another wire type."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        wire = key & 7
        if wire == VARINT:
            value, at = varint(message, at)
        else:
            size, at = varint(message, at) if wire == BYTES else ({EIGHT: 8, FOUR: 4}.get(wire), at)
            if size is None or at + size > len(message):
                raise ValueError(f"a field of wire type {wire} at byte {at}")
            value = message[at : at + size]
            at = at + size
        yield key >> 3, value


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 127) << shift
        shift = shift + 7
        at = at + 1
        if message[at - 1] < 128:
            return value, at


def tensor(message: memoryview) -> dict[str, np.ndarray]:
    """{name: numbers} of one of float32 whose numbers lie together; else nothing."""
    given = [*fields(message)]
    facts = dict(given)
    if facts.get(TYPE) != FLOAT or RAW not in facts:
        return {}
    shape = []
    for number, value in given:
        if number == DIMS:
            for size in sizes(value):
                shape.append(size)
    return {bytes(facts[TENSOR_NAME]).decode(): np.frombuffer(facts[RAW], "<f4").reshape(shape)}


def sizes(value: int | memoryview) -> list[int]:
    """Of one field of `dims`: a number, or several packed together."""
    if isinstance(value, int):
        return [value]
    actual = []
    at = 0
    while at < len(value):
        size, at = varint(value, at)
        actual.append(size)
    return actual


# ---- DINOv2


def dinov2(graph: Graph, architecture: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """timm's config.json for its model of that name, and the weights, of a file that transformers' Dinov2Model was
    exported to, whatever stands behind it there. Raises DataError for another model."""
    actual = named(graph)
    try:
        state = outer(actual, graph) | {
            f"blocks.{i}.{name}": value
            for i in range(DEPTH)
            for name, value in layer(actual, f"backbone.encoder.layer.{i}.").items()
        }
    except KeyError as error:
        raise DataError(f"it lacks {error}: no small DINOv2 that transformers had") from None
    return written(architecture), {name: torch.tensor(value) for name, value in state.items()}


def written(architecture: str) -> dict[str, Any]:
    """config.json as timm writes it."""
    size = [3, PATCH * SIDE, PATCH * SIDE]
    cfg = {
        "input_size": size,
        "fixed_input_size": True,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "num_classes": 0,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    return {"architecture": architecture, "num_classes": 0, "pretrained_cfg": cfg}


def named(graph: Graph) -> dict[str, np.ndarray]:
    """Weights by the names of transformers, matrices among them."""
    matrices = {}
    for name, value in graph.weights.items():
        if graph.users.get(name, "").endswith(MATRIX):
            matrices[
                graph.users[name].removesuffix(MATRIX).strip("/").replace("/", ".") + ".weight"
            ] = value.T
    return graph.weights | matrices


def outer(found: dict[str, np.ndarray], graph: Graph) -> dict[str, np.ndarray]:
    """What stands before and behind the layers. The places of patches are resized in the graph, so that they and that
    of the class are constants of their own, told by their shapes."""
    shapes = {}
    for name, value in graph.weights.items():
        if name != "backbone.embeddings.cls_token":
            shapes[value.shape] = value
    places = []
    for count in (1, SIDE**2):
        places.append(shapes[1, count, WIDTH])
    state = {
        "cls_token": found["backbone.embeddings.cls_token"],
        "pos_embed": np.concatenate(places, 1),
    }
    for ours, theirs in (
        ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        ("norm", "layernorm"),
    ):
        state |= {f"{ours}.{end}": found[f"backbone.{theirs}.{end}"] for end in ("weight", "bias")}
    return state


def layer(found: dict[str, np.ndarray], at: str) -> dict[str, np.ndarray]:
    state = {f"ls{i}.gamma": found[f"{at}layer_scale{i}.lambda1"] for i in (1, 2)}
    for end in ("weight", "bias"):
        state[f"attn.qkv.{end}"] = np.concatenate(
            [found[f"{at}attention.attention.{part}.{end}"] for part in ("query", "key", "value")]
        )
        state |= {f"{ours}.{end}": found[f"{at}{theirs}.{end}"] for theirs, ours in LAYER.items()}
    return state
