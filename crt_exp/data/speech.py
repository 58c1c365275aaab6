"""Speech with transcripts: LibriSpeech's layout, strings of spoken digits, sets of the hub; audio at one rate.

What cannot be used is known before training where a header says so, named and counted, and an error unless the caller
leaves it out. Nothing here draws from a global generator.
"""

import contextlib
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from crt_exp.data import DataError, check_regular
from crt_exp.data.cache import warn
from crt_exp.data.endings import AUDIO, files_ending
from crt_exp.data.hub import Hub, hub_examples
from crt_exp.data.sources import SOURCES, missing, task_folder
from crt_exp.data.text import numbered_lines

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = "speech/free-spoken-digit-dataset"
SPLITS = {"test": range(5), "validation": range(5, 8), "train": range(8, 50)}  # 0 to 4 are the official test set
LENGTHS = range(3, 9)              # digits of a string
GAPS = (0.02, 0.2)                 # seconds between them, at least and at most
SHORTEST = 0.1                     # seconds, of which a frame of the encoder is left after a change of speed
RATES = (1000, 768_000)            # Hz of audio that is read
LOUDEST = 2                        # of samples from -1 to 1, which decoders of lossy formats exceed a little
UNKNOWN = (2**31, 2**32)           # bytes, about: written in the header of a WAV whose end was not known, as of a pipe
FINEST = 10_000                    # denominator of a ratio of rates: within a ten-thousandth, and at most 320,001 taps


class AudioPart(NamedTuple):
    """A piece of audio: a file, or the content of one with its name, and its length by its header."""

    name: str
    seconds: float
    content: bytes | None = None


class Utterance(NamedTuple):
    """Audio with its transcript: parts one after another, with a silence after each but the last."""

    name: str
    text: str
    parts: tuple[AudioPart, ...]
    gaps: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts) + sum(self.gaps)


class BadAudio(ValueError):
    """Audio that cannot be read; the message says why, the caller whose it is."""


class Faults:
    """What cannot be used, collected and reported at once: as an error, or with `skip` left out and said."""

    def __init__(self, bad: Literal["error", "skip"], what: str):
        self.bad, self.what, self.noted = bad, what, []

    def add(self, place: str, reason: str) -> None:
        self.noted.append(f"{place}: {reason}")

    def settle(self, left: int) -> None:
        """Raises DataError where anything was noted that is not left out, or where nothing is left."""
        if not self.noted and left == 0:
            raise DataError(f"{self.what}: there are none. Training, validation and test each need some; in a table of "
                            "your own the column split says which are which")
        if not self.noted:
            return
        more = [f"and {len(self.noted) - 3} more"] if len(self.noted) > 3 else []
        shown = "\n".join(f"  {line}" for line in self.noted[:3] + more)
        said = f"{self.what}: {len(self.noted)} cannot be used"
        if self.bad == "error":
            raise DataError(f"{said}:\n{shown}\nMend or remove them, or leave them out with task.bad=skip.")
        if left == 0:
            raise DataError(f"{said}, and nothing is left:\n{shown}")
        warn("%s and are left out, %s stay:\n%s", said, left, shown)


# ---- LibriSpeech -------------------------------------------------------------------------------------------


def official(subsets: Sequence[str], data_dir: str | None, faults: Faults) -> list[Utterance]:
    """The utterances of subsets in the official layout, <subset>/<speaker>/<chapter>/*.flac with *.trans.txt, sorted.

    Raises DataError for a subset that is not there or holds nothing.
    """
    return [utterance for subset in subsets for utterance in subset_utterances(subset, data_dir, faults)]


def subset_utterances(subset: str, data_dir: str | None, faults: Faults) -> Iterator[Utterance]:
    folder = subset_folder(subset, data_dir)
    audio, texts = {}, {}
    files = (path for path in folder.glob("*/*/*") if not path.name.endswith(".trans.txt"))
    for path in map(Path, files_ending(folder, AUDIO, files)):
        if audio.setdefault(path.stem, path) != path:
            faults.add(str(path), f"{audio[path.stem]} has the same name")
    for path in map(Path, files_ending(folder, (".txt",), folder.glob("*/*/*.trans.txt"))):
        for name, entry in transcripts(path):
            if texts.setdefault(name, entry) != entry:
                faults.add(entry[0], f"{name} has another transcript already, {texts[name][0]}")
    if not audio and not texts:
        raise DataError(f"{folder} holds no <speaker>/<chapter>/ with .flac files and a .trans.txt")
    for name in sorted(audio.keys() - texts.keys()):
        faults.add(str(audio[name]), "no transcript")
    for name, (place, text) in sorted(texts.items()):
        if name not in audio:
            faults.add(place, f"{name} has no audio next to it")
        elif not text:
            faults.add(place, f"{name} has an empty transcript")
        elif part := header(audio[name], faults):
            yield Utterance(name, text, (part,))


