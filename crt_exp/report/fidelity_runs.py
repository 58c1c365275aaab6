"""What `fidelity` runs: the exact models, their attention swapped, uptraining, and error and cost against the length.

A model is trained in stages of task=mlm, each with longer blocks and from the run of the one before. Every attention
reads the same texts with the same masks, and starts from the same weights.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.attention import exact_attention
from crt_exp.config import choices
from crt_exp.data.text import official_file
from crt_exp.report import runs
from crt_exp.studies import fidelity as study
from crt_exp.studies.captured import relative_error
from crt_exp.studies.fidelity import Arm
from crt_exp.studies.memory import in_new_process, peak, reset_peak
from crt_exp.studies.speed import inputs
from crt_exp.studies.timing import timed
from crt_exp.studies.subject import Subject

MODEL_SOURCES = ("tasks/mlm.py", "tasks/objectives.py", "models/encoders.py", "data/byte_pairs.py")
HOME = runs.Home(Path("outputs/fidelity"), MODEL_SOURCES)
SOURCES = (*MODEL_SOURCES, "studies/fidelity.py", "studies/subject.py", "attention", "features", "swap",
           "report/fidelity_runs.py")
BERT, CAUSAL = "BERT", "causal"
DEFAULT, CHEAP, QUALITY = "nearfar", "nearfar preset=cheap", "nearfar preset=quality"
WINDOW = "window block=32 first=16"
ATTENTIONS = ("exact", "uniform", "identity", WINDOW, "relu", "favorp", "favorpp", "favorsharp", CHEAP, DEFAULT,
              QUALITY)
UPTRAINED = ("exact", DEFAULT, "favorpp", "favorp")
BY_LENGTH = ("uniform", WINDOW, "favorp", "favorpp")
CELLS, AT = 64, 512   # of near-far attention at that length; they grow as its root
EVERY = 8             # line of the validation text by which uptraining is followed


def known(attentions: tuple[str, ...]) -> tuple[str, ...]:
    """Those that conf/attention has."""
    return tuple(text for text in attentions if text.split()[0] in choices("attention"))


@dataclass(frozen=True)
class Model:
    """A model and its stages: options of all of them, and of each."""

    title: str
    options: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]

    def overrides(self, stage: int) -> list[str]:
        """The command line of a stage, but for where it starts."""
        return ["task=mlm", "attention=exact", *self.options, *self.stages[stage]]

    def key(self, stage: int = -1) -> dict[str, Any]:
        """Of the cell in which that stage is trained: all that decides it, the stages before it too."""
        stage %= len(self.stages)
        return {"stages": [self.overrides(i) for i in range(stage + 1)]}

    @property
    def directory(self) -> str:
        return str(place(self.key()["stages"]))

    @property
    def steps(self) -> int:
        """Of all stages together."""
        found = (option for stage in self.stages for option in stage if option.startswith("trainer.steps="))
        return sum(int(option.split("=")[1]) for option in found)


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. texts of `length` tokens; draws of the noise; shares of the training steps after which
    uptraining is looked at; lengths, of which a model reads those that it has positions for."""

    models: tuple[Model, ...]
    attentions: tuple[str, ...] = ATTENTIONS
    ms: tuple[int, ...] = (64, 256)
    texts: int = 24
    calibration_texts: int = 4
    length: int = 512
    draws: int = 3
    uptrained: tuple[str, ...] = (CAUSAL,)         # models
    uptraining: tuple[str, ...] = ("trainer.schedule=constant", "trainer.warmup=0", "trainer.lr=5e-4")
    shares: tuple[float, ...] = (0.01, 0.03, 0.1)
    seeds: int = 4
    m: int = 256                                   # of uptraining and of lengths
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    cost_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    rounds: int = 5
    least: float = 0.5                             # nats that uniform attention must cost
    workers: int | None = None

    def model(self, title: str) -> Model:
        return next(model for model in self.models if model.title == title)

    @property
    def arms(self) -> list[Arm]:
        return study.arms_of(known(self.attentions), self.ms)

    def uptrained_arms(self) -> list[Arm]:
        return study.arms_of(known(UPTRAINED), [self.m])

    def steps(self, model: Model) -> list[int]:
        """Those after which uptraining is looked at: multiples of the first."""
        every = max(1, round(self.shares[0] * model.steps))
        return [every * round(share / self.shares[0]) for share in self.shares]

    def arms_at(self, length: int) -> list[Arm]:
        """Near-far attention has cells as the root of the length, the others what they have everywhere."""
        cells = 8 * round(CELLS * (length / AT) ** 0.5 / 8)
        return study.arms_of(known((*BY_LENGTH, f"{DEFAULT} cells={cells}")), [self.m])


