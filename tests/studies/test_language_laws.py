"""What hrf-lm measures: language models and estimates of their laws over words."""

import numpy as np
import pytest

from crt_exp.report import page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import language_laws
from crt_exp.studies.language_laws import COEFFICIENTS, HYBRIDS


def text_files(folder):
    rng = np.random.default_rng(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        rows = [" ".join(rng.choice(list("abcdef"), 6)) for _ in range(lines)]
        (folder / f"ptb.{split}.txt").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("size", ["small", "gpu", "full"])
def test_every_model_is_a_command_line(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    models = page.load("hrf-lm")["sizes"][size]["models"]
    for run in [model["run"] for model in models.values()]:
        check_command_line([*run, "trainer.keep=1", "resume=auto", "logger=none", "hydra.run.dir=run"])


def test_hybrids_have_about_as_many_operations_as_the_other_arms():
    made = {arm: language_laws.mechanism_of(arm, 64, seed=3) for arm in ("favorp", *HYBRIDS)}
    assert [each.m for each in made.values()] == [64, 8, 8]
    assert [made[arm].features.content["n"] for arm in HYBRIDS] == 2 * [COEFFICIENTS]


@pytest.mark.slow
def test_the_measurement_at_a_tiny_size(tmp_path, monkeypatch, one_thread):
    """Every draw that the page asks for is there, of one run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ptb").mkdir()
    monkeypatch.setenv("CRT_DATA", str(text_files(tmp_path / "ptb").parent))
    run = ["task=ptb", "task.corpus=ptb", "task.width=8", "trainer.epochs=2", "trainer.batch=4", "task.bptt=5",
           "task.dropout=0", "trainer.lr=1e-2"]
    size = {"models": {"Model": {"run": run, "every": 3}}, "arms": ["favor", "favorp", "hrf_angular"], "ms": [8, 16],
            "draws": 2, "whole": [["favorp", 8]], "workers": 1}
    draws = [*language_laws.measure("hrf-lm", ["tasks/ptb.py"], size)]
    of = {(draw.arm, draw.table, draw.metric): draw for draw in draws}
    distances = [draw for draw in draws if draw.metric == "ks_index"]
    assert len(distances) == 2 * 2 + 3 * 2 * 2 and all(0 <= draw.value <= 1 for draw in distances)
    assert {"loss", "squared_norm", "error_ratio"} <= {draw.metric for draw in draws if draw.table == "model"}
    assert of["unigram", "model", "loss"].value > 0 and of["favorp", "all words", "words"].value == 12 * 7
    assert len([path for path in (tmp_path / "outputs/runs").iterdir() if path.is_dir()]) == 1
