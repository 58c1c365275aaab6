"""A text that is there without any download: 2200 definitions of WordNet 3.0, one a line, 207 kB of plain English.

They come with the package timm, whose classes of ImageNet are WordNet's nouns. WordNet is (c) 2006 by Princeton
University, which lets anybody use, copy, change and distribute it without fee (wordnet.princeton.edu).
"""

import hashlib
import os
import random
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.data.cache import alone
from crt_exp.atomic_write import whole

NAME = "wordnet"
COUNT = 2200
DIGEST = "8a4e99a1fe7aa0622bb487359b3db2ef7b7abd445e2e90c224823e8932ea6efd"


def wordnet_file() -> Path:
    """The text as a file, written once in $XDG_CACHE_HOME/crt_exp. Raises DataError."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crt_exp" / f"{NAME}.txt"
    try:
        with alone(path.parent):
            if not path.is_file() or digest(path.read_bytes()) != DIGEST:
                text = definitions()
                with whole(path) as part:
                    part.write_bytes(text)
    except OSError as error:
        raise DataError(f"{error}: name a folder in XDG_CACHE_HOME that can be written to, or a text of your own"
                        ) from None
    return path


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def definitions() -> bytes:
    """In an order that is not that of their meaning: any part of the text is like the others."""
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        raise DataError(f"The text {NAME!r} comes with the package timm: pip install -e '.[run]', or name a text file "
                        "of your own.") from None
    lines = random.Random(0).sample(ImageNetInfo("imagenet-22k").label_descriptions(detailed=True), COUNT)
    text = "\n".join([*lines, ""]).encode()
    if digest(text) != DIGEST:
        raise DataError(f"The text {NAME!r} is another one in this timm: install timm 1.0.31, or name a text file of "
                        "your own.")
    return text
