"""GLUE without a model."""

import numpy as np
from small_bert import write_glue

from crt_exp.probes import glue_controls


def test_answers_without_a_model(tmp_path, monkeypatch):
    """Words of both sentences over words of either; the cut of a class task is the best one of training."""
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    for name, folder in (("sst2", "SST-2"), ("stsb", "STS-B")):
        write_glue(tmp_path / "glue" / folder, name)
    shared = np.array([0.1, 0.2, 0.6, 0.9])
    assert glue_controls.cut("mrpc", shared, [0, 0, 1, 1], np.array([0.0, 0.7, 1.0])) == [0, 1, 1]
    assert glue_controls.cut("rte", shared, [1, 1, 0, 0], np.array([0.0, 1.0])) == [1, 0]
    row, = glue_controls.scores("", "sst2", 0)
    assert row["arm"] == "majority class" and 0 <= row["accuracy"] <= 1
    answers, labels = glue_controls.answers_of("stsb")["word overlap"]
    assert len(answers) == len(labels) == 12 and min(answers) >= 0
