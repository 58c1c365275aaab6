"""Attention that is a function of one's own, attention(q, k, v, mask), in the place of a model's.

It is named as entry points are, "theirs.attention:topk", or by its file, "topk.py:topk", with options behind the name.
Legend: H heads, L queries, S keys.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crt_exp.attention.base import AttentionLayer
from crt_exp.attention.checks import repeat_heads
from crt_exp.config import ConfigError


def is_function(name: str) -> bool:
    return ":" in name


def function_of(name: str) -> Callable[..., Tensor]:
    """Raises ConfigError where there is none."""
    place, _, attribute = name.rpartition(":")
    try:
        module = from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:  # whatever the import of somebody's module raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"attention {name!r}: {reason}; it takes FILE.py:FUNCTION or MODULE:FUNCTION of a function "
                          "attention(q, k, v, mask)") from None
    if not callable(found):
        raise ConfigError(f"attention {name!r}: got {found!r}, expected a function attention(q, k, v, mask)")
    return found


def from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Called(AttentionLayer):
    """The function is given q (B,H,L,d) scaled, k and v (B,H,S,d) with a head for each of q, and mask, boolean, of a
    shape that broadcasts to (B,H,L,S), True where a key may be read; None: all may. It returns (B,H,L,d)."""

    def __init__(self, name: str, options: dict[str, Any], heads: int, d: int, *, kv_heads: int | None = None,
                 causal: bool = False, scaling: float | None = None, layer: int = 0):
        super().__init__(heads, d, kv_heads, causal, scaling)
        self.name, self.function = name, partial(function_of(name), **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        k, v = (repeat_heads(t, q.shape[1]) for t in (k, v))
        found = self.function(q * self.scaling, k, v, self.mask(q, k, key_mask))
        wanted = (*q.shape[:-1], v.shape[-1])
        if not isinstance(found, Tensor) or found.shape != wanted:
            got = tuple(found.shape) if isinstance(found, Tensor) else found
            raise ValueError(f"attention {self.name!r}: got {got}, expected a tensor of shape {tuple(wanted)}")
        return found

    def mask(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor | None:
        seen = None if key_mask is None else key_mask[:, None, None, :]
        if self.causal:
            length, keys = q.shape[-2], k.shape[-2]
            before = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
            seen = before if seen is None else before & seen
        return seen
