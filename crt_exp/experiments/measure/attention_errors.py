"""Errors of attention outputs, layers and matrices, and the bias of samplers.

The similarity of amino acids follows Vig et al., BERTology meets biology, 2020 (section 4): the correlation over heads
of the shares of attention that two amino acids receive. Matrices of amino acids are (20, 20), in the order of
`STANDARD`.

Notation: H heads of all layers, n sequences.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.attention import Baseline, DenominatorCount, LinearAttention, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.experiments.data import DataError, protein
from crt_exp.experiments.data.corpora import FOLDER
from crt_exp.experiments.data.protein import BEGIN, LETTERS, STANDARD
from crt_exp.experiments.data.sources import missing_file, task_folder
from crt_exp.experiments.data.text import official_file
from crt_exp.experiments.measure import (
    Measurement,
    Series,
    SwapMeasurement,
    check_estimates,
    check_start,
)
from crt_exp.experiments.measure.approximation import Approximation, Synthetic
from crt_exp.experiments.measure.bench import fit_attention
from crt_exp.experiments.measure.fidelity import Subject
from crt_exp.experiments.measure.kernel import generator
from crt_exp.experiments.models import language
from crt_exp.experiments.models.folder import WEIGHTS, folder_of
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.samplers.bias import measured_bias
from crt_exp.swap.calibration import swapped_states
from crt_exp.validation import Count, FileName, Positive, Several, checked

PAIRS = np.triu_indices(len(STANDARD), 1)  # the 190 pairs of different amino acids


@checked("task")
class ProjectionErrors(Series):
    """task=projections: MSE of the output against exact softmax attention.

    q, k ~ N(0, scale^2) and v ~ N(0, 1), L tokens of dimension d. All mechanisms and all m share them.
    """

    metric, over = "mse", "m"

    def __init__(
        self, length: Count, d: Count, ms: Several[Count], samples: Count, scale: Positive = 1.0
    ):
        self.values = list(ms)
        self.samples = samples
        self.source = Synthetic(length, 1, d, scale, 0)

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """Return mean `mse`, and `errors` and `uniform` (uniform attention) by sample."""
        errors, uniform = zip(*(self.errors(mechanism, m, seed, i) for i in range(self.samples)))
        return {"mse": sum(errors) / len(errors), "errors": list(errors), "uniform": list(uniform)}

    def errors(self, mechanism: Mechanism, m: int, seed: int, sample: int) -> tuple[float, float]:
        layer = self.source.layers(sample, seed)[0]
        phi = mechanism.map("softmax")
        g = generator(seed, sample)
        x = layer.x
        y = layer.y
        v = layer.v
        noise = phi.noise(m, lambda p: mechanism.sampler(p.m, layer.d, g))
        estimate = attention(
            x,
            y,
            v,
            phi,
            noise,
            phi.fit(Statistics.of(x[0, 0], y[0, 0])),
            counter=DenominatorCount(),
        )
        exact = softmax_attention(x, y, v)
        return tuple(
            (exact - each).square().mean().item() for each in (estimate, v.mean(-2, keepdim=True))
        )


@checked("task")
class HeadErrors(Series):
    """task=head_errors: MSE of the output of a random head (Performers Figure 4).

    The MSE is divided by that of uniform attention. Attention without projections has equal errors at all m.

    Args:
        sum: Mean |x + y|^2 of queries and keys.
        turn: Angle in radians between a query and the key at its position.
    """

    metric, over = "log_mse", "m"

    @classmethod
    def measures_whole(cls, mechanism: Mechanism) -> bool:
        return True

    def __init__(
        self,
        length: Count,
        d: Count,
        sum: Positive,
        ms: Several[Count],
        samples: Count,
        turn: Positive | None = None,
    ):
        self.values = list(ms)
        self.errors = Approximation(
            ms, samples, 1, 0, 1, d, scale_of(sum, d), 0, length=length, turn=turn
        ).measure

    def of(self, m: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        errors = self.errors(mechanism, m if mechanism.estimates else None, 0, seed)[0]
        mse = (errors["output_error"] / errors["uniform_error"])[:, 0].square()
        return {"mse": mse.tolist(), "log_mse": mse.log().mean().item()}


def scale_of(mean_sq_sum: float, d: int) -> float:
    """Standard deviation of queries and keys with the given mean |x + y|^2."""
    return (mean_sq_sum / (2 * d**0.5)) ** 0.5


@checked("task")
class ErrorByLayer(SwapMeasurement):
    """task=error_by_layer: error of the hidden states (Performers Figure 14).

    All attention layers are approximated. The record has the relative error after each layer, and `growth`: the error
    after the last layer divided by that after the first.

    Args:
        init: A run of task=mlm, which reads one of `texts` passages of `length` tokens of WikiText-2's validation split
            for each seed. Default: a Transformer with random weights, tokens and projections for each seed.
        sum: Mean |x + y|^2 of the first layer, for random weights.
    """

    metric = "growth"

    def __init__(
        self,
        sum: Positive,
        length: Count,
        heads: Count,
        d: Count,
        depth: Count,
        texts: Count,
        init: FileName | None = None,
    ):
        self.source = (
            Synthetic(length, heads, d, scale_of(sum, d), depth)
            if init is None
            else Subject(
                init,
                str(official_file("wikitext2", "valid")),
                None,
                None,
                length,
                texts,
                1,
                0,
                cache_dir=FOLDER / "tokens",
            )
        )

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_estimates(mechanism)
        if isinstance(self.source, Synthetic):
            errors = self.source.errors_of(replace(mechanism, seed=0), seed, seed, seed)
        else:
            with torch.no_grad(), self.source.swapped(replace(mechanism, seed=seed)) as states:
                errors = self.source.document_record(seed, states)["hidden"]
        yield {
            "layer": [*range(1, len(errors) + 1)],
            "error": errors,
            "growth": errors[-1] / errors[0] if errors[0] else None,
        }


@checked("task")
class KernelBias(Measurement):
    """task=kernel_bias: mean estimate divided by the exact kernel, for a sampler.

    Records the ratio and its standard error at x = y = e_1 (`at_unit`) and at x = y = (1, ..., 1) / sqrt(d)
    (`at_spread`).
    """

    metric = "at_unit_error"

    def __init__(self, d: Count, draws: Count):
        self.d, self.draws = d, draws

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        x = torch.zeros(2, self.d, dtype=torch.float64)
        x[0, 0], x[1] = 1, self.d**-0.5
        found = measured_bias(
            mechanism.map(),
            mechanism.sampler,
            x,
            x,
            draws=self.draws,
            generator=torch.Generator().manual_seed(seed),
        )
        (unit, spread) = found.ratio.tolist()
        (unit_error, spread_error) = found.error.tolist()
        yield {
            "at_unit": unit,
            "at_unit_error": unit_error,
            "at_spread": spread,
            "at_spread_error": spread_error,
        }


# ---- attention matrices of a protein model


@checked("task")
class AttentionMaps(SwapMeasurement):
    """task=attention_maps: relative errors of the attention matrices of a protein.

    The error is |A' - A| / |A| in the Frobenius norm over the heads of a layer. With exact attention, rows also compare
    the similarity of amino acids with BLOSUM62: the correlation r, and p of Mantel's test. The similarity is `by`
    attention, attention of random weights, frequencies in each sequence (composition), and overall frequency.

    Args:
        start: A run of task=trembl with exact attention.
        entry: Accession of the protein in `file`.
        sequences: Test sequences for the similarity of amino acids.
        drawn: Also record the weights of each query as a string.
    """

    metric = "mean_error"

    def __init__(
        self, start: FileName | None, file: str, entry: str, sequences: Count, drawn: bool = False
    ):
        self.start = start
        self.file = file
        self.entry = entry
        self.sequences = sequences
        self.drawn = drawn

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        check_start(self.start)
        folder = task_folder("protein", None)
        if folder is None or not (folder / self.file).is_file():
            raise missing_file("protein", folder and folder / self.file)
        letters = entry_of(folder / self.file, self.entry)
        saved = of_proteins(self.start)
        exact = matrices(saved.build(Mechanism.of("exact")), letters)
        estimates = matrices(saved.build(replace(mechanism, seed=seed)), letters)
        if self.drawn:
            for i, layer in enumerate(estimates):
                for j, head in enumerate(layer):
                    yield {
                        "head": f"{i}.{j}",
                        "query": [*range(len(head))],
                        "row": [format_weights(weights) for weights in head.tolist()],
                    }
        if mechanism.name == "exact":
            index = protein.read_uniprot(None, None)
            _, order = np.unique(index.digests, return_index=True)
            test = order[: self.sequences]
            yield from self.similar(saved, [np.array(index[row]) for row in test])
        errors = []
        for estimate, expected in zip(estimates, exact):
            errors.append(float((estimate - expected).norm() / expected.norm()))
        yield {
            "layer": [*range(len(errors))],
            "error": errors,
            "mean_error": float(np.mean(errors)),
        }

    def similar(
        self, kept: language.SavedLanguageModel, chains: list[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        composition = frequencies(chains)
        score = blosum62()
        logs = np.log(np.maximum(composition.mean(0), 1e-12))
        by = {
            "attention": similarity(shares(kept.build(), chains)),
            "random weights": similarity(shares(with_random_weights(kept, self.start), chains)),
            "composition": similarity(composition),
            "frequency": -np.abs(logs[:, None] - logs),
        }
        for name, matrix in by.items():
            yield {"by": name, **correlation(matrix, score)}
        names = [f"{STANDARD[a]}{STANDARD[b]}" for a, b in zip(*PAIRS)]
        for name, matrix in {"attention": by["attention"], "BLOSUM62": score}.items():
            yield {"by": name, "sample": names, "similarity": matrix[PAIRS].tolist()}


def format_weights(weights: list[float]) -> str:
    return " ".join(f"{weight:.3g}" for weight in weights)


def of_proteins(start: str) -> language.SavedLanguageModel:
    """Load the model of a run of task=trembl.

    Raises DataError and ConfigError for other folders.
    """
    kept = language.load(start, "task.start")
    if kept.symbols.get("letters") != LETTERS:
        raise ConfigError(f"task.start={start}: expected a run of task=trembl (amino-acid tokens)")
    return kept


def entry_of(path: Path, accession: str) -> list[int]:
    """Return the tokens of an entry of a FASTA file. Raises DataError."""
    entries = {name.decode(): list(tokens) for name, tokens in protein.read_fasta(path)}
    if accession not in entries:
        raise DataError(
            f"{path}: no entry {accession}; expected an accession such as {next(iter(entries))}"
        )
    return entries[accession]


def with_random_weights(kept: language.SavedLanguageModel, start: str) -> language.LanguageModel:
    """Return a model of equal sizes with random weights, seeded by the run's weights."""
    weights = (folder_of(start, "task.start", "a run of task=trembl") / WEIGHTS).read_bytes()
    digest = hashlib.sha256(weights).hexdigest()[:16]
    torch.manual_seed(int(hashlib.sha256(digest.encode()).hexdigest()[:8], 16))
    return language.LanguageModel(kept.description, kept.mechanism.layer).eval()


