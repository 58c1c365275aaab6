"""The recommendation of `crt_exp.advise`: rows, sentence, table and figure.

A method is close enough if the upper end of its 95% CI is at most `tolerance` nats. If the model uses repetition, the
limit on repeated passages is `REPEATED` nats. A method pays from the shortest timed length from which every pass is at
least MARGIN times as fast. Methods that are clearly close enough, or clearly not, are measured on fewer samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.drawing import (
    colour,
    label_ends,
    markdown,
    new_figure,
    plain_ticks,
    save_figure,
)
from crt_exp.experiments.intervals import mean_ci

EXACT = "exact"
UNIFORM = "uniform"
REPEATED = 0.1  # nats, tolerance on repeated passages
# the control must cost this many tolerances, else the data cannot distinguish methods
CONTROL_TOLERANCES = 5
USES = 0.5  # nats by which exact attention must be better on repeated passages, so that recall is judged
MARGIN = 1.05


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
    samples: int | None = None  # number of samples that were evaluated; None: all

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
    unmeasured: list[str] = field(
        default_factory=list
    )  # what the time budget left out, as sentences

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
        self.notes += self.unmeasured

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
        cells[self.noun] = [str(row.samples or self.samples) for row in self.rows]
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
        folder = Path(directory).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        paragraphs = [
            markdown(self.table).rstrip(),
            f"{self.sentence} Measured on up to {self.samples} {self.noun} of {self.length} tokens, one seed.",
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


# ---- recommendation


def pays_from(gains: Mapping[int, float]) -> int | None:
    """The shortest timed length from which every speed-up is at least MARGIN."""
    slow = [length for length, gain in gains.items() if gain < MARGIN]
    return min((length for length in gains if length > max(slow, default=0)), default=None)


def recommendation(advice: Advice) -> tuple[Row | None, str]:
    """The recommended row, or None, and a sentence with the reason."""
    tried = [row for row in advice.rows if row.attention not in (EXACT, UNIFORM)]
    control = next((row for row in advice.rows if row.attention == UNIFORM), None)
    if control is not None and not is_costly(advice, control):
        fewer = (control.samples or advice.samples) < advice.samples
        if fewer and not is_close(advice, control):
            return None, (
                f"No recommendation: the time allowed {control.samples} of {advice.samples} {advice.noun}, too few to "
                f"judge uniform attention ({cost(advice, control)}). Increase minutes."
            )
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

    The lower end of its 95% CI must be at least CONTROL_TOLERANCES times the tolerance, on the samples or on
    repeated passages.
    """
    forgets = (
        advice.uses_repetition and row.repeated - row.repeated_ci95 >= CONTROL_TOLERANCES * REPEATED
    )
    return forgets or not row.above - row.above_ci95 < CONTROL_TOLERANCES * advice.tolerance


def is_decided(
    record: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]], tolerance: float
) -> bool:
    """Whether a method needs no more samples.

    Its 95% CI, twice as wide, must lie within the tolerance, or above that of the control. The wider interval allows
    for a decision after each sample.
    """
    near, far = is_within(record["loss"], own["loss"], tolerance)
    if not record["repeated"]:
        return near or far
    return far or (near and any(is_within(record["repeated"], own["repeated"], REPEATED)))


def is_within(losses: Sequence[float], own: Sequence[float], tolerance: float) -> tuple[bool, bool]:
    """Whether the doubled interval lies within the tolerance, and far above (not finite: True)."""
    above, half = mean_difference(losses, own)
    return above + 2 * half <= tolerance, not above - 2 * half < CONTROL_TOLERANCES * tolerance


def mean_difference(losses: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """Mean difference and the half-width of its 95% Student interval (NaN for n = 1).

    own: the losses of exact attention, on these samples and possibly on further ones.
    """
    differences = np.subtract(losses, own[: len(losses)])
    if not np.isfinite(differences).all():
        return float(differences.mean()), math.nan
    mean = mean_ci(differences)
    return mean.mean, mean.half


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
    drawing, (costs, times) = new_figure(
        1,
        2,
        figsize=(11, 3.8),
        gridspec_kw={"wspace": 0.35},
    )
    plot_costs(costs, advice)
    plot_times(times, advice)
    return drawing


def plot_costs(ax: Any, advice: Advice) -> None:
    others = advice.rows[:0:-1]
    for height, row in enumerate(others):
        color = colour(row.attention)
        points = [(row.above, row.above_ci95, "o", color)]
        if advice.uses_repetition:
            points.append((row.repeated, row.repeated_ci95, "D", "white"))
        for value, half, marker, face in points:
            ax.errorbar(value, height, xerr=half, fmt=marker, ms=5, mfc=face, color=color)
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
        ax.plot(
            lengths,
            list(row.ms.values()),
            marker="o",
            ms=3,
            color=color,
            lw=width,
        )
        longest = max(lengths)
        labels.append((row.attention, longest, row.ms[longest], color))
    ax.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    label_ends(ax, labels)
