"""Other attention in a pretrained model by one call, and back.

swap: swap_attention's layers, unswap_attention. families: which modules can be swapped, and what is refused.
call: one call of a swapped layer: masks, and the modules of torch and timm. interface, cache: transformers' attention
function and its caches. calibration: calibrate_attention, describe_attention. saved, pretrained: saved swaps and
from_pretrained. bench, advise: losses, time and memory with several methods, and crt_exp.advise.
"""
