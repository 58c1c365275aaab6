"""Values of tensors as short lists of numbers, and how near two of them must be.

A tensor becomes [norm, sum, a few entries], computed in float64. Differences are relative to the norm: `SAME` on the
kind of processor that wrote a file, `OTHER` on any other, where products of matrices round in another order.
"""

import json
import platform
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
SAME, OTHER = 1e-6, 1e-3
ENTRIES = 4


def numbers(t: Tensor) -> list[float]:
    """[norm, sum, ENTRIES entries] of a tensor of any shape and type."""
    flat = t.detach().to(torch.float64 if not t.is_complex() else torch.complex128).flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    places = torch.linspace(0, max(len(flat) - 1, 0), ENTRIES).long() if len(flat) else []
    return [rounded(x) for x in (float(flat.norm()), float(flat.sum()), *(float(flat[i]) for i in places))]


def rounded(value: float) -> float:
    return float(f"{value:.9g}")


def attempt(function, *args, **options):
    """What a function returns, or the name of the exception that it raises."""
    try:
        return function(*args, **options)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"refused: {type(error).__name__}"


def machine() -> str:
    """The processor, and the release of torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, torch {torch.__version__}"


def file_of(section: str) -> Path:
    return FOLDER / f"{section}.json"


def load(section: str) -> dict:
    """{"machine": ..., "tolerance": ..., "groups": {group: {case: value}}}"""
    return json.loads(file_of(section).read_text())


def save(section: str, groups: dict) -> None:
    lines = [
        f"  {json.dumps(group)}: {{\n"
        + ",\n".join(f"    {json.dumps(case)}: {json.dumps(value)}" for case, value in cases.items())
        + "\n  }"
        for group, cases in groups.items()
    ]
    head = f'"machine": {json.dumps(machine())},\n"tolerance": {{"same machine": {SAME}, "other": {OTHER}}},\n'
    file_of(section).write_text("{" + head + '"groups": {\n' + ",\n".join(lines) + "\n}}\n")


def differences(expected, found, tolerance: float, path: str = "") -> list[str]:
    """One line for each value that differs: numbers by more than the tolerance times the largest of their list."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [
            f"{path}/{key}: only {'expected' if key in expected else 'found'}"
            for key in sorted(expected.keys() ^ found.keys())
        ]
        return missing + [
            line
            for key in expected.keys() & found.keys()
            for line in differences(expected[key], found[key], tolerance, f"{path}/{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        plain = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (*expected, *found))
        if not plain:
            return [
                line
                for i, pair in enumerate(zip(expected, found))
                for line in differences(*pair, tolerance, f"{path}[{i}]")
            ]
        scale = max((abs(x) for x in expected if x == x and abs(x) != float("inf")), default=0) + 1e-12
        same = all(a == b or abs(a - b) <= tolerance * scale or (a != a and b != b) for a, b in zip(expected, found))
        return [] if same else [f"{path}: expected {expected}, found {found}"]
    if isinstance(expected, float) and isinstance(found, int | float):
        return differences([expected], [found], tolerance, path)
    return [] if expected == found else [f"{path}: expected {expected!r}, found {found!r}"]
