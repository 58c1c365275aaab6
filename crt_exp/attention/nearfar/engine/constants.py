"""The numbers of constants.h, which the C sources share."""

import re
from pathlib import Path

_TEXT = Path(__file__).with_suffix(".h").read_text()
_NUMBERS = dict(re.findall(r"^#define (\w+) +\(?([-+.e\d]+)", _TEXT, re.MULTILINE))

WHOLE = "PICKS", "LEAF", "GROWN", "TURNS", "SAMPLED", "LOOKED", "SHARE", "RENEWED", "PART"
PICKS, LEAF, GROWN, TURNS, SAMPLED, LOOKED, SHARE, RENEWED, PART = (int(_NUMBERS[name]) for name in WHOLE)
REAL = "RIDGE", "LEAST", "HIDDEN", "SPREADS", "AWAY", "STEEPEST"
RIDGE, LEAST, HIDDEN, SPREADS, AWAY, STEEPEST = (float(_NUMBERS[name]) for name in REAL)
