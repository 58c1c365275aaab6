"""The training loop for any `Task`, on one or several processes.

An interrupted run continues to identical results. A step is loss, backward, clipping and optimiser. Between steps the
order is: checkpoint, stop if requested, evaluate. The checkpoint precedes the evaluation of its step, so a continued
run repeats only that evaluation. A step depends only on the checkpoint (weights, optimiser, generators, position in the
epoch) and on pure functions of the step (learning rate, data order).
"""

import math
import operator
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device, set_seed
from torch import Tensor, nn
from tqdm import tqdm

from crt_exp.attention.base import same_step
from crt_exp.experiments.data import full_tensor
from crt_exp.experiments.data.plan import Limit
from crt_exp.experiments.predictions import write_predictions
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.checkpoint import (
    Progress,
    TrainingState,
    rng_state,
    set_rng_state,
)
from crt_exp.experiments.runner.distributed import shard
from crt_exp.experiments.runner.exit_handling import DIVERGED_CODE, Stopped, StopSignals, stop_error
from crt_exp.experiments.runner.nonfinite import first_nonfinite, layer_of, nonfinite_parameters
from crt_exp.experiments.runner.run import PARTIAL, RunDirectory
from crt_exp.experiments.runner.sweep import description
from crt_exp.experiments.runner.trainer_config import (
    Adapters,
    TrainerConfig,
    freeze,
    make_optimizer,
    schedule,
)
from crt_exp.experiments.tasks.base import PROGRESS, Plan, Reader, Task
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError


def planned_steps(config: TrainerConfig, task: Task, processes: int) -> tuple[int, int]:
    """Return the steps of an epoch and of the run.

    Raises ConfigError for an indivisible batch, for fp16 on a CPU, and if task and config are incompatible.
    """
    parts = processes * config.accumulate
    if config.batch % parts:
        raise ConfigError(
            f"trainer.batch={config.batch}: expected a multiple of {parts} ({processes} processes x "
            f"{config.accumulate} micro-batches)"
        )
    if config.precision == "fp16" and (config.cpu or not torch.accelerator.is_available()):
        raise ConfigError("trainer.precision=fp16: expected a GPU; use bf16 or no")
    per_epoch = task.epoch_steps(Plan(config.batch, config.accumulate, world=processes))
    total = config.steps
    if total is None:
        total = round(config.epochs * per_epoch)
    if config.steps != 0 and (per_epoch == 0 or total == 0):
        raise ConfigError(
            f"trainer.batch={config.batch}, trainer.epochs={config.epochs}: no step with "
            f"{task.length('train')} training rows; expected a smaller batch (trainer.steps=0 evaluates only)"
        )
    return per_epoch, total


