"""task=speed and task=memory: what is timed, the baselines, rows, and what is refused."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from crt_exp.attention import attention_reference
from crt_exp.experiments.measure import speed
from crt_exp.experiments.measure.speed import (
    FORMED,
    Memory,
    Speed,
    attention_work,
    chunked,
    pretrained_work,
)
from crt_exp.features import PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import orthogonal
from crt_exp.swap.calibration import swapped_states


def rows(what, methods, length=16, rounds=2, run="exact"):
    return [*Speed(what, [length], rounds, methods).rows(Mechanism.parse(run), 1)]


def test_a_row_for_each_length_method_and_round(one_thread):
    made = [*Speed("small", [16, 32], 2, ["exact", "favorpp m=8"]).rows(None, 0)]
    actual = [(row["length"], row["method"]) for row in made]
    expected = []
    for length in (16, 32):
        for name in ("exact", "favorpp m=8"):
            for _ in range(2):
                expected.append((length, name))
    assert actual == expected
    for row in made:
        assert row["training"] > 0 < row["inference"]


def test_the_attention_of_the_run_where_no_method_is_named(one_thread):
    (row,) = rows("one_head", None, 32, 1, run="favorpp m=8")
    assert row["method"] == "favorpp m=8"
    assert row["ms"] > 0


@pytest.mark.parametrize("length", [3, 16, 37])
def test_chunked_attention_is_causal_attention(length):
    """In outputs and gradients, whether or not the chunks divide the length."""
    g = torch.Generator().manual_seed(length)
    noise = orthogonal(24, 4, g, batch=(2,))
    x, y, v, out = (
        torch.randn(1, 2, length, 4, generator=g, dtype=torch.float64) for _ in range(4)
    )
    actual = []
    for method in (
        chunked(noise.rows().double(), chunk=8),
        lambda x, y, v: attention_reference(x, y, v, PosRF(), noise, causal=True),
    ):
        given = [t.clone().requires_grad_() for t in (x, y, v)]
        result = method(*given)
        actual.append([result, *torch.autograd.grad(result, given, out)])
    for ours, reference in zip(*actual):
        torch.testing.assert_close(ours, reference, rtol=1e-7, atol=1e-9)


def test_times_leave_nothing_behind(one_thread):
    for name in ("favorpp causal", "hrf_cluster m=4", "exact", "nearfar"):
        work = attention_work(name, 16)
        work.times()
        for t in work.forward.args:
            assert t.grad is None
    work = speed.transformer("small", "favorpp", 16)
    work.times()
    assert work.model.training
    for p in work.model.parameters():
        assert p.grad is None


def test_every_vision_transformer_has_its_own_attention(one_thread):
    """In every layer; exact attention and that which forms its matrix agree."""
    for name in ("exact", FORMED, "favorpp", "uniform"):
        model, image = speed.vit(name, 16)
        actual = sum(hasattr(block.attn, "swapped") for block in model.blocks)
        expected = 0 if name.startswith("exact") else 12
        assert actual == (expected)
    outputs = []
    for name in ("exact", FORMED):
        model, image = speed.vit(name, 16)
        outputs.append(model.eval()(image))
    assert torch.allclose(*outputs, atol=1e-5)


def peak(what, length, run, method):
    [row] = Memory(what, length, method).rows(Mechanism.parse(run), 0)
    return row["mib"]


@pytest.mark.slow
def test_peaks_of_memory():
    """Each in a process of its own, since allocators keep what earlier calls freed: attention that forms its matrices
    has those of all layers and heads above that which does not."""
    asked = [("vit_ti", 576, "exact", method) for method in (FORMED, None)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        formed, fused = pool.map(peak, *zip(*asked))
    matrices = 12 * 3 * 577**2 * 4 / 2**20
    assert matrices < formed - fused < 2 * matrices, (formed, fused)


@pytest.fixture
def saved(tmp_path, reader, speaker):
    """Folders of a decoder and a recogniser."""
    reader.save_pretrained(tmp_path / "decoder")
    speaker.save_pretrained(tmp_path / "speech")
    return tmp_path


@pytest.mark.parametrize("name, length", [("decoder", 32), ("speech", 64)])
def test_a_whole_model_is_timed_and_measured(saved, one_thread, name, length):
    """Each method has a model of its own, which the run does not change."""
    model = str(saved / name)
    methods = ["exact", "nearfar", "favorpp m=8", "window"]
    task = Speed("pretrained", [length], 1, methods, model=model)
    actual = [*task.rows(None, 0)]
    assert [row["method"] for row in actual] == methods
    for row in actual:
        assert row["training"] > 0 < row["inference"]
    for method in methods:
        work = pretrained_work(model, method, length)
        actual = {state.mechanism for state in swapped_states(work.model)}
        assert actual == (set() if method == "exact" else {method.split()[0]})
        assert not work.forward().isnan()
    [row] = Memory("pretrained", length, "window", model).rows(None, 0)
    assert row["mib"] >= 0


def test_lengths_beyond_the_model_and_models_without_a_name_are_refused(saved):
    with pytest.raises(ValueError, match=r"task.lengths=65: expected 64"):
        pretrained_work(str(saved / "speech"), "exact", 65)
    with pytest.raises(ValueError, match=r"task.lengths=4096: expected at most 2048"):
        pretrained_work(str(saved / "decoder"), "exact", 4096)
    with pytest.raises(ValueError, match="task.model=None: expected a folder"):
        Speed("pretrained", [8], 1, ["exact"])
    with pytest.raises(ValueError, match="task.model=there: expected a folder"):
        Speed("vit", [8], 1, ["exact"], model="there")
