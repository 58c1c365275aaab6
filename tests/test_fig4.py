"""make fig4-right and fig4-left: what they measure, and that their verdicts follow it."""

import pytest
import torch

from crt_exp.report import fig4_right, vit_steps, writing


def step_times(exact, favorp, favorpp):
    """Milliseconds of six rounds at each number of tokens, `exact` among them a multiple of the tokens."""
    noise = (0.98, 1.0, 1.01, 0.99, 1.02, 1.0)
    return {n: {name: [base * n * e for e in noise[i:] + noise[:i]] for i, (name, base) in enumerate((
        {"exact": exact * n / 3136, "favorp": favorp, "favorpp": favorpp, "uniform": 0.5} | (
            {vit_steps.FORMED: 2.0} if n < 4000 else {})).items())} for n in (784, 3136, 12544)}


MEMORY = {(n, name): 2.0 * n * (n / 784 if name == vit_steps.FORMED else 1) for n in (784, 3136)
          for name in vit_steps.METHODS}


@pytest.mark.parametrize("favorpp, word", [(1.0, "confirmed"), (3.0, "refuted")])
def test_verdicts_on_steps_follow_the_times(favorpp, word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    fig4_right.write(step_times(3.0, 1.0, favorpp), MEMORY, 1.0)
    told = capsys.readouterr().out
    assert [line.split("**")[1] for line in told.splitlines() if line.startswith("- ")] == 3 * [word]
    assert "FAVOR++ L^1.00" in told and "matrix formed: L^2.00" in told
    text = (tmp_path / "fig4-right.md").read_text()
    assert "| 12544 |" in text and (tmp_path / "fig4-right.png").stat().st_size > 10_000


def test_every_method_of_fig4_right_steps(one_thread):
    """Each has its own attention in every layer and none is left behind; exact and the formed matrix agree."""
    for name in vit_steps.METHODS:
        step = vit_steps.Step(name, 16)
        swapped = [block.attn for block in step.model.blocks if hasattr(block.attn, "swapped")]
        assert len(swapped) == (0 if name.startswith("exact") else 12)
        step(vit_steps.image(16))
    outputs = [vit_steps.vit(name, 16).eval()(vit_steps.image(16)) for name in ("exact", vit_steps.FORMED)]
    assert torch.allclose(*outputs, atol=1e-5)
    with pytest.raises(ValueError, match="15 patches make no square"):
        vit_steps.vit("exact", 15)


@pytest.mark.slow
def test_fig4_right_at_small_sizes(tmp_path, monkeypatch, capsys):
    """The real measurement; memory comes from processes of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setattr(fig4_right, "TOKENS", (64, 256))
    monkeypatch.setattr(fig4_right, "MEMORY_TOKENS", (64, 256))
    monkeypatch.setattr(fig4_right, "BARS", {256: 0.01})
    monkeypatch.setattr(fig4_right, "rounds", lambda tokens: 4)
    fig4_right.main("small")
    assert "confirmed**: FAVOR++ makes more than 0.01 times" in capsys.readouterr().out
    assert len((tmp_path / "outputs/fig4-right/cells.jsonl").read_text().splitlines()) == 2
