"""What losses, times and memory of a panel advise: one table, one sentence with its reason, the lines that apply it.

An attention is near enough where the upper end of its interval lies within `tolerance` nats of the model's own, on text
and, where the model itself uses what it has read, within `RECALL` on repeated text. It pays at a length from which on a
pass is MARGIN times as fast at every length that was timed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from crt_exp.advice.arms import EXACT, FLOOR, Arm
from crt_exp.drawing import CONTROL, colour, label_ends, markdown, new_figure, plain_ticks, save_figure
from crt_exp.drawing import EXACT as BLACK
from crt_exp.tasks.metrics import interval
from crt_exp.measure.times import ratio
from crt_exp.atomic_write import whole, write_rows

TOLERANCE = 0.02   # nats: 2% of the perplexity
RECALL = 0.1       # nats on repeated text
TELLS = 5          # times what is allowed that uniform attention must cost, or the pieces cannot tell
USES = 0.5         # nats by which repeated text must be easier for the model's own attention
MARGIN = 1.05
CLEARER = {"texts": "text that the model predicts well, or longer pieces"}
SHADES = {"cheap": "#56B4E9", "default": "#0072B2", "quality": "#003D66"}
WINDOW = "#AA4499"   # the floor is grey
ALIKE = "≈: rounds do not agree that this time differs from that of exact attention."
LONGER = {"texts": "a longer task.length", "images": "larger images"}


@dataclass
class Row:
    """One attention: means over rows with half-widths of 95% intervals, nats; costs at the longest length."""

    arm: Arm
    above: float
    above_ci95: float
    again: float | None = None
    again_ci95: float | None = None
    ms: dict[int, float] = field(default_factory=dict)   # of a pass, by length
    step: float | None = None
    mib: float | None = None
    speedup: float | None = None
    pays_from: int | None = None                         # None: at no length that was timed
    exact_to: int = 0                                    # tokens up to which it is exact attention
    pieces: int = 0                                      # on which it was judged
    told_apart: bool = True                              # whether its time differs from exact attention's in all rounds
    step_told_apart: bool = True                         # the same of training steps

    @classmethod
    def of(cls, arm: Arm, losses: dict[str, list[float]], own: dict[str, list[float]]) -> "Row":
        """Without costs; own: the losses of exact attention on these pieces and perhaps further ones."""
        row = cls(arm, *mean(losses["loss"], own["loss"]), pieces=len(losses["loss"]))
        if "again" in losses:
            row.again, row.again_ci95 = mean(losses["again"], own["again"])
        return row

    @property
    def worst(self) -> float:
        worst = self.above + self.above_ci95
        return worst if math.isfinite(worst) else math.inf


@dataclass
class Advice:
    """What `advise` returns: print it, or take its parts."""

    rows: list[Row]
    length: int
    texts: int
    loss: float                     # of the model's own attention
    again: float | None             # the same on repeated text
    tolerance: float
    learns: dict[str, bool]         # label -> whether it wants calibrate_attention
    noun: str = "texts"             # what was judged on
    trained_on: int | None = None   # tokens of the texts of the model's training, where they are known
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.chosen, self.sentence = decided(self)

    @property
    def code(self) -> str:
        """The lines that apply the advice."""
        if self.chosen is None:
            return "# keep the model as it is"
        if self.learns.get(self.chosen.arm.label):
            return ("from crt_exp import calibrate_attention, swap_attention\n"
                    f"calibrate_attention({self.chosen.arm.call()}, batches)")
        return f"from crt_exp import swap_attention\n{self.chosen.arm.call()}"

    @property
    def uses_memory(self) -> bool:
        """Whether the model's own attention makes use of repeated text, so that recall can be judged."""
        return self.again is not None and self.loss - self.again >= USES

    def __str__(self) -> str:
        return "\n".join([*aligned([header(self), *(cells_of(self, row) for row in self.rows)]), "", self.sentence,
                          ALIKE, *self.notes, "", self.code])

    def markdown(self) -> str:
        return (f"{markdown(header(self), [cells_of(self, row) for row in self.rows])}\n{self.sentence} Measured on "
                f"{self.texts} {self.noun} of {self.length} tokens, one draw of the noise. {ALIKE}")

    def save(self, directory: str | Path) -> None:
        """advise.csv, advise.md and advise.png in a folder."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / "advise.md") as part:
            part.write_text("\n\n".join([self.markdown(), *self.notes, f"```python\n{self.code}\n```\n"]))
        head = ["attention", "pieces", "above", "above_ci95", "again", "again_ci95", "step_ms", "mib", "speedup",
                "told_apart", "pays_from",
                *(f"ms_{L}" for L in self.rows[0].ms)]
        write_rows(folder / "advise.csv", [head, *(
            [row.arm.label, row.pieces, row.above, row.above_ci95, row.again, row.again_ci95, row.step, row.mib,
             row.speedup, row.told_apart, row.pays_from, *row.ms.values()] for row in self.rows)])
        save_figure(figure(self), folder / "advise.png")


# ---- rows

def rows_of(arms: Sequence[Arm], losses: Sequence[dict[str, list[float]]],
            costs: dict[int, dict[str, dict[str, float]]]) -> list[Row]:
    """losses: of each arm, the first being exact; costs: length -> what `Bench.cost` gives."""
    last, rows = costs[max(costs)], [Row.of(arm, each, losses[0]) for arm, each in zip(arms, losses)]
    base = last["ms"][arms[0].label]
    for row in rows:
        label = row.arm.label
        row.ms = {L: statistics.median(cost["ms"][label]) for L, cost in sorted(costs.items())}
        row.step = statistics.median(last["step"][label]) if label in last["step"] else None
        row.mib = last.get("mib", {}).get(label)
        times = last["ms"][label]
        row.speedup, row.told_apart = ratio(base[:len(times)], times), differ(base, times)
        if row.step is not None:
            row.step_told_apart = differ(last["step"][arms[0].label], last["step"][label])
        row.pays_from = pays_from(rows[0].ms, row.ms) if row.told_apart else None
    return rows


def mean(losses: Sequence[float], own: Sequence[float]) -> tuple[float, float]:
    """Of the differences, with the half-width of its 95% Student interval, NaN of one; own: of these pieces and perhaps
    others."""
    of_rows = interval(np.subtract(losses, own[:len(losses)]), "above")
    return of_rows["above"], math.nan if of_rows["above_ci95"] is None else of_rows["above_ci95"]


def differ(base: Sequence[float], times: Sequence[float]) -> bool:
    """Whether all rounds say that one is faster by MARGIN, and the same one."""
    gains = [own / other for own, other in zip(base, times)]
    return min(gains) >= MARGIN or max(gains) <= 1 / MARGIN


def uses_memory(own: Mapping[str, Sequence[float]]) -> bool:
    """Whether the model's own attention makes use of repeated text, so that recall can be judged."""
    return "again" in own and float(np.mean(own["loss"]) - np.mean(own["again"])) >= USES


