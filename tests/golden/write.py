"""Writes the golden values: python tests/golden/write.py [section[:group] ...]; all of them without arguments."""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(ROOT),
    str(HERE.parent),
]
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


def main() -> None:
    import compare
    import torch

    torch.set_num_threads(1)
    for wanted in sys.argv[1:] or list(compare.SECTIONS):
        section, _, group = wanted.partition(":")
        names, cases = compare.SECTIONS[section]
        old = compare.load(section)["groups"] if group else {}
        groups = {}
        for name in names():
            groups[name] = old[name] if name in old and name != group else cases(name)
        save(compare, section, json.loads(json.dumps(groups)))
        print(f"{compare.file_of(section)}: {len(groups)} groups")


def save(compare, section: str, groups: dict) -> None:
    """A line for each case."""
    parts = []
    for group, cases in groups.items():
        lines = ",\n".join(
            f"    {json.dumps(case)}: {json.dumps(value)}" for case, value in cases.items()
        )
        parts.append(f"  {json.dumps(group)}: {{\n{lines}\n  }}")
    tolerance = {"same machine": compare.SAME, "other": compare.OTHER}
    head = f'"machine": {json.dumps(compare.machine())},\n"tolerance": {json.dumps(tolerance)},\n"groups": {{\n'
    compare.file_of(section).write_text("{" + head + ",\n".join(parts) + "\n}}\n")


if __name__ == "__main__":
    main()
