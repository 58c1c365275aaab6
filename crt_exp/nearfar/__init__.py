"""Near-far attention: near and heavy keys exactly, all others by cells, in one softmax.

In both directions its time is linear in the length. A causal call scores all keys of the past in 8 bits: the square
of the length, by a small constant.
"""

from crt_exp.nearfar.call import near_far_attention
from crt_exp.nearfar.layer import PRESETS, NearFar

__all__ = ["PRESETS", "NearFar", "near_far_attention"]
