"""Speech of one's own: a csv or jsonl file that names audio files and their transcripts, and their splits if it wants.

Columns `audio` (paths, relative to the file's folder), `text` and, in every line or none, `split`: train, validation or
test. Without splits a hash of the path puts a tenth of the utterances each into validation and test.
"""

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crt_exp.data import DataError, read_text
from crt_exp.data.endings import AUDIO, Sieve
from crt_exp.data.speech import Faults, Utterance, header

SPLITS = ("train", "validation", "test")
NEEDED = ("audio", "text")


class Entry(NamedTuple):
    place: str       # file and line
    audio: Path
    text: str
    split: str


def utterances(path: str | Path, split: str, faults: Faults) -> Iterator[Utterance]:
    """Of one split; audio that cannot be read is noted. Raises DataError for a table that is none, naming the line."""
    for entry in entries(Path(path).expanduser()):
        if entry.split != split:
            continue
        if not entry.text:
            faults.add(entry.place, "an empty transcript")
        elif part := header(entry.audio, faults):
            yield Utterance(entry.audio.stem, entry.text, (part,))


def entries(path: Path) -> list[Entry]:
    marked = []
    for number, row in rows(path):
        place = f"{path}, line {number}"
        if missing := [name for name in NEEDED if not isinstance(row.get(name), str)]:
            raise DataError(f"{place}: it has no {missing[0]}; each line names audio, a file, and text, its transcript"
                            f" (it has {', '.join(map(str, row)) or 'nothing'})")
        split = row.get("split") or by_hash(row["audio"])
        if split not in SPLITS:
            raise DataError(f"{place}: split = {split}: it takes {', '.join(SPLITS)}")
        marked.append((bool(row.get("split")),
                       Entry(place, path.parent / row["audio"], " ".join(row["text"].split()), split)))
    if not marked:
        raise DataError(f"{path} names no audio: it takes the columns audio and text, and a line for each file")
    known = {said for said, _ in marked}
    if len(known) > 1:
        place = next(entry.place for said, entry in marked if not said)
        raise DataError(f"{place}: it has no split, and other lines have one: give all of them, or none")
    return [entry for _, entry in marked]


def rows(path: Path) -> Iterator[tuple[int, dict]]:
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        raise DataError(f"task.data_dir = {path}: task.corpus=table takes a .csv, .tsv or .jsonl file")
    text = read_text(path, str(path))
    if path.suffix == ".jsonl":
        yield from objects(path, text)
        return
    reader = csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix == ".tsv" else ",")
    for row in reader:
        yield reader.line_num, row


def objects(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: it is not JSON: {error.msg}") from None
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number}: it is not a JSON object")
        yield number, value


def by_hash(name: str) -> str:
    """The same for a name whatever else the table holds."""
    place = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 10
    return {0: "validation", 1: "test"}.get(place, "train")


def audio_files(name: str, option: str) -> list[Path]:
    """The file, or those of the folder and the folders in it, sorted. Raises DataError, naming `option`, for none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{option} = {name}: there is no such file or folder")
    files = Sieve(AUDIO).only(path, path.rglob("*"))
    if not files:
        raise DataError(f"{option} = {name}: this folder holds no audio ({' '.join(AUDIO)})")
    return files
