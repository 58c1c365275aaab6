"""How true a pretrained model stays when its attention is swapped and nothing is trained: task=fidelity, of any model
and text, a table of many methods; task=swap_error, of a run's model on WikiText-2, one method; task=matched_heads, on
random heads that have the moments of the model's.

Legend: L tokens of a text, m projections, "above" the increase of the loss over exact attention, nats. Errors are
relative, in the Frobenius norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from crt_exp import mechanism_text
from crt_exp.advice.bench import medians
from crt_exp.attention import exact_attention
from crt_exp.config import ConfigError
from crt_exp.data.text import official_file
from crt_exp.hints import Count, Several, Whole
from crt_exp.measure.base import SwapMeasurement, planned
from crt_exp.measure.subject import Subject, relative_error
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import interval
from crt_exp.runner.configuration import kept_task
from crt_exp.schema import checked
from crt_exp.whole_files import whole, write_rows

CONTROLS = ("exact", "uniform", "identity")  # not among those of which the best is named
NAMES = {"hidden_error": "hidden states", "attention_error": "outputs of attention", "cosine": "cosine",
         "above": "nats above exact"}
Split = Literal["train", "valid", "test"]    # of WikiText-2


class Candidate(NamedTuple):
    """An attention as it is written, "window block=32 first=16", and its projections, of which the text says nothing;
    None where it has none."""

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


def arms_of(attentions: Sequence[str], ms: Sequence[int]) -> list[Candidate]:
    """Each attention with each m: its own alone where its text names one, and once where it has none. Raises
    ConfigError for empty and unknown ones, and twice the same."""
    arms = []
    for text in attentions:
        draws = Mechanism.parse(text, seed=0).draws
        name, options = mechanism_text.read(text)
        own = [options.pop("m")] if "m" in options else ms if draws else [None]
        arms += [Candidate(mechanism_text.write(name, options), m) for m in own]
    if len(set(arms)) < len(arms):
        raise ConfigError(f"task.attentions or task.ms names something twice: {[arm.label for arm in arms]}")
    return arms


@checked("task")
class Fidelity:
    """task=fidelity; see conf/task/fidelity.yaml for the options.

    Records of four kinds: `heads`, one a layer: mean |x + y|^2 of its heads; `swap`, one an attention, m and draw of
    its noise: errors, cosine and loss of each text; `cost`, one a length: milliseconds and MiB of each attention; and a
    final one with the means, in which `hidden_error` is the least of those that are no controls.
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
        self.arms = arms_of(attentions, list(ms))
        self.given = {"text": text, "calibration": calibration, "tokenizer": tokenizer, "length": length,
                      "texts": texts, "calibration_texts": calibration_texts, "cache_dir": cache_dir}

    # ---- records

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        subject, rows = Subject(self.model, seed=seed, **self.given), list(done)
        self.check(subject)
        plan = [("heads", of_heads, (subject, i)) for i in range(len(subject.calls[0]))]
        plan += [("swap", of_swap, (subject, arm, draw, seed)) for arm in self.arms
                 for draw in range(self.draws_of(arm))]
        plan += [("cost", self.of_length, (subject, L)) for L in self.lengths_of(subject)]
        plan += [("test", self.of_all, (subject, rows))]
        yield from planned(plan, rows)

    def check(self, subject: Subject) -> None:
        """Raises ValueError, before the first record, for lengths and attention that do not go with the model."""
        if long := [L for L in self.lengths or () if subject.most < L]:
            raise ValueError(f"task.lengths holds {long[0]}: the model has {subject.most} positions")
        for arm in self.arms:
            with subject.swapped(arm.mechanism()):
                pass

    def draws_of(self, arm: Candidate) -> int:
        """One where nothing is drawn."""
        return self.draws if arm.mechanism().draws else 1

    def lengths_of(self, subject: Subject) -> list[int]:
        """By default 128, 256, ... as far as the model has positions, and no further than 2048."""
        if self.lengths is not None:
            return list(self.lengths)
        return [L for L in (128, 256, 512, 1024, 2048) if subject.most >= L]

    def of_length(self, subject: Subject, length: int) -> dict[str, Any]:
        """Of one pass over `length` tokens: the median of milliseconds, all attentions in turn, and MiB at the peak
        beyond what is held before. They do not depend on which tokens these are."""
        ids = torch.randint(subject.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
        mechanisms = {arm.label: arm.mechanism() for arm in self.arms}
        return {"length": length, "ms": medians(subject.times(mechanisms, ids, self.rounds)),
                "mib": {label: subject.memory(each, ids) for label, each in mechanisms.items()}}

    def of_all(self, subject: Subject, rows: list[dict]) -> dict[str, Any]:
        means = [mean_of(arm, [r for r in rows if r["split"] == "swap" and (r["attention"], r["m"]) == arm])
                 for arm in self.arms]
        others = [each for each, arm in zip(means, self.arms) if arm.name not in CONTROLS] or means
        best = min(others, key=lambda each: each["hidden_error"])
        return {"predicts": subject.predicts, "texts": len(subject.rows), "length": subject.length,
                "hidden_error": best["hidden_error"], "best": best["label"], "attentions": means, "final": True}

    # ---- what is said

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
    """Of one call of an attention layer: mean |x + y|^2 of each head, over texts."""
    calls = [each[i] for each in subject.calls]
    sums = torch.stack([call.sums() for call in calls]).mean(0).tolist()
    return {"layer": i, "path": calls[0].path, "heads": len(sums), "mean_sq_sum": sums}


def of_swap(subject: Subject, arm: Candidate, draw: int, seed: int) -> dict[str, Any]:
    """Means over texts for each layer, and under keys that end in "_texts" those of the last layer for each text."""
    of_texts, of_layers = errors_of(subject, arm.mechanism(1000 * seed + draw))
    return {"attention": arm.text, "m": arm.m, "draw": draw,
            **{f"{key}_layers": values for key, values in of_layers.items()},
            **{f"{key}_texts": values for key, values in of_texts.items()}}


def errors_of(subject: Subject, mechanism: Mechanism) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of each text, and means over texts of each layer."""
    measured = subject.measured(mechanism)
    layers = {f"{kind}_error": measured[kind].mean(0).tolist() for kind in ("attention", "hidden")}
    texts = {"attention_error": measured["attention"].mean(1), "hidden_error": measured["hidden"][:, -1],
             **{key: measured[key] for key in ("cosine", "above") if key in measured}}
    return {key: values.tolist() for key, values in texts.items()}, layers


def mean_of(arm: Candidate, rows: list[dict]) -> dict[str, Any]:
    """Over texts, each text's mean over draws; `_ci95`: half-widths over texts."""
    record = {"label": arm.label, "attention": arm.text, "m": arm.m, "draws": len(rows)}
    for key, name in (("attention_error_texts", "attention_error"), ("hidden_error_texts", "hidden_error"),
                      ("cosine_texts", "cosine"), ("above_texts", "above")):
        if key in rows[0]:
            of_texts = interval(np.mean([row[key] for row in rows], 0), name)
            record |= {name: of_texts[name], f"{name}_ci95": of_texts[f"{name}_ci95"]}
    return record


# ---- the table and the picture of a run


def table(records: list[dict]):
    """A DataFrame, a row for each attention and m: means over texts, with half-widths of 95% intervals, and what a pass
    over the longest of the lengths costs."""
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
    """fidelity.csv: a row for each attention, m and draw, and each layer; fidelity.png."""
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
    """Hidden error behind each layer."""
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
    errors.set(xlabel="layer", title="relative error of the hidden states behind it", yscale="log")
    errors.legend(fontsize=7)
    return drawn


# ---- a run's model on WikiText-2


@lru_cache(maxsize=2)
def subject(start: str, split: str, calibration: str | None, length: int | None, texts: int,
            calibration_texts: int = 1) -> Subject:
    """length: by default that of the run's rows."""
    fitted = None if calibration is None else str(official_file("wikitext2", calibration))
    return Subject(start, str(official_file("wikitext2", split)), fitted, None, length or kept_task(start).block, texts,
                   calibration_texts, seed=0, cache_dir="outputs/texts/tokens")


@checked("task")
class SwapError(SwapMeasurement):
    """task=swap_error: the model of a run of task=mlm with another attention, not trained. Rows: `above`,
    `hidden_error`, `attention_error` and `cosine` of each text, lists; both errors of each `layer`; last `cost`, the
    mean of `above`.

    With attention=exact, rows of the model itself: `S`, `S_least` and `S_largest`, mean |x + y|^2 over the heads of
    each layer; and in the last one its `loss`, that of every token predicted by its frequency in the training text,
    `unigram`, and the `share` of heads whose mean |x + y|^2 lies in `window`.
    """

    metric = "cost"

    def __init__(self, start: str, split: Split, calibration: Split | None, length: Count | None, texts: Count,
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
    """Loss on the run's validation text, nats, of predicting every token by its frequency in the training text."""
    task = kept_task(start)
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=len(task.tokenizer))
                    for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never asked for
    logs = np.log((known + 1) / (known.sum() + len(known)))
    return float(-(asked * logs).sum() / asked.sum())


@checked("task")
class MatchedHeads(SwapMeasurement):
    """task=matched_heads: relative error of attention's output in both directions, of each `layer`, on heads of so many
    `tokens`, whose q, k and v are normal with the moments of a run's model on WikiText-2. Tokens are independent: no
    key is near."""

    metric = "attention_error"

    def __init__(self, start: str, split: Split, length: Count, texts: Count, tokens: Count):
        self.start, self.given, self.tokens = start, (split, None, length, texts), tokens

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        for number, of_layer in enumerate(moments(self.start, *self.given)):
            generator = torch.Generator().manual_seed(10_000 * seed + number)
            q, k, v = (normal(mean, root, self.tokens, generator) for mean, root in of_layer)
            heads, d = q.shape[1], q.shape[3]
            with torch.no_grad():
                layer = mechanism.layer(heads, d, layer=number).eval()
                exact = exact_attention(q / d**0.25, k / d**0.25, v)
                yield {"layer": number, "attention_error": float(relative_error(layer(q, k, v), exact))}


@lru_cache(maxsize=2)
def moments(*of_subject: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Of q, k and v of each layer: mean (1, H, 1, d) and root of the covariance (1, H, d, d), over texts and tokens."""
    calls = subject(*of_subject).calls
    return [[mean_and_root(torch.cat([getattr(of_text[i], name) for of_text in calls], 2)) for name in ("q", "k", "v")]
            for i in range(len(calls[0]))]


def mean_and_root(t: Tensor) -> tuple[Tensor, Tensor]:
    mean = t.double().mean(2, keepdim=True)
    centred = t.double() - mean
    values, vectors = torch.linalg.eigh(centred.mT @ centred / t.shape[2])
    return mean, vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def normal(mean: Tensor, root: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(1, H, length, d) float32."""
    drawn = torch.randn(1, mean.shape[1], length, mean.shape[3], generator=generator, dtype=torch.float64)
    return (mean + drawn @ root.mT).float()
