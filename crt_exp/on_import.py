"""What `import crt_exp` asks of transformers, at the moment when somebody imports that: nothing here imports it.

A finder waits for the one module that holds transformers' models, and has `implementations.install` run behind it. So
`import crt_exp` stays fast, and the order of the two imports does not matter.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

WAITED_FOR = "transformers.modeling_utils"
INSTALLER = "crt_exp.pretrained.implementations"


class Waiting:
    """A finder of sys.meta_path that finds nothing by itself."""

    def __init__(self):
        self.asking = False

    def find_spec(self, name, path=None, target=None):
        if name != WAITED_FOR or self.asking:
            return None
        self.asking = True  # the search below asks all finders, this one too
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), install())
        return spec


def wait() -> None:
    """Installs now where the module is there already, else behind its import. Repeated calls change nothing."""
    if getattr(sys.modules.get(WAITED_FOR), "AttentionInterface", None) is not None:
        install()
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def install() -> None:
    import_module(INSTALLER).install(sys.modules[WAITED_FOR])
