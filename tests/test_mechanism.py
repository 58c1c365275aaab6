"""Names, text and saved records of an attention: each makes a working layer and is read to the same mechanism."""

import copy
import functools
import json
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import hostile
from torch import Tensor

from crt_exp import swap_attention
from crt_exp.attention import Window
from crt_exp.experiments.measure.advise import mechanisms
from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.runner.configuration import load_task, plain_config
from crt_exp.features import OPRF, PosRF, Sum
from crt_exp.mechanism import Mechanism
from crt_exp.registry import CONF, ConfigError, choices, json_object, own_names, read_yaml
from crt_exp.samplers import iid


def parsed(text, **given):
    """The mechanism, which is read from what it writes and from what it saves."""
    mechanism = Mechanism.parse(text, **given)
    assert Mechanism.parse(str(mechanism)) == mechanism, str(mechanism)
    saved = json.loads(json.dumps(mechanism.to_saved()))
    if saved["rebuilds"]:
        assert Mechanism.from_saved(saved, "run") == mechanism
    return mechanism


def encoder(layers=1):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


# ---- every name


@pytest.mark.filterwarnings("ignore:.*denominators are not positive")
@pytest.mark.parametrize("name", choices("attention"))
def test_every_attention_is_read_from_what_it_writes_and_works(name):
    made = parsed(name, seed=3)
    assert made == Mechanism.of(name, seed=3)
    assert str(made).split()[0] == name
    assert made.is_exact == (name == "exact")
    assert (made.sampler is None) == (made.m is None)
    actual = made.with_projections(8)
    expected = made
    if made.m is not None:
        expected = Mechanism.of(name, m=8, seed=3)
    assert actual == (expected)
    q = torch.randn(1, 2, 5, 8)
    actual = made.layer(2, 8, layer=3, causal=False)(q, q, q).shape
    assert actual == q.shape
    if name != "linformer":
        layer = made.layer(4, 8, kv_heads=2, causal=True)
        actual = layer(torch.randn(1, 4, 5, 8), q, q).shape
        assert actual == (
            1,
            4,
            5,
            8,
        )
    with pytest.raises(ValueError, match="q: d=8, expected d=4"):
        made.layer(2, 4)(q, q, q)
    with pytest.raises(ValueError, match="kv_heads=3: expected a divisor of heads=2"):
        made.layer(2, 8, kv_heads=3)


@pytest.mark.parametrize("name", choices("features"))
def test_every_map_alone_is_read_from_what_it_writes(name):
    made = Mechanism.of(features=name, m=12, sampler="simplex")
    assert Mechanism.parse(str(made)) == made
    assert made.map(own_kernel=True) == parsed(str(made)).map(own_kernel=True)
    if name not in choices("attention"):
        assert parsed(f"{name} m=12 sampler=simplex") == made


# ---- text


@pytest.mark.parametrize(
    "text, same_as",
    [
        (
            "favorpp m=64 features=geom redraw_every=7",
            {"m": 64, "features": "geom", "redraw_every": 7},
        ),
        ("favorpp sampler=hadamard sampler.blocks=1", {"sampler": "hadamard", "sampler.blocks": 1}),
        ("hrf_angular m=8 features.n=16", {"m": 8, "features.n": 16}),
        (
            "generalized kernel=elu+1 phi.kernel_epsilon=1e-05 normalize=false",
            {"kernel": "elu+1", "phi.kernel_epsilon": 1e-5, "normalize": False},
        ),
        ("nearfar preset=cheap open=16 exact_until=null", {"preset": "cheap", "open": 16}),
    ],
)
def test_options_are_those_of_python(text, same_as):
    actual = parsed(text)
    expected = Mechanism.of(text.split()[0], **same_as)
    assert actual == expected


def test_options_reach_the_layer_from_numpy_too():
    n = np.int64
    layer = Mechanism.of(
        "favorpp", m=n(32), sampler="simplex", features="geom", redraw_every=n(7), seed=n(5)
    ).layer(n(2), n(8), layer=n(1))
    same = parsed("favorpp m=32 sampler=simplex features=geom redraw_every=7 seed=5").layer(
        2, 8, layer=1
    )
    assert torch.equal(layer.omega, same.omega)
    assert type(layer.phi) is type(same.phi)
    assert layer.m == 32
    assert layer.redraw_every == 7
    assert layer.seed == 5
    assert layer.layer == 1
    actual = parsed("generalized kernel=tanh").layer(2, 8).phi.f
    assert actual == "tanh"
    actual = parsed("linformer rank=3").layer(2, 8).key_projection.shape
    assert actual == (3, 512)
    actual = parsed("hrf_angular m=4 features.n=3").map().width(4)
    assert actual == 4 * 4 * 6


