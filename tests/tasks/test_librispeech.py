"""task=librispeech as a user types it: training, evaluation, resume, several processes, and what it leaves behind."""

import json
import re
from itertools import islice
from pathlib import Path

import jiwer
import pytest
import soundfile
import torch
from small_speech import TEXTS, tone, write_digits, write_librispeech
from test_speech_data import cut, write_parquet

from crt_exp.config import CONF, ConfigError
from crt_exp.data import DataError, cache
from crt_exp.data.plan import Plan
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.metrics import error_rates
from crt_exp.models import recogniser
from crt_exp.models.conformer_transducer import encoder_frames
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Reader
from crt_exp.tasks.librispeech import SpokenExample, LibriSpeech

HERE = Path(__file__).parents[1]
PARTS = ("substitutions", "deletions", "insertions")
SIZES = {"mels": 16, "channels": 4, "layers": 1, "dim": 16, "ffn": 32, "heads": 2, "kernel": 7, "predictor": 16,
         "joiner": 16, "dropout": 0.1, "norm": "frame"}


def options(**given):
    """The values of the task's file, with others for some."""
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(OmegaConf.load(CONF / "task" / "librispeech.yaml").task)
    found = {key: value for key, value in found.items() if not key.startswith("_")}
    return found | {"cache_dir": None, "sizes": SIZES} | given


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
    cache.warn.cache_clear()


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
        base += [*[f"+task.sizes.{key}={value}" for key, value in SIZES.items()], "trainer.epochs=1",
                 "task.cache_dir=null", *([] if "attention=exact" in args else ["features.m=8"])]
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
    code, out, err = run(f"attention={attention}", "trainer.epochs=3", "trainer.log_every=4", "task.beam=3")
    assert code == 0 and err == "", err
    assert "joiner: a micro-batch of 12 s holds at most" in out
    assert re.search(r"real-time factors: training [\d.e-]+, greedy [\d.e-]+, beam [\d.e-]+", out)
    lines = records(tmp_path / "run")
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    last = lines[-1]
    assert last["final"] and last["split"] == "test" and last["metric"] == "wer" and losses[-1] < losses[0]
    head, *rows = [line.split("\t") for line in (tmp_path / "run" / "transcripts.tsv").read_text().splitlines()]
    assert head == ["split", "utterance", "transcript", "greedy", "beam"] and len(rows) == last["utterances"] == 9
    for column, suffix in ((3, ""), (4, "_beam")):
        assert last[f"wer{suffix}"] == jiwer.wer([row[2] for row in rows], [row[column] for row in rows])
        assert last[f"cer{suffix}"] == jiwer.cer([row[2] for row in rows], [row[column] for row in rows])
    found, tensors = recogniser.load(tmp_path / "run", "run")
    assert recogniser.load_whole(found, tensors, "run").blank == 10 and found.mechanism.name == attention


def test_error_rates_add_up():
    found, parts = error_rates(["one two three four", "five"], ["one too three", "five six"]), PARTS
    assert found["wer"] == pytest.approx(3 / 5) and all(found[part] == 1 / 5 for part in parts)
    assert found["cer"] == pytest.approx(sum(found[f"character_{part}"] for part in parts))


def test_librispeech_is_the_default(run, books, tmp_path):
    code, _, err = run("attention=favorp", f"task.data_dir={books}", "task.batch_seconds=4", corpus=False)
    assert code == 0 and err == "", err
    lines = records(tmp_path / "run")
    assert {line["split"] for line in lines} == {"validation", "test"} and lines[-1]["utterances"] == len(TEXTS)


@pytest.mark.parametrize("symbols, size", [("characters", 28), ("words", 10), ("pieces", 20)])
def test_symbols_of_books(symbols, size, books):
    task = read(books, symbols=symbols, pieces=20)
    assert len(task.vocabulary) == size and task.vocabulary.kind == symbols
    batch = next(iter(task.batches("train", Plan(batch=4))))
    found = {task.vocabulary.decode(row[:n]) for row, n in zip(batch["targets"].tolist(), batch["target_lengths"])}
    assert found <= set(TEXTS)


# ---- order, resume, processes ------------------------------------------------------------------------------


def contents(batch):
    return {key: value.tolist() if torch.is_tensor(value) else value for key, value in batch.items()}


def test_batches_are_the_same_wherever_a_run_stands(digits):
    task = spoken(digits)
    whole = [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2))]
    assert len(whole) == task.epoch_steps(Plan(batch=8)) > 2
    assert [contents(batch) for batch in task.batches("train", Plan(batch=8, seed=3, epoch=2, start=1))] == whole[1:]
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