def matrices(model: language.LanguageModel, letters: list[int]) -> list[Tensor]:
    """Return the attention matrices (heads, L, L) of each layer.

    Causal maps are fitted to the letters.
    """
    tokens = read_by(model, letters)
    return [A[0] for A in attention_matrices(fit_attention(model, [tokens]), tokens)]


@torch.no_grad()
def attention_matrices(
    model: nn.Module, *inputs: Tensor, keep: Callable[[Tensor], Tensor] = lambda A: A
) -> list[Tensor]:
    """Return keep(A) for the attention matrix A (B, H, L, L) of each layer.

    Linear attention does not form A. Its output for one-hot values equals A, so one forward pass suffices. Rows of A
    sum to 1. The result covers swapped layers, or else the layers of a model built with a `Mechanism`, in the order of
    their calls.

    Raises:
        ValueError: If the model has no such layer. `swap_attention(model, "exact")` makes exact attention visible.
    """
    found, states = [], swapped_states(model)
    states = states or [
        part for part in model.modules() if isinstance(part, (LinearAttention, Baseline))
    ]
    if not states:
        raise ValueError(
            f"{type(model).__name__}: no swapped attention; call swap_attention(model, 'exact') first"
        )

    def note(state: nn.Module, args: tuple, out: Tensor) -> None:
        q, k, _, *mask = args
        unit = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1)
        found.append(
            keep(state.forward(q, k, unit, *mask))
        )  # calling the module would trigger this hook again

    with ExitStack() as stack:
        for state in states:
            stack.callback(state.register_forward_hook(note).remove)
        model(*inputs)
    return found


