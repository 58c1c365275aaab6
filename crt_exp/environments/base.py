"""What an environment gives a policy, and what it gets from it."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from crt_exp.config import ConfigError

EXTRA = "pip install 'crt_exp[robotics]'"


class Observation(NamedTuple):
    """image (C, H, W), what is attended; state (S,), what the body knows of itself."""

    image: np.ndarray
    state: np.ndarray


class Environment(Protocol):
    """One body in one world. The same seed and the same actions give the same numbers, whatever was played before."""

    channels: int
    size: int       # H = W of the image
    states: int
    actions: int
    lead: np.ndarray  # (heads, 3, A), the controller that learning begins with: see ImplicitPolicy.initial
    watch: Callable[[Any], None] | None  # called after each order to the servos, for films

    def reset(self, seed: int) -> Observation:
        """Begins a rollout."""

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        """One decision, (A,) within -1 to 1: what is seen next, the reward, and whether the rollout has ended."""


    def view(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """What a film shows, from above: least and most x, and y."""


def need(task: str, *packages: str) -> None:
    """Raises ConfigError, naming the extra, where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"task={task} needs {' and '.join(packages)} ({' and '.join(missing)} missing): {EXTRA}")
