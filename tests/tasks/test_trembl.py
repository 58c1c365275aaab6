"""task=trembl as a user types it: generated families and UniProt's files, both directions, transfer, many processes."""

import json

import numpy as np
import pytest
import torch
from refusals import check_refused
from stopping import stopped_and_continued
from test_protein_data import name, write

from crt_exp.config import ConfigError
from crt_exp.data import protein
from crt_exp.mechanism import Mechanism
from crt_exp.models import language
from crt_exp.runner import checkpoint
from crt_exp.tasks.base import Plan, Reader
from crt_exp.tasks.trembl import TrEMBL

GENERATED = {"sequences": 200, "families": 2, "held_out": 1, "shortest": 10, "longest": 16, "nearest": 2, "farthest": 4,
             "copied": 0.6, "seed": 0}
SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
OPTIONS = {"dataset": "generated", "data_dir": None, "direction": "unidirectional", "max_length": 16, "chains": False,
           "share": 0.15, "validation_share": 0.1, "test_share": 0.1, "families": None,
           "held_out_families": None, "held_out_files": None, "generated": GENERATED, "preset": None, "sizes": SIZES,
           "positions": None, "tied": None, "dropout": 0.0, "checkpointing": False, "init": "scratch", "calibration": 2,
           "bucketed": True, "cache_dir": None}


@pytest.fixture
def typed(run_task):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    def run(*args, directory="run", processes=1):
        options = ["trainer.batch=16", "trainer.steps=6", "features.m=8", "task.max_length=16", "task.cache_dir=null",
                   "task.validation_share=0.1", "task.test_share=0.1", "attention=favorpp",
                   *[f"task.generated.{key}={value}" for key, value in GENERATED.items()],
                   *[f"+task.sizes.{key}={value}" for key, value in SIZES.items()]]
        if "attention=reformer" in args:
            options += ["attention.chunk=8", "attention.hashes=2", "attention.buckets=4"]
        return run_task("trembl", options, args, directory, processes)
    return run


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def task_of(**options):
    return TrEMBL(**OPTIONS | options)


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_it_learns_beyond_the_unigram(typed, tmp_path):
    code, out, err = typed("attention=exact", "trainer.steps=120", "trainer.lr=1e-2", "task.dropout=0")
    assert code == 0 and err == "" and "trembl: perplexity" in out, err
    last = records(tmp_path / "run")[-1]
    assert last["loss"] < np.log(last["unigram_perplexity"]) - 0.3 < last["loss_ood"]
    assert last["accuracy"] > last["unigram_accuracy"] + 0.05
    counts = {split: last[f"{split}_sequences"] for split in protein.SPLITS}
    assert sum(counts.values()) == 220 and counts["ood"] == 20 and last["train_length_min"] == 10
    assert {r["split"] for r in records(tmp_path / "run")} == {"train", "validation", "test"}


@pytest.mark.parametrize("attention", ["favorpp", "relu", "linformer", "reformer"])
def test_masked_letters(attention, typed, tmp_path):
    code, out, err = typed(f"attention={attention}", "task.direction=bidirectional")
    assert code == 0, err
    last, task = records(tmp_path / "run")[-1], task_of(direction="bidirectional")
    loaded = language.load(tmp_path / "run", "run").build()
    with torch.no_grad():
        found = task.evaluate(loaded, "test", Reader(task, batch=16))
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-5) and found["letters"] == last["letters"] < 60


def test_unigram_is_that_of_the_training_letters():
    task = task_of()
    model = task.build(Mechanism.of("exact")).eval()
    with torch.no_grad():
        found = task.evaluate(model, "validation", Reader(task))
    count = lambda split: np.bincount(np.concatenate([*task.rows[split]]), minlength=25)
    shares, seen = (count("train") + 1) / (count("train") + 1).sum(), count("validation")
    assert found["unigram_perplexity"] == pytest.approx(np.exp(-(seen * np.log(shares)).sum() / seen.sum()))
    assert found["unigram_accuracy"] == pytest.approx(seen[shares.argmax()] / seen.sum())
    assert found["letters"] == seen.sum()


def test_loss_is_the_mean_over_tokens_and_padding_counts_for_nothing():
    task = task_of(bucketed=False)
    model = task.build(Mechanism.of("exact")).eval()
    batch = next(iter(task.batches("train", Plan(8))))
    assert "key_mask" in batch and task.weight(batch) == (batch["labels"] != -100).sum()
    alone = [next(iter(task.batches("train", Plan(1))))]
    rows = [protein.next_tokens([task.rows["train"][i]], 16) for i in next(Plan(8).rows(task.length("train"), "train"))]
    total = sum(task.loss(model, row) * task.weight(row) for row in rows) / sum(map(task.weight, rows))
    torch.testing.assert_close(task.loss(model, batch), total)
    assert alone[0]["tokens"].shape[0] == 1


