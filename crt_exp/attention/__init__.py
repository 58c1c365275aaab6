"""Attention in linear time: `attention`, its materialised twin `attention_reference`, and exact `softmax_attention`."""

from crt_exp.attention.call import attention, partial_attention
from crt_exp.attention.decoding import DecodingState
from crt_exp.attention.generalized import Generalized, Linformer, exact_attention, identity_attention, uniform_attention
from crt_exp.attention.layer import Baseline, RandomFeatureAttention, exact, identity, linformer
from crt_exp.attention.partials import DenominatorCount, Partial, finish, merge, softmax_partial
from crt_exp.attention.reference import attention_reference, softmax_attention

__all__ = ["Baseline", "DecodingState", "DenominatorCount", "Generalized", "Linformer", "Partial", "RandomFeatureAttention",
           "attention", "attention_reference", "exact", "exact_attention", "finish", "identity", "identity_attention",
           "linformer", "merge", "partial_attention", "softmax_attention", "softmax_partial", "uniform_attention"]
