"""What is timed, at tiny sizes: each arm takes its turn, rows say whose they are, and pages judge by process."""

import pytest
import torch

from crt_exp.measure import grid, timed
from crt_exp.measure.grid import Part
from crt_exp.measure.timed import FORMED
from crt_exp.oldreport import page
from crt_exp.times import in_new_process

TINY = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}


def cell(name, part=0, **probe):
    """The rows of the first cell of a part, at another size."""
    *_, key = next(Part.read(page.load(name)["sizes"]["small"]["parts"][part]).places())
    return grid.rows(**key | {"probe": key["probe"] | probe}), key["arms"]


@pytest.mark.usefixtures("one_thread")
def test_attention_of_every_kind_of_rows_is_timed():
    rows, arms = cell("hadamard", 2, length=8, m=4, rounds=1)
    assert [row["arm"] for row in rows] == [*arms] and "exact" in arms and all(row["ms"] > 0 for row in rows)


# ---- vision transformers


def test_every_method_of_fig4_right_steps(one_thread):
    """Each has its own attention in every layer and none is left behind; exact and the formed matrix agree."""
    for name in page.load("fig4-right")["sizes"]["small"]["parts"][0]["arms"]:
        step = timed.vit_step(name, 16, 256)
        swapped = [block.attn for block in step.model.blocks if hasattr(block.attn, "swapped")]
        assert len(swapped) == (0 if name.startswith("exact") else 12)
        step()
        assert step.model.training and not any(p.grad.any() for p in step.model.parameters())
    outputs = [timed.vit(name, 16, 256).eval()(timed.image(16)) for name in ("exact", FORMED)]
    assert torch.allclose(*outputs, atol=1e-5)
    with pytest.raises(ValueError, match="15 patches make no square"):
        timed.vit("exact", 15, 256)


# ---- language models of proteins


def test_models_and_layers_step_with_their_own_attention(one_thread):
    """Exact attention and that which forms its matrix are the same; no gradient is left behind."""
    layer = timed.LayerStep("favorpp", 32, 2, heads=2, d=8, m=8)
    for step in (layer, timed.model_step("uniform", 32, 2, TINY, 4), timed.model_step(FORMED, 32, 2, TINY, 4)):
        step()
        left = [t.grad for t in (step.given if step is layer else step.model.parameters())]
        assert not any(grad is not None and grad.any() for grad in left)
    one, two, other = (timed.language_model(name, 32, TINY, 4)(timed.random_letters(1, 32))
                       for name in ("exact", FORMED, "uniform"))
    assert torch.allclose(one, two, atol=1e-5) and not torch.allclose(one, other, atol=1e-5)


def test_letters_a_second_are_those_of_whole_rows(monkeypatch):
    """Two rows of 32 in 64 letters, and one of 64 or more; a step of so many milliseconds as it has rows."""
    monkeypatch.setattr(timed, "in_turns", lambda steps, rounds: {key: [steps[key]] * rounds for key in steps})
    rows = [*timed.letters_read(lambda name, length, rows: rows, ["exact"], [32, 64, 128], 64, 2)]
    assert [row["letters_per_s"] for row in rows] == [[32e3, 32e3], [64e3, 64e3], [128e3, 128e3]]


# ---- recognition


def test_every_method_of_the_encoder_hears(one_thread, monkeypatch):
    """Each has its own attention in every layer."""
    monkeypatch.setitem(timed.PRESETS, "paper", timed.PRESETS["paper"] | {"channels": 8})
    arms = {"exact": "exact", "FAVOR++": "favorpp m=16", "uniform": "uniform"}
    for text in arms.values():
        model = timed.encoder(text, 2)
        assert sum(hasattr(layer.self_attn, "swapped") for layer in model.layers) == (0 if text == "exact" else 2)
        timed.hear(model, timed.audio(1))
    rows = [*timed.encoder_times(arms, 1, 2, 2, 0)]
    assert [row["arm"] for row in rows] == [*arms] and {len(row["seconds"]) for row in rows} == {3}
    # what this process has freed might suffice here, and nothing would be added
    assert in_new_process(timed.encoder_memory, arm="exact", seconds=2, layers=1, seed=0)["mib"] > 0
