"""What installed packages add to conf/ (plugins.py), where Hydra looks: their folders, and their classes as files."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from crt_exp import plugins
from crt_exp.config import place_of
from crt_exp.presets import node_of
from crt_exp.schema import ATTENTION, FEATURES

OF_CLASSES = {"attention": ATTENTION, "features": FEATURES}


class AddedNames(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in plugins.folders():
            search_path.append(plugins.GROUP, f"file://{folder}")
        for group, kind in OF_CLASSES.items():
            for name in plugins.names(group):
                if (there := place_of(group, name)) is not None:
                    ConfigStore.instance().store(name, node_of(there, kind), group, provider=plugins.GROUP)


def register() -> None:
    """From now on whatever Hydra composes knows them."""
    Plugins.instance().register(AddedNames)
