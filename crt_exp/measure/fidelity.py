"""task=fidelity: errors and loss of a pretrained language model with another attention, without training.

Notation: L tokens of a document, "above" the loss increase over exact attention in nats. Errors are relative, in the
Frobenius norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crt_exp.data.text import official_file
from crt_exp.options import Count, Whole, checked
from crt_exp.measure.base import SwapMeasurement
from crt_exp.measure.subject import Subject
from crt_exp.mechanism import Mechanism
from crt_exp.runner.configuration import kept_task
from crt_exp.tasks.mlm import MLM

SPLITS = ("train", "valid", "test")  # of WikiText-2


@lru_cache(maxsize=2)
def subject(model: str, text: str | tuple[str, ...], calibration: str | tuple[str, ...] | None, **options: Any
            ) -> Subject:
    return Subject(model, text, calibration, seed=0, **options)


def files(text: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Files of a text; train, valid and test name the parts of WikiText-2."""
    if text is None or isinstance(text, str):
        return str(official_file("wikitext2", text)) if text in SPLITS else text
    return tuple(text)


@checked("task")
class Fidelity(SwapMeasurement):
    """task=fidelity; see conf/task/fidelity.yaml for the options.

    Rows: `above`, `hidden_error`, `attention_error` and `cosine` of each document, lists; both errors of each `layer`;
    last their means, with `cost` the mean of `above`. With attention=exact also `S`, `S_least` and `S_largest`, mean
    |x + y|^2 over the heads of each layer, and in the last row the `loss` of the model, and the `share` of heads whose
    mean |x + y|^2 lies in `window`; `unigram`, the loss of token frequencies, for a run of task=mlm.
    """

    metric = "hidden_error"

    def __init__(self, model: str | None, text: str | Sequence[str] | None, calibration: str | Sequence[str] | None,
                 tokenizer: str | None, length: Count | None, texts: Count, calibration_texts: Count, draws: Whole,
                 window: tuple[float, float], cache_dir: str | None):
        if model is None or text is None:
            raise ValueError("task=fidelity needs task.model=... (a folder, a run or a hub name) and task.text=... "
                             "(held out, or a part of WikiText-2)")
        self.model, self.draws, self.window = model, draws, window
        self.read = {"model": model, "text": files(text), "calibration": files(calibration), "tokenizer": tokenizer,
                     "length": length, "texts": texts, "calibration_texts": calibration_texts, "cache_dir": cache_dir}

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        read = subject(**self.read)
        made = [errors_of(read, replace(mechanism, seed=each)) for each in range(self.draws) or [seed]]
        of_texts, of_layers = ({key: np.mean([each[key] for each in found], 0).tolist() for key in found[0]}
                               for found in zip(*made))
        yield of_texts
        yield from ({"layer": i, "sample": "", **{key: values[i] for key, values in of_layers.items()}}
                    for i in range(len(read.calls[0])))
        last = {"sample": "", "cost": float(np.mean(of_texts.get("above", np.nan))),
                "hidden_error": float(np.mean(of_texts["hidden_error"]))}
        if mechanism.is_exact:
            S = head_norms(read)
            yield from ({"layer": i, "sample": "", "S": float(np.mean(each)), "S_least": min(each),
                         "S_largest": max(each)} for i, each in enumerate(S))
            low, high = self.window
            last["share"] = float(np.mean([low <= each <= high for layer in S for each in layer]))
            if read.predicts:
                last["loss"] = float(np.mean([each.loss for each in read.exact]))
            if Path(self.model, "config.yaml").is_file():
                last["unigram"] = unigram(kept_task(self.model))
        yield last

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return f"hidden_error {last['hidden_error']:.4g}, loss increase {last['cost']:.4g} nats"


def head_norms(subject: Subject) -> list[list[float]]:
    """Mean |x + y|^2 of each head of each attention layer, over documents."""
    return [torch.stack([call.sums() for call in calls]).mean(0).tolist() for calls in zip(*subject.calls)]


def errors_of(subject: Subject, mechanism: Mechanism) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Errors of each document, and of each layer, means over documents."""
    measured = subject.measured(mechanism)
    layers = {f"{kind}_error": measured[kind].mean(0).tolist() for kind in ("attention", "hidden")}
    texts = {"attention_error": measured["attention"].mean(1), "hidden_error": measured["hidden"][:, -1],
             **{key: measured[key] for key in ("cosine", "above") if key in measured}}
    return {key: values.tolist() for key, values in texts.items()}, layers


def unigram(task: MLM) -> float:
    """Loss in nats on the validation text of a run of the token frequencies of its training text."""
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=len(task.tokenizer))
                    for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never predicted
    logs = np.log((known + 1) / (known.sum() + len(known)))
    return float(-(asked * logs).sum() / asked.sum())
