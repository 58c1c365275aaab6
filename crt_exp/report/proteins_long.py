"""make proteins-long: Performers Figure 7, right: chains of proteins 8192 letters long, exact against linear attention.

Training on the proteomes is the command line's, task=trembl with task.chains=true. Time and memory of training and of
drawing letters are those of models with random weights (protein_steps.py), on this machine's CPU whatever the size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from crt_exp.models.language import sizes_of
from crt_exp.report import protein_steps, proteins_long_page, runs
from crt_exp.report.evidence import in_a_row
from crt_exp.report.protein_steps import FORMED, LAYER, MODEL, WIDE, rows
from crt_exp.report.proteins_long_page import Found
from crt_exp.report.writing import Cells
from crt_exp.studies.memory import in_new_process

TRAINED = ("exact", "favorp", "favorpp", "relu", "uniform")
TIMED = ("exact", "favorpp", "uniform")
LENGTHS, LONG = (1024, 8192, 32768), 8192
MEMORY = {"exact": LENGTHS, "favorpp": LENGTHS, "uniform": LENGTHS,
          FORMED: (1024, LONG)}            # 8 heads, 32768 letters: 34 GB for one matrix, and several are needed
POSITIONS, LETTERS_DRAWN = (100, 1000, 4000, 8000), 10  # letters drawn by each process, at each position
DRAWING = {"names": ["exact", "favorpp"], "sizes": sizes_of("performer6", {}, "sizes"), "m": 128}
PROCESSES, FLAT_ROUNDS = 5, 2              # rounds of each process
TRAINING_SOURCES = ("tasks/trembl.py", "tasks/sequences.py", "models/language.py", "models/transformer.py",
                    "data/protein.py", "data/fasta.py", "attention/generalized.py")
HOME = runs.Home(Path("outputs/proteins-long"), TRAINING_SOURCES)
TIME_SOURCES = ("attention", "features", "models/language.py", "models/transformer.py", "report/protein_steps.py")
REAL = ("task=trembl", "task.dataset=uniprot", "task.chains=true", f"task.max_length={LONG}", "task.held_out_files=[]",
        "task.validation_share=0.01", "task.test_share=0.01", "task.dropout=0")
LAST = ("trainer.select=last", "trainer.eval_every=1000000", "trainer.save_every=1000000")


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for in training. m: projections. log: steps between records of the loss."""

    options: tuple[str, ...]
    steps: int
    m: int
    log: int
    seeds: int = 3
    workers: int | None = None


SETTINGS = {
    "small": Setting((*REAL, "task.preset=tiny", "trainer.batch=1", "trainer.warmup=4", *LAST), steps=32, m=32, log=1),
    "gpu": Setting((*REAL, "task.preset=performer6", "task.checkpointing=true", "trainer.batch=8", "trainer.lr=1e-3",
                    "trainer.warmup=50", "trainer.precision=bf16", *LAST), steps=300, m=256, log=10, seeds=2,
                   workers=1),
    "full": Setting(("experiment=trembl_concat", "trainer.processes=8", "trainer.save_every=5000",
                     "trainer.select=last"), steps=100_000, m=256, log=100, seeds=1, workers=1),
}


def main(size: str) -> None:
    setting, cells = SETTINGS[size], Cells("proteins-long", TRAINING_SOURCES)
    runs_of = {(name, seed): training(name, seed, setting) for seed in range(setting.seeds) for name in TRAINED}
    cells.fill(list(runs_of.values()), train, "training", workers=setting.workers)
    timing = Cells("proteins-long-times", TIME_SOURCES)
    parts = [(part, length) for part in (LAYER, MODEL) for length in LENGTHS] + [(WIDE, LONG)]
    steps = {case: by_process(steps_key(*case)) for case in parts}
    timing.fill([key for keys in zip(*steps.values()) for key in keys], times, "training steps", workers=1)
    flat = by_process({"part": MODEL, "cases": [["favorpp", n, rows(MODEL, n)] for n in LENGTHS],
                       "rounds": FLAT_ROUNDS})
    timing.fill(flat, times, "FAVOR++ at all lengths", workers=1)
    peaks = {(name, n): {"name": name, "length": n} for name, lengths in MEMORY.items() for n in lengths}
    timing.fill(list(peaks.values()), memory, "memory", workers=1)
    drawing = by_process({**DRAWING, "positions": list(POSITIONS), "rounds": LETTERS_DRAWN})
    timing.fill(drawing, drawn, "drawing letters", workers=1)
    places = list(product(DRAWING["names"], POSITIONS))
    found = Found({arm: cells[key] for arm, key in runs_of.items()},
                  {case: of_all(timing, keys, TIMED) for case, keys in steps.items()}, of_all(timing, flat, LENGTHS),
                  {case: timing[key] for case, key in peaks.items()}, of_all(timing, drawing, places), PROCESSES)
    proteins_long_page.write(size, found, facts(size, setting, found), cells.seconds() + timing.seconds())


