"""What is timed, at tiny sizes: each arm takes its turn, rows say whose they are, and pages judge by process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp.report import draws, page, render
from crt_exp.report.evidence import Unmeasured, independent
from crt_exp.report.page import Page
from crt_exp.report.pages import fig4_right, proteins_long
from crt_exp.probes import grid, timed
from crt_exp.probes.cells import Draw
from crt_exp.probes.grid import Part
from crt_exp.probes.timed import FORMED
from crt_exp.times import in_new_process

COMMITTED = Path(__file__).parents[2] / "outputs/report"
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


@pytest.mark.parametrize("favorpp, word", [(1.0, "holds"), (3.0, "fails")])
def test_verdicts_on_steps_follow_the_times_of_processes(favorpp, word, tmp_path):
    """Two rounds of each of three processes; exact attention takes a multiple of the tokens."""
    base = {"exact": lambda n: 3 * n * n / 3136, "favorp": float, "favorpp": lambda n: favorpp * n, "uniform": float}
    rows = [Draw("vit", arm, "ms", of(n) * (1 + 0.01 * np.sin(3 * i + len(arm))), i // 2, n)
            for arm, of in base.items() for n in (784, 3136, 12544) for i in range(6)]
    rows += [Draw("vit", arm, "mib", 2.0 * n * (n / 784 if arm == FORMED else 1), x=n)
             for arm in (*base, FORMED) for n in (784, 3136)]
    draws.write("fig4-right", rows, tmp_path)
    made = Page("fig4-right", tmp_path)
    words = [verdict.word for verdict in made.verdicts]
    assert words == [word, "not comparable", *[word] * 2]
    assert "L^1.00 with exact" in str(made.verdicts[1]) and "L^2.00 where one is formed" in str(made.verdicts[1])
    times = [made.values("ms", arm=arm, x=3136.0, log=True) for arm in ("exact", "favorpp")]
    assert fig4_right.ratio(made, 3136.0, "exact", "favorpp") == independent((times[0] / times[1]).to_numpy())


@pytest.mark.slow
def test_fig4_right_at_small_sizes(tmp_path, monkeypatch, one_thread):
    """The real measurement; memory comes from processes of its own."""
    monkeypatch.chdir(tmp_path)
    steps, _, memory, _ = page.load("fig4-right")["sizes"]["small"]["parts"]
    parts = [steps | {"settings": {"": {"tokens": 64, "rounds": 2}}, "seeds": 2}, memory | {"sweep": {"tokens": [64]}}]
    made = [*grid.measure("mine", [], {"parts": parts})]
    assert len(made) == 5 * (2 * 2 + 1) and {draw.unit for draw in made if draw.metric == "ms"} == {0, 1}
    assert all(draw.value > 0 for draw in made)


# ---- language models of proteins


@pytest.mark.parametrize("speed, word", [(1.3, "holds"), (0.7, "fails")])
def test_bars_of_proteins_long_are_judged_by_process(speed, word, tmp_path):
    """Rounds of a process are not independent: six rounds of three processes count as three."""
    made = []
    for bar in proteins_long.BARS:
        times = bar.metric == "ms"
        ratio = bar.bound * (1 / speed if times else speed)
        for unit, noise in enumerate((0.99, 1.0, 1.01)):
            for turn in (0.98, 1.02):
                made += [Draw(bar.setting, arm, bar.metric, value * turn, unit, x, "time")
                         for (arm, x), value in ((bar.over, ratio * noise), (bar.under, 1.0))]
    draws.write("proteins-long", made, tmp_path)
    verdicts = Page("proteins-long", tmp_path).families["bars"]
    assert [verdict.word for verdict in verdicts] == 5 * [word]
    assert {verdict.claim.difference.n for verdict in verdicts} == {3}


def test_bars_without_draws_say_what_is_left():
    first, *_ = Page("proteins-long", COMMITTED).families["bars"]
    if isinstance(first, Unmeasured):
        assert "only medians are left; their mean is 14.4 ± 0.335 times (bar: at least 4)" in str(first)
    else:
        assert first.claim.difference.n > 1


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


def test_proteins_long_at_tiny_sizes(tmp_path, monkeypatch, one_thread):
    """The real measurement of tiny models on short rows, in this process, without training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("crt_exp.probes.cells.in_new_process", lambda run, **given: run(**given))
    small = {"sizes": TINY, "letters": 128, "heads": 2, "d": 8, "m": 8, "positions": [8, 20], "rounds": 2, "warm": 0}
    parts = page.load("proteins-long")["sizes"]["small"]["parts"]
    for part in parts:
        part["probe"] = {key: small.get(key, value) for key, value in part["probe"].items()}
        part |= {"sweep": {"length": [32, 64]}} if "sweep" in part else {"seeds": 1}
        if part["fields"][0]["metric"] == "letters_per_s":
            part["settings"] = {[*part["settings"]][-1]: {"lengths": [32, 64], "rounds": 2}}
    made = [*grid.measure("proteins-long", ["probes/timed.py"], {"parts": parts})]
    shown = {(draw.setting, draw.metric, draw.x) for draw in made if draw.arm == "favorpp"}
    assert {("attention layer", "letters_per_s", 32), ("wide model", "letters_per_s", 64), ("model", "mib", 64),
            ("drawing letters", "ms", 20), ("model, all lengths in turn", "letters_per_s", 32)} < shown
    assert {(draw.metric, draw.x) for draw in made if draw.arm == FORMED} == {("mib", 32), ("mib", 64)}
    draws.write("proteins-long", made, tmp_path)
    assert "| FAVOR++ |" in render.text(Page("proteins-long", tmp_path), False)


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
