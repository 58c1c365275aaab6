"""What `make table2` measures: exact encoders of text whose attention is swapped, trained on and fine-tuned on GLUE.

A pair is an encoder and a seed: text, masks, order and Gaussian rows of a pair are the same in all its arms and at
every step, and encoders go round with the pairs.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crt_exp.data import glue
from crt_exp.data.text import official_file
from crt_exp.metrics import METRICS
from crt_exp.runner.configuration import kept_task
from crt_exp.studies import fidelity, runs, training
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.fidelity import Arm
from crt_exp.studies.subject import Subject
from crt_exp.studies.training import Grid

COMPARED = ("favorp", "favorpp")
BY_ENCODER = ("exact", "uniform", *COMPARED)
LOW, HIGH = 4, 24  # mean |x + y|^2 at which the closed forms of FAVOR+ and FAVOR++ differ
CUTS = 101         # quantiles of the overlap among which a class task chooses its cut


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of grids, and of those with `look` also: of each encoder, its layers (table "layers": S, attention
    errors, by x; error_ratio, FAVOR+ over FAVOR++; share of heads in the window; cost of uniform attention) and its
    pairs' mean, in the setting `each encoder`, whose units are encoders. Grids of kinds without enough heads between
    LOW and HIGH are not trained on. Answers without a model to the tasks of GLUE, as arms."""
    home, cells = runs.Home(training.HOME, tuple(sources)), Cells(name, sources, keep)
    encoders: dict[str, str | None] = {}  # kind -> the setting of its encoders; None where they cannot tell
    for grid, kind, look in map(apart, size["grids"]):
        if look:
            keys = looking(grid, look, home, cells, name)
            yield from of_looks(cells, keys, kind, look["each"])
            encoders[kind] = look["each"] if share(cells, keys) >= size["heads"] else None
        if encoders.get(kind, "") is not None:
            made = list(training.measured(grid, home, cells, name))
            yield from made
            if kind in encoders:
                yield from by_encoder(made, kind, encoders[kind], grid.before["count"])
    for setting, data in size["glue"].items():
        yield from controls(setting, data, cells)


def apart(given: Mapping[str, Any]) -> tuple[Grid, str, Mapping[str, Any]]:
    """A grid, its first setting, and what is looked at in the models it starts from."""
    rest = {key: value for key, value in given.items() if key != "look"}
    return Grid(**rest), next(iter(given["settings"])), given.get("look", {})


# ---- exact encoders


def looking(grid: Grid, look: Mapping[str, Any], home: runs.Home, cells: Cells, name: str) -> list[Key]:
    """The keys of what was looked at, one an encoder."""
    encoders = range(grid.before["count"])
    training.train_before(grid, home, cells, [("exact", seed) for seed in encoders], name)
    starts = [str(home.place(grid.stages("exact", seed, home)[-1])) for seed in encoders]
    keys = [{"start": start, **{key: look[key] for key in ("texts", "m", "draws")}} for start in starts]
    cells.fill(keys, looked_at, f"{name}: the exact encoders", grid.workers)
    return keys


def looked_at(start: str, texts: int, m: int, draws: int) -> dict[str, Any]:
    """On the texts that the encoder read: loss, cost of uniform attention, that of the frequencies of tokens, nats;
    mean |x + y|^2 of each head of each layer; relative errors of outputs, one a layer."""
    task = kept_task(start)
    subject = Subject(start, str(official_file("wikitext2", "valid")), None, None, task.block, texts, 1, seed=0,
                      cache_dir="outputs/texts/tokens")
    errors = {arm: np.mean([fidelity.of_swap(subject, Arm(arm, m), draw, 0)["attention_error_layers"]
                            for draw in range(draws)], 0).tolist() for arm in COMPARED}
    control = fidelity.of_swap(subject, Arm("uniform", None), 0, 0)
    return {"pretrained": float(np.mean([each.loss for each in subject.exact])),
            "unigram": unigram(task), "cost": float(np.mean(control["above_texts"])),
            "S": [fidelity.of_heads(subject, i)["mean_sq_sum"] for i in range(len(subject.calls[0]))],
            "errors": {f"{arm} m={m}": each for arm, each in errors.items()}
            | {"uniform": control["attention_error_layers"]}}


def unigram(task: Any) -> float:
    """Loss on the held-out text, nats, of predicting every token by its frequency in the training text."""
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=len(task.tokenizer))
                    for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never asked for
    logs = np.log((known + 1) / (known.sum() + len(known)))
    return float(-(asked * logs).sum() / asked.sum())


