"""Files of runs and models are data: none is run, imported or expanded beyond what a run writes."""

import copy
import time
from pathlib import Path

import hostile
import pytest

from crt_exp.config import ConfigError, json_object, read_yaml
from crt_exp.mechanism import Mechanism
from crt_exp.runner.configuration import load_task
from omegaconf import OmegaConf

CHANGES = dict.fromkeys(name for name, _ in hostile.changes(Path("/")))


@pytest.mark.parametrize("name", CHANGES)
def test_a_hostile_attention_runs_nothing_and_is_one_line(name, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    saved = copy.deepcopy(Mechanism.of("favorpp", m=8).to_saved())
    dict(hostile.changes(tmp_path))[name](saved)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="^run = a: ") as caught:
        mechanism = Mechanism.from_saved(saved, "run = a")
        mechanism.layer(2, 4)
    assert not sprung.exists() and time.perf_counter() - start < 1
    hostile.check_one_line(caught.value)


def test_what_is_saved_is_read(tmp_path):
    for mechanism in (Mechanism.of("favorpp", m=8), Mechanism.of("nearfar", exact_until=10**9, cells=4096, heavy=1024),
                      Mechanism.of("linformer", length=65536, rank=256), Mechanism.of("exact"),
                      Mechanism.of("nearfar", open=4), Mechanism.of("hrf_cluster", **{"features.keys": 5})):
        assert Mechanism.from_saved(mechanism.to_saved(), "run") == mechanism


@pytest.mark.parametrize("given", [{"sampler": {"_target_": "os.getcwd"}}, {"sampler": 5}, {"features": [1]},
                                   {"features": {"_target_": "os.getcwd"}}], ids=str)
def test_objects_are_samplers_and_maps(given):
    with pytest.raises(ConfigError, match="expected a name of conf/.* or an object"):
        Mechanism.of("favorpp", **given)


# ---- JSON and YAML

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9))
DEEP = {"deep JSON": '{"a":' * 10**5, "deep lists": "[" * 10**5 + "]" * 10**5, "somewhat deep": "[" * 500 + "]" * 500,
        "long number": "1" * 10**5, "half": '{"a": 1', "no text": b"\xff\xfe\xff"}


@pytest.mark.parametrize("content", DEEP.values(), ids=DEEP)
def test_json_that_no_run_writes(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="config.json") as caught:
        json_object(file)
    hostile.check_one_line(caught.value)


YAML = {"bomb": (BOMB, "aliases are refused.*line 2"), "merged": ("a: &a {b: 1}\nc:\n  <<: *a\n", "aliases are"),
        "deep": ("[" * 10**5, "recursion"), "deep keys": ("".join(" " * i + "a:\n" for i in range(450)), "recursion"),
        "huge": ("#" * (2**17 + 1), "at most 131072 characters"),
        "python": ("a: !!python/object/apply:os.getcwd []\n", "not valid YAML"), "list": ("- 1\n", "expected keys")}


@pytest.mark.parametrize("text, words", YAML.values(), ids=YAML)
def test_yaml_that_no_run_writes(text, words, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"config.yaml: .*{words}") as caught:
        read_yaml(file)
    hostile.check_one_line(caught.value)


def test_interpolations_stay_strings(tmp_path):
    (tmp_path / "config.yaml").write_text("a: ${b}${b}\nb: ${oc.env:HOME}\n")
    assert read_yaml(tmp_path / "config.yaml") == {"a": "${b}${b}", "b": "${oc.env:HOME}"}


def test_an_object_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        json_object(tmp_path / "config.json")


# ---- the task of a run

@pytest.mark.parametrize("task", ["_target_: os.system\n  command: touch {}", "_target_: trap.call",
                                  "_target_: crt_exp.tasks.mlm.os.system\n  command: touch {}", "_target_: [1]",
                                  "_target_: crt_exp.tasks.sequences.Recall\n  vocabulary: {{_target_: trap.call}}",
                                  "5"])
def test_a_hostile_task_runs_nothing(task, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    (tmp_path / "config.yaml").write_text("task:\n  " + task.format(sprung) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_task(tmp_path)
    assert not sprung.exists()
    hostile.check_one_line(caught.value)


def test_the_task_of_a_run_is_made_as_it_was_configured(tmp_path):
    from crt_exp.runner.command_line import compose

    cfg = compose(["task=recall"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg.task, resolve=True).join(["task:\n", ""]).replace(
        "\n", "\n  ").rstrip() + "\n")
    assert type(load_task(tmp_path)).__name__ == "Recall"
