"""FASTA files of made-up proteins."""

import gzip


def name(i):
    return f"A{i:05d}"


def write(path, sequences, kind="tr", width=10, end="\n"):
    """A FASTA file with lines of `width` letters, packed where its name says so."""
    lines = []
    for i, s in enumerate(sequences):
        cases = [
            f">{kind}|{name(i)}|{name(i)}_ECOLI Protein {i} OS=Escherichia coli OX=83333 PE=3 SV=1",
            *(s[j : j + width] for j in range(0, len(s), width)),
        ]
        for line in cases:
            lines.append(line)
    content = "".join(line + end for line in lines).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    return path
