"""Speech as it lies on disk and on the hub: layouts, splits, audio, symbols, and all that can be wrong with them."""

import os
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import soundfile
from small_speech import TEXTS, tone, write_digits, write_librispeech

from crt_exp import infer
from crt_exp.data import DataError, cache, speech
from crt_exp.data.speech import (
    FINEST,
    BadAudio,
    Faults,
    AudioPart,
    Utterance,
    decoded,
    low_pass,
    row_utterance,
    official,
    resampled,
    seconds_of,
)
from crt_exp.data.speech_table import audio_files
from crt_exp.data.symbols import Symbols, UnknownSymbol

DATA = os.environ.get("CRT_DATA")
real_data = pytest.mark.skipif(not DATA, reason="CRT_DATA is not set")


@pytest.fixture(autouse=True)
def forgetful():
    """What is said once in a process is said once in a test."""
    cache.warn.cache_clear()


def faults(bad="error"):
    return Faults(bad, "train utterances")


def read(root, found=None):
    return list(speech.official(["train-clean-100"], str(root), found or faults()))


# ---- LibriSpeech -------------------------------------------------------------------------------------------


def test_the_official_layout(tmp_path):
    write_librispeech(tmp_path)
    write_librispeech(tmp_path, speaker=8, texts=["FEED"])
    found = read(tmp_path)
    assert [each.text for each in found] == [*TEXTS, "FEED"] and found[0].name == "7-9-0000"
    assert found[0].seconds == pytest.approx(0.1 * len(TEXTS[0])) and Path(found[0].parts[0].name).is_file()


