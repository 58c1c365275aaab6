"""Which proteins are of the Pfam families that Performers held out, as the table that task.families names.

Pfam lists a region of a protein a line. The table has a line for each sequence of the FASTA files that are there, with
the held-out families alone: all of them would be a hundred times as much, and are not read.
"""

from pathlib import Path

from crt_exp.atomic_write import whole
from crt_exp.data import DataError

REGIONS = Path("pfam", "Pfam-A.regions.uniprot.tsv.gz")


def make(table: Path) -> str:
    """Writes the table from the FASTA files beside it and Pfam's regions below it, and counts held-out sequences.

    Raises DataError.
    """
    import pandas as pd

    from crt_exp.data.protein import HELD_OUT, LINES, entries, fasta_files

    files, regions, count = fasta_files(table.parent), table.parent / REGIONS, 0
    try:
        blocks = pd.read_csv(regions, sep="\t", usecols=["uniprot_acc", "pfamA_acc"], dtype=str, chunksize=LINES)
        held = pd.concat(block[block.pfamA_acc.isin(HELD_OUT)] for block in blocks).drop_duplicates()
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{regions}: Pfam's regions cannot be read: {error}") from None
    families = held.sort_values("pfamA_acc").groupby("uniprot_acc").pfamA_acc.agg(";".join).to_dict()
    with whole(table) as part, open(part, "w", encoding="utf-8") as stream:
        stream.write("Entry\tPfam\n")
        for accession in (entry[0].decode("latin-1") for file in files for entry in entries(file)):
            named = families.get(accession.partition("-")[0], "")            # isoforms have a hyphen and a number
            stream.write(f"{accession}\t{named}\n")
            count += bool(named)
    return f"{count} sequences of the {len(HELD_OUT)} held-out families"
