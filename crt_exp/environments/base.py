"""What an environment gives a policy, and what it gets from it."""

import importlib.util
from typing import NamedTuple, Protocol

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

    def reset(self, seed: int) -> Observation:
        """Begins a rollout."""

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool]:
        """One decision, (A,) within -1 to 1: what is seen next, the reward, and whether the rollout has ended."""


def need(task: str, *packages: str) -> None:
    """Raises ConfigError, naming the extra, where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"task={task} needs {' and '.join(packages)} ({' and '.join(missing)} missing): {EXTRA}")
