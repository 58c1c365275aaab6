"""Time and memory of attention: what is timed, the peers, and a page whose bars can fail."""

import pytest
import torch

from crt_exp.attention import attention_reference
from crt_exp.features import PosRF
from crt_exp.measure import grid, speed
from crt_exp.measure.speed import ALONE, PASSES, Speed, chunked
from crt_exp.oldreport.page import load
from crt_exp.samplers import orthogonal


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
