"""An attention in text: one reader, and what is written is read to the same."""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from crt_exp import swap_attention
from crt_exp.swap.advise import mechanisms
from crt_exp.attention import Window
from crt_exp.config import CONF, ConfigError, choices, own_names
from crt_exp.features import OPRF, PosRF, Sum
from crt_exp.mechanism import Mechanism
from crt_exp.options import join_words, split_words
from crt_exp.runner.command_line import compose
from crt_exp.samplers import iid


def same(text, **given):
    mechanism = Mechanism.parse(text, **given)
    assert Mechanism.parse(str(mechanism)) == mechanism, str(mechanism)
    return mechanism


@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_is_read_from_what_it_writes(name):
    assert same(name) == Mechanism.of(name) and str(same(name)).split()[0] == name
    assert same(name, seed=3).seed == 3


@pytest.mark.parametrize("name", choices("features"))
def test_every_map_alone_is_read_from_what_it_writes(name):
    made = Mechanism.of(features=name, m=12, sampler="simplex")
    kernel_map = Mechanism.kernel_map if made.own_kernel else Mechanism.map
    assert Mechanism.parse(str(made)) == made and kernel_map(made) == kernel_map(same(str(made)))
    if name not in choices("attention"):
        assert same(f"{name} m=12 sampler=simplex") == made


@pytest.mark.parametrize("text, same_as", [
    ("favorpp m=64 sampler=givens", {"m": 64, "sampler": "givens"}),
    ("favorpp m=64 features=geom redraw_every=7", {"m": 64, "features": "geom", "redraw_every": 7}),
    ("favorpp normalize_qk=true learn=projections", {"normalize_qk": True, "learn": "projections"}),
    ("favorpp sampler=hadamard sampler.blocks=1", {"sampler": "hadamard", "sampler.blocks": 1}),
    ("hrf_angular m=8 features.n=16", {"m": 8, "features.n": 16}),
    ("generalized kernel=elu+1 phi.kernel_epsilon=0.5 normalize=false",
     {"kernel": "elu+1", "phi.kernel_epsilon": 0.5, "normalize": False}),
    ("relu phi.kernel_epsilon=1e-05", {"phi.kernel_epsilon": 1e-5}),
    ("nearfar preset=cheap open=16 exact_until=null", {"preset": "cheap", "open": 16}),
    ("  window   block=32 first=16 ", {"block": 32, "first": 16}),
    ("FAVOR++ m=8", {"m": 8}),
])
def test_options_are_those_of_python(text, same_as):
    name = {"FAVOR++": "favorpp"}.get(text.split()[0], text.split()[0])
    assert same(text) == Mechanism.of(name, **same_as)


@pytest.mark.parametrize("typed, text", [
    (["attention=favorpp", "features.m=8", "sampler=iid"], "favorpp m=8 sampler=iid"),
    (["attention=generalized", "attention.kernel=tanh"], "generalized m=256 kernel=tanh"),
    (["attention=relu", "attention.phi.kernel_epsilon=0.5"], "relu m=256 phi.kernel_epsilon=0.5"),
    (["attention=favorp", "sampler.lengths=sqrt_d", "seed=2"], "favorp m=256 sampler.lengths=sqrt_d seed=2"),
    (["features=geom"], "geom m=256 sampler=orthogonal"),
    (["features=angular", "features.n=5"], "angular m=256 features.n=5"),
])
def test_what_the_command_line_composes_is_written_too(typed, text):
    """And kept: phi and the sampler with options of their own were saved so that they could not be loaded."""
    cfg = compose(typed)
    made = Mechanism.from_config(cfg, {"attention": None, **cfg.hydra.runtime.choices}.get)
    assert str(made) == text and same(text) == made
    assert Mechanism.from_saved(made.to_saved(), "run") == made


@dataclass(frozen=True)
class Shifted(PosRF):
    """A map of somebody's own."""

    scale: float = 1.0


class Narrow(Window):
    """A layer of somebody's own."""


def noise_of_mine(m: int, d: int, generator, batch=()) -> Tensor:
    return iid(m, d, generator, batch)


HERE = __name__


def test_classes_by_their_place():
    made = same(f"{HERE}.Shifted m=8 features.scale=0.5 sampler={HERE}.noise_of_mine")
    assert made.map() == Shifted(scale=0.5) and made.sampler is noise_of_mine
    assert made == Mechanism.of(features=Shifted(scale=0.5), m=8, sampler=noise_of_mine)
    assert same("favorp m=8 features=crt_exp.features.exponential.OPRF").map() == OPRF()
    layer = same(f"{HERE}.Narrow block=4").layer(2, 8, causal=True)
    assert isinstance(layer, Narrow) and layer.block == 4
    assert not same(f"{HERE}.Narrow").to_saved()["rebuilds"]


def test_what_lies_in_a_file_names_no_class():
    """Places of classes are for what a user types: a saved attention is read by names alone."""
    saved = Mechanism.of("favorpp", m=8).to_saved()
    for change in ({"name": f"{HERE}.Narrow"}, {"features": f"{HERE}.Shifted"}, {"sampler": f"{HERE}.noise_of_mine"}):
        with pytest.raises(ConfigError, match="unknown"):
            Mechanism.from_saved(saved | change, "a")


