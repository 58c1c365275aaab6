"""`crt_exp.advise`: recommend an attention method for a pretrained model.

The recommendation uses losses, times and memory of a `Bench`. A method is close enough if the upper end of its 95% CI
is at most `tolerance` nats. If the model uses repetition, the limit on repeated passages is
`REPEATED` nats. A method pays from the shortest timed length from which every pass is at least MARGIN times as fast.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.drawing import (
    colour,
    label_ends,
    markdown,
    new_figure,
    plain_ticks,
    save_figure,
)
from crt_exp.experiments.intervals import interval
from crt_exp.experiments.measure.bench import (
    MASKED,
    BatchBench,
    Bench,
    TextBench,
    length_of,
    predicts,
)
from crt_exp.experiments.measure.times import ratio
from crt_exp.mechanism import Mechanism
from crt_exp.registry import written_folder
from crt_exp.swap.calibration import check_batch, check_ids, eval_mode, learns

EXACT, UNIFORM = "exact", "uniform"
TRIED = ("nearfar", "window", "favorpp", UNIFORM)  # default methods
SAMPLES = {"texts": 8, "images": 64, "pieces": 16}  # default numbers of samples
TEXTS = "strings, one tensor of token ids or images, or a list of dictionaries of arguments"
LEAST = 32  # minimum length of a document, in tokens
TOLERANCE = 0.02  # nats; 2% of the perplexity
REPEATED = 0.1  # nats, tolerance on repeated passages
CONTROL_TOLERANCES = (
    5  # the control must cost this many tolerances, else the data cannot distinguish methods
)
USES = 0.5  # nats by which exact attention must be better on repeated passages, so that recall is judged
MARGIN = 1.05


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
    """
    with eval_mode(model):
        if _are_tokens(texts):
            if labels is not None:
                raise ValueError("labels: not used for token ids; remove labels")
            ids = texts if isinstance(texts, Tensor) else _tokens(texts, tokenizer)
            ids = ids.flatten().long()
            length = length_of(model, length, LEAST)
            rows = ids[: len(ids) // length * length].view(-1, length)
            bench = text_bench(model, rows, samples, calibration, tokenizer, seed)
        else:
            bench = _batch_bench(model, texts, labels, samples, calibration, seed)
        methods = mechanisms(attentions, seed)
        return advice_of(bench, methods, list(measure_mechanism(bench, methods, rounds)), tolerance)


@dataclass
class Row:
    """Results of one method.

    Losses are means over samples in nats, with half-widths of 95% CIs. `above` is the loss increase over exact
    attention. `ms` maps the length in tokens to the time of a pass in milliseconds. `mib` is the peak memory in MiB.
    """

    attention: str
    above: float
    above_ci95: float
    repeated: float | None = None
    repeated_ci95: float | None = None
    ms: dict[int, float] = field(default_factory=dict)
    mib: float | None = None
    speedup: float = 1.0
    pays_from: int | None = None  # None: not at any timed length
    exact_to: int = 0  # sequence length up to which the method computes exact attention
    fitted: bool = False  # whether it needs calibrate_attention

    @property
    def worst(self) -> float:
        worst = self.above + self.above_ci95
        return worst if math.isfinite(worst) else math.inf


@dataclass
class Advice:
    """The result of `advise`; the first row is the model's own attention."""

    rows: list[Row]
    length: int
    samples: int
    loss: float  # of the model's own attention
    repeated_loss: float | None  # of the model's own attention on repeated passages
    tolerance: float
    noun: str = "texts"
    labelled: bool = True

    def __post_init__(self):
        self.chosen, self.sentence = recommendation(self)
        self.notes = []
        for row in self.rows:
            if row.exact_to >= self.length:
                self.notes.append(
                    f"{row.attention} computes exact attention at {self.length} tokens."
                )
        if self.repeated_loss is not None and not self.uses_repetition:
            self.notes.append(
                "The model's own attention gains little from repeated passages: recall is not judged."
            )
        if not self.labelled:
            self.notes.append(
                "Without labels, nats are the Kullback-Leibler divergence from the model's own outputs."
            )

    @property
    def code(self) -> str:
        """The Python line that applies the recommendation."""
        if self.chosen is None:
            return "# keep the model as it is"
        swap = f'swap_attention(model, "{self.chosen.attention}")'
        return f"calibrate_attention({swap}, batches)" if self.chosen.fitted else swap

    @property
    def uses_repetition(self) -> bool:
        """Whether exact attention gains from repeated passages; else recall is not judged."""
        return self.repeated_loss is not None and self.loss - self.repeated_loss >= USES

    @property
    def table(self) -> pd.DataFrame:
        """A DataFrame of formatted strings, one row for each method."""
        others = self.rows[1:]
        cells = {
            "attention": [row.attention for row in self.rows],
            "loss increase": [
                f"(loss {self.loss:.3f})",
                *(format_interval(r.above, r.above_ci95) for r in others),
            ],
        }
        if self.repeated_loss is not None:
            cells["repeated passage"] = [
                f"({self.repeated_loss:.3f})",
                *(format_interval(row.repeated, row.repeated_ci95) for row in others),
            ]
        cells["ms"] = [f"{row.ms[self.length]:.1f}" for row in self.rows]
        cells["MiB"] = [format_mib(row.mib) for row in self.rows]
        cells["speed-up"] = [f"{row.speedup:.2f}" for row in self.rows]
        cells["pays from"] = ["", *(str(row.pays_from or f"> {self.length}") for row in others)]
        return pd.DataFrame(cells)

    def __str__(self) -> str:
        return "\n".join(
            [self.table.to_string(index=False), "", self.sentence, *self.notes, "", self.code]
        )

    def save(self, directory: str | Path) -> None:
        """Write advise.csv, advise.md and advise.png to a folder."""
        folder = written_folder(directory, "directory")
        folder.mkdir(parents=True, exist_ok=True)
        table = self.table
        paragraphs = [
            markdown(list(table.columns), table.values.tolist()).rstrip(),
            f"{self.sentence} Measured on {self.samples} {self.noun} of {self.length} tokens, one seed.",
            *self.notes,
            f"```python\n{self.code}\n```\n",
        ]
        with atomic_path(folder / "advise.md") as part:
            part.write_text("\n\n".join(paragraphs))
        records = []
        for row in self.rows:
            record = dict(vars(row))
            del record["ms"]
            for length, ms in row.ms.items():
                record[f"ms_{length}"] = ms
            records.append(record)
        with atomic_path(folder / "advise.csv") as part:
            pd.DataFrame(records).to_csv(part, index=False)
        save_figure(figure(self), folder / "advise.png")


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


def _check_labels(labels: Any, count: int) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: {type(labels).__name__}, expected a tensor (n,) of classes")
    if labels.ndim == 1 and len(labels) != count:
        raise ValueError(f"labels: {len(labels)}, expected {count}, one per sample")
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels: tensor {tuple(labels.shape)} of {labels.dtype}; expected (n,) of torch.long"
        )