def is_beyond(row: Row, tolerance: float, uses_memory: bool) -> bool:
    """Whether it costs clearly more than is allowed: TELLS times as much, at the lower end of an interval."""
    if not math.isfinite(row.worst):
        return True
    recalls = uses_memory and row.again is not None and row.again - row.again_ci95 >= TELLS * RECALL
    return recalls or row.above - row.above_ci95 >= TELLS * tolerance


def is_within(row: Row, tolerance: float, uses_memory: bool) -> bool:
    """Whether it costs clearly less than is allowed: half as much, at the upper end of an interval."""
    recalls = not uses_memory or (row.again is not None and row.again + row.again_ci95 <= RECALL / 2)
    return recalls and row.worst <= tolerance / 2


def pays_from(own: dict[int, float], other: dict[int, float]) -> int | None:
    """The length from which on `other` is faster by MARGIN, between lengths on a line over logarithms."""
    lengths = sorted(own)
    gain = {L: math.log(own[L] / other[L] / MARGIN) for L in lengths}
    wins = [L for i, L in enumerate(lengths) if all(gain[later] >= 0 for later in lengths[i:])]
    if not wins:
        return None
    first = wins[0]
    if first == lengths[0]:
        return first
    before = lengths[lengths.index(first) - 1]
    share = -gain[before] / (gain[first] - gain[before])
    return round(before * (first / before) ** share)


