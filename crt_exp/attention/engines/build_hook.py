"""A build hook of hatchling: wheels that bring the attention kernels compiled, for users without a C compiler.

`HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel --no-deps .` makes one for the platform it is made on; else a wheel is of
Python alone, and the kernels are compiled at first use. Loaded by its path: nothing of the package, nor
torch, need be installed.
"""

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        made = self._library().prebuild()
        build_data["artifacts"] += [str(file.relative_to(self.root)) for file in made]
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        shutil.rmtree(self._library().PREBUILT)

    def _library(self) -> ModuleType:
        where = Path(self.root) / "crt_exp/attention/engines/native_library.py"
        spec = importlib.util.spec_from_file_location("native_library", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