def of_all(timing: Cells, keys: list[dict[str, Any]], names: Sequence) -> dict[Any, list[float]]:
    """name -> milliseconds of every round, process by process."""
    return in_a_row([dict(zip(names, timing[key])) for key in keys])


# ---- cells: the key of each is all that it depends on


def training(name: str, seed: int, setting: Setting) -> dict[str, Any]:
    m = [f"features.m={setting.m}"] * (name in ("favorp", "favorpp", "relu"))
    return {"overrides": [*setting.options, f"trainer.steps={setting.steps}", f"trainer.log_every={setting.log}",
                          f"attention={name}", *m, f"seed={seed}"]}


def train(overrides: list[str]) -> dict[str, Any]:
    """{"curve": step and loss of training, "last": the final record}, or {"diverged": what the run said}."""
    try:
        records = HOME.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    return {"curve": [[r["step"], r["loss"]] for r in records if r["split"] == "train"], "last": records[-1]}


def steps_key(part: str, length: int) -> dict[str, Any]:
    return {"part": part, "cases": [[name, length, rows(part, length)] for name in TIMED], "rounds": rounds(length)}


def rounds(length: int) -> int:
    """Of each process: more of the short ones, whose times vary more."""
    return 2 if length < LONG else 1


def by_process(key: dict[str, Any]) -> list[dict[str, Any]]:
    """The same work in each process, by its number."""
    return [{**key, "process": i} for i in range(PROCESSES)]


def times(part: str, cases: list[list], rounds: int, process: int) -> list[list[float]]:
    return in_new_process(protein_steps.times, part=part, cases=cases, rounds=rounds)


def memory(name: str, length: int) -> float:
    return in_new_process(protein_steps.memory, name=name, length=length)


def drawn(process: int, **arguments: Any) -> list[list[float]]:
    return in_new_process(protein_steps.generation, **arguments)


def facts(size: str, setting: Setting, found: Found) -> str:
    import torch

    shown = lambda sizes: "({heads}, {layers}, {d_ff}, {d})".format(**sizes)
    counts = ", ".join(f"{len(methods['exact']) // PROCESSES} at {n} ({part})"
                       for (part, n), methods in found.times.items())
    made = f"`{' '.join(setting.options)}`, {setting.steps} steps, m = {setting.m}, {setting.seeds} seeds"
    return (f"Training: {made}; a seed means the same weights, rows and order in all arms; SIZE={size}. Sizes are "
            f"(heads, layers, d_ff, d). Times: float32, {torch.get_num_threads()} threads, causal, random letters, no "
            f"padding; the model has {shown(protein_steps.SIZES[MODEL])}, the wide model "
            f"{shown(protein_steps.SIZES[WIDE])} (each layer takes as long; rows of one at a time), the attention "
            f"layer {protein_steps.HEADS} heads of {protein_steps.D} in training mode; m = "
            f"{', '.join(f'{m} ({part})' for part, m in protein_steps.M.items())}. A step of model and layer reads "
            f"{protein_steps.A_STEP} letters whatever the length of their rows. All methods take their turn in every "
            f"round, after one to warm up; {PROCESSES} processes for each number of letters, rounds of each: {counts}. "
            "Tables show all rounds; verdicts are over processes, of each its own ratio. Every peak of resident "
            "memory, of one row, has a process of its own. Letters are drawn from a model of "
            f"{shown(DRAWING['sizes'])}, m = {DRAWING['m']}, {LETTERS_DRAWN} rounds of each of {PROCESSES} "
            "processes, all positions in every round. "
            "Intervals: 95%, Student; p-values with Holm's correction.")
