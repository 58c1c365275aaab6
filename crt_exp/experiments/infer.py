"""Use the model of a run: python -m crt_exp infer run=DIR [key=value ...].

The task of the run decides what the command does. Keys of every task:
  run          directory of the run
  names        folder of custom names, as given to the run by --config-dir

task=imagenet: print the five most probable classes of each image, as csv.
  input        an image or a folder of images

task=librispeech: print the transcript, and the time in seconds of each symbol.
  input        an audio file or a folder of audio files
  segment      longest segment that is decoded at once, in seconds (20); longer audio is cut at its quietest part

task=glue: print the class of each text and the probability of every class, or the score, as csv.
  input        a csv, tsv, jsonl or parquet file with the text columns of the run, or lines of text in a .txt file

task=mlm (without task.causal): print the five most probable tokens of each mask, as csv.
  input        lines of text with [MASK] in a .txt file, or a table with a column text

task=glue, mlm:
  device       cpu or cuda (cpu)
  output       csv file to write (default: print)

task=trembl, books, pixels: generate sequences.
  prompt       start of each sequence; for pixels an image file, whose lower half is generated
  n            number of sequences (1)
  length       symbols of a sequence, including the prompt (default: the length of training)
  temperature  sampling temperature (1); 0 takes the most probable symbol
  top_k        sample from the k most probable symbols
  top_p        sample from the smallest set of symbols with at least this total probability
  seed         seed of the first sequence (0); each further sequence adds 1
  device       cpu or cuda (cpu)
  output       file to write, FASTA, text or PNG (default: print)

Exit code 2: an error, which is printed, or files that could not be read.
"""

import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import transformers
from pydantic import Field
from torch import Tensor

from crt_exp.experiments.data import DataError, images, numbered_lines
from crt_exp.experiments.data.files import IMAGES, check_cells, files_ending, read_text_table
from crt_exp.experiments.data.labelled_text import text_columns
from crt_exp.experiments.data.speech import (
    SHORTEST,
    Utterance,
    as_int16,
    audio_files,
    audio_of,
    audio_part,
    pad_audio,
)
from crt_exp.experiments.models import encoders, language, vision
from crt_exp.experiments.models.folder import (
    CONFIG,
    TRANSDUCER,
    folder_of,
    trained_length,
)
from crt_exp.registry import ConfigError, json_object, own_names, user_message
from crt_exp.swap.pretrained import from_pretrained
from crt_exp.swap.saved import KEY
from crt_exp.validation import Count, NotNegative, Seed, Several, check, parse_arguments

LIKELIEST = 5  # classes printed for an image, tokens printed for a mask
QUIET = 0.2  # seconds of the quietest part of the audio, where a segment ends
AT_ONCE = 16  # sequences of a batch
TASKS = "imagenet, librispeech, glue, mlm (without task.causal), trembl, books or pixels"
# classes of transformers, which config.json names
CLASSIFIER = "SequenceClassification"
MASKED = "MaskedLM"


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    run: str
    input: str
    names: str | None = None


@dataclass(frozen=True, kw_only=True)
class AudioOptions(ImageOptions):
    segment: Annotated[float, Field(ge=1)] = 20.0


@dataclass(frozen=True, kw_only=True)
class TextOptions(ImageOptions):
    device: Literal["cpu", "cuda"] = "cpu"
    output: str | None = None


