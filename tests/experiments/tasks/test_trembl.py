"""task=trembl: the unigram baseline, splits of families and files, micro-batches and processes, what does not fit."""

import numpy as np
import pytest
import torch
from helpers.small_proteins import name, write
from helpers.task_options import GENERATED, options_of

from crt_exp.experiments.data import DataError, protein
from crt_exp.experiments.tasks.base import Reader
from crt_exp.experiments.tasks.trembl import TrEMBL
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

SIZES = {"heads": 2, "layers": 1, "d_ff": 32, "d": 16}
OPTIONS = options_of("trembl") | {
    "max_length": 16,
    "validation_share": 0.1,
    "test_share": 0.1,
    "generated": GENERATED | {"seed": 0},
    "sizes": SIZES,
    "dropout": 0.0,
    "calibration": 2,
    "cache_dir": None,
}


def task_of(**options):
    return TrEMBL(**OPTIONS | options)


# ---- loss and metrics ------------------------------------------------------------------------------------------------


def test_unigram_is_that_of_the_training_letters():
    task = task_of()
    model = task.build(Mechanism.of("exact")).eval()
    with torch.no_grad():
        found = task.evaluate(model, "validation", Reader(task))

    def count(split):
        return np.bincount(np.concatenate([*task.splits[split]]), minlength=25)

    shares = (count("train") + 1) / (count("train") + 1).sum()
    seen = count("validation")
    actual = found["unigram_perplexity"]
    expected = np.exp(-(seen * np.log(shares)).sum() / seen.sum())
    assert actual == pytest.approx(expected)
    actual = found["unigram_accuracy"]
    expected = seen[shares.argmax()] / seen.sum()
    assert actual == pytest.approx(expected)
    assert found["letters"] == seen.sum()


# ---- files -----------------------------------------------------------------------------------------------------------


def fasta(folder, n=150):
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    made = []
    for _ in range(n):
        made.append("".join(rng.choice(list(protein.STANDARD), rng.integers(5, 30))))
    return write(folder / "a.fasta", made)


def test_files_with_held_out_families(tmp_path):
    table = tmp_path / "families.tsv"
    families = (protein.HELD_OUT[0], "PF1")
    table.write_text(
        "uniprot_acc\tpfamA_acc\n"
        + "".join(f"{name(i)}\t{families[i % 2]}\n" for i in range(0, 150, 5))
    )
    task = task_of(
        dataset="uniprot",
        data_dir=str(fasta(tmp_path / "data").parent),
        families=str(table),
    )
    assert len(task.splits["ood"]) == 15


def test_runs_of_other_splits_are_refused(tmp_path):
    """Their test sequences may be trained on."""
    given = {"dataset": "uniprot", "data_dir": str(fasta(tmp_path / "data").parent)}
    task = task_of(**given)
    config = tmp_path / "model" / "config.json"
    model = task.build(Mechanism.of("exact"))
    task.export(model, model.state_dict(), tmp_path)
    config.write_text(config.read_text().replace('"split"', '"other"'))
    with pytest.raises(
        ConfigError,
        match="expected a run of task=trembl on the same task.dataset, split by letters",
    ):
        task_of(**given, init=str(tmp_path))


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dataset": "uniprot"}, "(?s)CRT_DATA is not set.*crt_exp data fetch protein"),
        ({"validation_share": 0.6, "test_share": 0.5}, "expected < 1"),
        ({"validation_share": 1e-9}, "validation: none of"),
        ({"families": "x.tsv"}, "task.dataset=generated: expected no task.data_dir, task.families"),
        (
            {"chains": True, "max_length": 1000},
            "task.max_length=1000: validation has too few symbols",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, words, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)
    with pytest.raises((ConfigError, DataError), match=words):
        task_of(**options).build(Mechanism.of("exact"))


def test_unsuitable_starting_runs_are_refused(tmp_path):
    task = task_of()
    model = task.build(Mechanism.of("favorp", m=8))
    task.export(model, model.state_dict(), tmp_path)
    cases = [
        ({"direction": "bidirectional"}, "task.direction: differs from task.init="),
        ({"max_length": 17}, "expected at most the 16 positions of task.init="),
        ({"preset": "small"}, "task.preset and task.sizes: differs from task.init="),
        ({"sizes": {"layers": 2}}, "task.preset and task.sizes: differs from task.init="),
        ({"positions": "rotary"}, "task.positions: differs from task.init="),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            task_of(init=str(tmp_path), **{"sizes": {}} | options)
    actual = task_of(init=str(tmp_path), sizes={"layers": 1}, positions="learned").description
    assert actual == task.description
