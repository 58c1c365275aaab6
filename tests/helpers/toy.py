"""A real task, small: three classes of points, a two-layer network with dropout, noise that is drawn again each epoch.

Reached from the command line by `--config-dir tests/helpers/toy_conf task=toy` with this folder on PYTHONPATH.
"""

import json
import math
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

from crt_exp.experiments.runner import checkpoint
from crt_exp.experiments.tasks.base import Task
from crt_exp.registry import CONF


class Network(nn.Module):
    def __init__(self, dim, width, dropout, classes=3):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(dim, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout)
        )
        self.outer = nn.Linear(width, classes)

    def forward(self, x):
        return self.outer(self.inner(x))


class Toy(Task):
    """poison: the row whose input is not finite; pause: seconds that a micro-batch takes."""

    metric = "accuracy"

    def __init__(
        self,
        rows=96,
        dim=6,
        width=16,
        dropout=0.1,
        noise=0.1,
        poison=None,
        pause=0.0,
        weighted=False,
        test=True,
    ):
        rng = np.random.default_rng(0)
        centres = rng.normal(size=(3, dim))
        self.data = {}
        for split, n in {"train": rows, "validation": 31, "test": 30}.items():
            y = rng.integers(3, size=n)
            self.data[split] = ((centres[y] + rng.normal(size=(n, dim))).astype(np.float32), y)
        if poison is not None:
            self.data["train"][0][poison] = np.inf
        self.dim = dim
        self.width = width
        self.dropout = dropout
        self.noise = noise
        self.pause = pause
        self.weighted = weighted
        self.test = "test" if test else None

    def length(self, split):
        return len(self.data[split][1])

    def build(self, mechanism):
        return Network(self.dim, self.width, self.dropout)

    def batches(self, split, plan):
        x, y = self.data[split]
        for rows in plan.rows(len(y), split):
            if self.pause:
                time.sleep(self.pause)
            noise = 0
            if split == "train":
                noise = np.stack([plan.rng(row).normal(size=self.dim) for row in rows])
            # a mean over a part that differs in size
            keep = np.ones(len(rows), bool) if not self.weighted else rows % 3 > 0
            yield {
                "x": torch.from_numpy((x[rows] + self.noise * noise).astype(np.float32)),
                "y": torch.from_numpy(y[rows]),
                "keep": torch.from_numpy(keep),
            }

    def weight(self, batch):
        return batch["keep"].sum() if self.weighted else None

    def loss(self, model, batch):
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["keep"]).sum() / batch["keep"].sum().clamp(min=1)

    def evaluate(self, model, split, reader):
        loss = 0.0
        predicted = []
        truth = []
        for batch in reader.batches(split):
            scores = model(batch["x"])
            loss += nn.functional.cross_entropy(scores, batch["y"], reduction="sum").item()
            predicted += scores.argmax(-1).tolist()
            truth += batch["y"].tolist()
        n, loss = reader.sum(len(truth), loss)
        same = np.equal(reader.gather(predicted), reader.gather(truth))
        return {"accuracy": float(same.mean()), "loss": loss / n}


class Uneven(Toy):
    """Rows of 1 to 7 seconds, in micro-batches of at most 40."""

    budget = 40.0

    def costs(self, split):
        return 1 + np.arange(len(self.data[split][1])) % 7

    def epoch_steps(self, plan):
        return plan.steps(self.costs("train"), self.budget)

    def batches(self, split, plan):
        x, y = self.data[split]
        for rows in plan.by_cost(self.costs(split), self.budget, split):
            keep = torch.ones(len(rows), dtype=torch.bool)
            yield {"x": torch.from_numpy(x[rows]), "y": torch.from_numpy(y[rows]), "keep": keep}

    def weight(self, batch):
        return len(batch["y"])


class Carrying(Uneven):
    """With a state of its own: what its steps have read, which goes into the loss,
    and a table that follows the weights."""

    def build(self, mechanism):
        self.seen = torch.zeros(self.dim)
        self.count = 0
        self.table = None
        return super().build(mechanism)

    def loss(self, model, batch):
        self.seen = 0.9 * self.seen + batch["x"].mean(0)
        self.count += 1
        inner = batch | {"x": batch["x"] + 0.01 * self.seen / self.count}
        loss = super().loss(model, inner)
        if self.table is None:
            return loss
        return loss * (1 + 0.1 * self.table.square().mean())

    def updated(self, model, step):
        assert model.training
        assert not torch.is_grad_enabled()
        assert isinstance(model, Network)
        self.table = model.outer.weight.clone() + step

    def state_dict(self):
        state = {"seen": self.seen, "count": self.count}
        if self.table is not None:
            state["table"] = self.table
        return state

    def load_state_dict(self, state):
        self.seen = state["seen"]
        self.count = state["count"]
        self.table = state.get("table")


TRAINER = OmegaConf.to_container(OmegaConf.load(CONF / "trainer/default.yaml"))
del TRAINER["_target_"]

# ---- its runs by the command line ------------------------------------------------------------------------------------

BASE = ("--config-dir", str(Path(__file__).parent / "toy_conf"), "task=toy", "logger=none")
ARGS = ["trainer.epochs=2", "trainer.save_every=5", "trainer.log_every=4", "trainer.keep=3"]
PLAIN = ["trainer.epochs=1", "task.dropout=0", "task.weighted=true"]
# ends below its best
OVERSHOT = [
    "trainer.steps=20",
    "trainer.eval_every=4",
    "trainer.lr=0.5",
    "trainer.schedule=constant",
    "seed=1",
]
CARRYING = [
    "task._target_=helpers.toy.Carrying",
    "trainer.steps=6",
    "trainer.save_every=3",
    "trainer.keep=20",
]
FILES = [
    "checkpoints",
    "config.yaml",
    "curves.png",
    "inputs.json",
    "metrics.jsonl",
    "versions.json",
]


def run(directory, *args):
    """In this process, or as the target of another."""
    from crt_exp.train import main

    with mock.patch.object(sys, "argv", ["crt_exp", *BASE, *args, f"hydra.run.dir={directory}"]):
        main()


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    entries = []
    for line in lines:
        entries.append({k: v for k, v in json.loads(line).items() if k != "time_s"})
    return entries


def checkpoints(directory):
    return checkpoint.steps(directory / "checkpoints")


def assert_same(a, b):
    """Bit for bit: records, and weights, optimiser and generators of each checkpoint that both have, the last too."""
    assert records(a) == records(b)
    both = {*checkpoints(a)} & {*checkpoints(b)}
    assert max(both) == max(checkpoints(a)) == max(checkpoints(b))
    for step in both:
        one = a / "checkpoints" / f"step-{step}"
        two = b / "checkpoints" / f"step-{step}"
        for name in ("model.safetensors", "optimizer.safetensors"):
            x = checkpoint.load_tensors(one / name)
            y = checkpoint.load_tensors(two / name)
            assert x.keys() == y.keys()
            for k in x:
                assert torch.equal(x[k], y[k])
        assert checkpoint.load_state(one) == checkpoint.load_state(two)


def assert_close(a, b, tolerance=2e-5):
    """Two lists of records."""
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for key, value in y.items():
            assert x[key] == value or math.isclose(
                x[key], value, rel_tol=tolerance, abs_tol=tolerance
            ), (key, x, y)
