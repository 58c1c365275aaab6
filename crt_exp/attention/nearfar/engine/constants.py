"""The numbers of constants.h, which the C sources share."""

from pathlib import Path

from crt_exp.attention.engines.constants import numbers

_NUMBERS = numbers(Path(__file__).with_suffix(".h"))
PICKS, LEAF, GROWN, TURNS, SAMPLED, LOOKED, SHARE, RENEWED, PART = (
    int(_NUMBERS[name])
    for name in ("PICKS", "LEAF", "GROWN", "TURNS", "SAMPLED", "LOOKED", "SHARE", "RENEWED", "PART"))
RIDGE, LEAST, HIDDEN, SPREADS, AWAY, STEEPEST = (
    float(_NUMBERS[name]) for name in ("RIDGE", "LEAST", "HIDDEN", "SPREADS", "AWAY", "STEEPEST"))
