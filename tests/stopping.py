"""A run that is told to stop in the middle of a step, and continued."""

import os
import signal


def stopped_and_continued(typed, monkeypatch, task, step, *args):
    """The run `typed(*args, directory="stopped")`: SIGTERM comes while the class `task` computes its loss `step`."""
    real, calls = task.loss, []

    def loss(self, model, batch):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, model, batch)
    with monkeypatch.context() as patch:
        patch.setattr(task, "loss", loss)
        assert typed(*args, directory="stopped")[0] == 143
    code, out, err = typed(*args, "resume=auto", directory="stopped")
    assert code == 0 and "continuing from" in out, err
