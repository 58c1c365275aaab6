"""Errors and loss of trained models after a swap, without training.

task=fidelity measures a pretrained language model. task=swap_loss measures a saved run with exact attention, whose
weights are loaded as by task.init.

Notation: L tokens of a document, H query heads, Hkv key heads, d their dimension, D the width of the model. `above` is
the loss increase over exact attention in nats. Errors are relative, in the Frobenius norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import text as data
from crt_exp.experiments.data.text import official_file
from crt_exp.experiments.measure import SwapMeasurement, check_start
from crt_exp.experiments.measure.advise import length_in, load_language_model, rows_of
from crt_exp.experiments.measure.bench import SHARE, TextBench, calibrated_layers, nats
from crt_exp.experiments.runner.configuration import load_task
from crt_exp.experiments.tasks.base import Plan, Reader, Task
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import learns
from crt_exp.validation import Count, FileName, Files, Several, Whole, checked

SPLITS = ("train", "valid", "test")  # of WikiText-2
TextOption = Annotated[str, Files(SPLITS)] | Sequence[FileName] | None


class LayerCall(NamedTuple):
    """One call of an attention layer: inputs and output.

    q (1, H, L, d), k and v (1, Hkv, L, .), unscaled.
    """

    path: str
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    causal: bool
    output: Tensor

    @classmethod
    def of(cls, state: nn.Module, given: tuple, output: Tensor) -> "LayerCall":
        return cls(state.path, *given[:3], state.scaling, state.causal, output)


class Pass(NamedTuple):
    """Hidden states of one document after each layer, and the mean loss in nats.

    The loss is None for a bare encoder.
    """

    states: list[Tensor]  # (1, L, D) each
    loss: float | None

    @property
    def embedding(self) -> Tensor:
        """Mean over tokens of the last hidden states, (D,) float64."""
        return self.states[-1][0].double().mean(0)


class Subject(TextBench):
    """A pretrained Hugging Face model and `texts` documents of `length` tokens.

    Args:
        model: Hub name, folder or run of task=mlm, trained with exact attention.
        text: Held-out files or folders. Documents are spread over the text.
        calibration: Other files, to fit causal layers with fitted parameters, as by `calibrate_attention`.
        seed: Seed of the masked positions, which are equal for all attention.
        cache_dir: Folder of cached tokens.

    Raises:
        DataError: For a missing model, tokenizer or text.
        ValueError: For a model without exact attention or text input, too few tokens, or a file in both text and
            calibration.
    """

    def __init__(
        self,
        model: str,
        text: str | Sequence[str],
        calibration: str | Sequence[str] | None,
        tokenizer: str | None,
        length: int | None,
        texts: int,
        calibration_texts: int,
        seed: int,
        cache_dir: str | Path | None = None,
    ):
        self.name = model
        loaded, self.tokenizer = load_language_model(model, tokenizer)
        L = length_in(loaded, length)
        check_apart(text, calibration)

        def pieces(source: str | Sequence[str], count: int, option: str) -> Tensor:
            return spread(
                rows_of(source, loaded, self.tokenizer, L, cache_dir), count, source, option
            )

        super().__init__(
            loaded,
            pieces(text, texts, "task.texts"),
            None
            if calibration is None
            else pieces(calibration, calibration_texts, "task.calibration_texts"),
            seed=seed,
        )
        self.calls: list[list[LayerCall]] = []
        self.exact = [self.record_exact(i) for i in range(texts)]

    # ---- reading

    @torch.no_grad()
    def read(self, i: int) -> Pass:
        """Run the model with its present attention on document i."""
        out = self.run(self.rows[i : i + 1])
        states = list(out.hidden_states[1:])
        if self.predicts is None:
            return Pass(states, None)
        inputs, labels = self.inputs_and_labels(i)
        logits = out.logits if self.causal else self.model(input_ids=inputs).logits
        return Pass(states, float(nats(logits, labels).mean()))

    def run(self, ids: Tensor) -> Any:
        return super().run(ids, output_hidden_states=True)

    def inputs_and_labels(self, i: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of document i; masked models get BERT's corruption."""
        if self.causal:
            return super().inputs_and_labels(i)
        draw = data.uniforms([data.generator_of(self.seed, i)], self.length)
        batch = data.Masking.from_tokenizer(self.tokenizer, SHARE)(
            self.rows[i : i + 1].numpy(), draw
        )
        return batch["input_ids"], batch["labels"]

    def record_exact(self, i: int) -> Pass:
        """Run the exact model on document i; append its attention calls to `calls`."""
        exact = self.read(i)
        self.calls.append(self.record_calls(self.rows[i : i + 1], LayerCall.of)[0])
        return exact

    # ---- other attention

    @torch.no_grad()
    def measured(self, mechanism: Mechanism) -> dict[str, np.ndarray]:
        """Measure all documents with all attention layers swapped, without training.

        Returns:
            Arrays by name. `attention` (documents, calls): relative error of each layer's output for the exact model's
            queries, keys and values. `hidden` (documents, layers): relative error of the hidden states.
            `cosine` (documents,): cosine similarity of the mean states.
            `above` (documents,): loss increase over exact attention in nats, for models that predict tokens.
        """
        with self.swapped(mechanism) as states:
            records = [self.document_record(i, states) for i in range(len(self.rows))]
        arrays = {}
        for key in records[0]:
            arrays[key] = np.array([record[key] for record in records])
        return arrays

    def document_record(self, i: int, states: dict[str, nn.Module]) -> dict[str, Any]:
        exact = self.exact[i]
        swapped = self.read(i)
        layer_errors = []
        for call in self.calls[i]:
            output = states[call.path].forward(call.q, call.k, call.v)
            layer_errors.append(float(relative_error(output, call.output)))
        hidden_errors = []
        for state, expected in zip(swapped.states, exact.states):
            hidden_errors.append(float(relative_error(state, expected)))
        cosine = F.cosine_similarity(swapped.embedding, exact.embedding, dim=0)
        record = {"attention": layer_errors, "hidden": hidden_errors, "cosine": float(cosine)}
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
    size = expected.double().square().sum(dims).sqrt()
    return error / size


