"""Seeded float64 numbers, the raw material of every sampler; `generator=None` is torch's default generator."""

import math
from pathlib import Path

import torch
from torch import Tensor

from crt_exp.options import whole_number

ALWAYS = 2**28   # bytes below which the free memory is not looked up
U_MARGIN = 2.0**-33  # quantiles of u nearer to 0 or 1 are cut: |g| <= 6.4


def normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device_of(generator))


def randint(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=device_of(generator))


def signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return 2.0 * randint(0, 2, shape, generator).double() - 1


def row_lengths(shape: tuple[int, ...], d: int, kind: str, generator: torch.Generator | None) -> Tensor:
    """Row lengths (*shape, 1)."""
    if kind == "chi":  # chi^2_d is twice a gamma variable of shape d/2: one number a row instead of d
        half = torch.full((*shape, 1), d / 2, dtype=torch.float64, device=device_of(generator))
        return (2 * torch._standard_gamma(half, generator=generator)).sqrt()
    if kind == "sqrt_d":
        return torch.full((*shape, 1), d**0.5, dtype=torch.float64, device=device_of(generator))
    raise ValueError(f"unknown lengths {kind!r}: choose chi (Gaussian rows), sqrt_d (rows on the sphere) or, for "
                     "hadamard, fixed")


def gaussian_quantile(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.clamp(U_MARGIN, 1 - U_MARGIN))


def device_of(generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else torch.device("cpu")


def check(m: int, d: int, batch: tuple[int, ...] = (), generator: torch.Generator | None = None,
          row: int | None = None) -> tuple[int, int]:
    """Projections and dimension as ints. Raises ValueError for sizes that are no counts, or too large for the memory.

    row: numbers drawn for each of m, else d.
    """
    m = whole_number(m, "m")
    d = whole_number(d, "d")
    size = 8 * math.prod(batch) * m * (row or d)
    if size > ALWAYS and size > (free := free_memory(device_of(generator))):
        heads = f" for {math.prod(batch)} heads" if batch else ""
        raise ValueError(f"m = {m}: projections of dimension {d}{heads} take {size / 2**30:.1f} GiB, and "
                         f"{free / 2**30:.1f} GiB of memory are free; choose fewer (features.m)")
    return m, d


def available() -> float:
    """Bytes of the machine's memory that can still be had; infinity where the system does not say."""
    table = Path("/proc/meminfo")
    lines = dict(line.split(":", 1) for line in table.read_text().splitlines()) if table.is_file() else {}
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else math.inf


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had: of the GPU, or of the machine or the container around this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = available()
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