def share(cells: Cells, keys: Sequence[Key]) -> float:
    """Of the heads of all encoders, those whose mean |x + y|^2 lies between LOW and HIGH."""
    sums = np.concatenate([layer for key in keys for layer in cells[key]["S"]])
    return float(np.mean((sums >= LOW) & (sums <= HIGH)))


def of_looks(cells: Cells, keys: Sequence[Key], kind: str, each: str) -> Iterator[Draw]:
    for encoder, key in enumerate(keys):
        look = cells[key]
        for layer, S in enumerate(look["S"]):
            for metric, value in (("S", np.mean(S)), ("S_least", min(S)), ("S_largest", max(S))):
                yield cells.draw(key, kind, "exact", metric, float(value), encoder, layer, "layers")
            for arm, errors in look["errors"].items():
                yield cells.draw(key, kind, arm, "attention_error", errors[layer], encoder, layer, "layers")
        plain, better = (np.log(errors) for arm, errors in look["errors"].items() if arm != "uniform")
        ratio = next(iter(look["errors"])), "error_ratio", float(np.exp(np.mean(plain - better)))
        yield cells.draw(key, each, *ratio, f"{kind}, {encoder}", table="layers")
        yield cells.draw(key, kind, "uniform", "cost", look["cost"], encoder, table="layers")
        yield cells.draw(key, kind, "exact", "pretrained", look["pretrained"], encoder, table="pretraining")
        yield cells.draw(key, kind, "unigram", "pretrained", look["unigram"], encoder, table="pretraining")
    yield cells.draw(keys[0], kind, "exact", "share", share(cells, keys), table="layers")


def by_encoder(made: Iterable[Draw], kind: str, each: str, count: int) -> Iterator[Draw]:
    """The mean loss of each encoder's pairs, at every step, of compared arms and controls that have all pairs."""
    places: dict[tuple[str, Any], list[Draw]] = defaultdict(list)
    for draw in made:
        if draw.table == "validation" and draw.metric == "loss" and draw.arm.split()[0] in BY_ENCODER:
            places[draw.arm, draw.x].append(draw)
    most = max(map(len, places.values()), default=0)
    for draws in (draws for draws in places.values() if len(draws) == most):
        for encoder in range(count):
            values = [draw.value for draw in draws if draw.unit % count == encoder]
            yield replace(draws[0], setting=each, unit=f"{kind}, {encoder}", value=float(np.mean(values)), seconds="")


# ---- GLUE without a model


def controls(setting: str, data: str, cells: Cells) -> Iterator[Draw]:
    """Of answers that are fitted to the training split: its most frequent class (of scores, their mean) and, for pairs
    of sentences, which words they share."""
    cells.fill([{"data": data}], scores, f"GLUE: {setting}", workers=1)
    for arm, score in cells[{"data": data}].items():
        yield cells.draw({"data": data}, setting, arm, glue.TASKS[data].metrics[0], score, table="test")


def scores(data: str) -> dict[str, float]:
    """As fractions."""
    metric = METRICS[glue.TASKS[data].metrics[0]]
    return {arm: float(metric(answers, labels)) for arm, (answers, labels) in answers_of(data).items()}


def answers_of(data: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Control -> its answers on the dev split, and the right ones."""
    train, dev = (glue.load(data, split) for split in ("train", "dev"))
    classes = bool(glue.TASKS[data].names)
    usual = int(np.bincount(train.labels).argmax()) if classes else float(np.mean(train.labels))
    made = {"majority class": ([usual] * len(dev), list(dev.labels))}
    if dev.sentence2 is not None:
        shared = overlaps(dev)
        answers = cut(data, overlaps(train), train.labels, shared) if classes else shared.tolist()
        made["word overlap"] = (answers, list(dev.labels))
    return made


def overlaps(examples: glue.Examples) -> np.ndarray:
    """Words of both sentences over words of either, (n,)."""
    words = [[set(text.lower().split()) for text in texts] for texts in (examples.sentence1, examples.sentence2)]
    return np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*words)])


def cut(data: str, shared: np.ndarray, labels: Sequence[int], dev: np.ndarray) -> list[int]:
    """Classes of the dev split by whether the overlap lies above the cut, and in the sense, that are best in training;
    of three classes the first two alone."""
    metric, cuts = METRICS[glue.TASKS[data].metrics[0]], np.quantile(shared, np.linspace(0, 1, CUTS))
    tried = [(metric((shared > at) == high, labels), at, high) for at in cuts for high in (True, False)]
    _, at, high = max(tried)
    return ((dev > at) == high).astype(int).tolist()
