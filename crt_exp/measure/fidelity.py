"""Errors of a pretrained language model with another attention, without training: task=fidelity, any model and text, a
table of methods; task=swap_error, the model of a run on WikiText-2, one method.

Notation: L tokens of a document, m projections, "above" the loss increase over exact attention in nats. Errors are
relative, in the Frobenius norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from crt_exp.options import Count, Several, Whole, checked, join_words, split_words
from crt_exp.advice.bench import medians
from crt_exp.config import ConfigError
from crt_exp.data.text import official_file
from crt_exp.measure.base import SwapMeasurement, planned
from crt_exp.measure.subject import Subject
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.metrics import interval
from crt_exp.runner.configuration import kept_task
from crt_exp.atomic_write import whole, write_rows

CONTROLS = ("exact", "uniform", "identity")  # never the best method
NAMES = {"hidden_error": "hidden states", "attention_error": "outputs of attention", "cosine": "cosine",
         "above": "nats above exact"}
Split = Literal["train", "valid", "test"]    # of WikiText-2


class Candidate(NamedTuple):
    """An attention as text without m, "window block=32 first=16", and its m; None where it has no projections."""

    text: str
    m: int | None

    @property
    def name(self) -> str:
        return self.text.split()[0]

    @property
    def label(self) -> str:
        return self.text + (f" m={self.m}" if self.m else "")

    def mechanism(self, seed: int = 0) -> Mechanism:
        return Mechanism.parse(self.text, m=self.m, seed=seed)


def methods_of(attentions: Sequence[str], ms: Sequence[int]) -> list[Candidate]:
    """Each attention with each m, with its own m where its text has one, and once where it has no projections. Raises
    ConfigError for empty or unknown text, and for duplicates."""
    methods = []
    for text in attentions:
        random = Mechanism.parse(text, seed=0).draws
        name, options = split_words(text)
        own = [options.pop("m")] if "m" in options else ms if random else [None]
        methods += [Candidate(join_words(name, options), m) for m in own]
    if len(set(methods)) < len(methods):
        raise ConfigError(f"task.attentions or task.ms names something twice: {[each.label for each in methods]}")
    return methods


@checked("task")
class Fidelity:
    """task=fidelity; see conf/task/fidelity.yaml for the options.

    Records of four kinds: `heads`, one a layer: mean |x + y|^2 of its heads; `swap`, one an attention, m and seed of
    the projections: errors, cosine and loss of each document; `cost`, one a length: milliseconds and MiB of each
    attention; and a final one with the means, whose `hidden_error` is the least of all methods but the controls.
    """

    metric, lower_is_better = "hidden_error", True
    uses: frozenset[str] = frozenset()  # attention is named by task.attentions and task.ms

    def __init__(self, model: str | None, text: str | Sequence[str] | None, calibration: str | Sequence[str] | None,
                 tokenizer: str | None, attentions: Several[str], ms: Several[Count], draws: Count,
                 length: Count | None, texts: Count, calibration_texts: Count,
                 lengths: Sequence[Count] | None, rounds: Count, cache_dir: str | None):
        if model is None or text is None:
            raise ValueError("task=fidelity needs task.model (a folder, a run or a hub name) and task.text (a text "
                             "that the model was not trained on)")
        if texts < 2:
            raise ValueError(f"task.texts = {texts}: an interval over texts needs at least 2")
        self.model, self.draws, self.lengths, self.rounds = model, draws, lengths, rounds
        self.methods = methods_of(attentions, list(ms))
        self.given = {"text": text, "calibration": calibration, "tokenizer": tokenizer, "length": length,
                      "texts": texts, "calibration_texts": calibration_texts, "cache_dir": cache_dir}

    # ---- records

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        subject, rows = Subject(self.model, seed=seed, **self.given), list(done)
        self.check(subject)
        plan = [("heads", of_heads, (subject, i)) for i in range(len(subject.calls[0]))]
        plan += [("swap", of_swap, (subject, method, draw, seed)) for method in self.methods
                 for draw in range(self.draws if method.mechanism().draws else 1)]
        plan += [("cost", self.of_length, (subject, L)) for L in self.lengths_of(subject)]
        plan += [("test", self.of_all, (subject, rows))]
        yield from planned(plan, rows)

    def check(self, subject: Subject) -> None:
        """Raises ValueError, before the first record, for lengths and attention that the model cannot have."""
        if long := [L for L in self.lengths or () if subject.most < L]:
            raise ValueError(f"task.lengths holds {long[0]}: the model has {subject.most} positions")
        for method in self.methods:
            with subject.swapped(method.mechanism()):
                pass

    def lengths_of(self, subject: Subject) -> list[int]:
        """By default 128, 256, ... up to 2048 and the positions of the model."""
        if self.lengths is not None:
            return list(self.lengths)
        return [L for L in (128, 256, 512, 1024, 2048) if subject.most >= L]

    def of_length(self, subject: Subject, length: int) -> dict[str, Any]:
        """Median milliseconds of a pass over `length` random tokens, all attentions in turn, and its peak of MiB."""
        ids = torch.randint(subject.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        mechanisms = {method.label: method.mechanism() for method in self.methods}
        return {"length": length, "ms": medians(subject.times(mechanisms, ids, self.rounds)),
                "mib": {label: subject.memory(each, ids) for label, each in mechanisms.items()}}

    def of_all(self, subject: Subject, rows: list[dict]) -> dict[str, Any]:
        means = [mean_of(method, [r for r in rows if r["split"] == "swap" and (r["attention"], r["m"]) == method])
                 for method in self.methods]
        others = [each for each, method in zip(means, self.methods) if method.name not in CONTROLS] or means
        best = min(others, key=lambda each: each["hidden_error"])
        return {"predicts": subject.predicts, "texts": len(subject.rows), "length": subject.length,
                "hidden_error": best["hidden_error"], "best": best["label"], "attentions": means, "final": True}

    # ---- output

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return (f"{table(records).to_string(index=False, na_rep='')}\n"
                f"fidelity: {last['texts']} texts of {last['length']} tokens; nearest to the exact model: "
                f"{last['best']}, hidden error {last['hidden_error']:.3g}")

    def keep(self, records: list[dict], directory: Path) -> None:
        """fidelity.csv and fidelity.png in the run directory."""
        write(records, directory)


# ---- one record each


def of_heads(subject: Subject, i: int) -> dict[str, Any]:
    """Mean |x + y|^2 of each head of one attention layer, over documents."""
    calls = [each[i] for each in subject.calls]
    sums = torch.stack([call.sums() for call in calls]).mean(0).tolist()
    return {"layer": i, "path": calls[0].path, "heads": len(sums), "mean_sq_sum": sums}


def of_swap(subject: Subject, method: Candidate, draw: int, seed: int) -> dict[str, Any]:
    """Means over documents for each layer; keys that end in "_texts" have a value for each document."""
    of_texts, of_layers = errors_of(subject, method.mechanism(1000 * seed + draw))
    return {"attention": method.text, "m": method.m, "draw": draw,
            **{f"{key}_layers": values for key, values in of_layers.items()},
            **{f"{key}_texts": values for key, values in of_texts.items()}}


def errors_of(subject: Subject, mechanism: Mechanism) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Errors of each document, and of each layer, means over documents."""
    measured = subject.measured(mechanism)
    layers = {f"{kind}_error": measured[kind].mean(0).tolist() for kind in ("attention", "hidden")}
    texts = {"attention_error": measured["attention"].mean(1), "hidden_error": measured["hidden"][:, -1],
             **{key: measured[key] for key in ("cosine", "above") if key in measured}}
    return {key: values.tolist() for key, values in texts.items()}, layers


