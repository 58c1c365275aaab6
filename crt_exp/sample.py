"""python -m crt_exp.sample run=<dir> [key=value ...]: sequences drawn from a sequence model that a run has trained.

Keys: temperature, top_k, top_p, seed, n, length, prompt, device, output; `--help` says what each takes.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.schema import Count, NotNegative, above, at_least, at_most, check_keys, describe, parameters

SEED = Annotated[int, at_least(0), at_most(2**32 - 1)]
WORDS = {"run": "directory of the run", "prompt": "what each sequence begins with", "n": "sequences",
         "length": "symbols of a sequence, the prompt's among them; null: what the model was trained for",
         "temperature": "1: the model's own chances; 0: always the most likely symbol",
         "top_k": "of the so many most likely symbols", "top_p": "of the fewest symbols with so much of the chance",
         "seed": "the first sequence's; the others count on from it", "batch": "sequences at once",
         "device": "such as cpu or cuda", "output": "FASTA file to write; null: print"}


@dataclass(frozen=True)
class Options:
    run: str
    prompt: str = ""
    n: Count = 1
    length: Count | None = None
    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, above(0), at_most(1)] | None = None
    seed: SEED = 0
    batch: Count = 16
    device: str = "cpu"
    output: str | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Options":
        """Raises ConfigError for what is no key=value, an unknown key, and values that do not fit."""
        given = dict(parsed(argument) for argument in arguments)
        check_keys("", given, parameters(cls))
        return cls(**given)


def parsed(argument: str) -> tuple[str, Any]:
    """Key and value; texts stay as they are typed, the others are read as YAML reads them."""
    import yaml

    key, sign, text = argument.partition("=")
    if not sign:
        raise ConfigError(f"{argument!r} is not of the form key=value")
    if key in ("run", "prompt", "output", "device"):
        return key, text if (key, text) != ("output", "null") else None
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 2 after a mistake of the user's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(usage())
        return 0
    try:
        options = Options.of(arguments)
        write(options, sampled(options))
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"crt_exp: error: {error}", file=sys.stderr)
        return 2
    return 0


def usage() -> str:
    rows = [f"  {field.name:12} {WORDS[field.name]} ({describe(parameters(Options)[field.name].hint)})"
            for field in fields(Options)]
    return "\n".join(["usage: python -m crt_exp.sample run=<dir> [key=value ...]", *rows])


def sampled(options: Options) -> list[str]:
    """The sequences, prompt included. Raises ConfigError and DataError."""
    import torch

    from crt_exp.models import language
    from crt_exp.models.generation import Choice, generate

    kept = language.load(options.run, "run")
    if not kept.description.causal:
        raise ConfigError(f"run = {options.run} predicts masked symbols (task.direction=bidirectional): sequences are "
                          "drawn from a unidirectional one")
    if not kept.symbols.keys() >= {"letters", "begin", "end", "size"}:
        raise ConfigError(f"run = {options.run} has no letters to write: give a run of task=trembl")
    letters, begin, end = (kept.symbols[key] for key in ("letters", "begin", "end"))
    prompt = torch.tensor([begin, *encoded(options.prompt, letters)], device=options.device)
    count = longest(options, kept.description) - len(options.prompt)
    model = kept.build().to(options.device)
    choice = Choice(options.temperature, options.top_k, options.top_p)
    never = set(range(kept.symbols["size"])) - set(range(len(letters))) - {end}
    found = []
    for first in range(0, options.n, options.batch):
        seeds = range(options.seed + first, options.seed + min(first + options.batch, options.n))
        found += generate(model, prompt, count, choice, seeds, never=never, end=end)
    return [options.prompt + "".join(letters[i] for i in row) for row in found]


def encoded(prompt: str, letters: str) -> list[int]:
    for place, letter in enumerate(prompt, 1):
        if letter not in letters:
            raise ConfigError(f"prompt: {letter!r}, letter {place}, is not in the vocabulary of the run, {letters}")
    return [letters.index(letter) for letter in prompt]


def longest(options: Options, description) -> int:
    """Symbols of a sequence. Raises ConfigError where the model has no positions for them, or the prompt no room."""
    length = description.length if options.length is None else options.length
    if description.positions == "learned" and length > description.length:
        raise ConfigError(f"length = {length}: the run has learned positions for {description.length}")
    if len(options.prompt) >= length:
        raise ConfigError(f"prompt: its {len(options.prompt)} letters leave none of length = {length} to draw")
    return length


def write(options: Options, found: list[str]) -> None:
    """A line for each, or a FASTA file, whole or not at all."""
    if options.output is None:
        print("\n".join(found))
        return
    path, rest = Path(options.output), {k: v for k, v in asdict(options).items() if v is not None}
    told = " ".join(f"{key}={rest[key]}" for key in ("run", "temperature", "top_k", "top_p") if key in rest)
    entries = [f">sample-{options.seed + i} {told}\n" + "".join(f"{row[j:j + 60]}\n" for j in range(0, len(row), 60))
               for i, row in enumerate(found)]
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text("".join(entries))
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
