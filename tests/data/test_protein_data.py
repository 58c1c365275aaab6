"""UniProt's FASTA files, their index, splits, rows and statistics; generated families with a known entropy."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from crt_exp.config import ConfigError
from crt_exp.data import DataError, fasta, protein, protein_families
from crt_exp.data.fasta import entries, fasta_files, indexed
from crt_exp.data.plan import Plan
from crt_exp.data.protein import LETTERS, Chains, Singles

PROTEINS = Path(os.environ.get("CRT_DATA", "none")) / "protein"
OPTIONS = {"sequences": 300, "families": 3, "held_out": 1, "shortest": 8, "longest": 30, "nearest": 3, "farthest": 6,
           "copied": 0.5, "seed": 0}


def name(i):
    return f"A{i:05d}"


def write(path, sequences, kind="tr", width=10, end="\n"):
    """A FASTA file with lines of `width` letters, packed where its name says so."""
    lines = [line for i, s in enumerate(sequences) for line in
             (f">{kind}|{name(i)}|{name(i)}_ECOLI Protein {i} OS=Escherichia coli OX=83333 PE=3 SV=1",
              *(s[j:j + width] for j in range(0, len(s), width)))]
    content = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def sequences(n, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(1, longest))) for _ in range(n)]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file, kind, end", [("a.fasta", "tr", "\n"), ("a.gz", "sp", "\n"), ("a.fa", "sp", "\r\n"),
                                             ("a.FAA", "tr", "\r")], ids=["plain", "packed", "windows", "classic mac"])
@pytest.mark.parametrize("block", [7, 64, 1 << 22])
def test_entries_are_those_of_the_file(file, kind, end, block, tmp_path, monkeypatch):
    """Whatever the blocks in which it is read; the line is that of the header."""
    monkeypatch.setattr("crt_exp.data.fasta.BLOCK", block)
    wanted = sequences(20)
    found = list(entries(write(tmp_path / file, wanted, kind, end=end), LETTERS))
    assert [protein.decode(entry.tokens) for entry in found] == wanted
    assert [entry.accession.decode() for entry in found] == [name(i) for i in range(20)]
    lines = np.cumsum([1, *(1 + -(-len(s) // 10) for s in wanted)])[:-1]
    assert [entry.line for entry in found] == lines.tolist()


@pytest.mark.skipif(not PROTEINS.is_dir(), reason="needs $CRT_DATA/protein")
def test_the_proteomes_are_read_whole():
    """Beside a reader of Biopython's kind: headers, letters, and the sums of a proteome."""
    path = PROTEINS / "UP000000625_83333.fasta"
    found = list(entries(path, LETTERS))
    text = path.read_text().split(">")[1:]
    assert len(found) == len(text) > 4000
    assert protein.decode(found[-1].tokens) == "".join(text[-1].split("\n")[1:])
    assert sum(len(entry.tokens) for entry in found) == sum(len("".join(part.split("\n")[1:])) for part in text)


def test_headers_of_other_sources_are_names(tmp_path):
    (tmp_path / "a.fasta").write_text(">NP_000537.3 tumor antigen\nACD\n>ENSP00000269305.4\nDC\n>tr|A00001|X_Y\nA\n")
    names = [entry.accession.decode() for entry in entries(tmp_path / "a.fasta", LETTERS)]
    assert names[::2] == ["NP_000537.3", "A00001"] and len(names[1]) == 16  # a digest of a longer name


@pytest.mark.parametrize("header, accession", [
    ("sp|Q6GZX4.1|001R_FRG3G Putative protein", "Q6GZX4"), ("sp|Q6GZX4|001R_FRG3G", "Q6GZX4"),
    ("tr|P12345-2|X_Y", "P12345-2"), ("sp|Q6GZX4.12|", "Q6GZX4"), ("tr|A00001", "A00001"),
    ("sp|p12345_VAR|X", "p12345_VAR"), ("sp|Q6GZX4.1 Putative", "Q6GZX4"),
    ("  NP_1.1 x", "NP_1.1"), ("gi|12|ref|NP_1.1|", "gi|12|ref|NP_1.1|")])
