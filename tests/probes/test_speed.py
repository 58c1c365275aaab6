"""Time and memory of attention: what is timed, the peers, and a page whose bars can fail."""

import math

import numpy as np
import pytest
import torch

from crt_exp.attention import attention_reference
from crt_exp.features import PosRF
from crt_exp.report import draws
from crt_exp.report.evidence import Verdict
from crt_exp.report.page import Page, load
from crt_exp.report.pages import speed as speed_page
from crt_exp.samplers import orthogonal
from crt_exp.probes import grid
from crt_exp.probes import speed
from crt_exp.probes.cells import Draw
from crt_exp.probes.grid import Part
from crt_exp.probes.speed import ALONE, PASSES, Speed, chunked


def test_task_measures_every_variant():
    task = Speed("small", [32, 64], 1, True)
    records = list(task.records(None, 0))
    assert len(records) == 2 and records[-1]["final"]
    assert {f"{name}_ms" for name in speed.IN_MODELS} <= records[0].keys()
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


def test_times_leave_nothing_behind():
    names = ["favorpp causal", "exact", "nearfar"]
    made = speed.works(ALONE, 16, names)
    assert set(made) == set(names)
    for work in made.values():
        assert set(work.times()) == set(PASSES) and all(t.grad is None for t in work.forward.args)
    model = speed.works("small", 16, ["favorpp"])["favorpp"]
    model.times()
    assert model.model.training and all(p.grad is None for p in model.model.parameters())


# ---- the page, on times that are made up


def page_of(tmp_path, training, lengths=(1024, 4096, 16384), processes=5, spread=0.01):
    """training: ms of a training step by method and length, 100 for all others; processes differ by about `spread`."""
    rng, names = np.random.default_rng(0), ("favorp", "favorpp", "nearfar", "exact", "uniform", "identity")
    rows = [Draw(setting, name, metric, training.get((name, n), 100.0) * math.exp(spread * rng.normal()), unit, n)
            for setting in (ALONE, "large") for n in lengths for name in names for unit in range(processes)
            for metric in ("training", "inference")]
    draws.write("speed", rows, tmp_path)
    return Page("speed", tmp_path)


@pytest.mark.parametrize("ms, word", [(2000, "holds"), (4000, "fails"), (3333, "cannot tell here")])
def test_a_bar_is_judged_by_its_processes(ms, word, tmp_path):
    page = page_of(tmp_path, {("nearfar", 4096): ms, ("exact", 4096): 10_000.0})
    said = {verdict.claim.text: verdict for verdict in page.families["bars"] if isinstance(verdict, Verdict)}
    verdict = said["near-far attention is at least 3 times as fast as exact attention at L = 4096"]
    assert verdict.word == word and verdict.claim.difference.n == 5


def test_exact_attention_is_overtaken_where_all_longer_intervals_say_so(tmp_path):
    page = page_of(tmp_path, {("exact", 1024): 50.0, ("exact", 16384): 900.0, ("favorpp", 16384): 90.0,
                              **{("uniform", n): 1.0 for n in (1024, 4096, 16384)}})
    assert speed_page.crossover(page, "favorpp", "training") == "16384, 1024"
    assert speed_page.first_lines(page)[0].startswith("**Uniform attention, a control, is faster than 12 of 12 arms**")
    assert "large, L = 16384: without any attention 9" in speed_page.first_lines(page)[0]


def test_every_length_has_five_rounds_and_peaks_their_limits():
    parts = [Part.read(part) for part in load("speed")["sizes"]["small"]["parts"]]
    timed, peaks = [part for part in parts if part.together], [part for part in parts if not part.together]
    rounds = [part.seeds * case[2] for part in timed for share in part.settings.values() for case in share["cases"]]
    assert min(rounds) >= 5
    assert {*parts[0].arms} == {name for length in (1024, speed.TWINS_AT) for name in speed.makers(length)}
    found = [(arm, length, seed) for part in peaks for _, arm, length, seed, _ in part.places()]
    assert ("performer-pytorch causal", speed.PEER_CAUSAL, 0) in found and len(set(found)) == len(found)
    theirs = ("identity", "uniform", "uniform causal")                       # their memory is that of their values
    assert {name for name, n, _ in found if n == 65536} == {*speed.makers(65536)} - {*theirs}
    assert ("exact", 4096, 0) in found and ("nearfar", 65536, 4) in found


@pytest.mark.slow
def test_draws_at_small_lengths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [{**part, "seeds": 2, "apart": False, "workers": 1} for part in load("speed")["sizes"]["small"]["parts"]]
    for part, cases in zip(parts, ([[ALONE, 32, 2], [ALONE, 64, 1]], [[ALONE, 64, 1]], [["small", 32, 2]])):
        part["settings"] = {name: {"cases": cases} for name in [*part["settings"]][:1]}
    for part in parts[3:]:
        part |= {"sweep": {"length": [64]}, "arms": part["arms"][:2]}
    made = [*grid.measure("mine", [], {"parts": parts})]
    of = {(draw.setting, draw.arm, draw.metric, draw.x) for draw in made}
    assert {("later", "floor", "training", 64), ("small", "nearfar", "inference", 32),
            ("memory", "exact causal", "mib", 64)} <= of
    place = (ALONE, "favorp", "training", 32)
    units = [draw.unit for draw in made if (draw.setting, draw.arm, draw.metric, draw.x) == place]
    assert units == 2 * [0] + 2 * [1]
