"""Every name of conf/attention makes a working layer, for the library as for the command line."""

import json

import numpy as np
import pytest
import torch

from crt_exp import swap_attention
from crt_exp.config import ConfigError, choices
from crt_exp.features import GeomRF, PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.runner.command_line import compose


def maker(name, **options):
    return Mechanism.of(name, **options).layer


@pytest.mark.filterwarnings("ignore:.*denominators are not positive")
@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_works(name):
    layer = maker(name)(2, 8, layer=3, causal=False)
    q = torch.randn(1, 2, 5, 8)
    assert layer(q, q, q).shape == q.shape
    if name != "linformer":
        assert maker(name)(4, 8, kv_heads=2, causal=True)(torch.randn(1, 4, 5, 8), q, q).shape == (1, 4, 5, 8)


@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_composes(name):
    assert compose([f"attention={name}"]).attention._target_.startswith(("crt_exp.attention.", "crt_exp.nearfar."))


@pytest.mark.slow
@pytest.mark.parametrize("name", choices("attention"))
def test_what_is_saved_by_names_is_the_same_mechanism(name):
    """From the library and from the command line, through JSON."""
    changed = {"generalized": {"kernel": "tanh"}, "window": {"block": 7}, "favorpp": {"sampler": "simplex"},
               "hrf_cluster": {"features.queries": 3, "features.field": "complex"}}
    options = changed.get(name, {})
    typed = [f"{key if key == 'sampler' or '.' in key else f'attention.{key}'}={value}"
             for key, value in options.items()]
    cfg = compose([f"attention={name}", "seed=3", *typed])
    choice = {"attention": name, **cfg.hydra.runtime.choices}.get
    for mechanism in (Mechanism.of(name, seed=3, **options), Mechanism.from_config(cfg, choice)):
        found = Mechanism.from_saved(json.loads(json.dumps(mechanism.to_saved())), "run")
        assert found == mechanism and found.seed == 3 and found.describe() == mechanism.describe()


def test_a_saved_mechanism_that_is_no_more_is_refused():
    saved = Mechanism.of("favorpp", m=8).to_saved()
    for change, words in [({"name": "favorq"}, "attention cannot be restored: unknown attention .favorq."),
                          ({"features": "nothing"}, "attention cannot be restored"),
                          ({"options": {"redraw": 3}}, "attention cannot be restored"),
                          ({"m": 9}, "favorpp has other options in conf/")]:
        with pytest.raises(ConfigError, match=f"task.init = a: .*{words}"):
            Mechanism.from_saved(saved | change, "task.init = a")
    with pytest.raises(ConfigError, match="attention cannot be restored"):
        Mechanism.from_saved({}, "task.init = a")


def test_options():
    layer = maker("favorpp", m=32, sampler="simplex", features="geom", redraw_every=7, seed=5)(2, 8, layer=1)
    assert layer.m == 32 and isinstance(layer.phi, GeomRF) and layer.redraw_every == 7
    assert layer.seed == 5 and layer.layer == 1
    assert maker("generalized", kernel="tanh")(2, 8).phi.f == "tanh"
    assert maker("linformer", rank=3)(2, 8).key_projection.shape == (3, 512)


def test_options_of_the_map():
    """By the names of the command line; of a file alone, and never what the file stands for."""
    assert Mechanism.of("hrf_angular", m=4, **{"features.n": 3}).map().width(4) == 4 * 4 * 6
    assert Mechanism.of(features="clustered", **{"features.keys": 5}).map().keys == 5
    for given, words in [({"features.x": 1}, "unknown option of features clustered 'x'"),
                         ({"features._target_": "os.system"}, "unknown option of features clustered '_target_'"),
                         ({"_target_": "os.system"}, "unknown option of attention hrf_cluster '_target_'"),
                         ({"features": PosRF(), "features.n": 1}, "an object takes no options")]:
        with pytest.raises(ConfigError, match=words):
            Mechanism.of("hrf_cluster", **given)
    with pytest.raises(ConfigError, match="does not use features"):
        Mechanism.of("exact", **{"features.n": 1})


def test_integers_of_numpy_are_integers():
    n = np.int64
    ours = maker("favorpp", m=n(16), seed=n(3), redraw_every=n(7))(n(2), n(8), layer=n(1))
    same = maker("favorpp", m=16, seed=3, redraw_every=7)(2, 8, layer=1)
    assert torch.equal(ours.omega, same.omega) and ours.redraw_every == 7 and ours.omega.shape == (2, 16, 8)


def encoder():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.mark.parametrize("layers, swapped", [(np.int64(0), [0]), ([np.int64(-1)], [2]), (np.array([0, 2]), [0, 2])],
                         ids=str)
def test_layers_by_integers_of_numpy(layers, swapped):
    model = swap_attention(encoder(), "favorp", m=np.int64(4), layers=layers, seed=np.int64(3),
                           redraw_every=np.int64(2))
    assert [i for i in range(3) if hasattr(model.layers[i].self_attn, "swapped")] == swapped
    state = model.layers[swapped[0]].self_attn.swapped
    assert state.m == 4 and state.redraw_every == 2 and state.seed == 3


@pytest.mark.parametrize("layers", [True, [True], [0.0], np.array([True, False, True])], ids=str)
def test_layers_that_are_no_numbers(layers):
    with pytest.raises(ValueError, match="expected indices of 3 layers"):
        swap_attention(encoder(), "favorp", m=4, layers=layers)


BAD = {
    "did you mean favorpp": lambda: maker("favorppp"),
    "did you mean redraw_every": lambda: maker("favorp", redraw_evry=3),
    "does not use m": lambda: maker("exact", m=64),
    "m=0: expected an integer >= 1": lambda: maker("favorp", m=0),
    "m=true": lambda: maker("favorp", m=True),
    "m=16.0": lambda: maker("favorp", m=16.0),
    "seed=true": lambda: maker("favorp", seed=True),
    "seed=2.5": lambda: maker("favorp", seed=2.5),
    "unknown sampler": lambda: maker("favorp", sampler="ortho"),
    "unknown features": lambda: maker("favorp", features="x"),
    "unknown option of attention nearfar 'far'": lambda: maker("nearfar", far="cells"),
}


@pytest.mark.parametrize("options, words", [
    ({"block": 1.5}, "attention.block=1.5: expected an integer"),
    ({"cells": True}, "attention.cells=true"),
    ({"preset": "best"}, "attention.preset=best: expected cheap, default or quality"),
], ids=str)
def test_options_are_checked_as_on_the_command_line(options, words):
    for make in (lambda: Mechanism.of("nearfar", **options), lambda: swap_attention(encoder(), "nearfar", **options)):
        with pytest.raises(ConfigError, match=words):
            make()


@pytest.mark.parametrize("name", ["exact", "window", "uniform", "linformer", "reformer", "identity", "nearfar",
                                  "favorp"])
def test_layers_take_the_sizes_that_they_were_made_for(name):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="q: d=4, expected d=8"):
        Mechanism.of(name).layer(2, 8)(x, x, x)
    with pytest.raises(ValueError, match="kv_heads=3: expected a divisor of heads=2"):
        Mechanism.of(name).layer(2, 8, kv_heads=3)


@pytest.mark.parametrize("name, file", [("performer", "favorp"), ("Performer", "favorp"), ("favor+", "favorp"),
                                        ("favor++", "favorpp"), ("FAVOR#", "favorsharp")])
def test_names_of_the_papers(name, file):
    assert Mechanism.of(name, m=8) == Mechanism.of(file, m=8)


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises(ConfigError, match=message):
        BAD[message]()
