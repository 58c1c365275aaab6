"""Kernel machines over the rows of a file, which are read once: ridge regression or classification in random features.

Legend: n rows, d columns, M features. Columns are standardised by rows from all over the file, which features begin
with; every chunk of rows is cut into those that are summed and those that are held out by its number and the seed
alone, so that processes that share the chunks out, and runs that go on, end with the same sums.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.own_table import Kind, few_whole
from crt_exp.data.row_files import Chunk, Columns, check_names, open_rows
from crt_exp.data.tabular import is_number
from crt_exp.drawing import markdown
from crt_exp.hints import Count, Positive, above, below
from crt_exp.mechanism import Mechanism
from crt_exp.probes import kernel_predict
from crt_exp.probes.base import check_estimates
from crt_exp.probes.held_out import compared, scores
from crt_exp.probes.reading import Coded, Model, Reading, Scale, plain_words
from crt_exp.ridge import RandomFeatureClassifier, RandomFeatureRidge
from crt_exp.ridge.batches import Batch, Spread, block_rows
from crt_exp.ridge.sums import check_memory
from crt_exp.runner.processes import Alone, World
from crt_exp.runner.progress import peak_memory
from crt_exp.schema import checked
from crt_exp.times import Anonymous
from crt_exp.whole_files import whole, write_rows

LOOKED_AT = 8192       # rows from all over the file that columns are standardised by
ENTRIES = 2**22        # of a chunk
Share = Annotated[float, above(0), below(1)]


@checked("task")
class KernelMachine:
    """See conf/task/kernel.yaml."""

    of_rows = several = True
    metric = "r2"

    def __init__(self, data: str | None, target: str | None, kind: Kind | None,
                 columns: Sequence[str] | None, onehot: Sequence[str] | None, weight: str | None, held_out: Share,
                 tested: Count, lengths: Positive | Literal["scale", "fit"],
                 alpha: Positive | Literal["gcv", "evidence"], precision: Literal["float32", "float64"],
                 save_seconds: Positive):
        if data is None or target is None:
            raise ValueError("task=kernel needs task.data (a csv or Parquet file, or a folder of npy arrays) and "
                             "task.target, the column to predict")
        self.file = open_rows(data)
        self.target, self.weight = target, weight
        self.columns = self.chosen(columns)
        self.onehot = self.of_words(onehot or ())
        self.held_out, self.tested, self.lengths, self.alpha = held_out, tested, lengths, alpha
        self.precision, self.save_seconds = precision, save_seconds
        self.classes = kind == "classification" or (kind is None and self.looks_like_classes())
        self.metric = "accuracy" if self.classes else "r2"
        self.directory: Path | None = None
        self.world: World | Alone = Alone()
        self.reading: Reading | None = None  # at the end

    def inputs(self) -> list[Path]:
        return [self.file.path]

    def chosen(self, columns: Sequence[str] | None) -> list[str]:
        apart = {self.target: "task.target"} | ({self.weight: "task.weight"} if self.weight else {})
        named = dict.fromkeys(columns or (), "task.columns")
        check_names(self.file, {**named, **apart})
        if twice := sorted({*named} & {*apart}):
            raise DataError(f"task.columns: {twice[0]} is {apart[twice[0]]}, and cannot be predicted from")
        left = [*named] or [name for name in self.file.names if name not in apart]
        if not left:
            raise DataError(f"{self.file.path}: {self.target} is its only column")
        return left

    def of_words(self, names: Sequence[str]) -> list[str]:
        check_names(self.file, dict.fromkeys(names, "task.onehot"))
        if apart := [name for name in names if name not in self.columns]:
            raise DataError(f"task.onehot: {apart[0]} is no column to predict from")
        return [*names]

    def looks_like_classes(self) -> bool:
        labels = self.file.spread([self.target], [self.target], LOOKED_AT)[self.target]
        return not all(map(is_number, labels)) or few_whole(labels.astype(np.float64))

    # ---- rows

    @property
    def names(self) -> list[str]:
        return [*self.columns, self.target, *([self.weight] if self.weight else [])]

    @property
    def texts(self) -> list[str]:
        return [*self.onehot, *([self.target] if self.classes else [])]

    def batch(self, columns: Columns) -> Batch:
        y = columns[self.target]
        y = plain_words(y) if self.classes else y[:, None]
        return Batch(self.coded(columns), y, columns[self.weight] if self.weight else np.ones(len(y)))

    def check_weights(self, weight: np.ndarray, row: int) -> None:
        """Raises DataError for a negative one. row: the first one."""
        if (weight < 0).any():
            bad = int(np.flatnonzero(weight < 0)[0])
            raise DataError(f"{self.file.path}, {self.file.line(row + bad)}, column {self.weight}: it is "
                            f"{weight[bad]:g}: weights must not be negative")

    # ---- the model

    def begun(self, mechanism: Mechanism, seed: int) -> "Reading":
        """Raises ValueError for more features than memory, DataError for a column that is constant."""
        phi = mechanism.kernel_map()
        columns = phi.width(mechanism.m)
        check_memory(columns, block_rows(columns), f"features.m = {mechanism.m}: columns")
        seen = self.file.spread(self.names, self.texts, LOOKED_AT)
        self.coded = Coded.of(seen, self.columns, self.onehot, self.file)
        self.size = max(256, min(16384, ENTRIES // len(self.coded.names)))
        look = self.batch(seen)
        scale = Scale.of(look.X, self.coded.names, self.file, self.precision)
        kind = RandomFeatureClassifier if self.classes else RandomFeatureRidge
        lengths = {"gamma": "scale"} if self.lengths == "scale" else {"length_scale": self.lengths}
        model = kind(phi, mechanism.sampler, columns, alpha=self.alpha, random_state=seed, **lengths)
        y = look.y if self.classes else look.y[:, 0]
        return Reading(model.begin(scale(look.X), y), Spread(self.tested), scale)

    def records(self, mechanism: Mechanism, seed: int, done: Sequence[dict] = ()) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        with Anonymous() as memory:
            yield from self.read(mechanism, seed, len(done), memory)

    def read(self, mechanism: Mechanism, seed: int, step: int, memory: Anonymous) -> Iterator[dict[str, Any]]:
        reading = self.begun(mechanism, seed)
        reading.load(self.kept())
        saved, clock = time.monotonic(), Clock()
        with tqdm(total=self.file.count, initial=reading.rows * self.world.size, unit="row", unit_scale=True,
                  disable=None if self.world.main else True, leave=False) as bar:
            for chunk in self.file.chunks(self.names, self.texts, self.size, self.mine(reading.next)):
                bar.update(self.take(reading, chunk, seed) * self.world.size)
                reading.seconds += clock.lap()
                if time.monotonic() - saved > self.save_seconds:
                    reading.save(self.kept())
                    saved = time.monotonic()
                    yield {"step": reading.next, "epoch": 0, "split": "train", "rows": reading.rows,
                           "rows_per_s": reading.rows / reading.seconds}
        yield from self.ended(reading, step, memory)

    def mine(self, first: int) -> Callable[[int], bool]:
        return lambda number: number >= first and number % self.world.size == self.world.rank

    def take(self, reading: "Reading", chunk: Chunk, seed: int) -> int:
        """How many rows were taken."""
        batch = self.batch(chunk.columns)
        self.check_weights(batch.weight, chunk.row)
        held = np.random.default_rng([seed, chunk.number]).random(len(batch)) < self.held_out
        reading.take(batch, held, chunk.row + np.arange(len(batch)))
        reading.next = chunk.number + 1
        return len(batch)

    def kept(self) -> Path | None:
        """Where the sums lie from which a run goes on. Raises ConfigError where they are those of other processes."""
        if self.directory is None:
            return None
        path = self.directory / f"sums.{self.world.rank}.of.{self.world.size}.npz"
        if other := sorted({*self.directory.glob("sums.*.npz")} - {*self.directory.glob(
                f"sums.*.of.{self.world.size}.npz")}):
            raise ConfigError(f"{self.directory} was begun on {other[0].stem.split('.')[-1]} processes: go on with as "
                              "many, or choose another hydra.run.dir")
        return path

    # ---- the end

    def ended(self, reading: "Reading", step: int, memory: Anonymous) -> Iterator[dict[str, Any]]:
        """The sums of all processes, and what the first of them makes of these."""
        reading.gather(self.world)
        self.reading = reading
        of_each = self.world.gather(peaks(memory))
        if not self.world.main:
            return
        if reading.held.kept is None:
            raise ValueError(f"{self.file.path}: no row was held out of {reading.rows}: raise task.held_out")
        held = reading.held.kept
        clock = Clock()
        found = scores(reading.model, reading.scale(held.X), held)
        of_each = [*of_each, peaks(memory)]     # to solve takes more than to read
        yield {"step": step, "epoch": 0, "split": "test", **found, "rows": reading.model.rows_,
               "tested": len(held), "columns": len(self.columns), "alpha": self.alpha_of(reading.model),
               "seconds": reading.seconds + clock.lap(), "rows_per_s": reading.rows / max(reading.seconds, 1e-9),
               **{name: max(each[name] for each in of_each) for name in of_each[0]}, "final": True}

    def alpha_of(self, model: Model) -> float:
        return float(np.ravel(model.alpha_)[0])

    def keep(self, records: Sequence[dict], directory: Path) -> None:
        """kernel.csv, kernel.md and the model; the sums are no longer needed."""
        header, rows = compared(records[-1])
        kernel_predict.keep(directory, self.reading, self.coded, self.target)
        write_rows(directory / "kernel.csv", [header, *rows])
        with whole(directory / "kernel.md") as part:
            part.write_text(markdown(header, rows))
        for path in directory.glob("sums.*.npz"):
            path.unlink()

    def summary(self, records: Sequence[dict]) -> str:
        header, rows = compared(records[-1])
        return f"{self.file.path.name}, {self.target}\n" + markdown(header, rows).rstrip()


def peaks(memory: Anonymous) -> dict[str, float]:
    """memory_gib, libraries and pages of data that is mapped among it, and anonymous_gib, without these, where the
    system tells them apart."""
    both = {"memory_gib": peak_memory(torch.device("cpu")), "anonymous_gib": memory.most}
    return {name: count / 2**30 for name, count in both.items() if count is not None}


class Clock:
    """Seconds since it was last looked at."""

    def __init__(self):
        self.last = time.monotonic()

    def lap(self) -> float:
        before, self.last = self.last, time.monotonic()
        return self.last - before