def subset_folder(subset: str, data_dir: str | None) -> Path:
    root = task_folder("speech/LibriSpeech", data_dir)
    if root is not None and (root / subset).is_dir():
        return root / subset
    if (source := f"speech/LibriSpeech/{subset}") not in SOURCES:
        known = ", ".join(name.rsplit("/", 1)[-1] for name in SOURCES if name.startswith("speech/LibriSpeech/"))
        raise DataError(f"there is no subset {subset!r} in {root or 'LibriSpeech (CRT_DATA is not set)'}. LibriSpeech "
                        f"has {known}; one of your own has .flac files and a .trans.txt in <speaker>/<chapter>/")
    raise missing(source, root / subset if root else None)


def transcripts(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name, and place and text, of each line; words are joined by single spaces."""
    for number, line in numbered_lines(path):
        name, _, text = line.strip().partition(" ")
        if name:
            yield name, (f"{path}, line {number}", " ".join(text.split()))


def header(path: Path, faults: Faults) -> AudioPart | None:
    """The length of a file by its header; None, and noted, where it cannot be read."""
    try:
        return AudioPart(str(path), seconds_of(path))
    except BadAudio as error:
        faults.add(str(path), str(error))
        return None


# ---- spoken digits -----------------------------------------------------------------------------------------


class Recording(NamedTuple):
    digit: int
    speaker: str
    index: int
    part: AudioPart


def recordings(data_dir: str | None, faults: Faults) -> list[Recording]:
    """The files `<digit>_<speaker>_<index>.wav`, sorted. Raises DataError where there are none."""
    folder = task_folder(f"{DIGITS}/recordings", data_dir)
    if folder is None or not folder.is_dir():
        raise missing(DIGITS, folder)
    result = []
    for path in map(Path, files_ending(folder, AUDIO, folder.iterdir())):
        named = re.fullmatch(r"(\d)_([a-z]+)_(\d+)", path.stem)
        if named is None:
            faults.add(str(path), "its name is not <digit>_<speaker>_<index>.wav")
        elif part := header(path, faults):
            result.append(Recording(int(named[1]), named[2], int(named[3]), part))
    if not result:
        raise DataError(f"{folder} holds no <digit>_<speaker>_<index>.wav")
    return result


def digit_strings(every: list[Recording], split: str, count: int,
                  held_out_speaker: str | None = None) -> list[Utterance]:
    """`count` strings of 3 to 8 digits, each of one speaker, with short silences between; always the same ones.

    Recordings 0 to 4 make the test strings, 5 to 7 those for validation, the others those for training. With a held-out
    speaker all recordings of that one make the test strings, and none of them any other. Raises DataError where there
    are none.
    """
    speakers = sorted({each.speaker for each in every})
    if held_out_speaker not in (None, *speakers):
        raise DataError(f"task.held_out_speaker = {held_out_speaker}: the recordings are of {', '.join(speakers)}")
    test = split == "test" and held_out_speaker is not None
    own = [each for each in every if (each.speaker == held_out_speaker) == test]
    wanted = [each for each in own if test or each.index in SPLITS[split]]
    if not wanted:
        first, last = SPLITS[split][0], SPLITS[split][-1]
        raise DataError(f"no recordings for {split}: it takes those with the indices {first} to {last}")
    own = [[each for each in wanted if each.speaker == speaker] for speaker in speakers]
    rngs = (np.random.default_rng([list(SPLITS).index(split), i]) for i in range(count))
    return [joined(list(filter(None, own)), f"{split}-{i}", rng) for i, rng in enumerate(rngs)]


def joined(speakers: list[list[Recording]], name: str, rng: np.random.Generator) -> Utterance:
    own = speakers[rng.integers(len(speakers))]
    chosen = [own[i] for i in rng.integers(len(own), size=rng.choice(LENGTHS))]
    gaps = tuple(rng.uniform(*GAPS, size=len(chosen) - 1).round(3).tolist())
    text = " ".join(WORDS[each.digit] for each in chosen)
    return Utterance(f"{name}-{own[0].speaker}", text, tuple(each.part for each in chosen), gaps)


# ---- the hub -----------------------------------------------------------------------------------------------


class SpeechHub(Hub):
    """The columns of audio and transcripts."""

    audio: str
    text: str


def hub_utterances(hub: SpeechHub, split: str, faults: Faults, rank: int = 0, buffer: int = 0,
                   **order: Any) -> Callable[[int], Iterator[Utterance]]:
    """Passes over a split, streamed; rank, buffer, order: see `hub_examples`. soundfile reads audio from the bytes when
    it is needed. Raises DataError where the set cannot be had or lacks a column.
    """
    name, audio, text = hub["name"], hub["audio"], hub["text"]

    def prepared(stream: Any) -> Any:
        from datasets import Audio

        columns = stream.column_names or []
        for column in (audio, text):
            if columns and column not in columns:
                raise DataError(f"{name} has no column {column!r}; it has {', '.join(columns)}.")
        return stream.cast_column(audio, Audio(decode=False))

    examples = hub_examples(hub, split, rank, buffer=buffer, prepared=prepared,
                            otherwise="Or give files: task.source=files task.data_dir=DIR.", **order)

    def utterances(epoch: int) -> Iterator[Utterance]:
        for i, row in enumerate(examples(epoch)):
            if utterance := row_utterance(row[audio], row[text], f"{name}, {split}, row {i} of process {rank}", faults):
                yield utterance

    return utterances


def row_utterance(audio: dict[str, Any], text: str | None, place: str, faults: Faults) -> Utterance | None:
    name, text = audio.get("path") or place, " ".join((text or "").split())
    content = audio.get("bytes")
    if not text:
        return faults.add(f"{place} ({name})", "an empty transcript")
    try:
        content = Path(name).read_bytes() if content is None else content
        return Utterance(Path(name).stem, text, (AudioPart(name, seconds_of(io.BytesIO(content)), content),))
    except (BadAudio, OSError) as error:
        return faults.add(f"{place} ({name})", str(error))


# ---- audio -------------------------------------------------------------------------------------------------


def seconds_of(source: Path | io.BytesIO) -> float:
    """By the header. Raises BadAudio for what is no audio or has none, for a file that is shorter or longer than its
    header says, and for a rate out of RATES."""
    import soundfile

    try:
        if isinstance(source, Path):
            check_regular(source, least=1)
        info = soundfile.info(source, verbose=True)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        raise BadAudio(f"cannot be read ({reason(error)})") from None
    cut = re.search(r"^\s*data\s*: (\d+) \(should be (\d+)\)", info.extra_info, re.M)
    if cut and not any(abs(int(cut[1]) - size) <= 4096 for size in UNKNOWN):
        raise BadAudio(f"is cut off: {cut[2]} of {cut[1]} bytes of audio are there")
    if info.format == "WAV":
        check_wav_end(source, info.samplerate)
    if info.frames == 0:
        raise BadAudio("holds no audio: 0 samples")
    if not RATES[0] <= info.samplerate <= RATES[1]:
        raise BadAudio(f"is at {info.samplerate} Hz: rates from {RATES[0]} to {RATES[1]} Hz are taken")
    return info.frames / info.samplerate


def check_wav_end(source: Path | io.BytesIO, rate: int) -> None:
    """Raises BadAudio where a tenth of a second or more lies behind what the headers of a WAV file name."""
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as stream:
        size, end, frame = stream.seek(0, io.SEEK_END), 12, 1
        while stream.seek(end) < size and len(chunk := stream.read(8)) == 8 and chunk[:4].strip().isalnum():
            if chunk[:4] == b"fmt ":
                frame = int.from_bytes(stream.read(14)[12:], "little")
            end += 8 + int.from_bytes(chunk[4:], "little") + (chunk[4] & 1)
    if size - end >= SHORTEST * rate * frame:
        raise BadAudio(f"holds {size - end} bytes behind the {end} that its header tells of")


def reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def decoded(part: AudioPart, rate: int) -> np.ndarray:
    """(samples,) float32 at `rate`, channels averaged. Raises BadAudio, also where it ends before its header says."""
    import soundfile

    source = Path(part.name) if part.content is None else io.BytesIO(part.content)
    try:
        with soundfile.SoundFile(source) as file:
            own, wanted, whole = file.samplerate, file.frames, file.format == "FLAC" and file.subtype == "PCM_16"
            audio = file.read(dtype="int16" if whole else "float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise BadAudio(f"cannot be read ({reason(error)})") from None
    if len(audio) < wanted:
        raise BadAudio(f"is cut off: {len(audio)} of {wanted} samples are there")
    if whole:
        check_digest(source, audio)
        audio = audio.astype(np.float32) / 2**15
    if not np.isfinite(audio).all():
        raise BadAudio("holds samples that are not finite")
    if (peak := np.abs(audio).max()) > LOUDEST:
        raise BadAudio(f"holds samples up to {peak:g}, expected -1 to 1: divide numbers of 16 bits by 32768")
    mixed = audio.mean(1)
    if audio.shape[1] > 1:
        warn("audio of %s channels is averaged to one, such as %s", audio.shape[1], part.name)
        if np.abs(mixed).max() < 1e-3 * peak:
            warn("%s: its channels cancel each other out, their average is silent: keep one of them", part.name)
    if own != rate:
        warn("audio at %s Hz is resampled to %s Hz", own, rate)
    return resampled(mixed, own, rate)


def resampled(audio: np.ndarray, own: int, rate: int) -> np.ndarray:
    if own == rate:
        return audio
    from scipy.signal import resample_poly

    ratio = Fraction(rate, own).limit_denominator(FINEST)  # 16000 to 44101 would take a filter of a million taps
    return resample_poly(audio, ratio.numerator, ratio.denominator, window=low_pass(ratio)).astype(np.float32)


@lru_cache(maxsize=16)
def low_pass(ratio: Fraction) -> np.ndarray:
    """Of what both rates can hold; as scipy makes it, once for a ratio."""
    from scipy.signal import firwin

    most = max(ratio.numerator, ratio.denominator)
    return firwin(20 * most + 1, 1 / most, window=("kaiser", 5.0)).astype(np.float32)


def check_digest(source: Path | io.BytesIO, samples: np.ndarray) -> None:
    """Raises BadAudio where the samples (n, channels) int16 of a FLAC file are not those that were packed."""
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as stream:
        stream.seek(0)
        start = stream.read(1 << 16)
    written = start[start.find(b"fLaC") + 26:][:16]
    if any(written) and hashlib.md5(samples.astype("<i2").tobytes()).digest() != written:
        raise BadAudio(f"holds other audio than was packed: its {len(samples)} samples do not have the header's MD5")


def audio_of(utterance: Utterance, rate: int, speed: float = 1.0) -> np.ndarray:
    """(samples,) float32; speed 1.1 is a tenth faster, and higher, as of a tape. Raises BadAudio naming the file."""
    pieces = []
    for i, part in enumerate(utterance.parts):
        try:
            pieces.append(decoded(part, rate))
        except BadAudio as error:
            raise BadAudio(f"{part.name}: {error}") from None
        if i < len(utterance.gaps):
            pieces.append(np.zeros(round(utterance.gaps[i] * rate), np.float32))
    return resampled(np.concatenate(pieces), round(rate * speed), rate)


def as_int16(audio: np.ndarray) -> np.ndarray:
    return (audio.clip(-1, 1 - 2**-15) * 2**15).round().astype(np.int16)


def padded(rows: Sequence[np.ndarray], kind: Any) -> torch.Tensor:
    """(B, longest), with zeros after the shorter ones."""
    out = np.zeros((len(rows), max(map(len, rows))), kind)
    for line, row in zip(out, rows):
        line[:len(row)] = row
    return torch.from_numpy(out)


def usable(utterances: Iterable[Utterance], longest: float, faults: Faults) -> list[Utterance]:
    """Those of an allowed length; the others are noted."""
    kept = []
    for each in utterances:
        if each.seconds > longest:
            faults.add(each.parts[0].name, f"{each.seconds:.1f} s, above task.max_seconds = {longest:g}")
        elif each.seconds < SHORTEST:
            faults.add(each.parts[0].name, f"{each.seconds:.3f} s: speech takes at least {SHORTEST} s")
        else:
            kept.append(each)
    return kept


def rounded_up(seconds: float) -> float:
    """To a quarter of a second: rows change places with those of equal cost, so batches differ between epochs."""
    return math.ceil(4 * seconds) / 4


def stretches(rng: np.random.Generator, count: int, share: float, length: int) -> np.ndarray:
    """(count, 2) int64: stretches of at most `share` of the length, first index and the one after the last."""
    widths = rng.integers(math.floor(share * length) + 1, size=count)
    starts = rng.integers(length - widths + 1)
    return np.stack([starts, starts + widths], -1)
