"""task=librispeech as a user types it: training, evaluation, resume, several processes, and what it leaves behind."""

import json
from pathlib import Path

import jiwer
import pytest
import torch
from small_speech import TEXTS, write_digits, write_librispeech
from test_speech_data import cut, write_parquet

from crt_exp.config import CONF, ConfigError
from crt_exp.data import DataError, warn
from crt_exp.data.plan import Plan
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.base import Reader, error_rates
from crt_exp.models import conformer_transducer
from crt_exp.runner import checkpoint
from crt_exp.tasks.librispeech import LibriSpeech

HERE = Path(__file__).parents[1]
PARTS = ("substitutions", "deletions", "insertions")
SIZES = {"mels": 16, "channels": 4, "layers": 1, "dim": 16, "ffn": 32, "heads": 2, "kernel": 7, "predictor": 16,
         "joiner": 16, "dropout": 0.1, "norm": "frame"}


def options(**given):
    """The values of the task's file, with others for some."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(OmegaConf.load(CONF / "task" / "librispeech.yaml").task)
    found = {key: value for key, value in found.items() if not key.startswith("_")}
    return found | {"sizes": SIZES, "workers": 0} | given


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """The three subsets that are read by default."""
    root = tmp_path_factory.mktemp("LibriSpeech")
    for subset, speaker in (("train-clean-100", 7), ("dev-clean", 8), ("test-clean", 9)):
        write_librispeech(root, subset, TEXTS * (3 if speaker == 7 else 1), speaker=speaker)
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


@pytest.fixture
def run(typed, digits, tmp_path):
    """Runs a small experiment on digits in this process: (exit code, stdout, stderr)."""
    def started(*args, directory="run", corpus=True):
        base = ["task.corpus=fsdd", f"task.data_dir={digits}", "task.strings.train=24", "task.strings.validation=6",
                "task.strings.test=9", "task.batch_seconds=12"] if corpus else []
        base += [*[f"+task.sizes.{key}={value}" for key, value in SIZES.items()], "trainer.epochs=1", "task.workers=0",
                 *([] if "attention=exact" in args else ["features.m=8"])]
        own = [b for b in base if not any(a.split("=")[0] == b.split("=")[0] for a in args)]
        return typed("task=librispeech", "logger=none", f"hydra.run.dir={tmp_path / directory}", *own, *args)
    return started


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time_s"} for line in lines]


# ---- a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["favorpp", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_run(attention, run, tmp_path):
    """It learns, says how long things took, and keeps transcripts, from which its error rates follow, and a model."""
    code, out, err = run(f"attention={attention}", "trainer.epochs=3", "trainer.log_every=4")
    assert code == 0 and err == "", err
    assert "librispeech: WER" in out
    lines = records(tmp_path / "run")
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    last = lines[-1]
    assert last["final"] and last["split"] == "test" and last["metric"] == "wer" and losses[-1] < losses[0]
    head, *rows = [line.split("\t") for line in (tmp_path / "run" / "transcripts.tsv").read_text().splitlines()]
    assert head == ["split", "utterance", "transcript", "greedy"] and len(rows) == last["utterances"] == 9
    assert last["wer"] == jiwer.wer([row[2] for row in rows], [row[3] for row in rows])
    assert last["cer"] == jiwer.cer([row[2] for row in rows], [row[3] for row in rows])
    found, tensors = conformer_transducer.load(tmp_path / "run", "run")
    assert found.build(tensors).blank == 10 and found.mechanism.name == attention


def test_error_rates_add_up():
    found, parts = error_rates(["one two three four", "five"], ["one too three", "five six"]), PARTS
    assert found["wer"] == pytest.approx(3 / 5) and all(found[part] == 1 / 5 for part in parts)
    assert found["cer"] == pytest.approx(sum(found[f"character_{part}"] for part in parts))


# ---- order, resume, processes ------------------------------------------------------------------------------


def contents(batch):
    return {key: value.tolist() if torch.is_tensor(value) else value for key, value in batch.items()}


def test_batches_are_the_same_wherever_a_run_stands(digits):
    task = spoken(digits)
    whole = [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2))]
    assert len(whole) == task.epoch_steps(Plan(batch=8)) > 2
    assert [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2, start=1))] == whole[1:]
    by_workers = spoken(digits, workers=2).batches("train", Plan(batch=8, seed=3, epoch=2, start=1))
    assert [contents(batch) for batch in by_workers] == whole[1:]
    other = [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=1))]
    assert other != whole and sorted(row for b in other for row in b["rows"]) == list(range(24))


def test_two_processes_read_what_one_reads_in_two_micro_batches(digits):
    task = spoken(digits)
    one = [contents(batch) for batch in task.batches("train", Plan(batch=8, micro=2, seed=1))]
    two = [list(task.batches("train", Plan(batch=8, seed=1, rank=rank, world=2))) for rank in (0, 1)]
    assert one == [contents(batch) for step in zip(*two) for batch in step]


def test_speed_and_masks_belong_to_the_row_and_the_epoch(digits):
    """Whatever else is in its batch."""
    task, wide = spoken(digits), spoken(digits, batch_seconds=24.0)
    drawn = []
    for each in (task, wide):
        found = {}
        for batch in each.batches("train", Plan(batch=8, seed=5, epoch=1)):
            for i, row in enumerate(batch["rows"]):
                found[row] = (int(batch["samples"][i]), batch["bands"][i].tolist(), batch["spans"][i].tolist())
        drawn.append(found)
    assert drawn[0] == drawn[1] and len(drawn[0]) == 24
    own = task.splits["train"].utterances
    assert {round(8000 * own[row].seconds / samples, 1) for row, (samples, *_) in drawn[0].items()} == {0.9, 1.0, 1.1}


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_numbers(run, tmp_path):
    """In the middle of an epoch, masks, speeds and dropout included: bit for bit."""
    steps = ["attention=exact", "trainer.log_every=1", "trainer.schedule=constant", "trainer.warmup=0",
             "trainer.save_every=1", "+task.sizes.norm=batch"]
    assert run(*steps, "trainer.steps=5", directory="whole")[0] == 0
    assert run(*steps, "trainer.steps=3", directory="parts")[0] == 0
    config = tmp_path / "parts" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 3", "steps: 5"))
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines(True)
    (tmp_path / "parts" / "metrics.jsonl").write_text("".join(line for line in lines if '"final"' not in line))
    code, _, err = run(*steps, "trainer.steps=5", "resume=auto", directory="parts")
    assert code == 0, err
    train = lambda name: [line for line in records(tmp_path / name) if line["split"] == "train"]
    assert train("whole") == train("parts") and len(train("parts")) == 5
    assert records(tmp_path / "whole")[-1] == records(tmp_path / "parts")[-1]
    weights = [checkpoint.load_tensors(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_seconds_of_a_batch_bound_its_audio(books):
    task = read(books)
    for split in ("train", "validation"):
        sizes = [batch["audio"].shape for batch in task.batches(split, Plan(batch=8))]
        assert max(rows * samples for rows, samples in sizes) <= 4 * 16000


# ---- uptraining --------------------------------------------------------------------------------------------


def test_uptraining_takes_the_weights_of_an_exact_run(digits, tmp_path):
    """With noise of its own; more features bring it nearer to the exact run."""
    exact = spoken(digits)
    model = exact.build(Mechanism.of("exact"))
    exact.export(model, model.state_dict(), tmp_path)
    task, losses = spoken(digits, init=str(tmp_path)), {0: loss_of(exact, model)}
    for m in (4, 512):
        found = task.build(Mechanism.of("favorpp", m=m))
        state = found.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        assert any(".swapped." in name for name in state)
        losses[m] = loss_of(task, found)
    assert abs(losses[512] - losses[0]) < abs(losses[4] - losses[0])


@torch.no_grad()
def loss_of(task, model):
    batch = next(iter(task.batches("validation", Plan(batch=8))))
    return float(task.loss(model.eval(), batch))


def test_uptraining_needs_the_same_symbols_and_sizes(digits, tmp_path):
    exact, init = spoken(digits), {"init": str(tmp_path)}
    model = exact.build(Mechanism.of("exact"))
    exact.export(model, model.state_dict(), tmp_path)
    with pytest.raises(ConfigError, match="trained with 10 words, expected 16 characters; use the task.symbols"):
        spoken(digits, symbols="characters", **init)
    with pytest.raises(ConfigError, match="task.rate=16000: expected 8000 Hz"):
        spoken(digits, rate=16000, **init)
    with pytest.raises(ConfigError, match="task.init=.* expected shape .*; use the task.sizes"):
        spoken(digits, sizes=SIZES | {"dim": 32}, **init).build(Mechanism.of("favorpp", m=8))


def test_a_run_on_a_set_of_the_hub(run, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", write_librispeech(tmp_path, texts=TEXTS * 3), TEXTS * 3)
    code, _, err = run("task.source=hub", "task.hub.name=parquet", "task.hub.config=null", "task.hub.validation=train",
                       f"task.hub.data_files={file}", "task.hub.train=train", "task.hub.test=train",
                       "task.batch_seconds=3", "attention=favorp", corpus=False)
    assert code == 0 and records(tmp_path / "run")[-1]["utterances"] == 18, err


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.corpus=librispeech", "task.data_dir=null", "task.source=files"],
     ["CRT_DATA, which is not set", "fetch speech"]),
    (["task.source=hub"], ["task.source=hub: expected task.corpus=librispeech"]),
    (["task.batch_seconds=1"], ["task.batch_seconds=1: expected at least"]),
    (["task.max_seconds=1.5"], ["train utterances: 12 unusable", "expected 0.1 to 1.5 s", "task.bad=skip"]),
    (["+task.sizes.layer=2"], ["layer", "did you mean task.sizes.layers?"]),
    (["+task.sizes.dim=15"], ["task.sizes.dim=15: expected a multiple of heads=2"]),
    (["task.preset=big"], ["task.preset=big: expected small or paper"]),
    (["task.symbols=letters"], ["task.symbols=letters"]),
    (["task.speeds=[0.1]"], ["task.speeds=[0.1]"]),
    (["task.init=/nowhere"], ["task.init=/nowhere", "no such directory"]),
    (["task.augment.band_share=2"], ["task.augment.band_share=2"]),
    (["task.strings.train=0"], ["task.strings.train=0"]),
], ids=str)
def test_bad_options(args, words, run, tmp_path):
    code, _, err = run("attention=favorp", *args)
    assert code == 2 and err.count("crt_exp: error:") == 1 and all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_a_symbol_outside_the_vocabulary(books, tmp_path):
    write_librispeech(tmp_path, "test-clean", ["A BEE", "A CAFÉ"])
    given = {"subsets": {"train": ["train-clean-100"], "validation": ["dev-clean"], "test": ["own"]}}
    (books / "own").exists() or (books / "own").symlink_to(tmp_path / "test-clean")
    with pytest.raises(DataError, match="test utterances: 1 unusable, 1 usable: 7-9-0001: its transcript: 'É'"):
        read(books, **given)
    assert read(books, **given, bad="skip").length("test") == 1


def test_audio_that_ends_early_is_found_when_it_is_read(tmp_path):
    """A FLAC's header does not tell: an error, or left out of its batch and said."""
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        write_librispeech(tmp_path, subset)
    cut(tmp_path / "train-clean-100" / "7" / "9" / "7-9-0002.flac", 0.5)
    plan = Plan(batch=8)
    with pytest.raises(DataError, match="7-9-0002.flac: not readable"):
        list(LibriSpeech(**options(data_dir=str(tmp_path), workers=1)).batches("train", plan))
    task = LibriSpeech(**options(data_dir=str(tmp_path), bad="skip", sizes=SIZES))
    assert sum(len(batch["rows"]) for batch in task.batches("train", plan)) == len(TEXTS) - 1
    data = task.splits["train"]
    alone, _ = task.batch(data, None, [[each.name for each in data.utterances].index("7-9-0002")])
    assert task.weight(alone) == 0 and task.loss(task.build(Mechanism.of("exact")), alone).isfinite()


def test_evaluation_scores_every_utterance_once_in_any_batches(digits):
    """On two processes too, by hand: the shares joined are the whole."""
    task = spoken(digits)
    rows = [row for batch in Reader(task).batches("test") for row in batch["rows"]]
    readers = [Reader(task, rank=rank, world=2) for rank in (0, 1)]
    shares = [row for reader in readers for batch in reader.batches("test") for row in batch["rows"]]
    assert sorted(rows) == sorted(shares) == list(range(9))
