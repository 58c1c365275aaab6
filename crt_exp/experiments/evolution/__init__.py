"""Evolution strategies for policies (Salimans et al., 2017).

Notation: N parameters theta; n antithetic pairs of members, theta + sigma eps_i and theta - sigma eps_i. The directions
eps_i are orthogonal in blocks of N (Choromanski et al., 2018). All members of a generation play the same rollouts.
Returns are replaced by ranks, and Adam ascends

    g = 1 / (2 n sigma) sum_i (rank(theta + sigma eps_i) - rank(theta - sigma eps_i)) eps_i.

Reproducibility: a generation depends only on its number, the seed and the state before it, so that a continued run
gives identical results. Groups of rollouts have a fixed size and each process uses one thread, because shapes affect
rounding. So returns do not depend on the number of processes.
"""

import functools
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypedDict

import joblib
import numpy as np
import torch
from pydantic import Field
from scipy.stats import rankdata
from torch import Tensor

from crt_exp.experiments.evolution.environments import Environment
from crt_exp.experiments.measure.kernel import generator
from crt_exp.experiments.models.implicit_policy import ImplicitPolicy
from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.runner.exit_handling import Stopped
from crt_exp.experiments.tasks.base import Record
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import orthogonal
from crt_exp.samplers.threads import threads
from crt_exp.validation import Count, Positive, Whole

CHECKPOINTS = "checkpoints"  # subfolder of the run directory
SPLITS = {
    "train": 0,
    "validation": 1,
    "test": 2,
}  # part of the seed, so that splits have different rollouts
# Adam's constants
BETAS = (0.9, 0.999)
EPS = 1e-8


# ---- rollouts, in lockstep groups, in this process or in others


@dataclass(frozen=True)
class Player:
    """An environment class with options, a policy, and the policy's attention.

    policy None: actions are uniformly random, by the seed of the rollout.
    """

    world: type
    options: tuple[tuple[str, Any], ...]
    policy: ImplicitPolicy | None
    mechanism: Mechanism


@functools.lru_cache(maxsize=2)
def prepared(player: Player, count: int) -> tuple[list[Environment], Any]:
    """Create `count` environments and the attention layer, once per process.

    Rollouts leave no state in them.
    """
    layer = player.policy.layer(player.mechanism) if player.policy else None
    return [player.world(**dict(player.options)) for _ in range(count)], layer


def play(player: Player, thetas: Tensor, seeds: Sequence[int]) -> list[float]:
    """Return the returns of rows of thetas (B, N) in rollouts of the seeds."""
    with threads(1):
        worlds, layer = prepared(player, len(seeds))
        observations = [world.reset(seed) for world, seed in zip(worlds, seeds)]
        generators = [np.random.default_rng([seed, 1]) for seed in seeds]
        returns = np.zeros(len(seeds))
        going = np.ones(len(seeds), bool)
        while going.any():
            if player.policy is None:
                actions = np.stack([rng.uniform(-1, 1, player.world.actions) for rng in generators])
            else:
                seen = [torch.from_numpy(np.stack(part)).float() for part in zip(*observations)]
                actions = player.policy.act(layer, thetas, *seen).numpy()
            for i in np.flatnonzero(going):
                observations[i], reward, ended = worlds[i].step(actions[i])
                returns[i] += reward
                going[i] = not ended
    return returns.tolist()


def play_all(
    player: Player,
    thetas: Tensor,
    seeds: Sequence[int],
    together: int,
    workers: int,
) -> list[list[float]]:
    """Return the returns of each row of thetas (P, N) in each seed, by row.

    `together` rows are played at once. Raises Stopped if a worker process died, and ValueError for a return that is not
    finite.
    """
    calls = []
    for group in thetas.split(together):
        repeated = group.repeat_interleave(len(seeds), 0)
        calls.append((player, repeated, [*seeds] * len(group)))
    if min(workers, len(calls)) == 1:
        returns = [play(*call) for call in calls]
    else:
        returns = in_processes(calls, workers)
    flat = list(chain.from_iterable(returns))
    if not np.isfinite(flat).all():
        raise ValueError("a return is not finite; check the environment")
    return np.reshape(flat, (-1, len(seeds))).tolist()


def in_processes(calls: Sequence[tuple], workers: int) -> list[list[float]]:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    parallel = joblib.Parallel(n_jobs=workers, batch_size=1)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    try:
        return parallel(joblib.delayed(play)(*call) for call in calls)
    except BrokenProcessPool:
        raise Stopped(
            f"task.workers={workers}: a worker died; continue with resume=auto and fewer", 1
        ) from None
    finally:
        signal.signal(signal.SIGINT, before)


# ---- evolution strategies


class Strategy(TypedDict):
    """Options of the evolution strategy.

    Attributes:
        population: Members of a generation, an even number.
        rollouts: Rollouts of each member.
        evaluate_every: Generations between evaluations of theta.
        evaluated: Rollouts of an evaluation.
        tested: Rollouts of the test at the end.
        together: Members that a process plays at once.
    """

    generations: Whole
    population: Annotated[int, Field(ge=2, multiple_of=2)]
    rollouts: Count
    sigma: Positive
    lr: Positive
    evaluate_every: Count
    evaluated: Count
    tested: Count
    together: Count


