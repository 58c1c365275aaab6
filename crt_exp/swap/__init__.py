"""Replace the attention of a pretrained model, and restore it.

- swap: replace and restore attention. families: which modules can be swapped.
- attend: one call of a swapped layer, and its masks. modules: the modules of torch and timm.
- interface, cache: transformers' attention function and its caches.
- calibration: calibrate_attention and describe_attention.
- saved, pretrained: restore saved swapped models, from_pretrained.
"""