def test_loss_of_a_step_is_the_mean_over_its_utterances(digits):
    """Micro-batches of different sizes, weighed as the trainer weighs them, give what one batch of all gives."""
    task = spoken(digits, sizes=SIZES | {"dropout": 0.0})
    model = task.build(Mechanism.of("exact"))
    batches = list(task.batches("train", Plan(batch=8)))
    assert len({task.weight(batch) for batch in batches}) > 1
    with torch.no_grad():
        losses = torch.cat([model(**task.arguments(batch)) for batch in batches])
        weighed = sum(float(task.loss(model, batch)) * task.weight(batch) for batch in batches)
    assert weighed / sum(map(task.weight, batches)) == pytest.approx(float(losses.mean()), rel=1e-5)


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.1, 0.4])
def test_memory_of_the_joiner_is_bounded_by_the_seconds_of_a_batch(seconds, tmp_path):
    """At two lengths of utterances: longer ones make smaller batches, and B x T x (U + 1) keeps the printed bound."""
    for subset, speaker in (("train-clean-100", 7), ("dev-clean", 8), ("test-clean", 9)):
        write_librispeech(tmp_path, subset, TEXTS * 2, speaker=speaker, seconds=seconds)
    task = LibriSpeech(**options(data_dir=str(tmp_path), batch_seconds=10.0))
    cells = []
    for split in ("train", "validation"):
        for batch in task.batches(split, Plan(batch=8)):
            frames = encoder_frames(batch["samples"], 16000).max()
            cells.append(int(len(batch["samples"]) * frames * (batch["target_lengths"].max() + 1)))
            assert len(batch["samples"]) * batch["audio"].shape[1] <= 10 * 16000
    bound = encoder_frames(160000, 16000) * (max(map(len, TEXTS)) + 1)
    assert max(cells) <= task.joiner_cells() == bound and max(cells) > bound / 4
    assert f"at most {bound} cells" in task.described_joiner()


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
    with pytest.raises(ConfigError, match=r"it writes 10 words, this run 16 characters(.|\n)*task.symbols"):
        spoken(digits, symbols="characters", **init)
    with pytest.raises(ConfigError, match="it hears 8000 Hz, this run 16000 Hz: choose task.rate=8000"):
        spoken(digits, rate=16000, **init)
    with pytest.raises(ConfigError, match=r"task.init(.|\n)*this model takes(.|\n)*task.sizes"):
        spoken(digits, sizes=SIZES | {"dim": 32}, **init).build(Mechanism.of("favorpp", m=8))


# ---- streams -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    return write_parquet(root / "a.parquet", write_librispeech(root, texts=TEXTS * 3), TEXTS * 3)


def hub(file, **given):
    return {"name": "parquet", "config": None, "train": "train", "validation": "train", "test": "train",
            "audio": "audio", "text": "text", "data_files": str(file), "buffer": 0, "held_out": 4,
            "transcripts": 100} | given


@pytest.mark.parametrize("symbols", ["characters", "words"])
def test_a_stream_goes_on_where_it_stood(symbols, streamed):
    task = LibriSpeech(**options(source="hub", hub=hub(streamed), batch_seconds=2.0, symbols=symbols))
    take = lambda **where: [contents(batch) for batch in islice(task.batches("train", Plan(4, seed=1, **where)), 6)]
    whole = take()
    assert take(start=2)[:4] == whole[2:] and all(len(b["rows"]) * len(b["audio"][0]) <= 2 * 16000 for b in whole)
    assert task.length("train") is None and task.epoch_steps(Plan(batch=4)) is None and task.length("test") == 4
    shares = [take(rank=rank, world=2) for rank in (0, 1)]
    assert not {row for b in shares[0] for row in b["rows"]} & {row for b in shares[1] for row in b["rows"]}


def test_a_run_on_a_stream(run, streamed, tmp_path):
    given = ["task.source=hub", "task.hub.name=parquet", "task.hub.config=null", f"task.hub.data_files={streamed}",
             "task.hub.train=train", "task.hub.validation=train", "task.hub.test=train", "task.hub.held_out=4",
             "task.hub.buffer=0", "task.batch_seconds=3", "attention=favorp"]
    code, _, err = run(*given, corpus=False)
    assert code == 2 and "set trainer.steps" in err
    code, _, err = run(*given, "trainer.steps=3", corpus=False)
    assert code == 0 and records(tmp_path / "run")[-1]["utterances"] == 4, err


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.corpus=librispeech", "task.data_dir=null"], ["train-clean-100", "CRT_DATA is not set", "fetch speech"]),
    (["task.held_out_speaker=eve"], ["held_out_speaker = eve", "ann, bob"]),
    (["task.source=hub"], ["task.corpus=fsdd reads files"]),
    (["task.batch_seconds=1"], ["task.batch_seconds = 1", "raise it"]),
    (["task.max_seconds=1.5"], ["cannot be used", "above task.max_seconds = 1.5", "task.bad=skip"]),
    (["+task.sizes.layer=2"], ["layer", "did you mean task.sizes.layers?"]),
    (["+task.sizes.dim=15"], ["dim = 15 is no multiple of heads = 2"]),
    (["task.preset=big"], ["task.preset = big: it takes small or paper"]),
    (["task.symbols=letters"], ["task.symbols = letters"]),
    (["task.speeds=[0.1]"], ["task.speeds[0] = 0.1"]),
    (["task.init=/nowhere"], ["task.init = /nowhere", "no such directory"]),
    (["task.augment.band_share=2"], ["task.augment.band_share = 2"]),
    (["task.strings.train=0"], ["task.strings.train = 0"]),
], ids=str)
def test_bad_options(args, words, run, tmp_path):
    code, _, err = run("attention=favorp", *args)
    assert code == 2 and err.count("crt_exp: error:") == 1 and all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_a_symbol_outside_the_vocabulary(books, tmp_path):
    write_librispeech(tmp_path, "test-clean", ["A BEE", "A CAFÉ"])
    given = {"subsets": {"train": ["train-clean-100"], "validation": ["dev-clean"], "test": ["own"]}}
    (books / "own").exists() or (books / "own").symlink_to(tmp_path / "test-clean")
    with pytest.raises(DataError, match=r"test utterances: 1 cannot be used:(.|\n)*7-9-0001: its transcript: 'É'"):
        read(books, **given)
    assert read(books, **given, bad="skip").length("test") == 1


