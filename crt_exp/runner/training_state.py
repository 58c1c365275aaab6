"""What a run needs to go on: all that a step depends on, and its way into checkpoints and back."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from crt_exp.data.ranks import whole
from crt_exp.runner import checkpoint, task_state
from crt_exp.runner.adapters import Adapters
from crt_exp.runner.generators import rng_state, set_rng_state
from crt_exp.runner.processes import World
from crt_exp.runner.run import Run
from crt_exp.tasks.base import Task

CHECKPOINTS = "checkpoints"  # within the run directory


@dataclass
class Progress:
    """Where a run stands; saved with each checkpoint."""

    step: int = 0
    epoch: int = 0
    position: int = 0                  # steps of this epoch that are done
    evaluated: int = 0                 # the step of the last evaluation
    worse: int = 0                     # evaluations since the best
    best: dict[str, Any] | None = None      # step, and metrics of the validation split
    loss: float = 0.0                  # summed since the last record of the training split
    losses: int = 0


class TrainingState:
    """Weights, optimiser, generators, the task's own state, and where the run stands, of one process of `world`.

    keep: checkpoints that are kept besides the best. adapters: where there are some, checkpoints leave the weights out
    that stay as they are. Attributes: `progress`; `saved` and `saved_at`, the step of the
    last checkpoint and when it was written. All processes call each method together.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, task: Task, run: Run, world: World, keep: int,
                 per_epoch: int | None, adapters: Adapters | None = None):
        self.module, self.optimizer, self.task, self.run, self.world = module, optimizer, task, run, world
        self.keep, self.per_epoch, self.scaler = keep, per_epoch, world.accelerator.scaler
        self.stay, self.digest = (adapters.stay, adapters.digest) if adapters else (set(), None)
        self.root, self.progress = run.directory / CHECKPOINTS, Progress()
        self.saved, self.saved_at = 0, time.monotonic()

    @property
    def epoch(self) -> float:
        """Epochs that are done."""
        part = self.progress.position / self.per_epoch if self.per_epoch else 0
        return round(self.progress.epoch + part, 4)

    def save(self) -> None:
        """The first process writes a checkpoint and removes old ones; where it fails, all raise CheckpointError."""
        changing = {name: t for name, t in self.module.state_dict().items() if name not in self.stay}
        tensors = {"model": {name: whole(t) for name, t in changing.items()},
                   "optimizer": checkpoint.optimizer_tensors(self.module, self.optimizer)}
        of_task, plain = task_state.split(self.world.gather(task_state.state_of(self.task)))
        tensors |= {"task": of_task} if of_task else {}
        state = asdict(self.progress) | {
            "rng": self.world.gather(rng_state()), "records": len(self.run.records), "task": plain,
            "scaler": self.scaler.state_dict() if self.scaler else None, "stay": self.digest}
        problem = None
        if self.world.main:
            try:
                checkpoint.save(self.root, self.progress.step, tensors, state)
                checkpoint.prune(self.root, self.keep, (self.progress.best or {}).get("step"))
            except checkpoint.CheckpointError as error:
                problem = str(error)
        problem = self.world.broadcast(problem)
        if problem:
            raise checkpoint.CheckpointError(problem)
        self.saved, self.saved_at = self.progress.step, time.monotonic()

    def restore(self) -> None:
        """Loads the newest intact checkpoint and takes back later records; without one the run starts over.

        Raises CheckpointError where fewer records are left than were written before that checkpoint.
        """
        path = self.world.broadcast(checkpoint.newest(self.root, self._say) if self.world.main else None)
        if path is None:
            self._begin_anew()
            return
        state = checkpoint.load_state(path)
        self._check_records(path, state["records"])
        self._load_model(path, state)
        checkpoint.load_optimizer(self.module, self.optimizer, checkpoint.load_tensors(path / "optimizer.safetensors"))
        self._load_task(path, state)
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**{key: state[key] for key in asdict(Progress())})
        self.saved = self.progress.step
        self.run.rewind(state["records"])
        self._say(f"continuing from {path} (epoch {self.epoch:g})")
        if len(state["rng"]) == self.world.size:
            set_rng_state(state["rng"][self.world.rank])
        else:
            self._say(f"{len(state['rng'])} processes wrote it, now there are {self.world.size}: their generators "
                      "start afresh")

    def _load_model(self, path: Path, state: dict[str, Any]) -> None:
        """The weights of a checkpoint. Raises CheckpointError where it belongs to others that stay as they are."""
        if state.get("stay") != self.digest:
            raise checkpoint.CheckpointError(f"{path} holds adapters of other weights than those that this run starts "
                                             "from: the model of task.init or task.model has changed since")
        checkpoint.load_model(self.module, checkpoint.load_tensors(path / "model.safetensors"), path, self.stay)

    def _load_task(self, path: Path, state: dict[str, Any]) -> None:
        """What the task kept. Raises CheckpointError where another number of processes wrote it, each its own."""
        file = path / "task.safetensors"
        states = task_state.joined(checkpoint.load_tensors(file) if file.exists() else {}, state.get("task", [{}]))
        mine = task_state.share(states, self.world.rank, self.world.size)
        if mine is None:
            raise checkpoint.CheckpointError(
                f"{path} was written by {len(states)} processes, each with its own state of this task, and now there "
                f"are {self.world.size}: continue with as many as before")
        self.task.load_state_dict(mine)

    def _begin_anew(self) -> None:
        """From the first step; the records of an earlier attempt are kept under another name."""
        kept = self.run.begin_anew()
        if kept:
            self._say(f"no intact checkpoint in {self.root}: the run starts over; its earlier records are kept in "
                      f"{kept.name}")

    def _check_records(self, path: Path, count: int) -> None:
        left = self.world.broadcast(len(self.run.records))
        if left < count:
            raise checkpoint.CheckpointError(
                f"{self.run.metrics} holds {left} records, and {path} was written after {count}: lines are missing. "
                f"Put the whole file back, or move {self.root} away: then the run starts over")

    def load_best(self) -> None:
        """The weights of the best evaluation, and what the task kept with them; the last ones where that is damaged."""
        path = self.root / f"step-{self.progress.best['step']}"
        reason = self.world.broadcast(checkpoint.damage(path) if self.world.main else None)
        if reason:
            self._say(f"the best checkpoint {path} is damaged ({reason}): the last weights are tested in its place")
        else:
            state = checkpoint.load_state(path)
            self._load_model(path, state)
            self._load_task(path, state)

    def _say(self, text: str) -> None:
        if self.world.main:
            print(text)