def mean_of(method: Candidate, rows: list[dict]) -> dict[str, Any]:
    """Means over documents of their means over seeds; `_ci95`: half-widths over documents."""
    record = {"label": method.label, "attention": method.text, "m": method.m, "draws": len(rows)}
    for name in ("attention_error", "hidden_error", "cosine", "above"):
        if f"{name}_texts" in rows[0]:
            means = interval(np.mean([row[f"{name}_texts"] for row in rows], 0), name)
            record |= {key: means[key] for key in (name, f"{name}_ci95")}
    return record


# ---- the table and the picture of a run


def table(records: list[dict]):
    """One row a method: means over documents with half-widths of 95% intervals, and the cost at the largest length."""
    import pandas as pd

    cost = next((r for r in reversed(records) if r["split"] == "cost"), None)
    rows = [{"attention": each["attention"], "m": each["m"] or "",
             **{name: shown(each, key) for key, name in NAMES.items() if key in each},
             **(costs(cost, each["label"]) if cost else {})} for each in records[-1]["attentions"]]
    return pd.DataFrame(rows)


def costs(record: dict[str, Any], label: str) -> dict[str, str]:
    return {f"{unit} of {record['length']} tokens": f"{record[key][label]:.3g}"
            for key, unit in (("ms", "ms"), ("mib", "MiB"))}