def test_any_header_is_taken(header, accession, tmp_path):
    (tmp_path / "a.fasta").write_text(f">{header}\nACD\n")
    assert [entry.accession.decode() for entry in entries(tmp_path / "a.fasta", LETTERS)] in (
        [accession], [fasta.digest(accession.encode()).decode()])


@pytest.mark.parametrize("headers", [
    ["protein {}"] * 40, ["unknown"] * 40, ["hypothetical protein"] * 20 + ["hypothetical gene {}"] * 20])
@pytest.mark.parametrize("files", [1, 40])
def test_headers_with_the_same_first_word_are_several_records(headers, files, tmp_path):
    """In one file or a file each; they share no name, so splits divide them. Copies keep one."""
    letters, per = sequences(40, longest=200), 40 // files
    records = [f">{header.format(i)}\n{letters[i]}\n" for i, header in enumerate(headers)]
    paths = [tmp_path / f"{i:02d}.fasta" for i in range(files)]
    for i, path in enumerate(paths):
        path.write_text("".join(records[i * per:(i + 1) * per]))
    index = indexed(paths, LETTERS)
    assert len(set(index.accessions.tolist())) == 40 == len(set(index.hashes.tolist()))
    assert [index.place(row, LETTERS) for row in (0, 39)] == [f"{paths[0]}, line 1", f"{paths[-1]}, line {2 * per - 1}"]
    (tmp_path / "copies.fasta").write_text(">same one\nACD\n>same two\nACD\n>tr|A1|X\nAC\n>tr|A1.2|X\nDC\n")
    assert indexed([tmp_path / "copies.fasta"], LETTERS).accessions.tolist() == [b"same"] * 2 + [b"A1"] * 2


GOOD = ">tr|A00000|X_Y\nACD\n"


@pytest.mark.parametrize("content, words", [
    ("", ["the file is empty"]),
    ("ACD\n>tr|A1|X_Y\nACD\n", ["line 1", "'ACD' is no header"]),
    (GOOD + "> some protein\n", ["line 3", "some has no sequence"]),
    (GOOD + ">\nACD\n", ["line 3", "the header names no sequence"]),
    (GOOD + ">tr||X_Y\nACD\n", ["line 3", "names no accession"]),
    (GOOD + ">sp|\nACD\n", ["line 3", "'>sp|' names no accession"]),
    ((GOOD + ">tr|A00001|X_Y\nACJD\n").replace("\n", "\r"), ["line 4", "'J' in A00001 is no amino acid"]),
    (GOOD + ">tr|A00001|X_Y\n>tr|A00002|X_Y\nACD\n", ["line 3", "A00001 has no sequence"]),
    (GOOD + ">tr|A00001|X_Y\n\n", ["line 3", "A00001 has no sequence"]),
    (GOOD + ">tr|A00001|X_Y\nACD\nACJD\n", ["line 5", "'J' in A00001 is no amino acid", LETTERS]),
    (GOOD + ">tr|A00001|X_Y\nACD\nac\n", ["line 5", "'a' in A00001"]),
    (GOOD + ">tr|A00001|X_Y\nACD*\n", ["line 4", "'*' in A00001"]),
    (GOOD + ">tr|A00001|X_Y\nA CD\n", ["line 4", "' ' in A00001"]),
])
@pytest.mark.parametrize("packed", [False, True])
def test_malformed_files_are_refused_with_the_line(content, words, packed, tmp_path):
    path = tmp_path / ("a.fasta.gz" if packed else "a.fasta")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    with pytest.raises(DataError) as error:
        indexed([path], LETTERS, tmp_path / "cache")
    assert all(word in str(error.value) for word in [str(path), *words]), error.value
    assert not [*(tmp_path / "cache").iterdir()]                          # nothing half-written


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_gz_is_refused(keep, tmp_path):
    path = write(tmp_path / "a.fasta.gz", sequences(2000))
    content = path.read_bytes()
    path.write_bytes(content[:int(keep * len(content))])
    with pytest.raises(DataError, match="a.fasta.gz: the gz file is cut off or damaged"):
        indexed([path], LETTERS, tmp_path / "cache")


