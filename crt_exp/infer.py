"""python -m crt_exp.infer run=DIR [key=value ...]: use the model that a run has trained. The run's task decides.

imagenet                the five likeliest classes of input=, an image or a folder of images
librispeech             the text in input=, an audio file or a folder, and the second at which each symbol was said;
                        long audio is cut where it is quietest
trembl, books, pixels   sequences that the model generates

Exit code 2: a mistake, which is printed, or files that could not be read.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp import drawing
from crt_exp.options import Count, NotNegative, Whole, check, describe, format_value, parameters, parse_arguments
from crt_exp.config import ConfigError, own_names
from crt_exp.data import DataError, image_values, images, speech_table
from crt_exp.data.speech import SHORTEST, AudioPart, BadAudio, as_int16, decoded, padded, seconds_of
from crt_exp.models import language, recogniser, vision
from crt_exp.models.conformer_transducer import STEP, greedy
from crt_exp.models.folder import description_in, folder_of
from crt_exp.models.generation import TokenChoice, generate
from crt_exp.features.nonfinite import NotFinite
from crt_exp.atomic_write import whole

LIKELIEST, IMAGES_AT_ONCE = 5, 16              # classes of an image; images in a batch
SEGMENTS_AT_ONCE, BLOCK = 8, 0.02            # of audio; seconds over which loudness is measured
SMALLEST_SIDE = 96                           # pixels that a generated image has at least, about

WORDS = {"run": "directory of the run", "names": "folder of your own names, the --config-dir of that run",
         "input": "file, or a folder of files", "size": "pixels of a side, where they differ from the run's",
         "segment": "seconds of audio that are heard at once",
         "prompt": "what each sequence begins with; for pixels an image, to complete",
         "known": "share of the rows of that image that are given, from the top", "n": "sequences",
         "length": "symbols of a sequence, with the prompt; null: what the model was trained for",
         "temperature": "1: the model's own probabilities; 0: always the most likely symbol",
         "top_k": "of the k most likely symbols", "top_p": "of the fewest symbols with this probability together",
         "seed": "of the first sequence; the others count on from it", "batch": "sequences at once",
         "device": "such as cpu or cuda", "output": "file to write, FASTA, text or PNG; null: print"}


@dataclass(frozen=True)
class ImageOptions:
    run: str
    input: str
    size: Annotated[int, Field(ge=1, le=2**12)] | None = None     # beyond, positions fill the memory
    names: str | None = None


@dataclass(frozen=True)
class AudioOptions:
    run: str
    input: str
    segment: Annotated[float, Field(ge=1)] = 20.0
    names: str | None = None


@dataclass(frozen=True)
class SequenceOptions:
    run: str
    prompt: str = ""
    known: Annotated[float, Field(gt=0, lt=1)] = 0.5
    n: Count = 1
    length: Count | None = None
    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    batch: Count = 16
    device: str = "cpu"
    output: str | None = None
    names: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"--help", "-h"} & set(arguments):
        print(usage())
        return 0 if arguments else 2
    try:
        with torch.no_grad():
            return infer(arguments)
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"crt_exp.infer: error: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    lines = [__doc__]
    for kind, (options, _) in KINDS.items():
        lines.append(f"keys of {kind}:")
        lines += [f"  {key:12} {WORDS[key]} ({describe(each.hint)})" for key, each in parameters(options).items()]
    return "\n".join(lines)


def infer(arguments: list[str]) -> int:
    """Raises ConfigError and DataError."""
    run = next((word.removeprefix("run=") for word in arguments if word.startswith("run=")), "")
    if not run:
        raise ConfigError("run=... is missing: it takes the directory of a run")
    kind, call = KINDS[kind_of(run)]
    options = parse_arguments(kind, arguments)
    return call(options) or 0


def kind_of(run: str) -> str:
    """What the model of a run works on. Raises DataError where it is none of KINDS."""
    folder = folder_of(run, "run", "the directory of a run of task=imagenet, librispeech, trembl, books or pixels")
    described = description_in(folder, f"run = {run}")
    kinds = {recogniser.KIND: "audio", language.KIND: "sequences"}
    kind = "images" if "architecture" in described else kinds.get(str(described.get("kind")))
    if kind is None:
        raise DataError(f"run = {run} is a run of another task: {folder} describes no model of imagenet, librispeech, "
                        "trembl, books or pixels")
    return kind


# ---- images ----------------------------------------------------------------------------------------------------------


class ImageInput(NamedTuple):
    """An image as the model takes it, (3, H, W)."""

    name: str
    tensor: Tensor


def classify(options: ImageOptions) -> None:
    with own_names([options.names] if options.names else []):
        kept = vision.load(options.run, options.size)
    files = image_files(Path(options.input).expanduser())
    results = []
    for at in range(0, len(files), IMAGES_AT_ONCE):
        results += classified(kept, list(readable(files[at:at + IMAGES_AT_ONCE], kept, alone=len(files) == 1)))
    if not results:
        raise DataError(f"none of the {len(files)} files of {options.input} can be read as an image")
    print(drawing.markdown(["image", *(f"{place}." for place in range(1, 1 + len(results[0][1])))],
                           [[name, *(f"{label} {share:.3f}" for label, share in likely)] for name, likely in results]),
          end="")


def image_files(place: Path) -> list[Path]:
    """The image itself, or all images below the folder, in the order of their names. Raises DataError for none."""
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise DataError(f"input={place}: there is no such file or folder")
    files = sorted(place / name for name in images.image_files(place))
    if not files:
        raise DataError(f"input={place}: this folder holds no image ({' '.join(images.endings())})")
    return files


def readable(files: Sequence[Path], kept: vision.KeptClassifier, alone: bool) -> Iterator[ImageInput]:
    """Those that are images; in a folder the others are named and left out."""
    for file in files:
        try:
            yield ImageInput(str(file), kept.transform(images.read(file)))
        except images.Unreadable as error:
            if alone:
                raise
            print(f"crt_exp.infer: left out: {error}", file=sys.stderr)


def classified(kept: vision.KeptClassifier, inputs: Sequence[ImageInput]) -> list[tuple[str, list[tuple[str, float]]]]:
    """The name of each image, and its likeliest classes with their probabilities."""
    if not inputs:
        return []
    shares = kept.model(torch.stack([each.tensor for each in inputs])).float().softmax(-1)
    if not bool(shares.isfinite().all()):
        raise NotFinite(f"{inputs[int((~shares.isfinite()).any(-1).nonzero()[0])].name}: the model's outputs are not "
                        "finite")
    best = shares.topk(min(LIKELIEST, len(kept.classes)))
    return [(each.name, [(kept.classes[i], share) for i, share in zip(classes, shares)])
            for each, classes, shares in zip(inputs, best.indices.tolist(), best.values.tolist())]


# ---- audio -----------------------------------------------------------------------------------------------------------


def transcribe(options: AudioOptions) -> int:
    """Prints what is heard in each file; 2 where some could not be read, which are named and counted."""
    files = speech_table.audio_files(options.input, "input")
    with own_names([options.names] if options.names else []):
        known, tensors = recogniser.load(options.run, "run")
    model, bad = recogniser.load_whole(known, tensors, f"run = {options.run}"), []
    for file in files:
        try:
            audio = audio_of(file, known.rate)
        except BadAudio as error:
            bad.append(f"  {file}: {error}")
            continue
        text, symbols = recognised(model, known, audio, options.segment)
        print(f"{file} ({len(audio) / known.rate:.1f} s): {text}")
        print("  " + "  ".join(f"{at:.2f} {'_' if symbol == ' ' else symbol}" for symbol, at in symbols))
    if bad:
        print(f"crt_exp.infer: {len(bad)} of {len(files)} files cannot be heard:", *bad, sep="\n", file=sys.stderr)
    return 2 if bad else 0


def audio_of(file: Path, rate: int) -> np.ndarray:
    """(samples,) int16. Raises BadAudio, for audio too short to hold speech too."""
    seconds = seconds_of(file)
    if seconds < SHORTEST:
        raise BadAudio(f"{seconds:.3f} s are too short: speech takes at least {SHORTEST} s")
    return as_int16(decoded(AudioPart(str(file), seconds), rate))


def recognised(model: nn.Module, known: recogniser.Recogniser, audio: np.ndarray,
               longest: float) -> tuple[str, list[tuple[str, float]]]:
    """The text, and each symbol with the seconds from the start at which it was said."""
    texts, symbols = [], []
    cuts = list(segments(audio, known.rate, longest))
    for first in range(0, len(cuts), SEGMENTS_AT_ONCE):
        part = cuts[first:first + SEGMENTS_AT_ONCE]
        samples = torch.tensor([end - start for start, end in part])
        _, hypotheses = model(padded([audio[start:end] for start, end in part], np.int16), samples, search=greedy)
        for (start, _), hypothesis in zip(part, hypotheses):
            texts.append(known.symbols.decode(hypothesis.symbols))
            symbols += [(known.symbols.entries[symbol], start / known.rate + frame * STEP)
                        for symbol, frame in zip(hypothesis.symbols, hypothesis.frames)]
    return " ".join(filter(None, texts)), symbols


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


# ---- sequences -------------------------------------------------------------------------------------------------------


def sample(options: SequenceOptions) -> None:
    """Generates and writes the sequences."""
    check_device(options.device)
    check_output(options)
    with own_names([options.names] if options.names else []):
        kept = language.load(options.run, "run")
    if not kept.description.causal:
        raise ConfigError(f"run = {options.run} predicts masked symbols (task.direction=bidirectional): sequences are "
                          "drawn from a unidirectional one")
    alphabet = alphabet_of(kept.symbols, options)
    if max(alphabet.begin, alphabet.end or 0, alphabet.symbols - 1) >= kept.description.symbols:
        raise ConfigError(f"run = {options.run}: its vocabulary has more symbols than its model, "
                          f"{kept.description.symbols}")
    given = alphabet.prompt(options.prompt)
    count = checked_length(options, kept.description, alphabet, len(given)) - len(given)
    prompt = torch.tensor([alphabet.begin, *given], device=options.device)
    model = kept.build().to(options.device)
    choice = TokenChoice(options.temperature, options.top_k, options.top_p)
    never = set(range(kept.description.symbols)) - set(range(alphabet.symbols)) - {alphabet.end}
    rows, seeds = [], range(options.seed, options.seed + options.n)
    for first in range(0, options.n, options.batch):
        rows += generate(model, prompt, count, choice, seeds[first:first + options.batch], never=never,
                         end=alphabet.end)
    alphabet.write([[*given, *row] for row in rows], options)


def check_device(name: str) -> None:
    """Raises ConfigError for what is no device, or is not there."""
    try:
        torch.empty(1, device=name).add(1).cpu()
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without the device
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"device = {name}: it takes a device that is there, such as cpu or cuda: {reason}") from None


def check_output(options: SequenceOptions) -> None:
    """Raises ConfigError where the file to write is one that is read, by whatever name."""
    given = options.run, options.output or "", options.prompt
    run, output, prompt = (Path(os.path.expanduser(text)) for text in given)
    kept = [file for file in run.rglob("*") if file.suffix in (".safetensors", ".json", ".yaml")]
    for path in (prompt, *kept) if output.is_file() else ():
        if os.path.exists(path) and os.path.samefile(path, output):
            raise ConfigError(f"output = {options.output}: this command reads that file, {path}; give another name")


def checked_length(options: SequenceOptions, description: language.LanguageDescription, alphabet: Any,
                   given: int) -> int:
    """Symbols of a sequence. Raises ConfigError where the model has no positions for them, or the prompt no room."""
    length = description.length if options.length is None else options.length
    if alphabet.end is None and length != description.length:
        raise ConfigError(f"length = {length}: an image of this run has {description.length} {alphabet.unit}; leave it "
                          "out")
    if description.positions == "learned" and length > description.length:
        raise ConfigError(f"length = {length}: the run has learned positions for {description.length}")
    if given >= length:
        raise ConfigError(f"prompt: its {given} {alphabet.unit} leave none of length = {length} to draw")
    return length


def write_text(text: str, output: str | None) -> None:
    if output is None:
        print(text, end="")
        return
    with whole(Path(output).expanduser()) as part:
        part.write_text(text)


# The classes below say what the symbols of a sequence stand for. begin: the symbol before the first, which the prompt
# follows. end: the symbol that ends a sequence, or None. symbols: how many may be drawn, the first ones. unit: what one
# is called.


class Letters:
    """Proteins: a line for each sequence, or a FASTA file."""

    unit = "letters"

    def __init__(self, vocabulary: dict[str, Any]):
        self.letters, self.begin, self.end = (vocabulary[key] for key in ("letters", "begin", "end"))
        self.symbols = len(self.letters)

    def prompt(self, given: str) -> list[int]:
        for place, letter in enumerate(given, 1):
            if letter not in self.letters:
                raise ConfigError(f"prompt: {letter!r}, letter {place}, is not in the vocabulary of the run, "
                                  f"{self.letters}")
        return [self.letters.index(letter) for letter in given]

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        lines = ["".join(self.letters[i] for i in row) for row in rows]
        if options.output is None:
            print("\n".join(lines))
            return
        given = {key: value for key, value in asdict(options).items() if value is not None}
        how = " ".join(f"{key}={given[key]}" for key in ("run", "temperature", "top_k", "top_p") if key in given)
        write_text("".join(f">sample-{options.seed + i} {how}\n"
                           + "".join(f"{line[j:j + 60]}\n" for j in range(0, len(line), 60))
                           for i, line in enumerate(lines)), options.output)


class Text:
    """A text for each sequence, with an empty line between."""

    unit = "tokens"

    def __init__(self, vocabulary: dict[str, Any]):
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_str(vocabulary["tokenizer"])
        except Exception as error:  # tokenizers raises nothing else
            raise ConfigError(f"the tokenizer that this run kept cannot be read: {error}") from None
        self.begin = self.end = vocabulary["end"]
        self.symbols = max(self.tokenizer.get_vocab().values()) + 1

    def prompt(self, given: str) -> list[int]:
        return self.tokenizer.encode(given, add_special_tokens=False).ids

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        write_text("\n\n".join(self.tokenizer.decode(row) for row in rows) + "\n", options.output)


class Pixels:
    """Images in a PNG, eight side by side. A prompt is the file of an image: the share `known` of its rows, from the
    top, is given and the rest drawn; the image itself stands first."""

    unit, end = "values", None

    def __init__(self, vocabulary: dict[str, Any], known: float):
        self.symbols, self.begin = vocabulary["pixels"], vocabulary["begin"]
        self.size, self.channels, self.known, self.truth = vocabulary["size"], vocabulary["channels"], known, None

    def prompt(self, given: str) -> list[int]:
        if not given:
            return []
        self.truth = image_values.in_square(images.read(Path(given).expanduser()), self.size, self.channels, given)
        return self.truth[:round(self.known * self.size)].reshape(-1).tolist()

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        made = [np.array(row, np.uint8).reshape(self.size, self.size, self.channels) for row in rows]
        made = made if self.truth is None else [self.truth, *made]
        times = max(1, SMALLEST_SIDE // self.size)           # each value a square, for small images to be seen
        made = [image.repeat(times, 0).repeat(times, 1) for image in made]
        rows = [made[i:i + 8] for i in range(0, len(made), 8)]
        image_values.save(image_values.grid(rows), Path(options.output).expanduser())


# what a vocabulary that a run kept may hold
STORED = {"letters": str, "tokenizer": str, "pixels": Annotated[Count, Field(le=256)], "begin": Whole, "end": Whole,
          "size": Annotated[Count, Field(le=2**12)], "channels": Literal[1, 3]}


def alphabet_of(vocabulary: Any, options: SequenceOptions) -> Letters | Text | Pixels:
    """Raises ConfigError, also where no file for images is named."""
    run = options.run
    if not isinstance(vocabulary, dict):
        raise ConfigError(f"run = {run}: its vocabulary is {format_value(vocabulary)}, and no keys with values")
    for key in vocabulary.keys() & STORED.keys():
        check(f"run = {run}: vocabulary.{key}", vocabulary[key], STORED[key])
    if vocabulary.keys() >= {"letters", "begin", "end"}:
        return Letters(vocabulary)
    if vocabulary.keys() >= {"pixels", "begin", "size", "channels"}:
        if options.output is None:
            raise ConfigError("this run draws images: name the PNG to write, output=<file>")
        return Pixels(vocabulary, options.known)
    if vocabulary.keys() >= {"tokenizer", "end"}:
        return Text(vocabulary)
    raise ConfigError(f"run = {run} has no letters, pixels or text to write: give a run of task=trembl, pixels or "
                      "books")


KINDS = {"images": (ImageOptions, classify), "audio": (AudioOptions, transcribe),
         "sequences": (SequenceOptions, sample)}

if __name__ == "__main__":
    sys.exit(main())
