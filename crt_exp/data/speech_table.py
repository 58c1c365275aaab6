"""Speech of one's own: a csv or jsonl file that names audio files and their transcripts, and their splits if it wants.

Columns `audio` (paths, relative to the file's folder), `text` and, in every line or none, `split`: train, validation or
test. Without splits a hash of the path puts a tenth of the utterances each into validation and test. A file is one
file by whatever path it is named, and of one split.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from crt_exp.data import DataError, read_text
from crt_exp.data.delimited import PLAIN, table
from crt_exp.data.endings import AUDIO, files_ending
from crt_exp.data.speech import Faults, Utterance, header

SPLITS = ("train", "validation", "test")
NEEDED = ("audio", "text")


class TableEntry(NamedTuple):
    place: str       # file and line
    audio: Path
    text: str
    split: str | None


def utterances(path: str | Path, split: str, faults: Faults) -> Iterator[Utterance]:
    """Of one split; audio that cannot be read is noted. Raises DataError for a table that is none, naming the line."""
    for entry in entries(Path(path).expanduser()):
        if entry.split != split:
            continue
        if not entry.text:
            faults.add(entry.place, "an empty transcript")
        elif part := header(entry.audio, faults):
            yield Utterance(entry.audio.stem, entry.text, (part,))


# ---- splits ----------------------------------------------------------------------------------------------------------


def entries(path: Path) -> list[TableEntry]:
    read = [entry_of(path, number, row) for number, row in rows(path)]
    if not read:
        raise DataError(f"{path} names no audio: it takes the columns audio and text, and a line for each file")
    given = [entry for entry in read if entry.split is not None]
    if given and len(given) < len(read):
        place = next(entry.place for entry in read if entry.split is None)
        raise DataError(f"{place}: it has no split, and other lines have one: give all of them, or none")
    if given:
        check_apart(read)
        return read
    return divided(path.parent, read)


def entry_of(path: Path, number: int, row: dict) -> TableEntry:
    place = f"{path}, line {number}"
    if missing := [name for name in NEEDED if not isinstance(row.get(name), str)]:
        raise DataError(f"{place}: it has no {missing[0]}; each line names audio, a file, and text, its transcript"
                        f" (it has {', '.join(map(str, row)) or 'nothing'})")
    if not row["audio"].strip() or "\0" in row["audio"]:
        raise DataError(f"{place}: audio = {row['audio']!r} is no name of a file")
    split = row.get("split") or None
    if split not in (None, *SPLITS):
        raise DataError(f"{place}: split = {split}: it takes {', '.join(SPLITS)}")
    return TableEntry(place, path.parent / row["audio"], " ".join(row["text"].split()), split)


def check_apart(read: list[TableEntry]) -> None:
    """Raises DataError where the same audio, by whatever path, is of two splits: it would be trained and tested on."""
    first: dict[Hashable, TableEntry] = {}
    for entry in read:
        other = first.setdefault(identity(entry.audio), entry)
        if other.split != entry.split:
            raise DataError(f"{entry.place}: {entry.audio} is of split {entry.split}, and the same audio is of split "
                            f"{other.split} in {other.place.rpartition(', ')[2]}: give it one split")


def divided(folder: Path, read: list[TableEntry]) -> list[TableEntry]:
    """With splits by the hash of their paths; audio with several of them goes by the first in order."""
    names: dict[Hashable, str] = {}
    keys = [identity(entry.audio) for entry in read]
    for key, entry in zip(keys, read):
        name = os.path.relpath(os.path.abspath(entry.audio), os.path.abspath(folder))  # ./a.wav is a.wav
        names[key] = min(names.get(key, name), name)
    return [entry._replace(split=by_hash(names[key])) for key, entry in zip(keys, read)]


def identity(audio: Path) -> Hashable:
    """Equal for all paths, links too, of one file."""
    try:
        status = os.stat(audio)
    except OSError:  # which is noted when its header is read
        return os.path.abspath(audio)
    return status.st_dev, status.st_ino


def by_hash(name: str) -> str:
    """The same for a name whatever else the table holds."""
    place = int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8], 16) % 10
    return {0: "validation", 1: "test"}.get(place, "train")


# ---- lines -----------------------------------------------------------------------------------------------------------


def rows(path: Path) -> Iterator[tuple[int, dict]]:
    """The lines as dictionaries. In a .tsv, as Common Voice writes them, a quotation mark is a character as any other;
    in a .csv it may enclose a cell."""
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        raise DataError(f"task.data_dir = {path}: task.corpus=table takes a .csv, .tsv or .jsonl file")
    text = read_text(path, str(path))
    if path.suffix == ".jsonl":
        yield from objects(path, text)
        return
    names, read = table(path, text, ",") if path.suffix == ".csv" else table(path, text, "\t", PLAIN)
    for line, cells in read:
        if broken := next((name for name, cell in zip(names, cells) if "\n" in cell or "\t" in cell), None):
            raise DataError(f"{path}, line {line}: the cell of {broken} holds a line end or a tab: does a quotation "
                            "mark not end?")
        yield line, dict(zip(names, cells))


def objects(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=once)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: it is not JSON: {error.msg}") from None
        except RecursionError:
            raise DataError(f"{path}, line {number}: it is nested too deeply") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number}: it is not a JSON object")
        yield number, value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that stands there twice: the last would win."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} stands there twice")
    return result


def audio_files(name: str, option: str) -> list[Path]:
    """The file, or those of the folder and the folders in it, sorted. Raises DataError, naming `option`, for none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{option} = {name}: there is no such file or folder")
    files = [Path(file) for file in files_ending(path, AUDIO)]
    if not files:
        raise DataError(f"{option} = {name}: this folder holds no audio ({' '.join(AUDIO)})")
    return files
