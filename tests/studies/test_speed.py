"""Time and memory of attention: what is timed, the peers, and a page whose bars can fail."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from crt_exp.attention import attention_reference
from crt_exp.features import PosRF
from crt_exp.report import speed, speed_page, writing
from crt_exp.report.evidence import Interval
from crt_exp.report.speed_page import EXACT, LATER, TRAINING, Found
from crt_exp.samplers import orthogonal
from crt_exp.studies import speed as study
from crt_exp.studies.peers import chunked
from crt_exp.studies.speed import ALONE, PASSES, Speed

TINY = speed.Setting(alone=((32, 64),), models={"small": (32,)}, later=(64,), turns=2, memory=(), exact_memory=64)


def test_task_measures_every_variant():
    task = Speed("small", [32, 64], 1, True)
    records = list(task.records(None, 0))
    assert len(records) == 2 and records[-1]["final"]
    assert {f"{name}_ms" for name in study.IN_MODELS} <= records[0].keys()
    assert list(task.records(None, 0, records[:1]))[0]["length"] == 64
    with pytest.raises(ValueError, match="task.what"):
        Speed("huge", [32], 1, True)


@pytest.mark.parametrize("length", [3, 16, 37])
def test_the_chunked_twin_is_causal_attention(length):
    """In outputs and gradients, whether or not the chunks divide the length."""
    g = torch.Generator().manual_seed(length)
    noise = orthogonal(24, 4, g, batch=(2,))
    x, y, v, out = (torch.randn(1, 2, length, 4, generator=g, dtype=torch.float64) for _ in range(4))
    found = []
    for method in (chunked(noise.rows().double(), chunk=8),
                   lambda x, y, v: attention_reference(x, y, v, PosRF(), noise, causal=True)):
        given = [t.clone().requires_grad_() for t in (x, y, v)]
        result = method(*given)
        found.append([result, *torch.autograd.grad(result, given, out)])
    for twin, reference in zip(*found):
        torch.testing.assert_close(twin, reference, rtol=1e-7, atol=1e-9)


def test_times_leave_nothing_behind_and_turn_by_process():
    names = ["favorpp causal", "exact", "nearfar"]
    made = study.works(ALONE, 16, names)
    assert set(made) == set(names) and list(study.rotated(made, 4)) == [*list(made)[1:], list(made)[0]]
    for work in made.values():
        assert set(work.times()) == set(PASSES) and all(t.grad is None for t in work.forward.args)
    model = study.works("small", 16, ["favorpp"])["favorpp"]
    model.times()
    assert model.model.training and all(p.grad is None for p in model.model.parameters())


# ---- the page, on times that are made up


def invented(ms, lengths=(1024, 4096, 16384), processes=5, spread=0.01) -> Found:
    """ms: of a training step by method and length, 100 for all others; processes differ by about `spread`."""
    rng, found = np.random.default_rng(0), Found(2, ["a processor"])
    for n in lengths:
        for part in (ALONE, LATER, *speed.SETTINGS["small"].models):
            names = list(study.makers(n)) if part in (ALONE, LATER) else study.IN_MODELS
            for _ in range(processes):
                step = {name: ms.get((name, n), 100.0) * np.exp(spread * rng.standard_normal(2)) for name in names}
                found.add(part, n, {name: dict(zip(PASSES, (list(t / 2), list(t / 4), list(t * 3 / 4))))
                                    for name, t in step.items()})
    found.memory = {("nearfar", 65536): [480.0, 481.0, 482.0, 481.5, 480.5], ("floor", 65536): [4000.0],
                    ("nearfar causal", 65536): [380.0, 381.0, 382.0, 381.5, 380.5]}
    return found


def judged(found: Found) -> dict[str, str]:
    asked = list(speed_page.bars(found))
    return {bar.text: speed_page.line(bar, verdict) for bar, verdict in zip(
        asked, speed_page.judged([bar.claim for bar in asked]))}


@pytest.mark.parametrize("ms, word, shown", [(2000, "met", "5.0"), (4000, "not met", "2.5"), (3333, "open", "3.0")])
def test_a_bar_is_judged_by_its_interval(ms, word, shown):
    found = invented({("nearfar", 4096): ms, ("exact", 4096): 10_000.0})
    said = judged(found)["near-far attention is at least 3 times as fast as exact attention at L = 4096"]
    assert said.startswith(f"- **{word}**:") and "(n = 5 processes" in said
    assert float(said.split(": ")[2].split()[0]) == pytest.approx(float(shown), rel=0.02)


def test_all_bars_are_there_and_some_fail():
    said = judged(invented({}))
    assert sum("in a process that has run shorter ones" in text for text in said) == 7
    assert sum("near-far" in text for text in said) == 8 and sum("trigonometric" in text for text in said) == 2
    memory = [line for text, line in said.items() if "MiB" in text]
    assert [line.partition(":")[0] for line in memory] == ["- **not met**", "- **met**"]
    assert any("chunked twin" in text for text in said) and any("FAVOR++ takes at most 1.05" in text for text in said)


def test_exact_attention_is_overtaken_where_all_longer_intervals_say_so():
    each = lambda low, high: Interval((low + high) / 2, (high - low) / 2, 0.0, 5)
    assert speed_page.faster_from({1: each(-2, -1), 2: each(-1, 1), 4: each(-2, -1), 8: each(-3, -2)}) == 4
    assert speed_page.faster_from({1: each(-2, -1), 2: each(-2, 0.1)}) is None
    found = invented({("exact", 1024): 50.0, ("exact", 16384): 900.0, ("favorpp", 16384): 90.0})
    assert speed_page.crossover(found, "favorpp", TRAINING) == "16384, 1024"


def test_the_picture_has_one_entry_for_a_method():
    figure = speed_page.figure(invented({}, lengths=(1024,), processes=2))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = {speed_page.label(name) for name in study.makers(1024) if " m=" not in name}
    assert len(names) == len(set(names)) and set(names) == drawn
    colours = {line.get_color() for line in figure.axes[0].get_lines()}
    assert len(colours) >= len(drawn) - 3  # causal peers are elsewhere
    plt.close(figure)


def test_the_page_says_that_a_control_is_faster():
    found = invented({("uniform", n): 1.0 for n in (1024, 4096, 16384)} | {("exact", 16384): 900.0})
    assert speed_page.control(found).startswith("**Uniform attention, a control, is faster than 3")
    assert "Times as fast as exact attention" in "\n".join(speed_page.tables(found))


def test_every_length_has_five_rounds_and_peaks_their_limits():
    small = speed.SETTINGS["small"]
    assert small.turns * min(case[2] for _, share in small.shares() for case in share["cases"]) >= 5
    peaks = small.peaks()
    assert ("performer-pytorch causal", study.PEER_CAUSAL, 0) in peaks and len(set(peaks)) == len(peaks)
    assert {name for name, n, _ in peaks if n == 65536} == {
        name for name in study.makers(65536) if name not in speed.WITHOUT_MEMORY}
    assert (EXACT, 4096, 0) in peaks and ("nearfar", 65536, small.near_far_turns - 1) in peaks


@pytest.mark.slow
def test_the_report_at_small_lengths(tmp_path, monkeypatch, capsys):
    """Repeated, it computes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(writing, "REPORT", tmp_path / "report")
    monkeypatch.setitem(speed.SETTINGS, "small", TINY)
    monkeypatch.setattr(speed, "PEER_CAUSAL", 64)
    monkeypatch.setattr(speed_page, "OF_FLOOR", {64: 0.7})
    monkeypatch.setattr(speed, "in_new_process", lambda call, **given: call(**given))  # all in this one
    speed.main("small")
    page = (tmp_path / "report/speed.md").read_text()
    assert page.count("FAVOR+ takes at most 0.7 of the time of the plain product, L = 64") == 2
    assert "## Peak memory" in page and "Machine: " in page
    assert (tmp_path / "report/speed.png").stat().st_size > 10_000
    rows = (tmp_path / "report/speed.csv").read_text().splitlines()
    assert sum(row.startswith("later,") for row in rows) == 5 * len(PASSES)
    capsys.readouterr()
    monkeypatch.setattr(speed, "in_new_process", None)
    speed.main("small")
    assert "written:" in capsys.readouterr().out
    assert page.split("Written:")[0] == (tmp_path / "report/speed.md").read_text().split("Written:")[0]
