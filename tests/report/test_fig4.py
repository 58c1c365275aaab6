"""make fig4-right and fig4-left: what they measure, and that their verdicts follow it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from crt_exp.report import fig4_left, fig4_page, fig4_right, fig4_runs, writing
from crt_exp.report.evidence import GateFailed
from crt_exp.report.fig4_runs import Bounds, Found, Setting
from crt_exp.report.fig4_verdicts import gates, verdicts
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import vit_steps


def step_times(exact, favorp, favorpp):
    """Milliseconds of six rounds at each number of tokens, `exact` among them a multiple of the tokens."""
    noise = (0.98, 1.0, 1.01, 0.99, 1.02, 1.0)
    return {n: {name: [base * n * e for e in noise[i:] + noise[:i]] for i, (name, base) in enumerate((
        {"exact": exact * n / 3136, "favorp": favorp, "favorpp": favorpp, "uniform": 0.5} | (
            {vit_steps.FORMED: 2.0} if n < 4000 else {})).items())} for n in (784, 3136, 12544)}


MEMORY = {(n, name): 2.0 * n * (n / 784 if name == vit_steps.FORMED else 1) for n in (784, 3136)
          for name in vit_steps.METHODS}


@pytest.mark.parametrize("favorpp, word", [(1.0, "holds"), (3.0, "fails")])
def test_verdicts_on_steps_follow_the_times(favorpp, word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    monkeypatch.setattr(fig4_right, "PROCESSES", 3)
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
def test_fig4_right_at_small_sizes(tmp_path, monkeypatch, capsys, one_thread):
    """The real measurement; memory comes from processes of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setattr(fig4_right, "TOKENS", (64, 256))
    monkeypatch.setattr(fig4_right, "MEMORY_TOKENS", (64, 256))
    monkeypatch.setattr(fig4_right, "BARS", {256: -1000})  # confirmed whatever the times
    monkeypatch.setattr(fig4_right, "rounds", lambda tokens: 2)
    monkeypatch.setattr(fig4_right, "PROCESSES", 2)
    fig4_right.main("small")
    said = "holds**: FAVOR++ makes more than -1000 times"
    told = next(line for line in capsys.readouterr().out.splitlines() if said in line)
    assert "times (n = 2, p = " in told  # the processes
    assert len((tmp_path / "outputs/fig4-right/cells.jsonl").read_text().splitlines()) == 4


# ---- fig4-left

NOTHING = Bounds(*4 * [-np.inf])
TINY = Setting(
    dataset="digits", classes=10, images=("task.dataset=digits", "task.size=8"),
    model=("task.sizes.patch=2", "task.sizes.width=32", "task.sizes.depth=2", "task.sizes.heads=2"),
    mae=("trainer.steps=3",), fine_tuning=("trainer.steps=3",), uptraining=("trainer.eval_every=2",),
    scratch=("trainer.steps=4", "trainer.eval_every=2"), m=8, ms=(8,), steps=(2, 4), long=16, long_images=20,
    near=(("block", 2), ("heavy", 2), ("cells", 2)),
    swaps=2, seeds=2, scratch_seeds=2, workers=1, least=NOTHING)


def found(better=0.0, uniform=1.0, S=8.0, diverged=()):
    """Results in which FAVOR++ is `better`, in nats and tenths of the accuracy, uniform attention costs `uniform`."""
    rng = np.random.default_rng(0)
    loss = {"exact": 1.0, "uniform": 1.0 + uniform, "nearfar": 1.0, "favorp": 1.6, "favorpp": 1.6 - better}
    point = lambda name, step: {"step": step, "loss": loss[name] - 1e-3 * step + 0.01 * rng.normal(),
                                "accuracy": 0.5 + 0.1 * (1.6 - loss[name]) + 0.001 * rng.normal()}
    ms = {name: (4, 8) if name in fig4_runs.LINEAR else (None,) for name in fig4_runs.NAMES}
    swaps = {(name, m, seed): point(name, 0) for name in fig4_runs.NAMES for m in ms[name] for seed in range(4)}
    layer = lambda scale: {"S": [S, S + 1], "predicted": 2 * scale, "measured": scale, "uniform": 1.0}
    curve = lambda name: {"curve": [point(name, step) for step in (2, 4)]}
    arms = {(name, seed): {"diverged": "step 1"} if (name, seed) in diverged else curve(name)
            for name in fig4_runs.NAMES for seed in range(4)}
    long = {name: point(name, 0) | {"tokens": 64, "ms_image": 1.0, "mib": 2.0} for name in fig4_runs.NAMES}
    scales = {"favorp": 1.5, "favorpp": 1.0}
    layers = {(name, seed): 2 * [layer(scale)] for seed in range(3) for name, scale in scales.items()}
    return Found({"accuracy": 0.6}, swaps, layers, arms, arms, long)


