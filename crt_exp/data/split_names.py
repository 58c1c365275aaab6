"""Names of folders that mean a split, such as training_set/, TEST/, seg_train/ and val2017/, told from classes.

What a name has beside the word of its split decides: nothing, or words such as "images", makes it a split wherever it
lies. With other words (seg_train, but bullet_train too) it is one beside a folder of the same words and another split
(seg_test), or where all folders beside it name splits.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

WORDS = {"train": ("train", "training", "trn"), "val": ("val", "valid", "validation", "dev", "eval", "evaluation"),
         "test": ("test", "testing", "tst")}
PLAIN = ("", "set", "data", "dataset", "image", "images", "img", "imgs", "photos", "pictures", "files", "folder", "dir",
         "split", "samples", "examples")
SPLIT_OF = {word + more: split for split, words in WORDS.items() for word in words for more in PLAIN}


class Meant(NamedTuple):
    """The split that a name has in it, and its other words."""

    split: str
    others: tuple[str, ...]


def meant(name: str) -> Meant | None:
    """None for a name without the word of a split."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name))
    split = next((SPLIT_OF[word] for word in map(str.lower, words) if word in SPLIT_OF), None)
    others = tuple(word for word in map(str.lower, words) if word not in SPLIT_OF and word not in PLAIN)
    return Meant(split, others) if split else None


def split_folders(names: Iterable[str]) -> dict[str, list[str]]:
    """Split -> the folders, among these that lie side by side, that mean it; empty where none does."""
    known = {name: meant(name) for name in sorted(names)}
    splits = {name: each for name, each in known.items() if each}
    result: dict[str, list[str]] = {}
    for name, each in splits.items():
        beside = {other.split for other in splits.values() if other.others == each.others}
        if not each.others or len(beside) > 1 or len(splits) == len(known):
            result.setdefault(each.split, []).append(name)
    return result
