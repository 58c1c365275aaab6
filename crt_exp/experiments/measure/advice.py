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
        self.notes = [
            f"{row.attention} computes exact attention at {self.length} tokens."
            for row in self.rows
            if row.exact_to >= self.length
        ]
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
        cells["MiB"] = ["" if row.mib is None else f"{row.mib:.0f}" for row in self.rows]
        cells["speed-up"] = [f"{row.speedup:.2f}" for row in self.rows]
        cells["pays from"] = ["", *(str(row.pays_from or f"> {self.length}") for row in others)]
        return pd.DataFrame(cells)

    def __str__(self) -> str:
        return "\n".join(
            [self.table.to_string(index=False), "", self.sentence, *self.notes, "", self.code]
        )

    def save(self, directory: str | Path) -> None:
        """Write advise.csv, advise.md and advise.png to a folder."""
        folder, table = written_folder(directory, "directory"), self.table
        folder.mkdir(parents=True, exist_ok=True)
        sentence = f"{self.sentence} Measured on {self.samples} {self.noun} of {self.length} tokens, one seed."
        with atomic_path(folder / "advise.md") as part:
            part.write_text(
                "\n\n".join(
                    [
                        markdown(list(table.columns), table.values.tolist()).rstrip(),
                        sentence,
                        *self.notes,
                        f"```python\n{self.code}\n```\n",
                    ]
                )
            )
        values = [
            vars(row) | {f"ms_{length}": ms for length, ms in row.ms.items()} for row in self.rows
        ]
        with atomic_path(folder / "advise.csv") as part:
            pd.DataFrame(values).drop(columns="ms").to_csv(part, index=False)
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
    listed = [texts] if isinstance(texts, str) else texts
    return torch.tensor(
        [i for text in listed for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    )


def text_bench(
    model: nn.Module, rows: Tensor, samples: int | None, calibration: int, tokenizer: Any, seed: int
) -> TextBench:
    """Build the bench of a language model from token ids (n, length).

    Raises ValueError for models that predict neither masked nor next tokens.
    """
    predicted, mask = predicts(model), getattr(tokenizer, "mask_token_id", None)
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
    noun, pieces = (
        ("images", pieces.split(1)) if isinstance(pieces, Tensor) else ("pieces", list(pieces))
    )
    if labels is not None:
        _check_labels(labels, len(pieces))
    if samples is None:
        samples = SAMPLES[noun]
    judged, training = spread(len(pieces), samples, calibration, noun)
    for i in (*judged, *training):
        check_batch(model, pieces[i], f"texts[{i}]")
    bench = BatchBench(
        model,
        [pieces[i] for i in judged],
        [pieces[i] for i in training],
        noun=noun,
        seed=seed,
        labels=None if labels is None else [labels[i : i + 1] for i in judged],
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
    names = TRIED if attentions is None else attentions
    return {EXACT: None} | {
        name: Mechanism.parse(name, seed=seed) for name in names if name != EXACT
    }


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
    judged = {each["attention"]: each for each in records if "attention" in each}
    times = {each["length"]: each["ms"] for each in records if "length" in each}
    own, rows = judged[EXACT], []
    for label, each in judged.items():
        gains = {length: ratio(at[EXACT], at[label]) for length, at in times.items()}
        row = Row(
            label,
            *mean_difference(each["loss"], own["loss"]),
            mib=each["mib"],
            speedup=gains[max(gains)],
            ms={length: statistics.median(at[label]) for length, at in times.items()},
            pays_from=pays_from(gains),
        )
        if own["repeated"]:
            row.repeated, row.repeated_ci95 = mean_difference(each["repeated"], own["repeated"])
        with bench.swapped(methods[label]) as states:
            row.exact_to = min(
                (getattr(state, "exact_to", 0) for state in states.values()), default=0
            )
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
    found = interval(np.subtract(losses, own), "mean")
    return found["mean"], math.nan if len(own) == 1 else found["mean_ci95"]


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
    close = [
        row
        for row in tried
        if row.worst <= advice.tolerance
        and not (advice.uses_repetition and row.repeated + row.repeated_ci95 > REPEATED)
    ]
    if not close:
        best, allowed = min(tried, key=lambda row: row.worst), f" ({REPEATED} on repeated passages)"
        return None, (
            f"Keep exact: the closest, {best.attention}, costs {cost(advice, best)}; the tolerance is "
            f"{advice.tolerance}{allowed * advice.uses_repetition}. Fine-tuning reduces the cost."
        )
    paying = [row for row in close if row.exact_to < advice.length and row.pays_from is not None]
    if not paying:
        best = max(close, key=lambda row: row.speedup)
        return None, (
            f"Keep exact at {advice.length} tokens: {best.attention} is within {advice.tolerance} nats, but "
            f"its speed is {best.speedup:.2f} times that of exact. Use longer {advice.noun}."
        )
    best = max(paying, key=lambda row: row.speedup)
    below = f"; below {best.pays_from} tokens keep exact" if best.pays_from > min(best.ms) else ""
    return best, (
        f"Use {best.attention}: it costs {cost(advice, best)} at {advice.length} tokens, and a pass is "
        f"{best.speedup:.2f} times as fast{below}."
    )


def is_costly(advice: Advice, row: Row) -> bool:
    """Whether a method clearly exceeds the tolerance.

    The lower end of its 95% CI must be at least TELLS times the tolerance, on the samples or on repeated passages.
    """
    forgets = (
        advice.uses_repetition and row.repeated - row.repeated_ci95 >= CONTROL_TOLERANCES * REPEATED
    )
    return forgets or not row.above - row.above_ci95 < CONTROL_TOLERANCES * advice.tolerance


def cost(advice: Advice, row: Row) -> str:
    repeated = f" and {format_interval(row.repeated, row.repeated_ci95)} nats on repeated passages"
    return f"{format_interval(row.above, row.above_ci95)} nats{repeated * advice.uses_repetition}"


def format_interval(value: float | None, half: float | None) -> str:
    return (
        f"{value:.4f} ± {half:.4f}" if value is not None and math.isfinite(value) else "not finite"
    )


# ---- figure


def figure(advice: Advice):
    """Plot the loss increase of each method, and the time of a pass by length."""
    drawn, (costs, times) = new_figure(1, 2, figsize=(11, 3.8), gridspec_kw={"wspace": 0.35})
    others = advice.rows[:0:-1]
    for height, row in enumerate(others):
        costs.errorbar(
            row.above, height, xerr=row.above_ci95, fmt="o", ms=5, color=colour(row.attention)
        )
        if advice.uses_repetition:
            costs.errorbar(
                row.repeated,
                height,
                xerr=row.repeated_ci95,
                fmt="D",
                ms=6,
                mfc="white",
                color=colour(row.attention),
            )
    costs.set_yticks(range(len(others)), [row.attention for row in others])
    costs.set_xscale("symlog", linthresh=advice.tolerance)
    left, right = costs.get_xlim()
    costs.axvspan(left, advice.tolerance, color="#000000", alpha=0.06, lw=0)
    costs.set_xlim(left, right)
    repeated = "\nopen: repeated passages" if advice.uses_repetition else ""
    costs.set(
        title="loss increase over exact, nats (lower is better)",
        xlabel=f"{advice.samples} {advice.noun} of {advice.length} tokens; grey: allowed{repeated}",
    )
    for row in advice.rows:
        times.plot(
            list(row.ms),
            list(row.ms.values()),
            marker="o",
            ms=3,
            color=colour(row.attention),
            lw=2.2 if row is advice.chosen or row.attention == EXACT else 1,
        )
    times.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(times.xaxis)
    plain_ticks(times.yaxis)
    label_ends(
        times,
        [
            (row.attention, length, row.ms[length], colour(row.attention))
            for row in advice.rows
            for length in [max(row.ms)]
        ],
    )
    return drawn
