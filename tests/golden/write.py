"""Writes the golden values: python tests/golden/write.py [section[:group] ...]; all of them without arguments."""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), *(str(HERE.parent / name) for name in ("", "data", "models", "runner", "tasks"))]
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


def main() -> None:
    import compare
    import torch
    from values import file_of, load, save

    torch.set_num_threads(1)
    for wanted in sys.argv[1:] or list(compare.SECTIONS):
        section, _, group = wanted.partition(":")
        module = compare.SECTIONS[section]
        old = load(section)["groups"] if file_of(section).exists() else {}
        if group:
            groups = {
                name: module.cases(name) if name == group else old[name]
                for name in module.groups()
                if name in {*old, group}
            }
        else:
            groups = {name: module.cases(name) for name in module.groups()}
        save(section, json.loads(json.dumps(groups)))
        print(f"{file_of(section)}: {len(groups)} groups")


if __name__ == "__main__":
    main()
