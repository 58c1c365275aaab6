"""The encoder of a recogniser with each attention: it hears, in turns, and its memory is measured."""

import pytest

from crt_exp.probes import encoder_steps


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(encoder_steps.PRESETS, "paper", encoder_steps.PRESETS["paper"] | {"channels": 8})


def test_every_method_of_the_encoder_hears(one_thread, small):
    """Each has its own attention in every layer."""
    arms = {"exact": "exact", "FAVOR++": "favorpp m=16", "uniform": "uniform"}
    for text in arms.values():
        model = encoder_steps.encoder(text, 2)
        assert sum(hasattr(layer.self_attn, "swapped") for layer in model.layers) == (0 if text == "exact" else 2)
        encoder_steps.hear(model, encoder_steps.audio(1))
    rows = [*encoder_steps.times(arms, 1, 2, 2, 0)]
    assert [row["arm"] for row in rows] == [*arms] and {len(row["seconds"]) for row in rows} == {3}
    assert encoder_steps.memory("exact", 2, 1, 0)["mib"] > 0
