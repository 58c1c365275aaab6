"""task=librispeech: order of batches, augmentation of a row, transcripts, weights of another run, what does not fit."""

import jiwer
import pytest
import torch
from helpers.small_speech import TEXTS, write_digits, write_librispeech
from helpers.task_options import RECOGNISER, options_of

from crt_exp.experiments.data import DataError, warn
from crt_exp.experiments.data.plan import Plan
from crt_exp.experiments.predictions import read_predictions, write_predictions
from crt_exp.experiments.tasks.base import Reader
from crt_exp.experiments.tasks.librispeech import LibriSpeech
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

SIZES = RECOGNISER | {"dropout": 0.1, "norm": "frame"}


def options(**given):
    return options_of("librispeech") | {"sizes": SIZES, "workers": 0} | given


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """The three subsets that are read by default."""
    root = tmp_path_factory.mktemp("LibriSpeech")
    cases = [
        ("train-clean-100", 7),
        ("dev-clean", 8),
        ("test-clean", 9),
    ]
    for subset, speaker in cases:
        texts = 3 * TEXTS if speaker == 7 else TEXTS
        write_librispeech(root, subset, texts, speaker=speaker)
    return root


@pytest.fixture(autouse=True)
def quiet(one_thread, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    warn.cache_clear()


def spoken(digits, **given):
    given = {"strings": {"train": 24, "validation": 6, "test": 9}, "batch_seconds": 12.0} | given
    return LibriSpeech(**options(corpus="fsdd", data_dir=str(digits), **given))


def read(books, **given):
    return LibriSpeech(**options(data_dir=str(books), batch_seconds=4.0, **given))


# ---- transcripts -------------------------------------------------------------------------------------------


def test_error_rates_follow_from_the_transcripts(digits, tmp_path):
    """The file that an evaluation leaves names each utterance once."""
    task = spoken(digits)
    model = task.build(Mechanism.of("exact")).eval()
    with torch.no_grad():
        model.joiner.out.bias[-1] += 1.5  # blank and words about equally likely, as after training
        model.joiner.out.weight.mul_(6)
        actual = task.evaluate(model, "test", Reader(task))
    write_predictions(task.predicted, tmp_path)
    rows = read_predictions(tmp_path)
    assert rows["example"].nunique() == 9
    labels = [*rows["label"]]
    answers = [*rows["prediction"]]
    assert actual["wer"] == jiwer.wer(labels, answers)
    assert actual["utterances"] == 9
    assert actual["cer"] == jiwer.cer(labels, answers)


# ---- order and processes ------------------------------------------------------------------------------


def contents(batch):
    return {
        key: value.tolist() if torch.is_tensor(value) else value for key, value in batch.items()
    }


def test_batches_are_the_same_wherever_a_run_stands(digits):
    task = spoken(digits)
    whole = [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2))]
    assert len(whole) == task.epoch_steps(Plan(batch=8)) > 2
    actual = []
    for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2, start=1)):
        actual.append(contents(batch))
    assert actual == whole[1:]
    plan = Plan(batch=8, seed=3, epoch=2, start=1)
    by_workers = spoken(digits, workers=2).batches("train", plan)
    assert [contents(batch) for batch in by_workers] == whole[1:]
    other = [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=1))]
    assert other != whole
    rows = []
    for batch in other:
        rows += batch["rows"]
    assert sorted(rows) == list(range(24))


def test_speed_and_masks_belong_to_the_row_and_the_epoch(digits):
    """Whatever else is in its batch."""
    task = spoken(digits)
    wide = spoken(digits, batch_seconds=24.0)
    drawn = []
    for variant in (task, wide):
        found = {}
        for batch in variant.batches("train", Plan(batch=8, seed=5, epoch=1)):
            for i, row in enumerate(batch["rows"]):
                found[row] = (
                    int(batch["samples"][i]),
                    batch["bands"][i].tolist(),
                    batch["spans"][i].tolist(),
                )
        drawn.append(found)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 24
    own = task.splits["train"].utterances
    actual = {
        round(8000 * own[row].seconds / samples, 1) for row, (samples, *_) in drawn[0].items()
    }
    assert actual == {0.9, 1.0, 1.1}


def test_seconds_of_a_batch_bound_its_audio(books):
    task = read(books)
    for split in ("train", "validation"):
        sizes = [batch["audio"].shape for batch in task.batches(split, Plan(batch=8))]
        assert max(rows * samples for rows, samples in sizes) <= 4 * 16000


# ---- weights and sources of others ----------------------------------------------------------------------------------


def test_weights_of_a_run_need_the_same_symbols_and_sizes(digits, tmp_path):
    exact = spoken(digits)
    init = {"init": str(tmp_path)}
    model = exact.build(Mechanism.of("exact"))
    exact.export(model, model.state_dict(), tmp_path)
    with pytest.raises(
        ConfigError, match="trained with 10 words, expected 16 characters; use the task.symbols"
    ):
        spoken(digits, symbols="characters", **init)
    with pytest.raises(ConfigError, match="task.rate=16000: expected 8000 Hz"):
        spoken(digits, rate=16000, **init)
    with pytest.raises(
        ConfigError, match="task.init=.* has shape .*, expected .*; use the task.sizes"
    ):
        sizes = SIZES | {"dim": 32}
        spoken(digits, sizes=sizes, **init).build(Mechanism.of("favorpp", m=8))


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, words",
    [
        ({"source": "hub"}, "task.source=hub: expected task.corpus=librispeech"),
        ({"batch_seconds": 1.0}, "task.batch_seconds=1.*: expected at least"),
        ({"sizes": SIZES | {"layer": 2}}, "layer.*did you mean task.sizes.layers?"),
        ({"preset": "big"}, "preset=big: expected small or paper"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(given, words, digits):
    with pytest.raises((ConfigError, DataError), match=words):
        spoken(digits, **given).build(Mechanism.of("exact"))


def test_a_symbol_outside_the_vocabulary(books, tmp_path):
    write_librispeech(tmp_path, "test-clean", ["A BEE", "A CAFÉ"])
    given = {
        "subsets": {"train": ["train-clean-100"], "validation": ["dev-clean"], "test": ["own"]}
    }
    (books / "own").exists() or (books / "own").symlink_to(tmp_path / "test-clean")
    with pytest.raises(DataError, match="7-9-0001: its transcript: 'É'"):
        read(books, **given)


def test_splits_share_no_recording(tmp_path):
    write_librispeech(tmp_path, "train-clean-100")
    (tmp_path / "dev-clean").symlink_to("train-clean-100")
    write_librispeech(tmp_path, "test-clean", speaker=9)
    with pytest.raises(
        DataError, match="task.subsets: the recording .* in validation and in train"
    ):
        read(tmp_path)


def test_truncated_audio_is_refused_when_it_is_read(tmp_path):
    """A FLAC header does not reveal it."""
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        write_librispeech(tmp_path, subset)
    truncated = tmp_path / "train-clean-100" / "7" / "9" / "7-9-0002.flac"
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 2])
    plan = Plan(batch=8)
    with pytest.raises(DataError, match="7-9-0002.flac: not readable"):
        list(LibriSpeech(**options(data_dir=str(tmp_path), workers=1)).batches("train", plan))