# ---- similarity of amino acids


def read_by(model: nn.Module, letters: Sequence[int]) -> Tensor:
    """Return tokens (1, L), cut to the model's length.

    A causal model reads BEGIN and all letters except the last.
    """
    read = list(letters)[: model.description.length]
    return torch.tensor(
        [[BEGIN, *read[:-1]] if model.description.causal else read], dtype=torch.long
    )


def shares(model: nn.Module, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares of attention (H, 20) that each standard amino acid receives.

    Shares are over all queries of all sequences.
    """
    sums = 0.0
    for letters in sequences:
        tokens = read_by(model, letters)
        received = attention_matrices(
            model, tokens, keep=lambda A: A[0].double().sum(1)
        )  # layers of (heads, L)
        sums = (
            sums
            + torch.cat(received) @ (tokens[0][:, None] == torch.arange(len(STANDARD))).double()
        )
    return (sums / sums.sum(1, keepdim=True)).numpy()


def frequencies(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares (n, 20) of the standard amino acids in each sequence."""
    counts = np.stack(
        [np.bincount(letters, minlength=len(STANDARD))[: len(STANDARD)] for letters in sequences]
    )
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def similarity(values: np.ndarray) -> np.ndarray:
    """Pearson's correlation (20, 20) between the columns of values (rows, 20).

    Rows are heads or sequences. Raises ValueError if the correlation is not defined.
    """
    same = "".join(np.array([*STANDARD])[values.std(0) <= 1e-6 * values.mean(0)])
    if len(values) < 3 or same:
        raise ValueError(
            f"similarity: {len(values)} heads or sequences{same and f', equal in {same}'}; use more"
        )
    return np.corrcoef(values.T)


def blosum62() -> np.ndarray:
    from Bio.Align import substitution_matrices

    return np.array(substitution_matrices.load("BLOSUM62").select("".join(STANDARD)))


def correlation(
    first: np.ndarray, second: np.ndarray, permutations: int = 9999, seed: int = 0
) -> dict[str, float]:
    """Pearson's r of two symmetric matrices over 190 pairs, and one-sided Mantel's p.

    Pairs that share an amino acid are dependent, so rows and columns of one matrix are permuted together. p is the
    share of permutations whose r is at least as large.
    """
    one, other = (
        (matrix - matrix[PAIRS].mean()) / (matrix[PAIRS].std() * len(PAIRS[0]) ** 0.5)
        for matrix in (first, second)
    )
    orders = np.random.default_rng(seed).permuted(
        np.tile(np.arange(len(one)), (permutations, 1)), axis=1
    )
    r = float(one[PAIRS] @ other[PAIRS])
    others = one[orders[:, PAIRS[0]], orders[:, PAIRS[1]]] @ other[PAIRS]
    return {"r": r, "p": float(1 + (others >= r - 1e-12).sum()) / (1 + permutations)}
