"""task=advise: `crt_exp.advise` for a model in a folder, a run or on the hub, and text, images or audio in files."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crt_exp.advice.arms import Arm
from crt_exp.advice.call import LEAST, SAMPLES, arms_of, concluded, mechanisms, of_rows, split
from crt_exp.advice.verdict import Advice
from crt_exp.data.speech_table import entries
from crt_exp.hints import Count, Positive
from crt_exp.mechanism import Mechanism
from crt_exp.schema import checked
from crt_exp.probes import advise_data
from crt_exp.probes.base import planned
from crt_exp.probes.bench import Bench, quiet
from crt_exp.probes.subject import length_of, opened, rows_of


@checked("task")
class Advise:
    """task=advise; see conf/task/advise.yaml for the options.

    Records of three kinds: `arm`, one an attention: its losses on each piece; `cost`, one a length: milliseconds and
    MiB of each; and a final one with the advice.
    """

    metric, lower_is_better = "above", True
    uses: frozenset[str] = frozenset()  # attention is named by task.attentions

    def __init__(self, model: str | None, text: str | Sequence[str] | None, images: str | None, audio: str | None,
                 tokenizer: str | None, length: Count | None, attentions: Sequence[str] | None, samples: Count | None,
                 calibration: Count, rounds: Count, tolerance: Positive, cache_dir: str | None):
        if model is None or [text, images, audio].count(None) != 2:
            raise ValueError("task=advise needs task.model (a folder, a run or a hub name) and one of task.text, "
                             "task.images and task.audio (which the model was not trained on)")
        if text is None and (given := [key for key, value in (("tokenizer", tokenizer), ("length", length)) if value]):
            raise ValueError(f"task.{given[0]} is of texts: leave it out with task.images and task.audio")
        self.model, self.text, self.tokenizer, self.length = model, text, tokenizer, length
        self.images, self.audio = images, audio
        self.attentions, self.samples, self.calibration = attentions, samples, calibration
        if attentions is not None:
            arms_of(attentions, True)
        self.rounds, self.tolerance, self.cache_dir = rounds, tolerance, cache_dir
        self.advice: Advice | None = None

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        start, bench = time.perf_counter(), self.bench(seed)
        arms, rows = self.arms(bench), list(done)
        attention = mechanisms(bench, arms)
        plan = [("arm", quiet()(bench.losses), (each,)) for each in attention.values()]
        plan += [("cost", self.cost, (bench, attention, length)) for length in bench.timed()]
        named = [*attention, *(f"{length} tokens timed" for length in bench.timed())]
        for row in planned(plan, rows):
            print(f"advise: {named[len(rows) - 1]}, {len(rows)} of {len(plan)} ({time.perf_counter() - start:.0f} s)",
                  file=sys.stderr, flush=True)
            yield row
        if len(rows) == len(plan):
            losses = [{key: row[key] for key in ("loss", "again") if key in row} for row in rows[:len(arms)]]
            costs = {row["length"]: row for row in rows[len(arms):]}
            self.advice = concluded(bench, arms, losses, costs, self.tolerance)
            yield {"step": len(plan), "epoch": 0, "split": "test", **self.final(self.advice), "final": True}

    def inputs(self) -> list[Path]:
        """The audio that a table names."""
        table = Path(self.audio or "").expanduser()
        return [entry.audio for entry in entries(table)] if table.is_file() else []

    def bench(self, seed: int) -> Bench:
        """Raises DataError and ValueError for a model, data and a length that do not go together."""
        if self.images is not None:
            return advise_data.of_images(self.model, self.images, self.samples, self.calibration, seed)
        if self.audio is not None:
            return advise_data.of_audio(self.model, self.audio, self.samples, self.calibration, seed)
        model, predicts, tokenizer = opened(self.model, self.tokenizer)
        rows = rows_of(self.text, predicts, tokenizer, length_of(model, self.length, LEAST), self.cache_dir)
        judged, training = split(rows, self.samples or SAMPLES["texts"], self.calibration)
        return of_rows(model, judged, training, tokenizer, seed)

    def arms(self, bench: Bench) -> list[Arm]:
        return arms_of(self.attentions, bench.causal)

    @quiet()
    def cost(self, bench: Bench, attention: dict[str, Mechanism | None], length: int) -> dict[str, Any]:
        return {"length": length, **bench.cost(attention, length, self.rounds)}

    def final(self, advice: Advice) -> dict[str, Any]:
        chosen = advice.chosen or advice.rows[0]
        return {"above": chosen.above, "above_ci95": chosen.above_ci95, "speedup": chosen.speedup,
                "attention": chosen.arm.label, "advice": advice.sentence, "table": str(advice)}

    def summary(self, records: list[dict]) -> str:
        return records[-1]["table"]

    def keep(self, records: list[dict], directory: Path) -> None:
        """advise.csv, advise.md and advise.png in the run directory."""
        if self.advice is not None:
            self.advice.save(directory)