@real_data
def test_the_real_files():
    found = speech.official(["train-clean-100", "dev-clean", "test-clean"], None, faults())
    every = list(Path(DATA, "speech/LibriSpeech").rglob("*.flac"))
    assert len(found) == len(every) and {each.parts[0].name for each in found} == set(map(str, every))
    symbols = Symbols("characters", tuple(" 'ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    assert all(symbols.decode(symbols.encode(each.text)) == each.text for each in found)
    audio = speech.audio_of(found[0], 16000)
    assert len(audio) == pytest.approx(16000 * found[0].seconds) and 0.01 < np.abs(audio).max() <= 1


def test_what_is_missing_is_told_with_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises(DataError, match=r"CRT_DATA is not set(.|\n)*fetch speech/LibriSpeech/dev-clean"):
        speech.official(["dev-clean"], None, faults())
    with pytest.raises(DataError, match=r"there is no subset 'dev-cleen'(.|\n)*dev-clean, dev-other"):
        speech.official(["dev-cleen"], str(tmp_path), faults())
    (tmp_path / "own").mkdir()
    with pytest.raises(DataError, match=r"own holds no <speaker>/<chapter>/"):
        speech.official(["own"], str(tmp_path), faults())
    with pytest.raises(DataError, match=r"(.|\n)*fetch speech/free-spoken-digit-dataset"):
        speech.recordings(None, faults())


# ---- bad input: named and counted, an error or, where that was chosen, left out ---------------------------


def empty_transcript(folder):
    path = folder / "7-9.trans.txt"
    path.write_text(path.read_text().replace("7-9-0001 A CAB\n", "7-9-0001 \n"))
    return ["7-9.trans.txt, line 2: 7-9-0001 has an empty transcript"]


def no_audio(folder):
    (folder / "7-9-0001.flac").unlink()
    return ["7-9.trans.txt, line 2: 7-9-0001 has no audio next to it"]


def no_transcript(folder):
    path = folder / "7-9.trans.txt"
    path.write_text(path.read_text().replace("7-9-0001 A CAB\n", ""))
    return ["7-9-0001.flac: no transcript"]


def unreadable(folder):
    (folder / "7-9-0001.flac").write_bytes(b"no audio at all")
    return ["7-9-0001.flac: cannot be read"]


def too_long(folder):
    soundfile.write(folder / "7-9-0001.flac", tone(400, 9.0, 16000), 16000)
    return ["7-9-0001.flac: 9.0 s, above task.max_seconds = 5"]


def too_short(folder):
    soundfile.write(folder / "7-9-0001.flac", tone(400, 0.05, 16000), 16000)
    return ["7-9-0001.flac: 0.050 s: speech takes at least 0.1 s"]


FAULTY = [empty_transcript, no_audio, no_transcript, unreadable, too_long, too_short]


@pytest.mark.parametrize("break_it", FAULTY, ids=lambda f: f.__name__)
def test_bad_input_is_an_error_that_names_and_counts_it(break_it, tmp_path):
    words, found = break_it(write_librispeech(tmp_path)), faults()
    left = speech.usable(read(tmp_path, found), 5.0, found)
    with pytest.raises(DataError) as error:
        found.settle(len(left))
    assert "train utterances: 1 cannot be used" in str(error.value) and "task.bad=skip" in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("break_it", FAULTY, ids=lambda f: f.__name__)
def test_bad_input_is_left_out_where_that_was_chosen_and_said(break_it, tmp_path, caplog):
    words, found = break_it(write_librispeech(tmp_path)), faults("skip")
    left = speech.usable(read(tmp_path, found), 5.0, found)
    found.settle(len(left))
    assert len(left) == len(TEXTS) - 1 and "7-9-0001" not in {each.name for each in left}
    assert "1 cannot be used and are left out, 5 stay" in caplog.text and all(word in caplog.text for word in words)


def test_many_faults_are_counted_and_three_shown(tmp_path):
    folder, found = write_librispeech(tmp_path), faults()
    for path in folder.glob("*.flac"):
        path.write_bytes(b"nothing")
    read(tmp_path, found)
    with pytest.raises(DataError, match=r"6 cannot be used:(.|\n)*and 3 more"):
        found.settle(0)
    found.bad = "skip"
    with pytest.raises(DataError, match="nothing is left"):
        found.settle(0)


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[:int(len(content) * share)])


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_truncated_audio_is_never_taken_for_shorter_audio(suffix, tmp_path):
    """A WAV's header tells; a FLAC's does not, so reading does."""
    path = tmp_path / f"a{suffix}"
    soundfile.write(path, tone(400, 1.0), 8000)
    cut(path, 0.6)
    with pytest.raises(BadAudio, match="is cut off|cannot be read"):
        speech.audio_of(Utterance("a", "A", (AudioPart(str(path), speech.seconds_of(path)),)), 8000)


def test_samples_that_are_not_finite(tmp_path):
    audio = tone(400, 0.5)
    audio[100] = np.nan
    soundfile.write(tmp_path / "a.wav", audio, 8000, subtype="FLOAT")
    with pytest.raises(BadAudio, match="not finite"):
        speech.decoded(AudioPart(str(tmp_path / "a.wav"), 0.5), 8000)


@pytest.mark.parametrize("kind, subtype", [("wav", "FLOAT"), ("wav", "DOUBLE"), ("aiff", "FLOAT"), ("caf", "FLOAT")])
@pytest.mark.parametrize("scale, peak", [(2**15 - 1, "32767"), (2**7, "128"), (1.5, None), (1.0, None)])
def test_whole_numbers_stored_as_fractions_are_refused_with_their_peak(kind, subtype, scale, peak, tmp_path):
    """By every reader of audio: files, and the bytes of a set of the hub."""
    path, samples = tmp_path / f"a.{kind}", scale * tone(400, 0.5) / np.abs(tone(400, 0.5)).max()
    soundfile.write(path, samples, 8000, subtype=subtype)
    row = row_utterance({"path": path.name, "bytes": path.read_bytes()}, "text", "here", faults())
    readers = [lambda: decoded(AudioPart(str(path), 0.5), 8000), lambda: decoded(row.parts[0], 8000),
               lambda: speech.audio_of(row, 16000), lambda: infer.audio_of(path, 8000)]
    for read in readers:
        if peak:
            with pytest.raises(BadAudio, match=f"holds samples up to {peak}[^,]*, expected -1 to 1"):
                read()
        else:
            assert len(read()) in (4000, 8000)


@pytest.mark.parametrize("other, silent", [(-1, True), (-0.9999, True), (-0.5, False), (0, False), (1, False)])
@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_channels_that_cancel_each_other_out_are_named(other, silent, kind, tmp_path, caplog):
    path, one = tmp_path / f"a.{kind}", tone(400, 0.5)
    soundfile.write(path, np.stack([one, other * one], 1), 8000)
    assert len(infer.audio_of(path, 8000)) == 4000
    assert (f"{path}: its channels cancel each other out" in caplog.text) == silent


# ---- digits ------------------------------------------------------------------------------------------------


def parts_of(utterances):
    return {Path(part.name).stem for each in utterances for part in each.parts}


def test_strings_of_digits(tmp_path):
    every = speech.recordings(str(write_digits(tmp_path)), faults())
    found = {split: speech.digit_strings(every, split, 60) for split in ("train", "validation", "test")}
    for split, utterances in found.items():
        assert len(utterances) == 60 and {len(each.parts) for each in utterances} == set(range(3, 9))
        for each in utterances:
            names = [Path(part.name).stem.split("_") for part in each.parts]
            assert len({speaker for _, speaker, _ in names}) == 1 and len(each.gaps) == len(each.parts) - 1
            assert each.text == " ".join(speech.WORDS[int(digit)] for digit, _, _ in names)
            assert all(int(index) in speech.SPLITS[split] for _, _, index in names)
    assert found["train"] == speech.digit_strings(every, "train", 60)                  # always the same
    assert found["train"][:10] == speech.digit_strings(every, "train", 10)


def test_the_audio_of_a_string_is_that_of_its_parts(tmp_path):
    every = speech.recordings(str(write_digits(tmp_path)), faults())
    each = speech.digit_strings(every, "test", 3)[2]
    audio, start = speech.audio_of(each, 8000), 0
    for part, gap in zip(each.parts, (*each.gaps, 0.0)):
        own = soundfile.read(part.name, dtype="float32")[0]
        assert np.array_equal(audio[start:start + len(own)], own)
        start += len(own) + round(8000 * gap)
        assert (audio[start - round(8000 * gap):start] == 0).all()
    assert len(audio) == start and start / 8000 == pytest.approx(each.seconds, abs=0.001)


def test_a_held_out_speaker_is_in_no_other_split(tmp_path):
    every = speech.recordings(str(write_digits(tmp_path)), faults())
    found = {split: speech.digit_strings(every, split, 40, "bob") for split in ("train", "validation", "test")}
    assert all("_bob_" in name for name in parts_of(found["test"]))
    assert not any("_bob_" in name for split in ("train", "validation") for name in parts_of(found[split]))
    assert len(parts_of(found["test"])) > 20                                          # all of the recordings are used
    with pytest.raises(DataError, match="held_out_speaker = eve: the recordings are of ann, bob"):
        speech.digit_strings(every, "test", 1, "eve")


def test_a_recording_of_another_name(tmp_path):
    soundfile.write(write_digits(tmp_path) / "hello.wav", tone(300, 0.3), 8000)
    found = faults()
    speech.recordings(str(tmp_path), found)
    with pytest.raises(DataError, match=r"hello.wav: its name is not <digit>_<speaker>_<index>.wav"):
        found.settle(1)


@real_data
def test_the_real_digits():
    every = speech.recordings(None, faults())
    assert len(every) == 3000 and len({each.speaker for each in every}) == 6
    splits = {split: parts_of(speech.digit_strings(every, split, 300)) for split in ("train", "validation", "test")}
    assert not splits["train"] & splits["test"] and not splits["train"] & splits["validation"]
    assert splits["test"] <= {f"{d}_{s}_{i}" for d in range(10) for s in {e.speaker for e in every} for i in range(5)}


# ---- audio -------------------------------------------------------------------------------------------------


def wav(samples, rate=8000, said=None):
    """A WAV file; said: bytes of audio that its header tells of."""
    content = np.asarray(samples, "<i2").tobytes()
    size = len(content) if said is None else said
    kind = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    return b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + kind + b"data" + struct.pack("<I", size) + content


def streamed(content, riff, data):
    """The same WAV file with other sizes in its two headers."""
    return content[:4] + struct.pack("<I", riff) + content[8:40] + struct.pack("<I", data) + content[44:]


@pytest.mark.parametrize("riff, data", [
    (2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 37), (2**31 + 36, 2**31), (0, 2**32 - 1),
    (2**31 - 4060, 2**31 - 4096), (2**32 - 1, 32000)])
@pytest.mark.parametrize("chunks", [b"", b"LIST" + struct.pack("<I", 4) + b"abcd"])
def test_a_piped_wav_is_as_long_as_its_file(riff, data, chunks, tmp_path):
    """Who cannot go back to the header (ffmpeg, sox, arecord into a pipe) writes sizes that mean "unknown"."""
    path, samples = tmp_path / "a.wav", np.arange(16000) % 100
    content = streamed(wav(samples), riff, data)
    path.write_bytes(content[:36] + chunks + content[36:])
    assert seconds_of(path) == 2
    assert np.array_equal(speech.as_int16(decoded(AudioPart(str(path), 2.0), 8000)), samples)
    part = row_utterance({"path": "a.wav", "bytes": path.read_bytes()}, "text", "here", faults()).parts[0]
    assert part.seconds == 2


@pytest.mark.parametrize("said, words", [(0, "holds 32000 bytes behind the 44"), (64000, "is cut off: 32000 of 64000"),
                                         (2**30, "is cut off")])
def test_other_sizes_are_not_taken_for_unknown_ones(said, words, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(np.arange(16000) % 100, said=said))
    with pytest.raises(BadAudio, match=words):
        seconds_of(tmp_path / "a.wav")


@pytest.mark.parametrize("ending", ["WAV", "Flac", "ogg", "mp3", "oga", "aiff", "au"])
def test_audio_of_every_ending_that_is_read_is_taken(ending, tmp_path, caplog):
    write_librispeech(tmp_path)
    chapter = next(tmp_path.glob("train-clean-100/*/*"))
    (chapter / "x.m4a").write_bytes(b""), (chapter / "y.M4A").write_bytes(b"")
    kind = {"oga": "ogg"}.get(ending.lower(), ending.lower()).upper()
    soundfile.write(chapter / f"7-9-0007.{ending}", tone(400, 1.0), 8000, format=kind)
    with next(chapter.glob("*.trans.txt")).open("a") as file:
        file.write("7-9-0007 MORE\n")
    assert [each.text for each in read(tmp_path)] == [*TEXTS, "MORE"]
    assert caplog.text.count("left out by their endings: 2 .m4a (taken are") == 1
    assert len(audio_files(str(tmp_path), "input")) == len(TEXTS) + 1


def packed_with(path, samples, total):
    """A FLAC file whose header tells of `total` samples."""
    soundfile.write(path, np.asarray(samples, np.int16), 8000, format="FLAC", subtype="PCM_16")
    content = bytearray(path.read_bytes())
    content[22:26] = total.to_bytes(4, "big")
    path.write_bytes(content)


def test_headers_that_say_less_than_the_file_holds_are_told(tmp_path):
    path, samples = tmp_path / "a.wav", np.arange(8000) % 100
    path.write_bytes(wav(samples, said=4000))
    with pytest.raises(BadAudio, match="holds 12000 bytes behind the 4044 that its header tells of"):
        seconds_of(path)
    path.write_bytes(wav(samples) + b"LIST" + struct.pack("<I", 4) + b"abcd")
    assert seconds_of(path) == 1
    for content, words in ((wav([]), "0 samples"), (wav(samples, 500), "rates from 1000 to"),
                           (wav(samples, 800_000), "rates from 1000 to")):
        path.write_bytes(content)
        with pytest.raises(BadAudio, match=words):
            seconds_of(path)
    flac = tmp_path / "a.flac"
    packed_with(flac, samples, 8000)
    assert len(decoded(AudioPart(str(flac), 1.0), 8000)) == 8000
    packed_with(flac, samples, 4000)
    with pytest.raises(BadAudio, match="its 4000 samples do not have the header's MD5|cannot be read"):
        decoded(AudioPart(str(flac), 1.0), 8000)


def test_what_is_no_file_is_told_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    with pytest.raises(BadAudio, match="a pipe, socket or device, not a file"):
        seconds_of(tmp_path / "a.wav")


@pytest.mark.parametrize("own", [192_001, 44_101, 44_100, 22_050, 17_600, 8001])
def test_any_ratio_of_rates_takes_a_short_filter(own):
    """A tone stays where it is, and the filter has few taps: they were 3 million for 192001 Hz."""
    time = np.arange(own // 2) / own
    heard = resampled(np.sin(2 * np.pi * 440 * time).astype(np.float32), own, 16000)
    assert heard.dtype == np.float32 and abs(len(heard) - 8000) <= 1
    ratio = Fraction(16000, own).limit_denominator(FINEST)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(heard)) / float(ratio * own))
    assert np.abs(heard - expected)[200:-200].max() < 2e-3
    assert abs(ratio * own / 16000 - 1) < 1e-4 and len(low_pass(ratio)) <= 20 * 16_000 + 1


