"""The composed configuration of every choice of every group: what differs from the one without arguments."""

import os
from pathlib import Path

import yaml

from crt_exp.config import CONF

BASE = "python -m crt_exp"
SKIPPED = {"report", "hydra"}


def groups() -> list[str]:
    return [BASE, *sorted(p.name for p in Path(CONF).iterdir() if p.is_dir() and p.name not in SKIPPED)]


def cases(group: str) -> dict:
    base = _composed([])
    if group == BASE:
        return base
    files = sorted(p.stem for p in (Path(CONF) / group).glob("*.yaml"))
    return {name: _change(base, _composed([f"{'+' if group == 'experiment' else ''}{group}={name}"])) for name in files}


def _composed(overrides: list[str]) -> dict:
    """{"task.dataset": "wine", ...}, interpolations of paths and dates as they are written."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    os.environ.setdefault("CRT_DATA", "CRT_DATA")
    GlobalHydra.instance().clear()
    overrides = [o.removeprefix("+") for o in overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    plain = yaml.safe_load(OmegaConf.to_yaml(cfg, resolve=False))
    return dict(_flat(plain))


def _flat(node, path: str = ""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _change(base: dict, new: dict) -> dict:
    changed = {key: value for key, value in new.items() if key not in base or base[key] != value}
    return changed | {key: "(absent)" for key in base if key not in new}