def place(stages: list[list[str]]) -> Path:
    """The directory of the last stage: its name depends on all of them."""
    return HOME.place([option for stage in stages for option in stage])


# ---- the exact models


def train(stages: list[list[str]]) -> dict[str, Any]:
    """The final record of the last stage, its earlier ones there already; the model stays in `place(stages)`."""
    start = [f"task.init={place(stages[:-1])}"] if stages[1:] else []
    records = runs.run([*stages[-1], *start, "resume=auto", "trainer.keep=1"], place(stages))
    return {key: records[-1][key] for key in ("loss", "perplexity", "accuracy", "step", "time_s")}


# ---- directly after the swap


@lru_cache(maxsize=2)
def subject_of(start: str, texts: int, calibration_texts: int, length: int) -> Subject:
    """The model of a run, on the test text; fitted, where there is something to fit, to the training text."""
    return Subject(start, str(official_file("wikitext2", "test")), str(official_file("wikitext2", "train")), None,
                   length, texts, calibration_texts, seed=0, cache_dir=HOME.path / "tokens")


def look(start: str, texts: int, calibration_texts: int, length: int) -> dict[str, Any]:
    """Losses of the exact model, one a text, and mean |x + y|^2 of each head of each layer."""
    subject = subject_of(start, texts, calibration_texts, length)
    return {"losses": [each.loss for each in subject.exact],
            "layers": [study.of_heads(subject, i) for i in range(len(subject.calls[0]))]}


def swap(start: str, texts: int, calibration_texts: int, length: int, text: str, m: int | None,
         draw: int) -> dict[str, Any]:
    return study.of_swap(subject_of(start, texts, calibration_texts, length), Arm(text, m), draw, 0)


# ---- uptraining


def attention(arm: Arm) -> list[str]:
    """As the command line says it."""
    name, *options = arm.text.split()
    return [f"attention={name}", *(f"attention.{option}" for option in options),
            *([f"features.m={arm.m}"] if arm.m else [])]


def validation() -> Path:
    """A part of the validation text: every EVERY-th line."""
    path = HOME.path / "validation.tokens"
    if not path.exists():
        lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
        HOME.path.mkdir(parents=True, exist_ok=True)
        path.write_text("".join([line for line in lines if line.strip()][::EVERY]), encoding="utf-8")
    return path


def uptraining(model: Model, setting: Setting, arm: Arm, seed: int, steps: int) -> list[str]:
    """The command line of a run from the swapped model: data, masks and order are those of the seed."""
    last = [o for o in model.stages[-1] if not o.startswith("trainer.") or o.startswith("trainer.batch")]
    own = [o for o in model.options if not o.startswith(("trainer.", "task.sizes", "+task.sizes"))]
    return ["task=mlm", *own, *last, *setting.uptraining, *attention(arm), "task.init=uptrain",
            "task.text=${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens",
            f"task.validation_text={HOME.path}/validation.tokens", f"trainer.steps={steps}",
            "trainer.save_every=100000", f"seed={1000 + seed}"]


def uptrain(overrides: list[str], start: str, evaluated: list[int]) -> dict[str, float]:
    """step -> loss on the part of the validation text; step 0 is the swap itself."""
    validation()
    given, found = [*overrides, f"task.model={start}"], {}
    steps = next(o for o in overrides if o.startswith("trainer.steps="))
    at_once = HOME.passing([*(o for o in given if o != steps), "trainer.steps=0"])
    found["0"] = at_once[-1]["loss"]
    following = [f"trainer.eval_every={evaluated[0]}", "trainer.keep=1", "trainer.select=last"]
    for record in HOME.passing([*given, *following]):
        if record["split"] == "validation" and record["step"] in evaluated and "loss" in record:
            found[str(record["step"])] = record["loss"]
    return found


# ---- against the length


