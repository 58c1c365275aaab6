"""A small decoder with tokens, and every attention of conf/attention at a size that its tokens go beyond."""

import copy
from functools import cache

import torch

from crt_exp import calibrate_attention, swap_attention
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices
from helpers import swap_models
from helpers.seeds import seeded

SMALL = {"block": 4, "cells": 6, "heavy": 2}
BELOW = {"exact_until": 64}
BEYOND = {"exact_until": 8}
SIZES = {
    "window": {"block": 4, "first": 2},
    "reformer": {"chunk": 4, "buckets": 4, "hashes": 2},
    "linformer": {"length": 40, "rank": 5},
    "exact": {},
    "uniform": {},
    "identity": {},
    "elu": {},
}
CONTROLS = {
    "exact",
    "identity",
    "linformer",
    "reformer",
    "uniform",
    "window",
}  # that learn nothing from passes


def mechanisms() -> dict[str, tuple[str, dict]]:
    """Their names and options; of near-far attention, one for each way in which it takes keys."""
    small = {}
    for name in choices("attention"):
        if name != "nearfar":
            small[name] = (name, SIZES.get(name, {"m": 8}))
    opened = SMALL | {"open": 5}
    return small | {
        "nearfar below": ("nearfar", opened | BELOW),
        "nearfar beyond": ("nearfar", opened | BEYOND),
    }


def layer(name, options, **sizes):
    return Mechanism.of(name, **options).layer(4, 16, kv_heads=2, **sizes)


def tokens(batch=3, length=30, seed=0):
    return torch.randint(2, 40, (batch, length), generator=seeded(seed))


def llama(dtype=torch.float64, layers=2):
    """Heads of d = 16, which the C engine of near-far reads where they lie, in float32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "max_position_embeddings": 80}
    model = swap_models.llama(**sizes).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.2)
    return model


def swapped(name, options, dtype=torch.float64, layers=2):
    """Calibrated; a copy that may be changed."""
    return copy.deepcopy(calibrated(name, tuple(options.items()), dtype, layers))


@cache
def calibrated(name, options, dtype, layers):
    model = swap_attention(llama(dtype, layers), name, **dict(options))
    if name in CONTROLS:
        return model
    return calibrate_attention(model, [tokens(batch=27, length=80, seed=1)])


def called(model, ids, mask, past=None, start=0):
    """Logits of the tokens from `start` on, with the cache of those before, or alone."""
    places = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"position_ids": places[:, start:]}
    if not mask.all():
        given["attention_mask"] = mask
    return model(ids[:, start:], past_key_values=past, use_cache=past is not None, **given).logits
