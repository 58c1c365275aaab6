"""The five sets of the Long Range Arena (Tay et al., 2021): sequences of symbols, a class for each, or for each pair.

listops, pathfinder: drawn from their rules. image: grey pixels of a folder of images, CIFAR-10 there. text: the bytes
of reviews, IMDB there. retrieval: the bytes of two documents, AAN there, and whether one cites the other; where AAN is
not at hand, two passages of WikiText-2, and whether both are of one article.

Legend: n examples of a split, L symbols of a row.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

import numpy as np

from crt_exp.config import ConfigError
from crt_exp.data import DataError, glue, images, listops, pathfinder
from crt_exp.data.sources import no_folder, task_folder
from crt_exp.data.cache import cached, key_of
from crt_exp.data.endings import Sieve
from crt_exp.data.image_values import squared
from crt_exp.data.text import content, numbered_lines, official_file
from crt_exp.options import Parameter, check_options

Dataset = Literal["listops", "image", "pathfinder", "text", "retrieval"]
SPLITS = ("train", "validation", "test")
LONGEST = 4000                                               # bytes of a text, in the Long Range Arena
SIDE = 32                                                    # pixels
PASSAGE = 256                                                # bytes
PASSAGES = {"train": 8000, "validation": 500, "test": 1000}  # pairs of them
BYTES = 256


@dataclass(frozen=True, eq=False)
class Labelled:
    """rows: of symbols (L,) uint8; of pairs those of example i are 2 i and 2 i + 1. labels (n,) int64."""

    rows: Sequence[np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: np.ndarray) -> "Labelled":
        per = len(self.rows) // max(1, len(self))
        places = (chosen[:, None] * per + np.arange(per)).reshape(-1)
        return Labelled([self.rows[i] for i in places], self.labels[chosen])


class Arena(NamedTuple):
    """splits: "train", "validation", "test". symbols: kinds of them, without padding. together: rows of an example."""

    splits: dict[str, Labelled]
    symbols: int
    classes: int
    together: int = 1


def load(dataset: Dataset, data_dir: str | None, rules: dict[str, Any], preset: str, seed: int, held_out: float,
         cache_dir: str | None) -> Arena:
    """Raises DataError for files that are missing or malformed, ConfigError for rules that are none."""
    if rules and dataset not in GENERATED:
        raise ConfigError(f"task.rules are those of {' and '.join(GENERATED)}, which are drawn: leave them out")
    if dataset == "listops":
        read = read_listops(Path(data_dir).expanduser()) if data_dir else None
        return Arena(read or drawn(dataset, rules, preset, seed, cache_dir), len(listops.SYMBOLS), 10)
    if dataset == "pathfinder":
        no_folder(data_dir, "task.dataset=pathfinder, which is drawn from its rules")
        return Arena(drawn(dataset, rules, preset, seed, cache_dir), BYTES, 2)
    if dataset == "image":
        return grey_images(data_dir, held_out)
    if dataset == "text":
        return texts(data_dir, held_out)
    return Arena(pairs(data_dir) if data_dir else passages(seed, cache_dir), BYTES, 2, together=2)


def folder_of(dataset: Dataset, data_dir: str | None) -> Path | None:
    """What is read; None for what is drawn."""
    own = {"image": "images/cifar10", "text": "glue/SST-2", "retrieval": "wikitext2"}
    return task_folder(own.get(dataset, dataset), data_dir) if data_dir or dataset in own else None


# ---- drawn -----------------------------------------------------------------------------------------------------------

GENERATED = {"listops": listops, "pathfinder": pathfinder}


def rules_of(dataset: str, preset: str, changes: dict[str, Any]) -> Any:
    """Those of a preset, with other values for some keys. Raises ConfigError."""
    module = GENERATED[dataset]
    hints = get_type_hints(type(module.PRESETS[preset]), include_extras=True)
    check_options("task.rules", {key: Parameter(hint, False) for key, hint in hints.items()}, changes)
    return module.PRESETS[preset]._replace(**changes)


def drawn(dataset: str, changes: dict[str, Any], preset: str, seed: int, cache_dir: str | None) -> dict[str, Labelled]:
    rules = rules_of(dataset, preset, changes)
    make = drawn_lists if dataset == "listops" else drawn_pictures
    arrays = cached(cache_dir, key_of(f"{dataset} 1", *rules, seed), lambda: make(rules, seed))
    rows = {split: np.split(arrays[f"{split}_symbols"], arrays[f"{split}_ends"][:-1]) for split in SPLITS}
    return {split: Labelled(rows[split], arrays[f"{split}_labels"]) for split in SPLITS}


def drawn_lists(rules: listops.ListOpsRules, seed: int) -> dict[str, np.ndarray]:
    arrays = {}
    for split, rows in listops.drawn(rules, seed).items():
        arrays |= flat(split, [np.array([listops.NUMBERS[word] for word in words], np.uint8) for words in rows],
                       [listops.worth(words) for words in rows])
    return arrays


def drawn_pictures(rules: pathfinder.PathfinderRules, seed: int) -> dict[str, np.ndarray]:
    arrays = {}
    for split, (pictures, labels) in pathfinder.drawn(rules, seed).items():
        arrays |= flat(split, [picture.reshape(-1) for picture in pictures], labels)
    return arrays


def flat(split: str, rows: Sequence[np.ndarray], labels: Sequence[int]) -> dict[str, np.ndarray]:
    return {f"{split}_symbols": np.concatenate([np.zeros(0, np.uint8), *rows]),
            f"{split}_ends": np.cumsum([len(row) for row in rows]), f"{split}_labels": np.array(labels, np.int64)}


# ---- files -----------------------------------------------------------------------------------------------------------


def read_listops(folder: Path) -> dict[str, Labelled]:
    """The published files. Raises DataError."""
    result = {}
    for split, name in zip(SPLITS, ("train", "val", "test")):
        path = there(folder / f"basic_{name}.tsv", "task.dataset=listops", "https://github.com/google-research/"
                     "long-range-arena; without task.data_dir the lists are drawn from their rules")
        read = list(listops.read(path))
        if not read:
            raise DataError(f"{path}: the file holds no text.")
        rows, labels = zip(*read)
        result[split] = Labelled(rows, np.array(labels, np.int64))
    return result


def there(path: Path, what: str, page: str) -> Path:
    if not path.exists():
        raise DataError(f"{what} needs {path}, which is not there. Get it from {page}.")
    return path


def grey_images(data_dir: str | None, held_out: float) -> Arena:
    """Grey values of 32 x 32 pixels, row by row; the images of val/ are the test."""
    loaded = images.load("cifar10", data_dir)
    train, validation = loaded["train"].held_out(held_out)
    splits = {"train": train, "validation": validation, "test": loaded["val"]}
    rows = {split: [squared(part, i, SIDE, 1).reshape(-1) for i in range(len(part))] for split, part in splits.items()}
    return Arena({split: Labelled(rows[split], part.labels) for split, part in splits.items()}, BYTES,
                 len(loaded["train"].classes))


def texts(data_dir: str | None, held_out: float) -> Arena:
    """Bytes of texts: a folder in IMDB's layout (train/pos/*.txt, train/neg, test/pos, test/neg), or SST-2's files,
    whose dev split is the test."""
    folder = Path(data_dir).expanduser() if data_dir else None
    if folder is not None and (folder / "train").is_dir():
        read = {split: reviews(folder / split) for split in ("train", "test")}
    else:
        read = {"train": sentences("train", data_dir), "test": sentences("dev", data_dir)}
    chosen = np.random.default_rng(0).permutation(len(read["train"]))
    count = round(held_out * len(chosen))
    if not 0 < count < len(chosen):
        raise DataError(f"task.held_out = {held_out} of {len(chosen)} texts leaves none for validation or training")
    validation, train = (np.sort(part) for part in (chosen[:count], chosen[count:]))
    return Arena({"train": read["train"].take(train), "validation": read["train"].take(validation),
                  "test": read["test"]}, BYTES, 2)


def reviews(folder: Path) -> Labelled:
    rows, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        there(folder / name, "task.dataset=text", "https://ai.stanford.edu/~amaas/data/sentiment")
        files = Sieve((".txt",)).only(folder / name, (folder / name).iterdir())
        if not files:
            raise DataError(f"{folder / name} holds no .txt file: a review is a file there.")
        rows += [bytes_of(file.read_bytes(), f"{file}") for file in files]
        labels += [label] * len(files)
    return Labelled(rows, np.array(labels, np.int64))


def sentences(split: str, data_dir: str | None) -> Labelled:
    examples = glue.load("sst2", split, data_dir)
    return Labelled([bytes_of(text.encode(), f"SST-2, {split}, example {i}")
                     for i, text in enumerate(examples.sentence1, 1)], np.array(examples.labels, np.int64))


def bytes_of(content: bytes, place: str) -> np.ndarray:
    if not content:
        raise DataError(f"{place}: the text is empty.")
    return np.frombuffer(content, np.uint8)


def passages(seed: int, cache_dir: str | None) -> dict[str, Labelled]:
    """Pairs of passages of WikiText-2, every second pair of one article; articles are those of the split."""
    files = {split: official_file("wikitext2", name) for split, name in zip(SPLITS, ("train", "valid", "test"))}
    arrays: dict[str, np.ndarray] = {}
    for which, (split, file) in enumerate(files.items()):
        key = key_of("passages 1", PASSAGE, PASSAGES[split], seed, content(file))
        arrays |= cached(cache_dir, key, partial(passages_of, split, file, [seed, which]))
    rows = {split: np.split(arrays[f"{split}_symbols"], arrays[f"{split}_ends"][:-1]) for split in SPLITS}
    return {split: Labelled(rows[split], arrays[f"{split}_labels"]) for split in SPLITS}


def passages_of(split: str, file: Path, seed: list[int]) -> dict[str, np.ndarray]:
    return flat(split, *drawn_passages(articles(file), PASSAGES[split], np.random.default_rng(seed)))


def articles(file: Path) -> list[list[np.ndarray]]:
    """The passages of each article that has two or more: its text without headings, cut."""
    texts: list[list[str]] = []
    for _, line in numbered_lines(file):
        if re.fullmatch(r" = [^=].* = ", line):
            texts.append([])
        elif texts and line.strip() and not line.startswith(" ="):
            texts[-1].append(line)
    cut = [np.frombuffer("".join(text).encode(), np.uint8) for text in texts]
    return [[text[at:at + PASSAGE] for at in range(0, len(text) - PASSAGE + 1, PASSAGE)] for text in cut
            if len(text) >= 2 * PASSAGE]


def drawn_passages(passages: list[list[np.ndarray]], count: int, rng: np.random.Generator
                   ) -> tuple[list[np.ndarray], np.ndarray]:
    """2 count passages, and the labels of the pairs."""
    labels, rows = np.arange(count) % 2, []
    for label in labels:
        a, b = rng.choice(len(passages), 2, replace=False)
        if label:
            rows += [passages[a][i] for i in rng.choice(len(passages[a]), 2, replace=False)]
        else:
            rows += [passages[each][rng.integers(len(passages[each]))] for each in (a, b)]
    return rows, labels


def pairs(data_dir: str) -> dict[str, Labelled]:
    """Lines of label, id, id, text, text with tabs between, in *.train.tsv, *.eval.tsv and *.test.tsv of a folder."""
    page = "https://github.com/google-research/long-range-arena (lra_release, tsv_data)"
    folder = Path(data_dir).expanduser()
    return {split: pairs_of(there(folder / f"new_aan_pairs.{name}.tsv", "task.dataset=retrieval", page))
            for split, name in zip(SPLITS, ("train", "eval", "test"))}


def pairs_of(path: Path) -> Labelled:
    rows, labels = [], []
    for label, *both in read_pairs(path):
        rows += both
        labels.append(label)
    if not labels:
        raise DataError(f"{path}: the file is empty.")
    return Labelled(rows, np.array(labels, np.int64))


def read_pairs(path: Path) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    for number, line in numbered_lines(path):
        label, *rest = line.split("\t")
        if len(rest) != 4 or label not in ("0", "1", "0.0", "1.0"):
            raise DataError(f"{path}, line {number}: a line is a label (0.0 or 1.0), two ids and two texts, with tabs "
                            "between.")
        yield int(float(label)), *(bytes_of(text.encode(), f"{path}, line {number}") for text in rest[2:])