# ---- the sentence

def decided(advice: Advice) -> tuple[Row | None, str]:
    """The row to take, or None, and the sentence with its reason."""
    tried = [row for row in advice.rows if row.arm.name not in (EXACT, FLOOR)]
    floor = next((row for row in advice.rows if row.arm.name == FLOOR), None)
    if floor is not None and not is_beyond(floor, advice.tolerance, advice.uses_memory):
        return None, (f"No advice: on these {advice.noun} even uniform attention costs only {cost_of(advice, floor)}, "
                      f"so they cannot tell mechanisms apart. Give "
                      f"{CLEARER.get(advice.noun, f'{advice.noun} like those that the model was trained on')}.")
    if not tried:
        cost = "" if floor is None else f", which costs {cost_of(advice, floor)}"
        return None, f"No advice: nothing was tried but {FLOOR} attention, the floor{cost}."
    near = [row for row in tried if row.worst <= advice.tolerance
            and (not advice.uses_memory or row.again + row.again_ci95 <= RECALL)]
    if not near:
        best, recall = min(tried, key=lambda row: row.worst), f" ({RECALL} of repeated text)" * advice.uses_memory
        return None, (f"Keep exact: the nearest, {best.arm.label}, costs {cost_of(advice, best)}, and "
                      f"{advice.tolerance}{recall} were allowed. Training on after the swap takes a part of that back.")
    others = [row for row in near if row.exact_to < advice.length]
    paying = [row for row in others if row.pays_from is not None]
    if not others:
        same = max(near, key=lambda row: row.exact_to)
        return None, (f"Keep exact at {advice.length} tokens: {same.arm.label} is exact attention itself up to "
                      f"{same.exact_to}, and what else was tried is not near enough. Try {longer(advice)}.")
    if not paying:
        best = max(others, key=lambda row: row.speedup)
        takes = (f"a pass takes {1 / best.speedup:.2f} times as long" if best.told_apart else
                 "its time is not told apart from that of exact")
        return None, (f"Keep exact at {advice.length} tokens: {best.arm.label} stays within {advice.tolerance} nats, "
                      f"and {takes}. Try {longer(advice)}.")
    best = max(paying, key=lambda row: row.speedup)
    below = f"; below {best.pays_from} tokens keep exact" if best.pays_from > min(best.ms) else ""
    return best, (f"Take {best.arm.label}: it costs {cost_of(advice, best)} at {advice.length} tokens, and a pass is "
                  f"{best.speedup:.2f} times as fast{below}.")


def longer(advice: Advice) -> str:
    """What may tell more, where a model can read it."""
    if advice.trained_on is not None:
        return f"a run with a longer task.block than {advice.trained_on}"
    return LONGER.get(advice.noun, "longer ones")


def cost_of(advice: Advice, row: Row) -> str:
    again = f" and {shown(row.again, row.again_ci95)} nats of repeated text" if advice.uses_memory else ""
    return f"{shown(row.above, row.above_ci95)} nats{again}"


# ---- cells

def header(advice: Advice) -> list[str]:
    again = [] if advice.again is None else ["repeated text"]
    mib = ["MiB"] if any(row.mib is not None for row in advice.rows) else []
    return ["attention", "nats above exact", *again, *([advice.noun] if in_part(advice) else []), "ms forward",
            "ms step", *mib, "speed-up", "pays from"]


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
            for line in lines]