def shown(record: dict[str, Any], key: str) -> str:
    return f"{record[key]:.4g} ± {record[f'{key}_ci95']:.2g}"


def write(records: list[dict], directory: Path) -> None:
    """fidelity.csv: a row for each attention, m, seed and layer; fidelity.png."""
    rows = [{"attention": r["attention"], "m": r["m"], "draw": r["draw"], "layer": layer, "attention_error": a,
             "hidden_error": h} for r in records if r["split"] == "swap"
            for layer, (a, h) in enumerate(zip(r["attention_error_layers"], r["hidden_error_layers"]))]
    rows += [{"attention": label, "length": r["length"], "ms": ms, "mib": r["mib"][label]}
             for r in records if r["split"] == "cost" for label, ms in r["ms"].items()]
    rows += [{key: value for key, value in each.items() if key != "label"} for each in records[-1]["attentions"]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_rows(directory / "fidelity.csv", [columns, *([row.get(key, "") for key in columns] for row in rows)])
    with whole(directory / "fidelity.png") as part:
        figure(records).savefig(part, format="png", dpi=120)


def figure(records: list[dict]):
    """Error of the hidden states after each layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure((6, 4.5), layout="constrained")
    FigureCanvasAgg(drawn)
    errors = drawn.subplots()
    for each in records[-1]["attentions"]:
        layers = [r["hidden_error_layers"] for r in records if r["split"] == "swap"
                  and (r["attention"], r["m"]) == (each["attention"], each["m"])]
        mean = np.mean(layers, 0)
        errors.plot(range(1, len(mean) + 1), mean, marker="o", ms=3, label=each["label"])
    errors.set(xlabel="layer", title="relative error of the hidden states after each layer", yscale="log")
    errors.legend(fontsize=7)
    return drawn


# ---- a run's model on WikiText-2


@lru_cache(maxsize=2)
def subject(start: str, split: str, calibration: str | None, length: int | None, texts: int,
            calibration_texts: int) -> Subject:
    fitted = None if calibration is None else str(official_file("wikitext2", calibration))
    return Subject(start, str(official_file("wikitext2", split)), fitted, None, length or kept_task(start).block, texts,
                   calibration_texts, seed=0, cache_dir="outputs/texts/tokens")


@checked("task")
class SwapError(SwapMeasurement):
    """task=swap_error: the model of a run of task=mlm with another attention, without training. Rows: `above`,
    `hidden_error`, `attention_error` and `cosine` of each document, lists; both errors of each `layer`; last `cost`,
    the mean of `above`.

    With attention=exact also rows of the model: `S`, `S_least` and `S_largest`, mean |x + y|^2 over the heads of each
    layer; in the last row its `loss`, that of token frequencies `unigram`, and the `share` of heads whose mean
    |x + y|^2 lies in `window`.
    """

    metric = "cost"

    def __init__(self, start: str | None, split: Split, calibration: Split | None, length: Count | None, texts: Count,
                 calibration_texts: Count, draws: Whole, window: tuple[float, float]):
        self.start, self.draws, self.window = start, draws, window
        self.given = (split, calibration, length, texts, calibration_texts)

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        read = subject(self.start, *self.given)
        made = [errors_of(read, replace(mechanism, seed=each)) for each in range(self.draws) or [seed]]
        of_texts, of_layers = ({key: np.mean([each[key] for each in found], 0).tolist() for key in found[0]}
                               for found in zip(*made))
        yield of_texts
        yield from ({"layer": i, "sample": "", **{key: values[i] for key, values in of_layers.items()}}
                    for i in range(len(read.calls[0])))
        last = {"sample": "", "cost": float(np.mean(of_texts.get("above", np.nan)))}
        if mechanism.is_exact:
            S = [of_heads(read, i)["mean_sq_sum"] for i in range(len(read.calls[0]))]
            yield from ({"layer": i, "sample": "", "S": float(np.mean(each)), "S_least": min(each),
                         "S_largest": max(each)} for i, each in enumerate(S))
            low, high = self.window
            last |= {"share": float(np.mean([low <= each <= high for layer in S for each in layer])),
                     "loss": float(np.mean([each.loss for each in read.exact])), "unigram": unigram(self.start)}
        yield last


def unigram(start: str) -> float:
    """Loss in nats on the run's validation text of the token frequencies of its training text."""
    task = kept_task(start)
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=len(task.tokenizer))
                    for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never predicted
    logs = np.log((known + 1) / (known.sum() + len(known)))
    return float(-(asked * logs).sum() / asked.sum())
