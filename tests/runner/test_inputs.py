"""inputs.json: a run that goes on must read what it began with, whatever its task."""

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from small_bert import write_model
from small_speech import write_librispeech

from crt_exp.config import CONF, ConfigError, imported
from crt_exp.data.speech import AudioPart, Utterance
from crt_exp.runner import inputs
from crt_exp.runner.inputs import DATA, NAME, OPTIONS, check_inputs, states
from crt_exp.advice.task import Advise
from crt_exp.tasks.uci import UCI
from crt_exp.tasks.imagenet import ImageNet
from crt_exp.tasks.librispeech import LibriSpeech, SpokenSplit
from crt_exp.tasks.pixels import Pixels

# options of text that name no file
NO_FILES = set(re.findall(r"\S+", """
attentions cache_dir hub.name hub.config hub.splits hub.column rows preset positions counted source
hub.split hub.validation hub.image hub.label unreadable interpolation augment.color augment.policy
augment.mix_mode subsets.train subsets.validation subsets.test held_out_speaker hub.train hub.test
hub.audio hub.text bad symbols environment looks scale softmax scaling what direction longer
held_out held_out_families held_out_files target kind coding regime fit resize kernel pool examples length lengths
samples layers turn evaluated tied workers size sizes.patch sizes.width sizes.depth sizes.heads
hub.classes ema rate beam max_length channels parts entry file method methods what baseline dtype split subset texts
speakers subset splits noise
"""))
BY_THE_TASK = {"data_dir", "dataset", "corpus"}  # of `task.inputs()`


def leaves(node, name=""):
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, node


def options():
    for file in sorted((CONF / "task").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(file))
        node = node.get("task", node)
        target = node.get("_target_")
        yield file.stem, target, {name: value for name, value in leaves(node) if not name.startswith("_")}


@pytest.mark.parametrize("target, given", [each[1:] for each in options()], ids=[each[0] for each in options()])
def test_every_option_that_may_name_a_file_is_known(target, given):
    """A new option of text joins OPTIONS, or the list above."""
    texts = {key for key, value in given.items() if value is None or isinstance(value, str)
             or (isinstance(value, list) and any(isinstance(each, str) for each in value))}
    assert not texts - set(OPTIONS) - NO_FILES - BY_THE_TASK
    if texts & {"data_dir", "corpus"}:
        kind = imported(target)
        assert any("inputs" in vars(base) for base in kind.__mro__ if base.__name__ != "Task"), kind


# ---- files and folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    """A folder with two files and another in a folder within, and a run directory beside it."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (tmp_path / "data" / name).write_bytes(name.encode() * 5000)
    (tmp_path / "run").mkdir()
    return tmp_path


def write_later(path, content):
    """With another modification time, also where the clock of the file system has not moved on."""
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def begun(place, **given):
    task = SimpleNamespace(inputs=lambda: [given[DATA]]) if DATA in given else SimpleNamespace()
    file = place / "run" / NAME
    file.write_text(check_inputs(place / "run", given, task, goes_on=file.exists()))


CHANGES = {"other": (lambda data: write_later(data / "b.txt", b"B.txt" * 5000), "b.txt (of {}) has changed"),
           "gone": (lambda data: (data / "a.txt").unlink(), "a.txt (of {}) is gone"),
           "new": (lambda data: (data / "sub" / "d.txt").write_text("d"), "sub/d.txt (of {}) is new")}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("option", ["text", "model", DATA])
def test_what_has_changed_is_named(option, change, message, place):
    given = {option: place / "data" if option == DATA else str(place / "data")}
    begun(place, **given)
    begun(place, **given)
    change(place / "data")
    named = message.format("the data" if option == DATA else f"task.{option}")
    with pytest.raises(ConfigError) as refused:
        begun(place, **given)
    assert f"run was run with other inputs: {named}" in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_lists_patterns_and_dictionaries_name_files(place):
    data = place / "data"
    begun(place, text=[str(data / "a.txt"), str(data / "sub" / "c.txt")],
          hub={"data_files": {"train": f"{data}/*.txt", "validation": [f"{data}/sub/c.txt"]}}, model="bert-base")
    written = json.loads((place / "run" / NAME).read_text())
    assert {option: sorted(files) for option, files in written.items()} == {
        "text": ["a.txt", "sub/c.txt"], "hub.data_files": ["a.txt", "b.txt", "sub/c.txt"]}


