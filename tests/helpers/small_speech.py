"""Small audio that sounds like something: a tone for each digit or letter, in the layouts of the real sets."""

import numpy as np
import soundfile

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def tone(frequency, seconds, rate=8000, seed=0):
    """(samples,) with a little noise, so that no two are the same."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * frequency * time) + 0.01 * noise).astype(np.float32)


def write_digits(
    folder,
    speakers=("ann", "bob"),
    indices=(0, 1, 5, 6, 8, 9),
    rate=8000,
):
    """<digit>_<speaker>_<index>.wav: 0.15 to 0.25 s of a tone of the digit's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for digit in range(10):
        for s, speaker in enumerate(speakers):
            for index in indices:
                audio = tone(
                    300 + 300 * digit + 20 * s,
                    0.15 + 0.02 * (index % 6),
                    rate,
                    seed=100 * digit + index,
                )
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", audio, rate)
    return folder


TEXTS = ("A BEE", "A CAB", "FADE", "DEAD END", "IT'S A CAGE", "BAD FACE")


def write_librispeech(
    root, subset="train-clean-100", texts=TEXTS, speaker=7, chapter=9, rate=16000, seconds=None
):
    """Each letter a tone of 0.1 s; the files of one chapter with their transcripts."""
    folder = root / subset / str(speaker) / str(chapter)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, text in enumerate(texts):
        name = f"{speaker}-{chapter}-{i:04d}"
        tones = []
        for letter in text:
            frequency = 200 + 100 * (ord(letter) - 32)
            tones.append(tone(frequency, seconds or 0.1, rate, seed=i))
        audio = np.concatenate(tones)
        soundfile.write(folder / f"{name}.flac", audio, rate)
        lines.append(f"{name} {text}\n")
    (folder / f"{speaker}-{chapter}.trans.txt").write_text("".join(lines))
    return folder
