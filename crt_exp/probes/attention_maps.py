"""Attention matrices of a protein model, exact and swapped, and which amino acids its attention takes for alike.

Models are runs of task=trembl: exact ones, or a user's with its own attention. Probes take them with the choices of a
page: input (a FASTA file; None: the proteomes), entry (an accession; None: that of `example`, {file, entry}, or the
first of the input), m (projections as typed; None: those of the arms), first (letters that are kept; None: all), and
`content`, a digest of what the user named, so that other files of the same names are read anew. Rows name the entry.
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
from crt_exp.runner.configuration import kept_task
from crt_exp.probes import amino_acids
from crt_exp.probes.bench import fitted
from crt_exp.probes.grid import digest
from crt_exp.swap.rollout import attention_matrices
from crt_exp.tasks.base import Reader

OWN = "a run of task=trembl"
Row = dict[str, Any]


# ---- matrices


def maps(arm: Mapping[str, str], run: str, noises: int, example: Mapping[str, str], seed: int, input: str | None = None,
         entry: str | None = None, m: str | None = None, first: str | None = None, content: Sequence[str] = ()
         ) -> Iterator[Row]:
    """Of the model with exact attention and with the first arm, each query's weights as text, and the errors of all
    arms, by layer and draw of the noise. A run that has other attention is drawn with its own, and `uniform`.

    Raises DataError and ConfigError for a run, file, entry or number that cannot be used.
    """
    projections, count = number("m", m), number("first", first)
    _, place, accession = chosen(input, entry, example)
    protein = entry_of(place, accession)
    kept, letters, named = of_proteins(run), list(protein.tokens), {"entry": protein.accession.decode()}
    own = kept.mechanism.name
    if own != "exact":
        if m is not None:
            raise ConfigError(f"m={m}: this run was trained with {own}, which is drawn next to exact attention: leave "
                              "it out")
        arm, noises = {own: own, "uniform": "uniform"}, 1
    exact = matrices(kept.build(Mechanism.of("exact")), letters)
    yield named | {"letters": decode(letters)[:exact[0].shape[-1]], "file": place.name}
    yield from (named | row for row in weights("exact", exact, count))
    for name, text in arm.items():
        for noise in range(noises):
            made = matrices(swapped(kept, text, projections, noise, letters), letters)
            if name == next(iter(arm)) and not noise:
                yield from (named | row for row in weights(name, made, count))
            yield named | {"arm": name, "noise": noise, "error": errors_of(made, exact),
                           "layer": [*range(len(exact))], "table": "error" if noises > 1 else "one draw"}


def weights(arm: str, layers: list[Tensor], first: int | None) -> Iterator[Row]:
    """Of each head, layer.head, a text for each query: the weights of the keys."""
    for i, layer in enumerate(layers):
        for j, A in enumerate(layer):
            rows = [" ".join(f"{weight:.3g}" for weight in row) for row in A[:first, :first].tolist()]
            yield {"arm": arm, "head": f"{i}.{j}", "row": rows, "query": [*range(len(rows))]}


def swapped(kept: KeptLanguageModel, text: str, m: int | None, seed: int, letters: list[int]) -> LanguageModel:
    """The run's weights with that attention; causal maps fitted to the entry, where they were not trained."""
    if text == kept.mechanism.name:
        return kept.build()
    mechanism = Mechanism.parse(text, seed=seed)
    model = kept.build(mechanism if m is None else mechanism.projecting(m))
    return fitted(model, [amino_acids.read_by(model, letters)])


def matrices(model: LanguageModel, letters: list[int]) -> list[Tensor]:
    """(heads, L, L) of each layer: what the layer gives for one-hot values."""
    return [A[0] for A in attention_matrices(model, amino_acids.read_by(model, letters))]


