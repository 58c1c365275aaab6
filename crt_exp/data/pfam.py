"""Which proteins are of the Pfam families that Performers held out, as the table that task.families names.

Pfam lists a region a line: the accession of a sequence of UniProt, then other columns, one of which is the family. The
table has a line for each sequence of the FASTA files that are there, `accession<tab>family;family`, with the held-out
families alone: all of them would be a hundred times as much, and are not read.
"""

import gzip
import zlib
from collections import defaultdict
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.atomic_write import whole

REGIONS = Path("pfam", "Pfam-A.regions.uniprot.tsv.gz")


def make(table: Path) -> str:
    """Writes the table from the FASTA files beside it and Pfam's regions below it, and says how many of each it has.
    Raises DataError."""
    from crt_exp.data.fasta import fasta_files, name_of, records
    from crt_exp.data.protein import HELD_OUT

    files = fasta_files(table.parent)
    if not files:
        raise DataError(f"{table.parent} holds no FASTA file to name the families of: first\n"
                        "`python -m crt_exp.data fetch protein/trembl`, or put your own there.")
    known, count, out = families_of(table.parent / REGIONS, HELD_OUT), 0, 0
    with whole(table) as part, open(part, "wb") as stream:
        stream.write(b"Entry\tPfam\n")
        for file in files:
            for line, record in records(file):
                accession = name_of(file, line, record.partition(b"\n")[0])
                named = known.get(accession.partition(b"-")[0], ())  # isoforms have a hyphen and a number
                stream.write(accession + b"\t" + b";".join(sorted(named)) + b"\n")
                count, out = count + 1, out + bool(named)
    return f"{count} sequences, {out} of the {len(HELD_OUT)} held-out families"


def families_of(regions: Path, wanted: tuple[str, ...]) -> dict[bytes, set[bytes]]:
    """accession -> those of its families that are wanted. Raises DataError."""
    result, asked = defaultdict(set), {name.encode() for name in wanted}
    try:
        with gzip.open(regions) as stream:
            for line in stream:
                accession, *columns = line.split()
                for name in asked.intersection(columns):
                    result[accession].add(name)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{regions}: the list of Pfam's regions cannot be read ({error}).") from None
    if not result:
        raise DataError(f"{regions}: none of the families {', '.join(wanted[:3])}, ... is in this list.")
    return result
