"""Speech with transcripts from LibriSpeech, spoken digits, tables or the hub.

All audio is resampled to one rate. Headers show most unusable audio before training. No function draws from a global
generator.
"""

import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from crt_exp.experiments.data import DataError, Folder, numbered_lines
from crt_exp.experiments.data.files import AUDIO, check_cells, files_ending, read_text_table
from crt_exp.experiments.data.sources import Hub, load_rows, missing_file, reason_of, task_folder

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = "speech/free-spoken-digit-dataset"
SPLITS = {
    "test": range(5),
    "validation": range(5, 8),
    "train": range(8, 50),
}  # indices; test is the official test set
LENGTHS = range(3, 9)  # digits per string
GAPS = (0.02, 0.2)  # smallest and largest silence between digits, in seconds
TRANSCRIPTS = ".trans.txt"
SHORTEST = 0.1  # seconds; leaves one encoder frame after a change of speed
LOUDEST = 2  # largest sample; lossy formats slightly exceed [-1, 1]
ENDLESS = 0x7F000000  # bytes; files from a pipe state larger sizes
SIZES = re.compile(
    r"^\s*(?:data|SSND|BODY|Data Size|Data length)\s*:? (\d+) \(?should be (\d+)", re.M
)  # stated and present, as in libsndfile's log of a header


class AudioPart(NamedTuple):
    """Name and length (by its header) of a file, and its content if in memory."""

    name: str
    seconds: float
    content: Callable[[], bytes] | None = None


class Utterance(NamedTuple):
    """Transcript and audio: parts in sequence, with silences (gaps) between."""

    name: str
    text: str
    parts: tuple[AudioPart, ...]
    gaps: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts) + sum(self.gaps)


# ---- files -------------------------------------------------------------------------------------------------


def audio_files(name: str | Path, option: str, others: tuple[str, ...] = ()) -> list[Path]:
    """The audio file, or all visible ones in the folder, sorted.

    others: further endings of files to list. Raises DataError, naming `option`, if there is no audio.
    """
    path = Path(name).expanduser()
    files = [path]
    if not path.is_file():
        files = files_ending(path, (*AUDIO, *others))
    if all(file.name.lower().endswith(others) for file in files):
        raise DataError(
            f"{option}={name}: expected an audio file, or a folder of audio files ({' '.join(AUDIO)})"
        )
    return files


def read_librispeech(subsets: Sequence[str], data_dir: Folder) -> Iterator[Utterance]:
    """Yield sorted utterances of subsets in LibriSpeech's layout.

    The layout is <subset>/<speaker>/<chapter>/*.flac with *.trans.txt. Raises DataError for a missing or empty subset,
    and for a transcript without audio.
    """
    root = task_folder("speech/LibriSpeech", data_dir)
    for subset in subsets:
        if root is None or not (root / subset).is_dir():
            where = root or "CRT_DATA, which is not set"
            raise DataError(
                f"task.subsets: {subset} is missing in {where}; run `python -m crt_exp data fetch "
                f"speech/LibriSpeech/{subset}`"
            )
        audio: dict[Path, Path] = {}
        texts: dict[Path, str] = {}
        for path in audio_files(root / subset, "task.data_dir", (TRANSCRIPTS,)):
            if not path.name.lower().endswith(TRANSCRIPTS):
                audio[path.with_suffix("")] = path
                continue
            for _, line in numbered_lines(path):
                name, _, text = line.strip().partition(" ")
                if name:
                    texts[path.parent / name] = text
        for name in texts.keys() - audio.keys():
            raise DataError(f"{name}: a transcript without audio beside it")
        for name in sorted(audio, key=lambda name: name.name):
            yield utterance_of(audio_part(str(audio[name])), texts.get(name))


def utterance_of(part: AudioPart, text: str | None) -> Utterance:
    """Utterance of one file; raises DataError if it has no transcript."""
    words = (text or "").split()
    if not words:
        raise DataError(f"{part.name}: no transcript")
    return Utterance(Path(part.name).stem, " ".join(words), (part,))


