"""python -m crt_exp.sample run=<dir> [key=value ...]: sequences drawn from a sequence model that a run has trained.

Keys: temperature, top_k, top_p, seed, n, length, prompt, known, device, output; `--help` says what each takes.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated

from crt_exp.arguments import read
from crt_exp.config import ConfigError, own_names
from crt_exp.data import DataError
from crt_exp.hints import Count, NotNegative, above, at_least, at_most, below, describe, parameters

SEED = Annotated[int, at_least(0), at_most(2**32 - 1)]
WORDS = {"run": "directory of the run", "prompt": "what each sequence begins with; for pixels an image, to complete",
         "known": "share of the rows of that image that are given, from the top", "n": "sequences",
         "length": "symbols of a sequence, the prompt's among them; null: what the model was trained for",
         "temperature": "1: the model's own chances; 0: always the most likely symbol",
         "top_k": "of the so many most likely symbols", "top_p": "of the fewest symbols with so much of the chance",
         "seed": "the first sequence's; the others count on from it", "batch": "sequences at once",
         "names": "folder of your own names, the --config-dir of that run",
         "device": "such as cpu or cuda", "output": "file to write, FASTA, text or PNG; null: print"}


@dataclass(frozen=True)
class SampleOptions:
    run: str
    prompt: str = ""
    known: Annotated[float, above(0), below(1)] = 0.5
    n: Count = 1
    length: Count | None = None
    temperature: NotNegative = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, above(0), at_most(1)] | None = None
    seed: SEED = 0
    batch: Count = 16
    device: str = "cpu"
    output: str | None = None
    names: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 2 after a mistake of the user's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(usage())
        return 0
    try:
        draw(read(SampleOptions, arguments))
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"crt_exp: error: {error}", file=sys.stderr)
        return 2
    return 0


def usage() -> str:
    rows = [f"  {field.name:12} {WORDS[field.name]} ({describe(parameters(SampleOptions)[field.name].hint)})"
            for field in fields(SampleOptions)]
    return "\n".join(["usage: python -m crt_exp.sample run=<dir> [key=value ...]", *rows])


def draw(options: SampleOptions) -> None:
    """Draws and writes the sequences. Raises ConfigError and DataError."""
    import torch

    from crt_exp.symbol_kinds import kind_of
    from crt_exp.models import language
    from crt_exp.models.generation import TokenChoice, generate

    check_device(options.device)
    with own_names([options.names] if options.names else []):
        kept = language.load(options.run, "run")
    if not kept.description.causal:
        raise ConfigError(f"run = {options.run} predicts masked symbols (task.direction=bidirectional): sequences are "
                          "drawn from a unidirectional one")
    kind = kind_of(kept.symbols, options.run, options.known, options.output)
    if max(kind.begin, kind.end or 0, kind.symbols - 1) >= kept.description.symbols:
        raise ConfigError(f"run = {options.run}: its vocabulary has more symbols than its model, "
                          f"{kept.description.symbols}")
    given = kind.prompt(options.prompt)
    count = longest(options, kept.description, kind, len(given)) - len(given)
    prompt = torch.tensor([kind.begin, *given], device=options.device)
    model = kept.build().to(options.device)
    choice = TokenChoice(options.temperature, options.top_k, options.top_p)
    never = set(range(kept.description.symbols)) - set(range(kind.symbols)) - {kind.end}
    rows, seeds = [], range(options.seed, options.seed + options.n)
    for first in range(0, options.n, options.batch):
        rows += generate(model, prompt, count, choice, seeds[first:first + options.batch], never=never, end=kind.end)
    kind.write([[*given, *row] for row in rows], seeds, settings(options), options.output)


def check_device(name: str) -> None:
    """Raises ConfigError for what is no device, or is not there."""
    import torch

    try:
        torch.empty(1, device=name).add(1).cpu()
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without the device
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(f"device = {name}: it takes a device that is there, such as cpu or cuda: {reason}") from None


def longest(options: SampleOptions, description, kind, given: int) -> int:
    """Symbols of a sequence. Raises ConfigError where the model has no positions for them, or the prompt no room."""
    length = description.length if options.length is None else options.length
    if kind.end is None and length != description.length:
        raise ConfigError(f"length = {length}: an image of this run has {description.length} {kind.unit}; leave it out")
    if description.positions == "learned" and length > description.length:
        raise ConfigError(f"length = {length}: the run has learned positions for {description.length}")
    if given >= length:
        raise ConfigError(f"prompt: its {given} {kind.unit} leave none of length = {length} to draw")
    return length


def settings(options: SampleOptions) -> str:
    """How it was drawn, for the head of an entry."""
    given = {key: value for key, value in asdict(options).items() if value is not None}
    return " ".join(f"{key}={given[key]}" for key in ("run", "temperature", "top_k", "top_p") if key in given)


if __name__ == "__main__":
    sys.exit(main())
