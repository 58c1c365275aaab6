"""Speech data: layouts on disk and on the hub, splits, audio, symbols, and refusals."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers.small_speech import TEXTS, tone, write_digits, write_librispeech

from crt_exp.experiments.data import DataError, speech, warn
from crt_exp.experiments.data.speech import (
    AudioPart,
    Utterance,
    audio_part,
    decode_audio,
)
from crt_exp.experiments.data.vocabularies import Symbols


@pytest.fixture(autouse=True)
def forgetful():
    """A warning appears once in each test."""
    warn.cache_clear()


def read(root):
    return list(speech.read_librispeech(["train-clean-100"], str(root)))


# ---- LibriSpeech -------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises(
        DataError, match="CRT_DATA, which is not set.*fetch speech/LibriSpeech/dev-clean"
    ):
        list(speech.read_librispeech(["dev-clean"], None))
    (tmp_path / "own").mkdir()
    with pytest.raises(DataError, match="own: expected an audio file, or a folder of audio files"):
        list(speech.read_librispeech(["own"], str(tmp_path)))


def test_files_of_every_ending_but_hidden_ones(tmp_path):
    """Names may come again in another chapter: a transcript is that of the audio beside it."""
    chapter = write_librispeech(tmp_path)
    for name in ("FLAC", "ogg", "mp3"):
        other = chapter.parent / name
        other.mkdir()
        soundfile.write(other / f"x.{name}", tone(400, 1.0), 8000, format=name.upper())
        (other / "x.trans.txt").write_text(f"x {name}\n")
    (chapter / ".cache").mkdir()
    (chapter / ".cache/y.trans.txt").write_text("y NO\n")
    found = read(tmp_path)
    actual = [utterance.text for utterance in found]
    assert actual == [*TEXTS, "FLAC", "mp3", "ogg"]
    assert found[0].name == "7-9-0000"
    actual = found[0].seconds
    expected = 0.1 * len(TEXTS[0])
    assert actual == pytest.approx(expected)
    assert Path(found[0].parts[0].name).is_file()
    actual = len(speech.audio_files(tmp_path, "input"))
    expected = len(TEXTS) + 3
    assert actual == expected


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transcript, audio, words",
    [
        ("7-9-0001 \n", None, "7-9-0001.flac: no transcript"),
        ("", None, "7-9-0001.flac: no transcript"),
        ("7-9-0001 A CAB\n", "", "7-9-0001: a transcript without audio beside it"),
        ("7-9-0001 A CAB\n", "no audio at all", "7-9-0001.flac: not readable"),
        ("7-9-0001 A CAB\n", 0.05, "7-9-0001.flac: 0.050 s, expected at least 0.1 s"),
    ],
)
def test_bad_input_is_named(transcript, audio, words, tmp_path):
    folder = write_librispeech(tmp_path)
    lines = folder / "7-9.trans.txt"
    file = folder / "7-9-0001.flac"
    lines.write_text(lines.read_text().replace("7-9-0001 A CAB\n", transcript))
    if isinstance(audio, float):
        soundfile.write(file, tone(400, audio, 16000), 16000)
    elif audio:
        file.write_text(audio)
    elif audio == "":
        file.unlink()
    with pytest.raises(DataError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_truncated_audio_is_never_taken_for_shorter_audio(suffix, tmp_path):
    """The header of a WAV tells; reading a FLAC does."""
    path = tmp_path / f"a{suffix}"
    soundfile.write(path, tone(400, 1.0), 8000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])
    with pytest.raises(DataError, match="truncated|not readable"):
        speech.audio_of(Utterance("a", "A", (audio_part(str(path)),)), 8000)


@pytest.mark.parametrize(
    "scale, peak",
    [
        (2**15 - 1, "32767"),
        (np.nan, "nan"),
        (1.5, None),
    ],
)
def test_samples_that_are_no_audio_are_refused_with_their_peak(scale, peak, tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(
        path, scale * tone(400, 0.5) / np.abs(tone(400, 0.5)).max(), 8000, subtype="FLOAT"
    )
    if peak:
        with pytest.raises(DataError, match=f"a.wav: samples up to {peak}[^,]*; expected -1 to 1"):
            decode_audio(AudioPart(str(path), 0.5), 8000)
    else:
        actual = len(decode_audio(AudioPart(str(path), 0.5), 8000))
        assert actual == 4000


# ---- digits ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return speech.read_recordings(str(write_digits(tmp_path_factory.mktemp("digits"))))


def test_strings_of_digits(digits):
    found = {}
    for split in ("train", "validation", "test"):
        found[split] = speech.digit_strings(digits, split, 60)
    for split, utterances in found.items():
        assert len(utterances) == 60
        actual = {len(utterance.parts) for utterance in utterances}
        expected = set(range(3, 9))
        assert actual == expected
        for utterance in utterances:
            names = [Path(part.name).stem.split("_") for part in utterance.parts]
            assert len({speaker for _, speaker, _ in names}) == 1
            assert len(utterance.gaps) == len(utterance.parts) - 1
            expected = " ".join(speech.WORDS[int(digit)] for digit, _, _ in names)
            assert utterance.text == expected
            for _, _, index in names:
                assert int(index) in speech.SPLITS[split]
    assert found["train"][:10] == speech.digit_strings(digits, "train", 10)  # always the same


def test_the_audio_of_a_string_is_that_of_its_parts(digits):
    utterance = speech.digit_strings(digits, "test", 3)[2]
    audio = speech.audio_of(utterance, 8000)
    start = 0
    for part, gap in zip(utterance.parts, (*utterance.gaps, 0.0)):
        own = soundfile.read(part.name, dtype="float32")[0]
        actual = audio[start : start + len(own)]
        assert np.array_equal(actual, own)
        start += len(own) + round(8000 * gap)
        assert (audio[start - round(8000 * gap) : start] == 0).all()
    assert len(audio) == start
    assert start / 8000 == pytest.approx(utterance.seconds, abs=0.001)


# ---- audio -------------------------------------------------------------------------------------------------


SAMPLES = np.arange(16000) % 100


def write_wav(path, riff, data, chunks=b""):
    """riff, data: the two sizes in the header."""
    header = (
        b"RIFF"
        + struct.pack("<I", riff)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)
    )
    path.write_bytes(
        header + chunks + b"data" + struct.pack("<I", data) + SAMPLES.astype("<i2").tobytes()
    )
    return path


@pytest.mark.parametrize(
    "riff, data, chunks",
    [
        (2**32 - 1, 2**32 - 1, b""),
        (2**31 + 36, 2**31, b""),
        (0, 2**32 - 1, b""),
        (2**31 - 4060, 2**31 - 4096, b""),
        (2**32 - 1, 32000, b""),
        (2**32 - 1, 2**32 - 37, b"LIST" + struct.pack("<I", 4) + b"abcd"),
    ],
)
def test_a_piped_wav_is_as_long_as_its_file(riff, data, chunks, tmp_path):
    """A program that writes into a pipe (ffmpeg, sox, arecord) cannot go back to the two sizes in the header."""
    path = write_wav(tmp_path / "a.wav", riff, data, chunks)
    assert audio_part(str(path)).seconds == 2
    actual = speech.as_int16(decode_audio(AudioPart(str(path), 2.0), 8000))
    assert np.array_equal(actual, SAMPLES)


def test_a_wav_whose_header_states_a_size_beyond_the_file_is_truncated(tmp_path):
    with pytest.raises(DataError, match="a.wav: truncated: 32000 of 64000"):
        audio_part(str(write_wav(tmp_path / "a.wav", 64036, 64000)))


def test_random_intervals_reach_both_ends_and_their_share():
    actual = np.concatenate(
        [speech.random_intervals(np.random.default_rng(i), 2, 0.25, 40) for i in range(200)]
    )
    widths = actual[:, 1] - actual[:, 0]
    assert actual.min() == 0
    assert actual.max() == 40
    assert widths.min() == 0
    assert widths.max() == 10


@pytest.mark.parametrize("own", [44_101, 17_600])
def test_another_rate_is_resampled(own, tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(440, 1.0, own), own)
    audio = decode_audio(AudioPart(str(tmp_path / "a.wav"), 1.0), 16000)
    assert audio.dtype == np.float32
    assert len(audio) == 16000
    actual = np.abs(np.fft.rfft(audio)).argmax()
    assert actual == 440


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(300, 0.5, seed=1), tone(900, 0.5, seed=2)], 1)
    soundfile.write(tmp_path / "a.wav", both, 8000, subtype="FLOAT")
    actual = speech.decode_audio(AudioPart(str(tmp_path / "a.wav"), 0.5), 8000)
    expected = both.mean(1)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_changes_length_and_pitch(speed, tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(500, 2.0), 8000)
    audio = speech.audio_of(
        Utterance("a", "A", (AudioPart(str(tmp_path / "a.wav"), 2.0),)), 8000, speed
    )
    assert len(audio) == pytest.approx(16000 / speed, abs=1)
    actual = np.abs(np.fft.rfft(audio)).argmax() / len(audio) * 8000
    assert actual == pytest.approx(500 * speed, rel=0.01)


def test_audio_in_16_bits_is_kept_bit_for_bit(tmp_path):
    samples = np.random.default_rng(0).integers(-(2**15), 2**15, 4000).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", samples, 8000)
    actual = speech.as_int16(speech.decode_audio(AudioPart(str(tmp_path / "a.flac"), 0.5), 8000))
    assert np.array_equal(
        actual,
        samples,
    )


# ---- symbols -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["characters", "words", "pieces"])
def test_decoding_symbols_inverts_encoding(kind):
    texts = [*TEXTS, "A CAGE FED", "A FED BEE"] * 3
    symbols = Symbols.from_texts(kind, texts, 20)
    for text in texts:
        assert symbols.decode(symbols.encode(text)) == text
    actual = max(max(symbols.encode(text)) for text in texts)
    assert actual < len(symbols)
    with pytest.raises(DataError, match="cannot build 3 pieces.* task.pieces"):
        Symbols.from_texts("pieces", TEXTS, 3)
    symbol = "'AÖ'" if kind == "words" else "'Ö'"
    with pytest.raises(DataError, match=symbol):
        symbols.encode("A AÖ")


# ---- hub ---------------------------------------------------------------------------------------------------


def test_a_set_of_the_hub(tmp_path):
    """Audio as bytes in parquet."""
    from datasets import Audio, Dataset

    folder = write_librispeech(tmp_path)
    local = read(tmp_path)
    rows = {
        "audio": [
            {"bytes": file.read_bytes(), "path": file.name}
            for file in sorted(folder.glob("*.flac"))
        ],
        "text": TEXTS,
    }
    Dataset.from_dict(rows).cast_column("audio", Audio(decode=False)).to_parquet(
        tmp_path / "a.parquet"
    )
    hub = {
        "name": "parquet",
        "config": None,
        "data_files": str(tmp_path / "a.parquet"),
        "train": "train",
        "audio": "audio",
        "text": "text",
    }
    found = list(speech.hub_utterances(hub, "train"))
    for utterance, own in zip(found, local, strict=True):
        assert utterance.name == own.name
        assert utterance.text == own.text
        assert utterance.seconds == own.seconds
        actual = speech.audio_of(utterance, 16000)
        expected = speech.audio_of(own, 16000)
        assert np.array_equal(actual, expected)
    with pytest.raises(
        DataError, match="task.hub.text=sentence: expected a column of parquet: audio, text"
    ):
        list(speech.hub_utterances(hub | {"text": "sentence"}, "train"))


def hub_rows(tmp_path, rows):
    """Utterances of rows of the hub."""
    import pandas as pd

    file = tmp_path / "rows.parquet"
    pd.DataFrame(rows).to_parquet(file, index=False)
    names = {"name": "parquet", "config": None, "audio": "audio", "text": "text"}
    return list(speech.hub_utterances(names | {"train": "train", "data_files": str(file)}, "train"))


@pytest.mark.parametrize(
    "audio, text, words",
    [
        ({}, None, "a.wav: no transcript"),
        ({"bytes": None, "path": None}, "A", "row-1: not readable"),
        ({"bytes": None, "path": "gone.wav"}, "A", "gone.wav: not readable"),
        ({"bytes": b"", "path": "empty.wav"}, "A", "empty.wav: not readable"),
    ],
)
def test_rows_of_the_hub_without_text_or_audio_are_named(audio, text, words, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    soundfile.write(tmp_path / "a.wav", np.zeros(8000), 8000)
    good = {"bytes": (tmp_path / "a.wav").read_bytes(), "path": "a.wav"}
    with pytest.raises(DataError, match=words):
        hub_rows(tmp_path, [{"audio": good, "text": "A"}, {"audio": good | audio, "text": text}])


# ---- tables ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        soundfile.write(tmp_path / f"{i}.wav", np.zeros(8000, np.float32), 16000)
    return tmp_path


COMMON_VOICE = [
    ('"Come, he said, it is late', "0.wav"),
    ("Yes.", "1.wav"),
    ('No," she  said', "2.wav"),
    ('"Never', "3.wav"),
    ("a\u2028b\x85c", "4.wav"),
    ("007", "5.wav"),
]


@pytest.mark.parametrize("name", ["t.tsv", "t.jsonl", "t.csv"])
def test_tables_of_every_kind_give_the_same(name, folder):
    """Quotation marks, commas and line ends of Unicode cut no transcript."""
    objects = []
    for text, audio in COMMON_VOICE:
        objects.append(json.dumps({"text": text, "audio": audio, "split": "test"}))
    cells = []
    for text, audio in COMMON_VOICE:
        cells.append('"{}",{},test'.format(text.replace('"', '""'), audio))
    lines = {
        "t.tsv": ["text\taudio\tsplit", *("\t".join([*line, "test"]) for line in COMMON_VOICE)],
        "t.jsonl": objects,
        "t.csv": ["text,audio,split", *cells],
    }
    (folder / name).write_text("\n".join(lines[name]), encoding="utf-8")
    found = list(speech.table_utterances(folder / name, "test"))
    actual = [utterance.text for utterance in found]
    expected = [" ".join(text.split()) for text, _ in COMMON_VOICE]
    assert actual == expected
    assert [utterance.name for utterance in found] == [*"012345"]
    assert found[0].seconds == 0.5
    actual = list(speech.table_utterances(folder / name, "train"))
    assert actual == []


def test_splits_by_hash_do_not_depend_on_the_others(folder):
    names = [f"{i}.wav" for i in range(1000)]
    (folder / "t.csv").write_text("\n".join(["audio,text", *(f"./{name},x" for name in names)]))
    actual = speech.read_table(folder / "t.csv").split.tolist()
    assert actual == [speech.by_hash(name) for name in names]
    counts = [actual.count(split) for split in ("train", "validation", "test")]
    assert 750 < counts[0] < 850
    assert min(counts) > 70


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("t.txt", "0.wav x\n1.wav y\n", "expected a .csv, .tsv, .jsonl or .parquet"),
        (
            "t.csv",
            "audio,text,split\n0.wav,x,train\n1.wav,y,\n",
            "split='': expected test, validation, train",
        ),
        ("t.jsonl", "{\n", "line 1: expected a JSON object"),
        ("t.jsonl", '{"audio": ["3"], "text": "x"}\n', "row 1, column audio: expected a string"),
        ("t.jsonl", '{"audio": "3"}\n', "no column text"),
        ("t.csv", "audio,text\n0.wav,well, no\n", "row 1 has more cells than the header"),
        ("t.csv", 'audio,text\n0.wav,"well\n1.wav,no"\n', "row 1: expected one line"),
    ],
)
def test_malformed_tables_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        speech.read_table(tmp_path / name)


def test_a_recording_is_in_one_split(folder):
    (folder / "link.wav").symlink_to("0.wav")
    cases = [
        "0.wav",
        "./0.wav",
        f"../{folder.name}/0.wav",
        folder / "0.wav",
        "link.wav",
    ]
    for name in cases:
        rows = ["audio,text,split", "0.wav,x,train", "1.wav,x,test", f"{name},x,{{}}"]
        table = "\n".join(rows)
        (folder / "t.csv").write_text(table.format("train"))
        assert len(speech.read_table(folder / "t.csv")) == 3
        for split in ("test", "validation"):
            (folder / "t.csv").write_text(table.format(split))
            with pytest.raises(
                DataError, match=f"t.csv: the recording .* is in {split} and in train"
            ):
                speech.read_table(folder / "t.csv")
    (folder / "t.csv").write_text("audio,text,split\ngone.wav,x,train\n./gone.wav,x,test\n")
    with pytest.raises(DataError, match="gone.wav is in test"):
        speech.read_table(folder / "t.csv")
