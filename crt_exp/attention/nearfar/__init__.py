"""Near-far attention: near and heavy keys exactly, all others by cells, in one softmax, in linear time."""

from crt_exp.attention.nearfar.call import Result, near_far_attention
from crt_exp.attention.nearfar.layer import PRESETS, NearFar

__all__ = ["PRESETS", "NearFar", "Result", "near_far_attention"]
