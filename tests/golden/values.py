"""Values of tensors as short lists of numbers.

A tensor becomes [norm, sum, a few entries], computed in float64.
"""

import torch
from torch import Tensor

ENTRIES = 4


def numbers(t: Tensor) -> list[float]:
    """[norm, sum, ENTRIES entries] of a tensor of any shape and type."""
    flat = t.detach().to(torch.float64 if not t.is_complex() else torch.complex128).flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    places = torch.linspace(0, max(len(flat) - 1, 0), ENTRIES).long() if len(flat) else []
    return [
        rounded(x)
        for x in (float(flat.norm()), float(flat.sum()), *(float(flat[i]) for i in places))
    ]


def rounded(value: float) -> float:
    return float(f"{value:.9g}")


def attempt(function, *args, **options):
    """What a function returns, or the name of the exception that it raises."""
    try:
        return function(*args, **options)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}"
