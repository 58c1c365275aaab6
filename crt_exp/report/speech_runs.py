"""What reports on speech recognition run: exact models, arms swapped into them and trained on, arms from new weights.

Every run that trains is a command line of task=librispeech. Arms of one seed read the same data in the same order with
the same masks and start from the same weights; that seed is their noise's too. A cell's key is all that it depends on.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from crt_exp.config import instantiate, read_yaml
from crt_exp.features import SDERF
from crt_exp.mechanism import OF_MAP, Mechanism
from crt_exp.models import recogniser
from crt_exp.report import runs
from crt_exp.studies import encoder_steps
from crt_exp.studies.memory import in_new_process
from crt_exp.studies.predicted import predicted_errors
from crt_exp.swap.swap import calibrate_attention
from crt_exp.tasks.base import Plan, Reader, Task

SOURCES = ("tasks/librispeech.py", "models/conformer_transducer.py", "models/recogniser.py", "data/speech.py")
HOME = runs.Home(Path("outputs/fig3"), SOURCES)
TASK = "task=librispeech"
MAIN = "the exact model"
BATCHES = 4             # of validation utterances on which attention is compared layer by layer
PACED, BEAM = 40, 4     # test utterances on which speed is measured, and the width of the beam
TRAINED = 10            # batches of training on which it is measured
CALIBRATED = 4          # batches of training to which clusters are fitted where nothing is trained


class Arm(NamedTuple):
    """A choice of conf/attention with m projections (None: it has none), and options that are not those of its file, as
    `Mechanism.of` takes them: those of its map begin with "features."."""

    attention: str
    m: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        return {"attention": self.attention, "m": self.m} | ({"options": dict(self.options)} if self.options else {})

    def typed(self) -> list[str]:
        given = [(OF_MAP + "m", self.m)] * (self.m is not None) + [
            (key if key.startswith(OF_MAP) else f"attention.{key}", value) for key, value in self.options]
        return [f"attention={self.attention}", *(f"{key}={value}" for key, value in given)]


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for; a report over other attention takes one with other `arms`, `ms` and `pairs`.

    data, exact, uptrained, scratch: options of all runs, and of each kind of them. arms: choices of conf/attention,
    with each of ms; plain: those without projections; options: those of an arm, by its name. pairs: (better, worse), as
    the papers say. swaps: noises with which a swapped model is tested as it is, pair_swaps: those with arms of the
    pairs; seeds, scratch_seeds, speaker_seeds: of the runs that train. others: (what differs, options) of further exact
    models, such as those whose attention has another temperature, in which the pairs are compared as swapped.
    """

    data: tuple[str, ...]
    exact: tuple[str, ...]
    uptrained: tuple[str, ...]
    scratch: tuple[str, ...]
    arms: tuple[str, ...] = ("favorp", "favorpp", "favorsharp", "favor", "hyp")
    plain: tuple[str, ...] = ("exact", "uniform", "identity", "nearfar")
    options: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    ms: tuple[int, ...] = (8, 16)
    pairs: tuple[tuple[str, str], ...] = (("favorpp", "favorp"),)
    swaps: int = 12
    pair_swaps: int = 24
    seeds: int = 5
    scratch_arms: tuple[str, ...] = ("exact", "uniform", "favorp", "favorpp", "nearfar")
    scratch_seeds: int = 5
    speaker: str | None = None         # whom a second exact model never hears, and is tested on; None: there is none
    speaker_arms: tuple[str, ...] = ("exact", "uniform", "favorp", "favorpp")
    speaker_seeds: int = 5
    others: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kept: bool = False                 # arms that train keep their directories too, and resume in the middle of a run
    workers: int | None = None         # runs at a time; None: one a core
    sample: tuple[str, ...] = ()       # options of a run on the small real subset; none: there is no such run

    def of(self, names: Iterable[str]) -> list[Arm]:
        """The arms of these names, in this order; those with projections with each m."""
        options = dict(self.options)
        return [Arm(name, m, options.get(name, ()))
                for name in names for m in ((None,) if name in self.plain else self.ms)]

    def all_arms(self) -> list[Arm]:
        return self.of([*self.plain, *self.arms])


# ---- keys ------------------------------------------------------------------------------------------------------------


def checkpoint(setting: Setting, speaker: str | None = None, options: Sequence[str] = ()) -> dict[str, Any]:
    """The exact model, or the one that never hears a speaker, or one of other options; kept, and continued where it
    was interrupted."""
    given = [TASK, *setting.data, *setting.exact, *without(speaker), *options, "attention=exact"]
    return {"overrides": given, "kept": True}


