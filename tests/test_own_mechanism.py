"""The attention and the map of docs/add-your-own.md, in every place that takes the name of a mechanism."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pages import section, write_recipes
from helpers.refusals import check_error
from torch import nn

from crt_exp import Mechanism, swap_attention
from crt_exp.attention import Baseline
from crt_exp.features import FeatureMap, Features
from crt_exp.features.base import ONE
from crt_exp.registry import ConfigError, choices, own_names


@pytest.fixture
def folder(tmp_path, monkeypatch, one_thread):
    """The working directory of a user, with both recipes."""
    monkeypatch.chdir(write_recipes(tmp_path, "A map", "An attention"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


class ClippedRF(FeatureMap):
    """Biased, without a variance."""

    def phi_q(self, x, noise, params=()):
        log_scale = noise.project(x).clamp(-3, 3) - x.square().sum(-1, keepdim=True)
        return Features(ONE, log_scale)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def test_the_command_line_takes_it(folder, typed):
    code, _, err = typed(
        "--config-dir=conf",
        "task=uci",
        "features=shifted",
        "features.share=0.5",
        "task.repeats=1",
        "task.sigmas=[0.3]",
        "logger=none",
    )
    assert code == 0, err


def test_python_takes_the_class(folder, capsys):
    (code,) = section("Use it everywhere", "python")
    exec(code, {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert "mine.attention.TopK k=4" in out
    assert "'mine.attention.TopK', 'ShiftedRF'" in out
    from mine.attention import TopK
    from mine.maps import ShiftedRF

    assert (
        Mechanism.of(TopK, k=4)
        == Mechanism.parse("mine.attention.TopK k=4")
        == Mechanism.parse(TopK, k=4)
    )
    actual = swap_attention(encoder(), TopK, k=3).layers[0].self_attn.swapped.k
    assert actual == 3
    made = Mechanism.of(ShiftedRF, m=8, **{"features.share": 0.5})
    actual = Mechanism.of(ShiftedRF(share=0.5), m=8)
    assert actual == made
    features = ShiftedRF(share=0.5)
    actual = Mechanism.of(features=features, m=8)
    assert actual == made
    actual = Mechanism.of("favorp", features=ShiftedRF, m=8).map()
    assert actual == ShiftedRF()
    with own_names(["conf"]):
        actual = Mechanism.of("topk", k=3).layer(2, 4).k
        assert actual == 3
    layer = Mechanism.of("favorp", features=ClippedRF(), m=64).layer(
        heads=2, d=8, causal=True
    )  # no variance
    assert layer(*torch.randn(3, 1, 2, 20, 8)).isfinite().all()
    with pytest.raises(ValueError, match="share=-1: expected a number >= 0"):
        ShiftedRF(share=-1)


def test_a_bad_value_names_the_option(folder, typed):
    cases = [
        ("topk kk=2", "unknown option of attention topk 'kk'; did you mean k"),
        ("mine.attention.TopK k=0", "attention.k=0: expected an integer >= 1"),
        ("mine.maps.ShiftedRF features.share=2", "features.share=2: expected a number >= 0"),
    ]
    for text, words in cases:
        with own_names(["conf"]), pytest.raises(ConfigError, match=words):
            Mechanism.parse(text)
    check_error(
        typed(
            "--config-dir=conf",
            "task=advise",
            "task.model=x",
            "task.text=y",
            "logger=none",
            "task.attentions=['topk k=0']",
        ),
        "attention.k=0: expected an integer >= 1",
    )


# ---- constructors


class Mean(Baseline):
    def attend(self, x, y, v, *, causal, key_mask):
        return v.mean(2, keepdim=True).expand(-1, -1, x.shape[2], -1)


class Handing(Mean):
    def __init__(self, *args, k=8, **options):
        super().__init__(*args, **options)
        self.k = k


class Below(Handing):
    def __init__(self, heads, d, *, more: bool = False, kernel="a", **options):
        super().__init__(heads, d, **options)
        self.more = more
        self.kernel = kernel


class Wanting(Mean):
    def __init__(self, heads, d, *, k: int, **options):
        super().__init__(heads, d)  # drops the options


class Plain(Mean):
    def __init__(self, heads, d, k=8):
        super().__init__(heads, d)


def test_constructors_that_hand_on_have_the_options_of_those_they_hand_to():
    layer = Mechanism.of(Below, k=3, more=True, kernel="b").layer(
        4, 8, causal=True, kv_heads=2, scaling=0.5, layer=1
    )
    assert layer.k == 3
    assert layer.more is True
    assert layer.kernel == "b"
    assert layer.causal is True
    assert layer.kv_heads == 2
    made = Mechanism.of(Handing, k=np.int64(3))
    assert str(made).endswith("Handing k=3")
    assert json.dumps(made.to_saved())
    assert Mechanism.parse(str(made)) == made
    assert str(Mechanism.of(Handing)) == f"{__name__}.Handing"
    assert made.layer(2, 4).k == 3


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: swap_attention(encoder(), Plain),
            "attention._target_=.*Plain: expected a module made of heads, d",
        ),
        (
            lambda: Mechanism.of(Wanting, k=1).layer(2, 4, causal=True),
            "Wanting: ignores causal=true",
        ),
        (lambda: Mechanism.of(Wanting), "attention.k=.*: expected an integer"),
        (
            lambda: Mechanism.of(Handing, seed=2, heads=3),
            "unknown option of attention .*Handing 'heads'",
        ),
        (lambda: Mechanism.of(Mean, m=8), "Mean: does not use m=8; remove it"),
        (
            lambda: Mechanism.of("favorp", features=Mean),
            "expected a name of conf/features or an object",
        ),
    ],
    ids=range(6),
)
def test_other_constructors_are_refused_in_a_line(make, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert len(str(caught.value).splitlines()) <= 2


# ---- names and folders


def test_a_name_is_no_path():
    for name in ("../sampler/iid", "base/random_features", "/etc/passwd", "f" * 5000):
        assert name not in choices("attention")
        assert name not in choices("features")
        with pytest.raises(ConfigError, match="unknown attention|cannot be imported"):
            Mechanism.of(name)


def test_a_name_that_is_taken_and_a_folder_that_does_not_exist_are_refused(folder, typed):
    """It would be read from conf/ without a warning."""
    (folder / "conf" / "features" / "oprf.yaml").write_text("_target_: mine.maps.ShiftedRF\n")
    with (
        pytest.raises(ConfigError, match="features/oprf.yaml: the name oprf exists in"),
        own_names(["conf"]),
    ):
        pass
    cases = [
        ("conf", "the name oprf exists"),
        ("nowhere", "nowhere: expected a folder"),
    ]
    for place, words in cases:
        check_error(
            typed(f"--config-dir={place}", "task=uci", "features=oprf", "logger=none"), words
        )


def test_an_option_that_its_file_leaves_to_the_user(folder):
    Path("conf/attention/wanting.yaml").write_text(
        f"_target_: {__name__}.Wanting\n_partial_: true\nk: ???\n"
    )
    with own_names(["conf"]):
        actual = Mechanism.of("wanting", k=2).options["k"]
        assert actual == 2
        with pytest.raises(ConfigError, match="attention.k=.*: expected an integer"):
            Mechanism.of("wanting")
