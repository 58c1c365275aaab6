"""Protein data: FASTA files, their index, splits, rows and masks."""

import dataclasses
import os

import numpy as np
import pytest
from helpers.small_proteins import name, write

from crt_exp.experiments.data import DataError, protein
from crt_exp.experiments.data.plan import IGNORED, Plan, token_batch
from crt_exp.experiments.data.protein import LETTERS, Chains, Singles, read_fasta, read_files
from crt_exp.registry import ConfigError


def sequences(n, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(1, longest))) for _ in range(n)]


def decode(tokens):
    return "".join(LETTERS[i] for i in tokens)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, kind, end",
    [
        ("a.faa.gz", "sp", "\n"),
        ("a.fa", "sp", "\r\n"),
        ("a.FAA", "tr", "\r"),
    ],
)
def test_entries_are_those_of_the_file(file, kind, end, tmp_path):
    wanted = sequences(20)
    found = list(read_fasta(write(tmp_path / file, wanted, kind, end=end)))
    assert [decode(tokens) for _, tokens in found] == wanted
    actual = [accession.decode() for accession, _ in found]
    expected = [name(i) for i in range(20)]
    assert actual == expected


@pytest.mark.parametrize(
    "header, accession",
    [
        ("sp|Q6GZX4.12|001R_FRG3G Putative protein", "Q6GZX4"),
        ("tr|P12345-2|X_Y", "P12345-2"),
        ("tr|A00001", "A00001"),
        ("sp|Q6GZX4.1 Putative", "Q6GZX4"),
        ("  NP_1.1 x", "NP_1.1"),
    ],
)
def test_any_header_names_a_sequence(header, accession, tmp_path):
    (tmp_path / "a.fasta").write_text(f">{header}\nACD\n")
    actual = [found.decode() for found, _ in read_fasta(tmp_path / "a.fasta")]
    assert actual == [accession]


GOOD = ">tr|A00000|X_Y\nACD\n"


@pytest.mark.parametrize(
    "content, words",
    [
        ("ACD\n>tr|A1|X_Y\nACD\n", ["starts with >"]),
        (GOOD + ">tr||X_Y\nACD\n", [">tr||X_Y", "empty name"]),
        (GOOD + ">tr|A00001|X_Y\n>tr|A00002|X_Y\nACD\n", ["A00001", "or sequence"]),
        (GOOD + ">tr|A00001|X_Y\nACD\nACJD\n", ["A00001|X_Y has 'J'", LETTERS]),
    ],
)
def test_malformed_files_are_refused(content, words, tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        read_files([path], tmp_path / "cache")
    for word in [str(path), *words]:
        assert word in str(error.value), error.value
    assert all(
        path.suffix == ".lock" for path in (tmp_path / "cache").iterdir()
    )  # nothing half-written


def test_a_truncated_gz_is_refused(tmp_path):
    path = write(tmp_path / "a.fasta.gz", sequences(50))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="a.fasta.gz: cannot be read"):
        read_files([path], tmp_path / "cache")


def test_files_are_read_once_and_mapped(tmp_path, monkeypatch):
    first = sequences(30)
    second = sequences(20, seed=1)
    files = [write(tmp_path / "a.fasta", first), write(tmp_path / "b.fasta.gz", second)]
    monkeypatch.setattr(protein, "BLOCK", 7)
    for cache in (tmp_path / "cache", None):
        found = read_files(files, cache)
        actual = [decode(found[i]) for i in range(50)]
        assert actual == first + second
        assert isinstance(found.tokens, np.memmap)
        assert found.names == ("a", "b")
        actual = found.files.tolist()
        expected = [0] * 30 + [1] * 20
        assert actual == expected
        actual = found.lengths.tolist()
        expected = [*map(len, first + second)]
        assert actual == expected
    monkeypatch.setattr(protein, "write_arrays", lambda *_: pytest.fail("read again"))
    assert len(read_files(files, tmp_path / "cache")) == 50


def test_a_file_that_changed_is_read_again(tmp_path):
    path = write(tmp_path / "a.fasta", ["ACDE", "FGH"])
    cache = tmp_path / "cache"
    read_files([path], cache)
    write(path, ["ACDE", "FGK"])  # of the same size
    os.utime(path, ns=(1, 1))
    assert decode(read_files([path], cache)[1]) == "FGK"


# ---- splits ----------------------------------------------------------------------------------------------------------


def index_of(tmp_path, n):
    return read_files([write(tmp_path / "a.fasta", sequences(n))])


def test_splits_depend_on_the_letters_alone(tmp_path):
    """Each sequence in one split, in the same one whatever else there is and whatever it is called, in about the shares
    that are asked for; of equal sequences one, which is held out where one of them is."""
    made = [*dict.fromkeys(sequences(2000))]
    found = []
    cases = [("whole", made), ("repeated", [*made[900:], *made[:1000]])]
    for file, letters in cases:
        index = read_files([write(tmp_path / f"{file}.fasta", letters)])
        rows = protein.split_rows(index, np.arange(len(index)) >= len(made) + 50, 0.1, 0.2)
        letters_of = {}
        for split, chosen in rows.items():
            letters_of[split] = [decode(index[row]) for row in chosen]
        found.append(letters_of)
        actual = sorted(sum(found[-1].values(), []))
        assert actual == sorted(made)
    whole, repeated = found
    assert "ood" not in whole
    actual = set(repeated["ood"])
    expected = set(made[950:1000])
    assert actual == expected
    assert abs(len(whole["validation"]) / 2000 - 0.1) < 0.03
    assert abs(len(whole["test"]) / 2000 - 0.2) < 0.04
    for split in whole:
        expected = {*whole[split]} - {*repeated["ood"]}
        assert {*repeated[split]} == expected


