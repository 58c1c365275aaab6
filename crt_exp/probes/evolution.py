"""Evolution strategies: policies that learn from the returns of their neighbours (Salimans et al., 2017).

Legend: N parameters, theta; n pairs of members, theta + sigma eps_i and theta - sigma eps_i; the rows eps_i are drawn
by our own sampler, orthogonal in blocks of N (Choromanski et al., 2018). Every member of a generation plays the same
rollouts. Ranks take the place of returns, and Adam ascends

    g = 1 / (2 n sigma) sum_i (rank(theta + sigma eps_i) - rank(theta - sigma eps_i)) eps_i.

A generation depends on its number, the seed and the state before it alone, so that a run that was stopped goes on bit
for bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from crt_exp.runner import checkpoint
from crt_exp.samplers import orthogonal
from crt_exp.probes.kernel import generator
from crt_exp.probes.rollouts import Player, play_all

CHECKPOINTS = "checkpoints"                              # within the run directory
SPLITS = {"train": 0, "validation": 1, "test": 2}        # no rollout of one is one of another
BETAS, EPS = (0.9, 0.999), 1e-8                          # of Adam


@dataclass(frozen=True)
class Search:
    """population: members of a generation, an even number. rollouts: of each member. evaluated, tested: rollouts of
    theta itself every `evaluate_every` generations and at the end. together: members that one process plays at once."""

    generations: int
    population: int
    rollouts: int
    sigma: float
    lr: float
    evaluate_every: int
    evaluated: int
    tested: int
    together: int
    workers: int


@dataclass
class State:
    """What a generation begins with. moments: Adam's two, (2, N). generation: how many are done; records: lines of
    metrics.jsonl so far; rollouts, dropped: so far, in training."""

    theta: Tensor
    moments: Tensor
    generation: int = 0
    records: int = 0
    rollouts: int = 0
    dropped: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return {key: getattr(self, key) for key in ("generation", "records", "rollouts", "dropped")}


def seeds_of(split: str, seed: int, generation: int, count: int) -> list[int]:
    """Those of the rollouts of a generation, the same for all its members and in all arms."""
    return np.random.SeedSequence([SPLITS[split], seed, generation]).generate_state(count).tolist()


def directions(seed: int, generation: int, pairs: int, n: int) -> Tensor:
    """(pairs, n)."""
    return orthogonal(pairs, n, generator(seed, generation)).rows().float()


def members(theta: Tensor, eps: Tensor, sigma: float) -> Tensor:
    """(2 pairs, N): a member and its antithetic one, in turn."""
    return (theta + sigma * torch.stack([eps, -eps], 1)).flatten(0, 1)


def of_members(returns: Sequence[Sequence[float]]) -> list[float]:
    """The mean return of each member over its rollouts, each less the mean of all in the same rollout, so that one that
    was dropped is no gain; not a number where all were."""
    table = np.ma.masked_invalid(returns)
    return (table - table.mean(0)).mean(1).filled(np.nan).tolist()


def shaped(returns: Sequence[float]) -> Tensor:
    """Ranks from -1/2 to 1/2, equal returns sharing theirs; both of a pair with a dropped one get 0."""
    pairs = np.asarray(returns, float).reshape(-1, 2)
    whole = np.isfinite(pairs).all(1)
    ranks = np.zeros_like(pairs)
    if whole.any():
        ranks[whole] = (rankdata(pairs[whole]).reshape(-1, 2) - 1) / (2 * whole.sum() - 1) - 0.5
    return torch.from_numpy(ranks).float().flatten()


def gradient(ranks: Tensor, eps: Tensor, sigma: float) -> Tensor:
    """(N,), the direction of larger returns."""
    up, down = ranks.view(-1, 2).unbind(1)
    return (up - down) @ eps / (2 * len(eps) * sigma)


def ascend(state: State, g: Tensor, lr: float) -> None:
    """One step of Adam."""
    first, second = state.moments
    first.lerp_(g, 1 - BETAS[0])
    second.lerp_(g.square(), 1 - BETAS[1])
    step = state.generation + 1
    size = lr * math.sqrt(1 - BETAS[1]**step) / (1 - BETAS[0]**step)
    state.theta = state.theta + size * first / (second.sqrt() + EPS)


def evolve(plan: Search, player: Player, seed: int, done: int, directory: Path | None) -> Iterator[dict[str, Any]]:
    """The records of a run: of each generation, of evaluations on validation, of the test at the end. The first `done`
    are in the run directory, which also keeps the state that the run goes on from.

    Raises ValueError where no rollout of a generation has a finite return.
    """
    state = restored(directory, done) or begun(player, seed)
    if player.policy is not None:
        if state.generation == 0:
            keep(directory, state)
        for number in range(state.generation, plan.generations):
            for record in (trained(plan, player, state, seed, number), *checked(plan, player, state, seed, number)):
                state.records += 1
                if state.records > done:
                    yield record
            state.generation = number + 1
            keep(directory, state)
    yield {**tested(plan, player, state, seed, "test", plan.tested), "final": True}


def begun(player: Player, seed: int) -> State:
    if player.policy is None:
        return State(torch.zeros(0), torch.zeros(2, 0))
    theta = player.policy.initial(generator(seed), torch.from_numpy(player.world.lead).float())
    return State(theta, torch.zeros(2, len(theta)))


def trained(plan: Search, player: Player, state: State, seed: int, number: int) -> dict[str, Any]:
    """Takes the step of a generation, and says how it went."""
    eps = directions(seed, number, plan.population // 2, len(state.theta))
    seeds = seeds_of("train", seed, number, plan.rollouts)
    returns = play_all(player, members(state.theta, eps, plan.sigma), seeds, plan.together, plan.workers)
    dropped = int(np.isnan(returns).sum())
    if dropped == plan.population * plan.rollouts:
        raise ValueError(f"generation {number}: no rollout has a finite return; the environment or its options are at "
                         "fault, or task.sigma is too large")
    ascend(state, gradient(shaped(of_members(returns)), eps, plan.sigma), plan.lr)
    state.rollouts, state.dropped = state.rollouts + plan.population * plan.rollouts, state.dropped + dropped
    return {"step": number + 1, "epoch": 0, "split": "train", "return": float(np.nanmean(returns)),
            "best": float(np.nanmax(returns)), "rollouts": state.rollouts, "dropped": state.dropped, "seeds": seeds,
            "returns": [[value if math.isfinite(value) else None for value in row] for row in returns],
            "norm": float(state.theta.norm())}


def checked(plan: Search, player: Player, state: State, seed: int, number: int) -> Iterator[dict[str, Any]]:
    """The evaluation on validation that is due after a generation."""
    if (number + 1) % plan.evaluate_every == 0:
        yield tested(plan, player, state, seed, "validation", plan.evaluated, number + 1)


def tested(plan: Search, player: Player, state: State, seed: int, split: str, count: int,
           step: int | None = None) -> dict[str, Any]:
    """Rollouts of theta itself, the same ones at every step."""
    seeds = seeds_of(split, seed, 0, count)
    groups = [play_all(player, state.theta[None], seeds[i:i + plan.together], 1, 1)[0]
              for i in range(0, count, plan.together)]
    returns = np.concatenate(groups)
    finite = returns[np.isfinite(returns)]
    if not len(finite):
        raise ValueError(f"{split}: none of {count} rollouts has a finite return")
    return {"step": state.generation if step is None else step, "epoch": 0, "split": split,
            "return": float(finite.mean()), "std": float(finite.std()), "rollouts": state.rollouts,
            "dropped": count - len(finite), "seeds": seeds, "returns": finite.tolist()}


# ---- the state on disk


def keep(directory: Path | None, state: State) -> None:
    if directory is not None:
        checkpoint.save(directory / CHECKPOINTS, state.generation,
                        {"evolution": {"theta": state.theta, "moments": state.moments}}, state.counts)
        checkpoint.prune(directory / CHECKPOINTS, 2)


def restored(directory: Path | None, done: int) -> State | None:
    """The newest intact state; None where there is none. Raises CheckpointError where records are missing."""
    path = None if directory is None else checkpoint.newest(directory / CHECKPOINTS)
    if path is None:
        return None
    counts = checkpoint.load_state(path)
    if done < counts["records"]:
        raise checkpoint.CheckpointError(
            f"{directory / 'metrics.jsonl'} holds {done} records, and {path} was written after {counts['records']}: "
            f"lines are missing. Put the whole file back, or move {path.parent} away: then the run starts over")
    return State(**checkpoint.load_tensors(path / "evolution.safetensors"), **counts)