def _tokens(texts: str | Sequence[str], tokenizer: Any) -> Tensor:
    if tokenizer is None:
        raise ValueError("tokenizer=None: expected a tokenizer for strings, or token ids")
    ids: list[int] = []
    for text in [texts] if isinstance(texts, str) else texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids)


def text_bench(
    model: nn.Module, rows: Tensor, samples: int | None, calibration: int, tokenizer: Any, seed: int
) -> TextBench:
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
    if samples is None:
        samples = SAMPLES["texts"]
    judged, training = spread(len(rows), samples, calibration, f"texts of {rows.shape[1]} tokens")
    return TextBench(
        model,
        rows[judged],
        rows[training],
        mask=mask,
        special=getattr(tokenizer, "all_special_ids", ()),
        seed=seed,
    )


def _batch_bench(
    model: nn.Module,
    pieces: Any,
    labels: Tensor | None,
    samples: int | None,
    calibration: int,
    seed: int,
) -> BatchBench:
    if isinstance(pieces, Tensor):
        noun, batches = "images", pieces.split(1)
    else:
        noun, batches = "pieces", list(pieces)
    if labels is not None:
        _check_labels(labels, len(batches))
    if samples is None:
        samples = SAMPLES[noun]
    judged, training = spread(len(batches), samples, calibration, noun)
    for i in (*judged, *training):
        check_batch(model, batches[i], f"texts[{i}]")
    judged_labels = None
    if labels is not None:
        judged_labels = [labels[i : i + 1] for i in judged]
    bench = BatchBench(
        model,
        [batches[i] for i in judged],
        [batches[i] for i in training],
        noun=noun,
        seed=seed,
        labels=judged_labels,
    )
    if labels is not None and not 0 <= int(labels.min()) <= int(labels.max()) < bench.classes:
        raise ValueError(
            f"labels: {int(labels.min())} to {int(labels.max())}, expected classes 0 to {bench.classes - 1}"
        )
    return bench