def test_names_that_are_there_twice_are_told(tmp_path):
    for chapter, word in (("1", "one"), ("2", "two")):
        folder = tmp_path / "own" / "10" / chapter
        folder.mkdir(parents=True)
        (folder / "same.wav").write_bytes(wav(np.ones(8000)))
        (folder / f"10-{chapter}.trans.txt").write_text(f"same {word}\n")
    faults = Faults("skip", "utterances")
    found = official(["own"], str(tmp_path), faults)
    assert [each.text for each in found] == ["one"] and len(faults.noted) == 2
    assert "has the same name" in faults.noted[0] and "same has another transcript already" in faults.noted[1]


def test_another_rate_is_resampled_and_said_once(tmp_path, caplog):
    for i in range(3):
        soundfile.write(tmp_path / f"{i}.wav", tone(440, 1.0, 44100), 44100)
    audio = [speech.decoded(AudioPart(str(tmp_path / f"{i}.wav"), 1.0), 8000) for i in range(3)]
    assert [len(each) for each in audio] == [8000] * 3
    assert np.abs(np.fft.rfft(audio[0])).argmax() == 440
    assert caplog.text.count("audio at 44100 Hz is resampled to 8000 Hz") == 1


def test_channels_are_averaged_and_said(tmp_path, caplog):
    both = np.stack([tone(300, 0.5, seed=1), tone(900, 0.5, seed=2)], 1)
    soundfile.write(tmp_path / "a.wav", both, 8000, subtype="FLOAT")
    np.testing.assert_allclose(speech.decoded(AudioPart(str(tmp_path / "a.wav"), 0.5), 8000), both.mean(1), atol=1e-6)
    assert "audio of 2 channels is averaged to one" in caplog.text


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.1])
def test_speed_changes_length_and_pitch(speed, tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(500, 2.0), 8000)
    audio = speech.audio_of(Utterance("a", "A", (AudioPart(str(tmp_path / "a.wav"), 2.0),)), 8000, speed)
    assert len(audio) == pytest.approx(16000 / speed, abs=1)
    assert np.abs(np.fft.rfft(audio)).argmax() / len(audio) * 8000 == pytest.approx(500 * speed, rel=0.01)


