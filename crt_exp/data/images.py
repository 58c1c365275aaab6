"""Images by class: folders in the official layout, and scikit-learn's digits where no folder is named.

A folder holds train/<class>/ and val/<class>/ with the images anywhere below each class, as ImageNet, Imagenette and
the original tiny-imagenet (train/<class>/images/) have them, or folders whose names mean these, such as training_set/
and test_set/; or <class>/ alone, which is divided here. Files are listed at once and read when a row is asked for.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from crt_exp.data import DataError, check_regular
from crt_exp.data.cache import warn
from crt_exp.data.endings import Sieve, hidden
from crt_exp.data.endings import images as endings
from crt_exp.data.sources import SOURCES, task_folder
from crt_exp.data.split_names import meant, split_folders

SPLITS = ("train", "val")
DIGITS = "digits"
SHARE = 0.2                                                  # of a folder without splits is held out
DIGITS_VAL = 360                                             # of 1797


class Unreadable(DataError):
    """A file that is no image, or not a whole one; the message names it."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a split. `read(sources[i])` is image i in RGB, a PIL.Image; it raises Unreadable."""

    classes: tuple[str, ...]
    labels: np.ndarray                                       # (n,) int64: places in `classes`
    sources: Sequence[Any]                                   # (n,): paths below the folder, or pixels
    read: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> "Images":
        return replace(self, labels=self.labels[rows], sources=self.sources[rows])

    def held_out(self, share: float) -> tuple["Images", "Images"]:
        """What is left, and `share` of each class, drawn once and for all. Raises DataError where one is empty."""
        rng, chosen = np.random.default_rng(0), np.zeros(len(self), bool)
        for label in range(len(self.classes)):
            rows = rng.permutation(np.flatnonzero(self.labels == label))
            chosen[rows[:round(share * len(rows))]] = True
        if chosen.all() or not chosen.any():
            raise DataError(f"A share of {share} of {len(self)} images in {len(self.classes)} classes leaves "
                            f"{'none to train on' if chosen.all() else 'none to hold out'}: choose another.")
        return self.take(np.flatnonzero(~chosen)), self.take(np.flatnonzero(chosen))


def load(dataset: str = DIGITS, data_dir: str | Path | None = None) -> dict[str, Images]:
    """The splits "train" and "val" of a folder, or of the embedded digits.

    dataset: "digits", or a name below $CRT_DATA/images. data_dir: the folder itself, whatever its name. Raises
    DataError for folders that are not there or whose classes are empty or differ.
    """
    if dataset == DIGITS and data_dir is None:
        return digits()
    root = task_folder(f"images/{dataset}", data_dir)
    if root is None or not root.is_dir():
        raise missing(dataset, root)
    if not (folders := layout(root)):
        return divided(root)
    files_of = {split: listed(root / folders[split]) for split in SPLITS}
    train, val = (set(files_of[split]) for split in SPLITS)
    if train != val:
        only = [words for words in (differing(train - val, folders["train"]), differing(val - train, folders["val"]))
                if words]
        raise DataError(f"{root}: {' and '.join(f'{folders[split]}/' for split in SPLITS)} hold different classes: "
                        f"{', '.join(only)}.\nPut the same class folders into both.")
    return {split: images_in(root, folders[split], files) for split, files in files_of.items()}


def divided(root: Path) -> dict[str, Images]:
    """Of <class>/ alone: SHARE of each class, drawn once and for all, is val."""
    every = images_in(root, ".", listed(root))
    warn("%s has no train/ and val/: a fifth of the images of each class is held out as val", root)
    return dict(zip(SPLITS, every.held_out(SHARE)))


def differing(names: set[str], split: str) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"only {split}/ has {', '.join(sorted(names)[:3])}{more}" if names else ""


