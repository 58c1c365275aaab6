"""Runs of the small task of toy.py by the command line, and what they leave."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import toy

from crt_exp.runner import checkpoint
from crt_exp.train import main

TESTS = Path(__file__).parents[2]
FILES = ["checkpoints", "config.yaml", "curves.png", "inputs.json", "metrics.jsonl", "versions.json"]
BASE = ("--config-dir", str(TESTS / "toy_conf"), "task=toy", "logger=none")
ARGS = ["trainer.epochs=2", "trainer.save_every=5", "trainer.log_every=4", "trainer.keep=3"]
PLAIN = ["trainer.epochs=1", "task.dropout=0", "task.weighted=true"]
# ends below its best
OVERSHOT = ["trainer.steps=20", "trainer.eval_every=4", "trainer.lr=0.5", "trainer.schedule=constant", "seed=1"]
CARRYING = ["task=carrying", "trainer.steps=6", "trainer.save_every=3", "trainer.keep=20"]


def shared_run(directory, args):
    """In this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["crt_exp", *BASE, *args, f"hydra.run.dir={directory}"])
        main()
    return directory


def at_call(monkeypatch, count, action):
    """Does something in the loss of training step `count`, counted from the start of the process."""
    real, calls = toy.Toy.loss, []

    def loss(self, model, batch):
        calls.append(1)
        if len(calls) == count:
            action()
        return real(self, model, batch)
    monkeypatch.setattr(toy.Toy, "loss", loss)


def send(signum):
    return lambda: os.kill(os.getpid(), signum)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def checkpoints(directory):
    return checkpoint.steps(directory / "checkpoints")


def assert_same(a, b):
    """Bit for bit: records, and weights, optimiser and generators of every checkpoint."""
    assert records(a) == records(b)
    assert checkpoints(a) == checkpoints(b) != []
    for step in checkpoints(a):
        one, two = (d / "checkpoints" / f"step-{step}" for d in (a, b))
        for name in ("model", "optimizer"):
            x, y = (checkpoint.load_tensors(p / f"{name}.safetensors") for p in (one, two))
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        assert checkpoint.load_state(one) == checkpoint.load_state(two)


def assert_close(a, b, tolerance=2e-5):
    """Two lists of records."""
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key in x:
            expected = pytest.approx(y[key], rel=tolerance, abs=tolerance) if isinstance(y[key], float) else y[key]
            assert x[key] == expected, key