def in_part(advice: Advice) -> bool:
    """Whether some attention was judged on fewer pieces than others."""
    return len({row.pieces for row in advice.rows}) > 1


def cells_of(advice: Advice, row: Row) -> list[str]:
    own = row.arm.name == EXACT
    again = [] if advice.again is None else [
        f"({advice.again:.3f})" if own else shown(row.again, row.again_ci95)]
    pieces = [str(row.pieces)] if in_part(advice) else []
    mib = [] if all(each.mib is None for each in advice.rows) else [f"{row.mib:.0f}"]
    pays = "" if own else f"> {advice.length}" if row.pays_from is None else (
        f"<= {row.pays_from}" if row.pays_from == min(row.ms) else str(row.pays_from))
    alike, step_alike = (" ≈" * (not own and not told) for told in (row.told_apart, row.step_told_apart))
    return [row.arm.label, f"(loss {advice.loss:.3f})" if own else shown(row.above, row.above_ci95), *again, *pieces,
            f"{row.ms[advice.length]:.1f}{alike}", "" if row.step is None else f"{row.step:.1f}{step_alike}", *mib,
            f"{row.speedup:.2f}{alike}", f"{pays}{alike}"]


def shown(value: float, half: float) -> str:
    """half: NaN where one piece gives no interval."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if math.isnan(half) else f"{value:.4f} ± {half:.4f}"


# ---- the picture

def figure(advice: Advice):
    """Nats of each attention, and milliseconds against the length."""
    drawn, (costs, times) = new_figure(1, 2, figsize=(11, 3.8), gridspec_kw={"wspace": 0.35})
    others = [row for row in advice.rows if row.arm.name != EXACT][::-1]
    for place, row in enumerate(others):
        costs.errorbar(row.above, place, xerr=row.above_ci95, fmt="o", ms=5, color=shade(row))
        if advice.uses_memory:
            costs.errorbar(row.again, place, xerr=row.again_ci95, fmt="D", ms=6, mfc="white", color=shade(row))
    costs.set_yticks(range(len(others)), [row.arm.label for row in others])
    least = min(-advice.tolerance, *(row.above - row.above_ci95 for row in others))
    costs.set_xscale("symlog", linthresh=advice.tolerance)
    most = max(advice.tolerance, *(max(row.worst, np.nansum([row.again, row.again_ci95]) if advice.uses_memory else 0)
                                   for row in others))
    costs.set_xlim(1.2 * least, 2 * most)
    costs.axvspan(1.2 * least, advice.tolerance, color="#000000", alpha=0.06, lw=0)
    repeated = ""
    if advice.uses_memory:
        costs.axvline(RECALL, color="0.4", lw=1, ls="--")
        repeated = "\nopen: repeated text, allowed up to the dashes"
    costs.set(title="nats above the model's own attention",
              xlabel=f"{advice.texts} {advice.noun} of {advice.length} tokens; grey: allowed{repeated}")
    for row in advice.rows:
        times.plot(list(row.ms), list(row.ms.values()), marker="o", ms=3, color=shade(row),
                   lw=2.2 if row is advice.chosen or row.arm.name == EXACT else 1)
    times.set(xscale="log", yscale="log", title="milliseconds of a pass", xlabel="tokens")
    plain_ticks(times.xaxis), plain_ticks(times.yaxis)
    label_ends(times, [(row.arm.label.replace("nearfar preset=", "near-far "), max(row.ms), row.ms[max(row.ms)],
                        shade(row)) for row in advice.rows])
    return drawn


def shade(row: Row) -> str:
    if row.arm.name in (EXACT, FLOOR):
        return BLACK if row.arm.name == EXACT else CONTROL
    if row.arm.name == "window":
        return WINDOW
    return SHADES.get(str(row.arm.options.get("preset"))) or colour(row.arm.name)
