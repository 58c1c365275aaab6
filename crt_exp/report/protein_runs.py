"""The trained models that reports on proteins share: what one SIZE stands for, each arm as a command line, its results.

Every run is one of task=trembl. Arms of one seed read the same rows in the same order with the same masks, and start
from the same weights; that seed is their noise's too. Exact models stay in outputs/proteins/, for `exact`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from crt_exp.report import runs
from crt_exp.report.writing import Cells
from crt_exp.runner.run import read_records

SOURCES = ("tasks/trembl.py", "tasks/sequences.py", "models/language.py", "models/transformer.py", "data/protein.py",
           "data/fasta.py", "data/families.py", "attention/reformer.py", "attention/generalized.py")
HOME = runs.Home(Path("outputs/proteins"), SOURCES)
U, B = DIRECTIONS = "unidirectional", "bidirectional"
Dataset = Literal["generated", "uniprot"]
GENERATED, REAL = DATASETS = get_args(Dataset)
SOURCE = {GENERATED: "generated families", REAL: "proteomes"}  # in words
CONTROLS = ("uniform", "identity", "window")
LINEAR = ("favorp", "favorpp", "smreg", "relu")      # with m projections
PEERS = ("nearfar", "elu", "linformer", "reformer")
NAMES = ("exact", *LINEAR, *PEERS, *CONTROLS)
ONE_WAY = ("linformer",)                             # which cannot be causal


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for.

    real, generated: options of all runs on the proteomes and on the generated families. steps: of training, by data
    set. m: projections. options: of single choices of attention. workers: runs at a time; None: one a core.
    """

    real: tuple[str, ...]
    generated: tuple[str, ...]
    steps: dict[str, int]
    m: int
    options: dict[str, tuple[str, ...]]
    seeds: int = 3
    workers: int | None = None

    def data(self, dataset: Dataset) -> tuple[str, ...]:
        return (f"task.dataset={dataset}", *(self.real if dataset == REAL else self.generated))


def model(heads: int, layers: int, d_ff: int, d: int) -> tuple[str, ...]:
    return tuple(f"+task.sizes.{key}={value}" for key, value in locals().items())


SHORT = {"linformer": ("attention.length=128", "attention.rank=32"), "window": ("attention.block=8",),
         "reformer": ("attention.chunk=16", "attention.buckets=16", "attention.hashes=2"),   # buckets: 2 L / chunk
         "nearfar": ("attention.block=8", "attention.heavy=8", "attention.cells=8", "attention.exact_until=0")}
PAPER = {"linformer": ("attention.length=1024", "attention.rank=600"), "window": (),
         "reformer": ("attention.chunk=64", "attention.buckets=32", "attention.hashes=4"),
         "nearfar": ("attention.preset=default",)}
LAST = ("trainer.select=last", "trainer.save_every=1000000")  # validation is for the curves and chooses nothing
SETTINGS = {
    "small": Setting(  # no dropout: a fraction of an epoch is read, so there is nothing to overfit
        real=("task.max_length=128", "task.dropout=0", *model(4, 2, 128, 64), "trainer.batch=32", "trainer.warmup=20",
              "trainer.eval_every=40", "trainer.log_every=40", "trainer.eval_batch=128", *LAST),
        generated=("task.max_length=64", "task.generated.shortest=32", "task.generated.longest=64", "task.dropout=0",
                   *model(4, 2, 128, 64), "trainer.batch=32", "trainer.warmup=20", "trainer.eval_every=100",
                   "trainer.log_every=100", "trainer.eval_batch=128", *LAST),
        steps={REAL: 200, GENERATED: 1000}, m=32, options=SHORT),
    "gpu": Setting(
        real=("task.max_length=512", "task.dropout=0.1", *model(8, 6, 1024, 512), "trainer.batch=128",
              "trainer.lr=1e-3", "trainer.precision=bf16", "trainer.eval_every=500", *LAST),
        generated=("task.max_length=96", "task.dropout=0", "task.generated.sequences=30000", *model(8, 4, 512, 128),
                   "trainer.batch=128", "trainer.lr=1e-3", "trainer.eval_every=500", *LAST),
        steps={REAL: 3000, GENERATED: 5000}, m=128, workers=2,
        options=PAPER | {"linformer": ("attention.length=512", "attention.rank=300")}),
    "full": Setting(  # on one machine with 8 GPUs: Performers Fig. 6 and appendix A, by conf/experiment/trembl.yaml
        real=("experiment=trembl", "trainer.processes=8", "trainer.save_every=10000", "trainer.select=last"),
        generated=("task.max_length=96", "task.dropout=0", "task.generated.sequences=30000", *model(8, 4, 512, 128),
                   "trainer.batch=128", "trainer.lr=1e-3", "trainer.eval_every=500", *LAST),
        steps={REAL: 500_000, GENERATED: 5000}, m=256, workers=1, options=PAPER),
}


# ---- the exact models that other reports start from


def exact(direction: str, seed: int, size: str = "small", dataset: Dataset = REAL) -> Path:
    """The directory of the run with exact attention, which is trained where that has not been done, and continued
    where it was interrupted. Its model is `language.load(exact(...))`, or task.init=<that>."""
    return ready(direction, seed, SETTINGS[size], dataset)


def ready(direction: str, seed: int, setting: Setting, dataset: Dataset = REAL) -> Path:
    """The same of any setting."""
    found = place(direction, seed, setting, dataset)
    if not any(record.get("final") for record in read_records(found / "metrics.jsonl")):
        HOME.kept(training("exact", direction, seed, setting, dataset)["overrides"])
    return found


def place(direction: str, seed: int, setting: Setting, dataset: Dataset = REAL) -> Path:
    """Where that run lies, or will."""
    return HOME.place(training("exact", direction, seed, setting, dataset)["overrides"])


def trained(keys: list[dict[str, Any]], setting: Setting, label: str) -> Cells:
    """The cells of all reports on proteins, with these: what one report has trained the others take."""
    return Cells("proteins", SOURCES).fill(keys, train, label, setting.workers)


# ---- runs: the key of a cell is all that a run depends on


def training(name: str, direction: str, seed: int, setting: Setting, dataset: Dataset = REAL,
             more: tuple[str, ...] = ()) -> dict[str, Any]:
    """From new weights; with exact attention the run is kept."""
    given = [*task(dataset, direction, setting), f"trainer.steps={setting.steps[dataset]}", *attention(name, setting),
             *more, f"seed={seed}"]
    return {"overrides": given} | ({"kept": True} if name == "exact" else {})


def task(dataset: Dataset, direction: str, setting: Setting) -> list[str]:
    first, options = [], setting.data(dataset)
    if not any(option.startswith("experiment=") for option in options):
        first = ["task=trembl"]
    return [*first, *options, f"task.direction={direction}"]


def attention(name: str, setting: Setting) -> list[str]:
    return [f"attention={name}", *setting.options.get(name, ()), *([f"features.m={setting.m}"] * (name in LINEAR))]


def arms(direction: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if direction == B or name not in ONE_WAY)


def train(overrides: list[str], kept: bool = False) -> dict[str, Any]:
    """{"curve": the evaluations on validation, "last": the final record}, or {"diverged": what the run said} of one
    whose loss was not finite."""
    try:
        records = HOME.kept(overrides) if kept else HOME.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    points = [{key: r[key] for key in ("step", "loss", "accuracy")} for r in records if r["split"] == "validation"]
    return {"curve": points, "last": records[-1]}


def values(cells: Cells, keys: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    return {name: cells[key] for name, key in keys.items()}