# ---- files -----------------------------------------------------------------------------------------------------------


def fasta(folder, n=150):
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    made = ["".join(rng.choice(list(protein.STANDARD), rng.integers(5, 30))) for _ in range(n)]
    return write(folder / "a.fasta", made)


def test_files_with_held_out_families(typed, tmp_path):
    fasta(tmp_path / "data")
    table = tmp_path / "families.tsv"
    table.write_text("uniprot_acc\tpfamA_acc\n" + "".join(f"{name(i)}\tPF{2 - i % 2}\n" for i in range(0, 150, 5)))
    code, _, err = typed("task.dataset=uniprot", f"task.data_dir={tmp_path / 'data'}", f"task.families={table}",
                         "task.held_out_families=[PF2]")
    last = records(tmp_path / "run")[-1]
    assert code == 0 and last["ood_sequences"] == 15 and last["perplexity_ood"] > 1, err


def test_runs_of_other_splits_are_refused(typed, tmp_path):
    """Their test sequences may be trained on: a resumed run's, and those of the run that a run starts from."""
    args = ["task.dataset=uniprot", f"task.data_dir={fasta(tmp_path / 'data').parent}", "attention=exact"]
    assert typed(*args, "trainer.steps=2", "trainer.save_every=1")[0] == 0
    model, step = tmp_path / "run/model/config.json", tmp_path / "run/checkpoints/step-2/state.json"
    model.write_text(model.read_text().replace('"split"', '"other"'))
    code, _, err = typed(*args, f"task.init={tmp_path / 'run'}", directory="other")
    assert code == 2 and "expected a run of task=trembl on the same task.dataset, split by letters" in err
    assert json.loads(step.read_text())["task"] == [{"split": "letters"}]
    with pytest.raises(ConfigError, match="began with other splits"):
        task_of(dataset="uniprot", data_dir=str(tmp_path / "data")).load_state_dict({})


# ---- transfer --------------------------------------------------------------------------------------------------------


def test_weights_move_into_another_attention(typed, tmp_path):
    """At step 0 with calibrated statistics: no warning, finite, and nearer to the exact model with more features."""
    assert typed("attention=exact", "trainer.steps=30", "trainer.lr=1e-2", "task.dropout=0")[0] == 0
    base, found = [f"task.init={tmp_path / 'run'}", "trainer.steps=0"], {}
    for directory, args in {"exact": ["attention=exact"], "few": ["features.m=2"], "many": ["features.m=512"]}.items():
        code, _, err = typed(*base, *args, directory=directory)
        assert code == 0 and err == "", err
        found[directory] = records(tmp_path / directory)[-1]["loss"]
    assert found["exact"] == pytest.approx(records(tmp_path / "run")[-1]["loss"], rel=1e-6)
    assert abs(found["many"] - found["exact"]) < abs(found["few"] - found["exact"])


def test_the_same_attention_goes_on_with_its_noise(typed, tmp_path):
    assert typed()[0] == 0
    code, _, err = typed(f"task.init={tmp_path / 'run'}", "trainer.steps=0", "seed=7", directory="same")
    assert code == 0, err
    one, two = (language.load(tmp_path / directory, "run").tensors for directory in ("run", "same"))
    assert all(torch.equal(one[key], two[key]) for key in one)


LINFORMER = ["attention=linformer", "attention.length=16", "attention.rank=4", "task.direction=bidirectional"]


@pytest.mark.parametrize("more", [
    [], pytest.param(["attention.redraw_every=2"], marks=pytest.mark.slow), [*LINFORMER, "attention.redraw_every=2"],
    pytest.param(["attention=reformer", "attention.redraw_every=2"], marks=pytest.mark.slow)], ids=str)
def test_micro_batches_change_nothing(more, typed, tmp_path):
    """Neither the statistics that causal features are fitted to, nor the noise, nor mixtures or hashes change within a
    step."""
    args = ["task.dropout=0", "trainer.log_every=1", *more]
    assert typed(*args)[0] == 0
    assert typed(*args, "trainer.accumulate=4", directory="micro")[0] == 0
    one, four = records(tmp_path / "run"), records(tmp_path / "micro")
    assert [r["loss"] for r in four] == pytest.approx([r["loss"] for r in one], rel=1e-4)


