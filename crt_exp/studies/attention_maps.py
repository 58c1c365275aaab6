"""Attention matrices of a protein model, exact and swapped, and which amino acids its attention takes for alike.

The models are exact ones of task=trembl, trained here, or a run of the user's: exact or with its own attention.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.config import ConfigError
from crt_exp.data import DataError, fasta
from crt_exp.data.protein import LETTERS, STANDARD, decode
from crt_exp.data.sources import missing, task_folder
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.models.language import KeptLanguageModel, LanguageModel
from crt_exp.studies import amino_acids, runs, training
from crt_exp.studies.amino_acids import PAIRS
from crt_exp.studies.bench import fitted
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.redraw import after_swap
from crt_exp.swap.rollout import attention_matrices

OWN = "a run of task=trembl"
SWAPPED = ("favorpp", "favorp", "uniform")  # what an exact model is swapped to; the matrices of the first are kept


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False, *, run: str | None = None,
            input: str | None = None, entry: str | None = None, m: str | None = None, first: str | None = None
            ) -> Iterator[Draw]:
    """Tables of one setting, the accession of the entry: "maps" (letters; row: the weights of a query as text, unit
    layer.head, x the query), "error" of each layer and draw of the noise, "alike" of each model, "swap". Of one draw or
    one model they are "one draw" and "one model", for nothing is judged by these. size: {train, seeds, m, noises,
    sequences, file, entry}. Options: run, input (a FASTA file), entry, m, first (letters that are kept).

    Raises DataError and ConfigError for a run, file, entry or number that cannot be used.
    """
    projections, count = number("m", m, size["m"]), number("first", first, None)
    files, place, accession = chosen(input, entry, size)
    protein = entry_of(place, accession)
    cells, home = Cells(name, sources, keep), runs.Home(training.HOME, tuple(sources))
    models = [run] if run else [trained(home, size, seed) for seed in range(size["seeds"])]
    kept = of_proteins(models[0])
    if m is not None and not kept.mechanism.is_exact:
        raise ConfigError(f"m={m}: this run was trained with {kept.mechanism.name}, which is drawn next to exact "
                          "attention: leave it out")
    setting = protein.accession.decode()
    yield from of_maps(cells, setting, {"run": models[0], "weights": weights_of(models[0]), "file": str(place),
                                        "entry": setting, "m": projections, "noises": size["noises"], "first": count})
    yield from of_alike(cells, setting, models, files, size["sequences"])
    if not run:
        yield from of_swaps(cells, setting, models)


def trained(home: runs.Home, size: Mapping[str, Any], seed: int) -> str:
    options = [*size["train"], f"seed={seed}"]
    home.kept(options)
    return str(home.place(options))


# ---- draws


def of_maps(cells: Cells, setting: str, key: Key) -> Iterator[Draw]:
    value = cells.fill([key], drawn, "matrices", 1)[key]
    for metric in ("letters", "file"):
        yield cells.draw(key, setting, "exact", metric, value[metric], table="maps")
    for arm, layers in value["matrices"].items():
        for unit, rows in layers.items():
            for query, row in enumerate(rows):
                yield cells.draw(key, setting, arm, "row", row, unit, query, "maps")
    for arm, draws in value["errors"].items():
        for noise, layers in enumerate(draws):
            for layer, error in enumerate(layers):
                table = "error" if len(value["errors"][next(iter(value["errors"]))]) > 1 else "one draw"
                yield cells.draw(key, setting, arm, "error", error, noise, layer, table)


def of_alike(cells: Cells, setting: str, models: Sequence[str], files: Sequence[str], sequences: int
             ) -> Iterator[Draw]:
    """r with BLOSUM62 and its p; controls that are the same for all models stand with each. similarity: of each pair
    of amino acids, the mean over trained models (unit: the pair)."""
    common = {"files": list(files), "content": [digest(Path(file)) for file in files], "sequences": sequences}
    keys = {(learned, i): {"run": model, "weights": weights_of(model), "trained": learned, **common}
            for learned in (True, False) for i, model in enumerate(models)}
    cells.fill([*keys.values()], shares, "amino acids", 1 if len(models) == 1 else None)
    score, table = amino_acids.blosum62(), "alike" if len(models) > 1 else "one model"
    frequencies = amino_acids.frequencies(sequences_of(files, sequences))
    same = {"composition": amino_acids.alike(frequencies),
            "frequency": amino_acids.alike_by_frequency(frequencies.mean(0))}
    matrices = {place: amino_acids.alike(np.array(cells[key])) for place, key in keys.items()}
    for (learned, i), key in keys.items():
        arms = {"trained": matrices[True, i], **same} if learned else {"random weights": matrices[False, i]}
        for arm, matrix in arms.items():
            correlated = amino_acids.correlation(matrix, score)
            for metric, value in (("r", correlated.r), ("p", correlated.p)):
                yield cells.draw(key, setting, arm, metric, value, i, table=table)
    mean = np.mean([matrix for (learned, _), matrix in matrices.items() if learned], 0)
    for a, b in zip(*PAIRS):
        for arm, matrix in (("trained", mean), ("BLOSUM62", score)):
            pair = f"{STANDARD[a]}{STANDARD[b]}"
            yield cells.draw(keys[True, 0], setting, arm, "similarity", float(matrix[a, b]), pair, table="pairs")


def of_swaps(cells: Cells, setting: str, models: Sequence[str]) -> Iterator[Draw]:
    """Whether attention matters to these models: their loss with uniform attention in its place."""
    for i, model in enumerate(models):
        for arm in ("exact", "uniform"):
            key = {"start": model, "attention": arm, "seed": 0}
            value = cells.fill([key], after_swap, "what uniform attention costs", 1)[key]
            yield cells.draw(key, setting, arm, "loss", value["test"]["loss"], i, table="swap")


# ---- what is chosen


def number(key: str, value: str | None, default: int | None) -> int | None:
    if value is not None and not (value.isdecimal() and int(value) > 0):
        raise ConfigError(f"{key}={value}: it takes a whole number of at least 1")
    return default if value is None else int(value)


def of_proteins(run: str) -> KeptLanguageModel:
    """Raises DataError and ConfigError for what is no run of task=trembl."""
    kept = language.load(run, "run")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"run = {run} reads other symbols than amino acids: give {OWN}")
    return kept


def chosen(input: str | None, entry: str | None, size: Mapping[str, Any]) -> tuple[list[str], Path, str | None]:
    """The FASTA files whose sequences tell amino acids apart, the one with the entry, and its accession (None: the
    first of the file). Raises DataError where there is none."""
    if input is not None:
        return [input], Path(input).expanduser(), entry
    folder = task_folder("protein", None)
    if folder is None or not (folder / size["file"]).is_file():
        raise missing("protein", folder and folder / size["file"])
    return [str(path) for path in fasta.fasta_files(folder)], folder / size["file"], entry or size["entry"]


def entry_of(path: Path, accession: str | None) -> fasta.FastaEntry:
    """Raises DataError where the file has no such entry."""
    for entry in fasta.entries(path, LETTERS):
        if accession in (None, entry.accession.decode()):
            return entry
    raise DataError(f"{path} has no entry {accession}: give one of its accessions, such as "
                    f"{next(fasta.entries(path, LETTERS)).accession.decode()}")


def sequences_of(files: Sequence[str], count: int) -> list[np.ndarray]:
    """Those whose accessions have the lowest hashes, which is where the test split is taken from."""
    index = fasta.indexed([Path(file) for file in files], LETTERS)
    return [np.array(index.sequence(row)) for row in np.argsort(index.hashes, kind="stable")[:count]]


def weights_of(run: str) -> str:
    return digest(language.folder_of(run, "run", OWN) / language.WEIGHTS)


def digest(path: Path) -> str:
    with path.expanduser().open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


# ---- cells


def drawn(run: str, file: str, entry: str, m: int, noises: int, first: int | None, **_: Any) -> dict[str, Any]:
    """The matrices of the model with exact attention and with another, and the errors of others. A run that has other
    attention is drawn with its own; exact attention with the first of SWAPPED."""
    kept, letters = of_proteins(run), list(entry_of(Path(file), entry).tokens)
    own = kept.mechanism.name
    names = (own, "uniform") if own != "exact" else SWAPPED
    exact = matrices(kept.build(Mechanism.of("exact")), letters)
    others = {name: [matrices(swapped(kept, name, m, seed, letters), letters)
                     for seed in range(noises if Mechanism.parse(name).draws and name != own else 1)] for name in names}
    errors = {name: [errors_of(each, exact) for each in draws] for name, draws in others.items()}
    errors["uniform"] = errors["uniform"] * len(errors[names[0]])  # the same whatever the noise
    shown = {"exact": exact, names[0]: others[names[0]][0]}
    return {"letters": decode(letters)[:exact[0].shape[-1]], "file": Path(file).name, "errors": errors,
            "matrices": {name: as_text(layers, first) for name, layers in shown.items()}}


def as_text(layers: list[Tensor], first: int | None) -> dict[str, list[str]]:
    """layer.head -> a text for each query: the weights of the keys."""
    return {f"{i}.{j}": [" ".join(f"{weight:.3g}" for weight in row) for row in A[:first, :first].tolist()]
            for i, layer in enumerate(layers) for j, A in enumerate(layer)}


def swapped(kept: KeptLanguageModel, name: str, m: int, seed: int, letters: list[int]) -> LanguageModel:
    """The run's weights with that attention; causal maps fitted to the entry, where they were not trained."""
    if name == kept.mechanism.name:
        return kept.build()
    model = kept.build(Mechanism.parse(name, seed=seed).projecting(m))
    return fitted(model, [amino_acids.read_by(model, letters)])


def matrices(model: LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: what the layer gives for one-hot values."""
    return [A[0] for A in attention_matrices(model, amino_acids.read_by(model, letters))]


def errors_of(estimates: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|A' - A| / |A| of each layer, in the Frobenius norm over all heads; each model reads its own hidden states."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(estimates, exact)]


def shares(run: str, files: list[str], sequences: int, trained: bool, **_: Any) -> list[list[float]]:
    """See `amino_acids.shares`. Not trained: a model like it with random weights, the control."""
    kept, chains = of_proteins(run), sequences_of(files, sequences)
    model = kept.build()
    if not trained:
        torch.manual_seed(int(hashlib.sha256(weights_of(run).encode()).hexdigest()[:8], 16))
        model = LanguageModel(kept.description, kept.mechanism.layer).eval()
        fitted(model, [amino_acids.read_by(model, chains[0])])
    return amino_acids.shares(model, chains).tolist()
