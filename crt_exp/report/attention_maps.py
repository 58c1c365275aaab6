"""make attention-maps: Performers Figures 10 to 13: attention of a protein model, exact and swapped; its amino acids.

Options: run (of task=trembl, in place of the models that reports share), input (a FASTA file), entry (an accession of
it), m (projections of FAVOR++), first (letters to draw).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.config import ConfigError
from crt_exp.data import DataError, fasta
from crt_exp.data.protein import LETTERS, decode
from crt_exp.data.sources import missing, task_folder
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import Kept, LanguageModel
from crt_exp.report import amino_acids, attention_maps_page, protein_runs
from crt_exp.report.attention_maps_page import Alike, Drawn, Found
from crt_exp.report.evidence import Gate
from crt_exp.report.redraw_checkpoint import after_swap
from crt_exp.report.writing import Cells
from crt_exp.swap.rollout import attention_matrices
from crt_exp.swap.swap import fill_statistics

FILE, ENTRY = "UP000000625_83333.fasta", "P0AA25"  # thioredoxin of E. coli; the paper's BPT1_BOVIN is of no proteome
M, NOISES, SEQUENCES = 64, 8, 800                  # the paper's number of sequences
COSTS = 0.5                                        # nats that uniform attention must cost, or nothing is judged
BESIDE = ("favorpp", "favorp", "uniform")          # what an exact model is swapped to; the first is drawn
SOURCES = ("report/amino_acids.py", "swap/rollout.py", "models/language.py", "models/transformer.py", "attention",
           "features", "data/fasta.py")


def main(size: str, *, run: str | None = None, input: str | None = None, entry: str | None = None,
         m: str | None = None, first: str | None = None) -> None:
    projections, letters = number("m", m, M), number("first", first, None)
    files, place, name = chosen(input, entry)
    found = entry_of(place, name)
    found_runs = [run] if run else exact_runs(size)
    kept = of_proteins(found_runs[0])
    if m is not None and kept.mechanism.name != "exact":
        raise ConfigError(f"m={m}: this run was trained with {kept.mechanism.name}, which is drawn beside exact "
                          "attention: leave it out")
    drawn = drawn_of(kept, found, projections, letters)
    cells, keys = Cells("attention-maps", SOURCES), [shares_key(each, files) for each in found_runs]
    keys = [key | {"trained": trained} for trained in (True, False) for key in keys]
    cells.fill(keys, shares, "amino acids", workers=1 if run else None)
    values = [np.array(cells[key]) for key in keys]
    count = len(found_runs)
    alike = Alike(values[:count], values[count:], amino_acids.frequencies(sequences_of(files)))
    facts = facts_of(size, found_runs, files, place, drawn, m=projections)
    gate = None if run else gate_of(found_runs, cells)
    attention_maps_page.write(Found(drawn, alike, gate), facts, cells.seconds())


def gate_of(runs: list[str], cells: Cells) -> Gate:
    """Whether attention matters to these models: what their weights lose on the test split with uniform attention."""
    keys = {(name, run): {"start": run, "name": name, "m": None, "seed": 0, "options": {}}
            for run in runs for name in ("uniform", "exact")}
    cells.fill(list(keys.values()), after_swap, "what uniform attention costs")
    loss = {place: cells[key]["test"]["loss"] for place, key in keys.items()}
    return Gate("what uniform attention costs these models directly after the swap, in nats",
                float(np.mean([loss["uniform", run] - loss["exact", run] for run in runs])), COSTS)


def exact_runs(size: str) -> list[str]:
    seeds = range(protein_runs.SETTINGS[size].seeds)
    return [str(protein_runs.exact(protein_runs.B, seed, size)) for seed in seeds]


def number(key: str, value: str | None, default: int | None) -> int | None:
    if value is not None and not (value.isdecimal() and int(value) > 0):
        raise ConfigError(f"{key}={value}: it takes a whole number of at least 1")
    return default if value is None else int(value)


def of_proteins(run: str) -> Kept:
    """Raises DataError and ConfigError for what is no run of task=trembl."""
    kept = language.load(run, "run")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"run = {run} reads other symbols than amino acids: give a run of task=trembl")
    return kept


# ---- sequences


def chosen(input: str | None, entry: str | None) -> tuple[list[str], Path, str | None]:
    """The FASTA files whose sequences tell amino acids apart, the one with the entry, and its accession (None: the
    first of the file). Raises DataError where there is none."""
    if input is not None:
        return [input], Path(input).expanduser(), entry
    folder = task_folder("protein", None)
    if folder is None or not (folder / FILE).is_file():
        raise missing("protein", folder and folder / FILE)
    return [str(path) for path in fasta.fasta_files(folder)], folder / FILE, entry or ENTRY


def entry_of(path: Path, accession: str | None) -> fasta.Entry:
    """Raises DataError where the file has no such entry."""
    for found in fasta.entries(path, LETTERS):
        if accession in (None, found.accession.decode()):
            return found
    raise DataError(f"{path} has no entry {accession}: give one of its accessions, such as "
                    f"{next(fasta.entries(path, LETTERS)).accession.decode()}")


def sequences_of(files: list[str]) -> list[np.ndarray]:
    """At most SEQUENCES: those whose accessions have the lowest hashes, which is where the test split is taken from."""
    index = fasta.indexed([Path(file) for file in files], LETTERS)
    return [np.array(index.sequence(row)) for row in np.argsort(index.hashes, kind="stable")[:SEQUENCES]]


# ---- matrices of one entry


def drawn_of(kept: Kept, entry: fasta.Entry, m: int, first: int | None) -> Drawn:
    """The matrices of the model with exact attention and with another, and the errors of others. A run that has other
    attention is drawn with its own; exact attention with FAVOR++."""
    own, letters = kept.mechanism.name != "exact", list(entry.tokens)
    exact = matrices(kept.build(Mechanism.of("exact")), letters)
    others = {name: [matrices(swapped(kept, name, m, seed, letters), letters) for seed in range(seeds(name, kept))]
              for name in ((kept.mechanism.name, "uniform") if own else BESIDE)}
    errors = {name: [errors_of(found, exact) for found in draws] for name, draws in others.items()}
    tokens = amino_acids.read_by(kept.build(), letters)[0].tolist()
    shown = len(tokens) if first is None else min(first, len(tokens))
    name = next(iter(others))
    told = entry.accession.decode()
    return Drawn(name, told, decode(letters)[:len(tokens)], shown, exact, others[name][0], errors)


def seeds(name: str, kept: Kept) -> int:
    """Draws of the noise; of the run's own attention the one that it was trained with."""
    return NOISES if name.startswith("favor") and name != kept.mechanism.name else 1