# ---- many processes, stopped and continued ---------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_equal_one(typed, tmp_path):
    """Their batches hold other numbers of letters: the mean runs over all of them. Running statistics are pooled over
    the processes and micro-batches of a step."""
    assert typed("task.dropout=0")[0] == 0
    code, _, err = typed("task.dropout=0", "trainer.accumulate=2", directory="two", processes=2)
    assert code == 0, err
    one, two = records(tmp_path / "run"), records(tmp_path / "two")
    assert one[-1].keys() == two[-1].keys() and one[-1]["letters"] == two[-1]["letters"]
    for key in ("loss", "loss_ood", "unigram_perplexity"):
        assert two[-1][key] == pytest.approx(one[-1][key], rel=1e-4)


@pytest.mark.slow
def test_sharded_over_processes_in_bfloat16(typed, tmp_path):
    """Blocks and what follows them; the model that is kept is whole, and its numbers nearly those of one process."""
    layers = ["+task.sizes.layers=2", "task.dropout=0"]
    assert typed(*layers)[0] == 0
    code, _, err = typed(*layers, "trainer=fsdp", directory="two", processes=2)
    assert code == 0, err
    one, two = (records(tmp_path / directory)[-1] for directory in ("run", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert language.load(tmp_path / "two", "run").build().symbol.weight.dtype == torch.float32


@pytest.mark.parametrize("attention", ["favorpp", pytest.param("reformer", marks=pytest.mark.slow)])
def test_a_stopped_run_continues_to_the_same_numbers(attention, typed, tmp_path, monkeypatch, interruptible):
    """Dropout, statistics and hashes included."""
    args = [f"attention={attention}", "trainer.steps=15", "trainer.save_every=5", "trainer.log_every=2"]
    assert typed(*args)[0] == 0
    stopped_and_continued(typed, monkeypatch, TrEMBL, 12, *args)
    assert records(tmp_path / "stopped") == records(tmp_path / "run")
    one, two = (checkpoint.load_tensors(tmp_path / d / "model" / "model.safetensors") for d in ("run", "stopped"))
    assert all(torch.equal(one[key], two[key]) for key in one)


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["task.dataset=uniprot"], ["CRT_DATA is not set", "crt_exp.data fetch protein"]),
    (["task.dataset=uniprot", "task.data_dir=/nowhere"], ["/nowhere", "is not there"]),
    (["task.direction=both"], ["task.direction=both", "unidirectional or bidirectional"]),
    (["task.validation_share=0.6", "task.test_share=0.5"], ["expected < 1"]),
    (["task.validation_share=1e-9"], ["validation: none of"]),
    (["task.families=x.tsv"], ["task.dataset=generated: expected no task.data_dir, task.families"]),
    (["task.held_out_families=[PF1]"], ["task.held_out_families: expected", "task.families=FILE"]),
    (["task.generated.shortest=20"], ["task.generated.shortest=20: expected at most longest=16"]),
    (["task.generated.copied=1.5"], ["task.generated.copied=1.5", "< 1"]),
    (["+task.sizes.head=2"], ["did you mean task.sizes.heads?"]),
    (["+task.sizes.heads=3"], ["task.sizes.d=16: expected a multiple of heads=3"]),
    (["task.preset=huge"], ["task.preset=huge", "performer36"]),
    (["task.positions=rotary", "+task.sizes.d=6"], ["task.positions=rotary: d / heads"]),
    (["task.init=/nowhere"], ["task.init=/nowhere: no such directory"]),
    (["attention=linformer"], ["causal=True: not supported by attention=linformer"]),
    (["task.chains=true", "task.max_length=1000"], ["task.max_length=1000: validation has too few symbols"]),
], ids=str)
def test_bad_options(args, words, typed, tmp_path):
    check_refused(typed(*args), words, tmp_path / "run")


def test_what_a_run_cannot_be_started_from(typed, tmp_path):
    assert typed("trainer.steps=0", "attention=favorp")[0] == 0
    init = f"task.init={tmp_path / 'run'}"
    for args, words in [(["task.direction=bidirectional"], "task.direction: differs from task.init="),
                        (["task.max_length=17"], "expected at most the 16 positions of task.init="),
                        (["task.preset=small"], "task.preset and task.sizes: differs from task.init="),
                        (["+task.sizes.layers=2"], "task.preset and task.sizes: differs from task.init="),
                        (["task.positions=rotary"], "task.positions: differs from task.init=")]:
        code, _, err = typed(init, *args, directory="other")
        assert code == 2 and words in err, err
    code, _, err = typed(init, "+task.sizes.layers=1", "task.positions=learned", "trainer.steps=0", directory="other")
    assert code == 0, err