def table_utterances(path: str | Path, split: str) -> Iterator[Utterance]:
    """Utterances of one split of your own table."""
    table = read_table(Path(path).expanduser())
    for audio, text in table[table.split == split][["audio", "text"]].itertuples(index=False):
        yield utterance_of(audio_part(audio), text)


def read_table(path: Path):
    """Read a table as a data frame of audio, text and split.

    audio: path relative to the table's folder. Without a column split, a hash of the path assigns 10% each to
    validation and test. Raises DataError.
    """
    cells = read_text_table(path, str(path))
    check_cells(cells, ["audio", "text"], str(path))
    broken = cells.text.str.contains("\n")
    if broken.any():
        raise DataError(
            f"{path}, row {broken.idxmax()}: expected one line of text; check its quotes"
        )
    if "split" not in cells:
        cells["split"] = [
            by_hash(os.path.relpath(path.parent / name, path.parent)) for name in cells.audio
        ]
    if wrong := sorted(set(cells.split) - SPLITS.keys()):
        raise DataError(
            f"{path}: split={wrong[0]!r}: expected {', '.join(SPLITS)} in each row, or no split column"
        )
    cells["audio"] = [str(path.parent / name) for name in cells.audio]
    check_disjoint(zip(cells.audio, cells.split), str(path))
    return cells


def check_disjoint(files: Iterable[tuple[str, str]], where: str) -> None:
    """Raise DataError if a file is in two splits; files: path and split of each."""
    splits = {}
    for path, split in files:
        earlier = splits.setdefault(os.path.realpath(path), split)
        if split != earlier:
            raise DataError(
                f"{where}: the recording {path} is in {split} and in {earlier}; expected one split "
                "for each recording"
            )


def by_hash(name: str) -> str:
    """Split of a name by its hash, independent of other rows."""
    place = int(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8], 16) % 10
    return {0: "validation", 1: "test"}.get(place, "train")


# ---- spoken digits -----------------------------------------------------------------------------------------


def read_recordings(data_dir: Folder) -> list[AudioPart]:
    """Sorted files `<digit>_<speaker>_<index>.wav`; raises DataError for others."""
    folder = task_folder(f"{DIGITS}/recordings", data_dir)
    if folder is None or not folder.is_dir():
        raise missing_file(DIGITS, folder)
    files = audio_files(folder, "task.data_dir")
    if wrong := [path for path in files if not re.fullmatch(r"\d_[a-z]+_\d+", path.stem)]:
        raise DataError(
            f"{wrong[0]}: expected a name like <digit>_<speaker>_<index>.wav; remove the file"
        )
    return [audio_part(str(path)) for path in files]


def digit_strings(every: list[AudioPart], split: str, count: int) -> list[Utterance]:
    """`count` fixed strings of 3 to 8 digits by one speaker each, with short silences.

    Recordings 0 to 4 form test strings, 5 to 7 validation strings, others training strings. Raises DataError if there
    are none.
    """
    speakers: dict[str, list[tuple[str, AudioPart]]] = {}
    for part in every:
        digit, speaker, index = Path(part.name).stem.split("_")
        if int(index) in SPLITS[split]:
            speakers.setdefault(speaker, []).append((WORDS[int(digit)], part))
    if not speakers:
        raise DataError(
            f"{split}: expected recordings of digits with indices {list(SPLITS[split])}"
        )
    result = []
    for i in range(count):
        rng = np.random.default_rng([list(SPLITS).index(split), i])
        speaker = sorted(speakers)[rng.integers(len(speakers))]
        own = speakers[speaker]
        words, parts = zip(*(own[j] for j in rng.integers(len(own), size=rng.choice(LENGTHS))))
        gaps = tuple(rng.uniform(*GAPS, size=len(parts) - 1).round(3).tolist())
        result.append(Utterance(f"{split}-{i}-{speaker}", " ".join(words), parts, gaps))
    return result


# ---- the hub -----------------------------------------------------------------------------------------------


class SpeechHub(Hub):
    """Splits and columns (audio, transcript) of a Hugging Face data set."""

    train: str
    validation: str
    test: str
    audio: str
    text: str


