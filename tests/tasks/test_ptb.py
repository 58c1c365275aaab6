"""task=ptb as a user types it: texts, a state that is carried, full and sampled softmax, many processes."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import check_refused
from stopping import stopped_and_continued
from torch.nn import functional as F

from crt_exp.config import ConfigError
from crt_exp.data import corpora
from crt_exp.data.text import IGNORED
from crt_exp.mechanism import Mechanism
from crt_exp.models import lstm
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.ptb import PTB

PENN = Path(os.environ.get("CRT_DATA", "none")) / "ptb"
SAMPLED = ["uniform", "log_uniform", "unigram", "exact", "quadratic", "features"]
WORDS = 12
OPTIONS = {"corpus": "", "data_dir": None, "source": "files", "min_count": None, "width": 16, "layers": 2,
           "dropout": 0.0, "bptt": 7, "softmax": "full",
           "sampling": {"negatives": 5, "temperature": 1.0, "rebuild_every": 3, "tree": True, "alpha": 100.0},
           "temperature": 1.0, "lengths": {"queries": 0.0, "keys": 0.0}, "eval_columns": 4}


@pytest.fixture(scope="module", autouse=True)
def corpus(tmp_path_factory):
    """Lines of four words, each of which follows from the one before, or is any of eleven in one case of four."""
    rng = np.random.default_rng(0)
    words = (rng.integers(0, 3, 900) > 0).cumsum() * 5 % (WORDS - 1)
    words = np.where(rng.random(900) < 0.25, rng.integers(0, WORDS - 1, 900), words).reshape(-1, 4)
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text("".join(" ".join(f"w{word}" for word in line) + "\n" for line in words))
    OPTIONS["corpus"] = str(path)
    return path


@pytest.fixture
def typed(typed, corpus, tmp_path, monkeypatch, one_thread):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    def run(*args, directory="run"):
        monkeypatch.delenv("CRT_DATA", raising=False)
        base = ["trainer.batch=4", "trainer.steps=6", "trainer.save_every=1000", "trainer.eval_every=1000",
                "task.width=16", "task.bptt=7", "task.sampling.negatives=5", "task.sampling.rebuild_every=3",
                "task.eval_columns=4", f"task.corpus={corpus}"]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        return typed("task=ptb", "logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return run


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def task_of(**options):
    return PTB(**OPTIONS | options)


def trained(task, steps, batch=4):
    """Without the runner."""
    model, plan = built(task).train(), Plan(batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(steps):
        if step % task.epoch_steps(plan) == 0:
            batches = task.batches("train", plan)
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()
        optimizer.step()
        task.updated(model, step + 1)
    return model.eval()


def built(task, **options):
    return task.build(Mechanism.of(features="oprf", m=8, **options))


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_it_learns_beyond_the_unigram(one_thread):
    task = task_of()
    found = task.evaluate(trained(task, 100, batch=10), "test", Reader(task))
    assert found["loss"] < np.log(found["unigram_perplexity"]) - 0.1 and found["words"] == 60


def test_what_a_run_keeps(typed, tmp_path):
    """The model gives the same loss, and the histograms hold every query and every key."""
    code, out, err = typed("task.temperature=0.5", "trainer.log_every=3")
    assert code == 0 and err == "" and "ptb: perplexity" in out and "by task.softmax=full" in out, err
    assert {r["split"] for r in records(tmp_path / "run")} == {"train", "validation", "test"}
    kept, task, last = lstm.load(tmp_path / "run", "run"), task_of(), records(tmp_path / "run")[-1]
    model = lstm.LSTMLanguageModel(kept.body, None, kept.temperature).eval()
    found = task.evaluate(model, "test", Reader(task))
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6) and kept.words == task.text.words
    rows = [*csv.DictReader((tmp_path / "run" / "lengths.csv").read_text().splitlines())]
    assert sum(int(r["queries"]) for r in rows) == 60 and sum(int(r["keys"]) for r in rows) == 12
    assert (tmp_path / "run" / "lengths.png").stat().st_size > 5000
    for length, key in (("query_length", "queries"), ("key_length", "keys")):
        middle = [(float(r["from"]) + float(r["to"])) / 2 for r in rows]
        weights = [int(r[key]) for r in rows]
        assert np.average(middle, weights=weights) == pytest.approx(last[length], abs=0.02)


@pytest.mark.parametrize("softmax", SAMPLED)
def test_sampled_softmax_learns(softmax, one_thread):
    """Evaluation is by the full softmax of the same weights, whatever trained them."""
    task = task_of(softmax=softmax)
    model = trained(task, 120 if softmax == "quadratic" else 60)  # which draws words of large negative logits too
    found = task.evaluate(model, "test", Reader(task))
    assert found == task.evaluate(lstm.LSTMLanguageModel(model.body, None).eval(), "test", Reader(task))
    assert found["loss"] < np.log(found["unigram_perplexity"])


# ---- columns and the state that is carried ---------------------------------------------------------------------------


def test_the_loss_of_an_epoch_is_that_of_the_text_read_at_once():
    """The state goes from batch to batch and begins anew with an epoch; micro-batches have their own."""
    task = task_of()
    model = built(task)
    for plan, parts in ((Plan(4), 1), (Plan(4, micro=2), 2)):
        for _ in range(2):
            batches = [*task.batches("train", plan)]
            losses = [task.loss(model, batch).detach() for batch in batches]
            sizes = [batch["labels"].numel() for batch in batches]
        mean = sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)
        whole = corpora.columns(task.text.parts["train"], 4, task.text.eos, whole=False)
        outputs, _ = model.body(torch.from_numpy(whole[0]))
        torch.testing.assert_close(mean, F.cross_entropy((outputs @ model.body.embedding.weight.T).flatten(0, 1),
                                                         torch.from_numpy(whole[1]).flatten()).detach())
        assert task.state_dict().keys() == set("01"[:parts]) and len(batches) == parts * task.epoch_steps(plan)
        task.load_state_dict({})


@pytest.mark.parametrize("bptt, batch", [(7, 32), (50, 3)])
def test_metrics_do_not_depend_on_the_batches_they_are_computed_in(bptt, batch):
    task = task_of()
    model = built(task).eval()
    with torch.no_grad():
        expected = task.evaluate(model, "validation", Reader(task))
        found = task_of(bptt=bptt).evaluate(model, "validation", Reader(task_of(bptt=bptt), batch=batch))
    assert found == pytest.approx(expected, rel=1e-6) and found["words"] == 60


def test_processes_share_the_columns_of_an_evaluation():
    task = task_of(eval_columns=5)
    parts = [[*task.batches("test", Plan(1, rank=rank, world=3))] for rank in range(3)]
    rows = [torch.cat([batch["labels"] for batch in part], 1) for part in parts]
    joined = torch.cat([row.flatten() for row in rows])
    assert joined[joined != IGNORED].tolist() == task.text.parts["test"].tolist()
    assert [len(row) for row in rows] == [1, 2, 2]
    assert [*task_of(eval_columns=1).batches("test", Plan(1, rank=0, world=2))] == []


def test_two_processes_read_the_micro_batches_of_one():
    halves = [[*task_of().batches("train", Plan(4, rank=rank, world=2))] for rank in (0, 1)]
    both = [batch for pair in zip(*halves) for batch in pair]
    for one, two in zip(task_of().batches("train", Plan(4, micro=2)), both, strict=True):
        assert torch.equal(one["tokens"], two["tokens"]) and torch.equal(one["labels"], two["labels"])


def test_weights_that_are_split_are_refused_where_tables_hold_them():
    with pytest.raises(ConfigError, match="task.softmax=unigram: not supported with trainer=fsdp"):
        task_of(softmax="unigram").check_shards()


def test_lengths_and_temperature_of_the_loss():
    task = task_of(temperature=0.5, lengths={"queries": 0.3, "keys": 0.7})
    model, batch = built(task), next(task.batches("train", Plan(4)))
    outputs, e = model.body(batch["tokens"])[0].flatten(0, 1), model.body.embedding.weight
    cost = 0.3 * (outputs.norm(dim=1) - 1).square().mean() + 0.7 * (e.norm(dim=1) - 1).square().mean()
    expected = F.cross_entropy(2 * outputs @ e.T, batch["labels"].flatten()) + cost
    torch.testing.assert_close(task.loss(model, batch), expected)
    alone = model.eval()(batch["tokens"], batch["labels"])
    torch.testing.assert_close(alone.loss.float() / len(outputs), (expected - cost))
    torch.testing.assert_close(alone.lengths, outputs.norm(dim=1))


def test_lengths_come_near_one(one_thread):
    tasks = [task_of(temperature=0.3, lengths={"queries": beta, "keys": beta}) for beta in (0.0, 5.0)]
    plain, near = (task.evaluate(trained(task, 60), "test", Reader(task)) for task in tasks)
    for key in ("query_length", "key_length"):
        assert abs(near[key] - 1) < 0.1 and abs(near[key] - 1) < abs(plain[key] - 1) / 2


# ---- stopped and continued, many processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["task.softmax=features", "features.m=8"],
                                  pytest.param(["task.softmax=full"], marks=pytest.mark.slow)], ids=" ".join)
def test_a_stopped_run_continues_to_the_same_numbers(args, typed, tmp_path, monkeypatch, interruptible):
    """In the middle of an epoch and between two rebuilds of the sampler's tables, dropout and two states included."""
    args = [*args, "trainer.accumulate=2", "trainer.steps=10", "trainer.save_every=7", "trainer.log_every=1"]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, PTB, 2 * 8, *args)
    assert records(tmp_path / "stopped") == records(tmp_path / "run")
    one, two = (checkpoint.load_tensors(tmp_path / d / "model" / "model.safetensors") for d in ("run", "stopped"))
    assert all(torch.equal(one[key], two[key]) for key in one)


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.corpus=ptb", "task.source=files"], ["CRT_DATA is not set", "crt_exp.data fetch ptb"]),
    (["task.corpus=wikitext2", "task.data_dir=/nowhere"], ["/nowhere", "is not there"]),
    (["task.corpus=/nowhere.txt"], ["/nowhere.txt", "No such file"]),
    (["task.softmax=sampled"], ["task.softmax=sampled", "log_uniform"]),
    (["task.softmax=uniform", "task.sampling.negatives=12"], ["task.sampling.negatives=12: expected at most 11"]),
    (["features.m=8"], ["task=ptb: does not use features.m=8"]),
    (["attention=favorpp", "task.softmax=unigram"], ["does not use attention=favorpp"]),
    (["task.softmax=features", "attention=uniform"], ["features: attention=uniform", "set attention=favorpp"]),
    (["trainer.batch=5000"], ["trainer.batch=5000", "no step with 1005 training rows"]),
    (["task.temperature=0"], ["task.temperature=0", "expected a number > 0"]),
    (["task.lengths.keys=-1"], ["task.lengths.keys=-1"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_empty_and_unfitting_files(typed, tmp_path):
    for part, text in (("train", "a b\n"), ("valid", "a\n"), ("test", "a c\n")):
        (tmp_path / f"ptb.{part}.txt").write_text(text)
    args = ["task.corpus=ptb", f"task.data_dir={tmp_path}"]
    check_refused(typed(*args), ["'c' and <unk> are not in the training text"], tmp_path / "run")
    (tmp_path / "ptb.train.txt").write_text("")
    check_refused(typed(*args), ["ptb.train.txt", "too few lines"], tmp_path / "run")


def test_what_is_no_run_of_this_task(tmp_path):
    from crt_exp.data import DataError

    with pytest.raises(DataError, match="run=.*gone: no such directory"):
        lstm.load(tmp_path / "gone", "run")
    (tmp_path / "config.json").write_text('{"kind": "other"}')
    with pytest.raises(DataError, match="run=.*expected a run of task=ptb"):
        lstm.load(tmp_path, "run")


# ---- the real text ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not PENN.is_dir(), reason="needs $CRT_DATA/ptb")
def test_the_penn_treebank():
    task = task_of(corpus="ptb", data_dir=str(PENN), width=8, bptt=35)
    assert task.epoch_steps(Plan(20)) == 1328 and task.length("test") == 82430
    found = task.evaluate(built(task).eval(), "test", Reader(task))
    assert found["words"] == 82430 and 600 < found["unigram_perplexity"] < 720
