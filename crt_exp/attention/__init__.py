"""Attention in linear time, a reference implementation and exact baselines."""

from crt_exp.attention.base import LinearAttention
from crt_exp.attention.baselines import (
    Baseline,
    Exact,
    Identity,
    Uniform,
    Window,
    exact_attention,
    identity_attention,
    uniform_attention,
    window_attention,
)
from crt_exp.attention.decoding import DecodingState
from crt_exp.attention.feature_attention import attention, partial_attention
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.attention.partials import DenominatorCount, Partial, finish, merge, softmax_partial
from crt_exp.attention.published_baselines import Generalized, Linformer, Reformer
from crt_exp.attention.reference import attention_reference, softmax_attention

__all__ = [
    "Baseline",
    "DecodingState",
    "DenominatorCount",
    "Exact",
    "Generalized",
    "Identity",
    "LinearAttention",
    "Linformer",
    "Partial",
    "RandomFeatureAttention",
    "Reformer",
    "Uniform",
    "Window",
    "attention",
    "attention_reference",
    "exact_attention",
    "finish",
    "identity_attention",
    "merge",
    "partial_attention",
    "softmax_attention",
    "softmax_partial",
    "uniform_attention",
    "window_attention",
]
