"""Long Range Arena (Tay et al., 2021): five sets of sequence classification.

listops and pathfinder are generated. image: grey pixels of CIFAR-10. text: bytes of IMDB reviews. retrieval: bytes of
two AAN documents; the label states whether one cites the other.

ListOps (Nangia and Bowman, 2018): nested lists of digits with operators. The class of `[MAX 2 9 [MIN 4 7 ] 0 ]` is its
value, 9. MED is the median; for an even number of entries it is the mean of the middle two, rounded down. SM is the sum
modulo 10. A node is a list with probability 1/4 and a digit at the maximum depth. Lists have 2 to `arguments` entries.
Trees have more than `shortest` and fewer than `longest` symbols, and all differ.

Pathfinder (Linsley et al., 2018): pictures of dashed curves with two dots. The label states whether one curve joins
both dots. A dash has `dash` pixels, followed by a gap of `gap` pixels and a turn of at most `turn` radians. Pixels of
different curves have a Chebyshev distance of at least `apart`. This distance exceeds a gap, so that a curve has only
one continuation. Each picture has two long curves and `distractors` short ones. One dot is at an end of the first
curve. The other dot is at its other end (label 1) or at an end of the second curve (label 0). Nothing else depends on
the label.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np
from pydantic import Field

from crt_exp.experiments.data import DataError, Folder, images, numbered_lines
from crt_exp.experiments.data.files import Arrays, cached
from crt_exp.experiments.data.images import square_image
from crt_exp.experiments.data.plan import SPLITS, row_sample
from crt_exp.experiments.data.sources import refuse_data_dir
from crt_exp.registry import ConfigError, read_yaml
from crt_exp.validation import Count, NotNegative, Whole, check_options

Dataset = Literal["listops", "image", "pathfinder", "text", "retrieval"]
HELD_OUT = 0.05  # validation share of train (image, text)
LONGEST = 4000  # bytes of a text in the Long Range Arena
PAGES = {
    "text": "https://ai.stanford.edu/~amaas/data/sentiment",
    "retrieval": "https://github.com/google-research/long-range-arena (lra_release, tsv_data)",
}
LABELS = ("0", "1", "0.0", "1.0")  # labels of retrieval
# pixels of an image side; number of symbols
SIDE = 32
BYTES = 256
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda entries: int(median(entries)),
    "[SM": lambda entries: sum(entries) % 10,
}
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]")
# grey values
LINE = 160
DOT = 255
TRIES = 100_000  # rejected trees in a row before an error
# attempts per curve and per picture
CURVES = 200
PICTURES = 20


class ListopsRules(TypedDict):
    """Examples of each split, and rules of the trees; depth 1 is the root."""

    train: Count
    validation: Count
    test: Count
    shortest: Whole
    longest: Count
    depth: Count
    arguments: Annotated[int, Field(ge=2)]


class PathfinderRules(TypedDict):
    """Examples of each split, and rules of the pictures.

    dashes, short: dashes of a long and of a short curve. distractors: short curves of a picture.
    """

    train: Count
    validation: Count
    test: Count
    size: Count
    dashes: Count
    short: Count
    distractors: Whole
    dash: Count
    gap: Whole
    apart: Count
    turn: NotNegative


RULES = {"listops": ListopsRules, "pathfinder": PathfinderRules}
# of each set, by scale
PRESETS = read_yaml(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True, eq=False)
class Labelled:
    """Rows of symbols with labels.

    rows: (L,) uint8 each; for pairs, rows 2 i and 2 i + 1 belong to example i. labels: (n,) int64.
    """

    rows: Sequence[np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, examples: np.ndarray) -> "Labelled":
        per_example = len(self.rows) // len(self)
        rows = []
        for i in examples:
            rows += self.rows[per_example * i : per_example * (i + 1)]
        return Labelled(rows, self.labels[examples])


class Arena(NamedTuple):
    """One set: splits "train", "validation" and "test".

    Attributes:
        symbols: number of symbols without padding.
        together: rows of an example, 2 for pairs.
    """

    splits: dict[str, Labelled]
    symbols: int
    classes: int
    together: int = 1


def load(
    dataset: Dataset, data_dir: Folder, rules: dict[str, Any], scale: str, cache_dir: Folder
) -> Arena:
    """Read or generate a set.

    Raises:
        DataError: files are missing or malformed.
        ConfigError: the rules are invalid.
    """
    if dataset in PRESETS:
        refuse_data_dir(data_dir, f"task.dataset={dataset}, which is generated")
        symbols, classes = (len(SYMBOLS), 10) if dataset == "listops" else (BYTES, 2)
        return Arena(generate_splits(dataset, rules, scale, cache_dir), symbols, classes)
    if rules:
        raise ConfigError(
            "task.rules: only for the generated task.dataset=listops or pathfinder; remove it"
        )
    if dataset == "image":
        return read_grey_images(data_dir)
    if data_dir is None:
        raise DataError(
            f"task.dataset={dataset}: expected task.data_dir=<folder>; get it from {PAGES[dataset]}"
        )
    folder = Path(data_dir).expanduser()
    if dataset == "text":
        return read_reviews(folder)
    names = zip(SPLITS, ("train", "eval", "test"))
    return Arena(
        {split: read_pairs(folder / f"new_aan_pairs.{name}.tsv") for split, name in names},
        BYTES,
        2,
        together=2,
    )


# ---- generated -------------------------------------------------------------------------------------------------------


def generate_splits(
    dataset: str, changes: dict[str, Any], scale: str, cache_dir: Folder
) -> dict[str, Labelled]:
    """Splits of listops or pathfinder.

    Raises ConfigError for invalid rules, DataError for rules that give too few examples.
    """
    rules = PRESETS[dataset][scale] | changes
    check_options("task.rules", RULES[dataset], rules)
    examples = listops_examples if dataset == "listops" else pathfinder_examples

    def make() -> Arrays:
        rows, labels = examples(rules)
        return {
            "symbols": np.concatenate(rows),
            "ends": np.cumsum([len(row) for row in rows]),
            "labels": np.array(labels, np.int64),
        }

    arrays = cached(cache_dir, make, f"{dataset} 3", rules)
    every = Labelled(np.split(arrays["symbols"], arrays["ends"][:-1]), arrays["labels"])
    ends = np.cumsum([rules[split] for split in SPLITS])
    parts = np.split(np.arange(len(every)), ends[:-1])
    return {split: every.take(part) for split, part in zip(SPLITS, parts)}


def listops_examples(rules: ListopsRules) -> tuple[list[np.ndarray], list[int]]:
    """Distinct ListOps sequences and values; raises DataError if the rules give too few."""
    rng = random.Random(0)
    count = sum(rules[split] for split in SPLITS)
    sequences: dict[tuple[str, ...], None] = {}
    failures = 0  # in a row
    while len(sequences) < count:
        words = tuple(random_tree(rng, rules, 1, rules["longest"] - 1))
        if len(words) > rules["shortest"] and words not in sequences:
            sequences[words] = None
            failures = 0
            continue
        failures += 1
        if failures > TRIES:
            raise DataError(
                f"task.rules: {len(sequences)} different sequences, expected {count}; set a smaller shortest, "
                "a larger longest or depth, or fewer sequences"
            )
    rows = []
    for words in sequences:
        rows.append(np.array([SYMBOLS.index(word) for word in words], np.uint8))
    return rows, [listops_value(words) for words in sequences]


def random_tree(rng: random.Random, rules: ListopsRules, depth: int, room: int) -> list[str]:
    """Symbols of a random tree; empty if the tree has more than `room` symbols."""
    if depth >= rules["depth"] or rng.random() > 0.25:
        return [str(rng.randrange(10))] if room else []
    words = []
    for _ in range(rng.randint(2, rules["arguments"])):
        part = random_tree(rng, rules, depth + 1, room - 2 - len(words))
        if not part:
            return []
        words += part
    if len(words) + 2 > room:
        return []
    return [rng.choice([*OPERATORS]), *words, "]"]


def listops_value(words: Sequence[str]) -> int:
    open_lists: list[tuple[str, list[int]]] = [("", [])]  # operator and entries of each open list
    for word in words:
        if word in OPERATORS:
            open_lists.append((word, []))
        elif word == "]":
            operator, entries = open_lists.pop()
            open_lists[-1][1].append(OPERATORS[operator](entries))
        else:
            open_lists[-1][1].append(int(word))
    return open_lists[0][1][0]


def pathfinder_examples(rules: PathfinderRules) -> tuple[list[np.ndarray], list[int]]:
    """Pathfinder pictures and labels; every second picture of a split has label 1.

    Raises DataError if the curves do not fit into a picture.
    """
    rows = []
    labels = []
    for number, split in enumerate(SPLITS):
        rng = np.random.default_rng([0, number])
        for i in range(rules[split]):
            rows.append(draw_picture(rules, i % 2 == 1, rng).reshape(-1))
            labels.append(i % 2)
    return rows, labels


def draw_picture(rules: PathfinderRules, joined: bool, rng: np.random.Generator) -> np.ndarray:
    """Picture (size, size) uint8: curves, and a dot on each of two ends."""
    attempts = (place_curves(rules, rng) for _ in range(PICTURES))
    curves = next(filter(None, attempts), None)
    if curves is None:
        raise DataError(
            "task.rules: the curves do not fit into an image; set a larger size, or fewer curves"
        )
    image = np.zeros((rules["size"], rules["size"]), np.uint8)
    for curve in curves:
        image[tuple(curve.T)] = LINE
    second_end = curves[0][-1] if joined else curves[1][0]
    for end in (curves[0][0], second_end):
        image[tuple(end)] = DOT
    return image


def place_curves(rules: PathfinderRules, rng: np.random.Generator) -> list[np.ndarray] | None:
    """Pixels (., 2) of each curve from end to end, the two long curves first.

    None: a curve does not fit.
    """
    curves: list[np.ndarray] = []
    for length in (rules["dashes"], rules["dashes"], *[rules["short"]] * rules["distractors"]):
        taken = np.concatenate([np.zeros((0, 2), np.int64), *curves])
        tries = (random_curve(rules, length, taken, rng) for _ in range(CURVES))
        curve = next((curve for curve in tries if curve is not None), None)
        if curve is None:
            return None
        curves.append(curve)
    return curves


def random_curve(
    rules: PathfinderRules, dashes: int, taken: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """Pixels of a random curve of `dashes` dashes.

    None: the curve leaves the picture, or comes too close to a curve.
    """
    position = rng.uniform(0, rules["size"], 2)
    heading = rng.uniform(0, 2 * np.pi)
    steps = np.arange(rules["dash"])[:, None]
    pixels: list[np.ndarray] = []
    for _ in range(dashes):
        ahead = np.array([np.sin(heading), np.cos(heading)])
        dash = np.unique(np.floor(position + steps * ahead).astype(np.int64), axis=0)
        dash = dash[np.argsort((dash - position) @ ahead, kind="stable")]
        others = np.concatenate([taken, *pixels[:-2]])
        near = np.abs(dash[:, None] - others).max(-1) < rules["apart"]
        if dash.min() < 0 or dash.max() >= rules["size"] or near.any():
            return None
        pixels.append(dash)
        position = position + (rules["dash"] + rules["gap"]) * ahead
        heading += rng.uniform(-rules["turn"], rules["turn"])
    return np.concatenate(pixels)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_pairs(path: Path) -> Labelled:
    """Read lines of label, id, id, text, text, separated by tabs. Raises DataError."""
    rows = []
    labels = []
    for number, line in numbered_lines(path):
        label, *cells = line.split("\t")
        if len(cells) != 4 or label not in LABELS or not all(cells[2:]):
            raise DataError(
                f"{path}, line {number}: expected a label (0.0 or 1.0), two ids and two texts, "
                f"separated by tabs; get the file from {PAGES['retrieval']}"
            )
        labels.append(LABELS.index(label) % 2)
        for text in cells[2:]:
            rows.append(np.frombuffer(text.encode(), np.uint8))
    if not rows:
        raise DataError(f"{path}: empty; get the file from {PAGES['retrieval']}")
    return Labelled(rows, np.array(labels, np.int64))


def read_grey_images(data_dir: Folder) -> Arena:
    """CIFAR-10 as grey values of 32 x 32 pixels in raster order; test is val/."""
    loaded = images.load("cifar10", data_dir)
    train, validation = loaded["train"].held_out(HELD_OUT)
    splits = {}
    for split, part in (("train", train), ("validation", validation), ("test", loaded["val"])):
        rows = [square_image(part, i, SIDE, 1).reshape(-1) for i in range(len(part))]
        splits[split] = Labelled(rows, part.labels)
    return Arena(splits, BYTES, len(loaded["train"].classes))


def read_reviews(folder: Path) -> Arena:
    """Read IMDB: train/pos/*.txt, train/neg, test/pos, test/neg. Raises DataError."""
    read = {}
    for split in ("train", "test"):
        texts = []
        labels = []
        for label, name in enumerate(("neg", "pos")):
            for file in sorted((folder / split / name).glob("*.txt")):
                texts.append(np.fromfile(file, np.uint8))
                labels.append(label)
        if len(set(labels)) < 2 or not all(map(len, texts)):
            raise DataError(
                f"{folder / split}: expected folders neg and pos with non-empty .txt files"
            )
        read[split] = Labelled(texts, np.array(labels))
    count = len(read["train"])
    held_out = row_sample(count, max(1, round(HELD_OUT * count)))
    validation = read["train"].take(held_out)
    train = read["train"].take(np.setdiff1d(np.arange(count), held_out))
    return Arena({"train": train, "validation": validation, "test": read["test"]}, BYTES, 2)