def matched(start: str, texts: int, calibration_texts: int, at: int, length: int, text: str, m: int | None,
            draw: int) -> list[float]:
    """Relative error of the output for heads drawn from normal laws with the moments of the model's own queries, keys
    and values: a number a layer. Their tokens are independent, so that nothing is near; bidirectional."""
    layers = moments(start, texts, calibration_texts, at)
    arm, errors = Arm(text, m), []
    for number, laws in enumerate(layers):
        generator = torch.Generator().manual_seed(10_000 * draw + number)
        q, k, v = (normal(mean, root, length, generator) for mean, root in laws)
        heads, d = q.shape[1], q.shape[3]
        with torch.no_grad():
            layer = arm.mechanism(draw).layer(heads, d, layer=number).eval()
            exact = exact_attention(q / d**0.25, k / d**0.25, v)
            errors.append(float(relative_error(layer(q, k, v), exact)))
    return errors


@lru_cache(maxsize=2)
def moments(start: str, texts: int, calibration_texts: int, length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of q, k and v of each layer: mean (1, H, 1, d) and root of the covariance (1, H, d, d), over texts and tokens."""
    subject = subject_of(start, texts, calibration_texts, length)
    return [[law(torch.cat([getattr(calls[i], name) for calls in subject.calls], 2)) for name in ("q", "k", "v")]
            for i in range(len(subject.calls[0]))]


def law(t: Tensor) -> tuple[Tensor, Tensor]:
    mean = t.double().mean(2, keepdim=True)
    centred = t.double() - mean
    values, vectors = torch.linalg.eigh(centred.mT @ centred / t.shape[2])
    return mean, vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def normal(mean: Tensor, root: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(1, H, length, d) float32."""
    drawn = torch.randn(1, mean.shape[1], length, mean.shape[3], generator=generator, dtype=torch.float64)
    return (mean + drawn @ root.mT).float()


# ---- time and memory


def layer_of(text: str, m: int | None):
    """Bidirectional attention of 8 heads of 64 by an arm, as a function of q, k and v."""
    return Arm(text, m).mechanism().layer(8, 64).eval()


def cost(length: int, arms: list[list[Any]], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a forward pass, all arms in turn, in each round; MiB at the peak, a process for each."""
    spent = in_new_process(times, length=length, arms=arms, rounds=rounds)
    return {"ms": spent, "mib": {Arm(*arm).label: in_new_process(memory, length=length, arm=arm) for arm in arms}}


@torch.no_grad()
def times(length: int, arms: list[list[Any]], rounds: int) -> dict[str, list[float]]:
    layers = {Arm(*arm).label: layer_of(*arm) for arm in arms}
    return timed(lambda layer, tensors: layer(*tensors[:3]), layers, inputs(length), rounds)


@torch.no_grad()
def memory(length: int, arm: list[Any]) -> float:
    layer, tensors = layer_of(*arm), inputs(length)
    layer(*inputs(256)[:3])  # libraries and threads
    before = reset_peak()
    out = layer(*tensors[:3])
    return (peak() - before - 4 * out.numel()) / 2**20


# ---- results


@dataclass
class Found:
    """What was computed; keys as in `fidelity.main`."""

    setting: Setting
    trained: dict[str, dict[str, Any]]                      # model
    looks: dict[str, dict[str, Any]]
    swaps: dict[tuple[str, Arm, int], dict[str, Any]]       # model, arm, draw
    uptrained: dict[tuple[str, Arm, int], dict[str, float]] = field(default_factory=dict)   # model, arm, seed
    matched: dict[tuple[int, Arm, int], list[float]] = field(default_factory=dict)          # length, arm, draw
    by_length: dict[tuple[int, Arm, int], dict[str, Any]] = field(default_factory=dict)     # the causal model's
    costs: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)               # length

    def draws(self, arm: Arm) -> int:
        return self.setting.draws if arm.mechanism().rows is not None else 1

    def above(self, title: str, text: str, m: int | None = None) -> np.ndarray | None:
        """(texts,): loss above exact in nats; None where there is no such attention yet."""
        arm = Arm(text, m)
        return self.of_texts(title, arm, "above") if (title, arm, 0) in self.swaps else None

    def of_texts(self, title: str, arm: Arm, key: str) -> np.ndarray:
        """(texts,): each text's mean over draws."""
        rows = [self.swaps[title, arm, draw][f"{key}_texts"] for draw in range(self.draws(arm))]
        return np.mean(rows, 0)
