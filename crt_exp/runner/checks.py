"""What the choices of a run make, and which of them do not go together: found before anything is written."""

from collections.abc import Iterator
from contextlib import contextmanager

from crt_exp.config import ConfigError, instantiate, located
from crt_exp.ranks import inside_torchrun, world_size
from crt_exp.runner.invocation import choice, in_sweep, overrides
from crt_exp.runner.sweep import check_direction


def mechanism_of(cfg):
    """The Mechanism that the configuration names; bad options of its parts are told before any data is read."""
    from crt_exp.mechanism import Mechanism

    mechanism = Mechanism.composed(cfg, choice)
    if mechanism.features is not None:
        with named("features"):
            mechanism.map()
    return mechanism


@contextmanager
def named(group: str) -> Iterator[None]:
    """The errors of a constructor with the choice that it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{group}={choice(group)}: {error}") from None


def check_attention(cfg) -> None:
    """Choices that the attention makes no use of."""
    from crt_exp.mechanism import uses

    if cfg.get("attention") is None:
        return
    used = uses(cfg.attention)
    unused = [o for o in overrides() if _part_of(o) in {"features", "sampler", "m"} - used]
    if unused:
        raise ConfigError(f"attention={choice('attention')} makes no use of it: leave out {' '.join(unused)}")


def _part_of(override: str) -> str | None:
    """Which part of a mechanism an override chooses: attention, features, sampler or m."""
    key = override.split("=")[0].lstrip("+~")
    group = key.split(".")[0]
    return "m" if key == "features.m" else group if group in ("attention", "features", "sampler") else None


def check_used(task) -> None:
    """Choices that the task, with its options, makes no use of."""
    unused = [o for o in overrides() if (part := _part_of(o)) and part not in task.uses]
    if unused:
        raise ConfigError(f"task={choice('task')} with these options makes no use of it: leave out {' '.join(unused)}")


def check_sweeper(cfg) -> None:
    """A sweeper that would look for the worst value."""
    from hydra.core.hydra_config import HydraConfig

    if in_sweep():
        kind = located("task", cfg.task._target_)
        check_direction(kind, getattr(kind, "metric", None), HydraConfig.get().sweeper.get("direction"))


def check_study(cfg, task, mechanism) -> None:
    """What a task that only measures cannot do: run on several processes, and measure what has no feature map."""
    if world_size() > 1 or cfg.trainer.processes:
        raise ConfigError(f"task={choice('task')} does not train: start it on one process")
    if hasattr(task, "uses"):
        check_used(task)
    if not mechanism.estimates and mechanism.name != "exact" and not measures_whole(cfg, mechanism):
        raise ConfigError(f"task={choice('task')} measures feature maps of a kernel, and attention={mechanism.name} "
                          "estimates none: choose features=..., a preset such as attention=favorpp, or attention=exact")


def measures_whole(cfg, mechanism) -> bool:
    """Whether the study also measures this attention, which has no feature map."""
    measures = getattr(located("task", cfg.task._target_), "measures_whole", None)
    return measures is not None and measures(mechanism)


def check_training(cfg, task, mechanism) -> None:
    """What can be known before the processes of a run start: each of them would find the same."""
    from crt_exp.models.transformer import check_splits
    from crt_exp.runner.trainer import planned_steps
    from crt_exp.runner.trainer_config import check_processes

    config = instantiate(cfg.trainer, _convert_="all")
    processes = world_size() if inside_torchrun() else config.processes or 1
    check_processes(config, processes)
    if config.sequence_parallel > 1:
        task.check_split(config.sequence_parallel)
        check_splits(mechanism.layer(2, 8))
    if config.strategy == "fsdp" and processes > 1:
        task.check_shards()
    planned_steps(config, task, processes)
    check_used(task)
    if choice("attention"):
        with named("attention"):
            mechanism.layer(2, 8)
