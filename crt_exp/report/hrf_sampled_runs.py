"""The runs of `hrf_sampled`: what one SIZE stands for, and each sampler as a command line of task=ptb."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crt_exp.config import choices
from crt_exp.report import palette, runs

SOURCES = ("tasks/ptb.py", "models/lstm.py", "data/words.py", "sampling", "features")
HOME = runs.Home(Path("outputs/hrf-sampled"), SOURCES)
FIXED = ("uniform", "log_uniform", "unigram")  # laws that know no query
REFERENCES = ("full", "exact")                 # no sampling, and sampling from the softmax itself
HYBRIDS = ("hrf_angular", "hrf_gaussian")
FEATURES = tuple(name for name in ("favor", "favorp", "favorpp", *HYBRIDS) if name in choices("attention"))
NAMES = (*REFERENCES, *FIXED, *FEATURES)
LABELS = {"full": "full softmax", "exact": "the exact softmax", "uniform": "uniform", "log_uniform": "log-uniform",
          "unigram": "unigram", "favor": "trigonometric", "hrf_angular": "angular hybrid",
          "hrf_gaussian": "Gaussian hybrid"}


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. options: of all runs. m: projections; of a hybrid m / n of each base, and n of its
    coefficient."""

    options: tuple[str, ...]
    m: int
    n: int
    seeds: int = 3
    workers: int | None = None         # runs at a time; None: one a core


@dataclass
class Found:
    """All that was computed; keys: name of the sampler and seed."""

    runs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def final(self, name: str) -> dict[int, float]:
        """seed -> loss on the test split in nats, of the runs that did not diverge."""
        return {seed: run["loss"] for (other, seed), run in self.runs.items() if other == name and "loss" in run}


def overrides(name: str, seed: int, setting: Setting) -> list[str]:
    """The key of a run: all that it depends on."""
    return ["task=ptb", *setting.options, *sampler(name, setting), f"seed={seed}"]


def sampler(name: str, setting: Setting) -> list[str]:
    if name not in FEATURES:
        return [f"task.softmax={name}"]
    counts = [f"features.m={setting.m // setting.n}", f"features.n={setting.n}"]
    return ["task.softmax=features", f"attention={name}", *(counts if name in HYBRIDS else [f"features.m={setting.m}"])]


def train(overrides: list[str]) -> dict[str, Any]:
    """{"curve": [epoch, loss] on the validation split, "loss" and "perplexity" of the test split, "unigram",
    "seconds"}, or {"diverged": what the run said}."""
    try:
        records = HOME.passing([*overrides, "trainer.keep=1"])
    except runs.Diverged as failure:
        return {"diverged": str(failure)}
    curve = [[r["epoch"], r["loss"]] for r in records if r["split"] == "validation"]
    last = records[-1]
    return {"curve": curve, "loss": last["loss"], "perplexity": last["perplexity"],
            "unigram": last["unigram_perplexity"], "seconds": last["time_s"]}


def label(name: str) -> str:
    return LABELS.get(name) or palette.label(name)
