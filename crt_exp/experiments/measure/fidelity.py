"""Errors and loss of trained models after a swap, without training.

task=fidelity measures a pretrained language model. task=swap_loss measures a saved run with exact attention, whose
weights are loaded as by task.init.

Notation: L tokens of a document, H query heads, Hkv key heads, d their dimension, D the width of the model. `above` is
the loss increase over exact attention in nats. Errors are relative, in the Frobenius norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from crt_exp.attention import exact_attention
from crt_exp.attention.running import for_query_heads, grouped_statistics
from crt_exp.experiments.data import text as data
from crt_exp.experiments.data.files import sha256
from crt_exp.experiments.data.text import official_file
from crt_exp.experiments.measure import Record, Records, SwapMeasurement, TensorPair
from crt_exp.experiments.measure.bench import (
    TextBench,
    evenly_spaced,
    fit_attention,
    nats,
)
from crt_exp.experiments.measure.model_files import length_in, load_language_model, rows_of
from crt_exp.experiments.runner.configuration import load_task
from crt_exp.experiments.tasks.base import Plan, Reader, Task, task_class
from crt_exp.features import FeatureMap
from crt_exp.features.base import Params
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import learns
from crt_exp.validation import Count, FileName, Files, Several, Whole

SPLITS = ("train", "valid", "test")  # of WikiText-2
TextOption = Annotated[str, Files(SPLITS)] | Sequence[FileName]


@dataclass
class LayerCall:
    """One call of an attention layer: inputs and output, unscaled q and k.

    Scaled queries x and keys y have the logits x.y. Grouped query heads share keys.
    """

    path: str
    q: Tensor  # (1, H, L, d)
    k: Tensor  # (1, Hkv, S, d)
    v: Tensor  # (1, Hkv, S, dv)
    scaling: float = 1.0
    causal: bool = False
    recorded: Tensor | None = None

    def __post_init__(self):
        self.x = self.scaling**0.5 * self.q
        self.y = self.scaling**0.5 * self.k
        self.heads = self.q.shape[1]
        self.d = self.q.shape[3]

    @classmethod
    def of(cls, layer: nn.Module, arguments: tuple, output: Tensor) -> "LayerCall":
        return cls(layer.path, *arguments[:3], layer.scaling, layer.causal, output)

    @cached_property
    def output(self) -> Tensor:
        """Output of exact attention, (1, H, L, dv)."""
        return exact_attention(self.x, self.y, self.v, causal=self.causal)

    def fit(self, phi: FeatureMap) -> Params:
        """Fit parameters (1, H, 1, ...) to these tensors, jointly for grouped query heads."""
        params = phi.fit(grouped_statistics(self.x, self.y))
        return for_query_heads(params, self.heads // self.y.shape[1])


class HiddenStates(NamedTuple):
    """Hidden states of one document after each layer, and the mean loss in nats.

    The loss is None for a bare encoder.
    """

    states: list[Tensor]  # (1, L, D) each
    loss: float | None


class DocumentBench(TextBench):
    """A pretrained Hugging Face model and `texts` documents of `length` tokens.

    Args:
        model: Hub name, folder or run of task=mlm, trained with exact attention.
        text: Held-out files or folders. Documents are spread over the text.
        calibration: Other files, to fit causal layers with fitted parameters, as by `calibrate_attention`.
        cache_dir: Folder of cached tokens.

    Raises:
        DataError: For a missing model, tokenizer or text.
        ValueError: For a model without exact attention or text input, too few tokens, or a file in both text and
            calibration.
    """

    def __init__(
        self,
        model: str,
        text: data.Paths,
        calibration: data.Paths | None = None,
        length: int | None = None,
        texts: int = 1,
        calibration_texts: int = 1,
        cache_dir: str | Path | None = None,
    ):
        loaded, self.tokenizer = load_language_model(model)
        L = length_in(loaded, length)
        check_disjoint(text, calibration)

        def documents(source: data.Paths, option: str, count: int) -> Tensor:
            rows = rows_of(source, loaded, self.tokenizer, L, cache_dir)
            if len(rows) < count:
                raise ValueError(
                    f"{option}={count}: {source} has {len(rows)} pieces of {L} tokens; use a longer "
                    "text, fewer pieces or a smaller task.length"
                )
            return rows[evenly_spaced(len(rows), count)]

        training = None
        if calibration is not None:
            training = documents(calibration, "task.calibration_texts", calibration_texts)
        super().__init__(loaded, documents(text, "task.texts", texts), training)
        # hidden states and attention calls of the exact model, by document
        self.exact: list[HiddenStates] = []
        self.calls: list[list[LayerCall]] = []
        for i, row in enumerate(self.rows.split(1)):
            self.exact.append(self.hidden_states(i))
            self.calls.append(self.record_calls(row, LayerCall.of)[0])

    @torch.no_grad()
    def hidden_states(self, i: int) -> HiddenStates:
        """Run the model with its present attention on document i."""
        output = self.run(self.rows[i : i + 1])
        states = list(output.hidden_states[1:])
        if self.predicts is None:
            return HiddenStates(states, None)
        inputs, labels = self.inputs_and_labels(i)
        if not self.causal:
            output = self.model(input_ids=inputs)
        return HiddenStates(states, float(nats(output.logits, labels).mean()))

    def run(self, ids: Tensor) -> Any:
        return super().run(ids, output_hidden_states=True)

    def inputs_and_labels(self, i: int) -> TensorPair:
        """Return inputs and labels of document i; masked models get BERT's corruption."""
        if self.causal:
            return super().inputs_and_labels(i)
        # equal for all attention
        uniform = data.uniforms([data.generator_of(0, i)], self.length)
        masking = data.Masking.from_tokenizer(self.tokenizer)
        batch = masking(self.rows[i : i + 1].numpy(), uniform)
        return batch["input_ids"], batch["labels"]

    # ---- other attention

    @torch.no_grad()
    def errors(self, mechanism: Mechanism) -> dict[str, np.ndarray]:
        """Measure all documents with all attention layers swapped, without training.

        Returns:
            Arrays by name. `attention` (documents, calls): relative error of each layer's output for the exact model's
            queries, keys and values. `hidden` (documents, layers): relative error of the hidden states.
            `above` (documents,): loss increase over exact attention in nats, for models that predict tokens.
        """
        with self.swapped(mechanism) as states:
            records = pd.DataFrame(self.document_errors(i, states) for i in range(len(self.rows)))
        return {name: np.array([*values]) for name, values in records.items()}

    def document_errors(self, i: int, states: dict[str, nn.Module]) -> Record:
        exact = self.exact[i]
        swapped = self.hidden_states(i)
        record: Record = {"attention": []}
        for call in self.calls[i]:
            output = states[call.path].forward(call.q, call.k, call.v)
            record["attention"].append(float(relative_error(output, call.recorded)))
        pairs = zip(swapped.states, exact.states)
        record["hidden"] = [float(relative_error(*pair)) for pair in pairs]
        if exact.loss is not None:
            record["above"] = swapped.loss - exact.loss
        return record

    def fit(self, attention: Mechanism) -> None:
        if self.training is None and learns(self.model):
            raise ValueError(
                f"attention={attention.name}: fitted to training text; set task.calibration=FILE"
            )
        super().fit(attention)