# ---- the index -------------------------------------------------------------------------------------------------------


def test_index_is_built_once_and_mapped(tmp_path, monkeypatch):
    first, second = sequences(30), sequences(20, seed=1)
    files = [write(tmp_path / "a.fasta", first), write(tmp_path / "b.fasta.gz", second)]
    for cache in (tmp_path / "cache", None):
        index = indexed(files, LETTERS, cache)
        assert [protein.decode(index.sequence(i)) for i in range(50)] == first + second
        assert isinstance(index.tokens, np.memmap) and index.names == ("a", "b")
        assert index.files.tolist() == [0] * 30 + [1] * 20
        assert index.lengths.tolist() == [len(s) for s in first + second]
    monkeypatch.setattr("crt_exp.data.fasta.build", lambda *_: pytest.fail("built again"))
    assert len(indexed(files, LETTERS, tmp_path / "cache")) == 50


def test_a_stale_index_is_built_anew_and_said(tmp_path, caplog):
    path, cache = write(tmp_path / "a.fasta", ["ACDE", "FGH"]), tmp_path / "cache"
    indexed([path], LETTERS, cache)
    os.utime(path, ns=(1, 1))                                             # touched, the same content
    indexed([path], LETTERS, cache)
    assert not caplog.records
    write(path, ["ACDE", "FGK"])                                          # of the same size
    assert protein.decode(indexed([path], LETTERS, cache).sequence(1)) == "FGK"
    assert "is stale" in caplog.text and "a.fasta has another checksum: it is built again" in caplog.text
    write(path, ["ACDE", "FGKL"])
    assert protein.decode(indexed([path], LETTERS, cache).sequence(1)) == "FGKL"
    assert "bytes where it had" in caplog.text
    next(cache.glob("*/ends")).write_bytes(b"")
    assert len(indexed([path], LETTERS, cache)) == 2 and "its file ends is not as it was written" in caplog.text


@pytest.mark.parametrize("name", sorted(fasta.ARRAYS))
@pytest.mark.parametrize("large", [False, True])
def test_a_damaged_index_is_built_anew_and_said(name, large, tmp_path, caplog, monkeypatch):
    """Overwritten by as many bytes: sizes tell nothing."""
    monkeypatch.setattr(fasta, "SAMPLED", 0 if large else 1 << 30)
    path, cache = write(tmp_path / "a.fasta", ["ACDE" * 500, "FGH" * 500]), tmp_path / "cache"
    index = indexed([path], LETTERS, cache)
    before = {part: np.array(getattr(index, part)) for part in ("ends", "hashes", "files", "accessions")}
    file = next(cache.glob(f"*/{name}"))
    file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    after = indexed([path], LETTERS, cache)
    assert f"its file {name} is not as it was written: it is built again" in caplog.text
    assert all(np.array_equal(values, getattr(after, part)) for part, values in before.items())
    assert protein.decode(after.sequence(0)) == "ACDE" * 500


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_entries_do_not_depend_on_the_blocks_that_are_read(block, tmp_path, monkeypatch):
    path = write(tmp_path / "a.fasta", sequences(20))
    expected = list(entries(path, LETTERS))
    monkeypatch.setattr(fasta, "BLOCK", block)
    assert list(entries(path, LETTERS)) == expected


def test_an_entry_without_end_is_refused_soon(tmp_path, monkeypatch):
    """As a gz file of zeros and the like: no more than the limit and a block are read."""
    read = []
    real = fasta.blocks
    monkeypatch.setattr(fasta, "LONGEST", 1 << 16)
    monkeypatch.setattr(fasta, "BLOCK", 1 << 12)
    monkeypatch.setattr(fasta, "blocks", lambda path: (read.append(len(b)) or b for b in real(path)))
    path = tmp_path / "a.fasta.gz"
    path.write_bytes(gzip.compress(b">tr|A00000|X_Y\n" + b"A" * (1 << 20)))
    with pytest.raises(DataError, match="line 1: an entry of more than 65536 bytes"):
        list(entries(path, LETTERS))
    assert sum(read) <= (1 << 16) + (1 << 13)


