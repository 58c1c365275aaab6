"""A folder of small images in the official layout, which a model can tell apart."""

import io
import tarfile

import numpy as np
from PIL import Image


def picture(label, number, size=12):
    """Stripes as wide as the class says, in a colour of the class, with noise."""
    rng = np.random.default_rng([label, number])
    bands = np.arange(size)[:, None] // (label + 1)
    stripes = (bands + rng.integers(2)) % 2 * 120
    noise = rng.integers(0, 60, (size, size, 3))
    pixels = stripes[..., None] + noise + 20 * label
    return Image.fromarray(pixels.astype(np.uint8))


def write_images(root, classes=3, train=8, val=4, size=12, inner=""):
    """root/<split>/class<c>/<inner><n>.png; returns root."""
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            folder = root / split / f"class{label}" / inner
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                picture(label, number + 100 * (split == "val"), size).save(folder / f"{number}.png")
    return root


def write_shards(root, shards=2, rows=6, classes=3, size=12):
    """Tar files in WebDataset's layout, root/<split>-<i>.tar; returns the data_files of both splits."""
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        for shard in range(shards):
            with tarfile.open(root / f"{split}-{shard}.tar", "w") as tar:
                for number in range(rows):
                    label = number % classes
                    key = f"{split}{shard:02d}{number:03d}"
                    content = io.BytesIO()
                    picture(label, 50 * shard + number, size).save(content, "PNG")
                    add(tar, f"{key}.png", content.getvalue())
                    add(tar, f"{key}.cls", str(label).encode())
    return {"train": str(root / "train-*.tar"), "validation": str(root / "val-*.tar")}


def add(tar, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