@pytest.mark.parametrize(
    "typed, text",
    [
        (["attention=favorpp", "features.m=8", "sampler=iid"], "favorpp m=8 sampler=iid"),
        (
            ["attention=relu", "attention.phi.kernel_epsilon=0.5"],
            "relu m=256 phi.kernel_epsilon=0.5",
        ),
        (
            ["attention=favorp", "sampler.lengths=sqrt_d", "seed=2"],
            "favorp m=256 sampler.lengths=sqrt_d seed=2",
        ),
        (["features=angular", "features.n=5"], "angular m=256 features.n=5"),
    ],
)
def test_composed_mechanisms_survive_saving(typed, text):
    cfg = compose(typed)
    made = Mechanism.from_config(
        plain_config(cfg), {"attention": None, **cfg.hydra.runtime.choices}.get
    )
    assert str(made) == text
    assert parsed(text) == made
    assert Mechanism.from_saved(made.to_saved(), "run") == made


@dataclass(frozen=True)
class Shifted(PosRF):
    """A custom map."""

    scale: float = 1.0


class Narrow(Window):
    """A custom layer."""


def my_noise(m: int, d: int, generator, batch=()) -> Tensor:
    return iid(m, d, generator, batch)


HERE = __name__


def test_classes_by_their_path_are_read_from_the_user_and_never_from_a_file():
    made = parsed(f"{HERE}.Shifted m=8 features.scale=0.5 sampler={HERE}.my_noise")
    assert made.map() == Shifted(scale=0.5)
    assert made.sampler is my_noise
    features = Shifted(scale=0.5)
    expected = Mechanism.of(features=features, m=8, sampler=my_noise)
    assert made == expected
    assert parsed("favorp m=8 features=crt_exp.features.exponential.OPRF").map() == OPRF()
    layer = parsed(f"{HERE}.Narrow block=4").layer(2, 8, causal=True)
    assert isinstance(layer, Narrow)
    assert layer.block == 4
    assert not parsed(f"{HERE}.Narrow").to_saved()["rebuilds"]
    assert Mechanism.parse("crt_exp.attention.Exact").is_exact
    saved = Mechanism.of("favorpp", m=8).to_saved()
    cases = [
        {"name": f"{HERE}.Narrow"},
        {"features": f"{HERE}.Shifted"},
        {"sampler": f"{HERE}.my_noise"},
    ]
    for change in cases:
        with pytest.raises(ConfigError, match="unknown"):
            Mechanism.from_saved(saved | change, "a")


def test_custom_names_and_those_of_the_papers(tmp_path):
    folder = tmp_path / "attention"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        (CONF / "attention" / "favorpp.yaml").read_text() + "redraw_every: 5\n"
    )
    with own_names([tmp_path]):
        assert parsed("mine m=8").options["redraw_every"] == 5
    with pytest.raises(ConfigError, match="unknown attention 'mine'"):
        Mechanism.parse("mine m=8")
    for name, file in (
        ("Performer", "favorp"),
        ("favor+", "favorp"),
        ("FAVOR++", "favorpp"),
        ("favor#", "favorsharp"),
    ):
        actual = Mechanism.parse(f"{name} m=8")
        expected = Mechanism.of(file, m=8)
        assert actual == expected


def test_arguments_stand_beside_the_text():
    actual = Mechanism.parse("favorpp m=8", m=None)
    expected = Mechanism.of("favorpp", m=8)
    assert actual == expected
    with pytest.raises(ConfigError, match="attention 'favorpp m=8': m: given twice"):
        Mechanism.parse("favorpp m=8", m=16)
    texts = ["window block=8 first=2", "favorp m=4", "nearfar open=2", "favorpp sampler=iid"]
    assert list(mechanisms(texts)) == ["exact", *texts]  # labels of a table are text


@pytest.mark.parametrize(
    "layers, swapped",
    [
        (np.int64(0), [0]),
        ([np.int64(-1)], [2]),
        (np.array([0, 2]), [0, 2]),
    ],
    ids=str,
)
def test_swaps_take_text_and_layers_by_integers_of_numpy(layers, swapped):
    model = swap_attention(encoder(3), "favorp m=4 sampler=iid", layers=layers, seed=np.int64(3))
    actual = {}
    for i in range(3):
        if hasattr(model.layers[i].self_attn, "swapped"):
            actual[i] = model.layers[i].self_attn.swapped
    assert [*actual] == swapped
    for layer in actual.values():
        assert layer.m == 4
        assert layer.seed == 3