def test_an_index_that_cannot_be_kept_is_made_and_said(tmp_path, caplog):
    path = write(tmp_path / "a.fasta", ["ACDE"])
    (tmp_path / "cache").write_text("a file")
    assert len(indexed([path], LETTERS, tmp_path / "cache")) == 1 and "cannot be written" in caplog.text


# ---- splits ----------------------------------------------------------------------------------------------------------


def index_of(tmp_path, n=400, **options):
    return indexed([write(tmp_path / "a.fasta", sequences(n, **options))], LETTERS)


def test_splits_depend_on_the_accession_alone(tmp_path):
    """Each sequence in one split, in the same one whatever else there is, in about the shares that are asked for."""
    whole, part = index_of(tmp_path, 2000), index_of(tmp_path, 900)
    none = lambda index: np.zeros(len(index), bool)
    rows, fewer = (protein.split_rows(index, none(index), 0.1, 0.2) for index in (whole, part))
    assert sorted(np.concatenate(list(rows.values()))) == list(range(2000)) and "ood" not in rows
    assert abs(len(rows["validation"]) / 2000 - 0.1) < 0.03 and abs(len(rows["test"]) / 2000 - 0.2) < 0.04
    assert all((fewer[split] == rows[split][rows[split] < 900]).all() for split in rows)


def test_held_out_families(tmp_path):
    index, table = index_of(tmp_path, 4), tmp_path / "families.tsv"
    table.write_text(f"Entry\tPfam\n{name(0)}\tPF00001;PF18369;\n{name(1)}\t\n{name(2)}\tPF1\n{name(3)}\tPF04680\n")
    assert protein.held_out_by_family(index, table, protein.HELD_OUT).tolist() == [True, False, False, True]
    table.write_text(f"{name(0)}\tPF1\n{name(3)}\t\n")
    with pytest.raises(DataError, match=f"misses 2 of the 4 sequences, the first is {name(1)}"):
        protein.held_out_by_family(index, table, protein.HELD_OUT)
    table.write_text(f"{name(0)}\tPF1\nno tab\n")
    with pytest.raises(DataError, match="families.tsv, line 2: a line is an accession, a tab"):
        protein.held_out_by_family(index, table, protein.HELD_OUT)
    with pytest.raises(DataError, match="nowhere.tsv: the table of families cannot be read"):
        protein.held_out_by_family(index, tmp_path / "nowhere.tsv", protein.HELD_OUT)


def test_a_table_of_families_is_read_in_parts(tmp_path, monkeypatch):
    """TrEMBL's has 250 million lines: what is held is two bits and the accession of each sequence. A sequence may have
    several lines, and lines may be of other sequences."""
    monkeypatch.setattr(protein, "LINES", 3)
    index, table = index_of(tmp_path, 50), tmp_path / "families.tsv"
    rows = [(name(i), "PF18369" if i % 7 == 0 else "PF00001;PF1") for i in range(60)]
    rows += [(name(5), "PF04680"), ("A" * 40, "PF18369"), (name(5), "PF00001")]
    order = np.random.default_rng(0).permutation(len(rows))
    table.write_text("".join("\t".join(rows[i]) + "\n" for i in order))
    expected = [i % 7 == 0 or i == 5 for i in range(50)]
    assert protein.held_out_by_family(index, table, protein.HELD_OUT).tolist() == expected


def test_held_out_files(tmp_path):
    index = indexed([write(tmp_path / f"{n}.fasta", sequences(3)) for n in "ab"], LETTERS)
    assert protein.held_out_by_file(index, None).tolist() == [False] * 3 + [True] * 3   # the last of several
    assert protein.held_out_by_file(index, ["a"]).tolist() == [True] * 3 + [False] * 3
    assert not protein.held_out_by_file(index, []).any()
    with pytest.raises(ConfigError, match="c is none of the files a, b"):
        protein.held_out_by_file(index, ["c"])
    with pytest.raises(ConfigError, match="none is left to train on"):
        protein.held_out_by_file(index, ["a", "b"])