def checkpoints(setting: Setting) -> list[dict[str, Any]]:
    return [*(checkpoint(setting, speaker) for speaker in dict.fromkeys((None, setting.speaker))),
            *(checkpoint(setting, options=options) for _, options in setting.others)]


def exact_models(setting: Setting) -> dict[str, dict[str, Any]]:
    """Of those that hear all speakers, by what differs."""
    every = ((MAIN, ()), *setting.others)
    return {name: checkpoint(setting, options=options) for name, options in every}


def without(speaker: str | None) -> list[str]:
    return [f"task.held_out_speaker={speaker}"] if speaker else []


def uptraining(setting: Setting, arm: Arm, seed: int, speaker: str | None = None) -> dict[str, Any]:
    given = [TASK, *setting.data, *setting.uptrained, *without(speaker), *arm.typed(), f"seed={seed}"]
    return {"overrides": given, "start": checkpoint(setting, speaker)["overrides"], "kept": setting.kept}


def from_scratch(setting: Setting, arm: Arm, seed: int) -> dict[str, Any]:
    given = [TASK, *setting.data, *setting.scratch, *arm.typed(), f"seed={seed}"]
    return {"overrides": given, "kept": setting.kept}


def training(setting: Setting) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    """(phase, arm, seed) -> key, of all arms that train."""
    keys = {("uptrained", arm, seed): uptraining(setting, arm, seed)
            for seed in range(setting.seeds) for arm in setting.all_arms()}
    if setting.speaker:
        keys |= {("speaker", arm, seed): uptraining(setting, arm, seed, setting.speaker)
                 for seed in range(setting.speaker_seeds) for arm in setting.of(setting.speaker_arms)}
    return keys | {("scratch", arm, seed): from_scratch(setting, arm, seed)
                   for seed in range(setting.scratch_seeds) for arm in setting.of(setting.scratch_arms)}


def swapping(setting: Setting, arms: Iterable[Arm] | None = None,
             options: Sequence[str] = ()) -> dict[tuple[Arm, int], dict[str, Any]]:
    """(arm, seed of its noise) -> key, of the exact model (of such options) with its attention swapped, as it is."""
    return {(arm, seed): {**arm.key, "seed": seed, **start(setting, options)}
            for arm in arms or setting.all_arms() for seed in range(noises(setting, arm))}


def noises(setting: Setting, arm: Arm) -> int:
    """How many of them a swapped model is tested with."""
    if arm.m is None:
        return 1
    return setting.pair_swaps if arm in compared(setting) else setting.swaps


def looking(setting: Setting, arms: Iterable[Arm] | None = None,
            options: Sequence[str] = ()) -> dict[Arm, dict[str, Any]]:
    """Of each arm, how far its attention is from that of the exact model."""
    return {arm: {**arm.key, **start(setting, options), "batches": BATCHES}
            for arm in arms or setting.of(setting.arms)}


def compared(setting: Setting) -> list[Arm]:
    """The arms of the pairs."""
    return setting.of(dict.fromkeys(name for pair in setting.pairs for name in pair))


def other_swaps(setting: Setting) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    """(what differs, arm, seed) -> key, of the further exact models: the pairs, and what they are judged by."""
    arms = [*compared(setting), Arm("exact"), Arm("uniform")]
    return {(name, *place): key for name, options in setting.others
            for place, key in swapping(setting, arms, options).items()}


def other_looks(setting: Setting) -> dict[tuple[str, Arm], dict[str, Any]]:
    return {(name, arm): key for name, options in setting.others
            for arm, key in looking(setting, compared(setting), options).items()}


def pacing(setting: Setting) -> dict[Arm, dict[str, Any]]:
    """The speed of training and recognition."""
    return {arm: {**arm.key, **start(setting), "utterances": PACED, "beam": BEAM}
            for arm in (Arm("exact"), Arm(setting.arms[0], max(setting.ms)))}


def sampling(setting: Setting) -> dict[Arm, dict[str, Any]]:
    """On the real subset, with the default corpus and sizes."""
    arms = (Arm("exact"), Arm("favorpp", max(setting.ms))) if setting.sample else ()
    return {arm: {"overrides": [TASK, *setting.sample, *arm.typed()]} for arm in arms}


def start(setting: Setting, options: Sequence[str] = ()) -> dict[str, Any]:
    return {"start": checkpoint(setting, options=options)["overrides"]}


# ---- what cells hold -------------------------------------------------------------------------------------------------


