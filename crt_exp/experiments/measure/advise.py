"""`crt_exp.advise` and task=advise: recommend an attention method for a pretrained model.

The recommendation uses losses, times and memory of a `Bench`. task=advise reads model and data from files.
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
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
            samples.
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
        methods = mechanisms(attentions, seed)
        records = list(measure_methods(bench, methods, rounds, minutes))
        return advice_of(bench, methods, records, tolerance, rounds)


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


class TimeBudget:
    """The time since the start in seconds, and a limit (None: no limit)."""

    def __init__(self, minutes: float | None):
        self.begun = time.monotonic()
        self.seconds = math.inf if minutes is None else 60 * minutes

    @property
    def used(self) -> float:
        return time.monotonic() - self.begun

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Whether a step of this duration ends within a share of the limit."""
        return self.used + seconds <= share * self.seconds

    def left(self, seconds: float) -> str:
        """Describe the time left: `seconds` of work, or the limit if that is less."""
        limit = self.seconds - self.used
        if seconds and limit < 0:
            return "time over"
        return f"at most {min(seconds, max(0, limit)):.0f} s left"


def measure_methods(
    bench: Bench,
    methods: Mapping[str, Mechanism | None],
    rounds: int,
    minutes: float | None,
) -> Records:
    """Yield a record of losses and memory for each method, then times by length.

    What does not fit into the time budget is left out. At least FEWEST samples and one round of timing at the full
    length are measured.
    """
    budget = TimeBudget(minutes)
    report(
        f"{type(bench.model).__name__}: {len(methods)} methods, up to {len(bench.judged)} "
        f"{bench.noun} of {bench.length} tokens"
    )
    losses = measure_losses(bench, methods, rounds, budget)
    seconds = pass_seconds(budget, losses)
    for label, attention in methods.items():
        mib = None
        if budget.allows(seconds, MEMORY_SHARE):
            mib = bench.memory(attention, bench.timed[bench.length])
        yield {"attention": label, **losses[label], "mib": mib}
    for length, times in measure_times(bench, methods, rounds, budget).items():
        yield {"length": length, "ms": times}


Losses = dict[str, dict[str, list[float]]]  # method -> "loss" and "repeated" of its samples


def pass_seconds(budget: TimeBudget, losses: Losses) -> float:
    """Return the mean seconds of a forward pass so far."""
    passes = 0
    for record in losses.values():
        passes += len(record["loss"]) + len(record["repeated"])
    return budget.used / passes


def measure_losses(
    bench: Bench, methods: Mapping[str, Mechanism | None], rounds: int, budget: TimeBudget
) -> Losses:
    """Measure all methods on one sample after the other, until the time is over."""
    losses: Losses = {label: {"loss": [], "repeated": []} for label in methods}
    count = len(bench.judged)
    seconds = 0.0
    for i in range(count):
        if i >= FEWEST and not budget.allows(seconds, LOSS_SHARE):
            break
        begun = budget.used
        for label, attention in methods.items():
            for key, values in bench.losses(attention, [i]).items():
                losses[label][key] += values
            if i == 0:
                report(f"{label}: loss {losses[label]['loss'][0]:.3f} nats ({bench.noun}: 1)")
        seconds = budget.used - begun
        rest = (count - i - 1) * seconds
        rest += timing_seconds(bench, methods, rounds, pass_seconds(budget, losses))
        shown = [describe(label, losses) for label in methods if label != EXACT]
        report(f"{bench.noun}: {i + 1} of {count}; {', '.join(shown)}; {budget.left(rest)}")
    return losses


def describe(label: str, losses: Losses) -> str:
    """Describe the loss increase of a method so far."""
    values = losses[label]["loss"]
    above, half = mean_difference(values, losses[EXACT]["loss"])
    if len(values) == 1:
        return f"{label} {above:+.4f}"
    return f"{label} {above:+.4f} ± {half:.4f}"


def timing_seconds(
    bench: Bench, methods: Mapping[str, Mechanism | None], rounds: int, seconds: float
) -> float:
    """Estimate the seconds of all timings from those of one pass at the full length."""
    return len(methods) * seconds * (1 + rounds * sum(bench.timed) / bench.length)


