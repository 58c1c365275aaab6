"""Rollouts of policies, several at once in step with one another, in this process or in others.

What is played together decides the shape of every product and so its rounding: groups are of a fixed size, whatever the
number of processes, and each process uses one thread. So the returns do not depend on how many processes there are.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor

from crt_exp.environments.base import Environment, Observation
from crt_exp.mechanism import Mechanism
from crt_exp.models.implicit_policy import ImplicitPolicy
from crt_exp.runner.ending import Stopped
from crt_exp.probes.cells import without_interrupts
from crt_exp.times import threads

DROPPED = float("nan")  # the return of a rollout with an observation or a reward that is not finite


@dataclass(frozen=True)
class Player:
    """Who plays where: a class of environments with its options, a policy, and the attention in it. policy None: each
    action is drawn, uniformly, from the seed of its rollout."""

    world: type
    options: tuple[tuple[str, Any], ...]
    policy: ImplicitPolicy | None
    mechanism: Mechanism

    def made(self) -> Environment:
        return self.world(**dict(self.options))


@functools.lru_cache(maxsize=2)
def prepared(player: Player, count: int) -> tuple[list[Environment], Any]:
    """Environments and the layer that ranks patches, made once in each process: what they play leaves no trace."""
    layer = player.policy.layer(player.mechanism) if player.policy else None
    return [player.made() for _ in range(count)], layer


def play(player: Player, thetas: Tensor, seeds: Sequence[int]) -> list[float]:
    """The return of each row of thetas (B, N) in the rollout of its seed; DROPPED where it met what is not finite."""
    with threads(1):
        worlds, layer = prepared(player, len(seeds))
        seen = [world.reset(seed) for world, seed in zip(worlds, seeds)]
        draws = [np.random.default_rng([seed, 1]) for seed in seeds]
        returns, going = np.zeros(len(seeds)), np.ones(len(seeds), bool)
        while going.any():
            for i in np.flatnonzero(going):
                if not finite(seen[i]):
                    returns[i], going[i] = DROPPED, False
                    seen[i] = Observation(*map(np.zeros_like, seen[i]))
            actions = decided(player, layer, thetas, seen, draws)
            for i in np.flatnonzero(going):
                seen[i], reward, ended = worlds[i].step(actions[i])
                returns[i] += reward
                going[i] = not ended and np.isfinite(reward)
    return [value if np.isfinite(value) else DROPPED for value in returns.tolist()]


def decided(player: Player, layer: Any, thetas: Tensor, seen: Sequence[Observation], draws: Sequence) -> np.ndarray:
    if player.policy is None:
        return np.stack([draw.uniform(-1, 1, player.world.actions) for draw in draws])
    images, states = (torch.from_numpy(np.stack(part)).float() for part in zip(*seen))
    return player.policy.act(layer, thetas, images, states).numpy()


def finite(seen: Observation) -> bool:
    return bool(np.isfinite(seen.image).all() and np.isfinite(seen.state).all())


def play_all(player: Player, thetas: Tensor, seeds: Sequence[int], together: int, workers: int) -> list[list[float]]:
    """The returns of every row of thetas (P, N) in every seed, by row, `together` rows at a time.

    Raises Stopped where a process that plays has died.
    """
    groups = thetas.split(together)
    calls = [(player, group.repeat_interleave(len(seeds), 0), [*seeds] * len(group)) for group in groups]
    if min(workers, len(calls)) == 1:
        returns = [play(*call) for call in calls]
    else:
        returns = in_processes(calls, workers)
    flat = [value for group in returns for value in group]
    return [flat[i:i + len(seeds)] for i in range(0, len(flat), len(seeds))]


def in_processes(calls: Sequence[tuple], workers: int) -> list[list[float]]:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    try:
        with without_interrupts():
            return joblib.Parallel(n_jobs=workers, batch_size=1)(joblib.delayed(play)(*call) for call in calls)
    except BrokenProcessPool:
        raise Stopped("a process that plays rollouts has died (killed, or out of memory); the generations that ended "
                      "are kept: continue with resume=auto, with fewer task.workers where memory was short",
                      1) from None