@pytest.mark.parametrize("better, word", [(0.3, "holds"), (-0.3, "fails")])
def test_verdicts_on_arms_follow_the_records(better, word):
    setting = replace(TINY, swaps=4, ms=(4, 8))
    told = {verdict.claim.text: verdict.word for verdict in verdicts(setting, found(better))}
    assert len(told) == 2 + 2 + 2 + 1
    assert {w for text, w in told.items() if "ends less than" not in text} == {word}
    assert {w for text, w in told.items() if "ends less than" in text} == {"fails"}  # 0.3 nats or more above exact


def test_training_from_scratch_is_not_judged_where_attention_does_not_matter():
    setting = replace(TINY, swaps=4, ms=(4, 8), least=Bounds())
    told = [str(verdict) for verdict in verdicts(setting, found(uniform=0.1))]
    left = [line for line in told if "a gate failed" in line]
    assert len(told) == 7 and len(left) == 2
    assert all("from scratch" in line and "in nats is 0.0997" in line for line in left)


def test_gates_fail_where_the_checkpoint_cannot_tell():
    setting = replace(TINY, least=Bounds())
    assert all(gate.passed for gate in gates(setting, found()))
    for least, wrong in (("uniform attention costs", found(uniform=0.1)), ("between 4 and 24", found(S=40.0))):
        failed = [gate.text for gate in gates(setting, wrong) if not gate.passed]
        assert len(failed) == 1 and least in failed[0]


def test_runs_that_diverged_are_counted_and_compared_with_none(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    results = found(0.3, uniform=0.2, diverged=[("favorp", seed) for seed in range(3)])
    fig4_page.write("small", replace(TINY, swaps=4, ms=(4, 8)), results, [], 1.0)
    text = (tmp_path / "fig4-left.md").read_text()
    arms = [line for line in text.splitlines() if line.startswith("| FAVOR") and "of 4" in line]
    assert [line.split(" | ")[-1] for line in arms] == 2 * ["3 of 4 |", "0 of 4 |"]
    assert "ends more accurate" not in text and text.count("**holds**: directly after the swap") == 2
    assert "**Uniform attention, which looks at no query and no key" in text.splitlines()[2]


def test_arms_start_from_the_exact_checkpoint_with_the_same_seed():
    start = fig4_runs.checkpoint(TINY)
    run = str(fig4_runs.HOME.place(start[-1]["overrides"]))
    keys = [fig4_runs.uptraining(name, 3, TINY, run)["overrides"] for name in fig4_runs.LINEAR]
    assert set(keys[0]) ^ set(keys[1]) == {"attention=favorp", "attention=favorpp"}
    assert all(f"task.init={run}" in key and "seed=3" in key and "features.m=8" in key for key in keys)
    assert f"task.init={fig4_runs.HOME.place(start[0]['overrides'])}" in start[-1]["overrides"]


@pytest.mark.parametrize("size", ["small", *(pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full"))])
def test_every_run_of_fig4_left_is_a_command_line(size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    setting = fig4_left.SETTINGS[size]
    keys = [*fig4_runs.checkpoint(setting), fig4_runs.swapped("favorp", 64, 0, setting, "run"),
            fig4_runs.uptraining("nearfar", 0, setting, "run"), fig4_runs.from_scratch("uniform", 0, setting)]
    for key in keys:
        check_command_line([*key["overrides"], "logger=none", "hydra.run.dir=run"])


@pytest.mark.slow
def test_fig4_left_at_a_tiny_size(tmp_path, monkeypatch, capsys, one_thread):
    """All of it on the embedded digits, and again without computing anything; a failed gate stops it before arms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setitem(fig4_left.SETTINGS, "small", replace(TINY, least=replace(NOTHING, above_chance=11)))
    with pytest.raises(GateFailed, match="accuracy of the exact checkpoint over that of a guess"):
        fig4_left.main("small")
    cells = tmp_path / "outputs/fig4-left/cells.jsonl"
    assert len(cells.read_text().splitlines()) == 2 + (3 + 2 * 2) + 2 * 3
    monkeypatch.setitem(fig4_left.SETTINGS, "small", TINY)
    fig4_left.main("small")
    text = (tmp_path / "report/fig4-left.md").read_text()
    assert text.count(" directly after the swap") >= 2 and "| exact |" in text
    assert (tmp_path / "report/fig4-left.png").stat().st_size > 20_000
    computed = cells.read_text()
    fig4_left.main("small")
    assert cells.read_text() == computed and "written:" in capsys.readouterr().out
