"""Errors from layer to layer, of random weights and of a trained encoder; the bias of samplers; matrices of attention,
and amino acids whose shares are alike."""

import numpy as np
import pytest
import torch
from helpers.small_bert import write_model, write_text
from helpers.task_options import options_of

from crt_exp.experiments.data import DataError
from crt_exp.experiments.data.protein import STANDARD
from crt_exp.experiments.measure import attention_errors
from crt_exp.experiments.measure.attention_errors import (
    PAIRS,
    ErrorByLayer,
    KernelBias,
    attention_matrices,
    blosum62,
    correlation,
    published_noise,
    similarity,
)
from crt_exp.experiments.tasks.trembl import TrEMBL
from crt_exp.mechanism import Mechanism

SIZES = {
    "sum": 4,
    "length": 16,
    "heads": 8,
    "d": 64,
    "depth": 3,
    "texts": 3,
}


def errors(task, text, seed=1):
    return next(task.records(Mechanism.parse(text), seed))["error"]


def test_errors_of_a_trained_encoder_are_those_of_its_attention(tmp_path, monkeypatch):
    """Nothing of the swap stays."""
    given = str(write_model(tmp_path / "bert", num_hidden_layers=3, initializer_range=0.5))
    text = write_text(tmp_path / "valid.txt")
    monkeypatch.setattr(attention_errors, "official_file", lambda *_: text)
    monkeypatch.chdir(tmp_path)
    task = ErrorByLayer(**SIZES | {"length": 12}, init=given)
    uniform = errors(task, "uniform")
    pos = errors(task, "pos m=8")
    assert len(uniform) == len(pos) == 3
    assert min(uniform + pos) > 1e-4
    assert pos != errors(task, "pos m=8", 0)
    assert errors(task, "pos m=8") == pos
    for name, _ in task.bench.model.named_modules():
        assert "swapped" not in name


def test_hadamard_rows_of_one_block_are_biased_along_an_axis_only():
    [biased], [exact] = (
        KernelBias(16, 4000).rows(Mechanism.parse(f"pos sampler={sampler}"), 0)
        for sampler in ("hadamard sampler.blocks=1", "orthogonal")
    )
    assert biased["at_unit"] < 0.7
    assert abs(exact["at_unit"] - 1) < 4 * exact["at_unit_error"]


@pytest.mark.parametrize("rows, factor", [("orthogonal", 1), ("hadamard", 3**0.5)])
def test_rows_of_the_published_code_are_short(rows, factor):
    """A Hadamard block is a sum of three products, whose columns have 1 or 3 times the entries of one."""
    noise = published_noise(rows, 64, 16, torch.Generator().manual_seed(0))
    weight = noise.rows()
    assert weight.shape == (64, 16)
    mean_square = weight.square().sum(-1).mean().item()
    assert mean_square == pytest.approx(factor**2 * 16 / 64, rel=0.5)
    if rows == "hadamard":
        sizes = (weight.abs() * (64 / 16) ** 0.5 * 4).round()
        assert set(sizes.unique().tolist()) == {1.0, 3.0}


def protein_task(direction="bidirectional"):
    sizes = {"heads": 2, "layers": 2, "d_ff": 32, "d": 16}
    changes = {"direction": direction, "max_length": 16, "dropout": 0.0, "sizes": sizes}
    return TrEMBL(**options_of("trembl") | changes | {"cache_dir": None})


# ---- which amino acids are alike


def test_similarity_is_that_of_the_shares_and_blind_to_frequencies():
    rng = np.random.default_rng(0)
    shares = rng.random((8, 20)) + 0.1
    shares[:, 3] = 2 * shares[:, 2]  # E always gets twice what D gets
    found = similarity(shares)
    assert found[2, 3] == pytest.approx(1) == found[attention_errors.PAIRS].max()
    actual = similarity(shares * rng.random(20))
    np.testing.assert_allclose(actual, found, atol=1e-9)
    with pytest.raises(ValueError, match="8 heads or sequences, equal in ACDEFGHIKLMNPQRSTVWY"):
        similarity(np.full((8, 20), 0.05))