def test_no_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises(DataError, match="CRT_DATA is not set"):
        protein.uniprot(None, None)
    with pytest.raises(DataError, match="holds no FASTA file"):
        protein.uniprot(str(tmp_path), None)
    write(tmp_path / "b.fasta.gz", ["ACD"]), write(tmp_path / "a.fa", ["ACD"]), (tmp_path / "a.txt").write_text("")
    assert [path.name for path in fasta_files(tmp_path)] == ["a.fa", "b.fasta.gz"]


def test_every_file_of_proteins_is_taken_and_others_are_counted(tmp_path, caplog):
    taken = ["a.FASTA", "b.faa", "c.fas", "d.Fa.GZ", "e.faa.gz", "f.pep"]
    for file in [*taken, "g.fna", "h.fna", "i.fasta.bz2", "README"]:
        write(tmp_path / file, ["ACD"])
    assert [path.name for path in fasta_files(tmp_path)] == taken
    assert f"{tmp_path}: left out by their endings: 2 .fna, 1 without one, 1 .fasta.bz2 (taken are" in caplog.text
    index = indexed(fasta_files(tmp_path), LETTERS)
    assert index.names == tuple("abcdef")
    assert protein.held_out_by_file(index, ["d"]).tolist() == [i == 3 for i in range(6)]


# ---- rows and batches ------------------------------------------------------------------------------------------------


def test_single_sequences_are_cut(tmp_path):
    index = index_of(tmp_path, 30)
    rows = Singles(index, np.arange(5, 30), 12)
    for i in range(25):
        whole = index.sequence(5 + i)
        assert rows[i].tokens.tolist() == whole[:12].tolist() and rows[i].ends == (len(whole) < 12)
        assert rows.lengths[i] == len(rows[i].tokens)
    row = int(np.flatnonzero(index.lengths > 12)[0])
    with pytest.raises(DataError) as error:
        Singles(index, np.arange(30), 12).check_whole()
    line = next(entry.line for entry in entries(index.paths[0], LETTERS) if entry.accession.decode() == name(row))
    assert f"a.fasta, line {line}: {name(row)} has {index.lengths[row]} letters" in str(error.value)
    Singles(index, np.arange(30), 40).check_whole()


@pytest.mark.parametrize("longest", [1, 7, 64, 1000])
def test_chains_are_all_sequences_with_ends_between(longest, tmp_path):
    index = index_of(tmp_path, 60)
    chosen = np.arange(0, 60, 2)
    chain = np.concatenate([np.append(index.sequence(row), protein.END) for row in chosen])
    rows = Chains(index, chosen, longest)
    assert len(rows) == len(chain) // longest
    for i in range(len(rows)):
        assert rows[i].tokens.tolist() == chain[i * longest:(i + 1) * longest].tolist()


