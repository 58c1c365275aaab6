"""make attention-maps: matrices are those of the attention, similarity follows the shares, mistakes are told."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_language import mechanism
from test_trembl import GENERATED, OPTIONS

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.fasta import entries
from crt_exp.data.protein import LETTERS, STANDARD
from crt_exp.report import __main__ as command_line
from crt_exp.report import amino_acids, attention_maps, protein_runs, writing
from crt_exp.report.amino_acids import PAIRS, alike, alike_by_frequency, blosum62, correlation
from crt_exp.swap.rollout import attention_matrices
from crt_exp.tasks.trembl import TrEMBL

PROTEINS = Path(os.environ.get("CRT_DATA", "none")) / "protein"
SIZES = {"heads": 2, "layers": 2, "d_ff": 32, "d": 16}


# ---- which amino acids are alike


def test_blosum62_is_the_published_one():
    matrix = blosum62()
    at = lambda a, b: matrix[STANDARD.index(a), STANDARD.index(b)]
    assert matrix.shape == (20, 20) and (matrix == matrix.T).all()
    assert (at("W", "W"), at("D", "E"), at("F", "Y"), at("C", "W"), at("A", "R")) == (11, 2, 3, -2, -1)


def test_similarity_is_that_of_the_shares_and_blind_to_frequencies():
    rng = np.random.default_rng(0)
    shares = rng.random((8, 20)) + 0.1
    shares[:, 3] = 2 * shares[:, 2]                       # E always gets twice what D gets
    found = alike(shares)
    assert found[2, 3] == pytest.approx(1) and amino_acids.rank(found, ("D", "E")) == 1
    np.testing.assert_allclose(alike(shares * rng.random(20)), found, atol=1e-9)
    frequent = alike_by_frequency(np.full(20, 0.05))
    assert (frequent == 0).all() and alike_by_frequency(shares[0])[2, 3] == pytest.approx(-np.log(2))


def test_shares_that_do_not_vary_are_refused():
    with pytest.raises(ValueError, match="8 heads or sequences of ACDEFGHIKLMNPQRSTVWY are the same in all"):
        alike(np.full((8, 20), 0.05))
    with pytest.raises(ValueError, match="2 heads or sequences are too few"):
        alike(np.random.default_rng(0).random((2, 20)))


def test_permutations_move_rows_and_columns_alike():
    """Of a matrix with itself none is as large; of noise p is uniform, also where pairs depend on each other."""
    rng, matrix = np.random.default_rng(0), blosum62()
    r, p = correlation(matrix, matrix, permutations=999)
    assert r == pytest.approx(1) and p == 1 / 1000
    assert correlation(-matrix, matrix, permutations=99).p > 0.9
    first, second = rng.random((2, 20, 20))
    r = correlation(first + first.T, second + second.T).r
    assert r == pytest.approx(np.corrcoef((first + first.T)[PAIRS], (second + second.T)[PAIRS])[0, 1])
    ps = []
    for _ in range(200):                                  # a matrix of distances: its pairs are far from independent
        one, two = (alike(rng.random((4, 20))) for _ in range(2))
        ps.append(correlation(one, two, permutations=99).p)
    assert 0.01 <= np.mean(np.array(ps) <= 0.05) <= 0.11 and abs(np.mean(ps) - 0.5) < 0.08


# ---- matrices


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_matrices_of_a_sequence_model(causal, one_thread):
    """Those of a model's own layers: exact ones are the softmax, uniform ones known; each row sums to 1."""
    task = TrEMBL(**OPTIONS | {"direction": "unidirectional" if causal else "bidirectional", "sizes": SIZES})
    tokens = torch.randint(20, (1, 12))
    exact = task.build(mechanism("exact")).eval()
    found = attention_matrices(exact, tokens)
    block, x = exact.body.blocks[0], exact.symbol(tokens) + exact.place(torch.arange(12))
    q, k, _ = block.qkv(block.norm1(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / 8**0.5
    if causal:
        logits = logits.masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    assert len(found) == 2 and torch.allclose(found[0], logits.softmax(-1), atol=1e-6)
    uniform = attention_matrices(task.build(mechanism("uniform")).eval(), tokens)[1]
    seen = torch.ones(12, 12).tril() if causal else torch.ones(12, 12)
    assert torch.allclose(uniform, (seen / seen.sum(1, keepdim=True)).expand(1, 2, -1, -1), atol=1e-6)


@torch.no_grad()
def test_shares_of_uniform_attention_are_the_frequencies(one_thread):
    task = TrEMBL(**OPTIONS | {"direction": "bidirectional"})
    sequences = [[0, 0, 1, 19], [1, 2, 2, 24]]            # U is none of the 20
    found = amino_acids.shares(task.build(mechanism("uniform")).eval(), sequences)
    expected = np.zeros(20)
    expected[[0, 1, 2, 19]] = np.array([2, 2, 2, 1]) / 7
    np.testing.assert_allclose(found, np.tile(expected, (2, 1)), atol=1e-6)
    np.testing.assert_allclose(amino_acids.frequencies(sequences)[1, 1:3], [1 / 3, 2 / 3])


# ---- the report


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of task=trembl by attention, and a FASTA file of 40 sequences."""
    place = tmp_path_factory.mktemp("made")
    generated = GENERATED | {"sequences": 60}
    for name, direction in (("exact", "bidirectional"), ("favorpp", "unidirectional")):
        task = TrEMBL(**OPTIONS | {"direction": direction, "sizes": SIZES, "generated": generated})
        torch.manual_seed(1)
        model = task.build(mechanism(name))
        attention_maps.fitted(model.eval(), [1, 2, 3, 4])
        task.export(model, model.state_dict(), place / name)
    rng = np.random.default_rng(0)
    written = [f">sp|P{i:05}|P{i}_MADE\n{''.join(rng.permutation(list(STANDARD))[:16])}\n" for i in range(40)]
    (place / "made.fasta").write_text("".join(written))
    return place


def called(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["report", *words])
    code = 0
    try:
        command_line.main()
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name, words", [("exact", ["m=8", "first=10"]),
                                         pytest.param("favorpp", [], marks=pytest.mark.slow)])
def test_a_run_of_the_users(name, words, made, tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    monkeypatch.setattr(attention_maps, "NOISES", 3)
    words = ["attention-maps", f"run={made / name}", f"input={made / 'made.fasta'}", "entry=P00007", *words]
    code, out, err = called(monkeypatch, capsys, *words, "--out", str(tmp_path / "out"))
    text = (tmp_path / "out/attention-maps.md").read_text()
    assert code == 0 and "written:" in out and "Entry P00007 of made.fasta, its first 16 letters" in text, err
    assert ("| layer | FAVOR++ | FAVOR+ | uniform |" if name == "exact" else "| layer | FAVOR++ | uniform |") in text
    assert ("nearer to the exact ones" in text) == (name == "exact") and "| attention, random weights |" in text
    assert (tmp_path / "out/attention-maps.png").stat().st_size > 20_000


@pytest.mark.parametrize("words, told", [
    (["run=nowhere", "input={fasta}"], "run = nowhere: there is no such directory"),
    (["run={exact}", "input={fasta}", "entry=P9"], "has no entry P9: give one of its accessions, such as P00000"),
    (["run={exact}", "input=nowhere.fasta"], "nowhere.fasta: the file cannot be read"),
    (["run={exact}", "input={fasta}", "m=0"], "m=0: it takes a whole number of at least 1"),
    (["run={favorpp}", "input={fasta}", "m=8"], "this run was trained with favorpp"),
    (["run={exact}", "entry={fasta}", "entry=P9"], "entry comes twice"),
    (["rnu={exact}"], "did you mean run?"),
    (["run="], "write run=VALUE"),
    (["run={exact}"], "CRT_DATA is not set"),
])
def test_mistakes_are_told(words, told, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CRT_DATA", raising=False)
    places = {"exact": made / "exact", "favorpp": made / "favorpp", "fasta": made / "made.fasta"}
    words = [word.format(**places) for word in words]
    with pytest.raises((ConfigError, DataError)) as error:
        attention_maps.main("small", **command_line.options_of("attention-maps", attention_maps.main, words))
    assert told in str(error.value) and not list(tmp_path.iterdir())


def test_other_reports_take_no_options(monkeypatch, capsys):
    code, _, err = called(monkeypatch, capsys, "fig1", "run=x")
    assert code == 2 and err == "crt_exp.report: error: run=x: the report fig1 takes no options\n"


@pytest.mark.slow
@pytest.mark.skipif(not PROTEINS.is_dir(), reason="needs $CRT_DATA/protein")
def test_all_of_it_at_a_tiny_size(tmp_path, monkeypatch, capsys, one_thread):
    """Trains two models on the proteomes, for a few steps; again, it computes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setattr(attention_maps, "SEQUENCES", 30)
    monkeypatch.setattr(attention_maps, "NOISES", 2)
    tiny = ("task.max_length=32", "task.dropout=0", "task.validation_share=0.01", "task.test_share=0.01",
            *protein_runs.model(4, 2, 32, 32), "trainer.batch=8", *protein_runs.LAST)
    small = protein_runs.SETTINGS["small"]
    monkeypatch.setitem(protein_runs.SETTINGS, "small",
                        protein_runs.Setting(tiny, small.generated, {protein_runs.REAL: 3}, 8, small.options, seeds=2))
    attention_maps.main("small")
    text = (tmp_path / "report/attention-maps.md").read_text()
    first = next(entry for entry in entries(PROTEINS / attention_maps.FILE, LETTERS) if entry.accession == b"P0AA25")
    assert len(first.tokens) == 109 and "Entry P0AA25" in text and "| attention, trained |" in text
    assert text.count("correlates with BLOSUM62") == 4 and "nearer to the exact ones" in text
    cells = (tmp_path / "outputs/attention-maps/cells.jsonl").read_text()
    attention_maps.main("small")
    assert cells == (tmp_path / "outputs/attention-maps/cells.jsonl").read_text()
    assert capsys.readouterr().out.count("written:") == 2
