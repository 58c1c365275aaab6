"""The runs of `table2`: exact encoders, their attention swapped, uptraining, fine-tuning on GLUE.

A pair is an exact encoder and a seed: text, masks, order and Gaussian rows of a pair are the same in all its arms and
at every step, and encoders go round with the pairs. A cell's key is all that decides it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crt_exp.report import runs
from crt_exp.report.fidelity_runs import attention
from crt_exp.studies.fidelity import Arm, arms_of

SOURCES = ("tasks/mlm.py", "tasks/objectives.py", "models/encoders.py")
HOME = runs.Home(Path("outputs/table2"), SOURCES)
CHARACTERS, PIECES = "characters", "word pieces"
NARROW, NARROW_PIECES = f"{CHARACTERS}, heads of 8", f"{PIECES}, heads of 8"
EXACT, UNIFORM, ELU = Arm("exact", None), Arm("uniform", None), Arm("elu", None)
LINEAR = ("relu", "favorp", "favorpp", "favorsharp")       # with projections
JUDGED = ("favorp", "favorpp")
FIRST = 1000                # seed of the first pair; encoders have the seeds from 0 on
READ = 64                   # rows of held-out text that are read at once


@dataclass(frozen=True)
class Kind:
    """Encoders of one vocabulary. options: of all stages of task=mlm, each of which goes on from the one before.

    batch: rows of a step of uptraining, in blocks of the last stage; near_far: near-far attention of a size for these
    blocks; every: line of the validation text that is held out; trained_ms: projections of the judged arms that are
    uptrained; others: arms with projections that are uptrained beside them; texts, spread over the validation text, on
    which gates are asked; fine_tuned: of the kinds that pass them, task=glue starts from the first of these.
    """

    title: str
    options: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    batch: int
    near_far: str
    every: int
    trained_ms: tuple[int, ...]
    others: tuple[str, ...] = ("relu", "favorsharp")
    texts: int = 32
    fine_tuned: bool = False

    @property
    def block(self) -> int:
        return int(next(option for option in self.stages[-1] if option.startswith("task.block=")).split("=")[1])

    def key(self, seed: int, stage: int = -1) -> dict[str, Any]:
        """Of the cell in which that stage is trained: all that decides it, the stages before it too."""
        last = stage % len(self.stages)
        common = ["task=mlm", "attention=exact", *self.options, *reading(self.every)]
        return {"stages": [[*common, *options, f"seed={seed}"] for options in self.stages[:last + 1]],
                "every": self.every}

    def start(self, seed: int) -> str:
        return str(place(self.key(seed)["stages"]))

    @property
    def near(self) -> Arm:
        return Arm(self.near_far, None)

    def swapped(self, ms: Sequence[int]) -> list[Arm]:
        return [EXACT, UNIFORM, ELU, self.near, *(Arm(name, m) for m in ms for name in LINEAR)]


@dataclass(frozen=True)
class Glue:
    """options, examples: of fine-tuning, and training examples of some tasks; arms: swapped into the encoders that
    are fine-tuned. The first of datasets stands; another joins where the exact encoders beat both controls.

    scratch: options with which an encoder is pretrained with each attention from new weights; m: of all of these.
    """

    options: tuple[str, ...]
    arms: tuple[str, ...]
    scratch: tuple[str, ...]
    examples: dict[str, int] = field(default_factory=dict)
    datasets: tuple[str, ...] = ("sst2", "stsb")
    m: int = 256
    scratch_m: int = 64
    scratch_every: int = 16
    seeds: int = 4
    scratch_arms: tuple[str, ...] = ("favorp", "elu", "relu", "favorpp", "exact", "uniform")


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. encoders: exact ones of each kind; other_pairs: of arms that are not judged."""

    kinds: tuple[Kind, ...]
    glue: Glue
    uptraining: tuple[str, ...] = ("trainer.schedule=constant", "trainer.warmup=0", "trainer.lr=3e-4")
    ms: tuple[int, ...] = (256, 64)
    encoders: int = 2
    pairs: int = 12
    other_pairs: int = 4
    steps: tuple[int, ...] = (100, 300)     # multiples of the first
    captures: int = 3                       # noises with which errors of layers are measured
    costs: float = 0.5                      # least nats that uniform attention must cost
    heads: float = 0.5                      # least share of heads whose mean |x + y|^2 lies between 4 and 24
    error: float = 1.2                      # least error of FAVOR+ over that of FAVOR++
    points: float = 2.0                     # least that uniform attention must cost on a task of GLUE
    workers: int | None = None              # runs at a time; None: one a core

    @property
    def m(self) -> int:
        return self.ms[0]

    def kind(self, title: str) -> Kind:
        return next(kind for kind in self.kinds if kind.title == title)

    def start(self, kind: Kind, pair: int) -> str:
        return kind.start(pair % self.encoders)

    def uptrained(self, kind: Kind) -> dict[Arm, int]:
        """Arm -> pairs."""
        judged = [EXACT, *(Arm(name, m) for m in kind.trained_ms for name in JUDGED)]
        others = [UNIFORM, ELU, kind.near, *(Arm(name, self.m) for name in kind.others)]
        return dict.fromkeys(judged, self.pairs) | dict.fromkeys(others, self.other_pairs)


