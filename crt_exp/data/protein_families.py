"""Generated families of sequences, which need no file.

A family has a Markov chain over the 20 amino acids and a lag. With probability `copied` a letter is the one `lag`
places before it, else the chain's next one: a model needs the distant letter, and the family, which the letters so far
alone show. Lengths are uniform.

Legend: n sequences, T letters of the longest, F families, A = 20 letters.
"""

from typing import Annotated, TypedDict

import numpy as np
from pydantic import Field

from crt_exp.config import ConfigError
from crt_exp.data.protein import Sequences, hash_of
from crt_exp.options import Count, Whole

A = 20


class FamilyOptions(TypedDict):
    """What is generated: `families` in distribution and `held_out` others, the lengths of sequences, and of lags."""

    sequences: Count
    families: Count
    held_out: Whole
    shortest: Count
    longest: Count
    nearest: Count
    farthest: Count
    copied: Annotated[float, Field(ge=0, lt=1)]
    seed: Whole


class Families:
    """chains (F, A, A): of the next letter after each. starts (F, A): of the first letters. lags (F,)."""

    def __init__(self, options: FamilyOptions):
        """Raises ConfigError for bounds in the wrong order."""
        for low, high in (("shortest", "longest"), ("nearest", "farthest")):
            if options[low] > options[high]:
                raise ConfigError(f"task.generated.{low}={options[low]}: expected at most {high}={options[high]}")
        rng, count = np.random.default_rng([options["seed"], 0]), options["families"] + options["held_out"]
        self.chains = rng.dirichlet(np.full(A, 0.3), (count, A))
        self.starts = rng.dirichlet(np.full(A, 3.0), count)
        self.lags = rng.integers(options["nearest"], options["farthest"] + 1, count)
        self.shortest, self.longest, self.copied = options["shortest"], options["longest"], options["copied"]
        self.inside = options["families"]                    # the first of them; the others are held out

    def sample(self, n: int, seed: int) -> Sequences:
        """n sequences, and of held-out families a tenth as many; the family stands in `files`."""
        rng = np.random.default_rng([seed, 1])
        family = rng.integers(0, self.inside, n)
        if len(self.lags) > self.inside:
            family = np.append(family, rng.integers(self.inside, len(self.lags), max(1, n // 10)))
        lengths = rng.integers(self.shortest, self.longest + 1, len(family))
        inside = np.arange(self.longest) < lengths[:, None]
        accessions = np.array([f"G{i:09d}" for i in range(len(family))], "S16")
        hashes = np.array([hash_of(accession) for accession in accessions.tolist()], np.uint32)
        return Sequences(self.letters(family, rng)[inside], np.cumsum(lengths), accessions, hashes,
                         family.astype(np.uint16), tuple(f"family {i}" for i in range(len(self.lags))))

    def letters(self, family: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n, T) uint8."""
        result, rows, lag = np.zeros((len(family), self.longest), np.uint8), np.arange(len(family)), self.lags[family]
        for t in range(self.longest):
            chances = self.starts[family] if t == 0 else self.chains[family, result[:, t - 1]]
            drawn = (chances.cumsum(1) < rng.random((len(rows), 1))).sum(1).clip(max=A - 1)
            copies = (rng.random(len(rows)) < self.copied) & (lag <= t)
            result[:, t] = np.where(copies, result[rows, np.maximum(t - lag, 0)], drawn)
        return result
