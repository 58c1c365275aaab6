"""python -m crt_exp.transcribe run=DIR input=FILE_OR_FOLDER: what a run of task=librispeech hears in audio.

For each file a line with its name, length and text, and one with the symbols and the seconds at which each was said.
Audio of any rate is resampled. Long audio is heard in segments of at most segment=20 seconds, cut where it is quietest,
so that memory does not grow with its length. What cannot be heard is named and counted at the end; exit code 2.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from crt_exp.config import ConfigError, unknown
from crt_exp.data import DataError, speech_table
from crt_exp.data.speech import SHORTEST, BadAudio, Part, as_int16, decoded, padded, seconds_of
from crt_exp.models import recogniser
from crt_exp.models.conformer_transducer import STEP, greedy
from crt_exp.models.recogniser import Recogniser

KEYS = ("run", "input", "segment")
BLOCK = 0.02       # seconds over which loudness is measured
TOGETHER = 8       # segments that are heard at once


class Said(NamedTuple):
    """A symbol and the seconds from the start of the file at which it was said."""

    symbol: str
    at: float


def main() -> None:
    try:
        with torch.no_grad():
            code = transcribe(options(sys.argv[1:]))
    except (ValueError, OSError, DataError) as error:
        print(f"crt_exp.transcribe: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def options(arguments: list[str]) -> dict[str, str]:
    """key=value arguments. Raises ConfigError for others and for missing ones."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        print(__doc__)
        sys.exit(0 if arguments else 2)
    given = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in KEYS:
            raise unknown("argument", argument, [f"{name}=..." for name in KEYS])
        if key in given:
            raise ConfigError(f"{key}=... comes twice: give it once")
        given[key] = value
    for key in ("run", "input"):
        if not given.get(key):
            raise ConfigError(f"{key}=... is missing: python -m crt_exp.transcribe run=DIR input=FILE_OR_FOLDER")
    return given


def transcribe(given: dict[str, str]) -> int:
    """Prints what is heard in each file; 2 where some could not be read, which are named and counted."""
    longest, files = segment_length(given.get("segment", "20")), speech_table.audio_files(given["input"], "input")
    known, tensors = recogniser.load(given["run"], "run")
    model, bad = recogniser.load_whole(known, tensors, f"run = {given['run']}"), []
    for file in files:
        try:
            audio = heard(file, known.rate)
        except BadAudio as error:
            bad.append(f"{file}: {error}")
            continue
        text, said = recognised(model, known, audio, longest)
        print(f"{file} ({len(audio) / known.rate:.1f} s): {text}")
        print("  " + "  ".join(f"{each.at:.2f} {each.symbol}" for each in said))
    if bad:
        lines = "\n".join(f"  {line}" for line in bad)
        print(f"crt_exp.transcribe: {len(bad)} of {len(files)} files cannot be heard:\n{lines}", file=sys.stderr)
    return 2 if bad else 0


def segment_length(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise ConfigError(f"segment = {text}: it takes a number of seconds of at least 1")
    return seconds


def heard(file: Path, rate: int) -> np.ndarray:
    """(samples,) int16. Raises BadAudio, for audio too short to hold speech too."""
    seconds = seconds_of(file)
    if seconds < SHORTEST:
        raise BadAudio(f"{seconds:.3f} s are too short: speech takes at least {SHORTEST} s")
    return as_int16(decoded(Part(str(file), seconds), rate))


def recognised(model: nn.Module, known: Recogniser, audio: np.ndarray, longest: float) -> tuple[str, list[Said]]:
    """The text, and its symbols with their times."""
    texts, said = [], []
    cuts = list(segments(audio, known.rate, longest))
    for first in range(0, len(cuts), TOGETHER):
        part = cuts[first:first + TOGETHER]
        samples = torch.tensor([end - start for start, end in part])
        _, hypotheses = model(padded([audio[start:end] for start, end in part], np.int16), samples, search=greedy)
        for (start, _), hypothesis in zip(part, hypotheses):
            texts.append(known.symbols.decode(hypothesis.symbols))
            said += [Said(shown(known.symbols.entries[symbol]), start / known.rate + frame * STEP)
                     for symbol, frame in zip(hypothesis.symbols, hypothesis.frames)]
    return " ".join(filter(None, texts)), said


def shown(symbol: str) -> str:
    return "_" if symbol == " " else symbol


def segments(audio: np.ndarray, rate: int, longest: float) -> Iterator[tuple[int, int]]:
    """First sample and the one after the last of each: a segment ends in the quietest moment of its second half."""
    start, most, least = 0, int(longest * rate), math.ceil(SHORTEST * rate)
    while (left := len(audio) - start) > most:
        end = start + quietest(audio[start:start + min(most, left - least)], rate)
        yield start, end
        start = end
    yield start, len(audio)


def quietest(audio: np.ndarray, rate: int) -> int:
    """The middle of the quietest fifth of a second in the second half."""
    block, half = round(BLOCK * rate), len(audio) // 2
    count = (len(audio) - half) // block
    energy = np.square(audio[half:half + count * block].astype(np.float64)).reshape(count, block).mean(1)
    width = min(10, count)
    around = np.convolve(energy, np.ones(width) / width, "valid")
    return half + (int(around.argmin()) + width // 2) * block


if __name__ == "__main__":
    main()