def relative_error(
    estimate: Tensor, expected: Tensor, dims: tuple[int, ...] | None = None
) -> Tensor:
    """Return |estimate - expected| / |expected|, float64, in the Frobenius norm.

    dims: dimensions of the norm. Default: all.
    """
    error = (estimate.double() - expected).square().sum(dims).sqrt()
    return error / expected.double().square().sum(dims).sqrt()


def check_disjoint(text: data.Paths, calibration: data.Paths | None) -> None:
    """Raise ValueError if text and calibration share a file."""
    if calibration is None:
        return
    held_out = {sha256(file) for file in data.text_files(text)}
    for file in data.text_files(calibration):
        if sha256(file) in held_out:
            raise ValueError(
                f"task.calibration: {Path(file).name} is also in task.text; expected disjoint files"
            )


# ---- task=fidelity


load_bench = lru_cache(maxsize=2)(DocumentBench)


def files(text: data.Paths) -> str | tuple[str, ...]:
    """Return the files of a corpus; train, valid and test name splits of WikiText-2."""
    if not isinstance(text, str):
        return tuple(text)
    return str(official_file("wikitext2", text)) if text in SPLITS else text


@task_class
class Fidelity(SwapMeasurement):
    """task=fidelity: errors and loss of a pretrained language model after a swap.

    conf/task/fidelity.yaml explains the options. Rows: lists over documents of `above`, `hidden_error` and
    `attention_error`; both errors of each `layer`; then the means, with `cost` the mean of `above`. With
    attention=exact the last row also has the `loss` of the model.
    """

    metric = "hidden_error"

    model: FileName
    text: TextOption
    calibration: TextOption | None
    length: Count | None
    texts: Count
    calibration_texts: Count
    draws: Whole
    cache_dir: str | None

    def __post_init__(self):
        self.text = files(self.text)
        if self.calibration is not None:
            self.calibration = files(self.calibration)

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        bench = load_bench(
            self.model,
            self.text,
            self.calibration,
            self.length,
            self.texts,
            self.calibration_texts,
            cache_dir=self.cache_dir,
        )
        seeds = range(self.draws) or [seed]
        errors = pd.DataFrame(bench.errors(replace(mechanism, seed=draw)) for draw in seeds)
        means = {name: np.mean([*values], 0) for name, values in errors.items()}
        attention = means.pop("attention")
        hidden = means.pop("hidden")
        documents = {"attention_error": attention.mean(1), "hidden_error": hidden[:, -1], **means}
        yield {name: values.tolist() for name, values in documents.items()}
        layers = zip(attention.mean(0).tolist(), hidden.mean(0).tolist())
        for i, (attention_error, hidden_error) in enumerate(layers):
            yield {
                "layer": i,
                "sample": "",
                "attention_error": attention_error,
                "hidden_error": hidden_error,
            }
        last = {
            "sample": "",
            "cost": float(np.mean(documents.get("above", np.nan))),
            "hidden_error": float(np.mean(documents["hidden_error"])),
        }
        if mechanism.is_exact and bench.predicts:
            last["loss"] = float(np.mean([exact.loss for exact in bench.exact]))
        yield last

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return f"hidden_error {last['hidden_error']:.4g}, loss increase {last['cost']:.4g} nats"


# ---- task=swap_loss


@lru_cache(maxsize=8)
def load_run_task(start: str) -> Task:
    """Load the task of a saved run, which starts from its weights."""
    return load_task(start, init=start)


@task_class
class SwapLoss(SwapMeasurement):
    """task=swap_loss: metrics of a saved run after a swap, one row per split."""

    metric = "loss"

    start: FileName
    splits: Several[str]
    offset: Whole = 0
    fit: Whole = 0

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        task = load_run_task(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            batches = islice(task.batches("train", Plan(1)), self.fit)
            fit_attention(model, [task.model_inputs(batch) for batch in batches])
        for split in self.splits:
            row = {"split": split, "step": 0}
            for metric, value in task.evaluate(model, split, Reader(task)).items():
                if isinstance(value, (int, float)):
                    row[metric] = value
            yield row
