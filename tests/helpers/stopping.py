"""Stop a run in the middle of a step and continue it."""

import os
import signal
from contextlib import contextmanager

import pytest


@contextmanager
def during_step(task, step, action):
    """Call `action` while the class `task` computes its loss number `step`."""
    real = task.loss
    calls = []

    def loss(self, model, batch):
        calls.append(1)
        if len(calls) == step:
            action()
        return real(self, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "loss", loss)
        yield


def stop_signal(task, step, signum=signal.SIGTERM):
    return during_step(task, step, lambda: os.kill(os.getpid(), signum))


def stopped_and_continued(typed, monkeypatch, task, step, *args):
    """The run `typed(*args, directory="stopped")`: SIGTERM comes while the class `task` computes its loss `step`."""
    with stop_signal(task, step):
        assert typed(*args, directory="stopped")[0] == 143
    code, out, err = typed(*args, "resume=auto", directory="stopped")
    assert code == 0, err
    assert "continuing from" in out, err
