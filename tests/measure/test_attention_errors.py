"""Errors from layer to layer: of random weights, of a trained encoder, and how they grow; the bias of samplers."""

import pytest
from small_bert import write_model, write_text

from crt_exp.mechanism import Mechanism
from crt_exp.measure import attention_errors
from crt_exp.measure.attention_errors import ErrorByLayer, KernelBias

SIZES = {"sum": 4, "length": 16, "heads": 8, "d": 64, "depth": 3, "texts": 3}


def errors(task, text, seed=1):
    return next(task.records(Mechanism.parse(text), seed))["error"]


def test_errors_of_a_trained_encoder_are_those_of_its_attention(tmp_path, monkeypatch):
    """Nothing of the swap stays."""
    given = str(write_model(tmp_path / "bert", num_hidden_layers=3, initializer_range=0.5))
    text = write_text(tmp_path / "valid.txt")
    monkeypatch.setattr(attention_errors, "official_file", lambda *_: text)
    monkeypatch.chdir(tmp_path)
    task = ErrorByLayer(**SIZES | {"length": 12}, init=given)
    uniform, pos = errors(task, "uniform"), errors(task, "pos m=8")
    assert len(uniform) == len(pos) == 3 and min(uniform + pos) > 1e-4
    assert pos != errors(task, "pos m=8", 0) and errors(task, "pos m=8") == pos
    assert not [name for name, _ in task.source.model.named_modules() if "swapped" in name]


def test_growth_is_from_the_first_layer_to_the_last():
    [found] = ErrorByLayer(**SIZES).records(Mechanism.parse("pos m=8 sampler=iid"), 0)
    assert found["layer"] == [1, 2, 3] and found["growth"] == found["error"][2] / found["error"][0] and found["final"]
    with pytest.raises(ValueError, match="attention=exact"):
        next(ErrorByLayer(**SIZES).rows(Mechanism.of("exact"), 0))


def test_hadamard_rows_of_one_block_are_biased_along_an_axis_only():
    [biased], [exact] = (KernelBias(16, 4000).rows(Mechanism.parse(f"pos sampler={sampler}"), 0)
                         for sampler in ("hadamard sampler.blocks=1", "orthogonal"))
    assert biased["at_unit"] < 0.7 and abs(exact["at_unit"] - 1) < 4 * exact["at_unit_error"]