def errors_of(estimates: list[Tensor], exact: list[Tensor]) -> list[float]:
    """|A' - A| / |A| of each layer, in the Frobenius norm over all heads; each model reads its own hidden states."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(estimates, exact)]


# ---- amino acids


def alike(arm: str, runs: Sequence[str], sequences: int, example: Mapping[str, str], seed: int,
          input: str | None = None, entry: str | None = None, content: Sequence[str] = ()) -> Iterator[Row]:
    """r with BLOSUM62 and its p of each model, of one like it with random weights, and of controls that are the same
    for all models; of the mean over trained models the similarity of each pair of amino acids. arm: "trained"."""
    files, place, accession = chosen(input, entry, example)
    named, score = {"entry": entry_of(place, accession).accession.decode()}, amino_acids.blosum62()
    chains = sequences_of(files, sequences)
    frequencies, similar = amino_acids.frequencies(chains), []
    controls = {"composition": amino_acids.alike(frequencies),
                "frequency": amino_acids.alike_by_frequency(frequencies.mean(0))}
    for i, run in enumerate(runs):
        kept = of_proteins(run)
        similar.append(amino_acids.alike(amino_acids.shares(kept.build(), chains)))
        untrained = amino_acids.alike(amino_acids.shares(with_random_weights(kept, chains[0], run), chains))
        for name, matrix in {arm: similar[-1], **controls, "random weights": untrained}.items():
            yield named | {"arm": name, "model": i, "table": "alike" if len(runs) > 1 else "one model",
                           **amino_acids.correlation(matrix, score)._asdict()}
    for a, b in zip(*amino_acids.PAIRS):
        for name, matrix in ((arm, np.mean(similar, 0)), ("BLOSUM62", score)):
            yield named | {"arm": name, "pair": f"{STANDARD[a]}{STANDARD[b]}", "similarity": float(matrix[a, b])}


def with_random_weights(kept: KeptLanguageModel, letters: Sequence[int], run: str) -> LanguageModel:
    """Drawn from a seed that is the run's."""
    own = digest(language.folder_of(run, "run", OWN) / language.WEIGHTS)
    torch.manual_seed(int(hashlib.sha256(own.encode()).hexdigest()[:8], 16))
    model = LanguageModel(kept.description, kept.mechanism.layer).eval()
    return fitted(model, [amino_acids.read_by(model, letters)])


def sequences_of(files: Sequence[str], count: int) -> list[np.ndarray]:
    """Those whose accessions have the lowest hashes, which is where the test split is taken from."""
    index = fasta.indexed([Path(file) for file in files], LETTERS)
    return [np.array(index.sequence(row)) for row in np.argsort(index.hashes, kind="stable")[:count]]


# ---- whether attention matters


@torch.no_grad()
def after_swap(arm: str, run: str, example: Mapping[str, str], seed: int, input: str | None = None,
               entry: str | None = None) -> Row:
    """The loss on the test split of a run's weights in this attention."""
    _, place, accession = chosen(input, entry, example)
    task = kept_task(run, init=run)
    found = task.metrics(task.build(Mechanism.parse(arm)).eval(), "test", Reader(task))
    return {"entry": entry_of(place, accession).accession.decode(), "model": seed, "loss": found["loss"]}


# ---- what is chosen


def number(key: str, value: str | None) -> int | None:
    if value is not None and not (value.isdecimal() and int(value) > 0):
        raise ConfigError(f"{key}={value}: it takes a whole number of at least 1")
    return None if value is None else int(value)


def of_proteins(run: str) -> KeptLanguageModel:
    """Raises DataError and ConfigError for what is no run of task=trembl."""
    kept = language.load(run, "run")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"run = {run} reads other symbols than amino acids: give {OWN}")
    return kept


def chosen(input: str | None, entry: str | None, example: Mapping[str, str]) -> tuple[list[str], Path, str | None]:
    """The FASTA files whose sequences tell amino acids apart, the one with the entry, and its accession (None: the
    first of the file). Raises DataError where there is none."""
    if input is not None:
        return [input], Path(input).expanduser(), entry
    folder = task_folder("protein", None)
    if folder is None or not (folder / example["file"]).is_file():
        raise missing("protein", folder and folder / example["file"])
    return [str(path) for path in fasta.fasta_files(folder)], folder / example["file"], entry or example["entry"]


def entry_of(path: Path, accession: str | None) -> fasta.FastaEntry:
    """Raises DataError where the file has no such entry."""
    for entry in fasta.entries(path, LETTERS):
        if accession in (None, entry.accession.decode()):
            return entry
    raise DataError(f"{path} has no entry {accession}: give one of its accessions, such as "
                    f"{next(fasta.entries(path, LETTERS)).accession.decode()}")
