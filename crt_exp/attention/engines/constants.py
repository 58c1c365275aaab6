"""The numbers of constants.h, which the C sources share."""

import re
from pathlib import Path


def numbers(header: Path) -> dict[str, str]:
    """The value of each number that a C header defines, as it is written there without a suffix."""
    return dict(re.findall(r"^#define (\w+) +\(?([-+.e\d]+)", header.read_text(), re.MULTILINE))


_NUMBERS = numbers(Path(__file__).with_suffix(".h"))
CHUNK = int(_NUMBERS["CHUNK"])
NOT_FINITE, BAD_DIRECTIONS, NO_MEMORY = (
    int(_NUMBERS[name]) for name in ("NOT_FINITE", "BAD_DIRECTIONS", "NO_MEMORY"))
TINY = float(_NUMBERS["TINY"])