def test_next_tokens():
    rows = [protein.ProteinRow(np.uint8([3, 4, 5]), True), protein.ProteinRow(np.uint8([6, 7, 8, 9, 1]), False)]
    batch = protein.next_tokens(rows)
    B, E, P, i = protein.BEGIN, protein.END, protein.PAD, protein.IGNORED
    assert batch["tokens"].tolist() == [[B, 3, 4, 5, P], [B, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[3, 4, 5, E, i], [6, 7, 8, 9, 1]]
    assert batch["key_mask"].tolist() == [[True] * 4 + [False], [True] * 5]
    assert "key_mask" not in protein.next_tokens(rows[:1])


def test_masks_of_a_row_are_its_own(tmp_path):
    """The same in every batch; letters alone are masked, and become letters; 15% of them are."""
    rows, masking, plan = Singles(index_of(tmp_path, 300), np.arange(300), 30), protein.masking(0.15), Plan(8)
    take = lambda numbers: protein.masked_tokens([rows[i] for i in numbers], map(plan.rng, numbers), masking)
    alone, among = take([4]), take([9, 4, 200])
    n = len(rows[4].tokens)
    assert among["tokens"][1, :n].tolist() == alone["tokens"][0].tolist()
    assert among["labels"][1, :n].tolist() == alone["labels"][0].tolist()
    batch = take(range(300))
    chosen = batch["labels"] != protein.IGNORED
    assert (batch["labels"][chosen] < len(LETTERS)).all() and chosen.any(1).all()
    assert abs(chosen.sum() / rows.lengths.sum() - 0.15) < 0.03
    shown = batch["tokens"][chosen]
    assert ((shown < len(LETTERS)) | (shown == protein.MASK)).all()
    assert abs((shown == protein.MASK).float().mean() - 0.8) < 0.05


def test_statistics_and_frequencies(tmp_path):
    index = index_of(tmp_path, 50)
    found = protein.statistics(index.lengths)
    assert found["sequences"] == 50 and found["length_max"] == index.lengths.max()
    assert found["length_std"] == pytest.approx(index.lengths.std())
    assert found["length_median"] == np.median(index.lengths)
    shares = protein.frequencies(Singles(index, np.arange(50), 1000))
    counts = np.bincount(index.tokens, minlength=25) + 1
    assert shares.sum() == pytest.approx(1) and shares == pytest.approx(counts / counts.sum())


# ---- generated families ----------------------------------------------------------------------------------------------


def padded(index, longest):
    found = np.zeros((len(index), longest), np.uint8)
    for i in range(len(index)):
        found[i, :index.lengths[i]] = index.sequence(i)
    return found, np.arange(longest) < index.lengths[:, None]


def test_chances_of_generated_letters_sum_to_one():
    """With the end of the sequence: over all letters that may come next."""
    made = protein_families.Families.of(OPTIONS | {"shortest": 1, "longest": 6, "nearest": 2, "farthest": 3})
    prefix = np.uint8([[3, 5, 3, 7]])
    every = np.concatenate([prefix.repeat(20, 0), np.arange(20, dtype=np.uint8)[:, None]], 1)
    total = np.exp(made.log_chances(every)[:, 4]).sum()
    assert total == pytest.approx(np.exp(made.log_survival()[4]), abs=1e-9)
    assert total == pytest.approx(2 / 3)                                  # of 4, 5 or 6 letters, two go on


def test_the_true_chances_beat_every_other():
    """On what the family generated: its own cross-entropy is below that of families of another seed, of the unigram,
    and without the lag; and equal to that of fresh sequences."""
    made = protein_families.Families.of(OPTIONS)
    losses = []
    for sequence_seed in (0, 1):
        index = made.drawn(OPTIONS | {"seed": sequence_seed, "sequences": 1000})
        own = np.flatnonzero(index.files < 3)
        letters, inside = (part[own] for part in padded(index, 30))
        losses.append(-made.log_chances(letters)[inside].mean())
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    others = [protein_families.Families.of(OPTIONS | change) for change in ({"seed": 5}, {"copied": 0.0})]
    assert all(-other.log_chances(letters)[inside].mean() > losses[1] + 0.3 for other in others)
    shares = np.bincount(letters[inside], minlength=20) / inside.sum()
    assert -np.log(shares[letters[inside]]).mean() > losses[1] + 0.5


def test_held_out_families_are_others():
    made = protein_families.Families.of(OPTIONS)
    index = made.drawn(OPTIONS)
    assert (index.files == 3).sum() == 30 and len(index) == 330
    assert index.lengths.min() >= 8 and index.lengths.max() <= 30 and index.tokens.max() < 20
    out = protein.held_out_by_file(index, ["family 3"])
    letters, inside = (part[out] for part in padded(index, 30))
    assert -made.log_chances(letters, held_out=True)[inside].mean() < -made.log_chances(letters)[inside].mean() - 0.3
    again = made.drawn(OPTIONS)
    assert (again.tokens == index.tokens).all() and (again.hashes == index.hashes).all()


def test_bad_bounds_of_generated_families():
    with pytest.raises(ConfigError, match="shortest = 40 is more than longest = 30"):
        protein_families.Families.of(OPTIONS | {"shortest": 40})
