"""task=transfer_vision as a user types it: from an exact classifier to one that task=imagenet goes on with."""

import json
import sys

import pytest

from crt_exp.train import main

ARM = ("attention=hedgehog", "features.m=4")


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """The run of an exact classifier."""
    directory = tmp_path_factory.mktemp("vision") / "exact"
    sizes = [f"task.sizes.{key}={value}" for key, value in {"width": 16, "depth": 2, "heads": 2, "patch": 2}.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["crt_exp", "task=imagenet", "attention=exact", "trainer.steps=10", *sizes,
                                    "logger=none", "trainer.cpu=true", f"hydra.run.dir={directory}"])
        main()
    return directory


@pytest.fixture
def typed(typed, tmp_path):
    def run(task, *args, directory):
        return typed(f"task={task}", *args, "logger=none", "trainer.cpu=true", f"hydra.run.dir={tmp_path / directory}")
    return run


def last(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_classifier_is_taught_and_goes_on(exact, typed, tmp_path):
    start = f"task.init={exact}"
    steps = ["trainer.steps=12", "trainer.eval_every=4", "trainer.lr=3e-2"]
    code, out, err = typed("transfer_vision", start, *ARM, *steps, directory="taught")
    assert code == 0 and "of exact attention, worst layer" in out, err
    records = [json.loads(line) for line in (tmp_path / "taught" / "metrics.jsonl").read_text().splitlines()]
    errors = [record["error"] for record in records if record["split"] == "val" and not record.get("final")]
    assert errors[-1] < errors[0] and records[-1]["exact_loss"] == pytest.approx(last(exact)["loss"])
    code, _, err = typed("imagenet", f"task.init={tmp_path / 'taught'}", *ARM, "trainer.steps=0", directory="on")
    assert code == 0, err
    assert {key: last(tmp_path / "on")[key] for key in ("loss", "accuracy")} == pytest.approx(
        {key: records[-1][key] for key in ("loss", "accuracy")}, rel=1e-5)
    code, _, err = typed("transfer_vision", f"task.init={tmp_path / 'taught'}", *ARM, directory="again")
    assert code == 2 and f"task.init={tmp_path / 'taught'}: expected exact attention; different keys" in err


@pytest.mark.parametrize("args, words", [
    (["task.init=scratch", *ARM], "task.init=scratch: expected a model trained with exact attention; set task.init"),
    (["attention=exact"], "attention=exact: expected an approximate method"),
    (["attention=window"], "attention=window: has nothing to train; use"),
    ([*ARM, "task.new_head=true"], "task.new_head=true: not supported"),
    ([*ARM, "trainer.adapt=lora"], "not supported with trainer.adapt; use it afterwards, with task=imagenet")])
def test_what_is_refused(exact, typed, tmp_path, args, words):
    start = [] if args[0].startswith("task.init") else [f"task.init={exact}"]
    code, _, err = typed("transfer_vision", *start, *args, "trainer.steps=1", directory="bad")
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "bad").exists()