def spread(rows: Tensor, count: int, source: str | Sequence[str], option: str) -> Tensor:
    """Select `count` rows, spread over the text. Raises ValueError if there are fewer."""
    if len(rows) < count:
        raise ValueError(
            f"{option}={count}: {source} has {len(rows)} pieces of {rows.shape[1]} tokens; use a longer "
            "text, fewer pieces or a smaller task.length"
        )
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def check_apart(text: str | Sequence[str], calibration: str | Sequence[str] | None) -> None:
    """Raise ValueError if text and calibration share a file."""
    if calibration is None:
        return
    names = {data.content(file): file for file in data.text_files(text)}
    for digest in map(data.content, data.text_files(calibration)):
        if digest in names:
            raise ValueError(
                f"task.calibration: {Path(names[digest]).name} is also in task.text; "
                "expected disjoint files"
            )


# ---- task=fidelity


@lru_cache(maxsize=2)
def subject(
    model: str,
    text: str | tuple[str, ...],
    calibration: str | tuple[str, ...] | None,
    **options: Any,
) -> Subject:
    return Subject(model, text, calibration, seed=0, **options)


def files(text: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Return the files of a corpus; train, valid and test name splits of WikiText-2."""
    if text is None:
        return None
    if not isinstance(text, str):
        return tuple(text)
    return str(official_file("wikitext2", text)) if text in SPLITS else text


@checked("task")
class Fidelity(SwapMeasurement):
    """task=fidelity: errors and loss of a pretrained language model after a swap.

    conf/task/fidelity.yaml explains the options. Rows: lists over documents of `above`, `hidden_error`,
    `attention_error` and `cosine`; both errors of each `layer`; then the means, with `cost` the mean of `above`. With
    attention=exact the last row also has the `loss` of the model.
    """

    metric = "hidden_error"

    def __init__(
        self,
        model: FileName | None,
        text: TextOption,
        calibration: TextOption,
        tokenizer: FileName | None,
        length: Count | None,
        texts: Count,
        calibration_texts: Count,
        draws: Whole,
        cache_dir: str | None,
    ):
        if model is None or text is None:
            raise ValueError(
                "task=fidelity: expected task.model=... (a folder, a run or a hub name) and task.text=..."
            )
        self.draws = draws
        self.read = {
            "model": model,
            "text": files(text),
            "calibration": files(calibration),
            "tokenizer": tokenizer,
            "length": length,
            "texts": texts,
            "calibration_texts": calibration_texts,
            "cache_dir": cache_dir,
        }

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        model = subject(**self.read)
        document_errors, layer_errors = [], []
        for projection_seed in range(self.draws) or [seed]:
            seeded = replace(mechanism, seed=projection_seed)
            documents, layers = errors_of(model, seeded)
            document_errors.append(documents)
            layer_errors.append(layers)
        documents = mean_by_key(document_errors)
        layers = mean_by_key(layer_errors)
        yield documents
        for i in range(len(model.calls[0])):
            row = {"layer": i, "sample": ""}
            for key, values in layers.items():
                row[key] = values[i]
            yield row
        last = {
            "sample": "",
            "cost": float(np.mean(documents.get("above", np.nan))),
            "hidden_error": float(np.mean(documents["hidden_error"])),
        }
        if mechanism.is_exact and model.predicts:
            last["loss"] = float(np.mean([exact.loss for exact in model.exact]))
        yield last

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return f"hidden_error {last['hidden_error']:.4g}, loss increase {last['cost']:.4g} nats"


def mean_by_key(records: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the elementwise mean of lists of equal length, for each key."""
    means = {}
    for key in records[0]:
        means[key] = np.mean([record[key] for record in records], 0).tolist()
    return means


def errors_of(
    subject: Subject, mechanism: Mechanism
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return errors of each document, and of each layer averaged over documents."""
    measured = subject.measured(mechanism)
    layers = {f"{kind}_error": measured[kind].mean(0).tolist() for kind in ("attention", "hidden")}
    documents = {
        "attention_error": measured["attention"].mean(1).tolist(),
        "hidden_error": measured["hidden"][:, -1].tolist(),
    }
    for key in ("cosine", "above"):
        if key in measured:
            documents[key] = measured[key].tolist()
    return documents, layers


# ---- task=swap_loss


@lru_cache(maxsize=8)
def task_of(start: str) -> Task:
    """Load the task of a saved run, which starts from its weights."""
    return load_task(start, init=start)


@checked("task")
class SwapLoss(SwapMeasurement):
    """task=swap_loss: metrics of a saved run after a swap, one row per split."""

    metric = "loss"

    def __init__(
        self, start: FileName | None, splits: Several[str], offset: Whole = 0, fit: Whole = 0
    ):
        self.start = start
        self.splits = splits
        self.offset = offset
        self.fit = fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_start(self.start)
        task = task_of(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            batches = islice(task.batches("train", Plan(1)), self.fit)
            calibrated_layers(model, [task.model_inputs(batch) for batch in batches])
        for split in self.splits:
            row = {"split": split, "step": 0}
            for metric, value in task.evaluate(model, split, Reader(task)).items():
                if isinstance(value, (int, float)):
                    row[metric] = value
            yield row