def hub_utterances(hub: SpeechHub, split: str) -> Iterator[Utterance]:
    """Utterances of a hub split, downloaded once by `datasets`. Raises DataError."""
    from datasets import Audio

    rows = load_rows(hub, hub[split], ("audio", "text"))
    try:
        rows = rows.cast_column(hub["audio"], Audio(decode=False))
    except Exception as error:  # of pyarrow
        raise DataError(
            f"{hub['name']}: column {hub['audio']} is not audio ({reason_of(error)})"
        ) from None
    for i, row in enumerate(rows):
        audio = row[hub["audio"]] or {}
        in_memory = audio.get("bytes")
        part = audio_part(audio.get("path") or f"row-{i}", in_memory)
        if in_memory is not None:
            part = part._replace(content=partial(content_of, rows, i, hub["audio"]))
        yield utterance_of(part, row[hub["text"]])


def content_of(rows: Any, i: int, column: str) -> bytes:
    return rows[i][column]["bytes"]


# ---- audio -------------------------------------------------------------------------------------------------


def audio_part(name: str, content: bytes | None = None) -> AudioPart:
    """A whole file with its length by the header, from its content if given.

    Raises DataError for invalid, truncated or too short audio.
    Headers of compressed audio do not tell that audio is truncated; `decode_audio` does.
    """
    import soundfile

    try:
        with soundfile.SoundFile(name if content is None else io.BytesIO(content)) as stream:
            for stated, present in SIZES.findall(stream.extra_info):
                if int(present) < int(stated) < ENDLESS:
                    raise DataError(f"{name}: truncated: {present} of {stated} bytes of audio")
            part = AudioPart(name, stream.frames / stream.samplerate)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise DataError(f"{name}: not readable: {error}") from None
    if part.seconds < SHORTEST:
        raise DataError(f"{name}: {part.seconds:.3f} s, expected at least {SHORTEST} s")
    return part


def decode_audio(part: AudioPart, rate: int) -> np.ndarray:
    """Mono audio (samples,) float32 at `rate`; channels are averaged.

    Raises DataError for unreadable or truncated audio.
    """
    import soundfile

    try:
        source = part.name if part.content is None else io.BytesIO(part.content())
        audio, own = soundfile.read(source, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise DataError(f"{part.name}: not readable: {error}") from None
    if len(audio) < round(part.seconds * own):
        raise DataError(f"{part.name}: truncated: {len(audio) / own:.3f} of {part.seconds:.3f} s")
    peak = np.abs(audio).max()
    if not peak <= LOUDEST:
        raise DataError(
            f"{part.name}: samples up to {peak:g}; expected -1 to 1; divide 16-bit numbers by 32768"
        )
    return resample(audio.mean(1), own, rate)


def resample(audio: np.ndarray, own: int, rate: int) -> np.ndarray:
    from scipy.signal import resample_poly

    return audio if own == rate else resample_poly(audio, rate, own).astype(np.float32)


def audio_of(utterance: Utterance, rate: int, speed: float = 1.0) -> np.ndarray:
    """Audio of an utterance, (samples,) float32.

    speed: 1.1 is 10% faster and higher in pitch. Raises DataError, naming the file.
    """
    pieces = []
    for i, part in enumerate(utterance.parts):
        gap = utterance.gaps[i] if i < len(utterance.gaps) else 0
        pieces += [decode_audio(part, rate), np.zeros(round(gap * rate), np.float32)]
    return resample(np.concatenate(pieces), round(rate * speed), rate)


def as_int16(audio: np.ndarray) -> np.ndarray:
    return (audio.clip(-1, 1 - 2**-15) * 2**15).round().astype(np.int16)


def pad_audio(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Stack rows into (B, longest), padded with zeros."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)


def random_intervals(rng: np.random.Generator, count: int, share: float, length: int) -> np.ndarray:
    """Random intervals (count, 2) int64: first index, last index + 1.

    Each covers at most `share` of the length.
    """
    widths = rng.integers(math.floor(share * length) + 1, size=count)
    starts = rng.integers(length - widths + 1)
    return np.stack([starts, starts + widths], -1)
