"""What is measured of each attention, step by step: losses of pieces, then time and memory at each length.

Nothing is measured that is known already. Attention that is clearly nearer than is allowed on the first pieces, or
clearly further, is judged on these alone; what is further is timed once. What is exact attention at a length by one
kernel is measured once for all of its names, and judged on the first pieces alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from crt_exp.advice.arms import EXACT, Arm
from crt_exp.advice.verdict import Advice, Row, is_beyond, is_within, rows_of, uses_memory
from crt_exp.mechanism import Mechanism
from crt_exp.measure.base import planned
from crt_exp.advice.bench import FIRST, Bench, quiet
from crt_exp.measure.times import LONG

STEP = 3       # passes that a training step takes
UNLABELLED = ("There are no labels: nats are those by which the outputs differ from the model's own, the divergence of "
              "their probabilities.")


class Trial:
    """`arms`, exact attention first, on a bench. rounds: of the times. tolerance: nats that are near enough. done:
    records of a trial that broke off, which are not measured again.

    Records are of two kinds: `arm`, one an attention: its losses on each piece; `cost`, one a length: milliseconds of
    each in each round, and MiB.
    """

    def __init__(self, bench: Bench, arms: Sequence[Arm], rounds: int, tolerance: float, done: Sequence[dict] = ()):
        self.bench, self.arms, self.rounds, self.tolerance, self.rows = bench, arms, rounds, tolerance, list(done)
        self.pace = 0.0                       # seconds a piece, so far
        self.attention: dict[str, Mechanism | None] = {arm.label: arm.mechanism(bench.seed) for arm in arms}
        with quiet():
            self.known = {label: bench.known(each) for label, each in self.attention.items()}
        self.plan = [("arm", self._judged, (arm.label,)) for arm in arms]
        self.plan += [("cost", self._timed, (length,)) for length in bench.timed()]

    @property
    def ended(self) -> bool:
        return len(self.rows) == len(self.plan)

    def measured(self, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """The records that are not done, each after a line that says what there is, and how long the rest takes; first
        an estimate, from the time of one piece by the model's own attention."""
        self.pace = 0.0 if self.ended else self._pace()
        before, left = len(self.rows), self.pace * sum(self._work(i) for i in range(len(self.rows), len(self.plan)))
        say(f"advise: {len(self.arms)} attentions, {len(self.bench.judged)} {self.bench.noun} of {self.bench.length} "
            f"tokens: about {left:.0f} s")
        begun = time.perf_counter()
        for row in planned(self.plan, self.rows):
            spent, n = time.perf_counter() - begun, len(self.rows)
            self.pace = spent / max(sum(self._work(i) for i in range(before, n)), 1)
            left = self.pace * sum(self._work(i) for i in range(n, len(self.plan)))
            rest = "" if self.ended else f", at most {left:.0f} s left"
            say(f"advise: {self._news(row)}, {n} of {len(self.plan)} ({spent:.0f} s{rest})")
            yield row

    @torch.no_grad()
    def _pace(self) -> float:
        """Seconds of a piece, the second time that it is read."""
        with self.bench.swapped(None):
            for _ in range(2):
                begun = time.perf_counter()
                self.bench.loss(0)
        return time.perf_counter() - begun

    # ---- a record each

    @quiet()
    def _judged(self, label: str) -> dict[str, list[float]]:
        if (other := self._same(label, self.bench.length)) != label:
            return self._losses(other)
        return self.bench.losses(self.attention[label], partial(self._is_settled, label) if self.rows else None)

    @quiet()
    def _timed(self, length: int) -> dict[str, Any]:
        same = {label: self._same(label, length) for label in self.attention}
        each = {label: self.attention[label] for label in dict.fromkeys(same.values())}
        costs = self.bench.cost(each, length, self.rounds, self._once())
        return {"length": length} | {key: {label: cost[other] for label, other in same.items() if other in cost}
                                     for key, cost in costs.items()}

    def _same(self, label: str, length: int) -> str:
        """The first attention that makes the same calls at this length."""
        exact = [other for other, known in self.known.items() if known.one_kernel and known.exact_to >= length]
        return exact[0] if label in exact else label

    def _losses(self, label: str) -> dict[str, list[float]]:
        row = self.rows[list(self.attention).index(label)]
        return {key: row[key] for key in ("loss", "again") if key in row}

    def _is_settled(self, label: str, losses: dict[str, list[float]]) -> bool:
        """Whether the pieces read so far say enough: what is not clearly too far is judged on all kinds of them."""
        own = self._losses(EXACT)
        if self._says(is_beyond, label, losses):
            return True
        near = self.known[label].exact_to >= self.bench.length or self._says(is_within, label, losses)
        return near and losses.keys() == own.keys()

    def _says(self, judge: Callable[[Row, float, bool], bool], label: str, losses: dict[str, list[float]]) -> bool:
        own = self._losses(EXACT)
        row = Row.of(self.arms[list(self.attention).index(label)], losses, own)
        return judge(row, self.tolerance, uses_memory(own))

    def _once(self) -> list[str]:
        """What is timed once: its pieces have shown already that it is not taken."""
        return [label for label in self.attention
                if label != EXACT and self._says(is_beyond, label, self._losses(label))]

    # ---- what is said meanwhile

    def _news(self, row: dict[str, Any]) -> str:
        if row["split"] == "cost":
            return f"{row['length']} tokens timed"
        arm, own = self.arms[row["step"]], self._losses(EXACT)
        if not row["step"]:
            return f"{arm.label}: {sum(own['loss']) / len(own['loss']):.3f} nats"
        return f"{arm.label}: {Row.of(arm, row, own).above:+.3f} nats"

    def _work(self, i: int) -> float:
        """Pieces that step i reads: at most, of steps that are not done."""
        _, _, (what,) = self.plan[i]
        return self._work_of_losses(what, i) if i < len(self.arms) else self._work_of_times(what)

    def _work_of_losses(self, label: str, i: int) -> float:
        if self._same(label, self.bench.length) != label:
            return 0
        counts = [len(self.bench.judged), self.bench.repeats]
        if i < len(self.rows):
            counts = [len(each) for each in self._losses(label).values()]
        elif self.known[label].exact_to >= self.bench.length:
            counts = [min(FIRST, count) for count in counts]
        return sum(counts) + self.known[label].wants_fit * len(self.bench.training)

    def _work_of_times(self, length: int) -> float:
        timed = {self._same(label, length) for label in self.attention}
        once = self._once() if len(self.rows) >= len(self.arms) else ()
        near = [label for label in timed if label not in once]
        turns = len(near) * self.rounds + len(timed) - len(near)
        share = length / self.bench.length
        calls = 1 if 1000 * share * self.pace >= LONG else 2    # shorter ones after one that is not timed
        if share < 1:
            return calls * turns * share
        return turns + STEP * len(near) if calls == 1 else len(timed) + 2 * turns + 2 * STEP * turns

    # ---- what it comes to

    @quiet()
    def advice(self) -> Advice:
        own, records = self._losses(EXACT), self.rows[:len(self.arms)]
        rows = rows_of(self.arms, records, {row["length"]: row for row in self.rows[len(self.arms):]})
        for row in rows:
            row.exact_to = self.known[row.arm.label].exact_to
        loss, again = (sum(own[key]) / len(own[key]) if key in own else None for key in ("loss", "again"))
        advice = Advice(rows, self.bench.length, len(self.bench.judged), loss, again, self.tolerance,
                        {label: known.wants_fit for label, known in self.known.items()}, self.bench.noun,
                        self.bench.trained_on)
        advice.notes = [*self._of_layers(advice), *self._of_exact(advice), *self._of_few(advice)]
        if (block := self.bench.trained_on) is not None and advice.length > block:
            advice.notes.append(f"This run trained on blocks of {block} tokens: positions from {block} on were never "
                                f"trained in it, and losses there say more of that than of attention. Without "
                                f"task.length it is judged at {block}.")
        if again is not None and not advice.uses_memory:
            advice.notes.append("The model's own attention gains little from repeated text, so recall says nothing "
                                "here.")
        if not self.bench.labelled:
            advice.notes.append(UNLABELLED)
        return advice

    def _of_layers(self, advice: Advice) -> list[str]:
        """Which layers lose most, and which are further from exact attention than uniform attention is."""
        chosen = advice.chosen
        layers = [] if chosen is None else self.bench.layer_errors(self.attention[chosen.arm.label])
        if not layers:
            return []
        worst = max(range(len(layers)), key=lambda i: layers[i]["error"])
        notes = [f"Of {len(layers)} layers number {worst} ({layers[worst]['path']}) loses most: |output - exact| / "
                 f"|exact| is {layers[worst]['error']:.3g}, of uniform attention {layers[worst]['uniform']:.3g}."]
        lost = [i for i, layer in enumerate(layers) if layer["error"] > layer["uniform"]]
        if lost:
            kept = [i for i in range(len(layers)) if i not in lost]
            notes.append(f"Layers {lost} are further from exact attention than uniform attention is: layers={kept} "
                         "leaves them as they are.")
        return notes

    def _of_exact(self, advice: Advice) -> list[str]:
        """What sees all keys at this length, which is no approximation."""
        same = [row.arm.label for row in advice.rows if row.exact_to >= advice.length]
        kernel = [label for label in same if self.known[label].one_kernel]
        others = [label for label in same if label not in kernel]
        notes = [f"{', '.join(kernel)}: exact attention itself at {advice.length} tokens, by one kernel, which was "
                 "measured once."] if kernel else []
        return notes + [f"{label}: exact attention itself at {advice.length} tokens, where every query sees all keys "
                        "that it may." for label in others]

    def _of_few(self, advice: Advice) -> list[str]:
        few = [row for row in advice.rows if row.pieces < advice.texts and row.exact_to < advice.length]
        far = [row for row in few if is_beyond(row, advice.tolerance, advice.uses_memory)]
        near = [row for row in few if row not in far]
        says = {"nearer than is allowed": (near, ""), "further than is allowed": (far, " and timed once" + (
            ", without training steps, which are long" if any(row.step is None for row in far) else ""))}
        return [f"{', '.join(row.arm.label for row in rows)}: clearly {what} after {rows[0].pieces} {advice.noun}, so "
                f"judged on these alone{more}." for what, (rows, more) in says.items() if rows]
