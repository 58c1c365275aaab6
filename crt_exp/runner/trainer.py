"""The training loop, the only one: any `Task`, on one process or many, stopped anywhere and
continued to the same numbers.

A step is loss, backward, clip, optimiser. Between steps, in this order: checkpoint, stop if asked to, evaluate. A
checkpoint is written before the evaluation of its step, so a continued run repeats that evaluation and nothing else.
All that a step depends on is in the checkpoint (weights, optimiser, generators, position in the epoch) or a pure
function of the step (learning rate, data order).
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.attention.linear import same_step
from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.features.nonfinite import Diverged, NotFinite, first_nonfinite, layer_of, nonfinite_parameters
from crt_exp.data.ranks import whole
from crt_exp.runner import checkpoint
from crt_exp.runner.adapters import lightened
from crt_exp.runner.generators import generators, rng_state, seed_everything, set_generators, set_rng_state, stream_seed
from crt_exp.runner.optim import make_optimizer, schedule, set_rate
from crt_exp.runner.processes import Preempted, StopSignals, World
from crt_exp.runner.progress import ProgressLine, read_ahead
from crt_exp.runner.run import PARTIAL, Run
from crt_exp.runner.sharding import shard
from crt_exp.runner.sweep import direction
from crt_exp.runner.trainer_config import TrainerConfig
from crt_exp.runner.training_state import Progress, TrainingState
from crt_exp.tasks.base import Plan, Reader, Task


def planned_steps(config: TrainerConfig, task: Task, processes: int) -> tuple[int | None, int]:
    """Steps of an epoch (None: streamed) and of the run. Raises ConfigError where task and config disagree."""
    plan = Plan(config.batch, config.accumulate, world=processes)
    rows, per_epoch = task.length("train"), task.epoch_steps(plan)
    if per_epoch is None and rows is not None:
        per_epoch = rows // config.batch
    if not (task.test or task.validation):
        raise ConfigError("this task names neither a validation nor a test split: there is nothing to report")
    if config.steps is not None and per_epoch != 0 or config.steps == 0:
        return per_epoch, config.steps
    if per_epoch is None:
        raise ConfigError("this task streams its training data: set trainer.steps, the steps after which training ends")
    if per_epoch == 0:
        raise ConfigError(f"trainer.batch = {config.batch} is more than the {rows} rows of the training split")
    if round(config.epochs * per_epoch, 6) < 1:
        raise ConfigError(f"trainer.epochs = {config.epochs} makes no step at all: an epoch has {per_epoch}. "
                          "trainer.steps=0 evaluates only")
    return per_epoch, round(config.epochs * per_epoch)


class Trainer:
    """Trains `task` as `config` says and writes the records and checkpoints of `run`.

    mechanism goes to `task.build`. Raises Diverged, Preempted, CheckpointError;
    ConfigError where task and config disagree.
    """

    def __init__(self, config: TrainerConfig, task: Task, mechanism: Mechanism, run: Run, world: World, seed: int):
        self.config, self.task, self.run, self.world, self.seed = config, task, run, world, seed
        self.scaler = world.accelerator.scaler  # float16 alone has one
        self.per_epoch, self.total = planned_steps(config, task, world.size)
        self._build(mechanism)
        self.state = TrainingState(self.module, self.optimizer, task, run, world, config.keep, self.per_epoch,
                                   self.adapters)
        self.rate, self.stopping, self.overdue = 0.0, False, False
        self.feed: Iterator[Any] | None = None
        self.signals = StopSignals()

    def _build(self, mechanism: Mechanism) -> None:
        """Model and optimiser, wrapped for the processes; then each process gets generators of its own."""
        config, accelerator = self.config, self.world.accelerator
        self.module = self.task.build(mechanism)
        self.adapters = lightened(self.module, config)
        self.sharded = config.strategy == "fsdp" and self.world.size > 1
        self.module.to(self.world.device)
        if self.sharded:
            self.model = shard(self.module, config.precision)
        self.optimizer = make_optimizer(self.module, config.optimizer, config.lr, config.betas, config.eps,
                                        config.weight_decay, self.task.lr_scale,
                                        self.task.decays) if self.total else None
        if not self.sharded:
            self.model = accelerator.prepare_model(self.module)
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.scored = self.module
        if config.compile:  # besides the plain module, in which a diverged run looks for the layer
            self.model, self.scored = torch.compile(self.model), torch.compile(self.module)
        seed_everything(stream_seed(self.seed, self.world.rank))

    @property
    def progress(self) -> Progress:
        return self.state.progress

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def fit(self) -> list[dict[str, Any]]:
        """Goes on from where the run directory stands, to the end; returns the records, the last of them final."""
        self.state.restore()
        line = ProgressLine(self.total, self.progress.step, self._rows(), self.world.device, self.world.main,
                            self.run.note)
        with self.signals, line as self.line, self._reading():
            self.module.train()
            while True:
                self._between_steps()
                if self._done():
                    break
                self._step()
            self._finish()
        return self.run.records

    def _rows(self) -> float:
        """Rows of a step; on average where the task reads by cost."""
        rows, batch = self.task.length("train"), self.config.batch
        return rows / self.per_epoch if rows and self.per_epoch not in (None, rows // batch) else batch

    def _between_steps(self) -> None:
        if self.stopping:
            self.signals.step_ended()
        due = self._evaluation_due()
        if self.progress.step > self.state.saved and (due or self.stopping or self._save_due()):
            self._check_parameters("checkpoint")
            self.state.save()
            self.overdue = False
        if self.stopping:
            raise Preempted(self.signals.signum or signal.SIGTERM)
        if due:
            self._evaluate_validation()

    def _evaluation_due(self) -> bool:
        p, every = self.progress, self.config.eval_every
        if self.task.validation is None or p.step == p.evaluated:
            return False
        return p.step == self.total or (p.position == 0 if every is None else p.step % every == 0)

    def _save_due(self) -> bool:
        p, every = self.progress, self.config.save_every
        return self.overdue or p.step == self.total or (p.position == 0 if every is None else p.step % every == 0)

    def _done(self) -> bool:
        p, patience = self.progress, self.config.patience
        return p.step >= self.total or (patience is not None and p.worse >= patience)

    def _step(self) -> None:
        """One optimiser step, or the discovery that the epoch is over."""
        batches = self._next_batches()
        if batches is None:
            return
        before = generators(self.world.device)
        self.rate = schedule(self.config.schedule, self.progress.step, self.total, self.config.warmup)
        set_rate(self.optimizer, self.rate)
        try:
            loss = self._forward_backward(batches)
        except NotFinite as error:
            raise self._met(error, batches, before) from None
        norm = self._clip()
        loss, norm = self._agree(loss, norm, batches, before)
        self._update()
        self._advance(loss, norm)
        with torch.no_grad():
            self.task.updated(self.module, self.progress.step)

    def _next_batches(self) -> list[Any] | None:
        """The micro-batches of the next step; None, once, at the end of an epoch of unknown length."""
        if self.feed is None:
            self.feed = self._open()
        batches = [batch for _, batch in zip(range(self.config.accumulate), self.feed)]
        if len(batches) == self.config.accumulate:
            return batches
        if self.progress.position == 0:
            raise ValueError(f"epoch {self.progress.epoch} of the training split holds no batch of "
                             f"{self.config.batch} rows")
        self._next_epoch()
        return None

    def _open(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        p, config, world = self.progress, self.config, self.world
        plan = Plan(config.batch, config.accumulate, self.seed, p.epoch, p.position, world.rank, world.size)
        batches = self.task.batches("train", plan)
        return read_ahead((send_to_device(b, self.world.device, non_blocking=True) for b in batches), config.prefetch)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """In the end the thread that reads ahead is let go, wherever in an epoch that is;
        it would keep this trainer alive."""
        try:
            yield
        finally:
            if self.feed is not None:
                self.feed.close()

    def _next_epoch(self) -> None:
        self.progress.epoch, self.progress.position, self.feed = self.progress.epoch + 1, 0, None

    def _forward_backward(self, batches: list[Any]) -> Tensor:
        """Gradients of the mean loss over all rows of the step; returns this process's part of that mean."""
        shares, total = self._shares(batches), 0.0
        for i, (batch, share) in enumerate(zip(batches, shares)):
            with self._synchronising(i == len(batches) - 1), same_step(self.model, i > 0):
                loss = self._loss(self.model, batch)
                # gradients are averaged over processes: times their number makes it a sum
                self.world.accelerator.backward(loss * (share * self.world.size))
            total = total + loss.detach().float() * share
        return total

    def _shares(self, batches: list[Any]) -> list[Tensor | float]:
        """What part of the step's mean loss each micro-batch is, over all processes 1."""
        weights = [self.task.weight(batch) for batch in batches]
        if weights[0] is None:
            return [1 / (len(batches) * self.world.size)] * len(batches)
        weights = [torch.as_tensor(w, dtype=torch.float32, device=self.world.device) for w in weights]
        total = self.world.sum(torch.stack(weights).sum())
        return [w / total for w in weights]

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self._autocast():
            return self.task.loss(model, batch)

    def _autocast(self):
        # sharded layers cast for themselves
        return nullcontext() if self.sharded else self.world.accelerator.autocast()

    @contextmanager
    def _synchronising(self, last: bool) -> Iterator[None]:
        """Gradients travel between processes only with the last micro-batch."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
            yield
        else:
            with nullcontext() if last else self.world.accelerator.no_sync(self.model):
                yield

    def _clip(self) -> Tensor:
        """The norm of all gradients, before it is clipped."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None]))
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.trained, self.config.clip, norm)
        return norm

    def _update(self) -> None:
        if self.scaler:  # leaves out a step whose gradient overflowed, and lowers its scale
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _agree(self, loss: Tensor, norm: Tensor, batches: list[Any], before: Any) -> tuple[float, float]:
        """Loss over all processes and gradient norm as numbers, from the device in one go; notes if any process was
        asked to stop and if any finds the last checkpoint too old.

        Raises Diverged, on all processes, where one of them is not finite; float16 may lower its scale first.
        """
        noted = torch.tensor([self.signals.signum is not None, self._too_old()], dtype=loss.dtype, device=loss.device)
        values = torch.cat([self.world.sum(torch.cat([loss.reshape(1), noted])), norm.detach().float().reshape(1)])
        loss, stopping, overdue, norm = values.tolist()
        self.stopping, self.overdue = stopping > 0, overdue > 0
        if not math.isfinite(loss) or not (math.isfinite(norm) or (self.scaler and self.scaler.get_scale() > 1)):
            raise self._diverged(loss, norm, batches, before)
        return loss, norm

    def _too_old(self) -> bool:
        minutes = self.config.save_minutes
        return minutes is not None and time.monotonic() > self.state.saved_at + 60 * minutes

    def _diverged(self, loss: float, norm: float, batches: list[Any], before: Any) -> Diverged:
        """Computes the step again to find the first layer whose numbers are not finite."""
        set_generators(self.world.device, before)
        first = self._gathered(first_nonfinite(self.module, batches, self._loss))
        return self._verdict(f"loss {loss:.6g}, gradient norm {norm:.6g}",
                             first or "not seen again when the step was repeated")

    def _met(self, error: NotFinite, batches: list[Any], before: Any) -> Diverged:
        """The same where a layer refused its numbers before there was a loss:
        on this process, and the others may wait for it."""
        set_generators(self.world.device, before)
        first = None if self.sharded else first_nonfinite(self.module, batches, self._loss)
        return self._verdict("no loss", first or layer_of(error, self.module), alone=self.world.size > 1)

    def _gathered(self, place: str | None) -> str | None:
        """The first place that any process names."""
        places = [f"{where}{f' on process {i}' if i and self.world.size > 1 else ''}"
                  for i, where in enumerate(self.world.gather(place)) if where]
        return places[0] if places else None

    def _verdict(self, what: str, where: str, alone: bool = False, step: int | None = None) -> Diverged:
        """step: the one under way, or one that was done and is evaluated."""
        broken = where.startswith("parameter") or step is not None  # so a checkpoint of the last step is no good either
        step = self.progress.step + 1 if step is None else step
        good = [s for s in checkpoint.steps(self.state.root) if s < self.progress.step + (not broken)]
        last = f"the checkpoint of step {good[-1]} is the last good one" if good else "there is no checkpoint before it"
        return Diverged(f"step {step}: {what}; first not finite: {where}; {last}", alone)

    def _advance(self, loss: float, norm: float) -> None:
        p = self.progress
        p.step, p.position, p.loss, p.losses = p.step + 1, p.position + 1, p.loss + loss, p.losses + 1
        if p.position == self.per_epoch:
            self._next_epoch()
        self.line.step(loss)
        if p.step % self.config.log_every == 0:
            self._record("train", loss=p.loss / p.losses, lr=self.config.lr * self.rate,
                         grad_norm=norm if math.isfinite(norm) else None)
            p.loss, p.losses = 0.0, 0

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate_validation(self) -> None:
        p = self.progress
        metrics = self.evaluate(self.task.validation)
        p.evaluated, value = p.step, metrics[self.task.metric]
        self._record(self.task.validation, **metrics)
        self.line.metric(self.task.metric, value)
        if self._better(value):
            p.best, p.worse = {"step": p.step, "epoch": self.state.epoch, "metrics": metrics}, 0
        else:
            p.worse += 1

    def _better(self, value: float | None) -> bool:
        old = self.progress.best and self.progress.best["metrics"][self.task.metric]
        if value is None or old is None:
            return value is not None or self.progress.best is None
        return value < old if self.task.lower_is_better else value > old

    def evaluate(self, split: str) -> dict[str, float | None]:
        """The task's metrics of a split (null: not finite); leaves the generators as they were."""
        config, kept = self.config, rng_state()
        world = self.world
        ranks = (0, 1) if self.sharded else (world.rank, world.size)  # sharded models must run in step
        batch = config.eval_batch or config.batch // (world.size * config.accumulate)
        self._check_parameters(f"evaluation on {split}")
        self.module.eval()
        try:
            with self._interruptible(), torch.no_grad(), self._autocast():
                reader = Reader(self.task, batch, self.seed, world.device, *ranks, self.line.evaluating,
                                config.evaluate)
                result = self.task.evaluate(self.scored, split, reader)
        except NotFinite as error:
            raise self._verdict(f"evaluation on {split}", layer_of(error, self.module), self.world.size > 1,
                                self.progress.step) from None
        self.module.train()
        set_rng_state(kept)
        if self.task.metric not in result:
            raise ValueError(f"{type(self.task).__name__}.evaluate gives {', '.join(result)}, "
                             f"not its metric {self.task.metric!r}")
        if any(world.gather(reader.partial)):
            result = result | {PARTIAL: config.evaluate}
        numbers = {key: float(value) for key, value in result.items()}
        return self.world.broadcast({key: value if math.isfinite(value) else None for key, value in numbers.items()})

    def _check_parameters(self, what: str) -> None:
        """Raises Diverged where the last step left weights that are not finite: metrics of them can look like numbers,
        and their checkpoint would take the place of the last good one."""
        first = self._gathered(next(iter(nonfinite_parameters(self.module)), None))
        if first:
            raise self._verdict(what, first, step=self.progress.step)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A signal ends a long evaluation at once, for its step has a checkpoint.
        Several processes stop after it, together."""
        if self.world.size == 1:
            if self.signals.signum is not None:
                raise Preempted(self.signals.signum)
            self.signals.interruptible = True
        try:
            yield
        finally:
            self.signals.interruptible = False

    def _finish(self) -> None:
        """The final record: the test split with the best weights, or the last ones;
        without a test split the best validation."""
        p, task = self.progress, self.task
        best = p.best if self.config.select == "best" else None
        if best and best["step"] != p.step:
            self.state.load_best()
        metrics = best["metrics"] if task.test is None and best else self.evaluate(task.test or task.validation)
        self._export()
        chosen = {"best_step": best["step"]} if best else {}
        self._record(task.test or task.validation, **metrics, **chosen, metric=task.metric, direction=direction(task),
                     final=True)

    def _export(self) -> None:
        """The weights that were tested, as the task keeps them; of adapters that are not merged these alone."""
        if self.adapters and self.config.lora["merge"]:
            self.adapters.merge()
        tensors = {name: whole(t) for name, t in self.module.state_dict().items()}
        if self.world.main and self.adapters and not self.config.lora["merge"]:
            self.adapters.keep(tensors, self.run.directory)
        elif self.world.main:
            self.task.export(self.module, tensors, self.run.directory)

    def _record(self, split: str, **values: Any) -> None:
        self.run.log(step=self.progress.step, epoch=self.state.epoch, split=split, **values)