def test_objects_that_have_no_text_are_refused_when_read():
    for made in (Mechanism.of(features=Sum(PosRF(), OPRF()), m=8),
                 Mechanism.of("favorp", sampler=functools.partial(iid, dtype=None), m=8)):
        with pytest.raises(ValueError):
            Mechanism.parse(str(made))


def test_names_of_ones_own(tmp_path):
    folder = tmp_path / "attention"
    folder.mkdir()
    (folder / "mine.yaml").write_text((CONF / "attention" / "favorpp.yaml").read_text() + "redraw_every: 5\n")
    with own_names([tmp_path]):
        assert same("mine m=8").options["redraw_every"] == 5
    with pytest.raises(ConfigError, match="unknown attention 'mine'"):
        Mechanism.parse("mine m=8")


@pytest.mark.parametrize("text, words", [
    ("", "expected a name, then key=value, each key once"),
    (None, "attention None: expected a name"),
    ("m=8 favorpp", "expected a name, then key=value"),
    ("window 8", "attention 'window 8': expected a name, then key=value"),
    ("window =8", "then key=value, each key once"),
    ("window block=8 block=9", "each key once"),
    ("window block={a: 1}", "then key=value, each key once"),
    ("window block=[1", r"attention.block=\"\[1\": expected an integer"),
    ("favour m=8", "attention 'favour m=8': unknown attention 'favour'; did you mean favor"),
    ("favorpp sampler=ortho", "attention 'favorpp sampler=ortho': unknown sampler 'ortho'; did you mean orthogonal"),
    ("favorpp features=oprff", "unknown features 'oprff'"),
    ("favorpp mm=8", "unknown option of attention favorpp 'mm'"),
    ("favorpp name=exact", "unknown option of attention favorpp 'name'"),
    ("favorpp cls=exact", "unknown option of attention favorpp 'cls'"),
    ("favorpp _target_=os.system", "unknown option of attention favorpp '_target_'"),
    ("relu phi._target_=os.system", "unknown option of phi '_target_'"),
    ("favorpp phi.f=relu", "unknown option of phi 'f'"),
    ("favorpp sampler.blocks=1", "unknown option of sampler orthogonal 'blocks'"),
    ("favorpp m=0", "m=0: expected"), ("favorpp m=sixty", "m=sixty"), ("favorpp seed=1.5", "seed=1.5"),
    ("exact m=8", "attention=exact: does not use m=8"), ("exact sampler=iid", "does not use sampler"),
    ("exact sampler.lengths=chi", "does not use sampler"),
    ("window block=1.5", "attention.block=1.5: expected an integer"),
    ("oprf features=pos", "features=pos: not allowed with a feature map"),
    ("os.system", "attention._target_=posix.system: expected a module"),
    ("no.such.Place", "no.such.Place cannot be imported"),
    ("favorp features=os.system", "features=os.system: expected a FeatureMap"),
    ("favorp sampler=os.getcwd", "sampler=os.getcwd: expected a function of m, d"),
    ("crt_exp.features.OPRF features.scale=2", "unknown key 'features.scale'"),
    ("crt_exp.features.OPRF features.kernel=cosine", "kernel"),
])
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError, match=f"(?s){words}") as caught:
        Mechanism.parse(text)
    assert "task." not in str(caught.value)


def test_what_a_mechanism_is_is_not_asked_of_its_name():
    assert [name for name in choices("attention") if Mechanism.of(name).is_exact] == ["exact"]
    assert Mechanism.parse("crt_exp.attention.Exact").is_exact
    for name in choices("attention"):
        made = Mechanism.of(name)
        assert made.draws == (made.sampler is not None) == (made.m is not None)
        assert made.with_projections(8) == (Mechanism.of(name, m=8) if made.draws else made)


def test_swaps_take_the_same_text():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = swap_attention(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "favorp m=4 sampler=iid")
    assert model.layers[0].self_attn.swapped.m == 4
    with pytest.raises(ConfigError, match="m: given twice"):
        swap_attention(model, "favorp m=4", m=8)


def test_a_printed_label_can_be_given_back():
    texts = ["window block=8 first=2", "favorp m=4", "nearfar open=2", "favorpp sampler=iid"]
    assert list(mechanisms(texts)) == ["exact", *texts]


def test_what_stands_beside_the_text():
    assert Mechanism.parse("favorpp", m=8, seed=2) == Mechanism.of("favorpp", m=8, seed=2)
    assert Mechanism.parse("favorpp m=8", m=None) == Mechanism.of("favorpp", m=8)
    with pytest.raises(ConfigError, match="attention 'favorpp m=8': m: given twice"):
        Mechanism.parse("favorpp m=8", m=16)


@pytest.mark.parametrize("value", [None, True, False, 0, -3, 1e-05, 2.5, 1e22, "word", "elu+1", "true", "3", "", "a b",
                                   "1e3", "it's", 'say "a"', [1, 2], [], ["a", None, 2.5]], ids=repr)
def test_values_are_read_as_they_are_written(value):
    name, options = split_words(join_words("name", {"key": value}))
    assert name == "name" and options == {"key": value} and type(options["key"]) is type(value)
