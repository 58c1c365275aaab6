"""`crt_exp.advise` and task=advise: recommend an attention method for a pretrained model.

The recommendation uses losses, times and memory of a `Bench`. task=advise reads model and data from files.
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from crt_exp.experiments.measure.recommendation import (
    EXACT,
    UNIFORM,
    Advice,
    Row,
    is_decided,
    mean_difference,
    pays_from,
)
from crt_exp.experiments.measure.times import ratio
from crt_exp.experiments.tasks.base import task_class
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import check_batch, check_ids, eval_mode, learns
from crt_exp.validation import Count, FileName, Positive

TRIED = ("nearfar", "window", "favorpp", UNIFORM)  # default methods
TEXTS = "strings, one tensor of token ids or images, or a list of dictionaries of arguments"
LEAST = 32  # minimum length of a document, in tokens
TOLERANCE = 0.02  # nats; 2% of the perplexity
MINUTES = 4.0  # time budget of a measurement
LOSS_SHARE = 0.6  # of the time budget, for losses
MEMORY_SHARE = 0.7  # of the time budget, after which memory is not measured
FEWEST = 2  # samples of every method, so that each has an interval


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
    minutes: float | None = MINUTES,
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
        samples: maximum number of samples to evaluate. Default: 8 documents, 64 images, 16 others. 95% CIs are over
            samples. A method is measured on fewer samples if these decide its verdict.
        calibration: number of further samples, to which attention is fitted.
        rounds: maximum number of timing rounds; the median counts.
        tolerance: allowed loss increase over exact attention, in nats.
        minutes: time budget of the measurement; None: no limit. The table states what was left out.
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
        trial = Trial(bench, mechanisms(attentions, seed), rounds, tolerance, minutes)
        for _ in trial.records():
            pass
        return trial.advice()


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


@dataclass
class Trial:
    """Measurement of several methods in a bench, within a time budget.

    What does not fit into the budget is left out. At least FEWEST samples and one round of timing at the full length
    are measured.

    Attributes:
        losses: method -> "loss" and "repeated" of its samples.
        mib: method -> peak memory; None if it was not measured.
        times: length -> method -> milliseconds, one value per round.
    """

    bench: Bench
    methods: Mapping[str, Mechanism | None]
    rounds: int
    tolerance: float
    minutes: float | None

    def __post_init__(self):
        self.limit = math.inf if self.minutes is None else 60 * self.minutes  # seconds
        self.begun = time.monotonic()
        self.losses: dict[str, dict[str, list[float]]] = {}
        self.mib: dict[str, float | None] = dict.fromkeys(self.methods)
        self.times: dict[int, dict[str, list[float]]] = {}
        for label in self.methods:
            self.losses[label] = {"loss": [], "repeated": []}
        for length in self.bench.timed:
            self.times[length] = {label: [] for label in self.methods}

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Whether a step of this duration ends within a share of the limit."""
        return self.used + seconds <= share * self.limit

    def left(self, seconds: float) -> str:
        """Describe the time left: `seconds` of work, or the limit if that is less."""
        limit = self.limit - self.used
        if seconds and limit < 0:
            return "time over, measuring only what a verdict needs"
        return f"at most {min(seconds, max(0, limit)):.0f} s left"

    def records(self) -> Records:
        """Measure; yield a record of losses and memory for each method, then times by length."""
        report(
            f"{type(self.bench.model).__name__}: {len(self.methods)} methods, up to "
            f"{len(self.bench.judged)} {self.bench.noun} of {self.bench.length} tokens"
        )
        self.measure_losses()
        seconds = self.pass_seconds()
        for label, attention in self.methods.items():
            if self.allows(seconds, MEMORY_SHARE):
                self.mib[label] = self.bench.memory(attention)
            yield {"attention": label, **self.losses[label], "mib": self.mib[label]}
        self.measure_times()
        for length, times in self.times.items():
            yield {"length": length, "ms": times}

    def pass_seconds(self) -> float:
        """Return the mean seconds of a forward pass so far."""
        passes = 0
        for record in self.losses.values():
            passes += len(record["loss"]) + len(record["repeated"])
        return self.used / passes

    def measure_losses(self) -> None:
        """Measure all methods on one sample after the other.

        A method is finished if its verdict is decided; all are if the time is over.
        """
        undecided = dict(self.methods)
        count = len(self.bench.judged)
        seconds = 0.0
        for i in range(count):
            if i >= FEWEST and not self.allows(seconds, LOSS_SHARE):
                break
            begun = self.used
            for label, attention in undecided.items():
                losses = self.losses[label]
                for key, values in self.bench.losses(attention, [i]).items():
                    losses[key] += values
                if i == 0:
                    report(f"{label}: loss {losses['loss'][0]:.3f} nats ({self.bench.noun}: 1)")
            seconds = self.used - begun
            rest = (count - i - 1) * seconds + self.timing_seconds()
            shown = [self.increase(label) for label in undecided if label != EXACT]
            report(f"{self.bench.noun}: {i + 1} of {count}; {', '.join(shown)}; {self.left(rest)}")
            if i + 1 < FEWEST:
                continue
            for label in [*undecided]:
                if label != EXACT and self.is_decided(label):
                    del undecided[label]
            if [*undecided] == [EXACT]:
                break

    def is_decided(self, label: str) -> bool:
        return is_decided(self.losses[label], self.losses[EXACT], self.tolerance)

    def increase(self, label: str) -> str:
        """Describe the loss increase of a method so far."""
        above, half = mean_difference(self.losses[label]["loss"], self.losses[EXACT]["loss"])
        text = f"{label} {above:+.4f}"
        return text if math.isnan(half) else f"{text} ± {half:.4f}"

    def timing_seconds(self) -> float:
        """Estimate the seconds of all timings from those of one pass at the full length."""
        lengths = sum(self.bench.timed) / self.bench.length
        return len(self.methods) * self.pass_seconds() * (1 + self.rounds * lengths)

    def measure_times(self) -> None:
        """Measure the milliseconds of all methods in turns, the longest samples first."""
        own = self.times[self.bench.length][EXACT]
        seconds_per_token = 0.0
        rest = self.rounds * sum(self.bench.timed)
        for turn in range(self.rounds):
            for length, times in reversed(self.times.items()):
                if own and not self.allows(seconds_per_token * length):
                    return
                begun = self.used
                shown = []
                for label, attention in self.methods.items():
                    ms = self.bench.milliseconds(attention, length)
                    times[label].append(ms)
                    shown.append(f"{label} {ms:.0f} ms")
                seconds_per_token = (self.used - begun) / length
                rest -= length
                report(
                    f"timed {length} tokens, round {turn + 1} of {self.rounds}: {', '.join(shown)}; "
                    f"{self.left(rest * seconds_per_token)}"
                )

    def advice(self) -> Advice:
        """Return the advice that follows from the measured values."""
        own = self.losses[EXACT]
        rows = []
        for label, record in self.losses.items():
            gains = {}
            ms = {}
            for length, times in self.times.items():
                if times[EXACT]:
                    gains[length] = ratio(times[EXACT], times[label])
                    ms[length] = statistics.median(times[label])
            above, half = mean_difference(record["loss"], own["loss"])
            row = Row(
                label,
                above,
                half,
                ms=ms,
                mib=self.mib[label],
                speedup=gains[max(gains)],
                pays_from=pays_from(gains),
                samples=len(record["loss"]),
            )
            if own["repeated"]:
                repeated = mean_difference(record["repeated"], own["repeated"])
                row.repeated, row.repeated_ci95 = repeated
            with self.bench.swapped(self.methods[label]) as states:
                row.exact_to = min((state.exact_to for state in states.values()), default=0)
                row.fitted = learns(self.bench.model)
            rows.append(row)
        return Advice(
            rows,
            self.bench.length,
            len(self.bench.judged),
            statistics.mean(own["loss"]),
            statistics.mean(own["repeated"]) if own["repeated"] else None,
            self.tolerance,
            self.bench.noun,
            self.bench.labelled,
            self.unmeasured(),
        )

    def unmeasured(self) -> list[str]:
        """Return sentences on what was not measured, and why."""
        samples = f"{len(self.bench.judged)} {self.bench.noun}"
        names: dict[str, list[str]] = {"decided": [], "undecided": [], "without memory": []}
        for label, record in self.losses.items():
            if label != EXACT and len(record["loss"]) < len(self.bench.judged):
                names["decided" if self.is_decided(label) else "undecided"].append(label)
            if self.mib[label] is None:
                names["without memory"].append(label)
        decided, undecided, without_memory = [", ".join(listed) for listed in names.values()]
        sentences = {
            f"Fewer than {samples} decided the verdict on {decided}.": decided,
            f"The time was over before all {samples} were measured with {undecided}.": undecided,
            f"Memory was not measured: {without_memory}.": without_memory,
        }
        for length, times in self.times.items():
            rounds = f"{len(times[EXACT])} of {self.rounds} rounds of timing at {length} tokens"
            sentences[f"The time was over after {rounds}."] = len(times[EXACT]) < self.rounds
        return [sentence for sentence, holds in sentences.items() if holds]


def report(progress: str) -> None:
    print(f"advise: {progress}", file=sys.stderr, flush=True)


# ---- task=advise


@task_class
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
    minutes: Positive | None
    cache_dir: str | None

    def __post_init__(self):
        if [self.text, self.images, self.audio].count(None) != 2:
            raise ValueError("expected one of task.text, task.images and task.audio")
        if self.text is None and (self.tokenizer or self.length):
            raise ValueError("task.tokenizer, task.length: only for task.text; remove them")
        mechanisms(self.attentions)

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        bench = self.bench(seed)
        methods = mechanisms(self.attentions, seed)
        trial = Trial(bench, methods, self.rounds, self.tolerance, self.minutes)
        yield from trial.records()
        self.advice = trial.advice()
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
        self.advice.save(directory)
