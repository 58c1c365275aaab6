"""Optional packages that are installed and do not load, such as a torchaudio built for another torch.

transformers imports torchaudio and torchvision wherever they are installed, and every model of transformers fails with
them. The command line hides a broken package from transformers, and names it where a task needs it.
"""

import importlib
import sys
import traceback
from importlib import metadata
from importlib.util import find_spec

BINARY = ("torchaudio", "torchvision")  # compiled against one release of torch
OPTIONAL = (*BINARY, "timm", "soundfile", "datasets", "peft", "gymnasium", "mujoco", "wandb")
_reasons: dict[str, str] = {}  # of packages that were hidden


def explain(error: BaseException) -> str | None:
    """One line about the optional package whose import raised an error, or None.

    The line states the installed version and a version that fits the installed torch.
    """
    name = _package_of(error)
    if name is None:
        return None
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is needed and not installed: pip install '{_fitting(name)}'"
    reason = _reasons.get(name, _first_line(error))
    torch = metadata.version("torch")
    return (
        f"{name} {version} does not load with torch {torch} ({reason}): "
        f"pip install '{_fitting(name)}'"
    )


def _package_of(error: BaseException | None) -> str | None:
    """The optional package whose module code raised the error or one of its causes."""
    while error is not None:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing in OPTIONAL:
            return missing
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in reversed(frames):  # the innermost: timm imports torchvision
            name = frame.f_globals.get("__name__", "").partition(".")[0]
            if name in OPTIONAL and frame.f_code.co_name == "<module>":
                return name
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _fitting(name: str) -> str:
    """The requirement of a package that fits the installed torch."""
    major, minor = (int(part) for part in metadata.version("torch").split(".")[:2])
    if name == "torchaudio":
        return "torchaudio==2.11.0" if (major, minor) < (2, 14) else "torchaudio>=2.11.1"
    if name == "torchvision":
        exact = f"torchvision==0.{minor + 15}.*"  # torchvision 0.26 goes with torch 2.11
        return exact if (major, minor) < (2, 14) else "torchvision>=0.29"
    return name


class HideBroken:
    """Finder of `sys.meta_path` that hides broken packages when transformers is first imported.

    Packages of `BINARY` that do not load then look as if they were not installed. A run that needs no model of
    transformers does not pay for the imports.
    """

    @classmethod
    def find_spec(cls, name: str, path=None, target=None) -> None:
        if not name.startswith("transformers."):  # a mere question whether transformers is there
            return
        sys.meta_path.remove(cls)
        for package in BINARY:
            if package in sys.modules or find_spec(package) is None:
                continue
            try:
                importlib.import_module(package)
            except Exception as error:  # OSError, RuntimeError or ImportError of a shared library
                _reasons[package] = _first_line(error)
                for module in [key for key in sys.modules if key.startswith(f"{package}.")]:
                    del sys.modules[module]
                sys.modules[package] = None  # `find_spec` returns None, and an import fails
