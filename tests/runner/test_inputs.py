"""inputs.json: a run that goes on must read what it began with, whatever its task."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from small_bert import write_model
from small_speech import write_librispeech

from crt_exp.measure.advise import Advise
from crt_exp.data.speech import AudioPart, Utterance
from crt_exp.runner.run import input_states
from crt_exp.tasks.imagenet import ImageNet
from crt_exp.tasks.librispeech import LibriSpeech, SpokenSplit
from crt_exp.tasks.lra import Pixels
from crt_exp.tasks.uci import UCI


@pytest.fixture
def data(tmp_path):
    """A folder with two files and another in a folder within."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (tmp_path / "data" / name).write_bytes(name.encode() * 5000)
    return tmp_path / "data"


def rewrite(path):
    """Of the same size, with another modification time, also where the file system's clock has not moved on."""
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


CHANGES = {"other": lambda data: rewrite(data / "b.txt"), "gone": lambda data: (data / "a.txt").unlink(),
           "new": lambda data: (data / "sub" / "d.txt").write_text("d"),
           "renamed": lambda data: (data / "a.txt").rename(data / "z.txt")}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change, data):
    options, task = {"text": [str(data)], "hub": {"data_files": str(data)}}, SimpleNamespace(inputs=lambda: [data])
    before = input_states(options, task)
    assert before == input_states(options, task) and [*before] == ["task.text", "task.hub.data_files", "data"]
    change(data)
    after = input_states(options, task)
    assert all(before[key] != after[key] for key in before)


def test_of_a_run_its_model_alone_and_no_names_that_are_no_files(data):
    (data / "model").mkdir()
    for name in ("config.yaml", "curves.png", "model/weights"):
        (data / name).write_text(name)
    options = {"init": str(data), "cache_dir": str(data), "model": "bert-base", "rows": 3}
    before = input_states(options, None)
    (data / "curves.png").write_text("more")
    assert [*before] == ["task.init"] and before == input_states(options, None)


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
    assert "files changed since" in err and "inputs.json if only their times differ" in err
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
