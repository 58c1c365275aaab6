"""Near-far attention: near and heavy keys exactly, all others by cells, in one softmax.

In both directions its time is linear in the length. A call that opens keys, by default each causal one, looks at all of
them, in 8 bits: the square of the length, by a small constant. Causal without opened keys (preset bounded) time is
linear, memory constant.
"""

from crt_exp.nearfar.call import Result, Stated, near_far_attention, stated
from crt_exp.nearfar.layer import PRESETS, NearFar

__all__ = ["PRESETS", "NearFar", "Result", "Stated", "near_far_attention", "stated"]
