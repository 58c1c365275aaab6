"""task.corpus=table: audio and transcripts that a csv or jsonl file names."""

import json

import numpy as np
import pytest
import soundfile

from crt_exp.data import DataError
from crt_exp.data.speech import Faults
from crt_exp.data.speech_table import by_hash, entries, utterances


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        soundfile.write(tmp_path / f"{i}.wav", np.zeros(8000, np.float32), 16000)
    return tmp_path


def test_csv_and_jsonl_say_the_same(folder):
    lines = [{"audio": f"{i}.wav", "text": f"say  {i}", "split": "test" if i > 3 else "train"} for i in range(6)]
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = [f"{line['split']},{line['audio']},{line['text']}" for line in lines]
    (folder / "t.csv").write_text("\n".join(["split,audio,text", *cells]))
    for name in ("t.jsonl", "t.csv"):
        faults = Faults("error", "utterances")
        found = list(utterances(folder / name, "test", faults))
        assert [each.text for each in found] == ["say 4", "say 5"] and found[0].seconds == 0.5 and not faults.noted


def test_splits_by_hash_do_not_depend_on_the_others(folder):
    names = [f"{i}.wav" for i in range(1000)]
    (folder / "t.csv").write_text("\n".join(["audio,text", *(f"{name},x" for name in names)]))
    found = {entry.audio.name: entry.split for entry in entries(folder / "t.csv")}
    assert found == {name: by_hash(name) for name in names}
    counts = [list(found.values()).count(split) for split in ("train", "validation", "test")]
    assert 750 < counts[0] < 850 and min(counts) > 70


def test_bad_audio_and_empty_transcripts_are_noted(folder):
    (folder / "bad.wav").write_bytes(b"no audio")
    (folder / "t.csv").write_text("audio,text,split\nbad.wav,x,train\nnone.wav,x,train\n0.wav,,train\n")
    faults = Faults("skip", "utterances")
    assert list(utterances(folder / "t.csv", "train", faults)) == []
    assert len(faults.noted) == 3 and "an empty transcript" in faults.noted[2]


@pytest.mark.parametrize("name, text, message", [
    ("t.txt", "audio,text\n", "takes a .csv, .tsv or .jsonl"),
    ("t.csv", "audio,said\n0.wav,x\n", "line 2: it has no text"),
    ("t.csv", "audio,text\n", "names no audio"), ("t.csv", "audio,text,split\n0.wav,x,dev\n", "line 2: split = dev"),
    ("t.csv", "audio,text,split\n0.wav,x,train\n1.wav,y,\n", "line 3: it has no split"),
    ("t.jsonl", "{\n", "line 1: it is not JSON"), ("t.jsonl", "[1]\n", "line 1: it is not a JSON object"),
    ("t.jsonl", '{"audio": 3, "text": "x"}\n', "line 1: it has no audio")])
def test_tables_that_are_none_name_the_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        entries(tmp_path / name)
