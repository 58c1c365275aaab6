"""Arguments that do not fit: a ValueError of what is made, a ConfigError of a configuration, in the same words."""

import pytest
import torch

from crt_exp.attention import Window
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.config import ConfigError
from crt_exp.features import OPRF, GeomRF, PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar.layer import NearFar
from crt_exp.samplers import givens, iid

ARGUMENTS = {
    "A = 0.125: it takes a number below 0.125": lambda: OPRF(A=0.125),
    "p = 1.0: it takes a number above 0 and below 1": lambda: GeomRF(p=1.0),
    "m = 0: .* a whole number of at least 1": lambda: iid(0, 4, torch.Generator()),
    "rotations = -1: .* a whole number of at least 0": lambda: givens(2, 4, torch.Generator(), rotations=-1),
    "attention.fit_steps = 0: it takes a whole number of at least 1":
        lambda: RandomFeatureAttention(PosRF(), iid, 2, 1, 4, fit_steps=0),
    "attention.block = 0: it takes a whole number of at least 1": lambda: Window(1, 4, block=0),
    "attention.heavy = -1: it takes a whole number of at least 0": lambda: NearFar(1, 4, heavy=-1),
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_the_core_refuses_arguments_by_a_value_error(words):
    with pytest.raises(ValueError, match=words) as error:
        ARGUMENTS[words]()
    assert type(error.value) is ValueError and "\n" not in str(error.value)


@pytest.mark.parametrize("given, words", [
    (("oprf", {"features.A": 0.125}), "A = 0.125: it takes a number below 0.125"),
    (("window", {"block": 0}), "attention.block = 0: it takes a whole number of at least 1"),
    (("nearfar", {"heavy": -1}), "attention.heavy = -1: it takes a whole number of at least 0")])
def test_a_configuration_that_says_the_same_is_a_config_error(given, words):
    name, options = given
    with pytest.raises(ConfigError, match=words) as error:
        Mechanism._read(name, dict(options))
    assert "\n" not in str(error.value)
