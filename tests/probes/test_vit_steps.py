"""Training steps of ViTs with other attention, and their page."""

import numpy as np
import pytest
import torch

from crt_exp.report import page
from crt_exp.report.evidence import independent
from crt_exp.report.pages import fig4_right
from crt_exp.probes import grid, timed
from crt_exp.probes.cells import Draw


def test_every_method_of_fig4_right_steps(one_thread):
    """Each has its own attention in every layer and none is left behind; exact and the formed matrix agree."""
    for name in page.load("fig4-right")["sizes"]["small"]["parts"][0]["arms"]:
        step = timed.vit_step(name, 16, 256)
        swapped = [block.attn for block in step.model.blocks if hasattr(block.attn, "swapped")]
        assert len(swapped) == (0 if name.startswith("exact") else 12)
        step()
        assert step.model.training and not any(p.grad.any() for p in step.model.parameters())
    outputs = [timed.vit(name, 16, 256).eval()(timed.image(16)) for name in ("exact", timed.FORMED)]
    assert torch.allclose(*outputs, atol=1e-5)
    with pytest.raises(ValueError, match="15 patches make no square"):
        timed.vit("exact", 15, 256)


@pytest.mark.parametrize("favorpp, word", [(1.0, "holds"), (3.0, "fails")])
def test_verdicts_on_steps_follow_the_times_of_processes(favorpp, word, tmp_path):
    """Two rounds of each of three processes; exact attention takes a multiple of the tokens."""
    base = {"exact": lambda n: 3 * n * n / 3136, "favorp": float, "favorpp": lambda n: favorpp * n, "uniform": float}
    rows = [Draw("vit", arm, "ms", of(n) * (1 + 0.01 * np.sin(3 * i + len(arm))), i // 2, n)
            for arm, of in base.items() for n in (784, 3136, 12544) for i in range(6)]
    rows += [Draw("vit", arm, "mib", 2.0 * n * (n / 784 if arm == timed.FORMED else 1), x=n)
             for arm in (*base, timed.FORMED) for n in (784, 3136)]
    page.draws.write("fig4-right", rows, tmp_path)
    made = page.Page("fig4-right", tmp_path)
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