def test_audio_that_ends_early_is_found_when_it_is_read(tmp_path):
    """A FLAC's header does not tell: an error, or left out of its batch and said."""
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        write_librispeech(tmp_path, subset)
    cut(tmp_path / "train-clean-100" / "7" / "9" / "7-9-0002.flac", 0.5)
    plan = Plan(batch=8)
    with pytest.raises(DataError, match=r"1 cannot be used:(.|\n)*7-9-0002.*cannot be read"):
        list(LibriSpeech(**options(data_dir=str(tmp_path))).batches("train", plan))
    found = list(LibriSpeech(**options(data_dir=str(tmp_path), bad="skip")).batches("train", plan))
    assert sum(len(batch["rows"]) for batch in found) == len(TEXTS) - 1
    task = LibriSpeech(**options(data_dir=str(tmp_path), bad="skip", sizes=SIZES))
    data = task.splits["train"]
    examples = [SpokenExample(i, data.utterances[i], data.targets[i]) for i in range(len(TEXTS))]
    bad = [example for example in examples if example.utterance.name == "7-9-0002"]
    with pytest.raises(DataError, match="nothing is left"):             # of all that was asked for so far
        task.batch(bad, None)
    task.batch(examples, None)
    alone = task.batch(bad, None)
    assert task.weight(alone) == 0 and task.loss(task.build(Mechanism.of("exact")), alone).isfinite()


def test_the_names_of_attention_are_rebuilt_and_compared():
    cases = {"favorpp": {"m": 8, "sampler": "iid"}, "exact": {}, "relu": {}, None: {"features": "trig", "m": 4}}
    for name, given in cases.items():
        mechanism = Mechanism.of(name, **given, seed=3)
        saved = json.loads(json.dumps(mechanism.saved()))
        assert Mechanism.of_saved(saved, "run = a").describe() == mechanism.describe()
    with pytest.raises(ConfigError, match="not what it was"):
        Mechanism.of_saved(saved | {"described": {}}, "run = a")
    with pytest.raises(ConfigError, match="not one of this installation"):
        Mechanism.of_saved(saved | {"features": "mine"}, "run = a")


def test_evaluation_scores_every_utterance_once_in_any_batches(digits):
    """On two processes too, by hand: the shares joined are the whole."""
    task = spoken(digits)
    rows = [row for batch in Reader(task).batches("test") for row in batch["rows"]]
    readers = [Reader(task, rank=rank, world=2) for rank in (0, 1)]
    shares = [row for reader in readers for batch in reader.batches("test") for row in batch["rows"]]
    assert sorted(rows) == sorted(shares) == list(range(9))


def test_the_first_file_of_other_rates_is_resampled(tmp_path, caplog):
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        write_librispeech(tmp_path, subset, rate=22050)
    task = LibriSpeech(**options(data_dir=str(tmp_path)))
    batch, said = next(iter(task.batches("validation", Plan(batch=8)))), task.splits["validation"].utterances
    assert int(batch["samples"].max()) == pytest.approx(16000 * max(each.seconds for each in said), abs=2)
    assert caplog.text.count("audio at 22050 Hz is resampled to 16000 Hz") == 1


def test_no_file_of_audio_is_left(tmp_path):
    soundfile.write(write_librispeech(tmp_path, texts=["A"]) / "7-9-0000.flac", tone(300, 0.01, 16000), 16000)
    with pytest.raises(DataError, match="nothing is left"):
        LibriSpeech(**options(data_dir=str(tmp_path), bad="skip", subsets=dict.fromkeys(("train", "validation", "test"),
                                                                                         ["train-clean-100"])))


@pytest.mark.parametrize("symbols", ["words", "pieces"])
def test_training_data_of_which_nothing_is_left_are_told_before_symbols_are_made(symbols, tmp_path):
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        write_librispeech(tmp_path, subset)
    for path in (tmp_path / "train-clean-100").rglob("*.flac"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="train utterances: 6 cannot be used"):
        LibriSpeech(**options(data_dir=str(tmp_path), symbols=symbols))
