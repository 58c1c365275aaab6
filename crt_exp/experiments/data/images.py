"""Images by class from folders, the Hugging Face hub or scikit-learn's digits, and single images.

Notation: n images, s pixels of a side, C channels.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.data import DataError, Folder, warn
from crt_exp.experiments.data.files import IMAGES, files_ending, subfolders
from crt_exp.experiments.data.sources import SOURCES, Hub, load_rows, stand_in, task_folder

SPLITS = ("train", "val")
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}
DIGITS = "digits"
STAND_IN = stand_in(
    "ImageNet", "scikit-learn's digits", "dataset=imagenette2-320", "images/imagenette2-320"
)
SHARE = 0.2  # held-out share of a folder without splits
DIGITS_VAL = 360  # of 1797 images
VALUES = 256  # pixel values of a channel


@dataclass(frozen=True, eq=False)
class Images:
    """Images of a split.

    `read(sources[i])` returns image i as a PIL.Image in RGB, or raises DataError.
    """

    classes: tuple[str, ...]
    labels: np.ndarray  # (n,) int64: indices into `classes`
    sources: Sequence[Any]  # (n,): paths, pixels or row numbers
    read: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.labels)

    def names(self, rows: np.ndarray) -> list[str]:
        """Names of images: the path below the folder of the split, or the number."""
        if self.sources.dtype.kind != "S":
            return [str(row) for row in rows]
        folder = os.path.commonpath(self.sources.tolist())
        return [os.fsdecode(os.path.relpath(self.sources[row], folder)) for row in rows]

    def take(self, rows: np.ndarray) -> "Images":
        return replace(self, labels=self.labels[rows], sources=self.sources[rows])

    def held_out(self, share: float) -> tuple["Images", "Images"]:
        """Split off a fixed `share` of each class: (other images, held-out images).

        Raises DataError if one part is empty.
        """
        rng = np.random.default_rng(0)
        chosen = np.zeros(len(self), bool)
        for label in range(len(self.classes)):
            rows = rng.permutation(np.flatnonzero(self.labels == label))
            chosen[rows[: round(share * len(rows))]] = True
        if chosen.all() or not chosen.any():
            purpose = "train on" if chosen.all() else "hold out"
            raise DataError(f"task.held_out={share}: no images left to {purpose} of {len(self)}")
        return self.take(np.flatnonzero(~chosen)), self.take(np.flatnonzero(chosen))


# ---- folders ---------------------------------------------------------------------------------------------------------


def image_folders(dataset: str, data_dir: Folder) -> list[Path | None]:
    """The folder that `load` reads, if any: the digits are embedded."""
    if dataset == DIGITS and data_dir is None:
        return []
    return [task_folder(f"images/{dataset}", data_dir)]


def load(dataset: str = DIGITS, data_dir: Folder = None) -> dict[str, Images]:
    """Splits "train" and "val" of an image folder, or of the embedded digits.

    Args:
        dataset: "digits", or a folder name in $CRT_DATA/images.
        data_dir: the image folder itself. It holds train/<class>/ and val/<class>/. If it holds only <class>/, val is
            a fixed SHARE of each class. Images may lie in subfolders of a class.

    Raises:
        DataError: the folder is missing or has another layout.
    """
    folders = image_folders(dataset, data_dir)
    if not folders:
        return digits()
    (root,) = folders
    if root is None or not root.is_dir():
        raise missing_folder(dataset, root)
    if not all((root / split).is_dir() for split in SPLITS):
        wrong = [name for name in subfolders(root) if name.lower() in SPLIT_NAMES]
        if wrong:
            raise DataError(
                f"{root}: folder {wrong[0]} looks like a split; expected train/<class>/ and "
                "val/<class>/, or <class>/ only; rename it"
            )
        warn("%s: no train/ and val/; using a fifth of the images of each class as val", root)
        return dict(zip(SPLITS, images_in(root).held_out(SHARE)))
    splits = {split: images_in(root / split) for split in SPLITS}
    if different := set(splits["train"].classes) ^ set(splits["val"].classes):
        raise DataError(
            f"{root}: {min(different)} is in only one of train/ and val/; expected the same classes"
        )
    return splits


def images_in(split: Path) -> Images:
    """Images in the class folders of a split.

    Raises DataError for a class without images.
    """
    classes = subfolders(split)
    counts = []
    paths = []
    for name in classes:
        files = files_ending(split / name, IMAGES)
        counts.append(len(files))
        paths += [os.fsencode(file) for file in files]
    if 0 in counts or not counts:
        place = split / classes[counts.index(0)] if counts else f"{split}/<class>"
        raise DataError(
            f"{place}: no images of its own; expected files that end with {' '.join(IMAGES)}"
        )
    labels = np.repeat(np.arange(len(classes)), counts)
    return Images(tuple(classes), labels, np.array(paths), read_image)  # 100 MB for a million


def missing_folder(dataset: str, root: Path | None) -> DataError:
    what = f"{root} is not there" if root else "CRT_DATA is not set"
    get = "take your own"
    if source := SOURCES.get(f"images/{dataset}"):
        get = f"get {source.page} (`python -m crt_exp data fetch {source.name} --dir DIR`)"
    return DataError(
        f"task.dataset={dataset}: {what}: {get} as DIR/images/{dataset}/train/<class>/ and val/<class>/, "
        "and set CRT_DATA=DIR; or set task.data_dir to a folder of images"
    )


def digits() -> dict[str, Images]:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels, in a fixed split."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    pixels = (loaded.images * (255 / 16)).round().astype(np.uint8)
    every = Images(
        tuple(map(str, loaded.target_names)), loaded.target.astype(np.int64), pixels, read_pixels
    )
    return {"train": every.take(order[DIGITS_VAL:]), "val": every.take(order[:DIGITS_VAL])}


# ---- the hub ---------------------------------------------------------------------------------------------------------


class ImageHub(Hub):
    """Splits and columns of a Hugging Face image data set, or of files such as WebDataset shards."""

    split: str
    validation: str
    image: str
    label: str


def load_hub(hub: ImageHub) -> dict[str, Images]:
    """Splits "train" and "val" of a hub set, downloaded once by `datasets`. Raises DataError."""
    from datasets import Image

    splits = {}
    classes: tuple[str, ...] = ()
    for split, name in (("train", hub["split"]), ("val", hub["validation"])):
        rows = load_rows(hub, name, ("image", "label"))
        labels = np.array(rows[hub["label"]])
        names = getattr(rows.features[hub["label"]], "names", None) or map(
            str, range(max(labels) + 1)
        )
        classes = classes or tuple(names)
        if not np.isin(labels, range(len(classes))).all():
            raise DataError(
                f"{hub['name']}, {name}: {hub['label']} is not in 0 to {len(classes) - 1} in some row"
            )
        pictures = rows.select_columns(hub["image"]).cast_column(hub["image"], Image(decode=False))
        read = partial(read_row, pictures, hub["image"])
        splits[split] = Images(classes, labels, np.arange(len(labels)), read)
    return splits


def read_row(rows: Any, column: str, row: int) -> Any:
    """Read an image of a hub set as `read_image` does."""
    stored = rows[int(row)][column]
    if stored["bytes"] is None:
        return read_image(stored["path"])
    return read_image((stored["bytes"], f"image {row}"))


# ---- single images ---------------------------------------------------------------------------------------------------


def read_image(source: str | Path | bytes | tuple[bytes, str]) -> Any:
    """Read an image as a PIL.Image in RGB, upright by its EXIF orientation.

    Transparent pixels become white. source: a path, or the content of a file and its name. Raises DataError.
    """
    from PIL import Image, ImageOps

    if isinstance(source, tuple):
        content, name = source
        file = BytesIO(content)
    else:
        file = name = os.fsdecode(source)
    try:
        with Image.open(file) as image:
            image.load()
            with suppress(Exception):  # damaged EXIF data has no orientation
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):  # convert() would clip values above 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(f"pixel mode {image.mode}; expected 8 bits per channel")
            if image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            return image.convert("RGB")
    except Exception as error:  # decoders differ in their errors
        reason = str(error) or type(error).__name__
        raise DataError(f"{name}: not a readable image ({reason}).") from None


def read_pixels(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels).convert("RGB")


# ---- pixel values ----------------------------------------------------------------------------------------------------


def square_image(images: Images, i: int, side: int, channels: int) -> np.ndarray:
    """Image i cropped and resized by `crop_square`; raises DataError."""
    name = f"image {i}" if images.read is read_pixels else os.fsdecode(images.sources[i])
    return crop_square(images.read(images.sources[i]), side, channels, name)


def crop_square(image: Any, side: int, channels: int, name: str) -> np.ndarray:
    """Central square, averaged down to (side, side, channels) uint8.

    channels: 3, or 1 for grey. Raises DataError, with the image's name, for an image smaller than `side`.
    """
    from PIL import Image

    width, height = image.size
    least = min(width, height)
    if least < side:
        raise DataError(
            f"task.size={side}: {name} has {width} x {height} pixels; use a smaller size"
        )
    left = (width - least) // 2
    top = (height - least) // 2
    mode = "RGB" if channels == 3 else "L"
    image = image.crop((left, top, left + least, top + least)).convert(mode)
    if least != side:
        image = image.resize((side, side), Image.Resampling.BOX)
    return np.asarray(image, np.uint8).reshape(side, side, channels)


def save_grid(pictures: Sequence[np.ndarray], path: Path) -> None:
    """Save pictures (s, s, C) uint8 as a PNG, eight in a row."""
    from torchvision.transforms.functional import to_tensor
    from torchvision.utils import save_image

    with atomic_path(path) as part:
        save_image([to_tensor(picture) for picture in pictures], part, format="png", pad_value=1.0)
