"""The numbers of constants.h, which the C sources share."""

from pathlib import Path

from crt_exp.attention.engines.constants import numbers

_NUMBERS = numbers(Path(__file__).with_suffix(".h"))
PICKS, RENEWED, PART, GROWS, DRAWN, MIXED, TURNED, SIGNS, WIDEST = (
    int(_NUMBERS[name])
    for name in ("PICKS", "RENEWED", "PART", "GROWS", "DRAWN", "MIXED", "TURNED", "SIGNS", "WIDEST"))
RIDGE, LEAST, HIDDEN, AWAY, SAME, SHARPEST = (
    float(_NUMBERS[name]) for name in ("RIDGE", "LEAST", "HIDDEN", "AWAY", "SAME", "SHARPEST"))
