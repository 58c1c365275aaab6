"""Errors on their way through layers: of random weights, of a trained encoder, and how they grow."""

import pytest
from small_bert import write_model, write_text

from crt_exp.mechanism import Mechanism
from crt_exp.measure import attention_errors
from crt_exp.measure.attention_errors import Random, Sums, Trained


def errors(rows):
    return {row["kind"]: row["error"] for row in rows}


def test_errors_of_a_trained_encoder_are_those_of_its_attention(tmp_path, monkeypatch):
    """Exact attention makes none; the first layer's own is the same for both kinds; nothing of the swap stays."""
    given = str(write_model(tmp_path / "bert", num_hidden_layers=3, initializer_range=0.5)), 12, 3
    text = write_text(tmp_path / "valid.txt")
    monkeypatch.setattr(attention_errors, "official_file", lambda *_: text)
    monkeypatch.chdir(tmp_path)
    of = lambda arm, sample=1: errors(Trained(*given).records(Mechanism.parse(arm), sample))
    assert max(error or 0 for kind in of("exact").values() for error in kind) < 1e-5
    uniform, pos = of("uniform"), of("pos m=8")
    assert all(len(kind) == 3 for found in (uniform, pos) for kind in found.values())
    assert pos["accumulated"][0] == pytest.approx(pos["propagated"][0]) and min(pos["propagated"]) > 1e-4
    assert pos["accumulated"][2] != pos["propagated"][2] and 0 < pos["output"][0] < pos["accumulated"][0]
    assert pos != of("pos m=8", 0) and of("pos m=8") == pos
    assert not [name for name, _ in attention_errors.subject(*given).model.named_modules() if "swapped" in name]
    assert [row["layer"] for row in Sums(*given).records(Mechanism.of("exact"), 0)] == [[1, 2, 3]]


def test_growth_is_from_the_first_layer_that_an_error_reaches():
    found = [*Random(4, length=16, heads=8, d=64, depth=3).records(Mechanism.parse("pos m=8 sampler=iid"), 0)]
    of, growth = errors(found), {row["kind"]: row["growth"] for row in found}
    assert [len(each) for each in of.values()] == [3, 3, 3] and of["accumulated"][0] == of["propagated"][0]
    assert growth["output"] == of["output"][2] / of["output"][0]
    assert growth["propagated"] == of["propagated"][2] / of["propagated"][1]
    assert [*attention_errors.by_layer({"propagated": [0.0, 2.0, 1.0]})][0]["error"] == [None, 2.0, 1.0]
