"""Values that do not fit an annotation: one line with the key, the value and what is expected."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pydantic import Field

from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.features import OPRF, PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.samplers import iid
from crt_exp.validation import (
    Complex,
    Count,
    Positive,
    Several,
    Whole,
    adapter,
    check,
    check_options,
    checked,
    describe,
    fits,
    join_words,
    parse_arguments,
    split_words,
    whole_number,
)


class Sizes(TypedDict):
    rank: Count


Share = Annotated[float, Field(gt=0, lt=1)]
WRONG = [
    (1.5, Count, "key=1.5: expected an integer >= 1"),
    (True, Whole, "key=true: expected an integer >= 0"),
    (float("nan"), float, "key=nan: expected a number"),
    (float("inf"), Positive, "key=inf: expected a number > 0"),
    (1, Share, "key=1: expected a number > 0 and < 1"),
    ([8, -2], Several[Count], "key=[8,-2]: expected a list of length >= 1 (each an integer >= 1)"),
    (
        [0.9],
        tuple[Share, Share],
        "key=[0.9]: expected a list of 2 entries (each a number > 0 and < 1)",
    ),
    (
        "standart",
        Literal["standard", "none"],
        "key=standart: expected standard or none; did you mean standard?",
    ),
    (
        3,
        Annotated[int, Field(ge=2, multiple_of=2)],
        "key=3: expected an integer >= 2 and that is a multiple of 2",
    ),
    ("a", Complex | None, "key=a: expected a number such as 0.1+0.2j or null"),
    ({"rank": 0}, Sizes, "key.rank=0: expected an integer >= 1"),
    ({"rnk": 1}, Sizes, "unknown key 'key.rnk'; did you mean key.rank?"),
    ({}, Sizes, "key.rank: missing, expected an integer >= 1"),
    ("???", str, 'key="???": expected a string'),
]


@pytest.mark.parametrize("value, hint, words", WRONG, ids=lambda each: str(each)[:20])
def test_what_does_not_fit_is_one_line(value, hint, words):
    with pytest.raises(ConfigError) as error:
        check("key", value, hint)
    assert str(error.value).splitlines()[0] == words


def test_what_fits():
    cases = [
        (1, float),
        (np.int64(3), Count),
        (np.float32(0.5), Share),
        ([1, 2], tuple[int, int]),
        ((1, 2), Sequence[int]),
        (OmegaConf.create([1, 2]), Several[Count]),
        (OmegaConf.create({"rank": 1}), dict[str, Any]),
        (None, Count | None),
        ("0.1+0.2j", Complex | None),
        (PosRF(), PosRF),
        (torch.float32, torch.dtype),
    ]
    for value, hint in cases:
        assert fits(value, hint), (value, hint)


def test_options_of_inherited_constructors():
    class Base:
        def __init__(self, size: Count, *, kind: Literal["a", "b"] = "a"):
            self.size = size

    @checked("task")
    class Own(Base):
        def __init__(self, more: bool, **options):
            super().__init__(**options)

    check_options("task", Own, {"more": True, "size": 3})
    with pytest.raises(ConfigError, match="task.more=1: expected true or false"):
        Own(1, size=3)
    with pytest.raises(ConfigError, match="unknown key 'task.knd'; did you mean task.kind"):
        check_options("task", Own, {"more": True, "knd": "a"})


def test_arguments_of_a_command():
    @dataclass
    class Options:
        run: str
        n: Count = 1
        top: Share | None = None

    actual = parse_arguments(Options, ["run=1e3", "n=3", "top=1e-1"])
    expected = Options("1e3", 3, 0.1)
    assert actual == expected
    cases = [
        (["n=3"], "run: missing, expected a string"),
        (["run=a", "n=x"], "n=x: expected an integer"),
        (["run=a", "run=b"], "run=b: expected key=value, each key once"),
        (["run"], "run: expected key=value"),
        (["rum=a"], "unknown key 'rum'; did you mean run"),
    ]
    for words, message in cases:
        with pytest.raises(ConfigError, match=message):
            parse_arguments(Options, words)
    assert describe(Share | None) == "a number > 0 and < 1 or null"


@pytest.mark.parametrize(
    "words, make",
    [
        ("A=0.125: expected a number < 0.125 or null", lambda: OPRF(A=0.125)),
        ("m=0: expected an integer >= 1", lambda: iid(0, 4, torch.Generator())),
        (
            "attention.fit_steps=0: expected an integer >= 1",
            lambda: RandomFeatureAttention(PosRF(), iid, 2, 1, 4, fit_steps=0),
        ),
        (
            "features.A=0.125: expected a number < 0.125",
            lambda: Mechanism.of("oprf", **{"features.A": 0.125}),
        ),
    ],
)
def test_maps_samplers_and_layers_check_their_arguments(words, make):
    with pytest.raises(ConfigError, match=words):
        make()


def test_checks_of_integers_share_one_adapter():
    for least in (None, 0, 1, 2):
        whole_number(5, "m", least)
    known = adapter.cache_info().currsize
    for _ in range(20):
        for least in (None, 0, 1, 2):
            whole_number(5, "m", least)
        with pytest.raises(ConfigError, match="m=0: expected an integer >= 1"):
            whole_number(0, "m")
    assert adapter.cache_info().currsize == known


@pytest.mark.parametrize("name", ["favorp", "favorpp", "hrf_gaussian", "reformer", "linformer"])
def test_redraws_store_nothing(name):
    layer = Mechanism.of(name, redraw_every=1).layer(2, 8).train()
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    for _ in range(2):
        layer(q, k, v)
    known = adapter.cache_info().currsize
    for _ in range(5):
        layer(q, k, v)
    assert int(layer.draws) == 6
    assert adapter.cache_info().currsize == known


def test_annotations_that_are_used_once_are_forgotten():
    assert adapter.cache_info().maxsize is not None


def test_values_are_read_as_they_are_written():
    cases = [
        None,
        True,
        0,
        -3,
        1e-05,
        2.5,
        1e22,
        "word",
        "elu+1",
        "true",
        "3",
        "",
        "a b",
        "1e3",
        "it's",
        'say "a"',
        [1, 2],
        [],
        ["a", None, 2.5],
    ]
    for value in cases:
        name, options = split_words(join_words("name", {"key": value}))
        assert name == "name", value
        assert options == {"key": value}, value
        assert type(options["key"]) is type(value), value
