"""Errors of attention outputs, layers and matrices, and the bias of samplers.

The similarity of amino acids follows Vig et al., BERTology meets biology, 2020 (section 4): the correlation over heads
of the shares of attention that two amino acids receive. Matrices of amino acids are (20, 20), in the order of
`STANDARD`.

Notation: H heads of all layers, n sequences.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.linalg import hadamard as hadamard_matrix
from torch import Tensor, nn

from crt_exp.attention import Baseline, DenominatorCount, LinearAttention, attention
from crt_exp.attention.reference import softmax_attention
from crt_exp.experiments.data import DataError, protein
from crt_exp.experiments.data.corpora import FOLDER
from crt_exp.experiments.data.protein import BEGIN, LETTERS, STANDARD
from crt_exp.experiments.data.text import official_file
from crt_exp.experiments.measure import (
    Measurement,
    Record,
    Records,
    Series,
    SwapMeasurement,
    check_estimates,
    data_file,
    seeded,
)
from crt_exp.experiments.measure.approximation import Synthetic, layer_errors
from crt_exp.experiments.measure.bench import fit_attention, recorded_calls
from crt_exp.experiments.measure.fidelity import DocumentBench, LayerCall, relative_error
from crt_exp.experiments.measure.kernel import fit_map, generator
from crt_exp.experiments.models import language
from crt_exp.experiments.models.folder import WEIGHTS, folder_of
from crt_exp.experiments.models.language import Transformer
from crt_exp.experiments.tasks.base import task_class
from crt_exp.features import TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.samplers import DenseNoise, Noise, haar, iid
from crt_exp.samplers.bias import measured_bias
from crt_exp.samplers.blocks import signs
from crt_exp.validation import Count, FileName, Positive, Several

PAIRS = np.triu_indices(len(STANDARD), 1)  # the 190 pairs of different amino acids


@task_class
class ProjectionErrors(Series):
    """task=projections: MSE of the output against exact softmax attention.

    q, k ~ N(0, scale^2) and v ~ N(0, value_scale^2), L tokens of dimension d. All mechanisms and all m share them.

    Args:
        code: Rows of the code of Adda and Allen (2021) in place of the sampler's, see `published_noise`.
    """

    metric = "mse"
    over = "m"

    length: Count
    d: Count
    ms: Several[Count]
    samples: Count
    scale: Positive = 1.0
    value_scale: Positive = 1.0
    code: Literal["iid", "orthogonal", "hadamard"] | None = None

    def __post_init__(self):
        self.source = Synthetic(self.length, 1, self.d, self.scale)

    def measure(self, m: int, mechanism: Mechanism, seed: int) -> Record:
        """Return mean `mse`, and `errors` and `uniform` (uniform attention) by sample."""
        errors = []
        uniform = []
        for sample in range(self.samples):
            layer = self.source.layers(sample, seed)[0]
            layer = replace(layer, v=self.value_scale * layer.v)
            exact = softmax_attention(layer.x, layer.y, layer.v)
            g = generator(seed, sample)
            estimate = self.estimate(replace(mechanism, m=m), layer, g)
            mean = layer.v.mean(-2, keepdim=True)
            errors.append((exact - estimate).square().mean().item())
            uniform.append((exact - mean).square().mean().item())
        return {"mse": sum(errors) / len(errors), "errors": errors, "uniform": uniform}

    def estimate(self, mechanism: Mechanism, layer: LayerCall, g: torch.Generator) -> Tensor:
        noise = mechanism.noise(self.d, g)
        params = fit_map(mechanism, layer.x[0, 0], layer.y[0, 0])
        phi = mechanism.map()
        if self.code:
            noise = published_noise(self.code, mechanism.m, self.d, g)
            if isinstance(phi, TrigRF):
                noise = DenseNoise(2 * np.pi * noise.rows(), gaussian=False)
        tensors = (layer.x, layer.y, layer.v)
        return attention(*tensors, phi, noise, params, counter=DenominatorCount())


def published_noise(rows: str, m: int, d: int, g: torch.Generator) -> Noise:
    """Sample the rows of the code of Adda and Allen (2021), which differ from those of their text.

    Blocks of d rows are divided by sqrt(m / d) and lack the factor sqrt(d), so that rows have length sqrt(d / m). A
    Hadamard block is the sum of three products of the Hadamard matrix and a diagonal of random signs. Their sine and
    cosine take 2 pi times the projections.

    >>> rows = published_noise("orthogonal", 8, 4, torch.Generator().manual_seed(0)).rows()
    >>> round(float(rows.norm(dim=-1).mean()), 4)
    0.7071
    """
    if rows == "iid":
        return iid(m, d, g)
    blocks = -(-m // d)
    if rows == "orthogonal":
        weight = haar((blocks, d, d), g)
    else:
        matrix = torch.tensor(hadamard_matrix(d)) / d**0.5
        weight = matrix * signs((blocks, 3, 1, d), g).sum(1)
    weight = weight.flatten(0, 1)[:m] / (m / d) ** 0.5
    return DenseNoise(weight.float(), gaussian=False)


@task_class
class HeadErrors(Series, SwapMeasurement):
    """task=head_errors: MSE of the output of a random head (Performers Figure 4).

    The MSE is divided by that of uniform attention. Attention without projections has equal errors at all m.

    Args:
        sum: Mean |x + y|^2 of queries and keys.
        turn: Angle in radians between a query and the key at its position.
    """

    metric = "log_mse"
    over = "m"

    length: Count
    d: Count
    sum: Positive
    ms: Several[Count]
    samples: Count
    turn: Positive | None = None

    def __post_init__(self):
        scale = scale_of(self.sum, self.d)
        self.source = Synthetic(self.length, 1, self.d, scale, self.turn)

    def measure(self, m: int, mechanism: Mechanism, seed: int) -> Record:
        if mechanism.estimates:
            mechanism = mechanism.with_projections(m)
        options = {"samples": self.samples, "queries": 1}
        errors, _ = layer_errors(self.source.layers, mechanism, 0, seed, **options)
        ratio = errors["output_error"] / errors["uniform_error"]
        mse = ratio[:, 0].square()
        return {"mse": mse.tolist(), "log_mse": mse.log().mean().item()}


def scale_of(mean_sq_sum: float, d: int) -> float:
    """Standard deviation of queries and keys with the given mean |x + y|^2."""
    return (mean_sq_sum / (2 * d**0.5)) ** 0.5


@task_class
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

    sum: Positive
    length: Count
    heads: Count
    d: Count
    depth: Count
    texts: Count
    init: FileName | None = None

    @cached_property
    def bench(self) -> DocumentBench:
        text = str(official_file("wikitext2", "valid"))
        cache = FOLDER / "tokens"
        return DocumentBench(self.init, text, length=self.length, texts=self.texts, cache_dir=cache)

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        check_estimates(mechanism)
        if self.init is None:
            errors = self.random_errors(replace(mechanism, seed=0), seed)
        else:
            mechanism = replace(mechanism, seed=seed)
            with torch.no_grad(), self.bench.swapped(mechanism) as states:
                errors = self.bench.document_errors(seed, states)["hidden"]
        layers = [*range(1, len(errors) + 1)]
        growth = errors[-1] / errors[0] if errors[0] else None
        yield {"layer": layers, "error": errors, "growth": growth}

    @torch.no_grad()
    def random_errors(self, mechanism: Mechanism, seed: int) -> list[float]:
        """Return the errors in a Transformer with random weights, for tokens N(0, 1).

        The Transformer has bidirectional pre-norm layers with torch's initial weights; those of queries and keys are
        scaled.
        """
        width = self.heads * self.d
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make_layer = Mechanism.of("exact").layer
            model = Transformer(self.heads, self.depth, 4 * width, width, make_layer).eval()
        # with torch's uniform weights, outputs for normalised tokens have variance 1/3
        for block in model.blocks:
            block.qkv.weight.data[: 2 * width] *= 3**0.5 * scale_of(self.sum, self.d)
        tokens = torch.randn(1, self.length, width, generator=seeded(seed))
        exact = hidden_states(model, tokens)
        for i, block in enumerate(model.blocks, self.depth * seed):
            block.attention = mechanism.layer(self.heads, self.d, layer=i)
        pairs = zip(hidden_states(model, tokens), exact)
        return [relative_error(*pair).item() for pair in pairs]


def hidden_states(model: Transformer, h: Tensor) -> list[Tensor]:
    """Return the hidden states (1, L, width) after each block."""
    states = []
    for block in model.blocks:
        h = block(h)
        states.append(h)
    return states


@task_class
class KernelBias(Measurement):
    """task=kernel_bias: mean estimate divided by the exact kernel, for a sampler.

    Records the ratio and its standard error at x = y = e_1 (`at_unit`) and at x = y = (1, ..., 1) / sqrt(d)
    (`at_spread`).
    """

    metric = "at_unit_error"

    d: Count
    draws: Count

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        x = torch.zeros(2, self.d, dtype=torch.float64)
        x[0, 0] = 1
        x[1] = self.d**-0.5
        options = {"draws": self.draws, "generator": seeded(seed)}
        bias = measured_bias(mechanism.map(), mechanism.sampler, x, x, **options)
        record = {}
        for name, ratio, error in zip(("at_unit", "at_spread"), *map(Tensor.tolist, bias)):
            record[name] = ratio
            record[f"{name}_error"] = error
        yield record


# ---- attention matrices of a protein model


@task_class
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

    start: FileName
    file: str
    entry: str
    sequences: Count
    drawn: bool = False

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        letters = entry_of(data_file("protein", self.file), self.entry)
        saved = load_protein_model(self.start)
        exact = matrices(saved.build(Mechanism.of("exact")), letters)
        estimates = matrices(saved.build(replace(mechanism, seed=seed)), letters)
        if self.drawn:
            for i, layer in enumerate(estimates):
                for j, head in enumerate(layer):
                    rows = [format_weights(weights) for weights in head.tolist()]
                    yield {"head": f"{i}.{j}", "query": [*range(len(head))], "row": rows}
        if mechanism.is_exact:
            index = protein.read_uniprot(None, None)
            _, order = np.unique(index.digests, return_index=True)
            sequences = [np.array(index[row]) for row in order[: self.sequences]]
            yield from self.similarity_rows(saved, sequences)
        errors = [relative_error(*pair).item() for pair in zip(estimates, exact)]
        layers = [*range(len(errors))]
        yield {"layer": layers, "error": errors, "mean_error": float(np.mean(errors))}

    def similarity_rows(
        self, saved: language.SavedLanguageModel, sequences: list[np.ndarray]
    ) -> Records:
        untrained = with_random_weights(saved, self.start)
        composition = frequencies(sequences)
        logs = np.log(np.maximum(composition.mean(0), 1e-12))
        similarities = {
            "attention": similarity(shares(saved.build(), sequences)),
            "random weights": similarity(shares(untrained, sequences)),
            "composition": similarity(composition),
            "frequency": -np.abs(logs[:, None] - logs),
        }
        score = blosum62()
        for name, matrix in similarities.items():
            yield {"by": name, **correlation(matrix, score)}
        names = [f"{STANDARD[a]}{STANDARD[b]}" for a, b in zip(*PAIRS)]
        for name, matrix in (("attention", similarities["attention"]), ("BLOSUM62", score)):
            yield {"by": name, "sample": names, "similarity": matrix[PAIRS].tolist()}


def format_weights(weights: list[float]) -> str:
    return " ".join(f"{weight:.3g}" for weight in weights)


def load_protein_model(start: str) -> language.SavedLanguageModel:
    """Load the model of a run of task=trembl.

    Raises DataError and ConfigError for other folders.
    """
    saved = language.load(start, "task.start")
    if saved.symbols.get("letters") != LETTERS:
        raise ConfigError(f"task.start={start}: expected a run of task=trembl (amino-acid tokens)")
    return saved


def entry_of(path: Path, accession: str) -> list[int]:
    """Return the tokens of an entry of a FASTA file. Raises DataError."""
    entries = {name.decode(): list(tokens) for name, tokens in protein.read_fasta(path)}
    if accession not in entries:
        raise DataError(
            f"{path}: no entry {accession}; expected an accession such as {next(iter(entries))}"
        )
    return entries[accession]


def with_random_weights(saved: language.SavedLanguageModel, start: str) -> language.LanguageModel:
    """Return a model of equal sizes with random weights, seeded by the run's weights."""
    text = (folder_of(start, "task.start", "a run of task=trembl") / WEIGHTS).read_bytes()
    for digits in (16, 8):
        text = hashlib.sha256(text).hexdigest()[:digits].encode()
    torch.manual_seed(int(text, 16))
    return language.LanguageModel(saved.description, saved.mechanism.layer).eval()


