"""task.corpus=table: audio and transcripts that a csv or jsonl file names."""

import json
import os

import numpy as np
import pytest
import soundfile
from refusals import check_refused

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
    ("t.jsonl", '{"audio": 3, "text": "x"}\n', "line 1: it has no audio"),
    ("t.csv", "audio,text\n0.wav,well, no\n", "line 2: 3 cells, 2 expected; a cell that holds ','"),
    ("t.csv", 'audio,text\n0.wav,"well\n1.wav,no"\n', "line 2: a quoted cell spans 2 lines that read as rows"),
    ("t.csv", "audio,text\n0.wav,\"a\tb\"\n", "line 2: the cell of text holds a line end or a tab"),
    ("t.tsv", "audio\ttext\n0.wav\ta\tb\n", "line 2: 3 cells, 2 expected; a cell holds no tab"),
    ("t.csv", "audio,text,text\n0.wav,a,b\n", "'text' stands there twice"),
    ("t.jsonl", '{"audio": "0.wav", "text": "a", "text": "b"}\n', "line 1: 'text' stands there twice"),
    ("t.jsonl", "[" * 100_000, "line 1: it is"),
    ("t.csv", "audio,text\n,x\n", "line 2: audio = '' is no name"),
    ("t.csv", "audio,text\n0.wav," + "x" * 140_000, "line 2: a cell of more than 131072 characters")])
def test_tables_that_are_none_name_the_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        entries(tmp_path / name)

COMMON_VOICE = [('"Come, he said, it is late', "0.wav"), ("Yes.", "1.wav"), ('No," she said', "2.wav"),
                ('"Never', "3.wav"), ("a\u2028b\x85c\x0bd\x0ce", "4.wav"), ("Well", "5.wav")]


@pytest.mark.parametrize("name", ["t.tsv", "t.jsonl", "t.csv"])
def test_quotation_marks_commas_and_line_ends_of_unicode_cut_no_transcript(name, folder):
    objects = [json.dumps({"text": text, "audio": audio}, ensure_ascii=False) for text, audio in COMMON_VOICE]
    cells = ['"{}",{}'.format(text.replace('"', '""'), audio) for text, audio in COMMON_VOICE]
    lines = {"t.tsv": ["text\taudio", *("\t".join(line) for line in COMMON_VOICE)], "t.jsonl": objects,
             "t.csv": ["text,audio", *cells]}
    (folder / name).write_text("\n".join(lines[name]), encoding="utf-8")
    found = [(entry.text, entry.audio.name) for entry in entries(folder / name)]
    assert found == [(" ".join(text.split()), audio) for text, audio in COMMON_VOICE]


def paths_of(folder):
    """Seven paths of one file."""
    (folder / "sub").mkdir()
    (folder / "link.wav").symlink_to("0.wav")
    (folder / "hard.wav").hardlink_to(folder / "0.wav")
    (folder / "again").symlink_to(folder)
    return ["0.wav", "./0.wav", "sub/../0.wav", "again/0.wav", "link.wav", "hard.wav", str(folder / "0.wav")]


def test_one_file_is_of_one_split_by_whatever_path(folder):
    paths = paths_of(folder)
    (folder / "t.csv").write_text("\n".join(["audio,text", *(f"{path},x" for path in paths)]))
    assert len({entry.split for entry in entries(folder / "t.csv")}) == 1
    for path in paths[1:]:
        (folder / "t.csv").write_text(f"audio,text,split\n0.wav,x,train\n{path},x,train\n{path},x,test\n")
        with pytest.raises(DataError, match="line 4: .* of split test, and the same audio is of split train in line 2"):
            entries(folder / "t.csv")


def test_a_pipe_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(DataError, match="t.csv cannot be read: a pipe, socket or device, not a file"):
        entries(tmp_path / "t.csv")


@pytest.mark.parametrize("without", ["train", "validation", "test"])
def test_a_split_without_utterances_ends_the_run_before_it_trains(without, folder, typed):
    lines = [f"{i}.wav,a,{split}" for i, split in enumerate(2 * ["train", "validation", "test"]) if split != without]
    (folder / "t.csv").write_text("\n".join(["audio,text,split", *lines]))
    found = typed("task=librispeech", "task.corpus=table", f"task.data_dir={folder / 't.csv'}", "attention=exact",
                  "logger=none", f"hydra.run.dir={folder / 'run'}")
    check_refused(found, [f"{without} utterances: there are none", "the column split"], folder / "run")
