"""proteins-long: what it measures, and that its bars are judged by process."""

from pathlib import Path

import pytest
import torch

from crt_exp.report import draws, page, render
from crt_exp.report.evidence import Unmeasured
from crt_exp.report.page import Page
from crt_exp.report.pages import proteins_long
from crt_exp.probes import grid, protein_steps
from crt_exp.probes.cells import Draw
from crt_exp.probes.protein_steps import FORMED, LAYER, MODEL, WIDE

COMMITTED = Path(__file__).parents[2] / "outputs/report"


@pytest.mark.parametrize("speed, word", [(1.3, "holds"), (0.7, "fails")])
def test_bars_are_judged_by_process(speed, word, tmp_path):
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
        assert "only medians are left; of this difference the mean over processes, +10.4 ± 0.335" in str(first)
    else:
        assert first.claim.difference.n > 1


def test_every_part_steps_with_its_own_attention(one_thread, monkeypatch):
    """Exact attention and that which forms its matrix are the same; no gradient is left behind."""
    monkeypatch.setattr(protein_steps, "A_STEP", 64)
    for part, name in ((LAYER, "favorpp"), (MODEL, "uniform"), (MODEL, FORMED)):
        case = protein_steps.Case(name, 32, protein_steps.rows(part, 32))
        step = case.step(part)
        step()
        left = [t.grad for t in (step.given if part == LAYER else step.model.parameters())]
        assert protein_steps.rows(part, 32) == 2 and not any(grad is not None and grad.any() for grad in left)
    sizes = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}
    one, two, other = (protein_steps.language_model(name, 32, sizes, 4)(protein_steps.drawn(1, 32))
                       for name in ("exact", FORMED, "uniform"))
    assert torch.allclose(one, two, atol=1e-5) and not torch.allclose(one, other, atol=1e-5)


def test_letters_are_drawn_at_their_positions(one_thread):
    sizes = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}
    found = protein_steps.generation(["exact", "favorpp"], [5, 20], 3, sizes, 4)
    assert [len(values) for values in found] == 4 * [3]


def test_draws_of_steps_memory_and_letters(tmp_path, monkeypatch, one_thread):
    """The real measurement of tiny models on short rows, in this process, without training."""
    monkeypatch.chdir(tmp_path)
    small = {"heads": 2, "layers": 1, "d_ff": 8, "d": 16}
    for name, value in {"A_STEP": 128, "SIZES": {MODEL: small, WIDE: small}, "WARM": 0, "HEADS": 1, "D": 8}.items():
        monkeypatch.setattr(protein_steps, name, value)
    monkeypatch.setattr("crt_exp.probes.cells.in_new_process", lambda run, **given: run(**given))
    monkeypatch.setattr(grid, "measure", lambda *_: iter([Draw("chains of proteomes", "exact", "loss", 2.9, 0)]))
    size = page.load("proteins-long")["sizes"]["small"]
    size |= {"lengths": [32, 64], "long": 64, "processes": 1, "positions": [8, 20], "letters": 2, "drawn": "tiny"}
    made = [*protein_steps.measure("proteins-long", ["probes/protein_steps.py"], size)]
    shown = {(draw.setting, draw.metric, draw.x) for draw in made if draw.arm == "favorpp"}
    assert {(LAYER, "letters_per_s", 32), (WIDE, "letters_per_s", 64), ("drawing letters", "ms", 20),
            (MODEL, "mib", 64), ("model, all lengths in turn", "letters_per_s", 32)} < shown
    assert [draw.x for draw in made if draw.arm == FORMED] == [32, 64]
    draws.write("proteins-long", made, tmp_path)
    assert "| FAVOR++ |" in render.text(Page("proteins-long", tmp_path), False)
