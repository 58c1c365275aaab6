"""Errors on their way through layers: of random weights, of a trained encoder, and as draws."""

import pytest
from small_bert import write_model, write_text

from crt_exp.studies import propagation
from crt_exp.studies.cells import Cells


def test_errors_of_a_trained_encoder_are_those_of_its_attention(tmp_path, monkeypatch):
    """Exact attention makes none; the first layer's own is the same for both kinds; nothing of the swap stays."""
    start = str(write_model(tmp_path / "bert", num_hidden_layers=3, initializer_range=0.5))
    text = write_text(tmp_path / "valid.txt")
    monkeypatch.setattr(propagation, "official_file", lambda *_: text)
    monkeypatch.chdir(tmp_path)
    of = lambda arm, sample=1: propagation.trained_errors(start, 12, 3, arm, sample)
    assert max(max(errors) for errors in of("exact").values()) < 1e-5
    uniform, pos = of("uniform"), of("pos m=8")
    assert all(len(kind) == 3 for found in (uniform, pos) for kind in found.values())
    assert pos["accumulated"][0] == pytest.approx(pos["propagated"][0]) and min(pos["propagated"]) > 1e-4
    assert pos["accumulated"][2] != pos["propagated"][2] and 0 < pos["output"][0] < pos["accumulated"][0]
    assert pos != of("pos m=8", 0) and of("pos m=8") == pos
    assert not [name for name, _ in propagation.subject(start, 12, 3).model.named_modules() if "swapped" in name]
    assert len(propagation.sums(start, 12, 3)) == 3


def test_draws_are_errors_by_layer_and_their_growth(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(propagation, "L", 16)
    monkeypatch.setattr(propagation, "DEPTH", 3)
    cells, key = Cells("fig14", ["studies/propagation.py"]), {"S": 4, "arm": "pos m=8 sampler=iid", "sample": 0}
    cells.fill([key], propagation.random_errors, "errors", workers=1)
    draws = [*propagation.of_cell(cells, key, "random", "pos m=8 sampler=iid", 0)]
    errors = {(draw.table, draw.x): draw.value for draw in draws if draw.metric == "error"}
    growth = {draw.table: draw.value for draw in draws if draw.metric == "growth"}
    assert len(errors) == 9 and errors["accumulated", 1] == errors["propagated", 1]
    assert growth["output"] == errors["output", 3] / errors["output", 1]
    assert growth["propagated"] == errors["propagated", 3] / errors["propagated", 2]