def missing(dataset: str, root: Path | None) -> DataError:
    """The error for a folder that is not there: what to get, and where to put it."""
    what = f"{root} is not there" if root else "CRT_DATA is not set"
    source = SOURCES.get(f"images/{dataset}")
    get = f"Get it from {source.page}" if source else "Take images of your own"
    if source and source.files[0].url:
        get = f"Get it with `python -m crt_exp.data fetch {source.name} --dir DIR`, or from {source.page}"
    return DataError(f"task.dataset={dataset} needs a folder of images: {what}.\n"
                     f"{get}; put it into {root or f'DIR/images/{dataset}'} as train/<class>/ and val/<class>/,\n"
                     "then set CRT_DATA=DIR, or task.data_dir to the folder itself. "
                     f"task.dataset={DIGITS} is embedded and needs none.")


# --------------------------------------------------------------------------------------------------- folders
def layout(root: Path) -> dict[str, str]:
    """The folders of "train" and "val", by their names; empty where none lies there. Says which where they are called
    otherwise. Raises DataError, saying what lies there, where one is missing or several mean the same."""
    names = folders_in(root)
    if not set(SPLITS) <= set(names):
        named = named_splits(root, names)
    else:
        named = dict(zip(SPLITS, SPLITS))
    return {split: innermost(root, name) for split, name in named.items()}