def swapped(kept: Kept, name: str, m: int, seed: int, letters: list[int]) -> LanguageModel:
    """The run's weights with that attention; causal maps fitted to the entry, where they were not trained."""
    if name == kept.mechanism.name:
        return kept.build()
    model = kept.build(Mechanism.of(name, m=m, seed=seed) if name.startswith("favor") else Mechanism.of(name))
    return fitted(model, letters)


def fitted(model: LanguageModel, letters: list[int]) -> LanguageModel:
    """Fills the statistics that causal maps are fitted to, where there are none."""
    if any(getattr(part, "running", False) and not float(part.running_weight) for part in model.modules()):
        fill_statistics(model, [amino_acids.read_by(model, letters)])
    return model


def matrices(model: LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: what the layer gives for one-hot values."""
    return [A[0] for A in attention_matrices(model, amino_acids.read_by(model, letters))]


def errors_of(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|A' - A| / |A| of each layer, in the Frobenius norm over all heads; each model reads its own hidden states."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact)]


# ---- amino acids


def shares_key(run: str, files: list[str]) -> dict[str, Any]:
    """All that decides the cell: weights and sequences by their digests."""
    weights = language.folder_of(run, "run", "a run of task=trembl") / language.WEIGHTS
    return {"run": run, "weights": digest(weights), "files": files, "content": [digest(Path(f)) for f in files],
            "sequences": SEQUENCES}


def digest(path: Path) -> str:
    with path.expanduser().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def shares(run: str, files: list[str], trained: bool, **_: Any) -> list[list[float]]:
    """See `amino_acids.shares`. Not trained: a model like it with random weights, the control."""
    kept, sequences = of_proteins(run), sequences_of(files)
    model = kept.build()
    if not trained:
        torch.manual_seed(int(hashlib.sha256(run.encode()).hexdigest()[:8], 16))
        model = fitted(LanguageModel(kept.description, kept.mechanism.layer).eval(), sequences[0])
    return amino_acids.shares(model, sequences).tolist()


def facts_of(size: str, found_runs: list[str], files: list[str], place: Path, drawn: Drawn, m: int) -> str:
    names = ", ".join(Path(file).name for file in files)
    trained = "".join(f" {run};" for run in found_runs)
    return (f"Models: the runs{trained} SIZE={size}. Entry {drawn.entry} of {place.name}, its first "
            f"{len(drawn.letters)} letters; noise drawn {len(next(iter(drawn.errors.values())))} times, m = {m}. Amino "
            f"acids: at most {SEQUENCES} sequences of {names}, those with the lowest hashes of accessions, unmasked, "
            "cut to the model's length. Intervals: 95%, Student; p-values with Holm's correction.")
