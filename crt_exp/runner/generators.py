"""The random generators of a process: seeded, kept in a checkpoint as plain JSON, put back."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def stream_seed(seed: int, rank: int) -> int:
    """A seed of its own for each process of a run."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])


def rng_state() -> dict[str, Any]:
    """The state of python's, numpy's and torch's generators (GPU: the current device), as plain JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
             "torch": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The reverse of rng_state, before or after a trip through JSON."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _from_hex(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)


def generators(device: Any) -> list[Any]:
    """The states of torch's generators alone, as tensors: quick enough for every step."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_generators(device: Any, states: list[Any]) -> None:
    """The reverse of generators."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