def named_splits(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Where there is no val but a test, that is it: val is the split that is tested."""
    found = split_folders(names)
    if not found:
        return {}
    split_of = {"train": "train", "val": "val" if "val" in found else "test"}
    if doubled := [found[split] for split in split_of.values() if len(found.get(split, ())) > 1]:
        raise not_splits(root, names, f"{slashed(doubled[0])} mean the same split")
    if gone := [split for split in SPLITS if split_of[split] not in found]:
        raise not_splits(root, names, f"{slashed(*found.values())} name{'s' if len(found) == 1 else ''} a split, and "
                                      f"{root / gone[0]} is not there")
    named = {split: found[own][0] for split, own in split_of.items()}
    others = sorted(set(names) - set(named.values()))
    warn("%s: %s is read as train and %s as val%s", root, *(f"{name}/" for name in named.values()),
         f"; {slashed(others)} {'are' if others[1:] else 'is'} not read" if others else "")
    return named


def not_splits(root: Path, names: Sequence[str], reason: str) -> DataError:
    return DataError(f"{root} holds {slashed(names)}: {reason}.\nPut the images into train/<class>/ and val/<class>/; "
                     "a class whose name means a split can be read there alone.")


def slashed(*names: Sequence[str]) -> str:
    """The first names of folders, as one reads them."""
    every = [f"{name}/" for listed in names for name in listed]
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


def innermost(root: Path, name: str) -> str:
    """Archives hold seg_train/seg_train/<class>: a folder with nothing but one of its own split is looked into."""
    inside = folders_in(root / name)
    if len(inside) == 1 and (own := meant(inside[0])) and own.split == meant(Path(name).name).split:
        return innermost(root, f"{name}/{inside[0]}")
    return name


def folders_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not hidden(entry.name))


def listed(folder: Path) -> dict[str, list[str]]:
    """Image files of each class folder, as sorted paths below it. Raises DataError for a class without any."""
    classes, sieve = folders_in(folder), Sieve(endings())
    if odd := [name for name in classes if readable(name) != name]:
        raise DataError(f"{folder}: the name of the class folder {readable(odd[0])!r} is not UTF-8: rename it")
    if not classes:
        raise DataError(f"{folder} holds no class folders: images lie in {folder.name}/<class>/.")
    files_of = {name: sorted(below(folder / name, sieve)) for name in classes}
    sieve.tell(folder)
    check_classes(folder, files_of)
    empty = [name for name, files in files_of.items() if not files]
    if empty:
        more = f", and {len(empty) - 1} more class folders hold none" if empty[1:] else ""
        raise DataError(f"{folder / empty[0]} holds no image ({' '.join(endings())}){more}. Fill it, or remove it from "
                        "train/ and val/.")
    return files_of


def check_classes(folder: Path, files_of: dict[str, list[str]]) -> None:
    """Raises DataError for classes that hold splits, as <class>/train/ and a folder around the whole set do."""
    for name, files in files_of.items():
        inside = {path.split("/", 1)[0] for path in files if "/" in path}
        if splits := split_folders(inside):
            raise not_splits(folder, [*files_of], f"{name}/ would be a class, and {slashed(*splits.values())} in it "
                                                  "name splits; where the set lies in it, name that folder")


def image_files(folder: Path) -> list[str]:
    """The images below a folder, as sorted paths below it; says in a line what else lies there."""
    sieve = Sieve(endings())
    files = sorted(below(folder, sieve))
    sieve.tell(folder)
    return files


def below(folder: Path, sieve: Sieve, prefix: str = "", above: frozenset = frozenset()) -> Iterator[str]:
    """Files that a sieve takes, below a folder, hidden ones apart. Raises DataError for a link to a folder above it."""
    status = os.stat(folder)
    place = status.st_dev, status.st_ino
    if place in above:
        raise DataError(f"{readable(str(folder))} is, or lies behind, a link to a folder above it: remove the link")
    for entry in os.scandir(folder):
        if entry.is_dir() and not hidden(entry.name):
            yield from below(Path(entry.path), sieve, f"{prefix}{entry.name}/", above | {place})
        elif sieve.takes(entry.name):
            yield prefix + entry.name


def readable(name: str) -> str:
    """The name of a file, with marks in place of bytes that are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def images_in(root: Path, split: str, files: dict[str, list[str]]) -> Images:
    paths = [os.fsencode(f"{split}/{name}/{path}") for name, names in files.items() for path in names]
    labels = np.repeat(np.arange(len(files)), [len(names) for names in files.values()])
    paths = np.array(paths)                                  # of bytes: a million in 50 MB
    return Images(tuple(files), labels, paths, partial(read_file, str(root)))


def read_file(folder: str, path: bytes) -> Any:
    """The image in RGB. Raises Unreadable, naming the file."""
    return read(os.path.join(folder, os.fsdecode(path)))


def read(source: str | Path | bytes, name: str = "") -> Any:
    """A file, or its content, as a PIL.Image in RGB, turned as its EXIF orientation says: one-channel, palette and CMYK
    images are converted.

    name: what the message calls it, by default the path. Raises Unreadable.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = name or readable(str(source))
    try:
        if not isinstance(source, bytes):
            check_regular(source, least=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
                image.load()
                with suppress(Exception):                    # damaged EXIF names no orientation
                    ImageOps.exif_transpose(image, in_place=True)
                return in_rgb(image)
    except Exception as error:  # each format's decoder raises its own
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "no image" if unknown else str(error).strip() or type(error).__name__
        raise Unreadable(f"{name} cannot be read as an image: {reason}.") from None


def in_rgb(image: Any) -> Any:
    """Eight bits a channel; transparency is dropped. Raises ValueError for whole numbers of 32 bits and fractions."""
    from PIL import Image

    if image.mode.startswith("I;16"):                        # convert() would clip all above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, without a scale; store 8 or 16 bits a channel")
    if image.mode in ("P", "LA", "PA"):
        image = image.convert("RGBA")
    return image.convert("RGB")


def problems(root: Path) -> list[str]:
    """What is wrong with a folder: its classes, or each file that cannot be read."""
    try:
        splits = load("images", root)
    except DataError as error:
        return [str(error)]
    result = []
    for images in splits.values():
        for source in images.sources:
            try:
                images.read(source)
            except Unreadable as error:
                result.append(str(error))
    return result


# ---------------------------------------------------------------------------------------------------- digits
def digits() -> dict[str, Images]:
    """scikit-learn's 1797 handwritten digits of 8 x 8 pixels, in a fixed split."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    pixels = (loaded.images * (255 / 16)).round().astype(np.uint8)
    names = tuple(str(name) for name in loaded.target_names)
    whole = Images(names, loaded.target.astype(np.int64), pixels, from_pixels)
    return {"train": whole.take(order[DIGITS_VAL:]), "val": whole.take(order[:DIGITS_VAL])}


def from_pixels(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels).convert("RGB")
