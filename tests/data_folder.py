"""What tests of real models and texts ask of the data folder."""

import os
from pathlib import Path

import pytest


def lying(*names: str) -> list[Path]:
    """These folders of the data folder; skips where one is not there."""
    root = os.environ.get("CRT_DATA")
    if root is None:
        pytest.skip("CRT_DATA is not set")
    absent = [name for name in names if not (Path(root) / name).exists()]
    if absent:
        pytest.skip(f"{absent[0]} is not in CRT_DATA")
    return [Path(root) / name for name in names]