def test_permutations_move_rows_and_columns_together():
    """p is smallest for a matrix with itself, and uniform for independent ones, also where pairs are dependent."""
    rng = np.random.default_rng(0)
    matrix = blosum62()
    r, p = correlation(matrix, matrix, permutations=999).values()
    assert r == pytest.approx(1)
    assert p == 1 / 1000
    assert correlation(-matrix, matrix, permutations=99)["p"] > 0.9
    first, second = rng.random((2, 20, 20))
    first = first + first.T
    second = second + second.T
    r = correlation(first, second)["r"]
    expected = np.corrcoef(first[PAIRS], second[PAIRS])[0, 1]
    assert r == pytest.approx(expected)
    ps = []
    for _ in range(100):  # a matrix of distances: its pairs are far from independent
        one = similarity(rng.random((4, 20)))
        two = similarity(rng.random((4, 20)))
        ps.append(correlation(one, two, permutations=99)["p"])
    assert np.mean(np.array(ps) <= 0.05) <= 0.12
    assert abs(np.mean(ps) - 0.5) < 0.1


# ---- matrices


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_matrices_of_a_sequence_model(causal, one_thread):
    """Those of a model's own layers: exact ones are the softmax, uniform ones known; each row sums to 1."""
    direction = "unidirectional" if causal else "bidirectional"
    task = protein_task(direction)
    tokens = torch.randint(20, (1, 12))
    exact = task.build(Mechanism.of("exact")).eval()
    found = attention_matrices(exact, tokens)
    block = exact.body.blocks[0]
    x = exact.symbol(tokens) + exact.place(torch.arange(12))
    qkv = block.qkv(block.norm1(x)).unflatten(-1, (3, 2, 8))
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / 8**0.5
    if causal:
        future = torch.ones(12, 12).triu(1) > 0
        logits = logits.masked_fill(future, -torch.inf)
    assert len(found) == 2
    actual = found[0]
    expected = logits.softmax(-1)
    assert torch.allclose(actual, expected, atol=1e-6)
    model = task.build(Mechanism.of("uniform")).eval()
    uniform = attention_matrices(model, tokens)[1]
    seen = torch.ones(12, 12)
    if causal:
        seen = seen.tril()
    weights = seen / seen.sum(1, keepdim=True)
    expected = weights.expand(1, 2, -1, -1)
    assert torch.allclose(uniform, expected, atol=1e-6)


@torch.no_grad()
def test_shares_of_uniform_attention_are_the_frequencies(one_thread):
    task = protein_task()
    sequences = [[0, 0, 1, 19], [1, 2, 2, 24]]  # U is none of the 20
    model = task.build(Mechanism.of("uniform")).eval()
    shares = attention_errors.shares(model, sequences)
    expected = np.zeros(20)
    expected[[0, 1, 2]] = 2 / 7
    expected[19] = 1 / 7
    np.testing.assert_allclose(shares, np.tile(expected, (4, 1)), atol=1e-6)
    frequencies = attention_errors.frequencies(sequences)
    np.testing.assert_allclose(frequencies[1, 1:3], [1 / 3, 2 / 3])


@torch.no_grad()
def test_rows_of_a_run(tmp_path, monkeypatch, one_thread):
    """Errors and matrices of uniform attention, similarity of exact attention; a wrong entry is refused."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "protein"
    folder.mkdir()
    (folder / "made.fasta").write_text(
        "".join(f">sp|P{i:05d}|X\n{''.join(rng.choice([*STANDARD], 40))}\n" for i in range(20))
    )
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    built = protein_task().build(Mechanism.of("exact"))
    monkeypatch.setattr(
        attention_errors, "load_protein_model", lambda start: Kept(built, protein_task())
    )
    monkeypatch.setattr(attention_errors, "with_random_weights", lambda saved, start: built)
    task = attention_errors.AttentionMaps("run", "made.fasta", "P00003", sequences=20, drawn=True)
    *drawn, last = task.rows(Mechanism.of("uniform"), 0)
    assert [row["head"] for row in drawn] == ["0.0", "0.1", "1.0", "1.1"]
    actual = drawn[0]["row"][0].split()
    assert actual == ["0.0625"] * 16
    assert last["layer"] == [0, 1]
    assert min(last["error"]) > 0
    rows = [*task.rows(Mechanism.of("exact"), 0)]
    assert [row["by"] for row in rows if "r" in row] == [
        "attention",
        "random weights",
        "composition",
        "frequency",
    ]
    assert rows[-1]["mean_error"] == 0
    similarity_row = rows[-2]
    assert len(similarity_row["similarity"]) == 190
    assert len(similarity_row["sample"]) == 190
    task.entry = "nobody"
    with pytest.raises(DataError, match="no entry nobody"):
        next(task.rows(Mechanism.of("exact"), 0))


class Kept:
    """As a kept run gives its model."""

    def __init__(self, model, task):
        self.model = model
        self.task = task

    def build(self, mechanism=None):
        made = self.task.build(mechanism) if mechanism else self.model
        made.load_state_dict(self.model.state_dict(), strict=False)
        return made.eval()
