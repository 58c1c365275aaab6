"""What losses, times and memory recommend: one table, one sentence with its reason, the line that applies it.

An attention is close enough where the upper end of its interval lies within `tolerance` nats of the model's own
attention, and within `REPEATED` nats on repeated passages where the model uses them. It pays from the shortest timed
length on from which every pass is at least MARGIN times as fast.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from crt_exp.data.files import whole
from crt_exp.drawing import CONTROL, EXACT as BLACK, colour, label_ends, markdown, new_figure, plain_ticks, save_figure
from crt_exp.measure.times import interval, ratio

EXACT, CONTROL_NAME = "exact", "uniform"
TOLERANCE = 0.02   # nats: 2% of the perplexity
REPEATED = 0.1     # nats on repeated passages
TELLS = 5          # times the tolerance that uniform attention must cost, or the data cannot tell methods apart
USES = 0.5         # nats by which repeated passages must be easier for the model's own attention
MARGIN = 1.05


@dataclass
class Row:
    """One attention: means over samples with half-widths of 95% intervals, in nats; times in ms by length; MiB."""

    attention: str
    above: float
    above_ci95: float
    repeated: float | None = None
    repeated_ci95: float | None = None
    ms: dict[int, float] = field(default_factory=dict)
    mib: float | None = None
    speedup: float = 1.0
    pays_from: int | None = None   # None: at no timed length
    exact_to: int = 0              # tokens up to which it is exact attention
    fitted: bool = False           # whether it wants calibrate_attention

    @property
    def worst(self) -> float:
        worst = self.above + self.above_ci95
        return worst if math.isfinite(worst) else math.inf


@dataclass
class Advice:
    """What `advise` returns: print it, or take its parts. The first row is the model's own attention."""

    rows: list[Row]
    length: int
    samples: int
    loss: float                      # of the model's own attention
    repeated_loss: float | None      # the same on repeated passages
    tolerance: float
    noun: str = "texts"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.chosen, self.sentence = recommendation(self)

    @property
    def code(self) -> str:
        """The line that applies the recommendation."""
        if self.chosen is None:
            return "# keep the model as it is"
        swap = f'swap_attention(model, "{self.chosen.attention}")'
        return f"calibrate_attention({swap}, batches)" if self.chosen.fitted else swap

    @property
    def uses_repetition(self) -> bool:
        """Whether the model's own attention profits from repeated passages, so that recall can be judged."""
        return self.repeated_loss is not None and self.loss - self.repeated_loss >= USES

    @property
    def table(self) -> pd.DataFrame:
        """The cells as text, one row an attention."""
        cells = {"attention": [row.attention for row in self.rows],
                 "loss increase": [f"(loss {self.loss:.3f})", *(shown(r.above, r.above_ci95) for r in self.rows[1:])]}
        if self.repeated_loss is not None:
            cells["repeated passage"] = [f"({self.repeated_loss:.3f})",
                                         *(shown(r.repeated, r.repeated_ci95) for r in self.rows[1:])]
        cells["ms"] = [f"{row.ms[self.length]:.1f}" for row in self.rows]
        cells["MiB"] = ["" if row.mib is None else f"{row.mib:.0f}" for row in self.rows]
        cells["speed-up"] = [f"{row.speedup:.2f}" for row in self.rows]
        cells["pays from"] = ["", *(str(row.pays_from or f"> {self.length}") for row in self.rows[1:])]
        return pd.DataFrame(cells)

    def __str__(self) -> str:
        return "\n".join([self.table.to_string(index=False), "", self.sentence, *self.notes, "", self.code])

    def markdown(self) -> str:
        table = self.table
        return (f"{markdown(list(table.columns), table.values.tolist())}\n{self.sentence} Measured on {self.samples} "
                f"{self.noun} of {self.length} tokens, one seed.")

    def save(self, directory: str | Path) -> None:
        """Writes advise.csv, advise.md and advise.png into a folder."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / "advise.md") as part:
            part.write_text("\n\n".join([self.markdown(), *self.notes, f"```python\n{self.code}\n```\n"]))
        values = [{key: value for key, value in vars(row).items() if key != "ms"}
                  | {f"ms_{length}": ms for length, ms in row.ms.items()} for row in self.rows]
        with whole(folder / "advise.csv") as part:
            pd.DataFrame(values).to_csv(part, index=False)
        save_figure(figure(self), folder / "advise.png")


# ---- rows

def rows_of(losses: Mapping[str, Mapping[str, Sequence[float]]],
            times: Mapping[int, Mapping[str, Sequence[float]]]) -> list[Row]:
    """losses: attention -> `Bench.losses`, exact first; times: length -> `Bench.times`."""
    own, rows = next(iter(losses.values())), []
    for label, each in losses.items():
        row = Row(label, *mean_difference(each["loss"], own["loss"]))
        if own["repeated"]:
            row.repeated, row.repeated_ci95 = mean_difference(each["repeated"], own["repeated"])
        row.ms = {length: statistics.median(at[label]) for length, at in sorted(times.items())}
        gains = {length: ratio(at[EXACT], at[label]) for length, at in sorted(times.items())}
        row.speedup = gains[max(gains)]
        row.pays_from = pays_from(gains)
        rows.append(row)
    return rows


def mean_difference(losses: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """With the half-width of its 95% Student interval."""
    found = interval(np.subtract(losses, own), "above")
    return found["above"], math.nan if found["above_ci95"] is None else found["above_ci95"]


def pays_from(gains: Mapping[int, float]) -> int | None:
    """The shortest timed length from which on every gain reaches MARGIN."""
    slow = [length for length, gain in gains.items() if gain < MARGIN]
    return min((length for length in gains if length > max(slow, default=0)), default=None)


# ---- the sentence

def recommendation(advice: Advice) -> tuple[Row | None, str]:
    """The row to take, or None, and the sentence with its reason."""
    tried = [row for row in advice.rows if row.attention not in (EXACT, CONTROL_NAME)]
    control = next((row for row in advice.rows if row.attention == CONTROL_NAME), None)
    if control is not None and not is_costly(advice, control):
        return None, (f"No advice: on these {advice.noun} even uniform attention costs only {cost(advice, control)}, "
                      "so they cannot tell mechanisms apart. Give data that the model predicts well, or longer pieces.")
    if not tried:
        return None, "No advice: only exact and uniform attention were tried."
    close = [row for row in tried if row.worst <= advice.tolerance
             and not (advice.uses_repetition and row.repeated + row.repeated_ci95 > REPEATED)]
    if not close:
        best, allowed = min(tried, key=lambda row: row.worst), f" ({REPEATED} on repeated passages)"
        return None, (f"Keep exact: the closest, {best.attention}, costs {cost(advice, best)}; allowed are "
                      f"{advice.tolerance}{allowed * advice.uses_repetition}. Fine-tuning after the swap recovers a "
                      "part of that.")
    others = [row for row in close if row.exact_to < advice.length]
    if not others:
        same = max(close, key=lambda row: row.exact_to)
        return None, (f"Keep exact at {advice.length} tokens: {same.attention} computes exact attention up to "
                      f"{same.exact_to} tokens. Try longer {advice.noun}.")
    paying = [row for row in others if row.pays_from is not None]
    if not paying:
        best = max(others, key=lambda row: row.speedup)
        return None, (f"Keep exact at {advice.length} tokens: {best.attention} stays within {advice.tolerance} nats, "
                      f"and its speed is {best.speedup:.2f} times that of exact. Try longer {advice.noun}.")
    best = max(paying, key=lambda row: row.speedup)
    below = f"; below {best.pays_from} tokens keep exact" if best.pays_from > min(best.ms) else ""
    return best, (f"Take {best.attention}: it costs {cost(advice, best)} at {advice.length} tokens, and a pass is "
                  f"{best.speedup:.2f} times as fast{below}.")


def is_costly(advice: Advice, row: Row) -> bool:
    """Whether it costs clearly more than is allowed: TELLS times as much at the lower end of an interval."""
    if not math.isfinite(row.worst):
        return True
    forgets = advice.uses_repetition and row.repeated - row.repeated_ci95 >= TELLS * REPEATED
    return forgets or row.above - row.above_ci95 >= TELLS * advice.tolerance


def cost(advice: Advice, row: Row) -> str:
    repeated = f" and {shown(row.repeated, row.repeated_ci95)} nats on repeated passages"
    return f"{shown(row.above, row.above_ci95)} nats{repeated * advice.uses_repetition}"


def shown(value: float | None, half: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f} ± {half:.4f}"


# ---- the picture

def figure(advice: Advice):
    """Loss increase of each attention, and milliseconds against the length."""
    drawn, (costs, times) = new_figure(1, 2, figsize=(11, 3.8), gridspec_kw={"wspace": 0.35})
    others = advice.rows[:0:-1]
    for place, row in enumerate(others):
        costs.errorbar(row.above, place, xerr=row.above_ci95, fmt="o", ms=5, color=shade(row))
        if advice.uses_repetition:
            costs.errorbar(row.repeated, place, xerr=row.repeated_ci95, fmt="D", ms=6, mfc="white", color=shade(row))
    costs.set_yticks(range(len(others)), [row.attention for row in others])
    costs.set_xscale("symlog", linthresh=advice.tolerance)
    left, right = costs.get_xlim()
    costs.axvspan(left, advice.tolerance, color="#000000", alpha=0.06, lw=0)
    costs.set_xlim(left, right)
    repeated = "\nopen: repeated passages" if advice.uses_repetition else ""
    costs.set(title="loss increase over exact, nats (lower is better)",
              xlabel=f"{advice.samples} {advice.noun} of {advice.length} tokens; grey: allowed{repeated}")
    for row in advice.rows:
        times.plot(list(row.ms), list(row.ms.values()), marker="o", ms=3, color=shade(row),
                   lw=2.2 if row is advice.chosen or row.attention == EXACT else 1)
    times.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(times.xaxis)
    plain_ticks(times.yaxis)
    label_ends(times, [(row.attention, max(row.ms), row.ms[max(row.ms)], shade(row)) for row in advice.rows])
    return drawn


def shade(row: Row) -> str:
    name = row.attention.split()[0]
    return BLACK if name == EXACT else CONTROL if name == CONTROL_NAME else colour(name)