@dataclass
class State:
    """State at the beginning of a generation.

    moments: Adam's moments (2, N). generation: completed generations. records: lines of metrics.jsonl. rollouts:
    total in training.
    """

    theta: Tensor
    moments: Tensor
    generation: int = 0
    records: int = 0
    rollouts: int = 0

    def record(self, split: str, seeds: list[int], returns: np.ndarray, **more: float) -> Record:
        """Line of metrics.jsonl about rollouts of the seeds."""
        return {
            "step": self.generation,
            "epoch": 0,
            "split": split,
            "return": float(np.mean(returns)),
            **more,
            "rollouts": self.rollouts,
            "seeds": seeds,
            "returns": returns.tolist(),
        }


def seeds_of(split: str, seed: int, generation: int, count: int) -> list[int]:
    """Seeds of the rollouts of a generation, equal for all members and attention."""
    return np.random.SeedSequence([SPLITS[split], seed, generation]).generate_state(count).tolist()


def directions(seed: int, generation: int, pairs: int, n: int) -> Tensor:
    """Orthogonal directions (pairs, n)."""
    return orthogonal(pairs, n, generator(seed, generation)).rows().float()


def members(theta: Tensor, eps: Tensor, sigma: float) -> Tensor:
    """Return members (2 pairs, N); antithetic members are adjacent."""
    return (theta + sigma * torch.stack([eps, -eps], 1)).flatten(0, 1)


def centered_ranks(returns: Sequence[float]) -> Tensor:
    """Return ranks from -1/2 to 1/2; ties share a rank."""
    ranks = rankdata(returns) - 1
    return torch.from_numpy(ranks / (len(returns) - 1) - 0.5).float()


def gradient(ranks: Tensor, eps: Tensor, sigma: float) -> Tensor:
    """Return the ascent direction (N,)."""
    up, down = ranks.view(-1, 2).unbind(1)
    return (up - down) @ eps / (2 * len(eps) * sigma)


def ascend(state: State, g: Tensor, lr: float) -> None:
    """Take one step of Adam."""
    first, second = state.moments
    first.lerp_(g, 1 - BETAS[0])
    second.lerp_(g.square(), 1 - BETAS[1])
    step = state.generation + 1
    size = lr * math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
    state.theta = state.theta + size * first / (second.sqrt() + EPS)


def evolve(
    plan: Strategy,
    workers: int,
    player: Player,
    seed: int,
    done: int,
    directory: Path | None,
) -> Iterator[Record]:
    """Yield the records of a run: generations, evaluations and the final test.

    The first `done` records are in the run directory, which also stores the state.
    """
    state = restored(directory, done)
    if state is None:
        theta = torch.zeros(0)
        if player.policy is not None:
            lead = torch.from_numpy(player.world.lead).float()
            theta = player.policy.initial(generator(seed), lead)
        state = State(theta, torch.zeros(2, len(theta)))
    if player.policy is not None:
        if state.generation == 0:
            save_state(directory, state)
        while state.generation < plan["generations"]:
            records = [train_generation(plan, workers, player, state, seed)]
            if state.generation % plan["evaluate_every"] == 0:
                records.append(evaluate(plan, player, state, seed, "validation", plan["evaluated"]))
            for record in records:
                state.records += 1
                if state.records > done:
                    yield record
            save_state(directory, state)
    yield {**evaluate(plan, player, state, seed, "test", plan["tested"]), "final": True}


def train_generation(
    plan: Strategy, workers: int, player: Player, state: State, seed: int
) -> Record:
    """Take the step of a generation and return its record."""
    eps = directions(seed, state.generation, plan["population"] // 2, len(state.theta))
    seeds = seeds_of("train", seed, state.generation, plan["rollouts"])
    thetas = members(state.theta, eps, plan["sigma"])
    returns = np.array(play_all(player, thetas, seeds, plan["together"], workers))
    ranks = centered_ranks(returns.mean(1))
    ascend(state, gradient(ranks, eps, plan["sigma"]), plan["lr"])
    state.generation += 1
    state.rollouts += plan["population"] * plan["rollouts"]
    record = state.record("train", seeds, returns, best=float(returns.max()))
    return record | {"norm": float(state.theta.norm())}


def evaluate(
    plan: Strategy, player: Player, state: State, seed: int, split: str, count: int
) -> Record:
    """Evaluate theta on rollouts that are equal at all steps."""
    seeds = seeds_of(split, seed, 0, count)
    groups = []
    for start in range(0, count, plan["together"]):
        group = seeds[start : start + plan["together"]]
        groups += play_all(player, state.theta[None], group, 1, 1)
    returns = np.concatenate(groups)
    return state.record(split, seeds, returns, std=float(returns.std()))


# ---- the state on disk


def save_state(directory: Path | None, state: State) -> None:
    if directory is not None:
        tensors = {"theta": state.theta, "moments": state.moments}
        root = directory / CHECKPOINTS
        counts = {name: getattr(state, name) for name in ("generation", "records", "rollouts")}
        checkpoint.save(root, state.generation, {"evolution": tensors}, counts)
        checkpoint.prune(root, 2)


def restored(directory: Path | None, done: int) -> State | None:
    """Return the newest intact state, or None.

    Raises CheckpointError if metrics.jsonl lacks records.
    """
    path = None if directory is None else checkpoint.newest(directory / CHECKPOINTS)
    if path is None:
        return None
    counts = checkpoint.load_state(path)
    checkpoint.check_records(path, counts, done)
    return State(**checkpoint.load_tensors(path / "evolution.safetensors"), **counts)
