"""`crt_exp.advise` and task=advise: recommend an attention method for a pretrained model.

The recommendation uses losses, times and memory of a `Bench`. task=advise reads model and data from files.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.experiments.intervals import interval
from crt_exp.experiments.measure import Measurement, Records
from crt_exp.experiments.measure.bench import (
    MASKED,
    BatchBench,
    Bench,
    Split,
    TextBench,
    length_of,
    predicts,
)
from crt_exp.experiments.measure.recommendation import EXACT, UNIFORM, Advice, Row, pays_from
from crt_exp.experiments.measure.times import ratio
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import check_batch, check_ids, eval_mode, learns
from crt_exp.validation import Count, FileName, Positive, checked

TRIED = ("nearfar", "window", "favorpp", UNIFORM)  # default methods
TEXTS = "strings, one tensor of token ids or images, or a list of dictionaries of arguments"
LEAST = 32  # minimum length of a document, in tokens
TOLERANCE = 0.02  # nats; 2% of the perplexity


def advise(
    model: nn.Module,
    texts: str | Sequence[str] | Tensor | Sequence[Mapping[str, Any]],
    *,
    labels: Tensor | None = None,
    length: int | None = None,
    tokenizer: Any = None,
    attentions: Sequence[str] | None = None,
    samples: int | None = None,
    calibration: int = 4,
    rounds: int = 3,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> "Advice":
    """Measure several attention methods in a model and recommend one.

    The model is unchanged afterwards.

    Args:
        model: the pretrained model.
        texts: held-out samples. For a language model: strings (with `tokenizer`), or one tensor of token ids. For an
            image model: a tensor (n, C, H, W). For any other model: a list of dictionaries of its arguments.
        labels: classes (n,) of the images. Without labels, outputs are compared with those of exact attention.
        length: tokens of a document. Default: 512, or the model's positions if fewer.
        attentions: methods such as "window block=32". Default: TRIED.
        samples: number of samples to evaluate. Default: 8 documents, 64 images, 16 others. 95% CIs are over samples.
        calibration: number of further samples, to which attention is fitted.
        rounds: timing rounds; the median counts.
        tolerance: allowed loss increase over exact attention, in nats.
        seed: seed of the random projections.

    Returns:
        An `Advice` with `.sentence`, `.code`, `.rows` and `.save(folder)`; print it for a table.

    Raises:
        ValueError: the data do not fit the model, or there are too few samples.
        TypeError: the data are of another type.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    >>> ids = torch.randint(50, (768,), generator=torch.Generator().manual_seed(0))
    >>> advice = advise(model, ids, length=64, rounds=1, attentions=["window", "uniform"])
    >>> [row.attention for row in advice.rows]
    ['exact', 'window', 'uniform']
    """
    with eval_mode(model):
        split = Split(samples, calibration, seed)
        bench: Bench
        if _are_tokens(texts):
            if labels is not None:
                raise ValueError("labels: not used for token ids; remove labels")
            ids = texts if isinstance(texts, Tensor) else _tokens(texts, tokenizer)
            ids = ids.flatten().long()
            length = length_of(model, length, LEAST)
            rows = ids[: len(ids) // length * length].view(-1, length)
            bench = text_bench(model, rows, split, tokenizer)
        else:
            bench = _batch_bench(model, texts, labels, split)
        methods = mechanisms(attentions, seed)
        records = list(measure_methods(bench, methods, rounds))
        return advice_of(bench, methods, records, tolerance)


# ---- samples


def _are_tokens(texts: Any) -> bool:
    """Whether samples are strings or token ids, or else images or dictionaries.

    Raises ValueError or TypeError for other samples.
    """
    if isinstance(texts, Tensor):
        images = texts.is_floating_point() and texts.ndim == 4
        ids = texts.ndim in (1, 2) and not texts.is_floating_point() and texts.dtype != torch.bool
        if images or ids:
            return ids
        raise ValueError(
            f"texts: tensor {tuple(texts.shape)} of {texts.dtype}; expected token ids (n,) of torch.long, or "
            "images (n, C, H, W) of floating point, as of the model's image processor"
        )
    if isinstance(texts, str):
        return True
    if not isinstance(texts, Sequence):
        raise TypeError(f"texts: {type(texts).__name__}, expected {TEXTS}")
    if not texts:
        raise ValueError(f"texts: empty, expected {TEXTS}")
    kind = str if isinstance(texts[0], str) else Mapping
    for i, text in enumerate(texts):
        if not isinstance(text, kind):
            raise TypeError(f"texts[{i}]: {type(text).__name__}, expected {TEXTS}")
    return kind is str


def _tokens(texts: str | Sequence[str], tokenizer: Any) -> Tensor:
    if tokenizer is None:
        raise ValueError("tokenizer=None: expected a tokenizer for strings, or token ids")
    ids: list[int] = []
    for text in [texts] if isinstance(texts, str) else texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids)


def text_bench(model: nn.Module, rows: Tensor, split: Split, tokenizer: Any) -> TextBench:
    """Build the bench of a language model from token ids (n, length).

    Raises ValueError for models that predict neither masked nor next tokens.
    """
    predicted = predicts(model)
    mask = getattr(tokenizer, "mask_token_id", None)
    if predicted is None:
        raise ValueError(
            f"{type(model).__name__}: predicts no tokens; use AutoModelForCausalLM or ...MaskedLM"
        )
    if predicted == MASKED and mask is None:
        raise ValueError(
            f"{type(model).__name__}: predicts masked tokens; pass tokenizer=..., with a mask token"
        )
    check_ids(model, rows, "texts")
    judged, training = split.indices(len(rows), f"texts of {rows.shape[1]} tokens", "texts")
    special = getattr(tokenizer, "all_special_ids", ())
    options = {"mask": mask, "special": special, "seed": split.seed}
    return TextBench(model, rows[judged], rows[training], **options)


def _batch_bench(model: nn.Module, pieces: Any, labels: Tensor | None, split: Split) -> BatchBench:
    noun = "images" if isinstance(pieces, Tensor) else "pieces"
    batches = pieces.split(1) if isinstance(pieces, Tensor) else pieces
    judged, training = split.indices(len(batches), noun, noun)
    for i in (*judged, *training):
        check_batch(model, batches[i], f"texts[{i}]")
    judged_labels = None
    if labels is not None:
        shape = (len(batches),)
        if not (
            isinstance(labels, Tensor) and labels.shape == shape and labels.dtype == torch.long
        ):
            raise ValueError(f"labels: expected a tensor {shape} of torch.long, one per sample")
        judged_labels = [labels[i : i + 1] for i in judged]
    return BatchBench(
        model,
        [batches[i] for i in judged],
        [batches[i] for i in training],
        noun=noun,
        seed=split.seed,
        labels=judged_labels,
    )


# ---- measuring


def mechanisms(attentions: Sequence[str] | None, seed: int = 0) -> dict[str, Mechanism | None]:
    """Name -> mechanism, exact (None) first. Raises ConfigError for unknown names."""
    result: dict[str, Mechanism | None] = {EXACT: None}
    for name in TRIED if attentions is None else attentions:
        if name != EXACT:
            result[name] = Mechanism.parse(name, seed=seed)
    return result


def measure_methods(bench: Bench, methods: Mapping[str, Mechanism | None], rounds: int) -> Records:
    """Yield a record of losses and memory for each method, then times by length."""
    longest = bench.timed[bench.length]
    for label, attention in methods.items():
        losses = bench.losses(attention)
        report(f"{label}: loss {statistics.mean(losses['loss']):.3f} nats")
        yield {"attention": label, **losses, "mib": bench.memory(attention, longest)}
    for length, piece in bench.timed.items():
        times = bench.times(methods, piece, rounds)
        report(f"timed {length} tokens")
        yield {"length": length, "ms": times}


def report(progress: str) -> None:
    print(f"advise: {progress}", file=sys.stderr, flush=True)


def advice_of(
    bench: Bench,
    methods: Mapping[str, Mechanism | None],
    records: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> Advice:
    """Build the advice from the records of `measure_methods`."""
    losses = {record["attention"]: record for record in records if "attention" in record}
    times = {record["length"]: record["ms"] for record in records if "length" in record}
    own = losses[EXACT]
    rows = []
    for label, record in losses.items():
        gains = {}
        ms = {}
        for length, rounds in times.items():
            gains[length] = ratio(rounds[EXACT], rounds[label])
            ms[length] = statistics.median(rounds[label])
        above, above_ci95 = mean_difference(record["loss"], own["loss"])
        row = Row(label, above, above_ci95, ms=ms, mib=record["mib"])
        row.speedup = gains[max(gains)]
        row.pays_from = pays_from(gains)
        if own["repeated"]:
            row.repeated, row.repeated_ci95 = mean_difference(record["repeated"], own["repeated"])
        with bench.swapped(methods[label]) as states:
            row.exact_to = min((state.exact_to for state in states.values()), default=0)
            row.fitted = learns(bench.model)
        rows.append(row)
    repeated = statistics.mean(own["repeated"]) if own["repeated"] else None
    return Advice(
        rows,
        bench.length,
        len(bench.judged),
        statistics.mean(own["loss"]),
        repeated,
        tolerance,
        bench.noun,
        bench.labelled,
    )


def mean_difference(losses: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """Mean difference and the half-width of its 95% Student interval (NaN for n = 1)."""
    difference = interval(np.subtract(losses, own), "mean")
    half_width = math.nan if len(own) == 1 else difference["mean_ci95"]
    return difference["mean"], half_width


# ---- task=advise


@checked("task")
@dataclass(eq=False)
class Advise(Measurement):
    """task=advise: compare attention methods in a pretrained model, recommend one.

    conf/task/advise.yaml explains the options. The last row contains the recommendation.
    """

    metric = "above"
    uses = frozenset()

    model: FileName
    text: FileName | Sequence[FileName] | None
    images: FileName | None
    audio: FileName | None
    tokenizer: FileName | None
    length: Count | None
    attentions: Sequence[str] | None
    samples: Count | None
    calibration: Count
    rounds: Count
    tolerance: Positive
    cache_dir: str | None

    def __post_init__(self):
        if [self.text, self.images, self.audio].count(None) != 2:
            raise ValueError("expected one of task.text, task.images and task.audio")
        if self.text is None and (self.tokenizer or self.length):
            raise ValueError("task.tokenizer, task.length: only for task.text; remove them")
        mechanisms(self.attentions)

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        bench = self.bench(seed)
        records = []
        methods = mechanisms(self.attentions, seed)
        for record in measure_methods(bench, methods, self.rounds):
            records.append(record)
            yield record
        self.advice = advice_of(bench, methods, records, self.tolerance)
        chosen = self.advice.chosen or self.advice.rows[0]
        yield {
            "above": chosen.above,
            "above_ci95": chosen.above_ci95,
            "speedup": chosen.speedup,
            "attention": chosen.attention,
            "advice": self.advice.sentence,
            "table": str(self.advice),
        }

    def inputs(self) -> list[Path]:
        """Return the audio files that a table names."""
        from crt_exp.experiments.data.speech import read_table

        table = Path(self.audio or "").expanduser()
        return [Path(name) for name in read_table(table).audio] if table.is_file() else []

    def bench(self, seed: int) -> Bench:
        """Load model and data. Raises DataError and ValueError if they do not match."""
        from crt_exp.experiments.measure import model_files

        split = Split(self.samples, self.calibration, seed)
        if self.images is not None:
            return model_files.image_bench(self.model, self.images, split)
        if self.audio is not None:
            return model_files.audio_bench(self.model, self.audio, split)
        model, tokenizer = model_files.load_language_model(self.model, self.tokenizer)
        length = model_files.length_in(model, self.length, LEAST)
        rows = model_files.rows_of(self.text, model, tokenizer, length, self.cache_dir)
        return text_bench(model, rows, split, tokenizer)

    def summary(self, records: list[dict]) -> str:
        return records[-1]["table"]

    def save_results(self, records: list[dict], directory: Path) -> None:
        """Write advise.csv, advise.md and advise.png to the run directory."""
        if self.advice is not None:
            self.advice.save(directory)
