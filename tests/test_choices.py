"""Every name of conf/attention makes a working layer, for the library as for the command line."""

import pytest
import torch

from crt_exp.attention.choices import layer_maker
from crt_exp.config import ConfigError, choices
from crt_exp.features import GeomRF
from crt_exp.command_line import compose


@pytest.mark.filterwarnings("ignore:.*denominators are not positive")
@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_works(name):
    layer = layer_maker(name)(2, 8, layer=3, causal=False)
    q = torch.randn(1, 2, 5, 8)
    assert layer(q, q, q).shape == q.shape
    if name != "linformer":
        assert layer_maker(name)(4, 8, kv_heads=2, causal=True)(torch.randn(1, 4, 5, 8), q, q).shape == (1, 4, 5, 8)


@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_composes(name):
    assert compose([f"attention={name}"]).attention._target_.startswith("crt_exp.attention.")


def test_options():
    layer = layer_maker("favorpp", m=32, sampler="simplex", features="geom", redraw_every=7, seed=5)(2, 8, layer=1)
    assert layer.m == 32 and isinstance(layer.phi, GeomRF) and layer.redraw_every == 7 and layer.seed == 5 and layer.layer == 1
    assert layer_maker("generalized", kernel="tanh")(2, 8).phi.f == "tanh"
    assert layer_maker("linformer", rank=3)(2, 8).function.key_projection.shape == (3, 512)


BAD = {
    "did you mean favorpp": lambda: layer_maker("favorppp"),
    "did you mean redraw_every": lambda: layer_maker("favorp", redraw_evry=3),
    "leave m out": lambda: layer_maker("exact", m=64),
    "at least 1": lambda: layer_maker("favorp", m=0),
    "unknown sampler": lambda: layer_maker("favorp", sampler="ortho"),
    "unknown features": lambda: layer_maker("favorp", features="x"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ConfigError, match=message):
        BAD[message]()
