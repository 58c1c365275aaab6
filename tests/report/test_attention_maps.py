"""make attention-maps: matrices are those of the attention, similarity follows the shares, mistakes are told."""

import sys

import numpy as np
import pytest
import torch
from test_language import mechanism
from test_trembl import GENERATED, OPTIONS

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.data.protein import STANDARD
from crt_exp.probes import attention_maps
from crt_exp.probes.attention_maps import PAIRS, blosum62, correlation, likeness, likeness_by_frequency
from crt_exp.probes.bench import fitted
from crt_exp.report import __main__ as command_line
from crt_exp.report import draws, page
from crt_exp.swap.matrices import attention_matrices
from crt_exp.tasks.trembl import TrEMBL

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
    found = likeness(shares)
    assert found[2, 3] == pytest.approx(1) == found[attention_maps.PAIRS].max()
    np.testing.assert_allclose(likeness(shares * rng.random(20)), found, atol=1e-9)
    frequent = likeness_by_frequency(np.full(20, 0.05))
    assert (frequent == 0).all() and likeness_by_frequency(shares[0])[2, 3] == pytest.approx(-np.log(2))


def test_shares_that_do_not_vary_are_refused():
    with pytest.raises(ValueError, match="8 heads or sequences of ACDEFGHIKLMNPQRSTVWY are the same in all"):
        likeness(np.full((8, 20), 0.05))
    with pytest.raises(ValueError, match="2 heads or sequences are too few"):
        likeness(np.random.default_rng(0).random((2, 20)))


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
        one, two = (likeness(rng.random((4, 20))) for _ in range(2))
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
    found = attention_maps.shares(task.build(mechanism("uniform")).eval(), sequences)
    expected = np.zeros(20)
    expected[[0, 1, 2, 19]] = np.array([2, 2, 2, 1]) / 7
    np.testing.assert_allclose(found, np.tile(expected, (2, 1)), atol=1e-6)
    np.testing.assert_allclose(attention_maps.frequencies(sequences)[1, 1:3], [1 / 3, 2 / 3])


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
        fitted(model.eval(), [attention_maps.read_by(model, [1, 2, 3, 4])])
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, and three draws of the noise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(draws, "FOLDER", tmp_path)
    resized(monkeypatch, {"noises": 3, "sequences": 30})
    return tmp_path


def resized(monkeypatch, sizes, start=None):
    """The page with some other arguments of its probes, and another start."""
    load = page.load
    spec = load("attention-maps")
    small = spec["sizes"]["small"]
    for part in [*spec["options"]["run"]["parts"], *small["parts"]]:
        part["probe"] |= {key: value for key, value in sizes.items() if key in part["probe"]}
    small["starts"]["exact"] |= start or {}
    small["parts"][2]["seeds"] = small["starts"]["exact"]["count"]
    monkeypatch.setattr(page, "load", lambda name: spec if name == "attention-maps" else load(name))


@pytest.mark.parametrize("name, words", [("exact", ["m=8", "first=10"]),
                                         pytest.param("favorpp", [], marks=pytest.mark.slow)])
def test_a_run_of_the_users(name, words, made, place, monkeypatch, capsys, one_thread):
    words = ["attention-maps", f"run={made / name}", f"input={made / 'made.fasta'}", "entry=P00007", *words]
    code, out, err = called(monkeypatch, capsys, *words, "--out", str(place / "out"))
    assert code == 0 and out.count("written:") == 2, err
    text = (place / "out/attention-maps.md").read_text()
    assert "P00007 of made.fasta, its first 16 letters" in text and "| attention, random weights |" in text
    assert ("| layer | FAVOR++ | FAVOR+ | uniform attention |" if name == "exact" else
            "| layer | FAVOR++ | uniform attention |") in text
    assert ("nearer to the exact ones" in text) == (name == "exact") and "correlates with" not in text
    assert (place / "out/attention-maps.png").stat().st_size > 20_000
    rows = page.Page("attention-maps", place / "out").select("row")
    assert {*rows["arm"]} == {"exact", "favorpp"} and len(rows) == 2 * 2 * 2 * (10 if name == "exact" else 16)
    assert all(abs(sum(map(float, row.split())) - 1) < 0.02 for row in rows["value"]) == (name != "exact")


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
        command_line.measure("attention-maps", "small", tmp_path, keep=False, again=False, options=words)
    assert told in str(error.value) and not list(tmp_path.rglob("*.csv"))