def test_of_a_run_its_model_alone_and_of_a_folder_no_run_within_it(place):
    """What a run goes on to write is none of its inputs."""
    (place / "first" / "model").mkdir(parents=True)
    for name in ("config.yaml", "run.log", "model/weights"):
        (place / "first" / name).write_text(name)
    begun(place, init=str(place / "first"), text=str(place))
    written = json.loads((place / "run" / NAME).read_text())
    assert list(written["init"]) == ["weights"] and not any(name.startswith("run/") for name in written["text"])


def test_links_in_circles_and_many_files(place, monkeypatch):
    (place / "data" / "sub" / "up").symlink_to(place / "data")
    assert len(states({"text": [place / "data"]}, place / "run")["text"]) == 3
    monkeypatch.setattr(inputs, "LISTED", 2)
    assert sorted(states({"text": [place / "data"]}, place / "run")["text"]) == [".", "sub"]


def test_names_that_are_no_files_are_not_listed(place):
    begun(place, model=None, init="scratch")
    assert (place / "run" / NAME).read_text() == "{}\n"


# ---- tasks -----------------------------------------------------------------------------------------------------------


def table(folder):
    x = np.random.default_rng(0).normal(size=60)
    (folder / "t.csv").write_text("x,y\n" + "".join(f"{each:.3f},{each > 0}\n" for each in x))
    return ["task=uci", f"task.csv={folder / 't.csv'}", "task.target=y", "features=trig", "task.sigmas=[0.5]"], "t.csv"


def text(folder):
    (folder / "t.txt").write_text("the cat sat on the mat and the dog ate the hat\n" * 200)
    return ["task=mlm", f"task.text={folder / 't.txt'}", "attention=exact", "task.vocabulary_size=60", "task.block=16",
            "task.cache_dir=null", "trainer.steps=2", "trainer.batch=2"], "t.txt"


def model(folder):
    write_model(folder / "bert")
    (folder / "t.txt").write_text("the cat sat on the mat\n" * 400)
    return ["task=advise", f"task.model={folder / 'bert'}", f"task.text={folder / 't.txt'}", "task.length=32",
            "task.samples=2", "task.calibration=1", "task.rounds=1", "task.attentions=[exact,uniform,window]",
            "task.cache_dir=null"], "bert/config.json"


@pytest.mark.parametrize("task", [table, text, model])
def test_a_run_goes_on_with_the_inputs_that_it_began_with_alone(task, typed, tmp_path):
    args, file = task(tmp_path)
    args = [*args, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"]
    code, _, err = typed(*args)
    assert code == 0, err
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    content, time = (tmp_path / file).read_bytes(), (tmp_path / file).stat().st_mtime_ns
    (tmp_path / file).write_bytes(content[:-1] + b" \n")
    code, _, err = typed(*args, "resume=auto")
    assert code == 2 and err.count("\n") == 1, err
    assert "was run with other inputs" in err and f"{(tmp_path / file).name} (of " in err and "has changed" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / file).write_bytes(content)
    os.utime(tmp_path / file, ns=(time, time))
    assert typed(*args, "resume=auto")[0] == 0


def test_audio_that_a_table_names_is_read_too(tmp_path):
    write_librispeech(tmp_path, texts=("A", "B"))
    files = sorted(tmp_path.rglob("*.flac"))
    (tmp_path / "t.csv").write_text("audio,text\n" + "".join(f"{file},x\n" for file in files))
    advise = Advise.__new__(Advise)
    advise.audio = str(tmp_path / "t.csv")
    assert advise.inputs() == files
    task = LibriSpeech.__new__(LibriSpeech)
    spoken = [Utterance("a", "A", (AudioPart(str(file), 1.0),)) for file in files]
    task.splits = {"train": SpokenSplit(spoken, [], np.zeros(2))}
    assert list(task.inputs()) == files


def test_official_files_are_read_too(tmp_path, monkeypatch):
    (tmp_path / "uci").mkdir()
    lines = [f"{i % 3 + 1}," + ",".join(f"{(i * j) % 17}.5" for j in range(1, 14)) for i in range(178)]
    (tmp_path / "uci" / "wine.data").write_text("\n".join(lines))
    given = ("wine", "ordinal", "standard", (0.6, 0.2, 0.2), 2, [0.5])
    assert UCI(*given, data_dir=str(tmp_path / "uci")).inputs() == [tmp_path / "uci" / "wine.data"]
    assert UCI(*given).inputs() == [None]
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for kind in (ImageNet, Pixels):
        task = kind.__new__(kind)
        task.dataset, task.data_dir, task.hub = "birds", None, {"name": None}
        assert task.inputs() == [tmp_path / "images" / "birds"]
        task.dataset = "digits"
        assert task.inputs() == []