def test_audio_in_16_bits_is_kept_bit_for_bit(tmp_path):
    samples = np.random.default_rng(0).integers(-2**15, 2**15, 4000).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", samples, 8000)
    assert np.array_equal(speech.as_int16(speech.decoded(AudioPart(str(tmp_path / "a.flac"), 0.5), 8000)), samples)


def test_stretches_stay_within_and_below_their_share():
    found = np.concatenate([speech.stretches(np.random.default_rng(i), 2, 0.25, 40) for i in range(200)])
    widths = found[:, 1] - found[:, 0]
    assert found.min() == 0 and found.max() == 40 and widths.min() == 0 and widths.max() == 10


# ---- symbols -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["characters", "words", "pieces"])
def test_symbols_read_back_what_they_write(kind, tmp_path):
    texts = [*TEXTS, "A CAGE FED", "A FED BEE"] * 3
    symbols = Symbols.of(kind, texts, 20, tmp_path)
    assert all(symbols.decode(symbols.encode(text)) == text for text in texts)
    assert symbols == Symbols.of(kind, texts, 20, tmp_path)
    assert max(max(symbols.encode(text)) for text in texts) < len(symbols)
    with pytest.raises(UnknownSymbol, match="'Ö'" if kind != "words" else "'AÖ'"):
        symbols.encode("A AÖ")


