"""The plain Transformer takes every attention."""

import pytest
import torch

from crt_exp.mechanism import Mechanism
from crt_exp.models.transformer import Transformer
from crt_exp.studies.speed import Speed


@pytest.mark.parametrize("name", ["exact", "identity", "favorp", "favorpp", "relu", "linformer"])
def test_transformer(name):
    options = {} if name in ("exact", "identity", "linformer") else {"m": 8}
    model = Transformer(2, 3, 32, 16, Mechanism.of(name, **options).layer)
    x = torch.randn(2, 7, 16, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad.isfinite().all() and len({id(b.attention) for b in model.blocks}) == 3


def test_padding_equals_truncation():
    model = Transformer(2, 2, 32, 16, Mechanism.of("favorpp", m=8).layer).eval()
    x, mask = torch.randn(2, 9, 16), torch.arange(9).expand(2, 9) < 6
    torch.testing.assert_close(model(x, mask)[:, :6], model(x[:, :6]), rtol=1e-4, atol=1e-5)


def test_bad_sizes():
    with pytest.raises(ValueError, match="multiple of heads"):
        Transformer(3, 1, 8, 16, Mechanism.of("exact").layer)


def test_speed_task_measures_every_variant():
    task = Speed("small", [32, 64], 1, True)
    records = list(task.records(None, 0))
    assert len(records) == 2 and records[-1]["final"]
    assert {"exact_ms", "identity_ms", "favorp_ms", "favorpp_ms"} <= records[0].keys()
    assert list(task.records(None, 0, records[:1]))[0]["length"] == 64
    with pytest.raises(ValueError, match="task.what"):
        Speed("huge", [32], 1, True)
