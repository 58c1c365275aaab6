"""What Hydra was asked for and made of it: overrides, choices of groups, the run directory,
whether it belongs to a sweep."""

import re
from pathlib import Path
from typing import Any


def choice(group: str) -> str | None:
    """The name that was chosen of a group."""
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().runtime.choices.get(group)


def overrides() -> list[str]:
    """What this run was told, also where a sweep or a torchrun told it and not the command line;
    nothing outside a run."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def folders() -> list[str]:
    """Folders of configuration files that the user added to Hydra's search path."""
    from hydra.core.hydra_config import HydraConfig

    sources = HydraConfig.get().runtime.config_sources
    return [f"{source.schema}://{source.path}" for source in sources if source.provider.endswith("command-line")]


def output_directory() -> Path:
    """The run directory."""
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def in_sweep() -> bool:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def place() -> tuple[str, Path]:
    """The key and value that name this run's directory again, or that of its sweep."""
    from hydra.core.hydra_config import HydraConfig

    if in_sweep():
        return "hydra.sweep.dir", Path(HydraConfig.get().sweep.dir).absolute()
    return "hydra.run.dir", output_directory()


def override(key: str, value: Any) -> str:
    """key=value in Hydra's grammar, for values of any characters."""
    from hydra.core.override_parser.types import Quote, QuotedString

    text = str(value)
    if re.fullmatch(r"/[\w./-]+", text, re.ASCII):
        return f"{key}={text}"
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    return f"{key}={QuotedString(text, Quote.double).with_quotes()}"
