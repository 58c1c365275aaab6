"""Random numbers of a seed."""

import torch


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    """Standard normal numbers, float64."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)