WRONG = [
    ("", "expected a name, then key=value, each key once"),
    (None, "attention None: expected a name"),
    ("window block=8 block=9", "each key once"),
    ("window block={a: 1}", "then key=value, each key once"),
    ("favour m=8", "attention 'favour m=8': unknown attention 'favour'; did you mean favor"),
    ("favorpp sampler=ortho", "unknown sampler 'ortho'; did you mean orthogonal"),
    ("favorpp name=exact", "unknown option of attention favorpp 'name'"),
    ("favorpp sampler.blocks=1", "unknown option of sampler orthogonal 'blocks'"),
    ("favorpp m=true", "m=true: expected"),
    ("favorpp seed=1.5", "seed=1.5"),
    ("exact m=8", "attention=exact: does not use m=8"),
    ("exact sampler.lengths=chi", "does not use sampler"),
    ("nearfar preset=best", "attention.preset=best: expected cheap, default or quality"),
    ("oprf features=pos", "features=pos: not allowed with a feature map"),
    ("os.system", "attention._target_=posix.system: expected a module"),
    ("no.such.Place", "no.such.Place cannot be imported"),
    ("favorp sampler=os.getcwd", "sampler=os.getcwd: expected a function of m, d"),
]


@pytest.mark.parametrize("text, words", WRONG)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError, match=f"(?s){words}") as caught:
        Mechanism.parse(text)
    assert "task." not in str(caught.value)


def test_objects_are_samplers_and_maps_without_options():
    cases = [
        ({"sampler": {"_target_": "os.getcwd"}}, "expected a name of conf/.* or an object"),
        ({"features": PosRF(), "features.A": -1}, "an object takes no options"),
    ]
    for given, words in cases:
        with pytest.raises(ConfigError, match=words):
            Mechanism.of("favorpp", **given)
    cases = [
        Mechanism.of(features=Sum(PosRF(), OPRF()), m=8),
        Mechanism.of("favorp", sampler=functools.partial(iid, dtype=None), m=8),
    ]
    for made in cases:
        with pytest.raises(ValueError):  # they have no text
            Mechanism.parse(str(made))


# ---- saved records: data, of which nothing is run, imported or expanded


def test_a_saved_mechanism_that_is_no_more_is_refused():
    saved = Mechanism.of("favorpp", m=8).to_saved()
    cases = [
        ({"name": "favorq"}, "attention cannot be restored: unknown attention .favorq."),
        ({"options": {"redraw": 3}}, "attention cannot be restored"),
        ({"m": 9}, "favorpp has other options in conf/"),
    ]
    for change, words in cases:
        with pytest.raises(ConfigError, match=f"task.init = a: .*{words}"):
            Mechanism.from_saved(saved | change, "task.init = a")


def test_a_hostile_attention_runs_nothing_and_is_one_line(tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    for name, change in hostile.changes(tmp_path):
        saved = copy.deepcopy(Mechanism.of("favorpp", m=8).to_saved())
        change(saved)
        start = time.perf_counter()
        with pytest.raises(ConfigError, match="^run = a: ") as caught:
            Mechanism.from_saved(saved, "run = a").layer(2, 4)
        assert not sprung.exists(), name
        assert time.perf_counter() - start < 1, name
        hostile.check_one_line(caught.value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)
)
FILES = {
    "deep JSON": (json_object, '{"a":' * 10**5, ""),
    "long number": (json_object, "1" * 10**5, ""),
    "no text": (json_object, b"\xff\xfe\xff", ""),
    "list in JSON": (json_object, "[1]", "expected a JSON object"),
    "bomb": (read_yaml, BOMB, "aliases are refused.*line 2"),
    "deep": (read_yaml, "[" * 2000, "recursion"),
    "huge": (read_yaml, "#" * (2**17 + 1), "at most 131072"),
    "python": (read_yaml, "a: !!python/object/apply:os.getcwd []\n", "not valid YAML.*line"),
}


@pytest.mark.parametrize("read, content, words", FILES.values(), ids=FILES)
def test_files_that_no_run_writes_are_one_line(read, content, words, tmp_path):
    file = tmp_path / "config"
    if isinstance(content, str):
        content = content.encode()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}.*{words}") as caught:
        read(file)
    hostile.check_one_line(caught.value)


@pytest.mark.parametrize(
    "task",
    [
        "_target_: os.system\n  command: touch {}",
        "_target_: [1]",
        "_target_: crt_exp.experiments.tasks.sequences.Recall\n  vocabulary: {{_target_: trap.call}}",
    ],
)
def test_a_hostile_task_runs_nothing(task, tmp_path, monkeypatch):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    (tmp_path / "config.yaml").write_text("task:\n  " + task.format(sprung) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_task(tmp_path)
    assert not sprung.exists()
    hostile.check_one_line(caught.value)