def read_ahead(items: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield items, of which a thread reads `depth` ahead. depth 0: no thread."""
    if depth == 0:
        yield from items
        return
    iterator = iter(items)
    end = object()
    with ThreadPoolExecutor(1) as pool:
        early = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := early.popleft().result()) is not end:
            early.append(pool.submit(next, iterator, end))
            yield item


class Trainer(TrainingState):
    """Trains `task` by `config`; writes records and checkpoints of `run`.

    steps: `planned_steps`.

    Raises:
        Stopped: After a signal or a divergence.
        CheckpointError: If a checkpoint cannot be written or used.
    """

    def __init__(
        self,
        config: TrainerConfig,
        task: Task,
        mechanism: Mechanism,
        run: RunDirectory,
        accelerator: Accelerator,
        seed: int,
        steps: tuple[int, int],
    ):
        self.config = config
        self.task = task
        self.mechanism = mechanism
        self.run = run
        self.seed = seed
        self.accelerator = accelerator
        self.per_epoch, self.total = steps
        self.progress = Progress()
        self.rate = 0.0
        self.score = ""  # of the last evaluation
        self.stopping = False
        self.overdue = False
        self.feed: Iterator[Any] | None = None
        self.signals = StopSignals()
        self.module = task.build(mechanism)
        if config.adapt:
            self.adapters = Adapters(self.module, config.lora)
        if config.freeze:
            freeze(self.module, config.freeze)
        self.sharded = config.strategy == "fsdp" and accelerator.num_processes > 1
        # sharded layers cast themselves
        self.autocast = nullcontext if self.sharded else accelerator.autocast
        self.module.to(accelerator.device)
        if self.sharded:
            self.model = shard(self.module, config.precision)
        self.optimizer = None
        if self.total:
            optimizer = make_optimizer(self.module, config, task)
            self.optimizer = accelerator.prepare_optimizer(optimizer)  # float16: loss scaling
        if not self.sharded:
            self.model = accelerator.prepare_model(self.module)
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        self.scored = self.module
        if config.compile:  # _first_nonfinite uses the plain module
            # one graph also where a model selects the positions that it predicts
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
            self.model = torch.compile(self.model)
            self.scored = torch.compile(self.module)
        sequence = np.random.SeedSequence([seed, accelerator.process_index])
        set_seed(int(sequence.generate_state(1)[0]))
        self.saved_at = time.monotonic()

    # ---- the loop

    def fit(self) -> None:
        """Continue from the state in the run directory, up to the final record."""
        self.restore()
        self.bar = tqdm(
            desc="training",
            total=self.total,
            initial=self.progress.step,
            unit=" steps",
            disable=not self.accelerator.is_main_process,
            **PROGRESS,
        )
        with self.signals, self.bar:
            self.module.train()
            while not self._between_steps():
                self._step()
            self.feed = None  # ends the read-ahead thread
            self._finish()

    def _between_steps(self) -> bool:
        """Save, stop and evaluate as due; return whether training is over."""
        p = self.progress
        config = self.config
        due = (
            self.task.validation is not None
            and p.step != p.evaluated
            and self._is_time(config.eval_every)
        )
        if p.step > self.saved and (
            due or self.stopping or self.overdue or self._is_time(config.save_every)
        ):
            self._check_parameters("checkpoint")
            self.save(config.keep)
            self.overdue = False
        if self.stopping:
            raise stop_error(self.signals.signum or signal.SIGTERM)
        if due:
            self._evaluate_validation()
        return p.step >= self.total

    def _is_time(self, every: int | None) -> bool:
        """Return whether an action is due: every n steps, each epoch (None), or the end."""
        p = self.progress
        return p.step == self.total or (p.position == 0 if every is None else p.step % every == 0)

    def _step(self) -> None:
        """Take one optimiser step."""
        batches = self._next_batches()
        before = rng_state()
        self.rate = schedule(
            self.config.schedule, self.progress.step, self.total, self.config.warmup
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * self.rate
        try:
            loss = self._forward_backward(batches)
        except NotFinite as error:  # on this process only; others may be waiting
            first = None if self.sharded else self._first_nonfinite(batches, before)
            raise self._divergence_error("no loss", first or layer_of(error, self.module)) from None
        norm = self.accelerator.clip_grad_norm_(self.trained, self.config.clip or math.inf)
        if self.sharded:
            norm = full_tensor(norm)
        loss, norm = self._reduce_loss(loss, norm, batches, before)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._advance(loss, norm)
        with torch.no_grad():
            self.task.updated(self.module, self.progress.step)

    def _next_batches(self) -> list[Any]:
        """Return the micro-batches of the next step."""
        p = self.progress
        config = self.config
        world = self.accelerator
        if self.feed is None:
            plan = Plan(
                config.batch,
                config.accumulate,
                self.seed,
                p.epoch,
                p.position,
                world.process_index,
                world.num_processes,
            )
            batches = self.task.batches("train", plan)
            self.feed = read_ahead(
                (send_to_device(b, world.device, non_blocking=True) for b in batches),
                config.prefetch,
            )
        return [next(self.feed) for _ in range(config.accumulate)]

    def _forward_backward(self, batches: list[Any]) -> Tensor:
        """Compute gradients of the step's mean loss; return this process's share."""
        processes = self.accelerator.num_processes
        weights = [self.task.weight(batch) for batch in batches]
        # the shares of all processes add up to 1
        shares = [1 / (len(batches) * processes)] * len(batches)
        if weights[0] is not None:
            device = self.accelerator.device
            weights = [torch.as_tensor(w, dtype=torch.float32, device=device) for w in weights]
            weights = torch.stack(weights)
            shares = list(weights / self.accelerator.reduce(weights.sum(), "sum"))
        total = 0.0
        for i, (batch, share) in enumerate(zip(batches, shares)):
            last = i == len(batches) - 1  # the last micro-batch synchronises gradients
            synchronised = nullcontext()
            if self.sharded:
                self.model.set_requires_gradient_sync(last)
            elif not last:
                synchronised = self.accelerator.no_sync(self.model)
            with synchronised, same_step(self.model, i > 0):
                loss = self._loss(self.model, batch)
                # gradients are averaged over processes; the factor turns the average into a sum
                self.accelerator.backward(loss * (share * processes))
            total = total + loss.detach().float() * share
        return total

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self.autocast():
            return self.task.loss(model, batch)

    def _reduce_loss(
        self, loss: Tensor, norm: Tensor, batches: list[Any], before: Any
    ) -> tuple[float, float]:
        """Return the loss over all processes and the gradient norm, as floats.

        One transfer from the device. Also records whether any process must stop or save. Raises Stopped on all
        processes for non-finite numbers, unless float16 can lower its scale.
        """
        minutes = self.config.save_minutes
        late = minutes is not None and time.monotonic() > self.saved_at + 60 * minutes
        flags = torch.tensor(
            [self.signals.signum is not None, late], dtype=loss.dtype, device=loss.device
        )
        sums = self.accelerator.reduce(torch.cat([loss.reshape(1), flags]), "sum")
        numbers = torch.cat([sums, norm.detach().float().reshape(1)])
        loss_sum, stopping, overdue, norm_value = numbers.tolist()
        self.stopping = bool(stopping)
        self.overdue = bool(overdue)
        scaler = self.accelerator.scaler
        can_lower_scale = bool(scaler and scaler.get_scale() > 1)
        if math.isfinite(loss_sum) and (math.isfinite(norm_value) or can_lower_scale):
            return loss_sum, norm_value
        first = self._first_location(self._first_nonfinite(batches, before))
        raise self._divergence_error(
            f"loss {loss_sum:.6g}, gradient norm {norm_value:.6g}",
            first or "not seen again when the step was repeated",
        )

    def _advance(self, loss: float, norm: float) -> None:
        progress = self.progress
        progress.step += 1
        progress.position += 1
        progress.loss += loss
        progress.losses += 1
        if progress.position == self.per_epoch:
            progress.epoch += 1
            progress.position = 0
            self.feed = None
        self.bar.set_postfix_str(f"loss {loss:.4g}{self.score}", refresh=False)
        self.bar.update()
        if progress.step % self.config.log_every == 0:
            grad_norm = norm if math.isfinite(norm) else None
            self._record(
                "train",
                loss=progress.loss / progress.losses,
                lr=self.config.lr * self.rate,
                grad_norm=grad_norm,
            )
            progress.loss = 0.0
            progress.losses = 0

    # ---- non-finite numbers

    def _first_nonfinite(self, batches: list[Any], before: Any) -> str | None:
        """Repeat the step to find the first layer with non-finite numbers."""
        set_rng_state(before)
        return first_nonfinite(self.module, batches, self._loss)

    def _first_location(self, location: str | None) -> str | None:
        """Return the first location that any process reports."""
        for process, reported in enumerate(gather_object([location])):
            if reported:
                return f"{reported} on process {process}" if process else reported
        return None

    def _divergence_error(self, what: str, where: str, step: int | None = None) -> Stopped:
        """Return the error of a diverged run.

        step: a completed step, which is evaluated or saved. None: the current step.
        """
        if step is None:
            step = self.progress.step + 1
        good = checkpoint.steps(self.root)  # saved only with finite weights
        last = "there is no checkpoint before it"
        if good:
            last = f"the checkpoint of step {good[-1]} is the last good one"
        return Stopped(f"step {step}: {what}; first not finite: {where}; {last}", DIVERGED_CODE)

    def _check_parameters(self, what: str) -> None:
        """Raise Stopped if the last step left non-finite weights.

        Their metrics can look valid, and their checkpoint would replace the last good one.
        """
        first = self._first_location(next(iter(nonfinite_parameters(self.module)), None))
        if first:
            raise self._divergence_error(what, first, self.progress.step)

    # ---- evaluation

    def _evaluate_validation(self) -> None:
        progress = self.progress
        metric = self.task.metric
        metrics = self.evaluate(self.task.validation)
        progress.evaluated = progress.step
        self._record(self.task.validation, **metrics)
        value = metrics[metric]
        formatted = "nan" if value is None else f"{value:.4f}"
        self.score = f", {metric} {formatted}"
        best = progress.best["metrics"][metric] if progress.best else None
        is_better = operator.lt if self.task.lower_is_better else operator.gt
        if not progress.best or (value is not None and (best is None or is_better(value, best))):
            progress.best = {
                "step": progress.step,
                "epoch": self.epoch,
                "metrics": metrics,
            }

    def evaluate(self, split: str) -> dict[str, float | None]:
        """Return the task's metrics of a split; None for non-finite values.

        The random generators are left unchanged.
        """
        config = self.config
        world = self.accelerator
        generators = rng_state()
        # sharded models must run in lockstep
        rank, processes = (0, 1) if self.sharded else (world.process_index, world.num_processes)
        batch = config.eval_batch or config.batch // (world.num_processes * config.accumulate)
        limit = Limit(config.evaluate) if config.evaluate else None
        plan = Plan(batch, seed=self.seed, rank=rank, world=processes, limit=limit)
        reader = Reader(self.task, plan, world.device, world.is_main_process)
        self._check_parameters(f"evaluation on {split}")
        self.module.eval()
        try:
            with torch.no_grad(), self.autocast():
                result = self.task.evaluate(self.scored, split, reader)
        except NotFinite as error:
            raise self._divergence_error(
                f"evaluation on {split}", layer_of(error, self.module), self.progress.step
            ) from None
        self.module.train()
        set_rng_state(generators)
        if any(gather_object([limit is not None and limit.partial])):
            result = result | {PARTIAL: config.evaluate}
        metrics = {}
        for name, value in result.items():
            number = float(value)
            metrics[name] = number if math.isfinite(number) else None
        return gather_object([metrics])[0]  # those of the first process

    def _finish(self) -> None:
        """Write the final record: the test split with the selected weights.

        Tasks without a test split report their best validation.
        """
        p = self.progress
        task = self.task
        best = p.best if self.config.select == "best" else None
        ending = {}
        if best:
            ending["best_step"] = best["step"]
            if best["step"] != p.step:
                self.load_best()
        if best and task.test is None and not task.predictions:
            metrics = best["metrics"]
        else:  # also where only the predictions of the best weights are missing
            metrics = self.evaluate(task.test or task.validation)
        if task.predictions and self.accelerator.is_main_process:
            write_predictions(task.predicted, self.run.directory)
        self._export()
        self._record(
            task.test or task.validation,
            **metrics,
            **ending,
            **description(task, self.mechanism),
            final=True,
        )

    def _export(self) -> None:
        """Save the tested weights; unmerged adapters are saved without other weights."""
        merged = self.config.lora["merge"]
        if self.adapters and merged:
            self.adapters.merge()
        tensors = {name: full_tensor(t) for name, t in self.module.state_dict().items()}
        if self.accelerator.is_main_process and self.adapters and not merged:
            self.adapters.save(tensors, self.run.directory)
        elif self.accelerator.is_main_process:
            self.task.export(self.module, tensors, self.run.directory)

    def _record(self, split: str, **values: Any) -> None:
        self.run.log(step=self.progress.step, epoch=self.epoch, split=split, **values)