def measure_times(
    bench: Bench, methods: Mapping[str, Mechanism | None], rounds: int, budget: TimeBudget
) -> dict[int, dict[str, list[float]]]:
    """Measure milliseconds by length, method and round, the longest samples first."""
    times: dict[int, dict[str, list[float]]] = {}
    for length in bench.timed:
        times[length] = {label: [] for label in methods}
    steps = [(turn, length) for turn in range(rounds) for length in reversed(bench.timed)]
    seconds_per_token = 0.0
    rest = sum(length for turn, length in steps)
    for turn, length in steps:
        if not budget.allows(seconds_per_token * length) and times[bench.length][EXACT]:
            break
        begun = budget.used
        measured = bench.times(methods, bench.timed[length], 1)
        for label, values in measured.items():
            times[length][label] += values
        seconds_per_token = (budget.used - begun) / length
        rest -= length
        shown = [f"{label} {values[0]:.0f} ms" for label, values in measured.items()]
        report(
            f"timed {length} tokens, round {turn + 1} of {rounds}: {', '.join(shown)}; "
            f"{budget.left(rest * seconds_per_token)}"
        )
    return times


def report(progress: str) -> None:
    print(f"advise: {progress}", file=sys.stderr, flush=True)


def advice_of(
    bench: Bench,
    methods: Mapping[str, Mechanism | None],
    records: Sequence[Mapping[str, Any]],
    tolerance: float,
    rounds: int,
) -> Advice:
    """Build the advice from the records of `measure_methods`."""
    losses = {record["attention"]: record for record in records if "attention" in record}
    times = {record["length"]: record["ms"] for record in records if "length" in record}
    own = losses[EXACT]
    rows = []
    for label, record in losses.items():
        gains = {}
        ms = {}
        for length, measured in times.items():
            if measured[EXACT]:
                gains[length] = ratio(measured[EXACT], measured[label])
                ms[length] = statistics.median(measured[label])
        above, above_ci95 = mean_difference(record["loss"], own["loss"])
        row = Row(label, above, above_ci95, ms=ms, mib=record["mib"])
        row.speedup = gains[max(gains)]
        row.pays_from = pays_from(gains)
        if own["repeated"]:
            repeated = mean_difference(record["repeated"], own["repeated"])
            row.repeated, row.repeated_ci95 = repeated
        with bench.swapped(methods[label]) as states:
            row.exact_to = min((state.exact_to for state in states.values()), default=0)
            row.fitted = learns(bench.model)
        rows.append(row)
    repeated = statistics.mean(own["repeated"]) if own["repeated"] else None
    return Advice(
        rows,
        bench.length,
        len(own["loss"]),
        statistics.mean(own["loss"]),
        repeated,
        tolerance,
        bench.noun,
        bench.labelled,
        unmeasured(bench, losses, times, rounds),
    )


def unmeasured(
    bench: Bench,
    losses: Mapping[str, Mapping[str, Any]],
    times: Mapping[int, Mapping[str, Sequence[float]]],
    rounds: int,
) -> list[str]:
    """Return sentences on what was not measured."""
    sentences = []
    measured = len(losses[EXACT]["loss"])
    if measured < len(bench.judged):
        sentences.append(f"The time was over after {measured} of {len(bench.judged)} {bench.noun}.")
    without_memory = [label for label, record in losses.items() if record["mib"] is None]
    if without_memory:
        sentences.append(f"Memory was not measured: {', '.join(without_memory)}.")
    for length, measured in times.items():
        if len(measured[EXACT]) < rounds:
            sentences.append(
                f"The time was over after {len(measured[EXACT])} of {rounds} rounds of timing at "
                f"{length} tokens."
            )
    return sentences


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
        records = []
        methods = mechanisms(self.attentions, seed)
        for record in measure_methods(bench, methods, self.rounds, self.minutes):
            records.append(record)
            yield record
        self.advice = advice_of(bench, methods, records, self.tolerance, self.rounds)
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