def matrices(model: language.LanguageModel, letters: list[int]) -> list[Tensor]:
    """Return the attention matrices (heads, L, L) of each layer.

    Causal maps are fitted to the letters.
    """
    tokens = tokens_of(model, letters)
    fit_attention(model, [tokens])
    return [A[0] for A in attention_matrices(model, tokens)]


@torch.no_grad()
def attention_matrices(
    model: nn.Module, tokens: Tensor, keep: Callable[[Tensor], Tensor] = lambda A: A
) -> list[Tensor]:
    """Return keep(A) for the attention matrix A (B, H, L, L) of each layer.

    Linear attention does not form A. Its output for one-hot values equals A, so one forward pass suffices. Rows of A
    sum to 1. The layers are those of a model built with a `Mechanism`, in the order of their calls.
    """

    def matrix(layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
        q, k, _, *mask = args
        unit = torch.eye(k.shape[2], dtype=k.dtype)
        unit = unit.expand(*k.shape[:3], -1)
        # calling the module would record this call too
        return keep(layer.forward(q, k, unit, *mask))

    layers = [part for part in model.modules() if isinstance(part, LinearAttention | Baseline)]
    with recorded_calls(layers, matrix) as matrices:
        model(tokens)
    return matrices


# ---- similarity of amino acids


def tokens_of(model: language.LanguageModel, letters: Sequence[int]) -> Tensor:
    """Return tokens (1, L), cut to the model's length.

    A causal model reads BEGIN and all letters except the last.
    """
    tokens = list(letters)[: model.description.length]
    if model.description.causal:
        tokens = [BEGIN, *tokens[:-1]]
    return torch.tensor([tokens], dtype=torch.long)


def shares(model: language.LanguageModel, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares of attention (H, 20) that each standard amino acid receives.

    Shares are over all queries of all sequences.
    """
    sums: Tensor | float = 0.0
    for letters in sequences:
        tokens = tokens_of(model, letters)
        # layers of (heads, L)
        received = attention_matrices(model, tokens, keep=lambda A: A[0].double().sum(1))
        is_letter = tokens[0][:, None] == torch.arange(len(STANDARD))
        sums = sums + torch.cat(received) @ is_letter.double()
    return (sums / sums.sum(1, keepdim=True)).numpy()


def frequencies(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares (n, 20) of the standard amino acids in each sequence."""
    n = len(STANDARD)
    counts = np.stack([np.bincount(letters, minlength=n)[:n] for letters in sequences])
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def similarity(values: np.ndarray) -> np.ndarray:
    """Pearson's correlation (20, 20) between the columns of values (rows, 20).

    Rows are heads or sequences. Raises ValueError if the correlation is not defined.
    """
    constant = values.std(0) <= 1e-6 * values.mean(0)
    if len(values) < 3 or constant.any():
        same = "".join(np.array([*STANDARD])[constant])
        raise ValueError(
            f"similarity: {len(values)} heads or sequences, equal in {same or 'none'}; use more"
        )
    return np.corrcoef(values.T)


def blosum62() -> np.ndarray:
    from Bio.Align import substitution_matrices

    scores = substitution_matrices.load("BLOSUM62")
    return np.array(scores.select("".join(STANDARD)))


def correlation(
    first: np.ndarray, second: np.ndarray, permutations: int = 9999
) -> dict[str, float]:
    """Pearson's r of two symmetric matrices over 190 pairs, and one-sided Mantel's p.

    Pairs that share an amino acid are dependent, so rows and columns of one matrix are permuted together. p is the
    share of permutations whose r is at least as large.
    """
    standard = standardise(first)
    wanted = standardise(second)[PAIRS]
    order = np.tile(np.arange(len(first)), (permutations, 1))
    orders = np.random.default_rng(0).permuted(order, axis=1)
    r = float(standard[PAIRS] @ wanted)
    i, j = PAIRS
    permuted = standard[orders[:, i], orders[:, j]] @ wanted
    count = float((permuted >= r - 1e-12).sum())
    return {"r": r, "p": (1 + count) / (1 + permutations)}


def standardise(matrix: np.ndarray) -> np.ndarray:
    """Give the pairs mean 0 and norm 1, so that products of pairs are correlations."""
    pairs = matrix[PAIRS]
    return (matrix - pairs.mean()) / (pairs.std() * len(pairs) ** 0.5)
