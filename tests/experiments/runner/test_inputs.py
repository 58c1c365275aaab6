"""inputs.json: a run that goes on must read what it began with."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import check_error
from helpers.small_speech import write_librispeech

from crt_exp.experiments.data.speech import AudioPart, Utterance
from crt_exp.experiments.measure.advise import Advise
from crt_exp.experiments.runner.run import input_states, leaves
from crt_exp.experiments.tasks.imagenet import ImageNet
from crt_exp.experiments.tasks.librispeech import LibriSpeech, SpokenSplit
from crt_exp.experiments.tasks.lra import Pixels
from crt_exp.experiments.tasks.uci import UCI

SHORT = ["logger=none", "task.repeats=1", "task.sigmas=[0.3]"]


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
    ns = (0, path.stat().st_mtime_ns + 10**9)
    os.utime(path, ns=ns)


CHANGES = {
    "other": lambda data: rewrite(data / "b.txt"),
    "gone": lambda data: (data / "a.txt").unlink(),
    "renamed": lambda data: (data / "a.txt").rename(data / "z.txt"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_inputs_is_seen(change, data):
    options = {"text": [str(data)], "hub": {"data_files": {"train": str(data)}}}
    options["_target_"] = "crt_exp.experiments.tasks.mlm.MLM"
    before = input_states(options, [data])
    assert before == input_states(options, [data])
    assert [*before] == [
        "task.text",
        "task.hub.data_files",
        "data",
    ]
    change(data)
    after = input_states(options, [data])
    assert all(before[key] != after[key] for key in before)


def test_inputs_of_a_run_are_its_model_and_no_names_of_absent_files(data):
    (data / "model").mkdir()
    for name in ("config.yaml", "curves.png", "model/weights"):
        (data / name).write_text(name)
    options = {
        "init": str(data),
        "cache_dir": str(data),
        "model": "bert-base",
        "block": 3,
    }
    options["_target_"] = "crt_exp.experiments.tasks.mlm.MLM"
    before = input_states(options, ())
    (data / "curves.png").write_text("more")
    assert [*before] == ["task.init"]
    assert before == input_states(options, ())


NAMESAKES = [
    ("uci.UCI", {"dataset": "digits", "csv": None, "target": "class"}),
    ("imagenet.ImageNet", {"dataset": "digits", "init": "scratch", "model": "vit_tiny"}),
    ("imagenet.ImageNet", {"init": "pretrained", "source": "auto"}),
    ("mlm.MLM", {"init": "uptrain", "sizes": {"hidden_act": "gelu"}, "hub": {"name": "text"}}),
    ("glue.GLUE", {"dataset": "sst2", "init": "scratch"}),
    ("ptb.PTB", {"corpus": "ptb", "init": "scratch", "softmax": "full"}),
    ("books.Books", {"vocabulary": "byte_pairs", "rows": "packed", "init": "scratch"}),
    ("librispeech.LibriSpeech", {"corpus": "fsdd", "init": "scratch", "preset": "small"}),
    ("trembl.TrEMBL", {"dataset": "generated", "held_out_files": ["PF1"]}),
]


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("target, options", NAMESAKES)
def test_a_namesake_of_a_value_is_no_input(target, options, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, value in leaves(options):
        for name in value if isinstance(value, list) else [value]:
            if kind == "file":
                Path(str(name)).write_text("notes")
            else:
                Path(str(name)).mkdir()
                Path(str(name), "notes.txt").write_text("notes")
    assert input_states(options | {"_target_": f"crt_exp.experiments.tasks.{target}"}, ()) == {}


@pytest.mark.parametrize(
    "target, options",
    [
        ("tasks.uci.UCI", {"csv": "data"}),
        ("tasks.mlm.MLM", {"validation_text": ["data/a.txt"], "model": "data"}),
        ("tasks.mae.MAE", {"init": "data", "model": "data"}),
        ("tasks.ptb.PTB", {"corpus": "data/a.txt"}),
        ("tasks.transfer.Transfer", {"init": "data"}),
        ("tasks.trembl.TrEMBL", {"families": "data/b.txt"}),
        ("measure.fidelity.Fidelity", {"text": ["data"], "calibration": "data/a.txt"}),
        ("measure.fidelity.SwapLoss", {"start": "data"}),
        ("measure.advise.Advise", {"model": "data", "audio": "data", "tokenizer": "data/a.txt"}),
    ],
)
def test_files_that_options_name_are_inputs(target, options, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    actual = input_states(options | {"_target_": f"crt_exp.{target}"}, ())
    assert {*actual} == {f"task.{key}" for key in options}


def test_a_folder_named_like_a_data_set_blocks_no_resume(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wine").mkdir()
    args = [*SHORT, "task.dataset=wine", f"hydra.run.dir={tmp_path / 'run'}"]
    assert typed(*args)[0] == 0
    actual = json.loads((tmp_path / "run" / "inputs.json").read_text())
    assert actual == {}
    Path("wine", "notes.txt").write_text("notes")
    assert typed(*args, "resume=auto")[0] == 0


def test_a_run_goes_on_with_the_inputs_that_it_began_with_alone(typed, tmp_path):
    x = np.random.default_rng(0).normal(size=60)
    table = tmp_path / "t.csv"
    table.write_text("x,y\n" + "".join(f"{value:.3f},{value > 0}\n" for value in x))
    args = [
        *SHORT,
        f"task.csv={table}",
        "task.target=y",
        "features=trig",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    assert typed(*args)[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    content = table.read_bytes()
    changed = table.stat().st_mtime_ns
    table.write_bytes(content[:-1] + b" \n")
    check_error(
        typed(*args, "resume=auto"), "files changed since", "inputs.json if only their times differ"
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    table.write_bytes(content)
    os.utime(table, ns=(changed, changed))
    assert typed(*args, "resume=auto")[0] == 0


def test_audio_and_official_files_are_inputs_too(tmp_path, monkeypatch):
    write_librispeech(tmp_path, texts=("A", "B"))
    files = sorted(tmp_path.rglob("*.flac"))
    (tmp_path / "t.csv").write_text("audio,text\n" + "".join(f"{file},x\n" for file in files))
    advise = Advise.__new__(Advise)
    speech = LibriSpeech.__new__(LibriSpeech)
    advise.audio = str(tmp_path / "t.csv")
    spoken = []
    for file in files:
        spoken.append(Utterance("a", "A", (AudioPart(str(file), 1.0),)))
    speech.splits = {"train": SpokenSplit(spoken, [], np.zeros(2))}
    assert advise.inputs() == list(speech.inputs()) == files
    (tmp_path / "uci").mkdir()
    lines = []
    for i in range(178):
        lines.append(f"{i % 3 + 1}," + ",".join(f"{(i * j) % 17}.5" for j in range(1, 14)))
    (tmp_path / "uci" / "wine.data").write_text("\n".join(lines))
    options = ("wine", "standard", (0.6, 0.2, 0.2), 2, [0.5])
    data_dir = str(tmp_path / "uci")
    actual = UCI(*options, data_dir=data_dir).inputs()
    expected = [tmp_path / "uci" / "wine.data"]
    assert actual == expected
    assert UCI(*options).inputs() == [None]
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    cases = [ImageNet.__new__(ImageNet), Pixels.__new__(Pixels)]
    for task in cases:
        for task.dataset, files in ("birds", [tmp_path / "images" / "birds"]), ("digits", []):
            task.data_dir = None
            task.hub = {"name": None}
            assert task.inputs() == files