def test_held_out_families(tmp_path, monkeypatch):
    """Pfam's table has a line for each region, and is read in parts."""
    monkeypatch.setattr(protein, "LINES", 3)
    path = tmp_path / "a.fasta"
    table = tmp_path / "regions.tsv"
    path.write_text("".join(f">tr|{name(i)}{'-2' * (i == 21)}|X\nACD\n" for i in range(50)))
    rows = [
        f"{name(i)}\t1\tcrc\t{'PF18369' if i % 7 == 0 else 'PF183690'}\t3\t9"
        for i in range(0, 60, 3)
    ]
    rows += [f"{name(5)}\t1\tcrc\t{family}\t1\t2" for family in ("PF00001", "PF04680", "PF04680")]
    table.write_text(
        "\n".join(["uniprot_acc\tseq_version\tcrc64\tpfamA_acc\tseq_start\tseq_end", *rows])
    )
    expected = [i in (0, 5, 21, 42) for i in range(50)]
    assert protein.held_out_by_family(read_files([path]), table).tolist() == expected
    table.write_text("uniprot_acc\tpfamA_acc\nA00000\tPF9\n")
    with pytest.raises(DataError, match="expected some sequences of PF18369"):
        protein.held_out_by_family(read_files([path]), table)
    table.write_text("A00000\tPF1\n")
    with pytest.raises(DataError, match="expected columns uniprot_acc and pfamA_acc"):
        protein.held_out_by_family(read_files([path]), table)


def test_held_out_files(tmp_path):
    index = read_files([write(tmp_path / f"{n}.fasta", sequences(3)) for n in "ab"])
    assert (
        protein.held_out_by_file(index, None).tolist() == [False] * 3 + [True] * 3
    )  # the last of several
    actual = protein.held_out_by_file(index, ["a"]).tolist()
    expected = [True] * 3 + [False] * 3
    assert actual == expected
    assert not protein.held_out_by_file(index, []).any()
    for names in (["c"], ["a", "b"]):
        with pytest.raises(
            ConfigError, match="task.held_out_files.*expected some, not all, of a, b"
        ):
            protein.held_out_by_file(index, names)


def test_more_files_than_16_bits_can_count(tmp_path, monkeypatch):
    """One file per protein."""
    path = write(tmp_path / "a.fasta", ["ACDEFGHIK"])
    (row,) = protein.read_fasta(path)
    monkeypatch.setattr(protein, "read_fasta", lambda path: iter([row]))
    index = read_files([path] * 65_600)
    assert index.files.tolist() == list(range(65_600))
    names = ("a",) * 65_599 + ("b",)
    last = dataclasses.replace(index, names=names)
    actual = np.flatnonzero(protein.held_out_by_file(last, None)).tolist()
    assert actual == [65_599]


def test_files_of_every_ending(tmp_path):
    taken = ["a.FASTA", "b.faa", "c.fas", "d.Fa.gz", "f.pep"]
    for file in (*taken, "g.fna", "i.fasta.bz2", "._a.fasta"):
        write(tmp_path / file, ["ACD"])
    actual = protein.read_uniprot(str(tmp_path), None).names
    assert actual == tuple("abcdf")


# ---- rows and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 7, 64])
def test_chains_are_all_sequences_with_ends_between(longest, tmp_path):
    index = index_of(tmp_path, 60)
    chosen = np.arange(0, 60, 2)
    chain = np.concatenate([np.append(index[row], protein.END) for row in chosen])
    rows = Chains(index, chosen, longest)
    assert len(rows) == len(chain) // longest
    for i in range(len(rows)):
        actual = rows[i].tolist()
        expected = chain[i * longest : (i + 1) * longest].tolist()
        assert actual == expected


def test_each_token_is_predicted_from_those_before_it():
    rows = [np.uint8([3, 4, 5]), np.uint8([6, 7, 8, 9, 1])]
    batch = protein.next_token_batch(rows, 5)
    B = protein.BEGIN
    E = protein.END
    P = protein.PAD
    i = IGNORED
    actual = batch["tokens"].tolist()
    assert actual == [[B, 3, 4, 5, P], [B, 6, 7, 8, 9]]
    actual = batch["labels"].tolist()
    assert actual == [[3, 4, 5, E, i], [6, 7, 8, 9, 1]]
    actual = batch["key_mask"].tolist()
    expected = [[True] * 4 + [False], [True] * 5]
    assert actual == expected
    assert "key_mask" not in protein.next_token_batch(rows[:1], 5)


def test_masks_of_a_row_are_its_own(tmp_path):
    """The same in every batch; letters alone are masked, and become letters."""
    index = index_of(tmp_path, 300)
    rows = Singles(index, np.arange(300), 30)
    masking = protein.letter_masking()
    plan = Plan(8)
    for i in range(300):
        actual = rows[i].tolist()
        expected = index[i][:30].tolist()
        assert actual == expected
        assert rows.lengths[i] == len(rows[i])

    def take(numbers):
        chosen = [rows[i] for i in numbers]
        inputs, labels = zip(*map(masking.mask_row, chosen, map(plan.rng, numbers)))
        return token_batch(inputs, protein.PAD, labels)

    alone = take([4])
    among = take([9, 4, 200])
    n = len(rows[4])
    actual = among["tokens"][1, :n].tolist()
    expected = alone["tokens"][0].tolist()
    assert actual == expected
    actual = among["labels"][1, :n].tolist()
    expected = alone["labels"][0].tolist()
    assert actual == expected
    batch = take(range(300))
    chosen = batch["labels"] != IGNORED
    assert (batch["labels"][chosen] < len(LETTERS)).all()
    assert chosen.any(1).all()
    shown = batch["tokens"][chosen]
    assert ((shown < len(LETTERS)) | (shown == protein.MASK)).all()