def spread(count: int, samples: int, calibration: int, noun: str) -> tuple[list[int], list[int]]:
    """Indices of evenly spaced samples to evaluate, then of those to fit to.

    Raises ValueError if there are too few samples.
    """
    if samples < 2 or calibration < 1 or count < samples + calibration:
        raise ValueError(
            f"samples={samples}, calibration={calibration}: expected at least 2 and 1, of {count} {noun}"
        )
    chosen = torch.linspace(0, count - 1, samples + calibration).round().long().tolist()
    return chosen[:samples], chosen[samples:]


# ---- measuring


def mechanisms(attentions: Sequence[str] | None, seed: int = 0) -> dict[str, Mechanism | None]:
    """Name -> mechanism, exact (None) first. Raises ConfigError for unknown names."""
    result: dict[str, Mechanism | None] = {EXACT: None}
    for name in TRIED if attentions is None else attentions:
        if name != EXACT:
            result[name] = Mechanism.parse(name, seed=seed)
    return result


def measure_mechanism(
    bench: Bench, methods: Mapping[str, Mechanism | None], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a record of losses and memory for each method, then times by length."""
    longest = bench.timed[bench.length]
    for label, attention in methods.items():
        losses = bench.losses(attention)
        print(
            f"advise: {label}: loss {statistics.mean(losses['loss']):.3f} nats",
            file=sys.stderr,
            flush=True,
        )
        yield {"attention": label, **losses, "mib": bench.memory(attention, longest)}
    for length, piece in bench.timed.items():
        times = bench.times(methods, piece, rounds)
        print(f"advise: timed {length} tokens", file=sys.stderr, flush=True)
        yield {"length": length, "ms": times}


def advice_of(
    bench: Bench,
    methods: Mapping[str, Mechanism | None],
    records: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> Advice:
    """Build the advice from the records of `measure_mechanism`."""
    losses = {record["attention"]: record for record in records if "attention" in record}
    times = {record["length"]: record["ms"] for record in records if "length" in record}
    own = losses[EXACT]
    rows = []
    for label, record in losses.items():
        gains, ms = {}, {}
        for length, rounds in times.items():
            gains[length] = ratio(rounds[EXACT], rounds[label])
            ms[length] = statistics.median(rounds[label])
        above, above_ci95 = mean_difference(record["loss"], own["loss"])
        row = Row(
            label,
            above,
            above_ci95,
            mib=record["mib"],
            speedup=gains[max(gains)],
            ms=ms,
            pays_from=pays_from(gains),
        )
        if own["repeated"]:
            row.repeated, row.repeated_ci95 = mean_difference(record["repeated"], own["repeated"])
        with bench.swapped(methods[label]) as states:
            exact_lengths = [getattr(state, "exact_to", 0) for state in states.values()]
            row.exact_to = min(exact_lengths, default=0)
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


def pays_from(gains: Mapping[int, float]) -> int | None:
    """The shortest timed length from which every speed-up is at least MARGIN."""
    slow = [length for length, gain in gains.items() if gain < MARGIN]
    return min((length for length in gains if length > max(slow, default=0)), default=None)


# ---- recommendation


def recommendation(advice: Advice) -> tuple[Row | None, str]:
    """The recommended row, or None, and a sentence with the reason."""
    tried = [row for row in advice.rows if row.attention not in (EXACT, UNIFORM)]
    control = next((row for row in advice.rows if row.attention == UNIFORM), None)
    if control is not None and not is_costly(advice, control):
        return None, (
            f"No recommendation: uniform attention costs only {cost(advice, control)}. Use data that the "
            "model predicts well, or longer pieces."
        )
    if not tried:
        return None, "No recommendation: only exact and uniform attention were measured."
    close = [row for row in tried if is_close(advice, row)]
    if not close:
        best = min(tried, key=lambda row: row.worst)
        tolerance = f"{advice.tolerance}"
        if advice.uses_repetition:
            tolerance += f" ({REPEATED} on repeated passages)"
        return None, (
            f"Keep exact: the closest, {best.attention}, costs {cost(advice, best)}; the tolerance is "
            f"{tolerance}. Fine-tuning reduces the cost."
        )
    paying = [row for row in close if row.exact_to < advice.length and row.pays_from is not None]
    if not paying:
        best = max(close, key=lambda row: row.speedup)
        return None, (
            f"Keep exact at {advice.length} tokens: {best.attention} is within {advice.tolerance} nats, but "
            f"its speed is {best.speedup:.2f} times that of exact. Use longer {advice.noun}."
        )
    best = max(paying, key=lambda row: row.speedup)
    below = ""
    if best.pays_from > min(best.ms):
        below = f"; below {best.pays_from} tokens keep exact"
    return best, (
        f"Use {best.attention}: it costs {cost(advice, best)} at {advice.length} tokens, and a pass is "
        f"{best.speedup:.2f} times as fast{below}."
    )


def is_close(advice: Advice, row: Row) -> bool:
    """Whether a method is within the tolerance, also on repeated passages if they count."""
    if row.worst > advice.tolerance:
        return False
    return not (advice.uses_repetition and row.repeated + row.repeated_ci95 > REPEATED)


def is_costly(advice: Advice, row: Row) -> bool:
    """Whether a method clearly exceeds the tolerance.

    The lower end of its 95% CI must be at least TELLS times the tolerance, on the samples or on repeated passages.
    """
    forgets = (
        advice.uses_repetition and row.repeated - row.repeated_ci95 >= CONTROL_TOLERANCES * REPEATED
    )
    return forgets or not row.above - row.above_ci95 < CONTROL_TOLERANCES * advice.tolerance


def cost(advice: Advice, row: Row) -> str:
    nats = f"{format_interval(row.above, row.above_ci95)} nats"
    if not advice.uses_repetition:
        return nats
    repeated = format_interval(row.repeated, row.repeated_ci95)
    return f"{nats} and {repeated} nats on repeated passages"


def format_mib(mib: float | None) -> str:
    return "" if mib is None else f"{mib:.0f}"


def format_interval(value: float | None, half: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f} ± {half:.4f}"


# ---- figure


def figure(advice: Advice):
    """Plot the loss increase of each method, and the time of a pass by length."""
    drawing, (costs, times) = new_figure(1, 2, figsize=(11, 3.8), gridspec_kw={"wspace": 0.35})
    plot_costs(costs, advice)
    plot_times(times, advice)
    return drawing


def plot_costs(ax: Any, advice: Advice) -> None:
    others = advice.rows[:0:-1]
    for height, row in enumerate(others):
        color = colour(row.attention)
        ax.errorbar(row.above, height, xerr=row.above_ci95, fmt="o", ms=5, color=color)
        if advice.uses_repetition:
            ax.errorbar(
                row.repeated,
                height,
                xerr=row.repeated_ci95,
                fmt="D",
                ms=6,
                mfc="white",
                color=color,
            )
    ax.set_yticks(range(len(others)), [row.attention for row in others])
    ax.set_xscale("symlog", linthresh=advice.tolerance)
    left, right = ax.get_xlim()
    ax.axvspan(left, advice.tolerance, color="#000000", alpha=0.06, lw=0)
    ax.set_xlim(left, right)
    label = f"{advice.samples} {advice.noun} of {advice.length} tokens; grey: allowed"
    if advice.uses_repetition:
        label += "\nopen: repeated passages"
    ax.set(title="loss increase over exact, nats (lower is better)", xlabel=label)


def plot_times(ax: Any, advice: Advice) -> None:
    labels = []
    for row in advice.rows:
        color = colour(row.attention)
        width = 2.2 if row is advice.chosen or row.attention == EXACT else 1
        lengths = list(row.ms)
        ax.plot(lengths, list(row.ms.values()), marker="o", ms=3, color=color, lw=width)
        longest = max(lengths)
        labels.append((row.attention, longest, row.ms[longest], color))
    ax.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    label_ends(ax, labels)