def train(overrides: list[str], start: list[str] | None = None, kept: bool = False) -> dict[str, Any]:
    """The test split's rates and loss, and `curve` and `losses`: [step, rate, loss] on the validation split and
    [step, loss] in training."""
    given = [*overrides, *([f"task.init={place(start)}"] if start else [])]
    records = HOME.kept(given) if kept else HOME.passing(given)
    last = records[-1]
    return {**{key: last[key] for key in ("wer", "cer", "loss", "utterances")}, "steps": last["step"],
            "seconds": last["time_s"],
            "curve": [[r["step"], r["wer"], r["loss"]] for r in records if r["split"] == "validation"],
            "losses": [[r["step"], r["loss"]] for r in records if r["split"] == "train"]}


@torch.no_grad()
def after_swap(attention: str, m: int | None, seed: int, start: list[str],
               options: dict[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """split -> loss (nats an utterance) and rates of the exact model with its attention swapped."""
    task, model = task_of(tuple(start)), model_with(attention, m, seed, start, options).eval()
    if any(getattr(part, "clusters", None) is not None for part in model.modules()):
        calibrate(task, model, list(islice(task.batches("train", Plan(1)), CALIBRATED)))
    found = {split: task.evaluate(model, split, Reader(task)) for split in ("validation", "test")}
    return {split: {key: each[key] for key in ("loss", "wer", "cer")} for split, each in found.items()}


def diagnosis(attention: str, m: int, start: list[str], batches: int,
              options: dict[str, Any] | None = None) -> dict[str, list]:
    """Layer by layer on validation utterances: mean |x + y|^2 of each head, the predicted error of an entry of its
    kernel matrix (None: there is no closed form), and the measured relative error of the output beside uniform's."""
    task, model = task_of(tuple(start)), model_with(attention, m, 0, start, options)
    every = list(task.batches("validation", Plan(1)))  # from short utterances to long ones
    calibrate(task, model, every[::max(1, len(every) // batches)])
    states = [part for part in model.modules() if getattr(part, "seen", None) is not None]
    return {"S": [s.seen.mean_sq_sum.flatten().tolist() for s in states], "predicted": [predicted(s) for s in states],
            "measured": [s.measured.relative_error for s in states],
            "uniform": [s.measured.relative_uniform for s in states]}


def calibrate(task: Task, model: nn.Module, batches: Iterable[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that uniform attention is nearer to: the report tells it
        calibrate_attention(model, [task.inputs(batch) for batch in batches])


def predicted(state: nn.Module) -> list[float] | None:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return None
    try:
        return predicted_errors(state.phi, state.seen, state.m).tolist()
    except NotImplementedError:  # parts that share their projections
        return None


def pace(attention: str, m: int | None, start: list[str], utterances: int, beam: int) -> dict[str, float]:
    """Seconds of work for a second of audio: greedy, beam, training. One process, all its threads."""
    task = instantiate(settings_of(tuple(start)), beam=beam)
    task.splits["test"] = type(task.splits["test"])(*(part[:utterances] for part in task.splits["test"]))
    model = model_with(attention, m, 0, start)
    with torch.no_grad():
        task.evaluate(model.eval(), "test", Reader(task))
    optimizer = torch.optim.AdamW(model.train().parameters())
    for batch in islice(task.batches("train", Plan(1)), TRAINED):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        task.updated(model, 0)
    return {what: task.pace.spent[what] / task.pace.audio[what] for what in task.pace.spent}


def encoder_times(seconds: int, rounds: int) -> dict[str, list[float]]:
    return in_new_process(encoder_steps.times, seconds=seconds, rounds=rounds)


def encoder_memory(seconds: int, method: str) -> float:
    return in_new_process(encoder_steps.memory, seconds=seconds, method=method)


# ---- the exact model -------------------------------------------------------------------------------------------------


def place(start: Sequence[str]) -> Path:
    return HOME.place(start)


def settings_of(start: tuple[str, ...]) -> Any:
    """The task of a kept run, as it was configured."""
    return read_yaml(place(start) / "config.yaml").task


@lru_cache(maxsize=1)
def task_of(start: tuple[str, ...]) -> Task:
    return instantiate(settings_of(start))


def model_with(attention: str, m: int | None, seed: int, start: Sequence[str],
               options: dict[str, Any] | None = None) -> nn.Module:
    """The exact model's weights with another attention, as task.init does it."""
    found, tensors = recogniser.load(place(start), "task.init")
    model = found._replace(mechanism=Mechanism.of(attention, m=m, seed=seed, **(options or {}))).build()
    recogniser.take_weights(model, tensors, "task.init")
    return model
