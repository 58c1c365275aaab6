"""Student intervals of repeated measurements."""

from collections.abc import Sequence

import numpy as np


def interval(values: Sequence[float], name: str) -> dict[str, float | None]:
    """Mean, standard deviation and half-width of the 95% Student interval.

    The last two are None for a single value.
    """
    from scipy.special import stdtrit  # slow to import

    n = len(values)
    std = float(np.std(values, ddof=1)) if n > 1 else None
    half = float(stdtrit(n - 1, 0.975)) * std / n**0.5 if n > 1 else None
    return {name: float(np.mean(values)), f"{name}_std": std, f"{name}_ci95": half, "repeats": n}
