import pytest
from toy_runs import ARGS, BASE, PLAIN, shared_run


@pytest.fixture
def typed(typed, tmp_path):
    """The same for a run of the small task in a folder of this test."""
    return lambda *args, directory="run": typed(*BASE, f"hydra.run.dir={tmp_path / directory}", *args)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run of ARGS."""
    return shared_run(tmp_path_factory.mktemp("whole") / "run", ARGS)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A run of PLAIN on one process."""
    return shared_run(tmp_path_factory.mktemp("plain") / "run", PLAIN)