@dataclass(frozen=True)
class TokenChoice:
    """Sample a symbol from logits by temperature, top-k and top-p, in this order.

    Temperature 0 takes the most probable symbol. None for top_k or top_p keeps all symbols.
    """

    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (B, V) -> probabilities (B, V) in float64; 0 where the logit is -inf."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = transformers.TopKLogitsWarper(self.top_k)(None, logits)
        if self.top_p is not None:
            logits = transformers.TopPLogitsWarper(self.top_p)(None, logits)
        return logits.softmax(-1)

    def draw(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Logits (B, V) -> symbols (B,), each by a generator of its own on the CPU."""
        drawn = []
        for row, generator in zip(self.probabilities(logits).cpu(), generators):
            drawn.append(torch.multinomial(row, 1, generator=generator))
        return torch.cat(drawn)


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(TokenChoice):
    run: str
    prompt: str = ""
    n: Count = 1
    length: Count | None = None
    seed: Seed = 0
    device: Literal["cpu", "cuda"] = "cpu"
    output: str | None = None
    names: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    if not arguments or {"--help", "-h"} & {*arguments}:
        print(__doc__)
        return 0 if arguments else 2
    try:
        options_class, command = KINDS[kind_of_run(arguments)]
        options = parse_arguments(options_class, arguments)
        with torch.no_grad(), own_names([options.names] if options.names else []):
            return command(options) or 0
    except (ConfigError, DataError, ValueError, OSError, RuntimeError, ImportError) as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"crt_exp infer: error: {message}", file=sys.stderr)
        return 2


def kind_of_run(arguments: Sequence[str]) -> str:
    """Return the key in `KINDS` of the run that run=DIR names. Raises ConfigError or DataError."""
    run = dict(word.partition("=")[::2] for word in arguments).get("run")
    if not run:
        raise ConfigError("run: missing, expected the directory of a run")
    expected = f"a run of task={TASKS}"
    folder = folder_of(run, "run", f"the directory of {expected}")
    config = json_object(folder / CONFIG)
    match config:
        case {"architectures": [str(name)]}:  # a model of transformers, such as BertForMaskedLM
            kind = name.rpartition("For")[2]
        case {"architecture": _}:
            kind = "imagenet"
        case _:
            kind = str(config.get("kind"))
    if kind not in KINDS:
        raise DataError(f"run={run}: expected {expected}")
    return kind


def classify(options: ImageOptions) -> int:
    """Print a csv row for each image: file name, top classes and their probabilities."""
    files = [Path(options.input).expanduser()]
    if files[0].is_dir():
        files = [Path(file) for file in files_ending(files[0], IMAGES)]
    classifier = vision.load(options.run)
    rows = []
    bad = []
    for file in files:
        try:
            pixels = classifier.transform(images.read_image(file))
        except DataError as error:
            bad.append(error)
            continue
        probabilities = classifier.model(pixels[None])[0].float().softmax(-1)
        rows.append({"image": file} | likeliest("class", probabilities, classifier.classes))
    print(pd.DataFrame(rows).to_csv(index=False, float_format="%.3f"), end="")
    return exit_code(bad, files, options.input)


def transcribe(options: AudioOptions) -> int:
    """Print the transcript of each file, and the time of each symbol in seconds."""
    from crt_exp.experiments.models import conformer_transducer
    from crt_exp.experiments.models.conformer_transducer import STEP, greedy

    files = audio_files(options.input, "input")
    bad = []
    known, tensors = conformer_transducer.load(options.run, "run")
    model = known.build(tensors)
    for file in files:
        try:
            utterance = Utterance(file.stem, "", (audio_part(str(file)),))
            audio = as_int16(audio_of(utterance, known.rate))
        except DataError as error:
            bad.append(error)
            continue
        texts = []
        times = []
        for start, end in segments(audio, known.rate, options.segment):
            length = torch.tensor([end - start])
            _, (heard,) = model(pad_audio([audio[start:end]]), length, search=greedy)
            texts.append(known.symbols.decode(heard.symbols))
            for symbol, frame in zip(heard.symbols, heard.frames):
                seconds = start / known.rate + frame * STEP
                times.append(f"{seconds:.2f} {known.symbols.entries[symbol].replace(' ', '_')}")
        print(f"{file} ({len(audio) / known.rate:.1f} s): {' '.join(filter(None, texts))}")
        print(" ", "  ".join(times))
    return exit_code(bad, files, options.input)


def label_texts(options: TextOptions) -> None:
    """Write the table of the input with the class or score of each row, and probabilities."""
    model, tokenizer, length = load_encoder(options, CLASSIFIER)
    columns = getattr(model.config, "text_columns", None)
    check(f"run={options.run}: text_columns", columns, Several[str] | None)
    table, columns = read_texts(options.input, columns)
    parts = []
    longer = 0
    for i in range(0, len(table), AT_ONCE):
        texts = [table[column].tolist()[i : i + AT_ONCE] for column in columns]
        longer += sum(len(ids) > length for ids in tokenizer(*texts, verbose=False)["input_ids"])
        tokens = tokenizer(
            *texts, truncation=True, max_length=length, padding=True, return_tensors="pt"
        )
        parts.append(model(**tokens.to(options.device)).logits.float().cpu())
    if longer:
        print(f"truncated {longer} of {len(table)} rows to {length} tokens", file=sys.stderr)
    outputs = torch.cat(parts)
    if model.config.num_labels == 1:
        table["predicted"] = outputs[:, 0].numpy()
    else:
        names = [model.config.id2label[i] for i in range(outputs.shape[1])]
        table["predicted"] = [names[i] for i in outputs.argmax(-1).tolist()]
        for name, shares in zip(names, outputs.softmax(-1).T.numpy()):
            table[f"probability_{name}"] = shares
    write_table(table, options.output)


def fill_masks(options: TextOptions) -> None:
    """Write a row for each mask: text, number of the mask, top tokens and their probabilities."""
    model, tokenizer, length = load_encoder(options, MASKED)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    table, (column,) = read_texts(options.input, ["text"])
    rows = []
    for number, text in table[column].items():
        tokens = tokenizer(text, return_tensors="pt").to(options.device)
        ids = tokens["input_ids"][0]
        masks = (ids == tokenizer.mask_token_id).nonzero()[:, 0]
        named = f"input={options.input}: row {number}"
        if not len(masks):
            raise DataError(f"{named} has no {tokenizer.mask_token}; write it in place of a word")
        if len(ids) > length:
            raise DataError(f"{named} has {len(ids)} tokens; expected at most {length}")
        probabilities = model(**tokens).logits[0, masks].float().softmax(-1)[:, : len(words)]
        for i, chances in enumerate(probabilities, 1):
            rows.append({column: text, "mask": i} | likeliest("token", chances, words))
    write_table(pd.DataFrame(rows), options.output)


def likeliest(name: str, probabilities: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Columns of the most probable entries (V,): their names and probabilities."""
    row: dict[str, Any] = {}
    likely = probabilities.topk(min(LIKELIEST, len(names)))
    for rank, (i, probability) in enumerate(zip(likely.indices.tolist(), likely.values), 1):
        row[f"{name}{rank}"] = names[i]
        row[f"probability{rank}"] = float(probability)
    return row


def load_encoder(options: TextOptions, head: str) -> tuple[Any, Any, int]:
    """Model with a head, tokenizer, and largest number of tokens of a run.

    Raises ConfigError or DataError.
    """
    check_device(options.device)
    folder = folder_of(options.run, "run", f"the directory of a run of task={TASKS}")
    origin = encoders.Origin(str(folder), "run", weights=True, noise=True)
    tokenizer = encoders.load_tokenizer(origin)
    auto = getattr(transformers, f"AutoModelFor{head}")

    def load() -> Any:
        if KEY in json_object(folder / CONFIG):
            return from_pretrained(auto, folder)
        return auto.from_pretrained(folder, trust_remote_code=False)

    model = encoders.load_or_explain(load, origin, "weights").eval().to(options.device)
    length = trained_length(folder) or model.config.max_position_embeddings
    return model, tokenizer, length


def read_texts(name: str, columns: Sequence[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """Table of the input and its text columns; lines of a .txt file are one column.

    columns: those of the run; None: text, or text_a and text_b. Raises DataError.
    """
    path = Path(name).expanduser()
    named = f"input={name}"
    if path.suffix.lower() == ".txt":
        lines = [line for _, line in numbered_lines(path) if line.strip()]
        table = pd.DataFrame({"text": lines}, index=range(1, len(lines) + 1), dtype=object)
        if columns is not None and len(columns) == 1:
            columns = ["text"]
    else:
        table = read_text_table(path, named)
    columns = text_columns(table, columns, named)
    check_cells(table, columns, named)
    if not len(table):
        raise DataError(f"{named}: no row; expected at least 1 text")
    return table, columns


def write_table(table: pd.DataFrame, output: str | None) -> None:
    write_text(table.to_csv(index=False, float_format="%.4f").rstrip("\n"), output)


def exit_code(bad: list, files: list[Path], place: str) -> int:
    """Return 2 and print the unreadable files, if any, or if there are no files."""
    if files and not bad:
        return 0
    title = f"input={place}: {len(bad)} of {len(files)} files are unreadable:"
    print(title, *bad, sep="\n  ", file=sys.stderr)
    return 2


def segments(audio: np.ndarray, rate: int, longest: float) -> Iterator[tuple[int, int]]:
    """Yield (start, end) samples of each segment.

    A segment ends in the quietest part of its second half.
    """
    start = 0
    most = int(longest * rate)
    least = math.ceil(SHORTEST * rate)
    width = int(QUIET * rate)
    while (left := len(audio) - start) > most:
        half = start + most // 2
        second_half = audio[half : start + min(most, left - least)]
        loudness = np.square(second_half.astype(np.float64)).cumsum()
        end = half + int((loudness[width:] - loudness[:-width]).argmin()) + width // 2
        yield start, end
        start = end
    yield start, len(audio)


def sample(options: SequenceOptions) -> None:
    """Generate sequences, then write or print them."""
    check_device(options.device)
    saved = language.load(options.run, "run")
    description = saved.description
    if not description.causal:
        raise ConfigError(
            f"run={options.run}: a masked model cannot generate; expected task.direction=unidirectional"
        )
    known = [key for key in ALPHABETS if key in saved.symbols]
    if not known:
        raise ConfigError(f"run={options.run}: expected a run with letters, pixels or text")
    alphabet = ALPHABETS[known[0]](saved.symbols)
    length = options.length or description.length
    if alphabet.end is None and options.output is None:
        raise ConfigError("output=None: expected FILE.png, as this run generates images")
    if alphabet.end is None and length != description.length:
        raise ConfigError(
            f"length={length}: expected {description.length}, the values of an image; remove it"
        )
    prompt = alphabet.prompt(options.prompt)
    count = length - len(prompt)
    if count <= 0:
        raise ConfigError(
            f"prompt={options.prompt}: has {len(prompt)} symbols, expected fewer than length={length}"
        )
    model = saved.build().to(options.device)
    tokens = torch.tensor([alphabet.begin, *prompt], device=options.device)
    never = {*range(alphabet.symbols, description.symbols)} - {alphabet.end}
    seeds = range(options.seed, options.seed + options.n)
    rows = []
    for i in range(0, options.n, AT_ONCE):
        part = seeds[i : i + AT_ONCE]
        rows += generate(model, tokens, count, options, part, never=never, end=alphabet.end)
    alphabet.write([[*prompt, *row] for row in rows], options)


def check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: no GPU found; use device=cpu")


@torch.no_grad()
def generate(
    model: language.LanguageModel,
    prompt: Tensor,
    count: int,
    choice: TokenChoice,
    seeds: Sequence[int],
    *,
    never: Iterable[int] = (),
    end: int | None = None,
) -> list[list[int]]:
    """Continue a prompt (P,) by at most `count` symbols, one sequence for each seed.

    The model must be in eval mode. The time of a symbol is constant with random features, and linear in the position
    with exact attention.

    Args:
        never: symbols that are never sampled.
        end: the symbol that ends a sequence; the sequence does not include it.

    Returns:
        The new symbols of each sequence, without the prompt.
    """
    device = prompt.device
    banned = torch.tensor(sorted(never), dtype=torch.long, device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    pasts = model.begin()
    tokens = prompt.expand(len(seeds), -1)
    columns = []
    ended = set()
    for _ in range(count):
        logits = model(tokens, pasts=pasts)[:, -1].index_fill(-1, banned, -torch.inf)
        drawn = choice.draw(logits, generators).to(device)
        columns.append(drawn.tolist())
        ended |= {i for i, symbol in enumerate(columns[-1]) if symbol == end}
        if len(ended) == len(seeds):
            break
        tokens = drawn[:, None]
    return [list(takewhile(lambda symbol: symbol != end, row)) for row in zip(*columns)]


def write_text(text: str, output: str | None) -> None:
    if output is None:
        print(text)
    else:
        Path(output).expanduser().write_text(text + "\n")


# Formats of sequences. `begin` is the symbol before the first one, `end` the symbol that ends a sequence, or None.
# `symbols` is the number of symbols that may be sampled, the first ones of the vocabulary.


class Letters:
    """Protein sequences: one line each, or a FASTA file."""

    def __init__(self, vocabulary: dict[str, Any]):
        self.letters = vocabulary["letters"]
        self.begin = vocabulary["begin"]
        self.end = vocabulary["end"]
        self.symbols = len(self.letters)

    def prompt(self, text: str) -> list[int]:
        for letter in text:
            if letter not in self.letters:
                raise ConfigError(
                    f"prompt={text}: unknown letter {letter!r}; expected {self.letters}"
                )
        return [self.letters.index(letter) for letter in text]

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        lines = []
        for seed, row in enumerate(rows, options.seed):
            line = "".join(self.letters[i] for i in row)
            if options.output is not None:
                line = f">sample-{seed}\n{textwrap.fill(line, 60)}"
            lines.append(line)
        write_text("\n".join(lines), options.output)


class Text:
    """Text documents, separated by an empty line."""

    def __init__(self, vocabulary: dict[str, Any]):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(vocabulary["tokenizer"])
        self.begin = self.end = vocabulary["end"]
        self.symbols = max(self.tokenizer.get_vocab().values()) + 1

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        write_text("\n\n".join(self.tokenizer.decode(row) for row in rows), options.output)


class Pixels:
    """Images in a PNG, eight in a row.

    A prompt is an image file. Its upper half is the prompt, its lower half is generated. The image itself comes first.
    """

    end = None

    def __init__(self, vocabulary: dict[str, Any]):
        self.symbols = vocabulary["pixels"]
        self.begin = vocabulary["begin"]
        self.size = vocabulary["size"]
        self.channels = vocabulary["channels"]
        self.truth = []

    def prompt(self, file: str) -> list[int]:
        if not file:
            return []
        image = images.read_image(Path(file).expanduser())
        self.truth = [images.crop_square(image, self.size, self.channels, file)]
        return self.truth[0][: self.size // 2].reshape(-1).tolist()

    def write(self, rows: list[list[int]], options: SequenceOptions) -> None:
        shape = (self.size, self.size, self.channels)
        times = max(1, 96 // self.size)  # enlarge small images to about 96 pixels
        pictures = []
        for row in [*self.truth, *rows]:
            image = np.array(row, np.uint8).reshape(shape)
            pictures.append(image.repeat(times, 0).repeat(times, 1))
        images.save_grid(pictures, Path(options.output).expanduser())


# keyed by an entry of the vocabulary
ALPHABETS = {"letters": Letters, "pixels": Pixels, "tokenizer": Text}


KINDS = {
    "imagenet": (ImageOptions, classify),
    TRANSDUCER: (AudioOptions, transcribe),
    language.KIND: (SequenceOptions, sample),
    CLASSIFIER: (TextOptions, label_texts),
    MASKED: (TextOptions, fill_masks),
}

if __name__ == "__main__":
    sys.exit(main())
