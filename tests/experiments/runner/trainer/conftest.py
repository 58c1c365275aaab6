import pytest
from helpers import toy
from helpers.stopping import stop_signal

from crt_exp import train


@pytest.fixture
def typed(typed, tmp_path):
    """The same for a run of the small task in a folder of this test."""
    return lambda *args, directory="run": typed(
        *toy.BASE, f"hydra.run.dir={tmp_path / directory}", *args
    )


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Makes a run without its picture."""

    def make(*args):
        folder = tmp_path_factory.mktemp("shared") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "draw_curves", lambda *_: None)
            toy.run(folder, *args)
        return folder

    return make


@pytest.fixture(scope="session")
def whole(shared):
    """An uninterrupted run of ARGS."""
    return shared(*toy.ARGS)


@pytest.fixture(scope="session")
def cut(shared, tmp_path_factory):
    """A run of ARGS that was stopped in step 13, with checkpoints of steps 10, 12 and 13."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with stop_signal(toy.Toy, 13), pytest.raises(SystemExit):
        toy.run(folder, *toy.ARGS)
    return folder


@pytest.fixture(scope="session")
def plain(shared):
    """A run of PLAIN on one process."""
    return shared(*toy.PLAIN)
