"""Images as sequences of pixel values, row by row, the channels of a pixel one after another.

Legend: n images, s pixels of a side, C channels, L = s^2 C.
"""

import os
from pathlib import Path

import numpy as np

from crt_exp.data import DataError
from crt_exp.data.images import Images
from crt_exp.atomic_write import whole

VALUES = 256


def squared(images: Images, i: int, side: int, channels: int) -> np.ndarray:
    """Image i, its middle square made `side` pixels wide by averaging: (side, side, channels) uint8.

    channels: 3, or 1 for grey values. Raises DataError, naming the file, for an image with fewer pixels, Unreadable for
    what is none.
    """
    image = images.read(images.sources[i])
    return in_square(image, side, channels, name_of(images, i))


def in_square(image, side: int, channels: int, name: str) -> np.ndarray:
    from PIL import Image

    width, height = image.size
    least = min(width, height)
    if least < side:
        raise DataError(f"{name} has {width} x {height} pixels, and {side} x {side} are asked for: choose a smaller "
                        "task.size, or leave it out")
    left, top = (width - least) // 2, (height - least) // 2
    image = image.crop((left, top, left + least, top + least)).convert("RGB" if channels == 3 else "L")
    image = image if least == side else image.resize((side, side), Image.Resampling.BOX)
    return np.asarray(image, np.uint8).reshape(side, side, channels)


def name_of(images: Images, i: int) -> str:
    source = images.sources[i]
    return f"image {i}" if isinstance(source, np.ndarray) else os.fsdecode(source)


def picture(values: np.ndarray):
    """(s, s, C) uint8 as a PIL.Image."""
    from PIL import Image

    return Image.fromarray(values if values.shape[2] == 3 else values[..., 0])


def grid(rows: list[list[np.ndarray]], gap: int = 2) -> np.ndarray:
    """Pictures (s, s, C) side by side in rows, white between them: (height, width, C) uint8."""
    side, channels = rows[0][0].shape[1:]
    step, most = side + gap, max(map(len, rows))
    picture = np.full((len(rows) * step - gap, most * step - gap, channels), VALUES - 1, np.uint8)
    for i, row in enumerate(rows):
        for j, values in enumerate(row):
            picture[i * step:i * step + side, j * step:j * step + side] = values
    return picture


def save(values: np.ndarray, path: Path) -> None:
    """A PNG, whole or not at all."""
    with whole(path) as part:
        picture(values).save(part, "PNG")
