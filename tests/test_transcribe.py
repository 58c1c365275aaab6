"""python -m crt_exp.transcribe: text and times from audio of any rate and length."""

import json
import re
import sys

import hostile
import numpy as np
import pytest
import soundfile
import torch
from small_speech import tone, write_digits
from test_librispeech import spoken
from test_speech_data import cut

from crt_exp import transcribe
from crt_exp.data import cache
from crt_exp.mechanism import Mechanism
from crt_exp.models import recogniser
from crt_exp.models.conformer_transducer import greedy


@pytest.fixture(autouse=True)
def quiet(one_thread, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    cache.warn.cache_clear()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run's model that says something, and its task."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    task = spoken(write_digits(root / "digits"))
    model = task.build(Mechanism.of("favorpp", m=8)).eval()
    with torch.no_grad():
        model.joiner.out.bias[-1] += 1.5
        model.joiner.out.weight.mul_(6)
    task.export(model, model.state_dict(), root)
    return root, task, model


@pytest.fixture
def typed(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["crt_exp.transcribe", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            transcribe.main()
        return stop.value.code, *capsys.readouterr()
    return run


def lines(out):
    """(file, seconds, text, [(time, symbol)]) of each file."""
    pairs = zip(*[iter(out.splitlines())] * 2)
    heads = [(re.fullmatch(r"(.*) \(([\d.]+) s\): ?(.*)", head), times) for head, times in pairs]
    return [(head[1], float(head[2]), head[3], [(float(t), s) for t, s in re.findall(r"([\d.]+) (\S+)", times)])
            for head, times in heads]


def test_it_hears_what_the_run_hears(kept, typed, tmp_path):
    """Noise and weights are those of the run."""
    root, task, model = kept
    batch = next(iter(task.batches("test", task_plan())))
    audio = batch["audio"][0, :batch["samples"][0]].numpy()
    soundfile.write(tmp_path / "a.wav", audio, 8000)
    code, out, err = typed(f"run={root}", f"input={tmp_path / 'a.wav'}")
    assert code == 0 and err == "", err
    (file, seconds, said, times), = lines(out)
    _, (found,) = model(batch["audio"][:1, :len(audio)], batch["samples"][:1], search=greedy)
    assert said == task.vocabulary.decode(found.symbols) and said and file == str(tmp_path / "a.wav")
    assert [symbol for _, symbol in times] == said.split()
    assert [at for at, _ in times] == sorted(at for at, _ in times) and times[-1][0] <= seconds
    assert seconds == pytest.approx(len(audio) / 8000, abs=0.06)


def task_plan():
    from crt_exp.data.plan import Plan

    return Plan(batch=4)


def test_folders_other_rates_and_minutes(kept, typed, tmp_path, caplog):
    words = [tone(300 + 300 * (i % 9), 0.4, 16000, seed=i) * (i % 5 > 0) for i in range(160)]
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "long.flac", np.concatenate(words), 16000)
    soundfile.write(tmp_path / "in" / "short.WAV", tone(900, 0.5, 44100), 44100, format="WAV")
    (tmp_path / "notes.txt").write_text("no audio")
    code, out, err = typed(f"run={kept[0]}", f"input={tmp_path}", "segment=10")
    assert code == 0, err
    found = lines(out)
    assert [file for file, *_ in found] == [str(tmp_path / "in" / "short.WAV"), str(tmp_path / "long.flac")]
    assert [seconds for _, seconds, *_ in found] == [0.5, 64.0]
    times = [at for at, _ in found[1][3]]
    assert times == sorted(times) and times[0] < 10 and 54 < times[-1] <= 64
    assert "16000 Hz is resampled to 8000 Hz" in caplog.text and "44100 Hz is resampled to 8000 Hz" in caplog.text


def test_segments_are_cut_in_silence_and_cover_everything():
    audio = np.concatenate([tone(500, 2.5) if i % 2 == 0 else np.zeros(4000, np.float32) for i in range(12)])
    found = list(transcribe.segments((audio * 2**14).astype(np.int16), 8000, 5.0))
    assert found[0][0] == 0 and found[-1][1] == len(audio) and all(a[1] == b[0] for a, b in zip(found, found[1:]))
    assert all(0 < end - start <= 40000 for start, end in found)
    assert all((audio[end - 400:end + 400] == 0).all() for _, end in found[:-1])


@pytest.mark.parametrize("seconds", [5.0, 5.01, 5.09, 5.5])
def test_no_segment_is_too_short_to_be_heard(seconds):
    audio = (tone(500, seconds) * 2**14).astype(np.int16)
    assert all(end - start >= 800 for start, end in transcribe.segments(audio, 8000, 5.0))


def test_what_cannot_be_heard_is_named_and_counted(kept, typed, tmp_path):
    for name in ("a", "b", "c"):
        soundfile.write(tmp_path / f"{name}.wav", tone(600, 0.5), 8000)
    cut(tmp_path / "a.wav", 0.5)
    soundfile.write(tmp_path / "b.wav", tone(600, 0.02), 8000)
    code, out, err = typed(f"run={kept[0]}", f"input={tmp_path}")
    assert code == 2 and "2 of 3 files cannot be heard" in err and "a.wav: is cut off" in err
    assert "b.wav: 0.020 s are too short" in err
    assert [file for file, *_ in lines(out)] == [str(tmp_path / "c.wav")]


def another_task(root):
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text('{"model_type": "bert"}')
    return "is a run of another task"


def half(root):
    (root / "config.yaml").write_text("seed: 0\n")
    return "has not ended"


def another_vocabulary(root):
    """Symbols of another run beside the weights of this one."""
    config = root / "model" / "config.json"
    content = json.loads(config.read_text())
    content["symbols"]["entries"].append("ten")
    config.write_text(json.dumps(content))
    return "weights do not fit"


def nothing(root):
    return "it holds no run"


@pytest.mark.parametrize("make", [another_task, half, another_vocabulary, nothing], ids=lambda f: f.__name__)
def test_runs_that_cannot_be_used(make, kept, typed, tmp_path):
    if make is another_vocabulary:
        found, tensors = recogniser.load(kept[0], "run")
        recogniser.keep(found, tensors, tmp_path)
    words = make(tmp_path)
    soundfile.write(tmp_path / "a.wav", tone(600, 0.5), 8000)
    code, out, err = typed(f"run={tmp_path}", f"input={tmp_path / 'a.wav'}")
    assert code == 2 and out == "" and err.startswith("crt_exp.transcribe: error:"), err
    assert words in err and str(tmp_path) in err


@pytest.mark.parametrize("name", ["sampler", "imported", "phi", "m huge", "cells", "deep"])
def test_a_hostile_run_runs_nothing(name, kept, typed, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    refused(lambda config: dict(hostile.changes(tmp_path))[name](config["attention"]), kept, typed, tmp_path)
    assert not sprung.exists()


@pytest.mark.parametrize("key, value", [("sizes", {"dim": 10**9}), ("sizes", {"layers": 10**12}),
                                        ("sizes", {"mels": 10**9}), ("sizes", {"joiner": 10**9}),
                                        (None, {"rate": 10**12}), ("symbols", {"kind": 5}),
                                        (None, {"sizes": [1]}), (None, {"symbols": 5}), ("symbols", {"entries": [5]})])
def test_a_run_of_huge_sizes_is_one_line_and_takes_no_memory(key, value, kept, typed, tmp_path):
    refused(lambda config: (config if key is None else config[key]).update(value), kept, typed, tmp_path)


def refused(change, kept, typed, tmp_path):
    found, tensors = recogniser.load(kept[0], "run")
    recogniser.keep(found, tensors, tmp_path / "run")
    file = tmp_path / "run/model/config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    soundfile.write(tmp_path / "a.wav", tone(600, 0.5), 8000)
    code, out, err = typed(f"run={tmp_path / 'run'}", f"input={tmp_path / 'a.wav'}")
    assert code == 2 and out == "" and err.startswith("crt_exp.transcribe: error:")
    hostile.check_one_line(err)


@pytest.mark.parametrize("args, words", [
    (["run=a", "run=b"], "run=... comes twice"), (["input=a.wav"], "run=... is missing"),
    (["run=a"], "input=... is missing"), (["rum=a"], "did you mean run?"),
    (["run=/nowhere", "input=/nowhere.wav"], "input = /nowhere.wav: there is no such file or folder"),
    (["run=/nowhere", f"input={__file__}"], "run = /nowhere: there is no such directory"),
    (["run=/nowhere", f"input={__file__}", "segment=0"], "segment = 0: it takes a number of at least 1"),
], ids=str)
def test_bad_arguments(args, words, typed):
    code, out, err = typed(*args)
    assert code == 2 and out == "" and words in err and len(err.splitlines()) <= 2, err


def test_help(typed):
    code, out, _ = typed("--help")
    assert code == 0 and "python -m crt_exp.transcribe run=DIR input=FILE_OR_FOLDER" in out