# ---- keys


def looking(setting: Setting) -> dict[tuple[str, int], dict[str, Any]]:
    """(kind, seed) -> key, of each encoder."""
    return {(kind.title, seed): {"start": kind.start(seed), "length": kind.block, "texts": kind.texts,
                                 "m": setting.m, "draws": setting.captures}
            for kind in setting.kinds for seed in range(setting.encoders)}


def swapping(setting: Setting, kinds: Sequence[Kind]) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    """(kind, arm, pair) -> key, of step 0."""
    return {(kind.title, arm, pair): {"start": setting.start(kind, pair), "every": kind.every, "text": arm.text,
                                      "m": arm.m, "seed": FIRST + pair}
            for kind in kinds for pair in range(setting.pairs) for arm in kind.swapped(setting.ms)}


def uptraining(setting: Setting, kinds: Sequence[Kind]) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    return {(kind.title, arm, pair): {"overrides": uptraining_of(kind, arm, pair, setting),
                                      "start": setting.start(kind, pair), "every": kind.every}
            for kind in kinds for arm, pairs in setting.uptrained(kind).items() for pair in range(pairs)}


def uptraining_of(kind: Kind, arm: Arm, pair: int, setting: Setting) -> list[str]:
    return ["task=mlm", *reading(kind.every), f"task.block={kind.block}", *setting.uptraining,
            f"trainer.batch={kind.batch}", f"trainer.steps={setting.steps[-1]}",
            f"trainer.eval_every={setting.steps[0]}", "trainer.save_every=1000000", "trainer.keep=1",
            f"trainer.eval_batch={READ}", *attention(arm), "task.init=uptrain", f"seed={FIRST + pair}"]


def reading(every: int) -> list[str]:
    return ["task.text=${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens", f"task.validation_text={held_out_file(every)}"]


def from_scratch(setting: Setting) -> dict[str, dict[str, Any]]:
    """Attention -> key, of an encoder that was pretrained with it."""
    glue = setting.glue
    return {name: {"stages": [["task=mlm", *glue.scratch, *reading(glue.scratch_every),
                               *attention(scratch_arm(name, glue.scratch_m))]], "every": glue.scratch_every}
            for name in glue.scratch_arms}


def scratch_arm(name: str, m: int) -> Arm:
    return Arm(name, m if name in LINEAR else None)


def glue_arms(setting: Setting) -> list[Arm]:
    return arms_of(setting.glue.arms, [setting.glue.m])


def fine_tuning(setting: Setting, kind: Kind, datasets: Sequence[str],
                arms: Sequence[Arm]) -> dict[tuple[Arm, str, int], dict]:
    """(arm, task, seed) -> key: exact encoders of the kind, swapped and fine-tuned."""
    return {(arm, data, seed): {"overrides": [*of_data(data, seed, setting.glue), "task.init=uptrain"],
                                **arm._asdict(), "option": "task.model", "start": setting.start(kind, seed)}
            for data in datasets for arm in arms for seed in range(setting.glue.seeds)}


def scratch_tuning(setting: Setting, datasets: Sequence[str]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(attention, task, seed) -> key: encoders that were pretrained with it, fine-tuned with the same noise."""
    glue = setting.glue
    return {(name, data, seed): {"overrides": of_data(data, seed, glue),
                                 **scratch_arm(name, glue.scratch_m)._asdict(), "option": "task.init",
                                 "start": str(place(key["stages"]))}
            for name, key in from_scratch(setting).items() for data in datasets for seed in range(glue.seeds)}


def of_data(data: str, seed: int, glue: Glue) -> list[str]:
    examples = [f"task.examples={glue.examples[data]}"] if data in glue.examples else []
    return ["task=glue", f"task.dataset={data}", *glue.options, *examples, f"seed={FIRST + seed}"]


# ---- places


def place(stages: Sequence[Sequence[str]]) -> Path:
    """The directory of the last stage: its name depends on all of them."""
    return HOME.place([option for stage in stages for option in stage])


def held_out_file(every: int) -> Path:
    return HOME.path / f"validation-{every}.tokens"


def vocabulary_folder(size: int) -> Path:
    return HOME.path / f"characters-{size}"
