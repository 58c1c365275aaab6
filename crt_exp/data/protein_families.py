"""Generated families of sequences whose true distribution is known, so that a model's perplexity has a floor.

A family has a Markov chain over the 20 amino acids and a lag. With probability `copied` a letter is the one `lag`
places before it, else the chain's next one: a model needs the distant letter, and the family, which the letters so far
alone show. Lengths are uniform. The chance of a letter given all before it is a mixture over families by Bayes' rule.

Legend: n sequences, T letters of the longest, F families, A = 20 letters.
"""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import numpy as np
from pydantic import Field

from crt_exp.config import ConfigError
from crt_exp.data.fasta import Index, hash_of
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


@dataclass(frozen=True)
class Families:
    """chains (F, A, A): of the next letter after each. starts (F, A): of the first letters. lags (F,)."""

    chains: np.ndarray
    starts: np.ndarray
    lags: np.ndarray
    shortest: int
    longest: int
    copied: float
    inside: int                                              # the first of them; the others are held out

    @classmethod
    def of(cls, options: FamilyOptions) -> "Families":
        """Raises ConfigError for bounds in the wrong order."""
        for low, high in (("shortest", "longest"), ("nearest", "farthest")):
            if options[low] > options[high]:
                raise ConfigError(f"task.generated: {low} = {options[low]} is more than {high} = {options[high]}")
        rng, count = np.random.default_rng([options["seed"], 0]), options["families"] + options["held_out"]
        chains = rng.dirichlet(np.full(A, 0.3), (count, A))
        starts = rng.dirichlet(np.full(A, 3.0), count)
        lags = rng.integers(options["nearest"], options["farthest"] + 1, count)
        bounds = options["shortest"], options["longest"]
        return cls(chains, starts, lags, *bounds, options["copied"], options["families"])

    def drawn(self, options: FamilyOptions) -> Index:
        """`sequences` of them, and of held-out families a tenth as many; the family stands in `files`."""
        rng, n = np.random.default_rng([options["seed"], 1]), options["sequences"]
        extra = max(1, n // 10) if len(self.lags) > self.inside else 0
        parts = [rng.integers(0, self.inside, n)]
        parts += [rng.integers(self.inside, len(self.lags), extra)] if extra else []
        family = np.concatenate(parts)
        lengths = rng.integers(self.shortest, self.longest + 1, len(family))
        letters = self.letters(family, rng)
        inside = np.arange(self.longest) < lengths[:, None]
        accessions = np.array([f"G{i:09d}" for i in range(len(family))], "S16")
        hashes = np.array([hash_of(bytes(accession)) for accession in accessions], np.uint32)
        return Index(letters[inside], np.cumsum(lengths), accessions, hashes, family.astype(np.uint16),
                     tuple(f"family {i}" for i in range(len(self.lags))))

    def letters(self, family: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n, T) uint8."""
        result, rows = np.zeros((len(family), self.longest), np.uint8), np.arange(len(family))
        for t in range(self.longest):
            chances = self.starts[family] if t == 0 else self.chains[family, result[:, t - 1]]
            drawn = (chances.cumsum(1) < rng.random((len(rows), 1))).sum(1).clip(max=A - 1)
            lag = self.lags[family]
            copies = (rng.random(len(rows)) < self.copied) & (lag <= t)
            result[:, t] = np.where(copies, result[rows, np.maximum(t - lag, 0)], drawn)
        return result

    def log_chances(self, letters: np.ndarray, held_out: bool = False) -> np.ndarray:
        """log p of each letter given those before it, where the family is not known: (n, T) float64, nats.

        letters (n, T): T at most `longest`. Of families in distribution, or of the held-out ones, each as likely. The
        chance that there is such a letter at all, and not the end, is in it.
        """
        which = np.arange(self.inside, len(self.lags)) if held_out else np.arange(self.inside)
        each = np.stack([self.within(letters, f) for f in which], 2)                   # (n, T, F): log p in the family
        before = np.cumsum(each, 1) - each                                             # of all letters before
        weights = before - logsumexp(before)
        return logsumexp(weights + each)[..., 0] + self.log_survival()[:letters.shape[1]]

    def log_survival(self) -> np.ndarray:
        """log p that a sequence of t letters has another one, for t = 0 .. longest - 1."""
        left = self.longest - np.maximum(np.arange(self.longest), self.shortest - 1)   # lengths above t
        return np.diff(np.log(left / (self.longest - self.shortest + 1)), prepend=0.0)

    def within(self, letters: np.ndarray, family: int) -> np.ndarray:
        """log p of each letter given those before it and the family, (n, T)."""
        lag, T = int(self.lags[family]), letters.shape[1]
        chain = self.chains[family][letters[:, :-1], letters[:, 1:]]
        chain = np.concatenate([self.starts[family][letters[:, :1]], chain], 1)
        if lag < T:
            same = letters[:, lag:] == letters[:, :-lag]
            chain[:, lag:] = self.copied * same + (1 - self.copied) * chain[:, lag:]
        return np.log(np.maximum(chain, 1e-300))


def logsumexp(t: np.ndarray) -> np.ndarray:
    """Over the last dimension, which stays."""
    top = t.max(-1, keepdims=True)
    return top + np.log(np.exp(t - top).sum(-1, keepdims=True))