def test_pieces_are_cached_by_what_they_are_made_of(tmp_path):
    made = Symbols.of("pieces", TEXTS * 3, 20, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert Symbols.of_pieces(made.pieces) == made
    Symbols.of("pieces", [*TEXTS * 3, "A FEED"], 20, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_fewer_pieces_than_were_asked_for_are_told(caplog):
    symbols = Symbols.of("pieces", TEXTS * 3, 5000)
    assert f"these transcripts give {len(symbols)} pieces, fewer than the 5000" in caplog.text and len(symbols) < 100


def test_too_few_pieces():
    with pytest.raises(DataError, match="3 pieces of these 6 transcripts"):
        Symbols.of("pieces", TEXTS, 3)


# ---- hub ---------------------------------------------------------------------------------------------------


def write_parquet(path, folder, texts=TEXTS):
    """A set as the hub stores it: audio as bytes."""
    from datasets import Audio, Dataset

    files = sorted(folder.glob("*.flac"))
    rows = {"audio": [{"bytes": file.read_bytes(), "path": file.name} for file in files], "text": list(texts)}
    Dataset.from_dict(rows).cast_column("audio", Audio(decode=False)).to_parquet(path)
    return path


def hub(file, text="text"):
    return {"name": "parquet", "config": None, "data_files": str(file), "audio": "audio", "text": text}


def test_a_set_of_the_hub(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", write_librispeech(tmp_path))
    read = lambda **more: speech.hub_utterances(hub(file), "train", faults(), **more)
    found = list(read()(0))
    assert [each.text for each in found] == list(TEXTS)
    on_disk = speech.official(["train-clean-100"], str(tmp_path), faults())
    for each, local in zip(found, on_disk):
        assert each.name == local.name and np.array_equal(speech.audio_of(each, 16000), speech.audio_of(local, 16000))
    names = [[each.name for each in read(rank=rank, world=2)(0)] for rank in (0, 1)]
    assert sorted(names[0] + names[1]) == [each.name for each in found] and not set(names[0]) & set(names[1])


@pytest.mark.slow  # datasets takes 5 s to end a pass that is shuffled
def test_the_order_of_a_stream_is_drawn_for_each_pass(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", write_librispeech(tmp_path))
    drawn = speech.hub_utterances(hub(file), "train", faults(), buffer=6)
    orders = [[each.name for each in drawn(epoch)] for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == sorted(orders[0]) != orders[2]


def test_a_column_that_the_set_lacks(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", write_librispeech(tmp_path))
    with pytest.raises(DataError, match="has no column 'sentence'; it has audio, text"):
        list(speech.hub_utterances(hub(file, "sentence"), "train", faults())(0))


def test_bad_rows_of_the_hub_are_named(tmp_path):
    folder = write_librispeech(tmp_path)
    (folder / "7-9-0002.flac").write_bytes(b"no audio")
    file = write_parquet(tmp_path / "a.parquet", folder, ["", *TEXTS[1:]])
    found = faults()
    read = speech.hub_utterances(hub(file), "train", found)
    assert len(list(read(0))) == 4
    assert "row 0 of process 0 (7-9-0000.flac): an empty transcript" in found.noted[0]
    assert "row 2 of process 0 (7-9-0002.flac): cannot be read" in found.noted[1]
