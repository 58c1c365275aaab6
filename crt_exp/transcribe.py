"""python -m crt_exp.transcribe run=DIR input=FILE_OR_FOLDER: what a run of task=librispeech hears in audio.

For each file a line with its name, length and text, and one with the symbols and the seconds at which each was said.
Audio of any rate is resampled. Long audio is heard in segments of at most segment=20 seconds, cut where it is quietest,
so that memory does not grow with its length. What cannot be heard is named and counted at the end; exit code 2.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import nn

from crt_exp.arguments import read
from crt_exp.config import own_names
from crt_exp.data import DataError, speech_table
from crt_exp.data.speech import SHORTEST, BadAudio, AudioPart, as_int16, decoded, padded, seconds_of
from crt_exp.hints import at_least
from crt_exp.models import recogniser
from crt_exp.models.conformer_transducer import STEP, greedy
from crt_exp.models.recogniser import Recogniser

BLOCK = 0.02       # seconds over which loudness is measured
TOGETHER = 8       # segments that are heard at once


@dataclass(frozen=True)
class TranscribeOptions:
    """segment: seconds of audio that are heard at once. names: a folder of your own names, the --config-dir of that
    run."""

    run: str
    input: str
    segment: Annotated[float, at_least(1)] = 20.0
    names: str | None = None


class Said(NamedTuple):
    """A symbol and the seconds from the start of the file at which it was said."""

    symbol: str
    at: float


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        sys.exit(0 if arguments else 2)
    try:
        with torch.no_grad():
            code = transcribe(read(TranscribeOptions, arguments))
    except (ValueError, OSError, DataError) as error:
        print(f"crt_exp.transcribe: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def transcribe(options: TranscribeOptions) -> int:
    """Prints what is heard in each file; 2 where some could not be read, which are named and counted."""
    files = speech_table.audio_files(options.input, "input")
    with own_names([options.names] if options.names else []):
        known, tensors = recogniser.load(options.run, "run")
    model, bad = recogniser.load_whole(known, tensors, f"run = {options.run}"), []
    for file in files:
        try:
            audio = heard(file, known.rate)
        except BadAudio as error:
            bad.append(f"{file}: {error}")
            continue
        text, said = recognised(model, known, audio, options.segment)
        print(f"{file} ({len(audio) / known.rate:.1f} s): {text}")
        print("  " + "  ".join(f"{each.at:.2f} {each.symbol}" for each in said))
    if bad:
        lines = "\n".join(f"  {line}" for line in bad)
        print(f"crt_exp.transcribe: {len(bad)} of {len(files)} files cannot be heard:\n{lines}", file=sys.stderr)
    return 2 if bad else 0


def heard(file: Path, rate: int) -> np.ndarray:
    """(samples,) int16. Raises BadAudio, for audio too short to hold speech too."""
    seconds = seconds_of(file)
    if seconds < SHORTEST:
        raise BadAudio(f"{seconds:.3f} s are too short: speech takes at least {SHORTEST} s")
    return as_int16(decoded(AudioPart(str(file), seconds), rate))


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
