"""What hrf-lm measures: language models and estimates of their laws over words."""

import numpy as np
import pytest

from crt_exp.measure import grid, language_laws
from crt_exp.oldreport import page


def text_files(folder):
    rng = np.random.default_rng(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        rows = [" ".join(rng.choice(list("abcdef"), 6)) for _ in range(lines)]
        (folder / f"ptb.{split}.txt").write_text("\n".join(rows) + "\n")
    return folder


def test_hybrids_have_about_as_many_operations_as_the_other_arms():
    hybrids = ("hrf_angular", "hrf_gaussian")
    made = {arm: language_laws.mechanism_of(arm, 64, seed=3) for arm in ("favorp", *hybrids)}
    assert [each.m for each in made.values()] == [64, 8, 8]
    assert [made[arm].features.content["n"] for arm in hybrids] == 2 * [8]


@pytest.mark.slow
def test_the_measurement_at_a_tiny_size(tmp_path, monkeypatch, one_thread):
    """Every draw that the page asks for is there, of one run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ptb").mkdir()
    monkeypatch.setenv("CRT_DATA", str(text_files(tmp_path / "ptb").parent))
    run = ["task=ptb", "task.corpus=ptb", "task.width=8", "trainer.epochs=2", "trainer.batch=4", "task.bptt=5",
           "task.dropout=0", "trainer.lr=1e-2"]
    size = dict(page.load("hrf-lm")["sizes"]["small"])
    start = {"Model": {"start": {"start": "model"}}}
    reached, controls, drawn, whole = ({**part, "settings": start, "workers": 1} for part in size["parts"])
    controls["probe"] = {**controls["probe"], "every": 3, "ms": [8, 16]}
    drawn |= {"probe": {**drawn["probe"], "every": 3}, "sweep": {"m": [8, 16]}, "seeds": 2,
              "arms": ["favor", "favorp", "hrf_angular"]}
    size |= {"starts": {"model": {"stages": [run], "sources": "exact"}}, "workers": 1,
             "parts": [reached, controls, drawn, {**whole, "arms": {"favorp": "favorp m=8"}}]}
    draws = [*grid.measure("hrf-lm", ["tasks/ptb.py"], size)]
    of = {(draw.arm, draw.table, draw.metric): draw for draw in draws}
    distances = [draw for draw in draws if draw.metric == "ks_index"]
    assert len(distances) == 2 * 2 + 3 * 2 * 2 and all(0 <= draw.value <= 1 for draw in distances)
    assert {"loss", "squared_norm", "error_ratio"} <= {draw.metric for draw in draws if draw.table == "model"}
    assert of["unigram", "model", "loss"].value > 0 and of["favorp", "all words", "words"].value == 12 * 7
    assert len([path for path in (tmp_path / "outputs/runs").iterdir() if path.is_dir()]) == 1
